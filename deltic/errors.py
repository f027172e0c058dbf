"""The exceptions a caller can act on. Every message names the thing that is wrong and the fix."""

from __future__ import annotations

from typing import Any


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


class BusyError(DelticError):
    """There is more work than a limit allows; the same request may be served later. retry_after: in so many seconds."""

    def __init__(self, message: str, retry_after: int = 1) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class UnavailableError(DelticError):
    """The engine takes no requests: it was closed, or it has broken down."""


class GenerationError(DelticError):
    """The engine gave up on an answer.

    `output` is what there is of it, where the caller would have got an `Output`: the choices that ended well are
    whole, the others say what went wrong.
    """

    def __init__(self, message: str, output: Any = None) -> None:
        super().__init__(message)
        self.output = output


class DegenerateError(DelticError):
    """The model's logits are NaN or all equal: weights, dtype or a kernel are broken."""


def show(value: object) -> str:
    """A value as a message quotes it: not without end, whoever gave it."""
    try:
        text = repr(value)
    except ValueError:  # Python declines to print integers of thousands of digits
        text = "a huge number"
    return text if len(text) <= 80 else text[:77] + "..."
