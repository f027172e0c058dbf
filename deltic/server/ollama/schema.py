"""Ollama's requests, as the requests of OpenAI's wire that say the same."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from deltic.config import Limits
from deltic.errors import RequestError, show
from deltic.server.body import Fields, SaltedFields, read_fields, renamed, unknown_field
from deltic.server.openai.schema import ChatRequest, CompletionRequest, SamplingFields

_OPTIONS = frozenset((*SamplingFields.model_fields, "temperature", "top_p", "stop"))
"""Options that are called here as there; those of other names are known to all wires (`num_predict`)."""
_THERE = (*_OPTIONS, "num_predict", "num_ctx", "repeat_penalty")

Json = dict[str, Any]
Names = dict[str, str]


class OllamaRequest(SaltedFields):
    """What /api/chat and /api/generate have in common."""

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

    def _read(self, schema: type[Any], given: Json, names: Names, limits: Limits) -> tuple[Any, Names]:
        """The fields of a request of OpenAI's wire, and what the client calls them."""
        options = {name: value for name, value in (self.options or {}).items() if value is not None}
        names |= {name: f"options.{name}" for name in options}
        wrong = next((name for name in options if name in schema.model_fields and name not in _OPTIONS), None)
        if wrong is not None:
            raise unknown_field("options.", wrong, _THERE)
        if options.get("num_predict") == -2:  # as many as the context holds
            options["num_predict"] = -1
        self.ignored.extend(name for name in ("truncate", "shift") if getattr(self, name))
        fields = options | {"response_format": _format(self.format), "cache_salt": self.cache_salt, **given}
        with renamed(names):
            found = read_fields({name: value for name, value in fields.items() if value is not None}, schema, limits,
                                self.lenient)
        if found.n not in (None, 1):
            raise RequestError("options.n_cmpl is not supported: there is one answer to a request", "options.n_cmpl")
        return found, names | {name: names.get(sent, sent) for name, sent in found.sent.items()}


class OllamaChatRequest(OllamaRequest):
    """The body of /api/chat."""

    messages: list[Any] = []  # noqa: RUF012
    tools: list[Any] | None = None

    def chat(self, limits: Limits) -> tuple[ChatRequest, Names]:
        """The same as a chat request, and what the client calls its fields."""
        names: Names = {"response_format": "format"}
        messages = [_message(message, f"messages[{index}]", names) for index, message in enumerate(self.messages)]
        given = {"messages": messages, "tools": self.tools, "think": self.think, "logprobs": self.logprobs,
                 "top_logprobs": self.top_logprobs}
        return self._read(ChatRequest, given, names, limits)


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
        """Whether nothing is asked but that the model be there."""
        return not self.prompt and not self.images and not self.suffix

    def chat(self, limits: Limits) -> tuple[ChatRequest, Names]:
        """The prompt as a chat request, and what the client calls its fields."""
        self._refuse()
        names: Names = {"response_format": "format"}
        system = [{"role": "system", "content": self.system}] if self.system else []
        names |= {"messages[0]": "system"} if system else {}
        place = f"messages[{len(system)}]"
        names |= {place: "prompt", f"{place}.content": "prompt", "messages": "prompt"}
        content = _content(self.prompt or "", self.images, place, "images", names)
        given = {"messages": [*system, {"role": "user", "content": content}], "think": self.think,
                 "logprobs": self.logprobs, "top_logprobs": self.top_logprobs}
        return self._read(ChatRequest, given, names, limits)

    def completion(self, limits: Limits) -> tuple[CompletionRequest, Names]:
        """The prompt as it stands, or with a suffix."""
        self._refuse()
        for name in ("system", "images", "context"):
            if getattr(self, name):
                raise RequestError(f"{name} cannot be had together with {'raw' if self.raw else 'suffix'}", name)
        names: Names = {"response_format": "format"}
        tokens = {} if "num_predict" in (self.options or {}) else {"max_tokens": -1}
        scores = (self.top_logprobs or 0) if self.logprobs else None
        given = {"prompt": self.prompt or "", "suffix": self.suffix or None, "logprobs": scores, **tokens}
        return self._read(CompletionRequest, given, names, limits)

    def _refuse(self) -> None:
        if self.template:
            raise RequestError("template is not supported: the server has one for its model (--chat-template)",
                               "template")
        wrong = next((name for name in ("width", "height", "steps") if getattr(self, name)), None)
        if wrong:
            raise RequestError(f"{wrong} is not supported: no pictures are made here", wrong)


class OllamaEmbedRequest(SaltedFields):
    """The body of /api/embed."""

    counted: ClassVar[Mapping[str, str]] = {"input": "max_texts"}

    model: str | None = None
    input: Any = None
    truncate: bool | None = None
    dimensions: int | None = None
    options: Json | None = None
    keep_alive: Any = None


class OllamaEmbeddingsRequest(SaltedFields):
    """The body of /api/embeddings, the older form."""

    model: str | None = None
    prompt: str | None = None
    options: Json | None = None
    keep_alive: Any = None


class OllamaModelRequest(Fields):
    """The body of /api/show and /api/pull. name: what older clients call the model."""

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
        """The model."""
        found = self.model or self.name
        if not found:
            raise RequestError("model is missing", "model")
        return found


def _format(given: Any) -> Json | None:
    """`json`, or a schema; keywords that cannot be enforced are left to the model."""
    if given in (None, ""):
        return None
    if given == "json":
        return {"type": "json_object"}
    if not isinstance(given, dict):
        raise RequestError(f"format must be json or a JSON schema, not {show(given)}", "format")
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": given}} if given else None


def _message(message: Any, path: str, names: Names) -> Any:
    """A message as chat requests have it."""
    if not isinstance(message, dict):
        return message
    turned = {name: value for name, value in message.items() if name not in ("images", "tool_name")}
    if message.get("tool_name"):
        turned.setdefault("name", message["tool_name"])
    if message.get("images"):
        turned["content"] = _content(message.get("content") or "", message["images"], path, f"{path}.images", names)
    return turned


def _content(text: Any, images: Any, path: str, field: str, names: Names) -> Any:
    """A text behind its pictures. path, field: of the message, and of the pictures."""
    if not images:
        return text
    if not isinstance(images, list) or not all(isinstance(image, str) for image in images):
        raise RequestError(f"{field} must be a list of pictures in base64, not {show(images)}", field)
    names |= {f"{path}.content[{index}]": f"{field}[{index}]" for index in range(len(images))}
    parts = [{"type": "image_url", "image_url": {
        "url": image if image.startswith("data:") else f"data:image/png;base64,{image}"}} for image in images]
    return [*parts, {"type": "text", "text": text}]
