"""Every row of the tables of bad inputs, refusals and limits in docs/server.md is true."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import fields as fields_of
from pathlib import Path
from typing import Any

import pytest
from test_server_harness import USER, Served, each, serving, tiny

from deltic.config import Limits

PAGE = Path(__file__).parent.parent / "docs" / "server.md"
ASKED: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": USER, "max_tokens": 2}, "/v1/completions": {"prompt": "x", "max_tokens": 2},
    "/v1/responses": {"input": "x"}, "/v1/messages": {"messages": USER, "max_tokens": 2},
    "/tokenize": {}, "/detokenize": {}}
"""What the rows add to."""
ROW = re.compile(r"\| `(/\S+)` \| `(\{.*\})` \| (\d+) \| (.*) \|")
ROWS = [match.groups() for match in map(ROW.fullmatch, PAGE.read_text(encoding="utf-8").splitlines()) if match]

REFUSAL = re.compile(r"\| `(GET|POST|DELETE) (/\S+)` \| `(\{.*\})` \| (\d+) \| (.*) \|")
REFUSALS = [match.groups() for match in map(REFUSAL.fullmatch, PAGE.read_text(encoding="utf-8").splitlines()) if match]


@pytest.fixture(scope="module")
def locked() -> Iterator[Served]:
    with serving(tiny(), api_keys={"secret": "me"}, allowed_hosts=["localhost"]) as running:
        running.http.headers["x-api-key"] = "secret"
        yield running


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving(tiny()) as running:
        yield running


def test_page_has_rows_for_all_paths() -> None:
    assert len(ROWS) >= 60 and {row[0] for row in ROWS} == set(ASKED)


@each(("path", "fields", "status", "said"), ROWS)
def test_rows_of_bad_inputs(served: Served, path: str, fields: str, status: str, said: str) -> None:
    response = served.http.post(path, content=json.dumps(ASKED[path] | json.loads(fields)))
    assert (response.status_code, response.json()["error"]["message"].replace("|", "/")) == (int(status), said)


def test_page_has_rows_for_all_statuses() -> None:
    assert {row[3] for row in REFUSALS} == {"401", "403", "404", "405", "415"}


@each(("method", "path", "headers", "status", "said"), REFUSALS)
def test_rows_of_refusals(locked: Served, method: str, path: str, headers: str, status: str, said: str) -> None:
    response = locked.http.request(method, path, headers=json.loads(headers))
    assert (response.status_code, response.json()["error"]["message"]) == (int(status), said)


def test_table_of_limits_has_all_defaults() -> None:
    section = PAGE.read_text(encoding="utf-8").partition("\n## Limits\n")[2]
    found = dict(re.findall(r"^\| `(\w+)` \| ([^|]+?) \|", section, re.MULTILINE))
    assert {name: None if said in ("none", "the context") else float(said.replace(",", ""))
            for name, said in found.items()} == {limit.name: limit.default for limit in fields_of(Limits)}
