"""Errors of the HTTP API: maps exceptions to problems, and problems to the error format of each API."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Scope

from deltic.errors import (
    BusyError,
    DelticError,
    GenerationError,
    LongPromptError,
    QuotaError,
    RequestError,
    UnavailableError,
)
from deltic.server.http import event, json_response

log = logging.getLogger("deltic")

ANTHROPIC_PATH: Final = "/v1/messages"
OLLAMA_PATH: Final = "/api/"
NO_THREADS: Final = "thread_unsupported_request"
"""Error code that makes Anthropic's clients continue without a thread."""

_STATUSES: Final[Mapping[type[Exception], tuple[int, str | None]]] = {
    LongPromptError: (400, "context_length_exceeded"),
    QuotaError: (429, "rate_limit_exceeded"),
    BusyError: (503, None),
    UnavailableError: (503, None),
    GenerationError: (500, None),
    DelticError: (400, None),
    ClientDisconnect: (499, None),
}
"""Status and error code by exception type; the first matching type applies."""
_OPENAI_TYPES: Final = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
_ANTHROPIC_TYPES: Final = {
    401: "authentication_error", 403: "permission_error", 404: "not_found_error", 413: "request_too_large",
    429: "rate_limit_error", 529: "overloaded_error"}
_OVERLOADED: Final = 529

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Problem:
    """An error as a client sees it.

    param: path of the invalid field. retry_after: seconds after which the client may try again. request_id: id of the
    request, if the server read enough of the request to assign one.
    """

    status: int
    message: str
    param: str | None = None
    code: str | None = None
    retry_after: int | None = None
    request_id: str | None = None


class ProblemError(Exception):
    """Ends the handling of a request with a problem."""

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.problem = Problem(status, message, param, code)


Refuse = Callable[[Problem], Response]


def problem_of(error: Exception) -> Problem:
    """Returns the part of an exception that a client may see. Unexpected exceptions are only logged."""
    if isinstance(error, ProblemError):
        return error.problem
    if isinstance(error, HTTPException):
        return Problem(error.status_code, str(error.detail))
    for kind, (status, code) in _STATUSES.items():
        if isinstance(error, kind):
            message = str(error) or "the client is gone"
            field = error.field if isinstance(error, RequestError) else None
            return Problem(status, message, field, code, getattr(error, "retry_after", None))
    log.error("internal error", exc_info=error)
    return Problem(500, "internal error; the server's log has the details")


def openai_fields(problem: Problem) -> Json:
    """Returns the body of an error in OpenAI's form."""
    kind = _OPENAI_TYPES.get(problem.status, "invalid_request_error" if problem.status < 500 else "server_error")
    return {"error": {"message": problem.message, "type": kind, "param": problem.param, "code": problem.code}}


def openai_error(problem: Problem) -> Response:
    return _response(problem, problem.status, openai_fields(problem))


def anthropic_fields(problem: Problem, status: int | None = None) -> Json:
    """Returns the body of an error in Anthropic's form."""
    status = status or problem.status
    kind = _ANTHROPIC_TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    named = problem.param is None or problem.param in problem.message
    fields: Json = {"type": kind, "message": problem.message if named else f"{problem.param}: {problem.message}"}
    if problem.code == NO_THREADS:
        fields["details"] = {"error_code": NO_THREADS, "unsupported": [problem.param]}
    return {"type": "error", "error": fields}


def anthropic_error(problem: Problem) -> Response:
    """Returns an error in Anthropic's form. Anthropic's clients retry after status 529."""
    status = _OVERLOADED if problem.status == 503 and problem.retry_after is not None else problem.status
    return _response(problem, status, anthropic_fields(problem, status) | {"request_id": problem.request_id})


def ollama_error(problem: Problem) -> Response:
    return _response(problem, problem.status, {"error": problem.message})


def openai_event(error: Exception) -> bytes:
    """Returns the last event of a failed stream in OpenAI's form."""
    return event(openai_fields(problem_of(error)))


def anthropic_event(error: Exception) -> bytes:
    return event(anthropic_fields(problem_of(error)), "error")


def fields_for(path: str, problem: Problem) -> Json:
    """Returns the body of an error for a path, in the format of its API, if the request could not be read."""
    return anthropic_fields(problem) if path.startswith(ANTHROPIC_PATH) else openai_fields(problem)


def refusal(scope: Scope, problem: Problem, headers: Mapping[str, str] | None = None) -> Response:
    """Records an error outside of all endpoints, and returns it in the format of the path's API."""
    record, path = scope["state"]["record"], scope["path"]
    record.problem = {"param": problem.param, "code": problem.code}
    refuse: Refuse = openai_error
    if path.startswith(OLLAMA_PATH) and not path.startswith("/api/v1/"):  # some clients have OpenAI's API there
        refuse = ollama_error
    elif path.startswith(ANTHROPIC_PATH):
        refuse = anthropic_error
    response = refuse(replace(problem, request_id=record.id))
    response.headers.update(headers or {})
    return response


def _response(problem: Problem, status: int, fields: Json) -> Response:
    response = json_response(fields, status)
    if problem.retry_after is not None:
        response.headers["retry-after"] = str(problem.retry_after)
    return response
