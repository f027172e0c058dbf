"""The text side of a model: from messages or text to a `Request`, and a router for what comes back."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from deltic.errors import RequestError, TemplateError
from deltic.text.chat import ChatTemplate, build_prompt, load_template
from deltic.text.stream import Router, chat_router, text_router
from deltic.text.tokenizer import Tokenizer
from deltic.types import Matcher, Request, SamplingParams


@dataclass(frozen=True, slots=True)
class Job:
    """A request, and the router that each of its choices starts from (take a copy for each)."""

    request: Request
    router: Router


class Front:
    """Tokenizer and chat template of one model. template: jinja source to use instead of the model's own."""

    def __init__(self, tokenizer: Tokenizer, template: str | None = None) -> None:
        self.tokenizer = tokenizer
        self._override = ChatTemplate(template, tokenizer.special_tokens) if template is not None else None

    @classmethod
    def from_directory(cls, directory: Path, template: Path | None = None) -> Front:
        """Read a model directory's tokenizer; `template` is a file with a chat template."""
        return cls(Tokenizer.from_directory(directory), _read_template(template) if template else None)

    def chat(self, messages: Any, sampling: SamplingParams = SamplingParams(), *, tools: Any = None,
             parse_calls: bool = True, variables: Mapping[str, Any] | None = None) -> Job:
        """The next turn of a conversation.

        tools are shown to the model; parse_calls: its calls become tool deltas, else they stay content.
        variables: template variables such as enable_thinking. RequestError names what is wrong.
        """
        template = self._override or load_template(self.tokenizer, tools)
        prompt = build_prompt(template, self.tokenizer, messages, tools, variables)
        router = chat_router(self.tokenizer, prompt.ids, tools if parse_calls else None, sampling.stop)
        return _job(prompt.ids, sampling, router, prompt.boundaries)

    def complete(self, prompt: str | Sequence[int], sampling: SamplingParams = SamplingParams()) -> Job:
        """Continue a text (special tokens in it are recognised) or token ids as they stand."""
        ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
        return _job(tuple(ids), sampling, text_router(self.tokenizer, sampling.stop))


def bare_job(ids: Sequence[int], sampling: SamplingParams = SamplingParams()) -> Job:
    """A job for a model without tokenizer: token ids in, no text out."""
    if sampling.stop:
        raise RequestError("stop strings need a tokenizer: use stop_token_ids", "stop")
    return _job(tuple(ids), sampling, Router(lambda token: b""))


def _job(ids: tuple[int, ...], sampling: SamplingParams, router: Router, boundaries: tuple[int, ...] = ()) -> Job:
    matcher = partial(_matcher, router.copy()) if sampling.stop else None
    return Job(Request(uuid.uuid4().hex, ids, sampling, boundaries, matcher), router)


def _matcher(router: Router) -> Matcher:
    matcher = router.matcher()
    assert matcher is not None
    return matcher


def _read_template(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise TemplateError(f"the chat template {path} cannot be read: {error}") from error
