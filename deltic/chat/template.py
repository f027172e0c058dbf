"""Renders chat templates as transformers does, in a sandbox with a time limit.

`Watchdog` raises an exception in the rendering thread. The interpreter delivers it between two instructions: a native
operation runs to its end, so `deltic.chat.template_sandbox` bounds the operands of native operations.
"""

from __future__ import annotations

import ctypes
import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache, partial
from typing import Any, Final, NoReturn, TypeVar

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.parser import Parser

from deltic.chat.template_sandbox import SafeNamespace, SizeLimits, TemplateSandbox, limited
from deltic.config import Limits
from deltic.errors import RequestError, TemplateError

Result = TypeVar("Result")

_AGAIN: Final = 0.1
"""Seconds until the exception is raised again, because callbacks of the interpreter may swallow it."""


class _Expired(BaseException):
    """The exception for an expired deadline. It is not an Exception, because libraries catch those."""


@dataclass(slots=True, eq=False)
class _Watched:
    """Work of one thread, and its deadline on the monotonic clock."""

    thread: int
    due: float
    expired: bool = False


class Watchdog:
    """Runs work under a time limit. Its thread starts with the first work, and sleeps until the next deadline."""

    def __init__(self) -> None:
        # a plain lock: the exception may arrive while a thread acquires it
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._watched: dict[_Watched, None] = {}
        self._wakes = 0.0
        self._thread: threading.Thread | None = None

    def run(self, work: Callable[[], Result], seconds: float) -> Result:
        """Runs `work` in this thread. Raises TimeoutError after `seconds`. The work must not hold locks."""
        watched = _Watched(threading.get_ident(), time.monotonic() + seconds)
        try:
            try:
                self._watch(watched)
                return work()
            finally:
                while True:
                    try:
                        self._forget(watched)
                        break
                    except _Expired:
                        continue
        except _Expired:
            raise TimeoutError from None

    def _watch(self, watched: _Watched) -> None:
        with self._lock:
            self._watched[watched] = None
            if self._thread is None or not self._thread.is_alive():  # the thread is missing after a fork
                self._wakes = watched.due
                self._thread = threading.Thread(target=self._look, name="deltic-watchdog", daemon=True)
                self._thread.start()
            elif watched.due < self._wakes:
                self._changed.notify()

    def _forget(self, watched: _Watched) -> None:
        """Ends the watch: no exception arrives afterwards."""
        with self._lock:
            self._watched.pop(watched, None)
        if watched.expired:
            _raise(watched.thread, None)

    def _look(self) -> None:
        with self._lock:
            while True:
                now = time.monotonic()
                for watched in self._watched:
                    if watched.due <= now:
                        watched.expired, watched.due = True, now + _AGAIN
                        _raise(watched.thread, _Expired)
                self._wakes = min((watched.due for watched in self._watched), default=float("inf"))
                self._changed.wait(self._wakes - now if self._watched else None)


