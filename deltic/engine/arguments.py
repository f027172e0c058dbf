"""Checks the arguments of calls from Python. An error names the argument and the remedy."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, replace
from operator import index
from pathlib import Path
from typing import Any

from deltic.config import AUTO, EngineConfig
from deltic.errors import ConfigError, RequestError, show, valid_text
from deltic.ops import capabilities
from deltic.params import LogitsProcessor, Prompt, SamplingParams

_BYTES = (bytes, bytearray, memoryview)


def engine_config(options: Mapping[str, Any], others: Sequence[str] = ()) -> EngineConfig:
    """Returns the EngineConfig of keyword options. Raises ConfigError that names an unknown option and the known ones.
    others: further options of the caller."""
    known = [f.name for f in fields(EngineConfig)]
    for name in options:
        if name not in known:
            raise ConfigError(f"unknown option {name!r}; there are {', '.join([*others, *known])}", name)
    return EngineConfig(**options)


def settled(options: EngineConfig) -> EngineConfig:
    """Returns the options with a definite device. Raises ConfigError that names an option which does not suit it."""
    return replace(options, device=capabilities.find_device()) if options.device == AUTO else options


def as_messages(messages: Any, least: int = 1) -> Sequence[Mapping[str, Any]]:
    """Returns a conversation, given as messages or as one user message in text. least: minimum number of messages."""
    if isinstance(messages, str):
        return [{"role": "user", "content": messages}]
    if not _is_list(messages):
        fix = {"dict": ": put the message into a list", "bytes": ": decode it"}.get(type(messages).__name__, "")
        raise RequestError("messages must be a list of messages, or one user message as text, not "
                           f"{show(messages)}{fix}", "messages")
    if len(messages) < least:
        raise RequestError("messages is empty: give at least one message", "messages")
    for place, message in enumerate(messages):
        if not isinstance(message, Mapping):
            fix = ("token ids are for generate and generate_stream" if _id(message) is not None
                   else 'write {"role": "user", "content": "..."}')
            raise RequestError(f"messages[{place}] must be a message, not {show(message)}: {fix}",
                               f"messages[{place}]")
    return list(messages)


def as_prompts(prompts: Any) -> list[str | list[int] | Prompt]:
    """Returns prompts, given as texts, lists of token ids, or Prompts."""
    prompts = _listed(prompts)
    if isinstance(prompts, str | Prompt) or (_is_list(prompts) and len(prompts) and _id(prompts[0]) is not None):
        raise RequestError("generate takes a list of prompts: put the prompt into a list", "prompts")
    if not _is_list(prompts):
        raise RequestError(f"prompts must be a list of texts, or of lists of token ids, not {show(prompts)}", "prompts")
    return [as_prompt(prompt, f"prompts[{place}]") for place, prompt in enumerate(prompts)]


def as_prompt(prompt: Any, name: str = "prompt") -> str | list[int] | Prompt:
    """Returns a prompt, given as text, a list of token ids, or a Prompt."""
    if isinstance(prompt, str | Prompt):
        return prompt
    prompt = _listed(prompt)
    if not _is_list(prompt):
        raise RequestError(f"{name} must be text or a list of token ids, not {show(prompt)}", name)
    ids = [_id(token) for token in prompt]
    if None in ids:
        wrong = prompt[ids.index(None)]
        fix = ": messages are for chat and stream" if isinstance(wrong, Mapping) else ""
        raise RequestError(f"{name} must be text or a list of token ids: {show(wrong)} is none{fix}", name)
    return [id for id in ids if id is not None]


def as_texts(texts: Any, name: str) -> Sequence[Any]:
    """Returns a list of texts as a list; the elements are not checked."""
    texts = _listed(texts)
    if not _is_list(texts):
        fix = "put the text into a list" if isinstance(texts, str) else "write list(...) of what gives texts"
        raise RequestError(f"{name} must be a list of texts, not {show(texts)}: {fix}", name)
    return list(texts)


def as_sampling(sampling: Any, count: int) -> list[SamplingParams]:
    """Returns one SamplingParams for each of `count` prompts."""
    if not _is_list(sampling):
        return [as_params(sampling)] * count
    given = [as_params(params, f"sampling[{place}]") for place, params in enumerate(sampling)]
    if len(given) != count:
        raise RequestError(f"{count} prompts need as many SamplingParams, not {len(given)}", "sampling")
    return given


def as_params(sampling: Any, name: str = "sampling") -> SamplingParams:
    if not isinstance(sampling, SamplingParams):
        raise RequestError(f"{name} must be SamplingParams, not {show(sampling)}: write "
                           "SamplingParams(temperature=0.7, ...), or leave it out", name)
    return sampling


def as_salt(cache_salt: Any) -> str:
    """Returns the salt of a call's cached prefixes; "" for none."""
    if cache_salt == "":
        raise RequestError("cache_salt is empty: give at least one character, or leave it out", "cache_salt")
    return "" if cache_salt is None else valid_text(cache_salt, "cache_salt")


