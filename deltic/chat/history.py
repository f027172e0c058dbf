"""Remembers finished answers, so that the next prompt repeats the last one token by token.

Templates rewrite earlier turns, clients re-serialise them, and text that is encoded again may be cut into other tokens:
each makes the next prompt part from what has been computed. So every answer leaves a note with its exact ids,
found again by what the client can see of the conversation. From there a prompt is made in one of two modes:

    template   exactly what the template renders, spelled with the remembered ids as far as they say the same
    preserve   the remembered ids as they are, thinking included, and what the template renders after them

Thinking that the client sends back decides where it is sent: only answers with that very thinking are taken. Where it
is not sent and conversations that look alike have had different answers, none of them is taken, so that nobody is given
another's thinking; the answers that follow, by which they part, tell again which is whose. In doubt a prompt is
rendered and encoded as if nothing were known.

Answers have an owner. A prompt uses answers of its own owner only: if another owner sends the same conversation, it
finds none.
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
from typing import Any

from deltic.chat.control_tokens import unmarked
from deltic.chat.conversation import Conversation, RenderedPrefixes, boundaries, opening, spell
from deltic.chat.deltas import Answer
from deltic.chat.history_store import AnswerLog, AnswerRecord, AnswerStore, digest_of, ids_of, name_of, thought_of
from deltic.chat.messages import REASONING
from deltic.chat.schema_coercion import argument_schema, typed
from deltic.chat.tokenizer import UNBOUNDED, Tokenizer, TokenLimit
from deltic.chat.tools import tool_schemas
from deltic.errors import DelticError, LongPromptError
from deltic.params import Finish

MODES = ("template", "preserve")

# Variables that may differ from turn to turn; where they change more than the prompt's end, its ids tell.
_TOGGLES = frozenset({"enable_thinking", "thinking", "thinking_budget", "reasoning_effort"})
# Characters of a token that no text has on average; beyond that, the length is the first that is looked at.
_RARE = 8
# What notes and their keys say; those of another form are not found.
_FORM = 4
# A preserved prompt leaves one part in four of the context to its answer.
_ANSWER_SHARE = 4
_SAMPLE = "The quick brown fox: 0.5 \u00e9t\u00e9 \u6f22\u5b57\n\n{}"

Schemas = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class HistoryTurn:
    """A prompt, and what is needed to remember its answers.

    stable_prefixes: positions that following prompts are expected to share.
    state: the hash of all that the client can see up to here, with calls typed by the schemas. Of the ids the first
        `kept` are those of the note `parent`.
    opening, thoughts: as in `AnswerRecord`, of the answers so far. owner: who has the answers.
    """

    ids: tuple[int, ...]
    stable_prefixes: tuple[int, ...]
    parent: str = ""
    kept: int = 0
    opening: int = 0
    thoughts: tuple[str, ...] = ()
    state: str = ""
    schemas: Schemas = field(default_factory=dict)
    owner: str = ""


@dataclass(frozen=True, slots=True)
class _Base:
    """The remembered answer that a prompt builds on: its place among the messages, its note, all its ids."""

    index: int
    name: str
    note: AnswerRecord
    ids: tuple[int, ...]


class History:
    """The answers of one model. Threads may share it.

    bound: limit of prompts. A preserved prompt that exceeds three quarters of it is rendered by the template instead,
    which may be shorter.
    """

    def __init__(self, tokenizer: Tokenizer, store: AnswerStore | None = None, bound: TokenLimit = UNBOUNDED) -> None:
        self._tokenizer, self._bound, self._openings = tokenizer, bound, RenderedPrefixes()
        self._preserved_bound = replace(bound, tokens=bound.tokens - bound.tokens // _ANSWER_SHARE)
        self._notes = AnswerLog(store, tokenizer.vocab_size)
        self._vocabulary = [tokenizer.vocab_size, *tokenizer.encode(_SAMPLE)]

    def within(self, bound: TokenLimit) -> History:
        """The same answers, for prompts of another length."""
        found = copy(self)
        found._bound = bound
        return found

    def turn(self, conversation: Conversation, mode: str, owner: str = "") -> HistoryTurn:
        """The prompt of the conversation's next answer. mode: one of MODES. owner: of the answers that it may use, and
        of the next one. RequestError as the template raises it, or if the prompt is too long."""
        asked = _asked(conversation)
        if len(asked) > _RARE * self._bound.tokens:
            self._tokenizer.check_length(asked, self._bound)
        schemas = tool_schemas(conversation.tools or ())
        states = self._states(conversation, schemas, owner)
        notes, base = self._recall(conversation, states, owner)
        keep = mode == "preserve"
        turn = _preserved(conversation, self._openings, base, self._preserved_bound) if keep and base else None
        if turn is None:
            turn = _rendered(conversation, self._openings, notes, base, self._bound, whole=keep)
        return replace(turn, state=states[-1], schemas=schemas, owner=owner)

    def remember(self, turn: HistoryTurn, hidden: Sequence[int], tokens: Sequence[int], finish: Finish, answer: Answer,
                 whole: bool) -> None:
        """Note one finished answer, if it can be continued. hidden: the request's stop ids. tokens, the one that ended
        it too, say the `answer`; whole: its text ended with it, in no think block or call, and not at a stop string."""
        if not tokens:
            return
        special = self._tokenizer.special
        ended = finish == "stop" and (tokens[-1] in special or tokens[-1] in hidden)
        ids = tokens[:-1] if ended else tokens
        sound = whole and finish in ("stop", "length") and special.isdisjoint(ids)
        calls = tuple((call.name, call.written) for call in answer.calls)
        try:
            read = [(name, json.loads(text)) for name, text in calls]
        except ValueError:  # given up within a call, which nobody can send back
            return
        visible = _visible(answer.content, read, turn.schemas)
        spelled = array("i", turn.ids) + array("i", ids)
        note = AnswerRecord(answer.content, answer.reasoning, calls, spelled[turn.kept:] if sound else array("i"),
                    digest_of(spelled), turn.parent, turn.kept, turn.opening,
                    (*turn.thoughts, thought_of(_plain_text(answer.reasoning))))
        self._notes.put(_next_state(turn.state, visible), note, turn.owner)

    def flush(self) -> None:
        """Wait until all notes are written."""
        self._notes.flush()

    def _states(self, conversation: Conversation, schemas: Schemas, owner: str) -> list[str]:
        """A hash for each number of messages, from none on. The hashes of two owners differ."""
        variables = {name: value for name, value in conversation.variables.items()
                     if value is not None and name not in _TOGGLES}
        states = [_next_state("", [_FORM, owner, self._vocabulary, conversation.template.source, conversation.tools,
                                   variables, conversation.quoter is None])]
        for message in conversation.messages:
            states.append(_next_state(states[-1], _seen(message, schemas)))
        return states

    def _recall(self, conversation: Conversation, states: Sequence[str], owner: str
                ) -> tuple[dict[int, AnswerRecord], _Base | None]:
        """This conversation's answers, as far as they are known for certain, by their place among the messages; and
        the last one whose ids are all there."""
        places = {state: index for index, state in enumerate(states[1:])}
        answers = _answers(conversation)
        thoughts = [_sent_thought(conversation.messages[index]) for index in answers]
        notes: dict[int, AnswerRecord] = {}
        base: _Base | None = None
        for count, index in reversed(list(enumerate(answers, 1))):
            note = notes.get(index) or self._only(states[index + 1], thoughts[:count], owner)
            if note is None:
                continue
            notes[index] = note
            chain = self._notes.chain(states[index + 1], note, owner) if base is None else None
            if chain and (ids := ids_of(chain)):
                base = _Base(index, name_of(states[index + 1], note), note, ids)
                notes |= {places[key]: link for key, link in chain if key in places}
        return notes, base

    def _only(self, key: str, thoughts: Sequence[str | None], owner: str) -> AnswerRecord | None:
        """The note of an answer, if no other conversation with these thoughts can be meant."""
        found = [note for note in self._notes.find(key, owner) if note.fits(thoughts)]
        return found[0] if len(found) == 1 and found[0].ids else None


def _preserved(
    conversation: Conversation, openings: RenderedPrefixes, base: _Base, bound: TokenLimit
) -> HistoryTurn | None:
    """The base's ids and what the template renders after it; None if that cannot be told apart for certain, or is
    beyond the bound."""
    try:
        parts = _around(conversation, base.index)
    except DelticError:
        return None
    if len(parts) != 2:  # the template renders the base's content not exactly once
        return None
    before, tail = parts
    start = openings.before_answer(conversation, base.index, before)
    if start is None or not _begins_with(conversation.tokenizer, base.ids, start):
        return None
    with suppress(LongPromptError):
        ids = conversation.tokenizer.encode(tail, quoted=True, bound=bound.after(len(base.ids)))
        return _extended(conversation, base, ids)
    return None


def _extended(conversation: Conversation, base: _Base, tail: Sequence[int]) -> HistoryTurn:
    ids = (*base.ids, *tail)
    thoughts = (*base.note.thoughts, *_sent_thoughts(conversation, base.index + 1))
    return HistoryTurn(
        ids, _positions(base.note.opening, len(ids)), base.name, len(base.ids), base.note.opening, thoughts
    )


def _rendered(
    conversation: Conversation,
    openings: RenderedPrefixes,
    notes: Mapping[int, AnswerRecord],
    base: _Base | None,
    bound: TokenLimit,
    whole: bool,
) -> HistoryTurn:
    """What the template renders, spelled with the base's ids. whole: the next prompt is expected to extend it. The
    template's boundaries are kept in any case, as an answer that was stopped cannot be extended."""
    conversation, text = _as_written(conversation, notes)
    prompt = spell(conversation.tokenizer, text, base.ids if base else (), bound)
    start = opening(conversation, prompt, openings)
    found = _positions(*boundaries(conversation, prompt, start), len(prompt.ids) if whole else 0)
    return HistoryTurn(prompt.ids, found, base.name if base and prompt.kept else "", prompt.kept, start,
                _sent_thoughts(conversation))


