"""Merges the answers of all replicas: metrics, lists of requests, and an answer that only one replica has. No Ray."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from deltic.server.body import read_json
from deltic.server.http import dump

_SAMPLE: Final = re.compile(r"(\w+)(?:{(.*)})? (\S+)")
_MOST_VALUES: Final = 1 << 20


def merged_metrics(pages: Mapping[str, bytes]) -> bytes:
    """Returns the metrics pages of all replicas as one page. Each sample has a label with its replica."""
    heads: dict[str, list[str]] = {}
    samples: dict[str, list[str]] = {}
    for replica, page in pages.items():
        family = ""
        for line in page.decode().splitlines():
            if line.startswith("# HELP "):
                family = line.split(" ", 3)[2]
                heads.setdefault(family, [])
            if line.startswith("#"):
                if line not in heads[family] and len(heads[family]) < 2:
                    heads[family].append(line)
            elif found := _SAMPLE.fullmatch(line):
                labels = ",".join(filter(None, (f'replica="{replica}"', found[2])))
                samples.setdefault(family, []).append(f"{found[1]}{{{labels}}} {found[3]}")
    lines = [line for family, own in heads.items() for line in (*own, *samples.get(family, ()))]
    return "".join(f"{line}\n" for line in lines).encode()


def merged_lists(pages: Mapping[str, bytes]) -> bytes:
    """Returns the lists of objects of all replicas as one list."""
    data = [each for page in pages.values() for each in read_json(page, _MOST_VALUES)["data"]]
    return dump({"object": "list", "data": data})


def first_found(pages: Mapping[str, bytes]) -> bytes:
    return next(iter(pages.values()))
