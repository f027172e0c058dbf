"""Where chat templates run: they reach plain values only, and spend a budget of time and of characters.

Jinja's own sandbox bounds neither. What a template calls, filters, joins, repeats, slices and shows is counted here,
before it is made where it may be larger than what it is made from.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import update_wrapper
from types import BuiltinMethodType
from typing import Any

from jinja2 import nodes, pass_context
from jinja2.compiler import CodeGenerator, Frame, optimizeconst
from jinja2.exceptions import SecurityError
from jinja2.runtime import Context, LoopContext, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedEscapeFormatter, SandboxedFormatter
from jinja2.utils import Namespace
from markupsafe import Markup

from deltic.chat.template_budget import ENTRY, MAX_CHARACTERS, RenderBudget, check_size

_MOST_BITS, _MOST_DIGITS, _MOST_WIDTH = 1 << 16, 4300, 100_000


class TemplateContext(Context):
    """A template's variables, and what it may spend."""

    budget: RenderBudget

    def derived(self, locals: dict[str, Any] | None = None) -> Context:
        context = super().derived(locals)
        context.budget = self.budget  # type: ignore[attr-defined]
        return context


class SafeNamespace(Namespace):
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

    def __repr__(self) -> str:  # of what it holds nothing: namespaces may hold each other
        return "<Namespace>"


class _Generator(CodeGenerator):
    """Makes the template's code ask its budget."""

    def write_commons(self) -> None:
        super().write_commons()
        names = ("tick", "shown", "joined", "added", "built", "sliced")
        self.writeline(f"{', '.join(names)} = {', '.join(f'context.budget.{name}' for name in names)}")

    def visit_ExprStmt(self, node: nodes.ExprStmt, frame: Frame) -> None:
        self.writeline("tick(")
        self.visit(node.node, frame)
        self.write(")")

    @optimizeconst
    def visit_Add(self, node: nodes.BinExpr, frame: Frame) -> None:
        self.write("added(")
        for item in _in_a_row(node):
            self.visit(item, frame)
            self.write(", ")
        self.write(")")

    @optimizeconst
    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        markup = frame.eval_ctx.volatile or frame.eval_ctx.autoescape
        self.write(f"joined({'markup_join' if markup else 'str_join'}, (")
        for item in node.nodes:
            self.visit(item, frame)
            self.write(", ")
        self.write("))")

    def visit_List(self, node: nodes.List, frame: Frame) -> None:
        self.write("built(")
        super().visit_List(node, frame)
        self.write(")")

    def visit_Tuple(self, node: nodes.Tuple, frame: Frame) -> None:
        read = node.ctx == "load"  # not a target of an assignment
        self.write("built(" if read else "")
        super().visit_Tuple(node, frame)
        self.write(")" if read else "")

    def visit_Dict(self, node: nodes.Dict, frame: Frame) -> None:
        self.write("built(")
        super().visit_Dict(node, frame)
        self.write(")")

    def visit_Getitem(self, node: nodes.Getitem, frame: Frame) -> None:
        cut = isinstance(node.arg, nodes.Slice)
        self.write("sliced(" if cut else "")
        super().visit_Getitem(node, frame)
        self.write(")" if cut else "")

    def _output_child_pre(self, node: nodes.Expr, frame: Frame, finalize: Any) -> None:
        self.write("shown(" if frame.buffer is not None else "")  # what is put out at once is counted there
        super()._output_child_pre(node, frame, finalize)

    def _output_child_post(self, node: nodes.Expr, frame: Frame, finalize: Any) -> None:
        super()._output_child_post(node, frame, finalize)
        self.write(")" if frame.buffer is not None else "")


def _in_a_row(node: nodes.BinExpr) -> list[nodes.Expr]:
    """What is added from left to right, without a parenthesis on the right."""
    items: list[nodes.Expr] = []
    left: nodes.Expr = node
    while isinstance(left, nodes.Add):
        items.append(left.right)
        left = left.left
    return [left, *items[::-1]]