def _positions(*positions: int) -> tuple[int, ...]:
    return tuple(sorted({position for position in positions if position}))


def _as_written(conversation: Conversation, notes: Mapping[int, AnswerRecord]) -> tuple[Conversation, str]:
    """The conversation with remembered answers as the model wrote them, and its text."""
    if notes:
        written = [_raw(message, notes[index]) if index in notes else message
                   for index, message in enumerate(conversation.messages)]
        with suppress(DelticError):  # what the template refuses in the model's words it may take in the client's
            return replace(conversation, messages=written), conversation.render(written)
    return conversation, conversation.render(conversation.messages)


def _raw(message: Mapping[str, Any], note: AnswerRecord) -> dict[str, Any]:
    """The client's message in the model's words. Thinking is not given back to a client that left it out."""
    raw = {**message, "content": note.content, "contents": note.content}
    reasoning = message.get("reasoning_content")
    if isinstance(reasoning, str) and _plain_text(reasoning) == _plain_text(note.reasoning):
        raw |= dict.fromkeys(REASONING, note.reasoning)
    if note.calls:
        raw["tool_calls"] = [{**call, "function": {"name": name, "arguments": json.loads(arguments)}}
                             for call, (name, arguments) in zip(message["tool_calls"], note.calls, strict=True)]
    return raw


