"""What is served: models in OpenAI's and in Anthropic's form, their tokens as vLLM names the routes, the version."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from deltic import __version__
from deltic.errors import RequestError
from deltic.server.anthropic import formatting as anthropic
from deltic.server.body import Fields
from deltic.server.codex import catalogue
from deltic.server.embeddings.service import Services
from deltic.server.http import Check, Endpoint, answering, json_response, written
from deltic.server.model_registry import ModelEntry, ModelRegistry
from deltic.server.openai.formatting import error_response
from deltic.server.openai.preparation import chat_job
from deltic.server.openai.schema import ChatRequest
from deltic.server.served_model import ServedModel


def routes(models: ModelRegistry, encoders: Services, check: Check) -> list[Route]:
    """/v1/models, /tokenize, /detokenize, /tokenizer_info, /version. encoders: what is listed too, where OpenAI's form
    is asked for."""
    endpoints = _ModelEndpoints(models, encoders)
    tokens = (("/tokenize", endpoints.tokenize), ("/detokenize", endpoints.detokenize))
    return [Route("/v1/models", _either(endpoints.models, check)),
            Route("/v1/models/{model:path}", _either(endpoints.model, check)),
            *(Route(path, answering(endpoint, check, error_response), methods=["POST"]) for path, endpoint in tokens),
            Route("/tokenizer_info", answering(endpoints.tokenizer_info, check, error_response)),
            Route("/version", answering(_version, check, error_response))]


class TokenizeRequest(ChatRequest):
    """The body of /tokenize: a prompt, or messages with all that a chat request has."""

    messages: list[Any] = []  # noqa: RUF012
    prompt: str | None = None
    return_token_strs: bool | None = None
    add_special_tokens: bool | None = None


class DetokenizeRequest(Fields):
    """The body of /detokenize."""

    model: str | None = None
    tokens: list[int]


def _is_anthropic(request: Request) -> bool:
    return "anthropic-version" in request.headers


def _either(endpoint: Endpoint, check: Check) -> Endpoint:
    """Errors in the form of the client that asks."""
    ours, theirs = (answering(endpoint, check, refuse) for refuse in (error_response, anthropic.error_response))

    async def answer(request: Request) -> Response:
        return await (theirs if _is_anthropic(request) else ours)(request)
    return answer


async def _version(_: Request) -> Response:
    return json_response({"version": __version__})


@dataclass(frozen=True, slots=True)
class _ModelEndpoints:
    registry: ModelRegistry
    encoders: Services

    async def models(self, request: Request) -> Response:
        found = [self._model(request, entry) for entry in self.registry.entries()]
        if _is_anthropic(request):
            return json_response({"data": found, "has_more": False, "first_id": found[0]["id"],
                                  "last_id": found[-1]["id"]})
        listed = {"object": "list", "data": [*found, *(each.fields() for each in self.encoders)]}
        if "client_version" in request.query_params:
            listed["models"] = catalogue(self.registry.entries())
        return json_response(listed)

    async def model(self, request: Request) -> Response:
        name = request.path_params["model"]
        encoder = None if _is_anthropic(request) else self.encoders.named(name)
        return json_response(encoder.fields() if encoder else self._model(request, self.registry.entry(name)))

    async def tokenize(self, request: Request) -> Response:
        served, body, ids = await self.registry.read(request, TokenizeRequest, _tokens, answers=False)
        shown = (served.token_bytes(id).decode("utf-8", "replace") for id in ids)
        return await written(request, {"count": len(ids), "max_model_len": served.llm.engine.max_context,
                              "tokens": iter(ids), "token_strs": shown if body.return_token_strs else None}, len(ids))

    async def detokenize(self, request: Request) -> Response:
        _, _, text = await self.registry.read(request, DetokenizeRequest, _text, answers=False)
        return await written(request, {"prompt": text}, len(text))

    async def tokenizer_info(self, request: Request) -> Response:
        served = await self.registry.served(request, request.query_params.get("model"))
        return json_response(_described(served))

    def _model(self, request: Request, entry: ModelEntry) -> dict[str, Any]:
        if _is_anthropic(request):
            created = datetime.fromtimestamp(entry.created, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
            return {"id": entry.name, "type": "model", "display_name": entry.name, "created_at": created,
                    "max_input_tokens": entry.context,
                    "max_tokens": self.registry.limits.max_answer_tokens or entry.context,
                    "lifecycle": "active", "capabilities": None}
        return {"id": entry.name, "object": "model", "created": entry.created, "owned_by": "deltic",
                "max_model_len": entry.context, "loaded": entry.loaded,
                "modalities": None if entry.sees is None else {"vision": entry.sees}}


def _tokens(served: ServedModel, body: TokenizeRequest) -> tuple[int, ...]:
    if (body.prompt is None) == (not body.messages):
        raise RequestError("give either prompt or messages", "prompt")
    if body.prompt is None:
        if body.add_special_tokens:
            body.ignored.append("add_special_tokens")
        return chat_job(served, body).request.ids
    sampling = body.sampling(served.limits)
    return served.complete(body.prompt, sampling, add_special=body.add_special_tokens).request.ids


def _described(served: ServedModel) -> dict[str, Any]:
    """A tokenizer in the words of tokenizer_config.json, as vLLM describes it."""
    tokenizer = served.tokenizer
    before, after = tokenizer.around
    return {**tokenizer.special_tokens, "chat_template": tokenizer.chat_template,
            "add_bos_token": tokenizer.bos_id in before, "add_eos_token": tokenizer.eos_id in after,
            "vocab_size": tokenizer.vocab_size, "model_max_length": served.llm.engine.max_context,
            "tokenizer_class": "PreTrainedTokenizerFast"}


def _text(served: ServedModel, body: DetokenizeRequest) -> str:
    vocabulary = served.llm.runtime.config.vocab_size
    wrong = next((token for token in body.tokens if not 0 <= token < vocabulary), None)
    if wrong is not None:
        raise RequestError(f"tokens has {wrong}, and the model has tokens from 0 to {vocabulary - 1}", "tokens")
    return served.text(body.tokens)
