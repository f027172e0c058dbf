"""Defines the limits that protect the clients of a server from each other. Each limit has a name and a default."""

from __future__ import annotations

from dataclasses import Field, dataclass, field, fields
from typing import Any, ClassVar, Final

from deltic.errors import ConfigError, show

_HIGHEST: Final = 1 << 31


def _limit(default: Any, help: str, low: float = 1) -> Any:
    return field(default=default, metadata={"help": help, "low": low})


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of a server and of each request. An error about an exceeded bound contains its name.

    None: no bound, or the context's bound. A value out of range raises ConfigError with the limit's name.
    """

    max_header_kib: ClassVar[int] = 16
    max_body_chunks: ClassVar[int] = 4096
    schema_seconds: ClassVar[float] = 5.0

    # Connections
    max_connections: int = _limit(1024, "open connections; beyond them an idle one is closed, or the new one refused")
    header_seconds: int = _limit(20, "seconds to send a request's headers, and between two pieces of its body")
    keep_alive_seconds: int = _limit(65, "seconds after which an idle connection is closed")
    max_body_mib: int = _limit(8, "MiB of a request's body")
    max_body_values: int = _limit(
        100_000, "values in a request's body; four strings or numbers of a list count as one")
    max_bodies_mib: int = _limit(64, "MiB of all bodies in transfer")
    max_unread_tokens: int = _limit(64, "unread tokens of a request after which its answers pause")
    max_unsent_mib: int = _limit(
        256, "MiB of unread large answers; beyond that the connection with the longest one is closed")
    unread_seconds: int = _limit(60, "seconds without reading after which a connection is closed and its answers end")

    # Requests that run or wait; beyond these the status is 503, for a key 429, with Retry-After
    max_waiting: int = _limit(512, "answers that wait for a place in the batch; then status 503 with Retry-After")
    max_wait_seconds: float | None = _limit(
        None, "predicted seconds until a place in the batch is free; beyond that status 503 with Retry-After "
        "(default: no bound)", 0.01)
    max_live_tokens: int = _limit(
        8_000_000, "prompt tokens of all requests that run or wait; then status 503 with Retry-After")
    max_running_per_key: int | None = _limit(
        None, "answers of an API key that run or wait; then status 429 with Retry-After (default: no bound)")
    max_pictures_mib: int = _limit(
        1024, "MiB of decoded pictures of all requests; one client may hold at most as much as stays free. Beyond that "
        "status 503 with Retry-After")

    # Adapters
    max_adapters: int = _limit(64, "adapters (LoRA) that are loaded at the same time", 0)
    max_adapters_mib: int = _limit(4096, "MiB of all loaded adapters")

    # A request
    max_choices: int = _limit(128, "answers of a request: its prompts times its n")
    max_messages: int = _limit(4096, "messages of a conversation")
    max_prompt_tokens: int | None = _limit(None, "tokens of a prompt (default: the context)")
    max_counted_tokens: int = _limit(1_000_000, "tokens of a prompt that is only counted or truncated")
    max_answer_tokens: int | None = _limit(None, "tokens of an answer (default: the context)")
    max_answer_values: int = _limit(500_000, "tokens and logprobs of an answer that is not streamed")
    max_stops: int = _limit(64, "stop strings of a request, and stop token ids", 0)
    max_stop_characters: int = _limit(8192, "characters of all stop strings of a request", 0)
    max_logit_bias: int = _limit(300, "tokens with a bias", 0)
    max_tools: int = _limit(512, "tools of a request")
    max_schema_kib: int = _limit(1024, "KiB of JSON of the tools and schemas of a request")
    max_texts: int = _limit(10_000, "texts of a request for embeddings or scores")
    template_seconds: float = _limit(5.0, "seconds to render a conversation with the chat template", 0.01)

    # Pictures and documents
    max_pictures: int = _limit(256, "pictures of a conversation", 0)
    max_picture_megapixels: int = _limit(64, "megapixels of a picture as stored in its file")
    max_request_megapixels: int = _limit(512, "megapixels of all pictures of a request")
    picture_seconds: float = _limit(20.0, "seconds of processor time to decode the pictures of a request", 0.01)
    max_document_pages: int = _limit(1000, "pages of a PDF document")
    max_document_characters: int = _limit(4_000_000, "characters of a PDF document's text")
    document_seconds: float = _limit(10.0, "seconds of processor time to read a PDF document", 0.01)

    # Stored responses
    max_stored_responses: int = _limit(1000, "responses kept for previous_response_id and fork_from, by last use", 0)
    max_stored_mib: int = _limit(64, "MiB of stored responses", 0)

    # Saved states
    max_states_mib: int = _limit(10_240, "MiB of saved states in the server's directory", 0)

    def __post_init__(self) -> None:
        for limit in fields(self):
            _check(limit, getattr(self, limit.name))


def _check(limit: Field[Any], value: Any) -> None:
    if value is None and limit.default is None:
        return
    low = limit.metadata["low"]
    kind, name = ((int | float), "a number") if isinstance(low, float) else (int, "an integer")
    if isinstance(value, bool) or not isinstance(value, kind):
        raise ConfigError(f"{limit.name} must be {name}, not {show(value)}", limit.name)
    if not low <= value <= _HIGHEST:
        raise ConfigError(f"{limit.name} must be from {low} to {_HIGHEST}, not {show(value)}", limit.name)