def _around(conversation: Conversation, index: int) -> list[str]:
    """What the template renders before and after the content of this answer."""
    mark = "x" + secrets.token_hex(16)
    answer = {"role": "assistant", "content": mark, "contents": mark}
    messages = conversation.messages
    return conversation.render([*messages[:index], answer, *messages[index + 1:]]).split(mark)


def _begins_with(tokenizer: Tokenizer, ids: Sequence[int], text: str) -> bool:
    """Whether the ids spell a text that begins with this one; does not look further."""
    wanted, spelled = unmarked(text).encode(), bytearray()
    for id in ids:
        if len(spelled) >= len(wanted):
            break
        spelled += tokenizer.token_bytes(id)
    return spelled.startswith(wanted)


def _asked(conversation: Conversation) -> str:
    """What a template shows in full, whatever it does with the rest."""
    contents = (message["content"] for message in conversation.messages if message["role"] != "assistant")
    return "\n".join(content for content in contents if isinstance(content, str))


def _answers(conversation: Conversation) -> list[int]:
    return [index for index, message in enumerate(conversation.messages) if message["role"] == "assistant"]


def _sent_thoughts(conversation: Conversation, start: int = 0) -> tuple[str, ...]:
    places = (index for index in _answers(conversation) if index >= start)
    return tuple(_sent_thought(conversation.messages[index]) or "" for index in places)


def _sent_thought(message: Mapping[str, Any]) -> str | None:
    """The thinking that the client sends back with an answer; None if it leaves that open."""
    reasoning = message.get("reasoning_content")
    return thought_of(_plain_text(reasoning)) or None if isinstance(reasoning, str) else None


# What the client can see


def _next_state(state: str, seen: Any) -> str:
    return blake2b(f"{state}\n{json.dumps(seen, sort_keys=True)}".encode(), digest_size=16).hexdigest()


def _seen(message: Mapping[str, Any], schemas: Schemas) -> Any:
    if message["role"] != "assistant":
        return message
    calls = [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls", ())]
    return _visible(message["content"], calls, schemas)


def _visible(content: Any, calls: Sequence[tuple[str, Mapping[str, Any]]], schemas: Schemas) -> Any:
    """An answer by its content and calls alone, equal for all ways in which clients give them back."""
    return [_plain_text(content) if isinstance(content, str) else content,
            [[name, _chosen(arguments, schemas.get(name, {}))] for name, arguments in calls]]


def _chosen(arguments: Mapping[str, Any], schema: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments as the schema types them, without those that are its defaults: clients add these to a call."""
    found: dict[str, Any] = _number_as_float(typed(arguments, schema))
    return {key: value for key, value in found.items() if not _is_default(value, argument_schema(key, schema))}


def _is_default(value: Any, schema: Any) -> bool:
    """As JSON, in which true is not 1."""
    return (isinstance(schema, Mapping) and "default" in schema
            and json.dumps(value, sort_keys=True) == json.dumps(_number_as_float(schema["default"]), sort_keys=True))


def _plain_text(text: str) -> str:
    lines = unicodedata.normalize("NFC", text).replace("\r\n", "\n").split("\n")
    return "\n".join(line.rstrip() for line in lines).strip()


def _number_as_float(value: Any) -> Any:
    """The value with numbers as clients compare them: 1.0 is 1, and integers have 53 bits."""
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
