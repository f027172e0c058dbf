"""OpenAI's request schemas, and their translation into requests to the engine.

Requests of the other APIs are first translated to a `ChatRequest` or a `CompletionRequest`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal

from pydantic import create_model

from deltic.chat.control_tokens import Infill
from deltic.chat.processor import PreparedRequest, prompt_bound
from deltic.chat.response_format import GUIDED, OutputFormat, only_format, response_format, structured_outputs
from deltic.chat.tool_grammar import AnswerForm, ToolChoice
from deltic.config import Limits
from deltic.errors import RequestError, of_prompt, show, valid_text
from deltic.params import PARAMETERS, Prompt, SamplingParams
from deltic.server.content import ContentReader
from deltic.server.fields import Fields, Known, SaltedFields, check_within, renamed, usable_tools
from deltic.server.generation import ServedModel
from deltic.server.records import salt_of

_COMPLETION_TOKENS: Final = 16

_UNSUPPORTED: Final[Mapping[str, tuple[Any, ...]]] = {
    "modalities": (["text"],), "functions": ([],), "function_call": ("none",), "audio": (), "prediction": (),
    "web_search_options": (), "moderation": ()}
"""Fields that are not supported, with the values that request nothing."""
_INSTEAD: Final = {"functions": ": use tools", "function_call": ": use tool_choice"}
_TIERS: Final = (None, "auto", "default", "standard", "standard_only")
"""Service tiers that are accepted. There is only one class of service, so they have no effect."""

_FUNCTION: Final = Known.of("name arguments")
_PART: Final = Known.of("type text refusal image video video_url url source fps", image_url=Known.of("url")).only(
    None, "text", "refusal", "image", "image_url", "video", "video_url")
_CALL: Final = Known.of("id type index name arguments custom", function=_FUNCTION)
_KNOWN: Final = {"messages": Known.of(
    "role contents name tool_call_id reasoning_content reasoning thinking",
    content=_PART, tool_calls=_CALL, function_call=_FUNCTION)}


TEXT_SCHEMA: Final = {"type": ["string", "array"], "items": {
    "type": "object", "required": ["type"], "properties": {"type": {"type": "string"}, "text": {"type": "string"}}}}
MESSAGES_SCHEMA: Final = {"type": "array", "items": {"type": "object", "required": ["role"], "properties": {
    "content": TEXT_SCHEMA, "role": {"enum": ["system", "developer", "user", "assistant", "tool", "function"]}}}}


class StreamOptions(Fields):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None
    continuous_usage_stats: bool | None = None


if TYPE_CHECKING:
    _SharedParameters = SaltedFields
else:
    _SharedParameters = create_model("_SharedParameters", __base__=SaltedFields, **{
        name: (parameter.kind | None, None) for name, parameter in PARAMETERS.items() if parameter.shared})


class SamplingFields(_SharedParameters):
    """Sampling parameters that have the same names in all APIs: the shared ones of `PARAMETERS`, and these."""

    logit_bias: dict[str, float] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    speculate: bool | None = None

    def same(self, *names: str) -> dict[str, Any]:
        """Returns the sampling parameters, the salt and the named fields, for a request of another API."""
        return {name: getattr(self, name) for name in (*SamplingFields.model_fields, *names)}


class _CommonFields(SamplingFields):
    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = None
    stop: Any = None
    max_tokens: int | None = None
    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None
    prompt_logprobs: int | None = None
    truncate_prompt_tokens: int | None = None
    return_tokens_as_token_ids: bool | None = None
    # vLLM's fields for the format of an answer, besides OpenAI's
    response_format: Any = None
    structured_outputs: Any = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None

    @property
    def wants_usage(self) -> bool:
        """True if a stream ends with the usage."""
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def wants_usage_always(self) -> bool:
        """True if every event of a stream has the usage so far."""
        return self.wants_usage and bool(self.stream_options and self.stream_options.continuous_usage_stats)

    def output_format(self) -> OutputFormat | None:
        """Returns the format of the answer. Raises RequestError if it is wrong or given twice."""
        guided = [read(getattr(self, name), name) for name, read in GUIDED.items() if getattr(self, name) is not None]
        return only_format([response_format(self.response_format, ignored=self.ignored),
                            structured_outputs(self.structured_outputs, ignored=self.ignored), *guided])

    def refuse_unsupported(self) -> None:
        """Raises RequestError for a field that is not supported. Notes fields without effect."""
        if self.store:
            self.ignored.append("store")
        if self.service_tier not in _TIERS:
            self.ignored.append("service_tier")
        cut = self.truncate_prompt_tokens
        if cut is not None and cut < 1 and cut != -1:
            raise RequestError("truncate_prompt_tokens must be at least 1, or -1 for what the context holds, not "
                               f"{show(cut)}", "truncate_prompt_tokens")
        for name, neutral in _UNSUPPORTED.items():
            value = getattr(self, name, None)
            if value is not None and value not in neutral:
                shown = f" with the value {show(value)}" if neutral else ""
                raise RequestError(f"{name} is not supported{shown}{_INSTEAD.get(name, '')}", name)

    def _sampling(self, limits: Limits, **more: Any) -> SamplingParams:
        """Returns the sampling parameters. more: parameters with a different name in each API, always `logprobs`."""
        if self.stream and self.prompt_logprobs is not None:
            raise RequestError("prompt_logprobs cannot be streamed: leave out stream", "prompt_logprobs")
        given = {name: getattr(self, name) for name in (*PARAMETERS, "stop_token_ids", "ignore_eos")}
        given["stop"] = _stops(self.stop, limits.max_stop_characters)
        given["logit_bias"] = _biases(self.logit_bias or {})
        given |= more
        if given["max_tokens"] == -1:  # -1 in other servers: as many as the context holds
            given["max_tokens"] = None
        if given["top_k"] == -1:
            given["top_k"] = 0
        params = SamplingParams(**{name: value for name, value in given.items() if value is not None})
        most = limits.max_answer_tokens
        if most is None:
            return params
        if params.max_tokens is None:
            return replace(params, max_tokens=most)
        if params.max_tokens > most:
            raise RequestError(f"max_tokens may be at most {most} (max_answer_tokens), not {params.max_tokens}",
                               "max_tokens")
        return params


class ChatRequest(_CommonFields):
    """The body of /v1/chat/completions."""

    schemas: ClassVar[Mapping[str, Any]] = {
        "messages": MESSAGES_SCHEMA | {"minItems": 1},
        "fork_from": {"type": ["string", "object"], "required": ["id"], "properties": {
            "id": {"type": "string"}, "choice": {"type": "integer", "minimum": 0}}}}
    elsewhere: ClassVar[Mapping[str, str]] = {
        "input": "messages", "prompt": "messages", "text": "response_format", "max_output_tokens": "max_tokens",
        "system": "messages", "instructions": "messages"}

    messages: list[Any]
    fork_from: Any = None
    prefix_token_ids: list[int] | None = None
    tools: list[Any] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    max_completion_tokens: int | None = None
    reasoning_effort: str | None = None
    modalities: Any = None
    audio: Any = None
    prediction: Any = None
    functions: Any = None
    function_call: Any = None
    web_search_options: Any = None
    moderation: Any = None
    verbosity: Literal["low", "medium", "high"] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    enable_thinking: bool | None = None
    thinking_budget: int | None = None
    history: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    documents: list[Any] | None = None
    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None
    include_reasoning: bool | None = None

    def sampling(self, limits: Limits) -> SamplingParams:
        _check_choices(1, self.n, limits)
        names = {"logprobs": "top_logprobs"}
        if self.max_completion_tokens is not None:
            names["max_tokens"] = "max_completion_tokens"
            if self.max_tokens not in (None, self.max_completion_tokens):
                raise RequestError("max_tokens and max_completion_tokens differ: give one", "max_tokens")
        if self.top_logprobs and not self.logprobs:
            raise RequestError("top_logprobs needs logprobs: true", "top_logprobs")
        scored = (self.top_logprobs or 0) if self.logprobs else None
        tokens = self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
        with renamed(names):
            return self._sampling(limits, max_tokens=tokens, logprobs=scored)

    def shown_tools(self) -> list[Any] | None:
        """Returns the tools that the model may call; None if tool_choice is "none"."""
        tools = usable_tools(self.tools or (), ("function",), self.ignored)
        for index, tool in tools:
            kind = tool.get("type", "function") if isinstance(tool, dict) else "function"
            if kind != "function":
                raise RequestError(f"tools[{index}] has the type {show(kind)}: only functions are supported",
                                   f"tools[{index}].type")
        return None if self.tool_choice == "none" else [tool for _, tool in tools]

    def variables(self, knows: Callable[[str], bool]) -> dict[str, Any]:
        """Returns the variables of the chat template. Notes those that the template does not know."""
        given = {name: getattr(self, name) for name in (
            "enable_thinking", "reasoning_effort", "verbosity", "documents", "add_generation_prompt",
            "continue_final_message")}
        found = (self.chat_template_kwargs or {}) | {name: value for name, value in given.items() if value is not None}
        if "verbosity" in found and not knows("verbosity") and found.pop("verbosity") != "medium":
            self.ignored.append("verbosity")
        effort = found.get("reasoning_effort")
        if effort is not None and not knows("reasoning_effort"):
            del found["reasoning_effort"]
            if effort == "none" and knows("enable_thinking"):
                found.setdefault("enable_thinking", False)
            else:
                self.ignored.append("reasoning_effort")
        if found.get("documents") and not knows("documents"):
            raise RequestError("the chat template knows no documents: put them into a message", "documents")
        return found


class CompletionRequest(_CommonFields):
    """The body of /v1/completions."""

    schemas: ClassVar[Mapping[str, Any]] = {
        "prompt": {"type": ["string", "array"], "items": {"type": ["string", "integer"]}}}
    elsewhere: ClassVar[Mapping[str, str]] = {"messages": "prompt", "input": "prompt"}

    prompt: Any
    logprobs: int | None = None
    echo: bool | None = None
    suffix: str | None = None
    best_of: int | None = None
    add_special_tokens: bool | None = None

    @property
    def echoes_scores(self) -> bool:
        """True if the answer begins with the prompt's tokens and their probabilities."""
        return bool(self.echo) and self.logprobs is not None

    def prompts(self) -> list[str | list[int]]:
        """Returns the prompts: texts or token ids."""
        if isinstance(self.prompt, str) or _are_ids(self.prompt):
            return [self.prompt]
        prompts = self.prompt if isinstance(self.prompt, list) else []
        if not prompts or not all(isinstance(prompt, str) or _are_ids(prompt) for prompt in prompts):
            raise RequestError("prompt must be text, token ids, or a non-empty list of such", "prompt")
        return prompts

    def sampling(self, limits: Limits) -> SamplingParams:
        wanted = self.n or 1
        made = self.best_of or wanted
        _check_choices(len(self.prompts()), made, limits)
        self._check_together(wanted, made)
        more: dict[str, Any] = {"max_tokens": self.max_tokens, "logprobs": self.logprobs}
        if self.max_tokens is None:
            more["max_tokens"] = min(_COMPLETION_TOKENS, limits.max_answer_tokens or _COMPLETION_TOKENS)
        if self.logprobs is None and made > wanted:
            more["logprobs"] = 0
        if self.best_of is not None:
            more["n"] = made
        if self.echoes_scores:
            more["prompt_logprobs"] = max(self.logprobs or 0, self.prompt_logprobs or 0)
        return self._sampling(limits, **more)

    def _check_together(self, wanted: int, made: int) -> None:
        """Raises RequestError for fields that exclude each other."""
        if made < wanted:
            raise RequestError(f"best_of must be at least n, which is {wanted}, not {show(self.best_of)}", "best_of")
        if self.stream and made > wanted:
            raise RequestError("best_of has to wait for all answers, and cannot be streamed", "best_of")
        if self.stream and self.echoes_scores:
            raise RequestError("echo together with logprobs cannot be streamed: leave out stream", "echo")
        for name in ("echo", "truncate_prompt_tokens"):
            if self.suffix and getattr(self, name):
                raise RequestError(f"{name} is not supported together with suffix", name)