def _raise(thread: int, kind: type[BaseException] | None) -> None:
    """Raises an exception in a thread before its next instruction; None cancels a pending one."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(kind) if kind else None)


_WATCHDOG = Watchdog()
_COMPILE_SECONDS = 30.0
_MAX_INDENT = 16
_MAX_DATE_FORMAT = 100
_MAX_ERROR_CHARS = 1000


class _Refusal(jinja2.TemplateError):
    """Raised when the template calls raise_exception."""


class _GenerationTag(Extension):
    """Ignores `{% generation %}`, which marks the model's text for training."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class ChatTemplate:
    """A compiled chat template. Raises TemplateError that names the line if the source is not valid.

    Templates come with checkpoints and are not trusted: they see plain JSON values, cannot reach Python through
    attributes, and are stopped after `seconds`.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str] | None = None,
                 seconds: float = Limits().template_seconds) -> None:
        self.source = source
        self._special_tokens = dict(special_tokens or {})
        self._seconds = seconds
        try:
            self._template = _WATCHDOG.run(partial(_compile, source), _COMPILE_SECONDS)
        except TimeoutError as error:
            raise TemplateError(f"the chat template takes more than {_COMPILE_SECONDS:g} seconds to compile: give a "
                                "file with another (`chat_template`)") from error

    def render(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None = None,
               add_generation_prompt: bool = True, /, **variables: Any) -> str:
        """Returns the prompt as text. `messages` are normalised; variables that are None are not passed.

        Raises RequestError with the template's own objection to these messages.
        """
        values: dict[str, Any] = {**self._special_tokens, "documents": None}
        values |= {name: value for name, value in variables.items() if value is not None}
        values["messages"] = list(messages)
        values["tools"] = list(tools) if tools else None
        values["add_generation_prompt"] = add_generation_prompt
        try:
            return _WATCHDOG.run(partial(_render, self._template, values), self._seconds)
        except _Refusal as error:
            raise RequestError(_with_remedy(_short(error), messages), "messages") from error
        except SecurityError as error:
            raise TemplateError(f"the chat template is not safe to run ({_short(error)}): "
                                "give a file with another (`chat_template`)") from error
        except TimeoutError as error:
            raise RequestError("the chat template cannot render these messages: it takes more than "
                               f"{self._seconds:g} seconds (template_seconds)", "messages") from error
        except Exception as error:  # templates can fail in any way that Python can
            raise RequestError(f"the chat template cannot render these messages: {_short(error)}",
                               "messages") from error


@lru_cache(maxsize=16)  # requests use few templates, and compiling takes longer than rendering
def _compile(source: str) -> jinja2.Template:
    try:
        return _environment().from_string(source)
    except jinja2.TemplateSyntaxError as error:
        raise TemplateError(f"the chat template is not valid jinja, line {error.lineno}: {error.message}") from error
    except (RecursionError, SyntaxError, MemoryError) as error:  # of jinja's compiler, or Python's on jinja's code
        raise TemplateError("the chat template is not valid jinja: it is nested too deeply") from error


def _environment() -> TemplateSandbox:
    environment = TemplateSandbox(trim_blocks=True, lstrip_blocks=True,
                                  extensions=[_GenerationTag, "jinja2.ext.loopcontrols"])
    environment.filters["tojson"] = limited("tojson", _to_json)
    environment.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now,
                            "dict": _make_dict, "namespace": SafeNamespace}
    environment.globals.pop("lipsum")
    return environment


def _render(template: jinja2.Template, values: dict[str, Any]) -> str:
    context = template.new_context(values)
    sizes = context.sizes = SizeLimits()  # type: ignore[attr-defined]
    return "".join(map(sizes.add, template.root_render_func(context)))


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | str | None = None,
             separators: tuple[str, str] | None = None, sort_keys: bool = False) -> str:
    """Returns a value as JSON, without the HTML escapes of jinja's own filter."""
    for space in (indent, *(separators or ())):
        width = len(space) if isinstance(space, str) else space or 0
        if width > _MAX_INDENT:
            raise OverflowError(f"more than {_MAX_INDENT} spaces around a value")
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: object) -> NoReturn:
    raise _Refusal(str(message))


def _strftime_now(format: str) -> str:
    if len(format) > _MAX_DATE_FORMAT:
        raise OverflowError(f"a date format of more than {_MAX_DATE_FORMAT} characters")
    return datetime.now().strftime(format)


def _make_dict(*args: Any, **values: Any) -> dict[Any, Any]:
    return dict(*args, **values)


def _with_remedy(refusal: str, messages: Sequence[Mapping[str, Any]]) -> str:
    """Adds the remedy to the template's refusal of a conversation without a user message."""
    if not messages or any(message.get("role") == "user" for message in messages):
        return refusal
    return refusal.rstrip(".") + ': add a message with the role "user"'


def _short(error: Exception) -> str:
    text = str(error)
    return text if len(text) <= _MAX_ERROR_CHARS else text[:_MAX_ERROR_CHARS - 3] + "..."
