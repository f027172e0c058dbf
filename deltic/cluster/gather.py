"""Answers of all replicas as one: metrics, lists of requests, and an answer that one of them has. No Ray."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from deltic.server.body import read_json
from deltic.server.http import dump

_SAMPLE: Final = re.compile(r"(\w+)(?:{(.*)})? (\S+)")
_MOST_VALUES: Final = 1 << 20


def merged_metrics(pages: Mapping[str, bytes]) -> bytes:
    """Returns the pages of all replicas as one, with the replica in a label of each sample."""
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
    """Returns lists of objects as one."""
    data = [each for page in pages.values() for each in read_json(page, _MOST_VALUES)["data"]]
    return dump({"object": "list", "data": data})


def first_found(pages: Mapping[str, bytes]) -> bytes:
    return next(iter(pages.values()))
