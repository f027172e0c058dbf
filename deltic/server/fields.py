"""Request fields: the base class of the schemas, fields of other servers, and unknown fields.

A field of another server is translated if one of our fields means the same, and refused if it would change the answer.
Every other unknown field is ignored, and a header of the response names it. A field with a name that looks like a
misspelling is refused.
"""

from __future__ import annotations

import difflib
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import Any, ClassVar, Final, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, PrivateAttr, ValidationError

from deltic.config import Limits
from deltic.errors import RequestError, show, valid_text
from deltic.params import PARAMETERS
from deltic.server.http import dump

_COUNTED: Final[Mapping[str, str]] = {
    "messages": "max_messages", "input": "max_messages", "documents": "max_messages", "tools": "max_tools",
    "stop": "max_stops", "stop_sequences": "max_stops", "stop_token_ids": "max_stops", "logit_bias": "max_logit_bias"}
"""Name of the limit on the number of entries, by field. A field over its limit is not validated."""
_SCHEMAS: Final = ("tools", "functions", "response_format", "structured_outputs", "guided_json", "guided_regex",
                   "guided_choice", "guided_grammar", "text", "output_config")
_MISSPELT: Final = 0.9
_MISSPELT_WITHIN: Final = 0.88
_MISSPELT_TYPE: Final = 0.85
_RELATED: Final = 0.6
"""difflib ratios from which a name counts as a misspelling of a known name, or as related to it."""
_NO_MISSPELLINGS: Final = ("models",)
"""Fields of other servers with names that look like misspellings of ours."""
_LONGEST_NAME: Final = 60
_MOST_UNKNOWN: Final = 100
_MOST_WITHIN: Final = 1000

Json = dict[str, Any]
Body = TypeVar("Body", bound="Fields")
Translate = Callable[[Any], Json]


@dataclass(slots=True)
class Notes:
    """Findings from reading a body.

    ignored: names of fields without effect. sent: maps our field names to the client's where the client used another
    server's names. lenient: ignore fields that would be refused. may_have_files: a message may have a file part.
    """

    ignored: list[str] = field(default_factory=list)
    sent: dict[str, str] = field(default_factory=dict)
    lenient: bool = False
    may_have_files: bool = False


class Fields(BaseModel):
    """A request body or part of one, in JSON's own types."""

    model_config = ConfigDict(extra="forbid", strict=True)
    counted: ClassVar[Mapping[str, str]] = {}
    """Names of the limits on the number of entries of this schema's own fields."""
    schemas: ClassVar[Mapping[str, Json]] = {}
    """JSON schemas of the fields that endpoints validate themselves, for /openapi.json."""
    elsewhere: ClassVar[Mapping[str, str]] = {}
    """Maps fields of other APIs to our names."""
    _notes: Notes = PrivateAttr(default_factory=Notes)

    @property
    def notes(self) -> Notes:
        return self._notes

    @property
    def ignored(self) -> list[str]:
        """Returns the names of fields that had no effect."""
        return self._notes.ignored


class SaltedFields(Fields):
    """Adds vLLM's cache_salt: requests with different salts share no cached prefixes and no answer records."""

    cache_salt: str | None = None

    @property
    def salt(self) -> str:
        """Returns a digest of the salt, or "" if there is none."""
        if self.cache_salt is None:
            return ""
        if not self.cache_salt:
            raise RequestError("cache_salt is empty: give at least one character, or leave it out", "cache_salt")
        return blake2b(valid_text(self.cache_salt, "cache_salt").encode(), digest_size=16).hexdigest()


def read_fields(data: Mapping[str, Any], schema: type[Body], limits: Limits, lenient: bool = False,
                size: int = sys.maxsize) -> Body:
    """Returns the record of a parsed body. size: bytes of the body as JSON, if known."""
    notes = Notes(lenient=lenient)
    own = _own_fields(data, schema, notes)
    with renamed(notes.sent):
        _check_counts(own, limits, {**_COUNTED, **schema.counted})
        if size > limits.max_schema_kib << 10:
            _check_schemas(own, limits.max_schema_kib)
        try:
            body = schema.model_validate(own)
        except ValidationError as error:
            raise _explain(error) from None
    notes.ignored += body.ignored
    body._notes = notes
    return body


