"""Time limits of templates: every filter, test, method and function ends in time for any argument."""

from __future__ import annotations

import gc
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from random import Random

import pytest

from deltic.chat.template import ChatTemplate, Watchdog, _environment
from deltic.errors import RequestError, TemplateError

SECONDS = 0.01
MOST = 1.0
"""Upper bound in seconds of processor time for a rendering that ended in time, compiling included."""
VALUES = {"range": "r", "list": "n", "text": "t", "mapping": "d", "number": "7"}
ARGUMENTS = ("", "('real')", "(9)", "(t, n)")
ENVIRONMENT = _environment()
TESTS = [name for name in ENVIRONMENT.tests if name.isidentifier()]
METHODS = {"t": str, "n": list, "d": dict, "7": int}
OPERATORS = ("+", "-", "*", "/", "//", "%", "**", "~", "in", "not in", "==", "<", "and")
EAT = "{% macro eat(x) %}{{ (x if x is string or x is number else x|list)|length }}{% endmacro %}"
"""Goes through what a use gives bit by bit."""
MESSAGES = [{"role": "user", "content": "x", "contents": "x"}]


@pytest.fixture(scope="module", autouse=True)
def _no_garbage_collection() -> Iterator[None]:
    """A collection goes through the objects of all tests before, in processor time of the thread that is measured. Its
    callbacks (hypothesis has one) lose the exception: `test_swallowed_exception_is_raised_again` has one of its own."""
    gc.disable()
    yield
    gc.enable()


def spent(source: str, size: int = 20_000) -> tuple[float, bool]:
    """Seconds of processor time of a rendering, and whether it gave a text rather than an error."""
    began, works, numbers, text = time.thread_time(), True, [*range(size)], "ab " * size
    try:
        ChatTemplate(f"{EAT}{{% set r = range({size}) %}}{source}", seconds=SECONDS).render(
            MESSAGES, None, True, n=numbers, t=text, d={"a": numbers, "b": text})
    except (RequestError, TemplateError) as error:
        works = "template_seconds" in str(error)
    return time.thread_time() - began, works


def uses() -> Iterator[tuple[str, str]]:
    """All that templates can do, by name: as an expression, for each kind of value and arguments."""
    for arguments in ARGUMENTS:
        for value in VALUES.values():
            yield from ((f"filter {name}", f"({value}|{name}{arguments})") for name in ENVIRONMENT.filters)
            yield from ((f"test {name}", f"({value} is {name}{arguments})") for name in TESTS)
        for value, kind in METHODS.items():
            yield from ((f"method {name}", f"({value}).{name}{arguments or '()'}") for name in dir(kind)
                        if not name.startswith("_"))
        names = sorted({*ENVIRONMENT.globals, "range"})
        yield from ((f"function {name}", f"{name}{arguments or '()'}") for name in names)
    for operator in OPERATORS:
        yield from ((f"operator {operator}", f"({one} {operator} {other})") for one in VALUES.values()
                    for other in VALUES.values())


USES: dict[str, list[str]] = {}
for _name, _use in uses():
    USES.setdefault(_name, []).append(_use)


@pytest.mark.parametrize("kind", [
    pytest.param("filter", marks=pytest.mark.slow), "test", "method", pytest.param("function", marks=pytest.mark.slow),
    pytest.param("operator", marks=pytest.mark.slow)])
