"""Tool calls: both forms, types from the schema, and never an exception."""

from __future__ import annotations

import ast
import json
import warnings
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import examples
from test_chat_support import read_calls

from deltic.chat.tool_arguments import coerce, dumps, loads
from deltic.chat.tools import tool_schemas

PROPERTIES = {
    "text": {"type": "string"},
    "count": {"type": "integer"},
    "ratio": {"type": "number"},
    "flag": {"type": "boolean"},
    "data": {"type": "object"},
    "items": {"type": "array"},
    "maybe": {"type": ["integer", "null"]},
    "either": {"anyOf": [{"type": "array"}, {"type": "string"}]},
    "choice": {"enum": [1, 2]},
    "point": {"$ref": "#/$defs/Point"},
    "odd": {"type": 7, "enum": "x", "anyOf": 3},
    "circular": {"$ref": "#/properties/circular"},
}
SCHEMA = {"type": "object", "properties": PROPERTIES, "$defs": {"Point": {"properties": {"x": {}}}}}
SCHEMAS = tool_schemas([{"type": "function", "function": {"name": "f", "parameters": SCHEMA}}])


def body(*parameters: tuple[str, str], name: str = "f") -> str:
    inner = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in parameters)
    return f"\n<function={name}>\n{inner}</function>\n"


def calls(text: str) -> list[tuple[str, Any]]:
    return [(name, json.loads(arguments)) for name, arguments in read_calls(text, SCHEMAS)]


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("text", "5", "5"),
        ("text", "True", "True"),
        ("text", '{"a": 1}', '{"a": 1}'),
        ("text", "", ""),
        ("text", "two\nlines\n", "two\nlines\n"),
        ("text", "  kept  ", "  kept  "),
        ("text", "null", "null"),
        ("count", "5", 5),
        ("count", "5.0", 5),
        ("count", "-3", -3),
        ("count", "5.5", "5.5"),
        ("count", "many", "many"),
        ("count", "true", "true"),
        ("count", "9" * 5000, "9" * 5000),
        ("count", "1" * 400, int("1" * 400)),
        ("ratio", "1.5", 1.5),
        ("ratio", "2", 2),
        ("ratio", "1e3", 1000.0),
        ("ratio", "1e999", "1e999"),
        ("ratio", "NaN", "NaN"),
        ("flag", "true", True),
        ("flag", "True", True),
        ("flag", "False", False),
        ("flag", "yes", "yes"),
        ("data", '{"a": [1, null]}', {"a": [1, None]}),
        ("data", "{'a': True, 'b': None}", {"a": True, "b": None}),
        ("data", "[1]", "[1]"),
        ("data", "{1, 2}", "{1, 2}"),
        ("data", "{1: 2}", "{1: 2}"),
        ("data", "", ""),
        ("items", "[1, 'a']", [1, "a"]),
        ("items", "(1, 2)", "(1, 2)"),
        ("items", "[" * 100_000, "[" * 100_000),
        ("maybe", "None", None),
        ("maybe", "null", None),
        ("maybe", "4", 4),
        ("either", "[1]", [1]),
        ("either", "[x", "[x"),
        ("choice", "2", 2),
        ("point", '{"x": 1}', {"x": 1}),
        ("odd", "1", "1"),
        ("circular", "1", "1"),
        ("unknown", "1", "1"),
    ],
)
def test_types_come_from_the_schema(key: str, text: str, value: Any) -> None:
    assert calls(body((key, text))) == [("f", {key: value})]


@pytest.mark.parametrize(
    ("value", "schema", "expected"),
    [
        ({"a": 1}, {"type": "string"}, '{"a": 1}'),
        ([1], {"type": "string"}, "[1]"),
        (5, {"type": "string"}, "5"),
        ("5", {"type": "integer"}, 5),
        (None, {"type": "string"}, None),
        (5, {"type": "integer"}, 5),
        ({"a": 1}, True, {"a": 1}),
        ([1], {}, [1]),
        ("null", {"type": "null"}, None),
    ],
)
def test_values_of_the_json_form_are_typed_too(value: Any, schema: Any, expected: Any) -> None:
    assert coerce(value, schema) == expected


def test_several_parameters_keep_their_order() -> None:
    arguments = read_calls(body(("text", "é"), ("count", "1")), SCHEMAS)[0][1]
    assert arguments == '{"text": "é", "count": 1}'


def test_a_call_without_parameters_or_schema() -> None:
    assert calls(body()) == [("f", {})]
    assert calls(body(("a", "1"), name="unheard.of")) == [("unheard.of", {"a": "1"})]


