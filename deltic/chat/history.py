"""Records finished answers, so that the next prompt repeats the last one token by token.

Templates rewrite earlier turns, clients re-serialise them, and the same text may be encoded into other tokens: each of
these makes the next prompt differ from the cached one. Therefore every answer leaves a record with its exact ids, keyed
by a hash of the part of the conversation that the client can see. The next prompt is made in one of two modes:

    template   the text that the template renders, encoded with the recorded ids as far as they spell the same text
    preserve   the recorded ids, reasoning included, and the text that the template renders after them

If the client sends reasoning back, only records with the same reasoning are used. If it does not, and conversations
that look alike have had different answers, none of the records is used, so that no conversation gets the reasoning of
another; later answers make them distinguishable again. In doubt, a prompt is rendered and encoded without records.

Records have an owner, and a prompt uses only records of its own owner.
"""

from __future__ import annotations

import json
import math
import secrets
import unicodedata
from array import array
from collections.abc import Mapping, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from threading import Lock
from typing import Any

from deltic.chat.control_tokens import unmarked
from deltic.chat.conversation import (
    Conversation,
    EncodedPrompt,
    RenderedPrefixes,
    encode_prompt,
    stable_prefixes,
    system_prefix_len,
)
from deltic.chat.history_store import (
    AnswerLog,
    AnswerRecord,
    AnswerStore,
    OwnedEntries,
    chain_ids,
    ids_digest,
    pack,
    reasoning_hash,
    record_name,
    unpack,
)
from deltic.chat.message_cache import Schemas
from deltic.chat.messages import REASONING, normalise_messages
from deltic.chat.output_router import Answer
from deltic.chat.tokenizer import UNBOUNDED, Tokenizer, TokenLimit
from deltic.chat.tool_arguments import argument_schema, typed
from deltic.errors import DelticError, LongPromptError, RequestError
from deltic.params import Finish

MODES = ("template", "preserve")

# Variables that may differ from turn to turn. If they change more than the end of the prompt, the ids show it.
_TOGGLES = frozenset({"enable_thinking", "thinking", "thinking_budget", "reasoning_effort"})
# A text with more characters per token than this is measured before it is rendered.
_MAX_CHARS_PER_TOKEN = 8
_KEY_VERSION = 4  # version of the data that keys hash
_CHARS_BY_TOKEN = 4  # average of ordinary text
_MAX_PROMPT_CHARS = 64_000_000
_CHARS_OF_ID = 40  # memory of one id in a kept prompt, in characters
_ANSWER_SHARE = 4  # a preserved prompt leaves at least 1/4 of the context to its answer
_BEFORE = normalise_messages([{"role": "user", "content": "Question"}, {"role": "assistant", "content": "Answer"}])
"""Placeholder for a conversation with known ids, used to render the text that follows it."""
_SAMPLE = "The quick brown fox: 0.5 \u00e9t\u00e9 \u6f22\u5b57\n\n{}"

@dataclass(frozen=True, slots=True)
class HistoryTurn:
    """A prompt, and the data that a record of its answer needs.

    stable_prefixes: positions up to which following prompts are expected to repeat the ids.
    parent, kept: the first `kept` ids are those of the record `parent`.
    system_prefix_len, thoughts: as in `AnswerRecord`, for the answers so far.
    state: hash of everything that the client can see up to here, with calls typed by the schemas.
    """

    ids: tuple[int, ...]
    stable_prefixes: tuple[int, ...]
    parent: str = ""
    kept: int = 0
    system_prefix_len: int = 0
    thoughts: tuple[str, ...] = ()
    state: str = ""
    schemas: Schemas = field(default_factory=dict)
    owner: str = ""


@dataclass(frozen=True, slots=True)
class AnswerEnd:
    """The end of a recorded answer, where any number of conversations can continue. key, digest: of its record."""

    key: str
    digest: str
    owner: str


@dataclass(frozen=True, slots=True)
class _BaseAnswer:
    """The recorded answer that a prompt builds on: its index among the messages, its name, record and ids."""

    index: int
    name: str
    record: AnswerRecord
    ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PortableAnswer:
    """A recorded answer for another process. index: index of its message. key: key of its record there, without an
    owner. ids: prompt and answer. data: the record without the ids."""

    index: int
    key: str
    ids: tuple[int, ...]
    data: bytes