class Sandbox(ImmutableSandboxedEnvironment):
    """Jinja's sandbox with a budget: `context.budget` must be set before a template runs."""

    code_generator_class = _Generator
    context_class = TemplateContext
    intercepted_binops = frozenset({"*", "**", "%"})

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.filters = {name: guarded(name, filter) for name, filter in self.filters.items() if name not in _MISSING}

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        template = super()._parse(source, name, filename)
        for node in template.find_all((nodes.For, nodes.Macro, nodes.CallBlock)):
            assert isinstance(node, nodes.For | nodes.Macro | nodes.CallBlock)
            text = sum(len(data.data) for data in node.find_all(nodes.TemplateData))
            node.body.insert(0, nodes.ExprStmt(nodes.Const(text), lineno=node.lineno))
        return template

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        return super().is_safe_attribute(obj, attr, value) and not (
            isinstance(obj, str | bytes | int | dict) and attr in _UNSAFE_METHODS)

    def getattr(self, obj: Any, attribute: str) -> Any:
        """As jinja's, without its detours for what templates do most."""
        if type(obj) is dict and attribute not in _DICT_ATTRIBUTES:
            return obj[attribute] if attribute in obj else self.undefined(obj=obj, name=attribute)
        if attribute in _OPEN.get(type(obj), ()):
            return getattr(obj, attribute)
        return super().getattr(obj, attribute)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "**":
            raise SecurityError("powers are not available in chat templates")
        budget: RenderBudget = context.budget  # type: ignore[attr-defined]
        if operator == "%" and isinstance(left, str):
            check_size(_percent_size(budget, left, right))
        elif operator == "*":
            _check_product(budget, left, right)
        result = super().call_binop(context, operator, left, right)
        return budget.made(result)

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        budget: RenderBudget = context.budget  # type: ignore[attr-defined]
        budget.tick()
        for name in _JINJAS_OWN:
            kwargs.pop(name, None)
        if type(obj) is BuiltinMethodType and isinstance(obj.__self__, str):
            return self._call_method(budget, obj, *args, **kwargs)
        for arg in (*args, *kwargs.values()) if kwargs else args:
            if type(arg) is not str:
                budget.weigh(arg)
        if type(obj) is Macro:  # what it shows was counted
            return obj(context.eval_ctx, *args, **kwargs)
        return budget.made(super().call(context, obj, *args, **kwargs))

    def _call_method(self, budget: RenderBudget, method: BuiltinMethodType, /, *args: Any, **kwargs: Any) -> Any:
        """Of a string; what it gives back is no larger, or its size is known before."""
        name, text = method.__name__, method.__self__
        if name == "join" and args and not hasattr(args[0], "__len__"):
            args = (budget.built(list(args[0])),)
        size = _METHODS.get(name)
        if size:
            budget.charge(size(text, *args, **kwargs))
        return budget.made(method(*args, **kwargs), True)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        if super().wrap_str_format(value) is None:
            return None
        text: str = value.__self__
        formatter = _EscapeFormatter(self, escape=text.escape) if isinstance(text, Markup) else _Formatter(self)

        def format(*args: Any, **kwargs: Any) -> str:
            if value.__name__ == "format_map":
                (kwargs,), args = args, ()
            return type(text)(formatter.vformat(text, args, kwargs))
        return update_wrapper(format, value)


class _Formatter(SandboxedFormatter):
    """Counts what it has formatted."""

    size = 0

    def format_field(self, value: Any, format_spec: str) -> str:
        _check_width(*map(_number, re.findall(r"\d+", format_spec)))
        text: str = super().format_field(value, format_spec)
        self.size += len(text)
        check_size(self.size)
        return text


class _EscapeFormatter(_Formatter, SandboxedEscapeFormatter):
    pass


# What is larger than what it is made from


_UNSAFE_METHODS = frozenset({"encode", "translate", "maketrans", "to_bytes", "from_bytes", "fromkeys"})
_DICT_ATTRIBUTES = frozenset(dir(dict))
_OPEN = {str: frozenset(name for name in dir(str) if not name.startswith(("_", "format"))) - _UNSAFE_METHODS,
         LoopContext: frozenset({"index", "index0", "first", "last", "length", "previtem", "nextitem"})}
_JINJAS_OWN = ("_loop_vars", "_block_vars")  # what its compiler adds to calls
_LINE_ENDS = "\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029"
_PIECE = 16


def _replace_size(text: str, old: str, new: str, count: int = -1) -> int:
    found = text.count(old) if count < 0 else min(text.count(old), count)
    return len(text) + found * len(new)


def _split_size(text: str, sep: str | None = None, maxsplit: int = -1) -> int:
    pieces = text.count(sep) if sep else len(text) // 2
    return len(text) + _PIECE * (pieces if maxsplit < 0 else min(pieces, maxsplit))


_METHODS: dict[str, Callable[..., int]] = {
    "center": lambda text, width, fill=" ": width,
    "ljust": lambda text, width, fill=" ": width,
    "rjust": lambda text, width, fill=" ": width,
    "zfill": lambda text, width: width,
    "expandtabs": lambda text, tabsize=8: text.count("\t") * tabsize,
    "replace": _replace_size,
    "split": _split_size,
    "rsplit": _split_size,
    "splitlines": lambda text, keepends=False: _PIECE * sum(map(text.count, _LINE_ENDS)) + len(text),
    "join": lambda text, items: len(text) * len(items),
}


def _indent_size(text: str, width: int | str = 4, first: bool = False, blank: bool = False) -> int:
    return (len(width) if isinstance(width, str) else width) * sum(map(str(text).count, _LINE_ENDS))