def test_several_functions_in_one_body() -> None:
    assert calls(body(("count", "1")) + body(("count", "2"))) == [("f", {"count": 1}), ("f", {"count": 2})]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<function=f><parameter=count>5</parameter></function>", {"count": 5}),
        ("<function=f>\n<parameter=count>\n5\n</function>", {"count": 5}),
        (
            "<function=f>\n<parameter=count>\n5\n<parameter=text>\na\n</parameter>\n</function>",
            {"count": 5, "text": "a"},
        ),
        ("<function=f>\n<parameter=text>\nunfinished", {"text": "unfinished"}),
        ("<function=f>\n<parameter=text", {}),
        (
            "<function=f>\n<parameter=text>\na</parameter>b\n</parameter>\n</function>",
            {"text": "a</parameter>b"},
        ),
        (
            "<function=f>\n<parameter=text>\na</function>b\n</parameter>\n</function>",
            {"text": "a</function>b"},
        ),
        ('<function="f">\n<parameter="text">\na\n</parameter>\n</function>', {"text": "a"}),
        ("say: <function=f>\n</function>", {}),
        ('{"name": "f", "arguments": {"count": "5"}}', {"count": 5}),
        ('{"name": "f", "arguments": "{\\"count\\": 5}"}', {"count": 5}),
        ('{"name": "f", "parameters": {"text": "a"}}', {"text": "a"}),
        ('{"name": "f"}', {}),
        ('{"name": "f", "arguments": ""}', {}),
        ("{'name': 'f', 'arguments': {'flag': True}}", {"flag": True}),
    ],
)
def test_sloppy_calls_are_read(text: str, expected: dict[str, Any]) -> None:
    assert calls(text) == [("f", expected)]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "f(1)",
        "{",
        '{"name": 5}',
        '{"name": ""}',
        '{"name": "f", "arguments": [1]}',
        "<function=>",
        "<function=\n>",
        '{"name": "f", "arguments": "nonsense"}',
        "[]",
        "null",
    ],
)
def test_text_without_call(text: str) -> None:
    assert read_calls(text) == []


@pytest.mark.parametrize(
    "tool",
    [
        5,
        {},
        {"function": 3},
        {"function": {"name": "f", "parameters": "x"}},
        {"name": "f", "parameters": {"properties": [1]}},
        {"name": "f", "parameters": {"properties": {"count": "x"}}},
    ],
)
def test_odd_tools_have_no_schema(tool: Any) -> None:
    assert read_calls(body(("count", "1")), tool_schemas([tool])) == [("f", '{"count": "1"}')]


def test_lone_surrogates_round_trip() -> None:
    [(name, arguments)] = read_calls('{"name": "\\ud800", "arguments": {"a": "\\udfff"}}')
    (name + arguments).encode()
    assert json.loads(arguments) == {"a": "\ufffd"}


ODD = st.sampled_from(
    [
        "<function=f>",
        "<function=",
        "</function>",
        "<parameter=count>",
        "<parameter=data>",
        "</parameter>",
        "\n",
        "5",
        "{",
        "}",
        '"name"',
        ":",
        '"f"',
        "[",
        "<",
        ">",
        "None",
        "\\",
        "é",
        '"arguments"',
        ",",
    ]
)


@given(st.one_of(st.lists(ODD, max_size=25).map("".join), st.text(max_size=30)))
@settings(deadline=None, max_examples=examples(600))
def test_random_calls_raise_nothing(text: str) -> None:
    assert all(name and isinstance(json.loads(arguments), dict) for name, arguments in read_calls(text, SCHEMAS))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(JSON)
@settings(deadline=None, max_examples=examples(300))
def test_json_and_python_spellings_are_read_alike(value: Any) -> None:
    assert loads(dumps(value)) == value
    assert loads(repr(value)) == value


@given(
    st.text().filter(lambda text: "<" not in text),
    st.integers(),
    st.booleans(),
    st.dictionaries(st.text(), st.integers()),
)
@settings(deadline=None, max_examples=examples(200))
def test_rendered_arguments_come_back(text: str, count: int, flag: bool, data: dict[str, int]) -> None:
    arguments = {"text": text, "count": count, "flag": flag, "data": data}
    rendered = [
        (key, value if isinstance(value, str) else dumps(value) if isinstance(value, dict) else str(value))
        for key, value in arguments.items()
    ]
    assert calls(body(*rendered)) == [("f", arguments)]


def test_linear_in_the_size_of_the_text() -> None:
    for text in (
        "<function=f>" + "<parameter=a>" * 20_000,
        "<function=" + " " * 100_000,
        "<function=" * 20_000,
        "<function=f><parameter=a>" + "</parameter> " * 20_000 + "x",
        "<function=f><parameter=a>" + "\n" * 100_000,
    ):
        read_calls(text)


# Python literals


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