class RenderedPrompts:
    """The most recent prompts that were rendered and encoded as a whole, by owner and state. Thread-safe."""

    def __init__(self) -> None:
        self._known: OwnedEntries[EncodedPrompt] = OwnedEntries(_MAX_PROMPT_CHARS)
        self._lock = Lock()

    def before(self, states: Sequence[str], owner: str) -> EncodedPrompt | None:
        """Returns the prompt of the latest of these states for which one is known."""
        with self._lock:
            return next((prompt for state in reversed(states) if (prompt := self._known.get(owner, state))), None)

    def put(self, state: str, prompt: EncodedPrompt, owner: str) -> None:
        with self._lock:
            self._known.put(owner, state, prompt, len(prompt.text) + _CHARS_OF_ID * len(prompt.ids))


class History:
    """The recorded answers of one model. Thread-safe.

    A preserved prompt that exceeds 3/4 of the bound is rendered by the template instead, which may be shorter.
    """

    def __init__(self, tokenizer: Tokenizer, store: AnswerStore | None = None, bound: TokenLimit = UNBOUNDED) -> None:
        self._tokenizer = tokenizer
        self._bound = bound
        self._prefixes = RenderedPrefixes()
        self._prompts = RenderedPrompts()
        self._preserved_bound = replace(bound, tokens=bound.tokens - bound.tokens // _ANSWER_SHARE)
        self._records = AnswerLog(store, tokenizer.vocab_size)
        self._vocabulary = [tokenizer.vocab_size, *tokenizer.encode(_SAMPLE)]

    def within(self, bound: TokenLimit) -> History:
        """Returns a view of the same records with another prompt limit."""
        found = copy(self)
        found._bound = bound
        return found

    def turn(self, conversation: Conversation, mode: str, owner: str = "") -> HistoryTurn:
        """Returns the prompt for the next answer. Raises RequestError if the template refuses it or it is too long."""
        asked = _unconditional_text(conversation)
        if len(asked) > _MAX_CHARS_PER_TOKEN * self._bound.tokens:
            self._tokenizer.check_length(asked, self._bound)
        schemas = conversation.schemas
        states = self._states(conversation, schemas, owner)
        records, base = self._recall(conversation, states, owner)
        keep = mode == "preserve"
        turn = _preserved_turn(conversation, self._prefixes, base, self._preserved_bound) if keep and base else None
        if turn is None:
            before = self._prompts.before(states, owner)
            turn, prompt = _rendered_turn(conversation, self._prefixes, records, base, self._bound, keep, before)
            self._prompts.put(states[-1], prompt, owner)
        return replace(turn, state=states[-1], schemas=schemas, owner=owner)

    def branch(self, conversation: Conversation, end: AnswerEnd, owner: str = "") -> HistoryTurn:
        """Returns the prompt for the next answer after the messages of a conversation that follow a recorded answer:
        all ids of that answer and of the text after it. Raises RequestError if the answer is no longer known."""
        record = self._records.find_digest(end.key, end.digest, owner) if owner == end.owner else None
        chain = self._records.chain(end.key, record, owner) if record else None
        ids = chain_ids(chain) if chain else None
        if not ids or not record:
            raise RequestError("fork_from names an answer whose tokens are not kept any more, or under another "
                               "cache_salt: send the whole conversation in messages", "fork_from")
        whole = replace(conversation, messages=[*_BEFORE, *conversation.messages])
        try:
            parts = _text_around(whole, len(_BEFORE) - 1)
        except DelticError as error:
            raise RequestError("these messages cannot follow an answer; leave out fork_from and send the whole "
                               f"conversation: {error}", "messages") from error
        if len(parts) != 2:
            raise RequestError("the chat template does not render messages alone: leave out fork_from and send the "
                               "whole conversation", "fork_from")
        tail = conversation.tokenizer.encode(parts[1], quoted=True, bound=self._bound.after(len(ids)))
        state, schemas = end.key, conversation.schemas
        for message in conversation.messages:
            state = _state_behind(conversation, message, schemas, state)
        turn = _extend(whole, _BaseAnswer(len(_BEFORE) - 1, record_name(end.key, record), record, ids), tail)
        return replace(turn, state=state, schemas=schemas, owner=owner)

    def remember(self, turn: HistoryTurn, hidden: Sequence[int], begun: Sequence[int], tokens: Sequence[int],
                 finish: Finish, answer: Answer, whole: bool) -> AnswerEnd | None:
        """Records one finished answer. Returns its end if a conversation can continue there. hidden: the request's stop
        ids. begun: tokens of the answer that were in the request. tokens: generated tokens, with the end token. whole:
        the text ended with the tokens, outside of think blocks and calls, and not at a stop string."""
        tokens = [*begun, *tokens]
        if not tokens:
            return None
        special = self._tokenizer.special
        ended = finish == "stop" and (tokens[-1] in special or tokens[-1] in hidden)
        ids = tokens[:-1] if ended else tokens
        sound = whole and finish in ("stop", "length") and special.isdisjoint(ids)
        calls = tuple((call.name, call.written) for call in answer.calls)
        try:
            read = [(name, json.loads(text)) for name, text in calls]
        except ValueError:  # cut within a call, which no client can send back
            return None
        visible = _visible(answer.content, read, turn.schemas)
        spelled = array("i", turn.ids) + array("i", ids)
        record = AnswerRecord(answer.content, answer.reasoning, calls, spelled[turn.kept:] if sound else array("i"),
                    ids_digest(spelled), turn.parent, turn.kept, turn.system_prefix_len,
                    (*turn.thoughts, reasoning_hash(_plain_text(answer.reasoning))))
        key = _next_state(turn.state, visible)
        self._records.put(key, record, turn.owner)
        return AnswerEnd(key, record.digest, turn.owner) if record.ids else None

    def last_answer(self, conversation: Conversation, owner: str = "") -> PortableAnswer | None:
        """Returns the last recorded answer of a conversation, for `keep_answer` of another process."""
        schemas = conversation.schemas
        _, base = self._recall(conversation, self._states(conversation, schemas, owner), owner)
        if base is None:
            return None
        key = self._states(conversation, schemas, "")[base.index + 1]
        record = replace(base.record, ids=array("i"), parent="", kept=0, ambiguous=False)
        return PortableAnswer(base.index, key, base.ids, pack(key, record))

    def keep_answer(self, key: str, ids: Sequence[int], data: bytes) -> None:
        """Adds a record that `last_answer` returned, with its ids, unless it is damaged."""
        record, whole = unpack(key, data, self._tokenizer.vocab_size), array("i", ids)
        if record and record.digest == ids_digest(whole) and isinstance(record.content, str) and isinstance(
                record.reasoning, str) and isinstance(record.system_prefix_len, int):
            self._records.put(key, replace(record, ids=whole, parent="", kept=0))

    def flush(self) -> None:
        self._records.flush()

    def _states(self, conversation: Conversation, schemas: Schemas, owner: str) -> list[str]:
        """Returns a hash for each number of messages, from 0 on. They differ between owners."""
        variables = {name: value for name, value in conversation.variables.items()
                     if value is not None and name not in _TOGGLES}
        source = conversation.template.source
        before, after = (json.dumps(part, sort_keys=True)[1:-1] for part in (
            [_KEY_VERSION, owner, self._vocabulary, source], [variables, conversation.quoter is None]))
        states = [_state_after("", f"[{before}, {conversation.json(conversation.tools)}, {after}]")]
        for message in conversation.messages:
            states.append(_state_behind(conversation, message, schemas, states[-1]))
        return states

    def _recall(self, conversation: Conversation, states: Sequence[str], owner: str
                ) -> tuple[dict[int, AnswerRecord], _BaseAnswer | None]:
        """Returns the unambiguous records of this conversation by message index, and the last with all ids."""
        places = {state: index for index, state in enumerate(states[1:])}
        answers = _answers(conversation)
        thoughts = [_sent_reasoning_hash(conversation.messages[index]) for index in answers]
        records: dict[int, AnswerRecord] = {}
        base: _BaseAnswer | None = None
        for count, index in reversed(list(enumerate(answers, 1))):
            record = records.get(index) or self._unambiguous(states[index + 1], thoughts[:count], owner)
            if record is None:
                continue
            records[index] = record
            chain = self._records.chain(states[index + 1], record, owner) if base is None else None
            if chain and (ids := chain_ids(chain)):
                base = _BaseAnswer(index, record_name(states[index + 1], record), record, ids)
                records |= {places[key]: link for key, link in chain if key in places}
        return records, base

    def _unambiguous(self, key: str, thoughts: Sequence[str | None], owner: str) -> AnswerRecord | None:
        """Returns the record of an answer if exactly one matches these thoughts."""
        found = [record for record in self._records.find(key, owner) if record.matches(thoughts)]
        return found[0] if len(found) == 1 and found[0].ids else None


def _preserved_turn(
    conversation: Conversation, prefixes: RenderedPrefixes, base: _BaseAnswer, bound: TokenLimit
) -> HistoryTurn | None:
    """Returns the base's ids and those of the text after it; None if it cannot be split there or is too long."""
    if len(base.ids) >= bound.tokens:
        return None
    try:
        parts = _text_around(conversation, base.index)
    except DelticError:
        return None
    if len(parts) != 2:  # the template does not render the base's content exactly once
        return None
    before, tail = parts
    start = prefixes.before_answer(conversation, base.index, before)
    if start is None or not _begins_with(conversation.tokenizer, base.ids, start):
        return None
    with suppress(LongPromptError):
        ids = conversation.tokenizer.encode(tail, quoted=True, bound=bound.after(len(base.ids)))
        return _extend(conversation, base, ids)
    return None


def _extend(conversation: Conversation, base: _BaseAnswer, tail: Sequence[int]) -> HistoryTurn:
    ids = (*base.ids, *tail)
    thoughts = (*base.record.thoughts, *_sent_reasoning_hashes(conversation, base.index + 1))
    prefix = base.record.system_prefix_len
    return HistoryTurn(ids, _positions(prefix, len(ids)), base.name, len(base.ids), prefix, thoughts)


def _rendered_turn(
    conversation: Conversation,
    prefixes: RenderedPrefixes,
    records: Mapping[int, AnswerRecord],
    base: _BaseAnswer | None,
    bound: TokenLimit,
    whole: bool,
    before: EncodedPrompt | None,
) -> tuple[HistoryTurn, EncodedPrompt]:
    """Returns the rendered prompt, encoded with the base's ids. whole: the next prompt is expected to extend it.
    before: the prompt of an earlier turn."""
    conversation, text = _with_recorded_answers(conversation, records)
    prompt = encode_prompt(conversation.tokenizer, text, base.ids if base else (), bound, before)
    start = system_prefix_len(conversation, prompt, prefixes)
    found = _positions(*stable_prefixes(conversation, prompt, start), len(prompt.ids) if whole else 0)
    return HistoryTurn(prompt.ids, found, base.name if base and prompt.kept else "", prompt.kept, start,
                       _sent_reasoning_hashes(conversation)), prompt


def _positions(*positions: int) -> tuple[int, ...]:
    return tuple(sorted({position for position in positions if position}))


def _with_recorded_answers(conversation: Conversation, records: Mapping[int, AnswerRecord]) -> tuple[Conversation, str]:
    """Returns the conversation with recorded answers exactly as the model wrote them, and its rendered text."""
    if records:
        written = [_recorded_message(message, records[index]) if index in records else message
                   for index, message in enumerate(conversation.messages)]
        with suppress(DelticError):  # the template may refuse the model's words and take the client's
            return replace(conversation, messages=written), conversation.render(written)
    return conversation, conversation.render(conversation.messages)


def _recorded_message(message: Mapping[str, Any], record: AnswerRecord) -> dict[str, Any]:
    """Returns the client's message in the model's own wording, without reasoning if the client left it out."""
    raw = {**message, "content": record.content, "contents": record.content}
    reasoning = message.get("reasoning_content")
    if isinstance(reasoning, str) and _plain_text(reasoning) == _plain_text(record.reasoning):
        raw |= dict.fromkeys(REASONING, record.reasoning)
    if record.calls:
        raw["tool_calls"] = [{**call, "function": {"name": name, "arguments": json.loads(arguments)}}
                             for call, (name, arguments) in zip(message["tool_calls"], record.calls, strict=True)]
    return raw


def _text_around(conversation: Conversation, index: int) -> list[str]:
    """Returns the rendered text before and after the content of this answer."""
    mark = "x" + secrets.token_hex(16)
    answer = {"role": "assistant", "content": mark, "contents": mark}
    messages = conversation.messages
    return conversation.render([*messages[:index], answer, *messages[index + 1:]]).split(mark)


def _begins_with(tokenizer: Tokenizer, ids: Sequence[int], text: str) -> bool:
    wanted, spelled, place = unmarked(text).encode(), bytearray(), 0
    while place < len(ids) and len(spelled) < len(wanted):
        end = place + 1 + (len(wanted) - len(spelled)) // _CHARS_BY_TOKEN
        spelled += tokenizer.bytes_of(ids[place:end])
        place = end
    return spelled.startswith(wanted)


def _unconditional_text(conversation: Conversation) -> str:
    """Returns the texts that every template renders in full."""
    contents = (message["content"] for message in conversation.messages if message["role"] != "assistant")
    return "\n".join(content for content in contents if isinstance(content, str))


def _answers(conversation: Conversation) -> list[int]:
    return [index for index, message in enumerate(conversation.messages) if message["role"] == "assistant"]


def _sent_reasoning_hashes(conversation: Conversation, start: int = 0) -> tuple[str, ...]:
    places = (index for index in _answers(conversation) if index >= start)
    return tuple(_sent_reasoning_hash(conversation.messages[index]) or "" for index in places)


def _sent_reasoning_hash(message: Mapping[str, Any]) -> str | None:
    """Returns the hash of the reasoning that the client sends back; None if it sends none."""
    reasoning = message.get("reasoning_content")
    return reasoning_hash(_plain_text(reasoning)) or None if isinstance(reasoning, str) else None


# Hashes of the visible conversation


def _next_state(state: str, seen: Any) -> str:
    return _state_after(state, json.dumps(seen, sort_keys=True))


def _state_after(state: str, seen: str) -> str:
    return blake2b(f"{state}\n{seen}".encode(), digest_size=16).hexdigest()


def _state_behind(conversation: Conversation, message: Mapping[str, Any], schemas: Schemas, state: str) -> str:
    """Returns the state after a message. It is cached with the message for the last state and schemas."""
    read, depends = conversation.read_once.get(id(message)), schemas if message.get("tool_calls") else None
    if read and read.state and read.state[0] == state and read.state[1] is depends:
        return read.state[2]
    if message["role"] != "assistant":
        seen = conversation.json(message)
    else:
        seen = json.dumps(_visible_message(message, schemas), sort_keys=True)
    behind = _state_after(state, seen)
    if read:
        read.state = state, depends, behind
    return behind


def _visible_message(message: Mapping[str, Any], schemas: Schemas) -> Any:
    if message["role"] != "assistant":
        return message
    calls = [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls", ())]
    return _visible(message["content"], calls, schemas)


def _visible(content: Any, calls: Sequence[tuple[str, Mapping[str, Any]]], schemas: Schemas) -> Any:
    """Returns content and calls of an answer in a form that does not depend on how clients re-serialise them."""
    return [_plain_text(content) if isinstance(content, str) else content,
            [[name, _without_defaults(arguments, schemas.get(name, {}))] for name, arguments in calls]]


def _without_defaults(arguments: Mapping[str, Any], schema: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the arguments, typed by the schema, without the schema's defaults, which clients add to calls."""
    found: dict[str, Any] = _number_as_float(typed(arguments, schema))
    return {key: value for key, value in found.items() if not _is_default(value, argument_schema(key, schema))}


def _is_default(value: Any, schema: Any) -> bool:
    return (isinstance(schema, Mapping) and "default" in schema
            and json.dumps(value, sort_keys=True) == json.dumps(_number_as_float(schema["default"]), sort_keys=True))


def _plain_text(text: str) -> str:
    lines = unicodedata.normalize("NFC", text).replace("\r\n", "\n").split("\n")
    return "\n".join(line.rstrip() for line in lines).strip()


def _number_as_float(value: Any) -> Any:
    """Converts numbers to floats, as JavaScript clients do."""
    if isinstance(value, Mapping):
        return {key: _number_as_float(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_number_as_float(item) for item in value]
    if isinstance(value, bool) or not isinstance(value, int | float):
        return value
    try:
        return float(value) + 0.0
    except OverflowError:
        return math.copysign(math.inf, value)