def _own_fields(data: Mapping[str, Any], schema: type[Fields], notes: Notes, path: str = "") -> Json:
    """Returns the fields of the schema, with other servers' fields translated. path: path of an inner object."""
    own = {name: data[name] for name in schema.model_fields if name in data}
    others = [name for name in data if name not in schema.model_fields]
    if len(others) > _MOST_UNKNOWN and not notes.lenient:
        raise RequestError(f"the body has more than {_MOST_UNKNOWN} unknown fields")
    for name in others:
        value = data[name]
        if value is None or value in (*_NEUTRAL.get(name, ()), *_REFUSED.get(name, ())):
            continue
        if name in _TRANSLATED and not path:
            _take_over(name, value, own, schema, notes)
            continue
        if not notes.lenient:
            _refuse(name, value, schema, path)
        notes.ignored.append(path + name)
    for name, found in schema.model_fields.items():
        for kind in get_args(found.annotation):
            if isinstance(kind, type) and issubclass(kind, Fields) and isinstance(own.get(name), dict):
                own[name] = _own_fields(own[name], kind, notes, f"{name}.")
    return own


def _take_over(name: str, value: Any, own: Json, schema: type[Fields], notes: Notes) -> None:
    """Sets our fields that mean the same. A field that already has another value keeps it."""
    meant = _TRANSLATED[name](value)
    asked = {ours: wanted for ours, wanted in meant.items() if ours in schema.model_fields and wanted is not None}
    taken = {ours: wanted for ours, wanted in asked.items() if own.get(ours) in (None, wanted)}
    own.update(taken)
    notes.sent.update({ours: name for ours, wanted in taken.items() if wanted is value})
    if not asked or len(taken) < len(asked):
        notes.ignored.append(name)


def _refuse(name: str, value: Any, schema: type[Fields], path: str) -> None:
    """Raises RequestError for a field that would change the answer, has another name here, or is misspelt."""
    if name in _REFUSED and not path:
        neutral = _REFUSED[name]
        raise RequestError(f"{name} is not supported" + (f" with the value {show(value)}" if neutral else ""), name)
    if name in _NO_MISSPELLINGS:
        return
    if name in schema.elsewhere or _misspelt(name, schema.model_fields, _MISSPELT):
        raise unknown_field(path, name, schema.model_fields, schema.elsewhere)


def _misspelt(name: str, known: Iterable[str], ratio: float) -> bool:
    return bool(difflib.get_close_matches(name[:_LONGEST_NAME], known, 1, ratio))


def unknown_field(path: str, name: str, known: Iterable[str], elsewhere: Mapping[str, str] = {}) -> RequestError:
    """Returns the error for an unknown field, with the known name that was probably meant. path: path of its object."""
    shown = path + (name if len(name) <= _LONGEST_NAME else name[:_LONGEST_NAME] + "...")
    meant = elsewhere.get(name) or _meant(name[:_LONGEST_NAME], known)
    return RequestError(f"unknown field {show(shown)}" + (f": do you mean {path + meant!r}?" if meant else ""), shown)


def _meant(name: str, known: Iterable[str]) -> str | None:
    """Returns the known name that this one misspells, or the one that shares the most words with it."""
    def common(other: str) -> int:
        return len({*name.split("_")} & {*other.split("_")})

    near = difflib.get_close_matches(name, known, 50, _RELATED)
    if misspelt := difflib.get_close_matches(name, near, 1, _MISSPELT_TYPE):
        return misspelt[0]
    return max(filter(common, near), key=common, default=None)


@contextmanager
def renamed(names: Mapping[str, str]) -> Iterator[None]:
    """Makes errors name fields as the client does. names: the client's names by our names or their prefixes."""
    try:
        yield
    except RequestError as error:
        name = error.field or ""
        sent = sent_name(name, names)
        if sent == name:
            raise
        raise type(error)(str(error).replace(name, sent, 1), sent) from error


def sent_name(name: str, names: Mapping[str, str]) -> str:
    """Returns the client's name of a field. For `messages[3].content`, all of its prefixes are looked up."""
    for end in range(len(name), 0, -1):
        if (end == len(name) or name[end] in ".[") and name[:end] in names:
            return names[name[:end]] + name[end:]
    return name


def _check_counts(data: Mapping[str, Any], limits: Limits, counted: Mapping[str, str]) -> None:
    for name, limit in counted.items():
        value, most = data.get(name), getattr(limits, limit)
        if isinstance(value, list | dict) and len(value) > most:
            raise RequestError(f"{name} has {len(value)} entries, and may have at most {most} ({limit})", name)


def _check_schemas(data: Mapping[str, Any], most_kib: int) -> None:
    size = 0
    for name in _SCHEMAS:
        size += len(dump(data.get(name)))
        if size > most_kib << 10:
            raise RequestError(f"{name} takes more than {most_kib} KiB (max_schema_kib)", name)


