"""JSON values in Python's spelling are read as `ast.literal_eval` reads them, but bounded and beside other threads."""

from __future__ import annotations

import ast
import warnings
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import examples

from deltic.chat.tool_arguments import loads

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(codec="utf-8") | st.sampled_from("'\"\\\n\t")),
    lambda inner: st.lists(inner, max_size=3) | st.lists(inner, max_size=3).map(tuple)
    | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=12,
)
CHARACTERS = [*"[](){},:'\"\\ 01e.-+_xTN\n\r\tabu", ""]
EDITS = st.lists(st.tuples(st.integers(0, 200), st.sampled_from(CHARACTERS)), max_size=3)


def expected(text: str) -> Any:
    """What `ast.literal_eval` makes of it, in JSON's types; ValueError for what it or JSON does not have."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return in_json_types(ast.literal_eval(text))
        except (SyntaxError, TypeError, MemoryError, RecursionError) as error:
            raise ValueError from error


def in_json_types(value: Any) -> Any:
    if isinstance(value, dict):
        if all(isinstance(key, str) for key in value):
            return {key: in_json_types(item) for key, item in value.items()}
    elif isinstance(value, list | tuple):
        return [in_json_types(item) for item in value]
    elif value is None or isinstance(value, str | int) or (isinstance(value, float) and abs(value) < float("inf")):
        return value
    raise ValueError


@given(VALUES)
@settings(deadline=None, max_examples=examples(160))
def test_python_literals_are_read(value: Any) -> None:
    assert repr(loads(repr(value))) == repr(expected(repr(value)))


@given(VALUES, EDITS)
@settings(deadline=None, max_examples=examples(240))
def test_edited_literals_agree_with_literal_eval(value: Any, edits: list[tuple[int, str]]) -> None:
    text = repr(value)
    for place, character in edits:
        place %= len(text) + 1
        text = text[:place] + character + text[place + (not character):]
    try:
        found = loads(text)
    except ValueError:
        return
    with suppress(ValueError):  # it may be JSON
        assert "(" in text or repr(found) == repr(expected(text.strip()))


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("()", []), ("(1,)", [1]), ("[1, 2,]", [1, 2]), ("{'a': (),}", {"a": []}), ("([('a',)],)", [[["a"]]]),
        (r"'\x41\u00e9\U0001f600\101\n\
'", "A\u00e9\U0001f600A\n"), (" [ ] ", []), ("-0.5e1", -5.0), ("[True,\n None]", [True, None]),
        ('"it\'s"', "it's"), (r"'it\'s'", "it's"), ("{'a': 1, 'a': 2}", {"a": 2}),
    ],
)
def test_spellings(text: str, value: Any) -> None:
    assert loads(text) == expected(text.strip()) == value


@pytest.mark.parametrize(
    "text",
    ["", " ", "[", "]", "[,]", "(,)", "[1 2]", "{1}", "{1: 2}", "{'a'}", "{'a': }", "{'a' 1}", "{: 1}", "b'a'",
     "01", "1x", "1_", "Truex", "1e999", "'a", "'\\'", "'\n'", "'\\N{DASH}'", "'\\x4'", "'\\u123'",
     "1j", "nan", "a", "f(1)",
     "[1] [2]", "[1],", "[*a]", "{**a}", "1 + 2", "--1", "9" * 5000, "[" * 1000 + "]" * 1000],
)
def test_invalid_literals_are_refused(text: str) -> None:
    with pytest.raises(ValueError):
        loads(text)


@pytest.mark.parametrize(
    "text",
    ["'" + "a" * 70_000 + "'", "{'a': 1, 'b': '" + "x" * 70_000 + "'}", "[" + "[]," * 400_000 + "1]",
     "[" * 200 + "]" * 200,
     "[" * 100_000, "9" * 5000],
)
def test_long_or_deep_literals_are_refused(text: str) -> None:
    with pytest.raises(ValueError):
        loads(text)


def test_long_json_is_read() -> None:
    assert loads('{"a": "' + "x" * 1_000_000 + '"}') == {"a": "x" * 1_000_000}
