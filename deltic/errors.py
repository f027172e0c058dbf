"""Defines the exceptions that a caller can act on. Every message names the problem and the fix."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

_SHOWN: Final = 80


class DelticError(ValueError):
    """Base of all errors that deltic raises on purpose; the command line exits with code 2."""


class ModelError(DelticError):
    """A model cannot be found, read or trusted: unknown name, corrupt file, or weights that contradict the config."""


class ConfigError(DelticError):
    """An engine option has an invalid value."""

    def __init__(self, message: str, option: str | None = None) -> None:
        super().__init__(message)
        self.option = option


class TemplateError(DelticError):
    """The model's chat template is missing or is not valid jinja."""


class RequestError(DelticError):
    """One request cannot be served as asked. Other requests are not affected.

    `field` is the path of the invalid field in the request (`messages[2].content`), or None.
    """

    def __init__(self, message: str, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field


class LongPromptError(RequestError):
    """The prompt has more tokens than the context or a limit allows."""


def too_long(tokens: int | str, reason: str) -> str:
    """Returns the message for a prompt of `tokens` tokens that is too long. reason: the limit, and what to do.

    Clients search for the words "prompt is too long" and "maximum context length is N tokens" to detect that they must
    shorten a conversation.
    """
    return f"the prompt is too long: it has {tokens} tokens {reason}"


def context_bound(tokens: int) -> str:
    """Returns the `reason` of `too_long` for a prompt that fills a context of `tokens` tokens."""
    return f"and the maximum context length is {tokens} tokens, answer included: shorten it, or raise `max_context`"


@contextmanager
def of_prompt(field: str) -> Iterator[None]:
    """Adds `field`, which names one of several prompts, to a RequestError that the block raises."""
    try:
        yield
    except RequestError as error:
        raise type(error)(f"{field}: {error}", field if error.field == "prompt" else error.field) from error


class BusyError(DelticError):
    """A load limit is reached; the request may succeed later. retry_after: seconds to wait before a retry."""

    def __init__(self, message: str, retry_after: int = 1) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class QuotaError(BusyError):
    """One caller has reached its limit of concurrent requests."""


class UnavailableError(DelticError):
    """The engine accepts no requests because it was closed or has failed."""


class GenerationError(DelticError):
    """The engine could not complete an answer.

    output: the partial `Output` of a call that returns one; its failed choices carry their errors.
    """

    def __init__(self, message: str, output: Any = None) -> None:
        super().__init__(message)
        self.output = output


class DegenerateError(DelticError):
    """The model's logits are NaN or all equal: weights, dtype or a kernel are broken."""


def valid_text(value: object, field: str) -> str:
    """Returns `value` as text. Raises RequestError with `field` if it has another type or is invalid Unicode."""
    if not isinstance(value, str):
        raise RequestError(f"{field} must be text, not {show(value)}", field)
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise RequestError(f"{field} has a lone surrogate at position {error.start}, which is not valid Unicode: send "
                           "well-formed UTF-8", field) from error
    return str(value)


def show(value: object) -> str:
    """Returns a value as quoted in messages, cut to _SHOWN characters. Reads only the part that it shows."""
    text = ""
    for piece in _spell(value):
        text += piece
        if len(text) > _SHOWN:
            return text[:_SHOWN - 3] + "..."
    return text


def _spell(value: object) -> Iterator[str]:
    """Yields repr(value) in pieces."""
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
        except ValueError:  # Python refuses to print integers of thousands of digits
            yield "a huge number"


def is_panic(error: BaseException) -> bool:
    """Returns True if the error is a panic of a Rust library, which is a BaseException but no Exception."""
    return type(error).__name__ == "PanicException"


def forked_from(process: int) -> UnavailableError:
    """Returns the error for a call in a process that was forked from `process`, which loaded the model."""
    return UnavailableError(
        f"the model was loaded by process {process}, and this one was forked from it, without its threads: load the "
        "model here, or start processes with multiprocessing's \"spawn\" method")
