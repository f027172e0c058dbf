"""The exceptions a caller can act on. Every message names the thing that is wrong and the fix."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

_SHOWN: Final = 80


class DelticError(ValueError):
    """Base of all errors that deltic raises on purpose; the command line exits with code 2."""


class ModelError(DelticError):
    """A model cannot be found, read or trusted: unknown name, corrupt file, config and weights that disagree."""


class ConfigError(DelticError):
    """An engine option has a value that it cannot have."""

    def __init__(self, message: str, option: str | None = None) -> None:
        super().__init__(message)
        self.option = option


class TemplateError(DelticError):
    """The model's chat template is missing or is not valid jinja."""


class RequestError(DelticError):
    """One request cannot be served as asked; others are not affected.

    `field` is the path of the offending field in the request (`messages[2].content`), where there is one.
    """

    def __init__(self, message: str, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field


class LongPromptError(RequestError):
    """The prompt has more tokens than the context, or a limit, allows."""


def too_long(tokens: int | str, reason: str) -> str:
    """Returns the message for a prompt of so many tokens. reason: the limit, and what to do.

    Clients recognise by these words that a conversation must be shortened: "prompt is too long", "maximum context
    length is N tokens".
    """
    return f"the prompt is too long: it has {tokens} tokens {reason}"


def context_bound(tokens: int) -> str:
    """Returns the reason why a prompt that fills a context of so many tokens is too long."""
    return f"and the maximum context length is {tokens} tokens, answer included: shorten it, or raise `max_context`"


@contextmanager
def of_prompt(field: str) -> Iterator[None]:
    """Adds the field of one of several prompts to a RequestError."""
    try:
        yield
    except RequestError as error:
        raise type(error)(f"{field}: {error}", field if error.field == "prompt" else error.field) from error


class BusyError(DelticError):
    """There is more work than a limit allows; the request may succeed later. retry_after: in seconds."""

    def __init__(self, message: str, retry_after: int = 1) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class QuotaError(BusyError):
    """One caller has as many concurrent requests as it may have."""


class UnavailableError(DelticError):
    """The engine takes no requests: it was closed, or it failed."""


class GenerationError(DelticError):
    """The engine gave up on an answer.

    `output`: what exists of the `Output`, if the caller would have got one: choices that ended well are whole, the
    others carry their error.
    """

    def __init__(self, message: str, output: Any = None) -> None:
        super().__init__(message)
        self.output = output


class DegenerateError(DelticError):
    """The model's logits are NaN or all equal: weights, dtype or a kernel are broken."""


def valid_text(value: object, field: str) -> str:
    """Returns the text in a request's field; RequestError for another type or invalid Unicode."""
    if not isinstance(value, str):
        raise RequestError(f"{field} must be text, not {show(value)}", field)
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise RequestError(f"{field} has a lone surrogate at position {error.start}, which is not valid Unicode: send "
                           "well-formed UTF-8", field) from error
    return str(value)


def show(value: object) -> str:
    """Returns a value as a message quotes it, cut to a length; does not look at more of the value than it shows."""
    text = ""
    for piece in _spell(value):
        text += piece
        if len(text) > _SHOWN:
            return text[:_SHOWN - 3] + "..."
    return text


def _spell(value: object) -> Iterator[str]:
    """Yields the pieces of repr(value)."""
    if type(value) is str:
        yield repr(value[:_SHOWN + 1])
    elif type(value) is list:
        for index, item in enumerate(value):
            yield ", " if index else "["
            yield from _spell(item)
        yield "]" if value else "[]"
    elif type(value) is dict:
        for index, (key, item) in enumerate(value.items()):
            yield ", " if index else "{"
            yield from _spell(key)
            yield ": "
            yield from _spell(item)
        yield "}" if value else "{}"
    else:
        try:
            yield repr(value)
        except ValueError:  # Python declines to print integers of thousands of digits
            yield "a huge number"


def is_panic(error: BaseException) -> bool:
    """True if the error is a panic of a Rust library, which is no Exception."""
    return type(error).__name__ == "PanicException"


def forked_from(process: int) -> UnavailableError:
    """Returns the error for a process that was forked from the model's."""
    return UnavailableError(
        f"the model was loaded by process {process}, and this one was forked from it, without its threads: load the "
        "model here, or start processes with multiprocessing's \"spawn\" method")