def _check_choices(prompts: int, n: int | None, limits: Limits) -> None:
    answers = prompts * (n or 1)
    if answers > limits.max_choices:
        counts = f"{prompts} prompts with n = {show(n or 1)} ask" if prompts > 1 else f"n = {show(n)} asks"
        raise RequestError(f"{counts} for {show(answers)} answers, and a request may have at most {limits.max_choices} "
                           "(max_choices)", "prompt" if prompts > limits.max_choices else "n")


def _are_ids(prompt: Any) -> bool:
    return isinstance(prompt, list) and bool(prompt) and all(type(token) is int for token in prompt)


def _stops(stop: Any, most: int) -> tuple[Any, ...] | None:
    if stop is None:
        return None
    stops = tuple(stop) if isinstance(stop, list) else (stop,)
    characters = sum(len(text) for text in stops if isinstance(text, str))
    if characters > most:
        raise RequestError(f"the strings of stop have {characters} characters together, and may have at most {most} "
                           "(max_stop_characters)", "stop")
    return tuple(valid_text(text, "stop") if isinstance(text, str) else text for text in stops)


def _biases(biases: Mapping[str, float]) -> dict[int, float]:
    for token in biases:
        if not (token.isascii() and token.isdigit() and len(token) < 12):
            raise RequestError(f"logit_bias has the key {show(token)}: keys must be token ids", "logit_bias")
    return {int(token): bias for token, bias in biases.items()}


