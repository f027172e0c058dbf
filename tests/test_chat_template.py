"""Chat templates are bounded in time and memory, take whatever names clients give, and render as jinja renders."""

from __future__ import annotations

import json
import keyword
import re
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jinja2.sandbox import ImmutableSandboxedEnvironment
from support import examples
from test_chat_support import QWEN_LIKE

from deltic.chat.messages import normalise_messages
from deltic.chat.template import ChatTemplate
from deltic.chat.tokenizer import Tokenizer
from deltic.errors import RequestError, TemplateError

TINY = Path(__file__).parents[1] / "deltic" / "models" / "tiny"
TINY_TEMPLATE = Tokenizer.from_directory(TINY).chat_template or ""
MESSAGES = normalise_messages([{"role": "user", "content": "a"}] * 400)
DOUBLING = "{% set ns = namespace(x=FIRST) %}{% for i in range(60) %}{% set ns.x = NEXT %}{% endfor %}{{ ns.x }}"


def doubling(first: str, following: str) -> str:
    return DOUBLING.replace("FIRST", first).replace("NEXT", following)


LARGE = [
    "{{ 'x'.center(1000000000) }}", "{{ 'x'.ljust(1000000000) }}", "{{ 'x'.rjust(1000000000) }}",
    "{{ 'x'.zfill(1000000000) }}", "{{ '\t'.expandtabs(tabsize=1000000000) }}", "{{ 'x' * 1000000000 }}",
    "{{ '%1000000000d' % 1 }}", "{{ '%*d' % (1000000000, 1) }}", "{{ '%.1000000000f' % 1 }}",
    "{{ '%(a(b))1000000000d' % {'a(b)': 1} }}", "{{ '{:1000000000}'.format(1) }}",
    "{{ '{:{}}'.format(1, 1000000000) }}", "{{ '{a:1000000000}'.format_map({'a': 1}) }}",
    "{{ ('{0}' * 100000).format('x' * 1000000) }}", "{{ ('%(a)s' * 100000) % {'a': 'x' * 1000000} }}",
    "{{ '%1000000000d'|format(1) }}", "{{ 'x'|center(1000000000) }}", "{{ 'a\nb'|indent(1000000000) }}",
    "{{ ('\n' * 1000000)|indent(1000) }}", "{{ [1]|batch(1000000000, 'x')|list|length }}",
    "{{ 1.5|round(1000000000, 'ceil') }}", "{{ {'a': 1}|tojson(indent=1000000000) }}",
    "{{ ([[1]] * 100000)|tojson(indent='x' * 100000) }}", "{{ ([1] * 100000)|tojson(separators=('x' * 100000, ':')) }}",
    "{{ ('a' * 1000000).replace('a', 'b' * 1000000) }}", "{{ ('a' * 1000000)|replace('a', 'b' * 1000000) }}",
    "{{ ('b' * 1000000).join(['a'] * 100000) }}", "{{ (['a'] * 100000)|join('b' * 1000000) }}",
    "{{ range(100000)|join('b' * 1000000) }}", "{{ ('b' * 1000000).join(range(100000)|map('string')) }}",
    "{{ ''.join(['x' * 1000000] * 10000) }}", "{{ ('a ' * 40000000).split()|length }}",
    "{{ ('\n' * 16000000).splitlines()|length }}", "{{ ('x' * 60000000)|list|length }}",
    "{% set x = ('\"' * 16000000)|e %}{{ x|e }}", "{{ range(1000000)|map('string')|map('center', 99999)|list|length }}",
    "{% set x %}{% for i in range(1000000) %}" + "y" * 10_000 + "{% endfor %}{% endset %}",
    "{% set x = 'y' * 16000000 %}{{ " + "x ~ " * 50 + "x }}", "{% set x = 'y' * 16000000 %}{{ " + "x + " * 50 + "x }}",
    "{{ 'x'.encode().center(1000000000) }}", "{{ (1).to_bytes(1000000000, 'big') }}",
    "{{ ('x' * 1000000).translate({120: 'y' * 1000000}) }}", "{{ {}.fromkeys(range(1000000), 'x' * 1000000) }}",
    "{{ ([[1]] * 100000)|sum(start=[]) }}", "{{ strftime_now('%p' * 10000000) }}", "{{ ('f' * 1000000)|int(base=16) }}",
    *["{% set ns = namespace(l=[]) %}{% set b = ' ' ~ 'y' * 10000000 %}"
      "{% for m in messages %}{% set ns.l = ns.l + [" + copy + "] %}{% endfor %}"
      for copy in ("b[1:]", "b|trim", "b.strip()", "b|upper", "b.upper()", "b + b", "b|list")],
]
NESTED = [
    doubling("'x'", "ns.x ~ ns.x"), doubling("'x'", "ns.x + ns.x"), doubling("[1]", "ns.x + ns.x"),
    doubling("[1]", "ns.x * 2"), doubling("[1]", "[ns.x, ns.x]"), doubling("1", "(ns.x, ns.x)"),
    doubling("1", "{'a': ns.x, 'b': ns.x}"), doubling("1", "dict(a=ns.x, b=ns.x)"),
    doubling("{'a': 1}", "{'a': [ns.x.items(), ns.x.items()]}"), doubling("[1]", "cycler(ns.x, ns.x).items"),
    doubling("[1]", "[0, 0]|map('default', ns.x, true)|list"),
    doubling("[1]", "[0, 0]|map('default', ns.x, true)|batch(2)|first"), doubling("3", "ns.x * ns.x"),
    "{% set ns = namespace(x=1) %}{% macro m() %}{% set ns.x = varargs %}{% endmacro %}"
    "{% for i in range(60) %}{{ m(ns.x, ns.x) }}{% endfor %}{{ ns.x }}",
]
ENDLESS = [
    "{% for a in messages %}{% for b in messages %}{% for c in messages %}{% for d in messages %}{% endfor %}"
    "{% endfor %}{% endfor %}{% endfor %}",
    "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}",
    "{% macro m(n) %}{{ caller() if caller }}{% if n %}{% call m(n - 1) %}{% endcall %}"
    "{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}",
    "{% for i in messages recursive %}{% if loop.depth < 9 %}{{ loop(messages) }}{% endif %}{% endfor %}",
    "{% for c in 'x' * 1000000 %}{% for d in 'x' * 1000000 %}{% endfor %}{% endfor %}",
    "{% for a in messages %}{% for b in messages %}{{ messages|map('tojson')|map('trim')|list|length }}{% endfor %}"
    "{% endfor %}",
]


