"""Renders chat templates as transformers does, in a sandbox."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from deltic.errors import RequestError, TemplateError

_MAX_CHARACTERS = 1 << 26
_MAX_RANGE = 1_000_000


class _Raised(jinja2.TemplateError):
    """What a template says with raise_exception."""


class _Generation(Extension):
    """`{% generation %}` marks what the model wrote, for training; rendering ignores it."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class _SafeNamespace(Namespace):
    """A namespace that cannot hold underscored names, which could shadow Python's own."""

    def __init__(*args: Any, **values: Any) -> None:
        self, *mappings = args
        found = dict(*mappings, **values)
        for name in found:
            _check_name(name)
        Namespace.__init__(self, found)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


class _Environment(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset({"*", "**"})

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "**":
            raise SecurityError("powers are not available in chat templates")
        for sequence, count in ((left, right), (right, left)):
            if isinstance(sequence, str | list | tuple) and isinstance(count, int):
                _check_size(len(sequence) * count)
        return super().call_binop(context, operator, left, right)


class ChatTemplate:
    """A compiled chat template. TemplateError with the line if the source is not valid.

    Templates come with checkpoints and are not trusted: they see plain JSON values only, cannot reach Python
    through attributes, and are bounded: loops over `range` by one budget per rendering, repetition and the
    rendered text by a size.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str] | None = None) -> None:
        self.source = source
        self._special_tokens = dict(special_tokens or {})
        self._template = _compile(source)

    def render(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None = None,
               add_generation_prompt: bool = True, **variables: Any) -> str:
        """The prompt as text. `messages` are normalised ones; variables that are None are not passed.

        RequestError carries what the template has against these messages.
        """
        context: dict[str, Any] = {**self._special_tokens, "documents": None}
        context |= {name: value for name, value in variables.items() if value is not None}
        context |= {"messages": list(messages), "tools": list(tools) if tools else None,
                    "add_generation_prompt": add_generation_prompt, "range": _range_with_budget()}
        try:
            return self._render(context)
        except _Raised as error:
            raise RequestError(str(error), "messages") from error
        except SecurityError as error:
            raise TemplateError(f"the chat template is not safe to run ({error}): "
                                "pass another one with --chat-template FILE") from error
        except RequestError:
            raise
        except Exception as error:  # templates can fail in any way that Python can
            raise RequestError(f"the chat template cannot render these messages: {error}",
                               "messages") from error

    def _render(self, context: Mapping[str, Any]) -> str:
        pieces, size = [], 0
        for piece in self._template.generate(context):
            size += len(piece)
            _check_size(size)
            pieces.append(piece)
        return "".join(pieces)


@lru_cache(maxsize=16)  # requests come with the same few templates, and compiling takes longer than rendering
def _compile(source: str) -> jinja2.Template:
    try:
        return _environment().from_string(source)
    except jinja2.TemplateSyntaxError as error:
        raise TemplateError(f"the chat template is not valid jinja, line {error.lineno}: "
                            f"{error.message}") from error
    except RecursionError as error:
        raise TemplateError("the chat template is not valid jinja: it is nested too deeply") from error


def _environment() -> _Environment:
    environment = _Environment(trim_blocks=True, lstrip_blocks=True,
                               extensions=[_Generation, "jinja2.ext.loopcontrols"])
    environment.filters["tojson"] = _to_json
    environment.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now,
                            "dict": _make_dict, "namespace": _SafeNamespace}
    environment.globals.pop("lipsum")
    return environment


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | str | None = None,
             separators: tuple[str, str] | None = None, sort_keys: bool = False) -> str:
    # jinja's own filter escapes HTML, which models were not trained on
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators,
                      sort_keys=sort_keys)


def _raise_exception(message: object) -> NoReturn:
    raise _Raised(str(message))


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


def _make_dict(*args: Any, **values: Any) -> dict[Any, Any]:
    return dict(*args, **values)


def _range_with_budget() -> Callable[..., range]:
    left = _MAX_RANGE

    def budgeted(*args: int) -> range:
        nonlocal left
        numbers = range(*args)
        left -= len(numbers)
        if left < 0:
            raise OverflowError(f"more than {_MAX_RANGE} iterations over range")
        return numbers
    return budgeted


def _check_size(size: int) -> None:
    if size > _MAX_CHARACTERS:
        raise OverflowError(f"more than {_MAX_CHARACTERS} characters")


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace cannot have the attribute {name!r}")
