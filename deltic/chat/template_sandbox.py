"""Jinja's immutable sandbox, with limits on the size of every value that a template makes.

`Watchdog` ends a rendering between two Python instructions. One native operation runs to its end, so its operands are
limited here. The check runs before an operation if its result may be far larger than its operands, else after it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, MappingView
from itertools import chain
from types import BuiltinMethodType
from typing import Any, TypeVar

from jinja2 import nodes, pass_context
from jinja2.exceptions import SecurityError
from jinja2.runtime import Context, LoopContext, Macro, markup_join, str_join
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

Value = TypeVar("Value")

MAX_CHARS = 1 << 24
"""Limit on the characters of one container, with everything in it, or of one captured block."""
MAX_TOTAL_CHARS = 1 << 27
"""Limit on the characters of all values that one rendering makes."""
_ENTRY_CHARS = 8  # weight of a container's entry in addition to its characters
# Weights of numbers. Their arithmetic takes more than linear time.
_CHARS_PER_BIT = 1 << 8
_CHARS_PER_DIGIT = 1 << 12
_CHARS_PER_DECIMAL = 1 << 17
_LINE_ENDS = "\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029"
_CONTAINERS = (dict, list, tuple, MappingView)

_UNSAFE_METHODS = frozenset({"encode", "expandtabs", "from_bytes", "fromkeys", "maketrans", "to_bytes", "translate"})
_DICT_ATTRIBUTES = frozenset(dir(dict))
_LOOP_ATTRIBUTES = frozenset({"index", "index0", "revindex", "revindex0", "first", "last", "length", "previtem",
                              "nextitem"})
_PLAIN = frozenset({bool, int, str, dict, list})
_TEXT_METHODS = frozenset({"startswith", "endswith", "strip", "lstrip", "rstrip", "split", "rsplit", "replace", "lower",
                           "upper", "find"})
"""Attributes that jinja's sandbox allows. Templates read mostly these, several times for each message."""
_REMOVED_FILTERS = frozenset({"filesizeformat", "pprint", "slice", "striptags", "urlize", "wordwrap", "xmlattr"})
"""Filters for web pages that may take more than linear time or memory."""


class SizeLimits:
    """Counts the characters that one rendering makes. Raises OverflowError beyond the limits."""

    def __init__(self) -> None:
        self._made = 0
        # by identity: containers cannot change in the sandbox, and are kept so that no other object gets their identity
        self._weights: dict[int, tuple[int, object]] = {}

    def add(self, value: Value) -> Value:
        """Counts a value that an operation made, and returns it."""
        if isinstance(value, str):
            self.add_chars(len(value))
        elif type(value) is not bool and isinstance(value, _CONTAINERS):
            self.add_chars(_ENTRY_CHARS * len(value))
            self.weigh(value)
        return value

    def add_chars(self, count: int) -> None:
        """Counts the characters of a value, which need not exist yet."""
        self._made += count
        if self._made > MAX_TOTAL_CHARS:
            raise OverflowError(f"more than {MAX_TOTAL_CHARS} characters")

    def weigh(self, value: Any) -> int:
        """Returns an upper bound of the number of characters of a value when it is written out."""
        if isinstance(value, str):
            return len(value)
        if isinstance(value, int):
            return 1 + value.bit_length() // 2
        if not isinstance(value, _CONTAINERS):
            return _ENTRY_CHARS
        known = self._weights.get(id(value))
        if known:
            return known[0]
        items: Any = chain(value.keys(), value.values()) if isinstance(value, dict) else value
        weight = _ENTRY_CHARS * (1 + len(value)) + sum(map(self.weigh, items))
        check_chars(weight)
        self._weights[id(value)] = weight, value
        return weight


def check_chars(count: int) -> None:
    """Raises OverflowError if one value would have too many characters."""
    if count > MAX_CHARS:
        raise OverflowError(f"a value of more than {MAX_CHARS} characters")


class TemplateContext(Context):
    """The variables of one rendering, and its size limits."""

    sizes: SizeLimits

    def derived(self, locals: dict[str, Any] | None = None) -> Context:
        context = super().derived(locals)
        context.sizes = self.sizes  # type: ignore[attr-defined]
        return context


class SafeNamespace(Namespace):
    """A namespace without names that begin with an underscore, which could shadow Python's own."""

    def __init__(*args: Any, **values: Any) -> None:
        self, *mappings = args
        values = dict(*mappings, **values)
        for name in values:
            _check_name(name)
        Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)

    def __repr__(self) -> str:  # namespaces may contain each other
        return "<Namespace>"


