"""OpenAI's requests, and what the engine makes of them.

Types are checked here; what values mean is decided by the rooms that use them. Where a field cannot be served,
its neutral values are accepted and all others are refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar, Literal

from deltic.chat.response_format import GUIDED, OutputFormat, only_format, response_format, structured_outputs
from deltic.config import Limits
from deltic.errors import RequestError, show, valid_text
from deltic.params import SamplingParams
from deltic.server.body import Fields, SaltedFields, renamed
from deltic.server.parts import usable_tools

_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
             "seed", "stop_token_ids", "min_tokens", "max_tokens", "ignore_eos", "n", "max_repeat", "prompt_logprobs")
_COMPLETION_TOKENS = 16

# Values that ask for nothing. null always does.
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "modalities": (["text"],),
    "functions": ([],),
    "function_call": ("none",),
    "audio": (),
    "prediction": (),
    "web_search_options": (),
    "moderation": (),
}
_TIERS = ("auto", "default", "standard", "standard_only")
"""Classes of service that are what there is."""

_INSTEAD = {"functions": "use tools", "function_call": "use tool_choice"}


class StreamOptions(Fields):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None
    continuous_usage_stats: bool | None = None


class SamplingFields(SaltedFields):
    """How tokens are chosen: what all wires call the same, whether or not their own documents have it."""

    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    seed: int | None = None
    stop_token_ids: list[int] | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    max_repeat: int | None = None
    speculate: bool | None = None

    def choosing(self) -> dict[str, Any]:
        """These fields."""
        return {name: getattr(self, name) for name in SamplingFields.model_fields}


class FormatFields(Fields):
    """The fields that say what an answer has to look like: OpenAI's, and vLLM's by their newer and older names."""

    response_format: Any = None
    structured_outputs: Any = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None

    def output_format(self) -> OutputFormat | None:
        """What they say; RequestError if that is wrong, or more than one says something."""
        guided = [read(getattr(self, name), name) for name, read in GUIDED.items() if getattr(self, name) is not None]
        return only_format([response_format(self.response_format, ignored=self.ignored),
                            structured_outputs(self.structured_outputs, ignored=self.ignored), *guided])


class _Common(SamplingFields, FormatFields):
    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = None
    stop: Any = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None
    prompt_logprobs: int | None = None
    truncate_prompt_tokens: int | None = None

    @property
    def wants_usage(self) -> bool:
        """Whether a stream ends with the usage."""
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def wants_usage_always(self) -> bool:
        """Whether every event of a stream has the usage so far."""
        return self.wants_usage and bool(self.stream_options and self.stream_options.continuous_usage_stats)

    def refuse_unsupported(self) -> None:
        """RequestError for a field whose meaning cannot be served. Notes those that have none here."""
        if self.store:
            self.ignored.append("store")
        if self.service_tier not in (None, *_TIERS):
            self.ignored.append("service_tier")
        if self.truncate_prompt_tokens is not None and self.truncate_prompt_tokens < 1 and (
                self.truncate_prompt_tokens != -1):
            raise RequestError("truncate_prompt_tokens must be at least 1, or -1 for what the context holds, not "
                               f"{show(self.truncate_prompt_tokens)}", "truncate_prompt_tokens")
        for field, neutral in _NEUTRAL.items():
            value = getattr(self, field, None)
            if value is not None and value not in neutral:
                raise RequestError(f"{field} is not supported" + (f" with the value {show(value)}" if neutral else "")
                                   + (f": {_INSTEAD[field]}" if field in _INSTEAD else ""), field)

    def _sampling(self, limits: Limits, **more: Any) -> SamplingParams:
        if self.stream and self.prompt_logprobs is not None:
            raise RequestError("prompt_logprobs cannot be streamed: leave out stream", "prompt_logprobs")
        given = {name: getattr(self, name) for name in _SAMPLING}
        given["stop"] = _stops(self.stop, limits.max_stop_characters)
        given["logit_bias"] = _biases(self.logit_bias or {})
        given |= more
        # in other servers -1 is: as many as the context holds, all tokens
        given |= {name: None if name == "max_tokens" else 0 for name in ("max_tokens", "top_k") if given[name] == -1}
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


class ChatRequest(_Common):
    """The body of /v1/chat/completions."""

    elsewhere: ClassVar[Mapping[str, str]] = {
        "input": "messages", "prompt": "messages", "text": "response_format", "max_output_tokens": "max_tokens",
        "system": "messages", "instructions": "messages"}

    messages: list[Any]
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
        """How the answer is to be chosen."""
        _check_choices(1, self.n, limits)
        names = {"logprobs": "top_logprobs"}
        if self.max_completion_tokens is not None:
            names["max_tokens"] = "max_completion_tokens"
        given = {"max_tokens": self._max_tokens(), "logprobs": self._logprobs()}
        with renamed(names):
            return self._sampling(limits, **given)

    def shown_tools(self) -> list[Any] | None:
        """The tools that the model may call: none if tool_choice says so."""
        tools = usable_tools(self.tools or (), ("function",), self.ignored)
        for index, tool in tools:
            kind = tool.get("type", "function") if isinstance(tool, dict) else "function"
            if kind != "function":
                raise RequestError(f"tools[{index}] has the type {show(kind)}: only functions are supported",
                                   f"tools[{index}].type")
        return None if self.tool_choice == "none" else [tool for _, tool in tools]

    def variables(self) -> dict[str, Any]:
        """What the chat template is told."""
        given = {"enable_thinking": self.enable_thinking, "reasoning_effort": self.reasoning_effort,
                 "verbosity": self.verbosity,
                 "documents": self.documents, "add_generation_prompt": self.add_generation_prompt,
                 "continue_final_message": self.continue_final_message}
        return (self.chat_template_kwargs or {}) | {key: value for key, value in given.items() if value is not None}

    def checked_messages(self) -> list[Any]:
        """The messages, of which there must be one."""
        if not self.messages:
            raise RequestError("messages must have at least one message", "messages")
        return self.messages

    def _max_tokens(self) -> int | None:
        if self.max_completion_tokens is None:
            return self.max_tokens
        if self.max_tokens not in (None, self.max_completion_tokens):
            raise RequestError("max_tokens and max_completion_tokens differ: give one", "max_tokens")
        return self.max_completion_tokens

    def _logprobs(self) -> int | None:
        if self.logprobs:
            return self.top_logprobs or 0
        if self.top_logprobs:
            raise RequestError("top_logprobs needs logprobs: true", "top_logprobs")
        return None


class CompletionRequest(_Common):
    """The body of /v1/completions."""

    elsewhere: ClassVar[Mapping[str, str]] = {"messages": "prompt", "input": "prompt"}

    prompt: Any
    logprobs: int | None = None
    echo: bool | None = None
    suffix: str | None = None
    best_of: int | None = None
    add_special_tokens: bool | None = None

    def sampling(self, limits: Limits) -> SamplingParams:
        """How the answers are to be chosen."""
        wanted, made = self.n or 1, self.best_of or self.n or 1
        _check_choices(len(self.prompts()), made, limits)
        if made < wanted:
            raise RequestError(f"best_of must be at least n, which is {wanted}, not {show(self.best_of)}", "best_of")
        if self.stream and made > wanted:
            raise RequestError("best_of has to wait for all answers, and cannot be streamed", "best_of")
        if self.stream and self.echoes_scores:
            raise RequestError("echo together with logprobs cannot be streamed: leave out stream", "echo")
        for name, value in (("echo", self.echo), ("truncate_prompt_tokens", self.truncate_prompt_tokens)):
            if self.suffix and value:
                raise RequestError(f"{name} is not supported together with suffix", name)
        default = min(_COMPLETION_TOKENS, limits.max_answer_tokens or _COMPLETION_TOKENS)
        tokens = default if self.max_tokens is None else self.max_tokens
        scored = 0 if self.logprobs is None and made > wanted else self.logprobs
        more = {} if self.best_of is None else {"n": made}
        if self.echoes_scores:
            more["prompt_logprobs"] = max(self.logprobs or 0, self.prompt_logprobs or 0)
        return self._sampling(limits, max_tokens=tokens, logprobs=scored, **more)

    @property
    def echoes_scores(self) -> bool:
        """Whether the prompt's tokens come before the answer's, with their probabilities."""
        return bool(self.echo) and self.logprobs is not None

    def prompts(self) -> list[str | list[int]]:
        """One prompt per answer: text or token ids."""
        if isinstance(self.prompt, str) or _are_ids(self.prompt):
            return [self.prompt]
        prompts = self.prompt if isinstance(self.prompt, list) else []
        if not prompts or not all(isinstance(prompt, str) or _are_ids(prompt) for prompt in prompts):
            raise RequestError("prompt must be text, token ids, or a non-empty list of such", "prompt")
        return prompts


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
