"""The public JSON-Schema-Test-Suite: a schema that is not refused lets through what is valid, and nothing else.

The suite comes with the source distribution of the package jsonschema, which is fetched for the test.
"""

from __future__ import annotations

import importlib.metadata
import json
import re
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from itertools import islice, permutations, product
from pathlib import Path
from typing import Any

import pytest
from test_server_harness import tiny

from deltic.chat.response_format import JsonSchema
from deltic.chat.structured import Grammar, Grammars
from deltic.errors import RequestError

PAGE = Path(__file__).parents[1] / "docs" / "server.md"
ROW = re.compile(r"\| (all|some|none) of the suite's schemas enforced \| (.*) \|")
NO_KEYWORDS = {"anchor", "boolean_schema", "content", "default", "infinite-loop-detection", "vocabulary", "refRemote"}
EXCEPTIONS = {"additionalProperties": 1, "format": 10, "vocabulary": 1}
"""Instances that are judged otherwise: keys that match a pattern of other letters than ASCII are refused where others
are not allowed; formats are enforced, and the suite takes them for notes; a metaschema that switches keywords off is
not looked at."""
_MOST_SPELLINGS = 200


pytestmark = pytest.mark.slow


@dataclass
class Keyword:
    """What became of a keyword's schemas and of their instances."""

    enforced: int = 0
    refused: int = 0
    right: int = 0
    wrong: list[str] = field(default_factory=list)


@pytest.fixture(scope="module")
def suite(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The tests of draft 2020-12, by keyword."""
    folder = tmp_path_factory.mktemp("suite")
    package = "jsonschema==" + importlib.metadata.version("jsonschema")
    subprocess.run([sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps",
                    "--no-binary", "jsonschema", "--dest", str(folder), package], check=True, timeout=300)
    found: dict[str, Any] = {}
    with tarfile.open(next(folder.glob("*.tar.gz"))) as packed:
        for member in packed:
            place = re.fullmatch(r"[^/]+/json/tests/draft2020-12/(\w[\w-]*)\.json", member.name)
            if place and (file := packed.extractfile(member)):
                found[place[1]] = json.load(file)
    return found


@cache
def grammars() -> Grammars:
    return Grammars(tiny().chat_processor.tokenizer)


def spellings(value: Any) -> Iterator[str]:
    """Ways to write a value: members in any order, whole numbers as integers, with and without spaces."""
    if isinstance(value, dict):
        members = [[f"{json.dumps(key)}:{text}" for text in islice(spellings(inner), 6)]
                   for key, inner in value.items()]
        for order in permutations(members):
            for chosen in product(*order):
                yield "{" + ",".join(chosen) + "}"
    elif isinstance(value, list):
        for chosen in product(*(list(islice(spellings(inner), 6)) for inner in value)):
            yield "[" + ",".join(chosen) + "]"
    else:
        yield json.dumps(value, ensure_ascii=False)
        yield json.dumps(value)
        if isinstance(value, float) and value.is_integer():
            yield str(int(value))


def accepts(grammar: Grammar, text: str) -> bool:
    matcher = grammar.matcher()
    tokens = tiny().chat_processor.tokenizer.encode(text, parse_special=False)
    return bool(matcher.consume_tokens(tokens) and matcher.is_accepting())


def tried(suite: dict[str, Any], strict: bool) -> dict[str, Keyword]:
    found: dict[str, Keyword] = {}
    for name, groups in suite.items():
        keyword = found.setdefault(name, Keyword())
        for group in groups:
            try:
                wanted = JsonSchema(group["schema"], strict)
                pending = grammars().of(wanted)
                pending.compile()
                grammar = pending.grammar
            except RequestError:
                keyword.refused += 1
                continue
            keyword.enforced += 1
            for test in group["tests"]:
                passes = any(accepts(grammar, text) for text in islice(spellings(test["data"]), _MOST_SPELLINGS))
                if passes == test["valid"]:
                    keyword.right += 1
                else:
                    kind = "valid, refused" if test["valid"] else "invalid, let through"
                    keyword.wrong.append(f"{kind}: {group['description']}: {test['description']}")
    return found


def test_strict_schemas_let_through_what_is_valid_and_nothing_else(suite: dict[str, Any]) -> None:
    found = tried(suite, True)
    judged = sum(keyword.right for keyword in found.values())
    assert judged > 500 and sum(keyword.enforced for keyword in found.values()) > 150
    wrong = {name: keyword.wrong for name, keyword in found.items() if keyword.wrong}
    assert {name: len(cases) for name, cases in wrong.items()} == EXCEPTIONS, wrong
    assert all(case.startswith("valid, refused") for cases in wrong.values() for case in cases)
    told = {kind: set(re.findall(r"`([\w-]+)`", names)) for kind, names in ROW.findall(
        PAGE.read_text(encoding="utf-8"))}
    known = {name: keyword for name, keyword in found.items() if name not in NO_KEYWORDS}
    assert told == {"all": {name for name, keyword in known.items() if not keyword.refused},
                    "some": {name for name, keyword in known.items() if keyword.refused and keyword.enforced},
                    "none": {name for name, keyword in known.items() if not keyword.enforced}}


def test_other_schemas_let_through_what_is_valid(suite: dict[str, Any]) -> None:
    """Keywords that cannot be enforced are left to the model."""
    found = tried(suite, False)
    wrong = {name: [case for case in keyword.wrong if case.startswith("valid")] for name, keyword in found.items()}
    assert {name: len(cases) for name, cases in wrong.items() if cases} == EXCEPTIONS, wrong
    assert sum(keyword.right for keyword in found.values()) > 700