@pytest.mark.parametrize("source", LARGE + NESTED, ids=range(len(LARGE + NESTED)))
def test_template_memory_is_bounded(source: str) -> None:
    tracemalloc.start()
    try:
        with pytest.raises((TemplateError, RequestError)):
            ChatTemplate(source, seconds=0.5).render(MESSAGES)
        assert tracemalloc.get_traced_memory()[1] < 400 << 20
    finally:
        tracemalloc.stop()


def test_recursive_namespaces_are_rendered_briefly() -> None:
    source = doubling("1", "namespace(a=ns.x, b=[ns.x, ns.x])")
    assert ChatTemplate(source).render(MESSAGES) == "<Namespace>"


@pytest.mark.parametrize("source", ENDLESS, ids=range(len(ENDLESS)))
def test_template_time_is_bounded(source: str) -> None:
    started = time.perf_counter()
    with pytest.raises(RequestError, match=r"template_seconds|more than \d+ characters"):
        ChatTemplate(source, seconds=0.2).render(MESSAGES)
    assert time.perf_counter() - started < 5.0


def test_long_conversations_are_within_limits() -> None:
    text = "word " * 400_000
    messages = normalise_messages([{"role": "user", "content": text}, {"role": "assistant", "content": "ok"},
                                   {"role": "user", "content": "x"}] * 2)
    for source in (TINY_TEMPLATE, QWEN_LIKE):
        assert len(ChatTemplate(source, seconds=60.0).render(messages)) > 4_000_000