class TemplateSandbox(ImmutableSandboxedEnvironment):
    """A sandbox with size limits. `context.sizes` must be set before a template runs."""

    context_class = TemplateContext
    concat = staticmethod(lambda pieces: _concat(pieces))
    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        for name in _REMOVED_FILTERS:
            del self.filters[name]
        self.filters = {name: limited(name, filter) for name, filter in self.filters.items()}
        self.filters |= {_SizeCounter.ADD: _add_size, _SizeCounter.JOIN: _join}

    def getattr(self, obj: Any, attribute: str) -> Any:
        kind = type(obj)  # handles the most frequent cases first, with the results of jinja's own longer checks
        if kind is dict and attribute not in _DICT_ATTRIBUTES:
            return obj[attribute] if attribute in obj else self.undefined(obj=obj, name=attribute)
        if kind is str and attribute in _TEXT_METHODS:
            return getattr(obj, attribute)
        named = kind is SafeNamespace and attribute[:1] != "_" and attribute not in _UNSAFE_METHODS
        if named or (kind is LoopContext and attribute in _LOOP_ATTRIBUTES):
            value = getattr(obj, attribute, None)
            if type(value) in _PLAIN:
                return value
        return super().getattr(obj, attribute)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        parsed: nodes.Template = _SizeCounter().visit(super()._parse(source, name, filename))
        return parsed

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        return super().is_safe_attribute(obj, attr, value) and attr not in _UNSAFE_METHODS

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        format = super().wrap_str_format(value)
        if format is None:
            return None

        def limited_format(*args: Any, **kwargs: Any) -> str:
            check_chars(_formatted_size(value.__self__, "{", (args, kwargs)))
            return format(*args, **kwargs)
        return limited_format

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        sizes: SizeLimits = context.sizes  # type: ignore[attr-defined]
        if operator == "+":
            return sizes.add(left + right)
        if operator == "**":
            raise SecurityError("powers are not available in chat templates")
        if operator == "*":
            check_chars(_product_size(sizes, left, right))
        elif operator == "%" and isinstance(left, str):
            check_chars(_formatted_size(left, "%", right))
        return sizes.add(super().call_binop(context, operator, left, right))

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        sizes: SizeLimits = context.sizes  # type: ignore[attr-defined]
        for name in ("_loop_vars", "_block_vars"):  # jinja's compiler adds these
            kwargs.pop(name, None)
        size = _METHOD_SIZES.get(obj.__name__) if type(obj) is BuiltinMethodType else None
        if size and isinstance(obj.__self__, str):
            args = tuple(item if hasattr(item, "__len__") or isinstance(item, int) else sizes.add(list(item))
                         for item in args)
            check_chars(size(obj.__self__, *args, **kwargs))
        for arg in (*args, *kwargs.values()):
            if type(arg) is not str:
                sizes.weigh(arg)
        if type(obj) is Macro:  # the sandbox allows macros, and they take no other context
            return sizes.add(obj(context.eval_ctx, *args, **kwargs))
        return sizes.add(super().call(context, obj, *args, **kwargs))


class _SizeCounter(NodeTransformer):
    """Passes the operations that jinja compiles to plain Python through filters that count their results."""

    ADD, JOIN = " add", " join"  # no template can use these names

    def visit_List(self, node: nodes.List | nodes.Tuple | nodes.Dict | nodes.Getitem) -> nodes.Expr:
        self.generic_visit(node)
        return nodes.Filter(node, self.ADD, [], [], None, None, lineno=node.lineno)

    visit_Dict = visit_List

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Expr:
        constant = all(isinstance(item, nodes.Const) for item in node.items)
        return node if node.ctx == "store" or constant else self.visit_List(node)

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Expr:
        if isinstance(node.arg, nodes.Slice):
            return self.visit_List(node)
        self.generic_visit(node)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Expr:
        self.generic_visit(node)
        items = nodes.Tuple(node.nodes, "load", lineno=node.lineno)
        return nodes.Filter(items, self.JOIN, [], [], None, None, lineno=node.lineno)


@pass_context
def _add_size(context: TemplateContext, value: Value) -> Value:
    return context.sizes.add(value)


@pass_context
def _join(context: TemplateContext, items: tuple[Any, ...]) -> str:
    context.sizes.add_chars(sum(map(context.sizes.weigh, items)))
    join = markup_join if context.eval_ctx.autoescape else str_join
    return join(items)


def _concat(pieces: Iterable[str]) -> str:
    pieces = list(pieces)
    check_chars(sum(map(len, pieces)))
    return "".join(pieces)