def _sum_size(items: Any, attribute: Any = None, start: Any = 0) -> int:
    if not isinstance(start, int | float):
        raise TypeError("sum adds numbers only")
    return 0


def _round_size(value: Any, precision: int = 0, method: str = "common") -> int:
    _check_width(abs(precision) * 1000)
    return 0


def _int_size(value: Any, default: int = 0, base: int = 10) -> int:
    if isinstance(value, str) and len(value) > _MOST_DIGITS:
        raise OverflowError(f"a number of more than {_MOST_DIGITS} digits")
    return 0


def _escape_size(value: Any) -> int:
    return 6 * len(value) if isinstance(value, str) else 0


_FILTERS: dict[str, Callable[..., int]] = {
    "center": lambda text, width=80: width,
    "indent": _indent_size,
    "batch": lambda items, linecount, fill_with=None: ENTRY * linecount if fill_with is not None else 0,
    "round": _round_size,
    "int": _int_size,
    "sum": _sum_size,
    "replace": lambda text, old, new, count=None: _replace_size(str(text), str(old), str(new)),
    "urlencode": lambda value: 9 * len(value) if isinstance(value, str) else 0,
    "escape": _escape_size, "e": _escape_size, "forceescape": _escape_size,
    "list": lambda items: ENTRY * len(items) if hasattr(items, "__len__") else 0,
}
# Filters for web pages, without bounds that could be told beforehand.
_MISSING = frozenset({"urlize", "xmlattr", "pprint", "wordwrap", "slice", "striptags", "filesizeformat"})
# Filters that make nothing, or give back one thing after the other.
_FREE = frozenset({"abs", "attr", "count", "d", "default", "first", "float", "items", "last", "length", "map", "max",
                   "min", "reject", "rejectattr", "select", "selectattr", "unique", "wordcount"})
_SIZED = (str, list, tuple, dict)
_WHOLE = frozenset({"join", "batch"})  # filters that need to know all that they are given


def guarded(name: str, filter: Callable[..., Any]) -> Callable[..., Any]:
    """The filter under its context's budget."""
    if name in _FREE:
        return filter
    size, passed, whole = _FILTERS.get(name), getattr(filter, "jinja_pass_arg", None), name in _WHOLE
    first = str(passed.name) if passed is not None else ""

    @pass_context
    def light(context: TemplateContext, value: Any, *args: Any, **kwargs: Any) -> Any:
        result = filter(value, *args, **kwargs)
        budget = context.budget
        return budget.shown(result) if type(result) is str else budget.made(result, isinstance(value, _SIZED))

    @pass_context
    def checked(context: TemplateContext, value: Any, *args: Any, **kwargs: Any) -> Any:
        budget, known = context.budget, isinstance(value, _SIZED)
        budget.tick()
        if whole and not known:
            value, known = budget.built(list(value)), True
        if name == "join":
            budget.charge(len(value) * len(str(kwargs.get("d", args[0] if args else ""))))
        elif name == "format":
            check_size(_percent_size(budget, str(value), (args, kwargs)))
        elif size:
            budget.charge(size(value, *args, **kwargs))
        given = {"": (), "context": (context,), "eval_context": (context.eval_ctx,),
                 "environment": (context.environment,)}[first]
        return budget.made(filter(*given, value, *args, **kwargs), known)
    return checked if size or whole or first or name == "format" else light


def _percent_size(budget: RenderBudget, text: str, values: Any) -> int:
    """Of a text with conversions."""
    if re.search(r"%[-#0 +\d.]*\*", text):
        raise OverflowError("widths that are given apart")
    conversion = r"(\d+)()" if "%(" in text else r"%[-#0 +]*(\d*)(?:\.(\d*))?"  # names may hold what looks like one
    widths = [_number(digits) for pair in re.findall(conversion, text) for digits in pair]
    _check_width(*widths)
    return len(text) + sum(widths) + text.count("%") * budget.weigh(values)


def _check_product(budget: RenderBudget, left: Any, right: Any) -> None:
    for value, count in ((left, right), (right, left)):
        if isinstance(value, str | list | tuple | bytes) and isinstance(count, int):
            size = len(value) if isinstance(value, str | bytes) else budget.weigh(value)
            check_size(size * count)
            budget.charge(len(value) * count * (1 if isinstance(value, str | bytes) else ENTRY))
    if isinstance(left, int) and isinstance(right, int) and left.bit_length() + right.bit_length() > _MOST_BITS:
        raise OverflowError(f"a number of more than {_MOST_BITS} bits")


def _number(digits: str) -> int:
    return int(digits or 0) if len(digits) < 10 else MAX_CHARACTERS


def _check_width(*widths: int) -> None:
    if max(widths, default=0) > _MOST_WIDTH:
        raise OverflowError(f"a width of more than {_MOST_WIDTH}")


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace cannot have the attribute {name!r}")