NAMES = ["self", "context", "environment", "caller", "varargs", "kwargs", "args", "loop", "source", "seconds", "budget",
         "resolve", "undefined", "missing", "concat", "range", "dict", "namespace", "raise_exception", "strftime_now",
         "tojson", "tick", "shown", "template", "variables", "name", "cls", "_loop_vars", "_block_vars", "l_0_messages",
         "__class__", "__init__", "", " ", "a b", "1", "é", "\0", "a.b", "bos_token",
         *keyword.kwlist, *keyword.softkwlist]


@pytest.mark.parametrize("value", [1, "x", [], {"a": 1}, False])
def test_variables_may_have_any_name(value: Any) -> None:
    template = ChatTemplate(TINY_TEMPLATE)
    plain = template.render(MESSAGES[:1])
    for name in NAMES:
        try:
            assert template.render(MESSAGES[:1], None, True, **{name: value}) == plain, name
        except RequestError:
            assert name in ("namespace", "raise_exception", "dict", "tojson")  # functions that the template needs


@given(st.dictionaries(st.text(max_size=8), st.none() | st.booleans() | st.integers() | st.text(max_size=3)))
@settings(deadline=None, max_examples=examples(100))
def test_variables_of_any_kind(variables: dict[str, Any]) -> None:
    ChatTemplate("{{ messages[0].content }}").render(MESSAGES, None, True, **variables)


def test_template_error_message_is_cut() -> None:
    with pytest.raises(RequestError) as raised:
        ChatTemplate("{{ raise_exception('x' * 1000000) }}").render([])
    assert len(str(raised.value)) <= 1000


ATOMS = st.sampled_from([
    "messages", "messages[0]", "messages[0].content", "n", "'ab'", "3", "none", "d", "l", "d.a", "d.items()",
    "d['b']", "l[1:]", "l[0]", "missing", "true", "1.5", "(1, 'x')", "[1, [2]]", "{'k': l}", "'%s-%d' % ('x', 5)",
    "'{} {:>5}'.format(l, 1)", "s", "m(s)", "s.split(',')", "s.split()", "','.join(l|map('string'))",
    "s.replace('a', 'bb')", "s.center(9)", "s.upper()", "s.strip()", "namespace(a=1).a", "range(3)|list",
])
FILTERS = st.sampled_from([
    "length", "list", "join(',')", "join", "trim", "upper", "string", "first", "last", "tojson", "default('z')",
    "map('upper')|list", "map(attribute='role')|list", "selectattr('role')|list", "reverse|list",
    "batch(2, 'f')|list", "sort", "unique|list", "sum", "int", "float", "abs", "round", "items|list", "dictsort",
    "indent(2)", "replace('a', 'b')", "safe", "e", "title", "center(12)", "wordcount", "truncate(3)", "format(1)",
    "urlencode", "groupby('role')|list", "min", "max", "random|length",
])
EXPRESSIONS = st.recursive(
    ATOMS,
    lambda inner: st.tuples(inner, st.sampled_from(["+", "~", "-", "*", "%", "==", "in", "and", "or", "<",
    "//"]), inner)
    .map(lambda parts: f"({' '.join(parts)})") | st.tuples(inner, FILTERS).map("|".join)
    | st.tuples(inner, inner, inner).map(lambda parts: "({} if {} else {})".format(*parts)),
    max_leaves=5,
)
STATEMENTS = st.sampled_from([
    "{{ X }}", "{% set v = X %}{{ v }}", "{% set v %}a{{ X }}b{% endset %}{{ v|upper }}",
    "{% for i in X %}{{ loop.index }}{{ i }}{{ loop.last }}{% else %}none{% endfor %}",
    "{% for i in X if i %}{{ i }}{% if loop.first %}{% continue %}{% endif %}!{% endfor %}",
    "{% for i in l recursive %}{{ i }}{% if loop.depth < 2 %}{{ loop(X) }}{% endif %}{% endfor %}",
    "{% filter upper %}x{{ X }}{% endfilter %}", "{% call m(X) %}c{{ X }}{% endcall %}",
    "{% block b %}{{ X }}{% endblock %}",
    "{% set ns = namespace(v=0) %}{% for i in l %}{% set ns.v = X %}{% endfor %}{{ ns.v }}", "{% if X %}t{% endif %}",
    "{% for a, b in d.items() %}{{ a }}{{ X }}{% endfor %}", "{{ m(X, X) }}",
    "{% autoescape true %}{{ X }}{% endautoescape %}",
])
MACRO = "{% macro m(x) %}<{{ x }}{{ varargs|length }}{{ caller() if caller else '' }}>{% endmacro %}"
VALUES = {"n": 7, "s": "a,b <c> a", "l": [1, "b", [2]], "d": {"a": "x", "b": [1]}}


