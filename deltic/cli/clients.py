"""The clients of `deltic connect`: their files, and the settings in them."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

KEY_VARIABLE = "DELTIC_API_KEY"
_MAX_ANSWER = 32_000  # tokens


@dataclass(frozen=True, slots=True)
class Target:
    """A model of a server. url: without /v1. context: tokens of prompt and answer. key: "" if there is none."""

    url: str
    model: str
    context: int
    key: str

    @property
    def base(self) -> str:
        """The base URL for clients of OpenAI's API."""
        return f"{self.url}/v1"

    @property
    def some_key(self) -> str:
        """A key for clients that require one."""
        return self.key or "none"

    @property
    def answer(self) -> int:
        """Tokens that a client should reserve for the answer."""
        return max(1, min(self.context // 4, _MAX_ANSWER))


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings in a file, whose suffix is its format.

    folder: below the home directory; `variable` replaces it. missing: values to add where the file has none.
    """

    folder: str
    name: str
    values: Mapping[str, Any] | list[Any]
    variable: str | None = None
    missing: Mapping[str, Any] = field(default_factory=dict)

    @property
    def path(self) -> Path:
        given = os.environ.get(self.variable) if self.variable else None
        return (Path(given) if given else Path.home() / self.folder) / self.name


@dataclass(frozen=True, slots=True)
class Client:
    """A program that uses servers. start: how to run it. environment: variables that it needs besides the files."""

    about: str
    start: str
    files: Callable[[Target], list[Settings]] = lambda _: []
    environment: Callable[[Target], dict[str, str]] = lambda _: {}


def _opencode(target: Target) -> list[Settings]:
    model = {"name": target.model, "limit": {"context": target.context, "output": target.answer}}
    provider = {"npm": "@ai-sdk/openai-compatible", "name": "deltic",
                "options": {"baseURL": target.base, "apiKey": target.some_key}, "models": {target.model: model}}
    return [Settings(".config", "opencode/opencode.json",
                     {"provider": {"deltic": provider}, "model": f"deltic/{target.model}"}, "XDG_CONFIG_HOME",
                     {"$schema": "https://opencode.ai/config.json"})]


def _codex(target: Target) -> list[Settings]:
    provider = {"name": "deltic", "base_url": target.base, "wire_api": "responses"}
    return [Settings(".codex", "config.toml", {
        "model": target.model, "model_provider": "deltic", "model_context_window": target.context,
        "model_providers": {"deltic": provider | ({"env_key": KEY_VARIABLE} if target.key else {})}}, "CODEX_HOME")]


def _claude_code(target: Target) -> list[Settings]:
    """The attribution header would change the beginning of every prompt."""
    kinds = ("MODEL", "DEFAULT_OPUS_MODEL", "DEFAULT_SONNET_MODEL", "DEFAULT_HAIKU_MODEL")
    return [Settings(".claude", "settings.json", {"env": {
        "ANTHROPIC_BASE_URL": target.url, "ANTHROPIC_AUTH_TOKEN": target.some_key,
        **{f"ANTHROPIC_{kind}": target.model for kind in kinds},
        "CLAUDE_CODE_MAX_CONTEXT_TOKENS": str(target.context), "CLAUDE_CODE_MAX_OUTPUT_TOKENS": str(target.answer),
        "CLAUDE_CODE_ATTRIBUTION_HEADER": "0", "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1"}},
        "CLAUDE_CONFIG_DIR")]


def _aider(target: Target) -> list[Settings]:
    name = f"openai/{target.model}"
    limits = {"max_tokens": target.answer, "max_input_tokens": target.context, "max_output_tokens": target.answer,
              "input_cost_per_token": 0, "output_cost_per_token": 0, "litellm_provider": "openai", "mode": "chat"}
    return [Settings("", ".aider.conf.yml", {"model": name, "openai-api-base": target.base,
                                             "openai-api-key": target.some_key}),
            Settings("", ".aider.model.metadata.json", {name: limits})]


def _continue(target: Target) -> list[Settings]:
    model = {"name": "deltic", "provider": "openai", "model": target.model, "apiBase": target.base,
             "apiKey": target.some_key, "roles": ["chat", "edit", "apply"], "capabilities": ["tool_use"],
             "defaultCompletionOptions": {"contextLength": target.context, "maxTokens": target.answer}}
    return [Settings(".continue", "config.yaml", {"models": [model]}, "CONTINUE_GLOBAL_DIR",
                     {"name": "Local", "version": "1.0.0", "schema": "v1"})]


def _crush(target: Target) -> list[Settings]:
    model = {"id": target.model, "name": target.model, "context_window": target.context,
             "default_max_tokens": target.answer}
    chosen = {"provider": "deltic", "model": target.model}
    provider = {"name": "deltic", "type": "openai-compat", "base_url": target.base, "api_key": target.some_key,
                "models": [model]}
    return [Settings(".config", "crush/crush.json", {
        "providers": {"deltic": provider}, "models": {"large": chosen, "small": chosen}}, "XDG_CONFIG_HOME",
        {"$schema": "https://charm.land/crush.json"})]


def _llm(target: Target) -> list[Settings]:
    return [Settings(".config/io.datasette.llm", "extra-openai-models.yaml", [
        {"model_id": "deltic", "model_name": target.model, "api_base": target.base, "supports_tools": True,
         "supports_schema": True}], "LLM_USER_PATH")]


CLIENTS: Mapping[str, Client] = {
    "opencode": Client("the coding agent opencode", "opencode", _opencode),
    "codex": Client("OpenAI's coding agent", "codex", _codex,
                    lambda target: {KEY_VARIABLE: target.key} if target.key else {}),
    "claude-code": Client("Anthropic's coding agent", "claude", _claude_code),
    "aider": Client("pair programming in a terminal", "aider", _aider),
    "continue": Client("extension of editors", "choose the model deltic in the editor's panel", _continue),
    "crush": Client("Charm's coding agent", "crush", _crush),
    "llm": Client("Simon Willison's command line", "llm -m deltic 'Hello'", _llm,
                  lambda target: {"OPENAI_API_KEY": target.key} if target.key else {}),
    "openai": Client("programs that use the openai package", "your program", environment=lambda target: {
        "OPENAI_BASE_URL": target.base, "OPENAI_API_KEY": target.some_key}),
    "anthropic": Client("programs that use the anthropic package", "your program", environment=lambda target: {
        "ANTHROPIC_BASE_URL": target.url, "ANTHROPIC_AUTH_TOKEN": target.some_key}),
}
