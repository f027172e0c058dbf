"""Renders chat templates as transformers does, in a sandbox."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache, partial
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.parser import Parser

from deltic.chat.template_budget import RenderBudget
from deltic.chat.template_sandbox import SafeNamespace, Sandbox, guarded
from deltic.chat.watchdog import Watchdog
from deltic.config import Limits
from deltic.errors import RequestError, TemplateError

_WATCHDOG = Watchdog()
_COMPILE_SECONDS = 30.0
_MAX_SPACES, _MAX_FORMAT, _MAX_ERROR = 16, 100, 1000


class _Raised(jinja2.TemplateError):
    """What a template says with raise_exception."""


class _Generation(Extension):
    """`{% generation %}` marks what the model wrote, for training; rendering ignores it."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class ChatTemplate:
    """A compiled chat template. TemplateError with the line if the source is not valid.

    Templates come with checkpoints and are not trusted: they see plain JSON values only, cannot reach Python
    through attributes, and are bounded: a rendering takes `seconds` at most, and so many characters and steps.
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
        """The prompt as text. `messages` are normalised ones; variables that are None are not passed.

        RequestError carries what the template has against these messages.
        """
        budget = RenderBudget()
        values: dict[str, Any] = {**self._special_tokens, "documents": None}
        values |= {name: value for name, value in variables.items() if value is not None}
        values |= {"messages": list(messages), "tools": list(tools) if tools else None,
                   "add_generation_prompt": add_generation_prompt, "range": budget.range}
        context = self._template.new_context(values)
        context.budget = budget  # type: ignore[attr-defined]
        try:
            return _WATCHDOG.run(lambda: "".join(map(budget.shown, self._template.root_render_func(context))),
                                 self._seconds)
        except _Raised as error:
            raise RequestError(_with_remedy(_short(error), messages), "messages") from error
        except SecurityError as error:
            raise TemplateError(f"the chat template is not safe to run ({_short(error)}): "
                                "give a file with another (`chat_template`)") from error
        except RequestError:
            raise
        except TimeoutError as error:
            raise RequestError("the chat template cannot render these messages: it takes more than "
                               f"{self._seconds:g} seconds (template_seconds)", "messages") from error
        except Exception as error:  # templates can fail in any way that Python can
            raise RequestError(f"the chat template cannot render these messages: {_short(error)}",
                               "messages") from error


@lru_cache(maxsize=16)  # requests come with the same few templates, and compiling takes longer than rendering
def _compile(source: str) -> jinja2.Template:
    try:
        return _environment().from_string(source)
    except jinja2.TemplateSyntaxError as error:
        raise TemplateError(f"the chat template is not valid jinja, line {error.lineno}: "
                            f"{error.message}") from error
    except (RecursionError, SyntaxError, MemoryError) as error:  # of jinja's compiler, and of Python's behind it
        raise TemplateError("the chat template is not valid jinja: it is nested too deeply") from error


def _environment() -> Sandbox:
    environment = Sandbox(trim_blocks=True, lstrip_blocks=True,
                          extensions=[_Generation, "jinja2.ext.loopcontrols"])
    environment.filters["tojson"] = guarded("tojson", _to_json)
    environment.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now,
                            "dict": _make_dict, "namespace": SafeNamespace}
    environment.globals.pop("lipsum")
    return environment


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | str | None = None,
             separators: tuple[str, str] | None = None, sort_keys: bool = False) -> str:
    # jinja's own filter escapes HTML, which models were not trained on
    if indent is not None or separators is not None:
        _check_spaces(indent, *(separators or ()))
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators,
                      sort_keys=sort_keys)


def _check_spaces(*spaces: int | str | None) -> None:
    """What is put around every value."""
    for space in spaces:
        if isinstance(space, str | int) and (len(space) if isinstance(space, str) else space) > _MAX_SPACES:
            raise OverflowError(f"more than {_MAX_SPACES} spaces around a value")


def _raise_exception(message: object) -> NoReturn:
    raise _Raised(str(message))


def _strftime_now(format: str) -> str:
    if len(format) > _MAX_FORMAT:
        raise OverflowError(f"a date format of more than {_MAX_FORMAT} characters")
    return datetime.now().strftime(format)


def _make_dict(*args: Any, **values: Any) -> dict[Any, Any]:
    return dict(*args, **values)


def _with_remedy(refusal: str, messages: Sequence[Mapping[str, Any]]) -> str:
    """Adds the fix to the refusal of a conversation without a user message."""
    if not messages or any(message.get("role") == "user" for message in messages):
        return refusal
    return refusal.rstrip(".") + ': add a message with the role "user"'


def _short(error: Exception) -> str:
    text = str(error)
    return text if len(text) <= _MAX_ERROR else text[:_MAX_ERROR - 3] + "..."
