"""Lists the served models in the formats of OpenAI, Anthropic and Codex, and serves vLLM's routes for tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, ClassVar, Final

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from deltic.errors import RequestError
from deltic.server.embeddings import Services
from deltic.server.errors import anthropic_error, openai_error
from deltic.server.fields import Fields
from deltic.server.generation import ServedModel
from deltic.server.http import json_response, written
from deltic.server.models import ModelEntry, ModelRegistry
from deltic.server.openai_schema import MESSAGES_SCHEMA, ChatRequest, prepare_chat
from deltic.server.routing import ApiRoute, Check, Endpoint, answering

Json = dict[str, Any]

CODEX_INSTRUCTIONS: Final = """\
You are a coding agent in the Codex CLI, on the user's computer. You work in the user's repository until the task is
done.

- Read before you write: look at the files that matter, with `rg`, `sed -n` or `cat`.
- Run commands with the shell tool. Say in one line what you are about to do.
- Edit files with the tool for patches where there is one, else with the shell. Change no more than the task needs, in
  the style of the code around it.
- Run the tests or the program after a change, and correct what fails.
- Do not commit, and undo nothing that you did not do, unless you are asked to.
- Follow AGENTS.md files: one holds for all files below its folder.
- End with a short report: what you changed and where, and what you could not do.
"""
"""Instructions in the model catalogue, from which Codex takes them."""


class TokenizeRequest(ChatRequest):
    """The body of /tokenize: a prompt, or messages with the fields of a chat request."""

    schemas: ClassVar[Mapping[str, Any]] = {"messages": MESSAGES_SCHEMA}

    messages: list[Any] = []  # noqa: RUF012
    prompt: str | None = None
    return_token_strs: bool | None = None
    add_special_tokens: bool | None = None


class DetokenizeRequest(Fields):
    """The body of /detokenize."""

    model: str | None = None
    tokens: list[int]


def routes(models: ModelRegistry, services: Services, check: Check) -> list[Route]:
    endpoints = _ModelEndpoints(models, services)
    return [Route("/v1/models", _by_client(endpoints.models, check)),
            Route("/v1/models/{model:path}", _by_client(endpoints.model, check)),
            ApiRoute("/tokenize", endpoints.tokenize, check, body=TokenizeRequest),
            ApiRoute("/detokenize", endpoints.detokenize, check, body=DetokenizeRequest),
            ApiRoute("/tokenizer_info", endpoints.tokenizer_info, check, query={"model": {"type": "string"}})]


def encoder_routes(services: Services, check: Check) -> list[Route]:
    """Returns the routes of a server that has encoders only."""
    async def models(_: Request) -> Response:
        return json_response({"object": "list", "data": [service.fields() for service in services]})

    async def model(request: Request) -> Response:
        return json_response(services.find(request.path_params["model"]).fields())

    return [ApiRoute("/v1/models", models, check), ApiRoute("/v1/models/{model:path}", model, check)]


def _is_anthropic(request: Request) -> bool:
    return "anthropic-version" in request.headers


def _by_client(endpoint: Endpoint, check: Check) -> Endpoint:
    """Wraps an endpoint so that errors are in the format of the client's API."""
    ours, theirs = answering(endpoint, check, openai_error), answering(endpoint, check, anthropic_error)

    async def answer(request: Request) -> Response:
        return await (theirs if _is_anthropic(request) else ours)(request)

    return answer


