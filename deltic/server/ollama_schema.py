"""Ollama's requests, translated to chat requests and completions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Final

from deltic.config import Limits
from deltic.errors import RequestError, show
from deltic.server.fields import Body, Fields, SaltedFields, read_fields, renamed, unknown_field
from deltic.server.openai_schema import MESSAGES_SCHEMA, ChatRequest, CompletionRequest, SamplingFields

_OPTIONS: Final = frozenset((*SamplingFields.model_fields, "stop"))
"""Options with the same name in a chat request. Other options, such as `num_predict`, are translated for all APIs."""

Json = dict[str, Any]
Names = dict[str, str]
"""Maps field names of a translated request to the client's names."""


class OllamaRequest(SaltedFields):
    """The common fields of /api/chat and /api/generate."""

    model: str | None = None
    stream: bool | None = True
    options: Json | None = None
    format: Any = None
    think: Any = None
    keep_alive: Any = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    truncate: bool | None = None
    shift: bool | None = None

    @property
    def streams(self) -> bool:
        return self.stream is not False

    def _translated(self, schema: type[Body], given: Json, names: Names, limits: Limits) -> tuple[Body, Names]:
        """Returns a request of OpenAI's API, and the client's names of its fields. given: fields besides options."""
        options = {name: value for name, value in (self.options or {}).items() if value is not None}
        names |= {"response_format": "format", **{name: f"options.{name}" for name in options}}
        for name in options:
            if name in schema.model_fields and name not in _OPTIONS:
                raise unknown_field("options.", name, (*_OPTIONS, "num_predict", "num_ctx", "repeat_penalty"))
        if options.get("num_predict") == -2:  # -2: as many tokens as the context holds
            options["num_predict"] = -1
        self.ignored.extend(name for name in ("truncate", "shift") if getattr(self, name))
        fields = options | {"response_format": _format(self.format), "cache_salt": self.cache_salt, **given}
        with renamed(names):
            found = read_fields({name: value for name, value in fields.items() if value is not None}, schema, limits,
                                self.notes.lenient)
        if getattr(found, "n", None) not in (None, 1):
            raise RequestError("options.n_cmpl is not supported: there is one answer to a request", "options.n_cmpl")
        return found, names | {name: names.get(sent, sent) for name, sent in found.notes.sent.items()}


class OllamaChatRequest(OllamaRequest):
    """The body of /api/chat."""

    schemas: ClassVar[Mapping[str, Any]] = {"messages": MESSAGES_SCHEMA}

    messages: list[Any] = []  # noqa: RUF012
    tools: list[Any] | None = None

    def chat(self, limits: Limits) -> tuple[ChatRequest, Names]:
        """Returns the equivalent chat request, and the client's names of its fields."""
        names = Names()
        messages = [_message(message, f"messages[{index}]", names) for index, message in enumerate(self.messages)]
        given = {"messages": messages, "tools": self.tools, "think": self.think, "logprobs": self.logprobs,
                 "top_logprobs": self.top_logprobs}
        return self._translated(ChatRequest, given, names, limits)