def _explain(error: ValidationError) -> RequestError:
    first = error.errors(include_url=False)[0]
    path = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in first["loc"]).removeprefix(".")
    if first["type"] == "missing":
        return RequestError(f"{path} is missing", path)
    if first["type"] == "extra_forbidden":
        return RequestError(f"unknown field {show(path)}", path)
    expected = first["msg"].removeprefix("Input should be ").removeprefix("Value error, ")
    return RequestError(f"{path} must be {expected}, not {show(first['input'])}", path)


# Fields of other servers


def _same(name: str) -> Translate:
    return lambda value: {name: value}


def _think(value: Any) -> Json:
    """Translates Ollama's field: true, false, or an effort."""
    return {"reasoning_effort": value} if isinstance(value, str) else {"enable_thinking": value}


def _reasoning(value: Any) -> Json:
    """Translates OpenRouter's field: an object."""
    if not isinstance(value, dict):
        return {}
    exclude = value.get("exclude")
    return {"reasoning_effort": value.get("effort"), "thinking_budget": value.get("max_tokens"),
            "enable_thinking": value.get("enabled"), "include_reasoning": None if exclude is None else not exclude}


def _thinking(value: Any) -> Json:
    """Translates the field of DeepSeek, Z.ai and litellm: an object with a type, and perhaps Anthropic's budget."""
    kind = value.get("type") if isinstance(value, dict) else None
    if not isinstance(kind, str):
        return {}
    return {"enable_thinking": kind != "disabled", "thinking_budget": value.get("budget_tokens")}


def _format(value: Any) -> Json:
    """Translates Ollama's field: a schema, or `json`."""
    return {"response_format": {"type": "json_object"}} if value == "json" else _schema(value)


def _schema(value: Any) -> Json:
    """Translates the field of Ollama and llama.cpp: a schema."""
    return {"response_format": {"type": "json_schema", "schema": value}}


def _grammar(value: Any) -> Json:
    """Translates a grammar: a text (llama.cpp, SGLang), or an object with a type (text-generation-inference)."""
    return {"response_format": value} if isinstance(value, dict) else {"guided_grammar": value}


def _usage(value: Any) -> Json:
    """Translates OpenRouter's field: an object."""
    return {"stream_options": {"include_usage": True}} if isinstance(value, dict) and value.get("include") else {}


_TRANSLATED: Final[Mapping[str, Translate]] = {
    **{alias: _same(name) for name, parameter in PARAMETERS.items() for alias in parameter.aliases},
    **dict.fromkeys(("thinking_token_budget", "thinking_budget_tokens", "reasoning_budget"), _same("thinking_budget")),
    **dict.fromkeys(("regex", "regex_pattern"), _same("guided_regex")),
    **dict.fromkeys(("grammar", "grammar_string"), _grammar),
    "ebnf": _same("guided_grammar"),
    "stop_sequences": _same("stop"),
    "output_dimension": _same("dimensions"),
    "truncation": _same("truncate"),
    "return_text": _same("return_documents"),
    "instruct": _same("instruction"),
    "embedding_type": _same("encoding_format"),
    "do_sample": lambda value: {"temperature": 0.0} if value is False else {},
    "output_format": lambda value: {"output_config": {"format": value}},
    "think": _think,
    "reasoning": _reasoning,
    "thinking": _thinking,
    "usage": _usage,
    "json_schema": _schema,
    "format": _format,
}
"""Functions that translate fields of other servers into our fields with the same meaning."""

_NEUTRAL: Final[Mapping[str, tuple[Any, ...]]] = {
    **dict.fromkeys(("grammar", "grammar_string", "ebnf", "regex", "regex_pattern"), ("",)),
    **dict.fromkeys(("format", "json_schema"), ("", {})),
    **dict.fromkeys(("thinking_token_budget", "thinking_budget_tokens", "reasoning_budget"), (-1,)),
    **dict.fromkeys(("backend_sampling", "return_routed_experts", "reasoning_control"), (False,)),
    "stop_sequences": ([],), "embedding_type": ("float",), "n_cmpl": (1,), "speculative.n_max": (-1,),
}
"""Values of fields that request nothing. null always requests nothing."""

