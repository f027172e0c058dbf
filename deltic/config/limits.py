"""What one client may ask for, so that it never costs the others. Every limit has a name and a default."""

from __future__ import annotations

from dataclasses import Field, dataclass, field, fields
from typing import Any, Final

from deltic.errors import ConfigError, show

_MOST: Final = 1 << 31


def _limit(default: Any, help: str, low: float = 1) -> Any:
    return field(default=default, metadata={"help": help, "low": low})


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of a server and of each request; what passes one is refused with an error that names it.

    None: no bound, or as much as the context holds. ConfigError names a limit whose value it cannot have.
    """

    max_connections: int = _limit(1024, "open connections; beyond them one that waits for a request is closed, or the "
                                        "new one refused")
    header_seconds: int = _limit(20, "seconds that a client may take to send a request's headers, and that may pass "
                                     "between two pieces of its body")
    keep_alive_seconds: int = _limit(65, "seconds after which a connection without a request is closed")
    max_header_kib: int = _limit(16, "KiB of a request's headers and target, where each header counts for at least 64 "
                                     "bytes")
    max_body_chunks: int = _limit(4096, "chunks of a request's body, in addition to one for each 64 bytes")
    max_body_mib: int = _limit(8, "MiB of a request's body")
    max_bodies_mib: int = _limit(64, "MiB of all bodies that are being received and read")
    max_body_values: int = _limit(100_000, "values in a request's body: lists, objects and their members; four strings "
                                           "or numbers of a list count as one")
    max_waiting: int = _limit(512, "answers that may wait for a place in the batch; then requests are refused with "
                                   "status 503 and Retry-After")
    max_wait_seconds: float | None = _limit(None, "seconds that a request may probably have to wait for a place in the "
                                                  "batch; else it is refused with status 503 and Retry-After (default: "
                                                  "no bound)", 0.01)
    max_live_tokens: int = _limit(8_000_000, "prompt tokens of all requests that run or wait; then requests are "
                                             "refused with status 503 and Retry-After")
    max_running_per_key: int | None = _limit(None, "answers of an API key that run or wait; then its requests are "
                                                   "refused with status 429 and Retry-After (default: no bound)")
    max_choices: int = _limit(128, "answers that one request may ask for: its prompts times its n")
    max_messages: int = _limit(4096, "messages of a conversation")
    max_pictures: int = _limit(256, "pictures of a conversation", 0)
    max_picture_megapixels: int = _limit(64, "megapixels of a picture as stored in its file")
    max_request_megapixels: int = _limit(512, "megapixels of all pictures of a request")
    max_pictures_mib: int = _limit(1024, "MiB of the decoded pictures of all requests that run or wait; one client "
                                         "may hold at most as much as stays free. Beyond that requests get status "
                                         "503 and Retry-After")
    picture_seconds: float = _limit(20.0, "seconds of processor time for decoding the pictures of a request",
                                    0.01)
    max_document_pages: int = _limit(1000, "pages of a PDF document")
    max_document_characters: int = _limit(4_000_000, "characters of a PDF document's text")
    document_seconds: float = _limit(10.0, "seconds of processor time for reading a PDF document", 0.01)
    max_texts: int = _limit(10_000, "texts of a request for vectors or scores")
    max_tools: int = _limit(512, "tools of a request")
    max_schema_kib: int = _limit(1024, "KiB of JSON that the tools and schemas of a request may take")
    schema_seconds: float = _limit(5.0, "seconds of processor time for compiling a schema or grammar", 0.01)
    template_seconds: float = _limit(5.0, "seconds that the chat template may take to render a conversation", 0.01)
    max_prompt_tokens: int | None = _limit(None, "tokens of a prompt (default: what the context holds)")
    max_counted_tokens: int = _limit(1_000_000, "tokens of a prompt that is only counted, or cut before it is read")
    max_answer_tokens: int | None = _limit(None, "tokens of an answer (default: what the context holds)")
    max_answer_values: int = _limit(500_000, "tokens, and probabilities of tokens (logprobs), of an answer that is not "
                                             "streamed")
    max_stops: int = _limit(64, "stop strings of a request, and stop token ids", 0)
    max_stop_characters: int = _limit(8192, "characters of all stop strings of a request", 0)
    max_logit_bias: int = _limit(300, "tokens that a request may give a bias", 0)
    max_stored_responses: int = _limit(1000, "responses that are kept for previous_response_id; those used last stay",
                                       0)
    max_stored_mib: int = _limit(64, "MiB that these may take, in memory", 0)
    max_unread_tokens: int = _limit(64, "tokens of a request's answers that may wait for a client that does not read; "
                                         "then they pause and give their places to others")
    max_unsent_mib: int = _limit(256, "MiB of unread large answers; beyond that the connection with the longest "
                                      "waiting answer is closed")
    unread_seconds: int = _limit(60, "seconds without reading after which a client's connection is closed, and "
                                     "its answers end")

    def __post_init__(self) -> None:
        for limit in fields(self):
            _check(limit, getattr(self, limit.name))


def _check(limit: Field[Any], value: Any) -> None:
    optional = limit.default is None
    if optional and value is None:
        return
    whole = not isinstance(limit.metadata["low"], float)
    if isinstance(value, bool) or not isinstance(value, int if whole else int | float):
        raise ConfigError(f"{limit.name} must be {'an integer' if whole else 'a number'}, not {show(value)}",
                          limit.name)
    low = limit.metadata["low"]
    if not low <= value <= _MOST:
        raise ConfigError(f"{limit.name} must be from {low} to {_MOST}, not {show(value)}", limit.name)