def as_adapters(lora: Any) -> dict[str, str | Path]:
    """Returns the directories of adapters by name."""
    if lora is not None and not (isinstance(lora, Mapping) and all(
            isinstance(name, str) and isinstance(path, str | Path) for name, path in lora.items())):
        raise ConfigError(f'lora must map names of adapters to their directories, {{"name": "path"}}, not {show(lora)}',
                          "lora")
    return dict(lora or {})


def as_processors(processors: Any) -> tuple[LogitsProcessor, ...]:
    """Returns a call's functions that change logits."""
    if processors is not None and not (_is_list(processors) and all(map(callable, processors))):
        raise RequestError("logits_processors must be a list of functions of (token ids, logits), not "
                           f"{show(processors)}", "logits_processors")
    return tuple(processors or ())


def as_variables(variables: Any, thinking: Any) -> dict[str, Any]:
    """Returns the variables of a chat template, including `enable_thinking` if thinking is given."""
    if variables is not None and not (isinstance(variables, Mapping) and all(isinstance(k, str) for k in variables)):
        raise RequestError(f"variables must map names of template variables to values, not {show(variables)}",
                           "variables")
    if thinking is not None and not isinstance(thinking, bool):
        raise RequestError(f"thinking must be True, False or None, not {show(thinking)}", "thinking")
    return {**(variables or {}), **({} if thinking is None else {"enable_thinking": thinking})}


def check_options(call: str, options: Mapping[str, Any], known: Iterable[str]) -> None:
    """Raises TypeError for a keyword that a call does not take, as any Python function does."""
    for name in options:
        if name not in known:
            raise TypeError(f"{call}() got an unexpected keyword argument {name!r}; there are {', '.join(known)}")


def check_tools(tools: Any) -> None:
    if tools is not None and not _is_list(tools):
        raise RequestError(f"tools must be a list of tools, not {show(tools)}", "tools")


def check_callback(callback: Any, name: str = "on_token", arguments: str = "(row, token id)",
                   error: type[RequestError] | type[ConfigError] = RequestError) -> None:
    if callback is not None and not callable(callback):
        raise error(f"{name} must be a function of {arguments}, not {show(callback)}", name)


def check_flag(flag: Any, name: str) -> None:
    if not isinstance(flag, bool):
        raise RequestError(f"{name} must be True or False, not {show(flag)}", name)


def _listed(value: Any) -> Any:
    """Returns arrays and tensors as lists, and other values unchanged."""
    return value.tolist() if hasattr(value, "tolist") and not isinstance(value, _BYTES) else value


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, (str, *_BYTES))


def _id(value: Any) -> int | None:
    """Returns an integer of any type as int; None for everything else."""
    if type(value) is int:
        return value
    try:
        return None if isinstance(value, bool) else index(value)
    except TypeError:
        return None