def test_every_template_feature_ends_in_time(kind: str) -> None:
    """Each use that renders is repeated in one expression, which no loop interrupts."""
    for name in (name for name in USES if name.startswith(kind)):
        working = []
        for use in USES[name]:
            seconds, works = spent(f"{{% set x = eat({use}) %}}")
            assert seconds < MOST, use
            working += [use] * works
        again = ", ".join(f"eat({use})" for use in working * (60 // max(len(working), 1)))
        assert spent(f"{{{{ [{again}]|length }}}}")[0] < MOST, name


@pytest.mark.slow
def test_uses_cover_what_templates_can_do() -> None:
    assert {"filter groupby", "filter tojson", "test divisibleby", "method zfill", "function range",
            "function namespace", "operator in"} < USES.keys()
    used = {name for name, source in USES.items() if any(spent(f"{{% set x = {use} %}}", 10)[1] for use in source)}
    assert len(used) > 0.8 * len(USES), "most work with some of the values and arguments"


@pytest.mark.parametrize("source", [
    "{% set x = [" + "(r|groupby('real')), " * 300 + "] %}",
    "{{ r" + "|select('odd')|reject('even')" * 40 + "|list|length }}",
    "{{ r|map('string')" + "|map('upper')" * 80 + "|list|length }}",
    "{% set x = [" + "('x' ~ t ~ 'y') in t, " * 1_000 + "] %}",
    "{{ [" + "n|sort(case_sensitive=true)|tojson|length, " * 300 + "] }}",
])
def test_long_chains_end_in_time(source: str) -> None:
    assert spent(source, 99_999)[0] < 4 * MOST, "a single step may take longer"


@pytest.mark.parametrize("filters", [
    "groupby('real')|length", "sort(attribute='real')|length", "map(attribute='real')|list|length",
    "sum(attribute='real')", "unique(attribute='real')|list|length", "max(attribute='real')",
    "selectattr('real')|list|length",
])
def test_filter_over_long_list_ends_in_time(filters: str) -> None:
    seconds, works = spent(f"{{{{ r|{filters} }}}}", 99_999)
    assert works and seconds < 1.0, "the clock is asked within a filter, too"


def test_slow_compilation_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deltic.chat.template._COMPILE_SECONDS", SECONDS)
    with pytest.raises(TemplateError, match=r"takes more than 0.01 seconds to compile.*chat_template"):
        ChatTemplate("{{ a.b.c }}" * 50_000)


@pytest.mark.parametrize("source", ["{{ r" + "|list" * 500 + " }}", "{{ " + "(" * 5000 + "r" + ")" * 5000 + " }}",
                                    "{{ " + "-" * 50_000 + "1 }}"])
def test_deeply_nested_template_is_refused(source: str) -> None:
    with pytest.raises(TemplateError, match="nested too deeply"):
        ChatTemplate(source)


def test_time_limit_error_names_option() -> None:
    template = "{% for m in range(9999) %}{% for n in range(999) %}{% endfor %}{% endfor %}{{ messages[0].content }}"
    with pytest.raises(RequestError, match=r"more than 0.01 seconds \(template_seconds\)") as caught:
        ChatTemplate(template, seconds=0.01).render(MESSAGES)
    assert caught.value.field == "messages"


# The watchdog


def spin(seconds: float) -> str:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        pass
    return "done"


def test_work_within_limit_is_not_interrupted() -> None:
    watchdog = Watchdog()
    assert watchdog.run(lambda: spin(0.01), 60.0) == "done"
    with pytest.raises(KeyError):
        watchdog.run(lambda: {}["x"], 60.0)
    assert not watchdog._watched


def test_work_that_catches_exceptions_is_ended() -> None:
    def stubborn() -> None:
        while True:
            with suppress(Exception):
                spin(9.0)

    with pytest.raises(TimeoutError):
        Watchdog().run(stubborn, 0.02)


def test_swallowed_exception_is_raised_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """As from a callback of the garbage collector, which reports any exception and goes on."""
    lost = list[str]()
    monkeypatch.setattr(sys, "unraisablehook", lambda unraisable: lost.append(unraisable.exc_type.__name__))

    def callback(phase: str, info: object) -> None:
        if not lost:
            spin(60.0)

    def work() -> None:
        gc.collect(0)
        spin(60.0)

    gc.callbacks.append(callback)
    try:
        for seconds in (0.01, 0.1, 1.0, 10.0):  # it may be over before the collection begins
            with pytest.raises(TimeoutError):
                Watchdog().run(work, seconds)
            if lost:
                break
    finally:
        gc.callbacks.remove(callback)
    assert {*lost} == {"_Expired"}


def test_threads_have_separate_deadlines() -> None:
    watchdog, found, ended = Watchdog(), dict[float, str](), threading.Barrier(3)

    def late(seconds: float) -> None:
        with suppress(TimeoutError):
            watchdog.run(lambda: spin(60.0), seconds)
            return
        found[seconds] = "late"
        ended.wait(60)

    def in_time() -> None:
        found[60.0] = watchdog.run(lambda: f"done {ended.wait(50) >= 0}", 60.0)

    threads = [threading.Thread(target=late, args=(0.01,)), threading.Thread(target=late, args=(0.02,)),
               threading.Thread(target=in_time)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {0.01: "late", 0.02: "late", 60.0: "done True"}


def test_no_exception_after_end_of_work() -> None:
    """Work that ends just when its time is over: it is done or late, and what follows is never disturbed."""
    watchdog, random, ends = Watchdog(), Random(1), set[str]()
    for _ in range(500):
        try:
            ends.add(watchdog.run(lambda: spin(random.uniform(0.0, 0.001)), 0.0005))
        except TimeoutError:
            ends.add("late")
        spin(0.0002)
    assert ends == {"done", "late"} and not watchdog._watched
    assert watchdog.run(lambda: spin(0.01), 60.0) == "done"