_OFF: Final[tuple[Any, ...]] = (0, False, "", [], {})
_REFUSED: Final[Mapping[str, tuple[Any, ...]]] = {
    **dict.fromkeys((
        "grammar_lazy", "echo", "stop_regex", "custom_params", "suffix", "late_chunking", "raw_scores",
        "use_beam_search", "logits_processors", "custom_logit_processor", "lora_path", "lora", "allowed_token_ids",
        "bad_words", "input_embeds", "session_params", "image_data", "return_hidden_states", "no_stop_trim",
        "include_stop_str_in_output", "mcp_servers", "watermark", "mirostat", "mirostat_mode", "dry_multiplier",
        "xtc_probability", "dynatemp_range", "dynamic_temperature", "top_a", "nsigma", "epsilon_cutoff", "eta_cutoff",
        "smoothing_factor", "penalty_alpha", "no_repeat_ngram_size", "n_indent", "t_max_predict_ms"), _OFF),
    **dict.fromkeys(("typical_p", "typ_p", "tfs_z", "tfs", "best_of", "encoder_repetition_penalty",
                     "guidance_scale"), (1,)),
    **dict.fromkeys(
        ("repetition_detection", "prompt_embeds", "chat_template", "structural_tag", "thinking_budget"), ()),
    **dict.fromkeys(("adaptive_target", "top_n_sigma"), (-1, 0)),
    "truncate_prompt_tokens": (-1,), "min_keep": (0, 1), "output_dtype": ("float",), "embedding_types": (["float"],),
    "truncation_direction": ("Right",),
}
"""Fields that would change the answer, with the values that disable them."""


# Fields within messages, items, blocks and tools


@dataclass(frozen=True, slots=True)
class Known:
    """The known fields of an object.

    within: the known fields of the objects, or lists of objects, in its fields. kinds: object types that are checked;
    empty: all types.
    """

    names: frozenset[str]
    within: Mapping[str, Known] = field(default_factory=dict)
    kinds: tuple[str | None, ...] = ()

    @classmethod
    def of(cls, names: str, **within: Known) -> Known:
        return cls(frozenset([*names.split(), *within]), within)

    def only(self, *kinds: str | None) -> Known:
        """Returns the same fields, checked only for objects of these types."""
        return replace(self, kinds=kinds)


_REFUSED_WITHIN: Final[Mapping[str, str]] = {
    "function_call": "use tool_calls",
    "prefix": "use continue_final_message",
    "partial": "use continue_final_message",
    "images": "use parts of type image_url",
}
"""Fields that would change the answer, with advice on what to use instead."""


def usable_tools(tools: Sequence[Any], kinds: Sequence[str | None], ignored: list[str]) -> list[tuple[int, Any]]:
    """Returns the tools of known types with their positions, without the tools that another server runs.

    Returns all tools if no others remain, or if a type looks like a misspelling: the caller refuses these.
    """
    unknown = {index: tool["type"] for index, tool in enumerate(tools)
               if isinstance(tool, dict) and isinstance(tool.get("type"), str) and tool["type"] not in kinds}
    names = [kind for kind in kinds if kind]
    if len(unknown) == len(tools) or any(_misspelt(kind, names, _MISSPELT_TYPE) for kind in {*unknown.values()}):
        return [*enumerate(tools)]
    ignored.extend(f"tools.{kind}" for kind in unknown.values())
    return [(index, tool) for index, tool in enumerate(tools) if index not in unknown]


def check_within(body: Fields, table: Mapping[str, Known], also: Callable[[str], bool] = lambda name: False) -> None:
    """Notes unknown fields within these fields of a body. Raises RequestError for a field that is misspelt or would
    change the answer. also: returns True for other names that have a meaning."""
    ignored: dict[str, None] = {}
    for place, known in table.items():
        for path, names, name, value in _unknown(getattr(body, place), known, place):
            if value in (None, "", False, [], {}) or also(name):
                continue
            if name in _REFUSED_WITHIN and not body.notes.lenient:
                raise RequestError(f"{path}.{name} is not supported: {_REFUSED_WITHIN[name]}", f"{path}.{name}")
            noted = f"{_without_indices(path)}.{name}"
            if noted in ignored or len(ignored) >= _MOST_WITHIN:
                continue
            if not body.notes.lenient and len(name) <= _LONGEST_NAME and _misspelt(name, names, _MISSPELT_WITHIN):
                raise unknown_field(f"{path}.", name, names)
            ignored[noted] = None
    body.ignored.extend(ignored)


def _unknown(value: Any, known: Known, path: str) -> Iterator[tuple[str, frozenset[str], str, Any]]:
    """Yields each unknown field as the path of its object, the object's known names, its name and its value."""
    if isinstance(value, list):
        for index, item in enumerate(value):
            if isinstance(item, dict):
                yield from _unknown(item, known, f"{path}[{index}]")
    elif isinstance(value, dict) and (not known.kinds or value.get("type") in known.kinds):
        for name, inner in value.items():
            if name in known.within:
                yield from _unknown(inner, known.within[name], f"{path}.{name}")
            elif name not in known.names:
                yield path, known.names, name, inner


def _without_indices(path: str) -> str:
    return "".join(piece.partition("]")[2] if "]" in piece else piece for piece in path.split("["))