# From API requests to engine requests


@dataclass(frozen=True, slots=True)
class PromptEcho:
    """The prompts of a request. texts: put before the choices of their prompt, if wanted. choices: number of choices
    per prompt. scored: the prompts' tokens have probabilities."""

    ids: Sequence[Sequence[int]]
    texts: Sequence[str] = ()
    choices: int = 1
    scored: bool = False

    def before(self, choice: int) -> str:
        """Returns the text that precedes a choice."""
        return self.texts[choice // self.choices] if self.texts else ""


def prepare_chat(served: ServedModel, body: ChatRequest, translated: bool = False) -> PreparedRequest:
    """Renders and encodes the next turn of a conversation; runs in a thread. translated: the body comes from another
    API that has checked its fields. Raises RequestError that names a wrong field."""
    body.refuse_unsupported()
    if not body.messages:
        raise RequestError("messages must have at least one message", "messages")
    processor = _unbounded(served, body).processor.of(salt_of(served.owner, body.salt))
    tools = body.shown_tools()
    reader = ContentReader(processor.sees, processor.fetches, served.text_of)
    messages = reader.messages(body.messages)
    body.ignored.extend(reader.ignored)
    choice = ToolChoice.read(body.tool_choice, body.parallel_tool_calls is not False)
    fork = None if body.fork_from is None else served.forks.find(body.fork_from, served.name, served.owner)
    prepared = processor.chat(
        messages, body.sampling(served.limits), tools=tools, history=fork or body.history,
        variables=body.variables(partial(processor.knows, tools=tools)), thinking_budget=body.thinking_budget,
        pictures=served.pictures, answer=AnswerForm(choice, body.output_format(), _beginning(served, body)))
    prepared = _truncated(served, body, prepared)
    _check_scores(served, [prepared])
    if not translated:
        check_within(body, _KNOWN, partial(processor.reads, tools=tools))
    return _with_engine_fields(prepared, body)


def prepare_completions(served: ServedModel, body: CompletionRequest) -> tuple[list[PreparedRequest], PromptEcho]:
    """Encodes the prompts of a request; runs in a thread."""
    body.refuse_unsupported()
    sampling, prompts = body.sampling(served.limits), body.prompts()
    wanted = body.output_format()
    infill = Infill.of(served.llm.chat_processor.tokenizer.added) if body.suffix else None
    if infill:
        sampling = replace(sampling, stop_token_ids=(*sampling.stop_token_ids, *infill.ends))
    found = list[PreparedRequest]()
    several = len(prompts) > 1
    for place, prompt in enumerate(prompts):
        with of_prompt(f"prompt[{place}]") if several else nullcontext():
            text = _infilled(served, prompt, infill, body) if infill else prompt
            prepared = _unbounded(served, body).complete(text, sampling, wanted, body.add_special_tokens)
            found.append(_with_engine_fields(_truncated(served, body, prepared), body))
            if several:  # with one prompt, the engine's own message is clear
                served.llm.engine.keys_of(found[-1].request)
    _check_scores(served, found)
    ids = [prepared.request.ids for prepared in found]
    return found, _echo(served, body, ids) if body.echo else PromptEcho(ids)


def _echo(served: ServedModel, body: CompletionRequest, ids: list[tuple[int, ...]]) -> PromptEcho:
    shown: Sequence[str | Sequence[int]] = body.prompts() if body.truncate_prompt_tokens is None else ids
    echo = PromptEcho(ids, [served.text(prompt) for prompt in shown], body.n or 1, body.echoes_scores)
    if sum(map(len, echo.texts)) * echo.choices > served.limits.max_body_mib << 20:
        raise RequestError(f"echo would repeat more than {served.limits.max_body_mib} MiB (max_body_mib): ask for "
                           "fewer answers, or leave it out", "echo")
    return echo


def _infilled(served: ServedModel, prompt: str | list[int], infill: Infill, body: CompletionRequest) -> list[int]:
    """Returns the token ids that ask for the text between a prompt and the suffix, after the tokens that the tokenizer
    puts before a raw prompt."""
    tokenizer, bound = served.llm.chat_processor.tokenizer, prompt_bound(served.llm.engine.max_context, served.limits)
    behind = tokenizer.encode(body.suffix or "", bound=bound)
    if not isinstance(prompt, str):
        return infill.ids(prompt, behind)
    before, _ = tokenizer.around if body.add_special_tokens is not False else ([], [])
    ids = tokenizer.encode(prompt, bound=bound)
    if ids[:len(before)] == before:
        ids = ids[len(before):]
    return [*before, *infill.ids(ids, behind)]


def _beginning(served: ServedModel, body: ChatRequest) -> tuple[int, ...]:
    """Returns the tokens with which the answer begins."""
    tokens, size = body.prefix_token_ids or [], served.llm.runtime.config.vocab_size
    for place, token in enumerate(tokens):
        if not 0 <= token < size:
            raise RequestError(f"prefix_token_ids[{place}] must be a token id from 0 to {size - 1}, not {show(token)}",
                               "prefix_token_ids")
    return tuple(tokens)


def _unbounded(served: ServedModel, body: _CommonFields) -> ServedModel:
    """Returns the model, with prompts of any length allowed if they will be truncated."""
    return served if body.truncate_prompt_tokens is None else replace(served, bounded=False)


def _truncated(served: ServedModel, body: _CommonFields, prepared: PreparedRequest) -> PreparedRequest:
    """Keeps the last tokens of the prompt. With -1 it keeps as many as leave room for the answer."""
    wanted, request = body.truncate_prompt_tokens, prepared.request
    if wanted is None:
        return prepared
    room = served.llm.engine.max_context - 1
    answer = request.output.max_tokens if isinstance(request.output, SamplingParams) else None
    keep = min(wanted, room) if wanted > 0 else max(room + 1 - max(answer or 1, 1), 1)
    if len(request.prompt) <= keep:
        return prepared
    if isinstance(request.prompt, Prompt):
        raise RequestError("truncate_prompt_tokens cannot cut a prompt with pictures: leave some out",
                           "truncate_prompt_tokens")
    return replace(prepared, request=replace(request, prompt=request.prompt[-keep:], stable_prefixes=()),
                   remember=None)


def _check_scores(served: ServedModel, found: list[PreparedRequest]) -> None:
    """Raises RequestError if more probabilities of prompt tokens are requested than an answer may hold."""
    values, most = 0, served.limits.max_answer_values
    for request in (prepared.request for prepared in found):
        wanted = request.output.prompt_logprobs if isinstance(request.output, SamplingParams) else None
        values += 0 if wanted is None else len(request.prompt) * (wanted + 1) * request.choices
    if values > most:
        raise RequestError(f"prompt_logprobs, or echo with logprobs, ask for {values} probabilities, and an answer may "
                           f"have {most} (max_answer_values): ask for less, or shorten the prompt", "prompt_logprobs")


def _with_engine_fields(prepared: PreparedRequest, body: SamplingFields) -> PreparedRequest:
    request = replace(prepared.request, speculate=body.speculate is not False, cache_salt=body.salt)
    return replace(prepared, request=request)