class OllamaGenerateRequest(OllamaRequest):
    """The body of /api/generate."""

    counted: ClassVar[Mapping[str, str]] = {"images": "max_pictures", "context": "max_live_tokens"}

    prompt: str | None = None
    suffix: str | None = None
    system: str | None = None
    template: str | None = None
    context: list[int] | None = None
    raw: bool | None = None
    images: list[Any] | None = None
    width: Any = None
    height: Any = None
    steps: Any = None

    @property
    def loads(self) -> bool:
        """True if the client only wants the model to be loaded."""
        return not self.prompt and not self.images and not self.suffix

    def chat(self, limits: Limits) -> tuple[ChatRequest, Names]:
        """Returns the prompt as a chat request, and the client's names of its fields."""
        self._refuse()
        names = {"messages[0]": "system"} if self.system else Names()
        system = [{"role": "system", "content": self.system}] if self.system else []
        place = f"messages[{len(system)}]"
        names |= {place: "prompt", f"{place}.content": "prompt", "messages": "prompt"}
        content = _content(self.prompt or "", self.images, place, "images", names)
        given = {"messages": [*system, {"role": "user", "content": content}], "think": self.think,
                 "logprobs": self.logprobs, "top_logprobs": self.top_logprobs}
        return self._translated(ChatRequest, given, names, limits)

    def completion(self, limits: Limits) -> tuple[CompletionRequest, Names]:
        """Returns a raw prompt, or a prompt with a suffix, as a completion request."""
        self._refuse()
        for name in ("system", "images", "context"):
            if getattr(self, name):
                raise RequestError(f"{name} cannot be had together with {'raw' if self.raw else 'suffix'}", name)
        given: Json = {"prompt": self.prompt or "", "suffix": self.suffix or None}
        if self.logprobs:
            given["logprobs"] = self.top_logprobs or 0
        if "num_predict" not in (self.options or {}):
            given["max_tokens"] = -1
        return self._translated(CompletionRequest, given, Names(), limits)

    def _refuse(self) -> None:
        if self.template:
            raise RequestError("template is not supported: the server has one for its model (--chat-template)",
                               "template")
        for name in ("width", "height", "steps"):
            if getattr(self, name):
                raise RequestError(f"{name} is not supported: no pictures are made here", name)


class OllamaEmbedRequest(SaltedFields):
    """The body of /api/embed."""

    counted: ClassVar[Mapping[str, str]] = {"input": "max_texts"}
    schemas: ClassVar[Mapping[str, Any]] = {"input": {"type": ["string", "array"], "items": {"type": "string"}}}

    model: str | None = None
    input: Any = None
    truncate: bool | None = None
    dimensions: int | None = None
    options: Json | None = None
    keep_alive: Any = None


class OllamaEmbeddingsRequest(SaltedFields):
    """The body of /api/embeddings, the older endpoint."""

    model: str | None = None
    prompt: str | None = None
    options: Json | None = None
    keep_alive: Any = None


class OllamaModelRequest(Fields):
    """The body of /api/show and /api/pull. name: the model, as older clients send it."""

    model: str | None = None
    name: str | None = None
    verbose: bool | None = None
    insecure: bool | None = None
    stream: bool | None = True
    system: str | None = None
    template: str | None = None
    options: Json | None = None

    @property
    def meant(self) -> str:
        found = self.model or self.name
        if not found:
            raise RequestError("model is missing", "model")
        return found


def _format(given: Any) -> Json | None:
    """Returns the response format for `json` or for a schema."""
    if given in (None, "", {}):
        return None
    if given == "json":
        return {"type": "json_object"}
    if not isinstance(given, dict):
        raise RequestError(f"format must be json or a JSON schema, not {show(given)}", "format")
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": given}}


def _message(message: Any, path: str, names: Names) -> Any:
    if not isinstance(message, dict):
        return message
    found = {name: value for name, value in message.items() if name not in ("images", "tool_name")}
    if message.get("tool_name"):
        found.setdefault("name", message["tool_name"])
    if message.get("images"):
        found["content"] = _content(message.get("content") or "", message["images"], path, f"{path}.images", names)
    return found


def _content(text: Any, images: Any, path: str, field: str, names: Names) -> Any:
    """Returns a text after its images. path: of the message. field: the name of the field with the images."""
    if not images:
        return text
    if not isinstance(images, list) or not all(isinstance(image, str) for image in images):
        raise RequestError(f"{field} must be a list of pictures in base64, not {show(images)}", field)
    names |= {f"{path}.content[{index}]": f"{field}[{index}]" for index in range(len(images))}
    urls = [image if image.startswith("data:") else f"data:image/png;base64,{image}" for image in images]
    return [*({"type": "image_url", "image_url": {"url": url}} for url in urls), {"type": "text", "text": text}]