@dataclass(frozen=True, slots=True)
class _ModelEndpoints:
    registry: ModelRegistry
    services: Services

    async def models(self, request: Request) -> Response:
        entries = self.registry.entries()
        if _is_anthropic(request):
            return json_response({"data": [self._anthropic(entry) for entry in entries], "has_more": False,
                                  "first_id": entries[0].name, "last_id": entries[-1].name})
        data = [*map(_openai, entries), *(service.fields() for service in self.services)]
        codex = {"models": _codex_catalogue(entries)} if "client_version" in request.query_params else {}
        return json_response({"object": "list", "data": data, **codex})

    async def model(self, request: Request) -> Response:
        name = request.path_params["model"]
        if _is_anthropic(request):
            return json_response(self._anthropic(self.registry.entry(name)))
        encoder = self.services.named(name)
        return json_response(encoder.fields() if encoder else _openai(self.registry.entry(name)))

    async def tokenize(self, request: Request) -> Response:
        served, body, ids = await self.registry.read(request, TokenizeRequest, _tokens, answers=False)
        texts = (served.token_bytes(id).decode("utf-8", "replace") for id in ids)
        return await written(request, {"count": len(ids), "max_model_len": served.llm.engine.max_context,
                                       "tokens": ids, "token_strs": texts if body.return_token_strs else None},
                             len(ids))

    async def detokenize(self, request: Request) -> Response:
        _, _, text = await self.registry.read(request, DetokenizeRequest, _text, answers=False)
        return await written(request, {"prompt": text}, len(text))

    async def tokenizer_info(self, request: Request) -> Response:
        served = await self.registry.served(request, request.query_params.get("model"))
        return json_response(_tokenizer(served))

    def _anthropic(self, entry: ModelEntry) -> Json:
        created = datetime.fromtimestamp(entry.created, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        return {"id": entry.name, "type": "model", "display_name": entry.name, "created_at": created,
                "max_input_tokens": entry.context,
                "max_tokens": self.registry.limits.max_answer_tokens or entry.context,
                "lifecycle": "active", "capabilities": None}


def _openai(entry: ModelEntry) -> Json:
    return {"id": entry.name, "object": "model", "created": entry.created, "owned_by": "deltic",
            "max_model_len": entry.context, "loaded": entry.loaded,
            "modalities": None if entry.sees is None else {"vision": entry.sees},
            **({"parent": entry.parent} if entry.parent else {})}


def _codex_catalogue(entries: list[ModelEntry]) -> list[dict[str, Any]]:
    """Returns the models in Codex's format. Reasoning summaries are declared as supported, because Codex sends thinking
    back only then."""
    return [_codex_model(entry, place) for place, entry in enumerate(entries)]


def _codex_model(entry: ModelEntry, place: int) -> dict[str, Any]:
    return {
        "slug": entry.name, "display_name": entry.name, "description": None, "priority": place, "visibility": "list",
        "supported_in_api": True, "upgrade": None, "base_instructions": CODEX_INSTRUCTIONS, "shell_type": "default",
        "apply_patch_tool_type": None, "experimental_supported_tools": [], "supports_parallel_tool_calls": True,
        "default_reasoning_level": None, "supported_reasoning_levels": [], "supports_reasoning_summaries": True,
        "support_verbosity": False, "default_verbosity": None,
        "truncation_policy": {"mode": "bytes", "limit": 10_000},
        "context_window": entry.context, "effective_context_window_percent": 95,
        "input_modalities": ["text", "image"] if entry.sees else ["text"]}


def _tokens(served: ServedModel, body: TokenizeRequest) -> tuple[int, ...]:
    if (body.prompt is None) == (not body.messages):
        raise RequestError("give either prompt or messages", "prompt")
    if body.prompt is None:
        if body.add_special_tokens:
            body.ignored.append("add_special_tokens")
        return prepare_chat(served, body).request.ids
    sampling = body.sampling(served.limits)
    return served.complete(body.prompt, sampling, add_special=body.add_special_tokens).request.ids


def _text(served: ServedModel, body: DetokenizeRequest) -> str:
    vocabulary = served.llm.runtime.config.vocab_size
    for token in body.tokens:
        if not 0 <= token < vocabulary:
            raise RequestError(f"tokens has {token}, and the model has tokens from 0 to {vocabulary - 1}", "tokens")
    return served.text(body.tokens)


def _tokenizer(served: ServedModel) -> Json:
    """Returns the fields of tokenizer_config.json, as vLLM does."""
    tokenizer = served.tokenizer
    before, after = tokenizer.around
    return {**tokenizer.special_tokens, "chat_template": tokenizer.chat_template,
            "add_bos_token": tokenizer.bos_id in before, "add_eos_token": tokenizer.eos_id in after,
            "vocab_size": tokenizer.vocab_size, "model_max_length": served.llm.engine.max_context,
            "tokenizer_class": "PreTrainedTokenizerFast"}