def plain_jinja(source: str) -> str | None:
    """What jinja's own sandbox makes of it; None if that fails."""
    try:
        return sandbox().from_string(source).render(messages=MESSAGES[:2], **VALUES)
    except Exception:  # as templates fail
        return None


@given(st.lists(st.tuples(STATEMENTS, EXPRESSIONS), min_size=1, max_size=2))
@settings(deadline=None, max_examples=examples(200))
def test_what_jinja_renders_is_rendered(parts: list[tuple[str, str]]) -> None:
    blocks = [statement.replace("X", expression).replace("block b", f"block b{index}")
              for index, (statement, expression) in enumerate(parts)]
    source = MACRO + "\n".join(blocks)
    theirs = plain_jinja(source)
    try:
        ours = ChatTemplate(source).render(MESSAGES[:2], None, True, **VALUES)
    except (RequestError, TemplateError):
        ours = None
    assert ours == theirs or "random" in source or " at 0x" in (theirs or "")


@pytest.mark.parametrize("source", [TINY_TEMPLATE, QWEN_LIKE], ids=["tiny", "qwen"])
def test_limits_overhead(source: str) -> None:
    """Limits on sizes and time cost about half of jinja's own time. The bound leaves room for a busy machine."""
    turn = [{"role": "user", "content": "word " * 50}, {"role": "assistant", "content": "answer " * 50}]
    messages = normalise_messages([*turn * 100, turn[0]])
    ours, theirs = ChatTemplate(source), sandbox().from_string(re.sub("{%- (end)?generation %}", "", source))
    variables = {"messages": messages, "add_generation_prompt": True}
    pairs = [(spent(lambda: ours.render(messages)), spent(lambda: theirs.render(variables))) for _ in range(7)]
    assert min(first for first, _ in pairs) < 3 * min(second for _, second in pairs)


def sandbox() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True,
                                                extensions=["jinja2.ext.loopcontrols"])
    environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    return environment


def spent(work: Callable[[], object]) -> float:
    started = time.process_time()
    work()
    return time.process_time() - started


@pytest.mark.parametrize(("variables", "thinks"), [
    ({}, False), ({"reasoning_effort": "none"}, False), ({"reasoning_effort": "minimal"}, False),
    ({"reasoning_effort": "low"}, False), ({"reasoning_effort": "medium"}, True), ({"reasoning_effort": "high"}, True),
    ({"reasoning_effort": "high", "enable_thinking": False}, False), ({"enable_thinking": True}, True),
    ({"reasoning_effort": "none", "enable_thinking": True}, True)])
def test_embedded_model_reasoning_effort(variables: dict[str, Any], thinks: bool) -> None:
    text = ChatTemplate(TINY_TEMPLATE).render(MESSAGES[:1], None, True, **variables)
    assert text.endswith("<think>\n" if thinks else "<think>\n\n</think>\n\n")