def limited(name: str, filter: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the filter with a limit on its result, checked before the call if `_FILTER_SIZES` has the filter."""
    size = _FILTER_SIZES.get(name)
    passed = getattr(filter, "jinja_pass_arg", None)
    given = _PASSED[str(passed.name) if passed else ""]

    @pass_context
    def limited_filter(context: TemplateContext, value: Any, *args: Any, **kwargs: Any) -> Any:
        if size:
            if name in ("batch", "join") and not hasattr(value, "__len__"):
                value = context.sizes.add(list(value))
            check_chars(size(value, *args, **kwargs))
        return context.sizes.add(filter(*given(context), value, *args, **kwargs))
    return limited_filter


_PASSED: dict[str, Callable[[Context], tuple[Any, ...]]] = {
    "": lambda context: (), "context": lambda context: (context,), "eval_context": lambda context: (context.eval_ctx,),
    "environment": lambda context: (context.environment,)}
"""Arguments that filters get before their value."""


# Upper bounds of results that may be far larger than their operands


def _replaced_size(text: Any, old: Any, new: Any, count: int | None = None) -> int:
    return len(text) + str(text).count(str(old)) * len(str(new))


def _joined_size(items: Any, d: Any = "", attribute: Any = None) -> int:
    return len(items) * len(str(d))


def _split_size(text: str, sep: str | None = None, maxsplit: int = -1) -> int:
    pieces = text.count(sep) if sep else len(text) // 2
    return _ENTRY_CHARS * (pieces if maxsplit < 0 else min(pieces, maxsplit))


def _line_ends(text: Any) -> int:
    return sum(map(str(text).count, _LINE_ENDS))


def _indented_size(text: Any, width: int | str = 4, first: bool = False, blank: bool = False) -> int:
    return (1 + _line_ends(text)) * (len(width) if isinstance(width, str) else width)


def _percent_size(text: Any, *args: Any, **kwargs: Any) -> int:
    return _formatted_size(str(text), "%", (args, kwargs))


def _formatted_size(text: str, mark: str, values: Any) -> int:
    """Returns the size of a formatted string. mark: the character that begins a conversion."""
    if re.search(r"%[^a-zA-Z%]*\*|\{[^{}]*\{", text):
        raise OverflowError("a width that is given apart")
    widths = re.findall(r"\d+(?=[.,_\d]*[a-zA-Z%}])", text)
    total = sum(int(digits.lstrip("0")[:9] or 0) for digits in widths)
    return len(text) + total + text.count(mark) * SizeLimits().weigh(values)


def _product_size(sizes: SizeLimits, left: Any, right: Any) -> int:
    if isinstance(left, int) and isinstance(right, int):
        return (left.bit_length() + right.bit_length()) * _CHARS_PER_BIT
    if isinstance(left, int):
        left, right = right, left
    return sizes.weigh(left) * right if isinstance(left, str | list | tuple) and isinstance(right, int) else 0


def _summed_size(items: Any, attribute: Any = None, start: Any = 0) -> int:
    if not isinstance(start, int | float):
        raise TypeError("sum adds numbers only")
    return 0


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace cannot have the attribute {name!r}")


def _per_char(factor: int) -> Callable[..., int]:
    return lambda value, *args, **kwargs: factor * len(value) if hasattr(value, "__len__") else 0


def _width(text: Any, width: int = 80, *_: Any) -> int:
    return width


_METHOD_SIZES: dict[str, Callable[..., int]] = {
    "center": _width, "ljust": _width, "rjust": _width, "zfill": _width,
    "replace": _replaced_size, "split": _split_size, "rsplit": _split_size,
    "splitlines": lambda text, keepends=False: _ENTRY_CHARS * _line_ends(text),
    "join": lambda text, items: _joined_size(items, text),
}
_FILTER_SIZES: dict[str, Callable[..., int]] = {
    "batch": lambda items, linecount, fill_with=None: _ENTRY_CHARS * linecount,
    "center": _width, "format": _percent_size, "indent": _indented_size, "join": _joined_size,
    "replace": _replaced_size, "sum": _summed_size, "list": _per_char(_ENTRY_CHARS),
    "escape": _per_char(6), "e": _per_char(6), "forceescape": _per_char(6), "urlencode": _per_char(9),
    "int": lambda value, default=0, base=10: _CHARS_PER_DIGIT * len(value) if isinstance(value, str) else 0,
    "round": lambda value, precision=0, method="common": _CHARS_PER_DECIMAL * abs(precision),
}
