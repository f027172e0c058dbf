"""Turns messages or text into an `EngineRequest`, with the texts of its answers."""

from __future__ import annotations

import logging
import re
import uuid
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from pathlib import Path
from threading import Event
from typing import Any, Literal

from deltic.chat.conversation import Conversation, encode_prompt, encode_unfinished, load_template, system_prefix_len
from deltic.chat.history import MODES, AnswerEnd, History, HistoryTurn, PortableAnswer
from deltic.chat.history_store import AnswerStore
from deltic.chat.markers import THINK, closes_thinking
from deltic.chat.message_cache import MessageCache
from deltic.chat.messages import without_billing_headers
from deltic.chat.output_router import (
    Answer,
    AnswerText,
    AnswerTexts,
    OutputRouter,
    TokenRouter,
    chat_router,
    text_router,
)
from deltic.chat.response_format import OutputFormat
from deltic.chat.structured import GrammarConstraint, Grammars, PendingGrammar
from deltic.chat.template import ChatTemplate
from deltic.chat.thinking import ThinkEnd, ThinkingBudget
from deltic.chat.tokenizer import UNBOUNDED, Tokenizer, TokenLimit
from deltic.chat.tool_grammar import FREE, AnswerForm, CallAnswers, call_parts
from deltic.chat.tools import PARSERS, CallForm, call_form
from deltic.config import Limits
from deltic.config.vision import Vision
from deltic.errors import ConfigError, RequestError, TemplateError, context_bound, show, valid_text
from deltic.params import (
    MOST_TOKENS,
    Constraint,
    EngineRequest,
    Finish,
    ForcedTokens,
    Lineage,
    Prompt,
    SamplingParams,
)
from deltic.vision.fetch import Fetcher
from deltic.vision.images import Pixels, Video
from deltic.vision.prompt import Reading, Shown, UnreadImages, with_pictures

log = logging.getLogger("deltic")

_THINKING_VARIABLES = frozenset(("enable_thinking", "reasoning_effort"))
"""Template variables that turn reasoning on or off."""
_PRESERVES = "preserve_thinking"
"""Template variable that keeps the reasoning of earlier turns."""
_MAX_TEMPLATE_BYTES = 1 << 20  # bytes; the longest published templates have a few tens of KiB

MEDIA = "<__media__>"
"""Placeholder for an image in raw prompts."""
_AROUND = ("<|vision_start|>", "<|vision_end|>")
"""Tokens around an image."""

Remember = Callable[[Sequence[int], Finish, Answer, bool], AnswerEnd | None]
"""Records a finished choice: its tokens with the end token, the finish reason, the answer, and True if the text ended
with the tokens, outside of think blocks and calls and not at a stop string. Returns its end if it can be forked."""


Opens = Literal["turn", "message", "nothing"]
"""The way in which a prompt ends: with the start of the assistant's turn, inside the last message, which the answer
continues, or after that message."""


@dataclass(frozen=True, slots=True)
class PreparedRequest:
    """A request and the texts of its choices.

    remember: records a finished choice for following prompts.
    grammar: must be compiled before the request is submitted to the engine.
    """

    request: EngineRequest
    texts: AnswerTexts
    remember: Remember | None = None
    grammar: PendingGrammar | None = None

    def compiled(self) -> PreparedRequest:
        """Compiles the grammar, if there is one. Raises RequestError if that fails."""
        if self.grammar:
            self.grammar.compile()
        return self

    @property
    def ignored(self) -> tuple[str, ...]:
        """Keywords of the request's schemas that the compiled grammar does not enforce."""
        grammar = self.grammar and self.grammar.grammar
        return tuple(f"{grammar.field}.{name}" for name in grammar.ignored) if grammar else ()


@dataclass(frozen=True, slots=True)
class SavedPrefix:
    """The ids that following prompts begin with. stable_prefixes: where they may diverge. answer: last recorded."""

    ids: tuple[int, ...]
    stable_prefixes: tuple[int, ...]
    answer: PortableAnswer | None = None


@dataclass(frozen=True, slots=True)
class ChatConfig:
    """Options of chat prompts. Raises ConfigError that names a wrong one.

    history: the way in which prompts use earlier answers, see `deltic.chat.history`.
    strip_billing_header: removes the billing header that coding agents put before the system message.
    thinking_budget: default of `ChatProcessor.chat`.
    thinking: reasoning of requests that do not choose; None: the template decides.
    tool_call_parser: the form of calls, one of `deltic.chat.tools.PARSERS`.
    parse_special: control tokens in messages and tools are control tokens, not ordinary text.
    """

    history: str = "preserve"
    strip_billing_header: bool = False
    thinking_budget: int | None = None
    thinking: bool | None = None
    tool_call_parser: str = "auto"
    parse_special: bool = False

    def __post_init__(self) -> None:
        _check(self.history, self.thinking_budget, ConfigError)
        for name in ("strip_billing_header", "parse_special"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name} must be True or False, not {show(getattr(self, name))}", name)
        if not isinstance(self.thinking, bool | None):
            raise ConfigError(f"thinking must be True, False or None, not {show(self.thinking)}", "thinking")
        if not isinstance(self.tool_call_parser, str) or self.tool_call_parser not in PARSERS:
            raise ConfigError(f"tool_call_parser must be one of {', '.join(PARSERS)}, not "
                              f"{show(self.tool_call_parser)}", "tool_call_parser")


class ChatProcessor:
    """Tokenizer, chat template and answer records of one model.

    template: jinja source in place of the model's own. notes: stores answer records outside the process. longest:
    context length in tokens, if known. vision: the image input of the model, if any. image_urls: fetches images from
    http(s) URLs. options: options of ChatConfig.
    """

    def __init__(self, tokenizer: Tokenizer, template: str | None = None, *, notes: AnswerStore | None = None,
                 longest: int | None = None, limits: Limits | None = None, vision: Vision | None = None,
                 image_urls: bool = False, **options: Any) -> None:
        self._config = ChatConfig(**options)
        self.tokenizer = tokenizer
        limits = limits or Limits()
        self._seconds = limits.template_seconds
        self._override = None
        if template is not None:
            self._override = ChatTemplate(template, tokenizer.special_tokens, self._seconds)
        self._bound = prompt_bound(longest, limits)
        self._vision = vision
        self._limits = limits
        self._fetches = image_urls
        self._history = History(tokenizer, notes, replace(self._bound, field="messages"))
        self._messages = MessageCache()
        self._owner = ""
        self._warned = Event()
        self.grammars = Grammars(tokenizer, limits.schema_seconds)

    @classmethod
    def from_directory(cls, directory: Path, template: Path | None = None, **options: Any) -> ChatProcessor:
        """Reads the tokenizer of a model directory. template: a file with a chat template."""
        return cls(Tokenizer.from_directory(directory), read_template(template) if template else None, **options)

    def of(self, owner: str) -> ChatProcessor:
        """Returns a view that uses and writes only the answer records of this owner."""
        own = copy(self)
        own._owner = owner
        return own

    def chat(self, messages: Any, sampling: SamplingParams = SamplingParams(), *, tools: Any = None,
             answer: AnswerForm = FREE, variables: Mapping[str, Any] | None = None,
             history: str | AnswerEnd | None = None, thinking_budget: int | None = None,
             pictures: Shown | RequestError | None = None) -> PreparedRequest:
        """Prepares the next turn of a conversation. Raises RequestError that names a wrong field.

        answer: the tools that it may or must call, the format of its content, and the tokens that it begins with.
        variables: template variables, such as enable_thinking; also add_generation_prompt and continue_final_message as
            in transformers. Only answers that begin a turn are recorded.
        history: overrides the processor's mode. Or the end of a recorded answer, in place of the conversation so far:
            the messages follow that answer, and its exact tokens are continued.
        thinking_budget: overrides the processor's. After this many tokens in think blocks the open block is closed as
            the template closes one.
        pictures: decoded media by field, or the error to raise. If given, nothing is fetched, and UnreadImages is
            raised if one is missing.
        """
        fork, history = (history, None) if isinstance(history, AnswerEnd) else (None, history)
        mode = self._mode(history, variables or {})
        budget = self._config.thinking_budget if thinking_budget is None else thinking_budget
        _check(mode, budget, RequestError)
        template = self._template(tools)
        variables, opens = _opens(self._with_thinking(variables))
        begun, sampling = self._beginning(answer.begun, sampling, opens)
        reading = None
        if self._vision:
            reading = Reading(self._vision, self.tokenizer.encode, self._limits, self._bound.tokens, self._fetches)
        conversation = Conversation.read(template, self.tokenizer, self._without_billing(messages), tools, variables,
                                         see=reading.see if reading else None,
                                         parse_special=self._config.parse_special,
                                         cache=self._messages.of(self._owner))
        seen = self._seen(reading, pictures) if reading and reading.parts else []
        turn = self._branch(conversation, fork, opens) if fork else self._turn(conversation, mode, opens)
        if begun:
            replace(self._bound, field="prefix_token_ids").after(len(turn.ids)).check(len(begun))
        form = call_form(self._config.tool_call_parser, template.source)
        grammar = self._grammar(conversation, answer, form)
        if grammar and begun:
            raise RequestError("prefix_token_ids cannot be combined with a format of the answer, a tool_choice that "
                               "needs a call, or strict tools: leave them out", "prefix_token_ids")
        router = chat_router(self.tokenizer, turn.ids, tools, sampling.stop, form, not answer.calls.parallel,
                             exact=grammar is not None)
        closing = ThinkEnd.of(conversation) if grammar or budget is not None else None
        forced = None
        if closing and budget is not None:
            forced = partial(ThinkingBudget, tokenizer=self.tokenizer, closing=closing, tokens=budget)
        remember = partial(self._history.remember, turn, sampling.stop_token_ids, begun) if opens == "turn" else None
        prepared = _prepare((*turn.ids, *begun), sampling, router, turn.stable_prefixes, remember, forced, begun)
        if fork:
            prepared = replace(prepared, request=replace(prepared.request, lineage=Lineage(forks=True)))
        if seen and self._vision:
            prompt, places = with_pictures(prepared.request.ids, seen, self._vision.tower, turn.stable_prefixes)
            self._bound.check(len(prompt))
            prepared = replace(prepared, request=replace(prepared.request, prompt=prompt, stable_prefixes=places))
        if grammar is None or closing is None:
            return prepared
        thinks = THINK in template.source and not closes_thinking(turn.ids, self.tokenizer)
        return _constrained(prepared, grammar, closing.rest_ids, thinks)

    def _beginning(self, begun: tuple[int, ...], sampling: SamplingParams, opens: Opens
                   ) -> tuple[tuple[int, ...], SamplingParams]:
        """Returns the first tokens of an answer, and sampling without further tokens if these end with an end token."""
        if begun and opens != "turn":
            raise RequestError("prefix_token_ids begin a new answer: leave out continue_final_message and "
                               "add_generation_prompt", "prefix_token_ids")
        if begun and begun[-1] in self.tokenizer.ends:
            begun, sampling = begun[:-1], replace(sampling, max_tokens=0)
        for place, token in enumerate(begun):
            if token in self.tokenizer.special:
                name = show(self.tokenizer.decode([token], skip_special=False))
                raise RequestError(f"prefix_token_ids[{place}] is the control token {name}, which no answer has: end "
                                   "them before it", "prefix_token_ids")
        return begun, sampling

    def _mode(self, history: str | None, variables: Mapping[str, Any]) -> str:
        """Returns the history mode. `preserve_thinking: false` in a request selects the mode `template`."""
        if history is None and variables.get(_PRESERVES) is False:
            return "template"
        return self._config.history if history is None else history

    def _seen(self, reading: Reading, pictures: Shown | RequestError | None) -> list[Pixels | Video]:
        if isinstance(pictures, RequestError):
            raise pictures
        if pictures is None:
            pictures = reading.read(Fetcher() if self._fetches else None)
        if any(part.field not in pictures for part in reading.parts):
            raise UnreadImages(reading)
        return reading.show(pictures)

    def within(self, bound: TokenLimit) -> ChatProcessor:
        """Returns a view with another prompt limit, such as the limit for prompts that are only counted."""
        found = copy(self)
        found._bound, found._history = bound, self._history.within(replace(bound, field="messages"))
        return found

    @property
    def sees(self) -> bool:
        """True if messages may contain images and videos."""
        return self._vision is not None

    @property
    def fetches(self) -> bool:
        return self._fetches

    @property
    def source(self) -> str:
        """The source of the chat template, or "" if there is none."""
        try:
            return self._template(None).source
        except TemplateError:
            return ""

    def knows(self, variable: str, tools: Any = None) -> bool:
        """Returns True if the chat template contains a variable."""
        return variable in self._template(tools).source

    def reads(self, field: str, tools: Any = None) -> bool:
        """Returns True if the chat template reads a field of this name."""
        named = rf"(?:\.|\[\s*['\"]|get\(\s*['\"]){re.escape(field)}\b"
        return re.search(named, self._template(tools).source) is not None

    def system_prefix(self, messages: Any, *, tools: Any = None,
                variables: Mapping[str, Any] | None = None) -> tuple[int, ...]:
        """Returns the ids that all conversations with these system messages and tools share."""
        template = self._template(tools)
        question = {"role": "user", "content": "Question"}
        conversation = Conversation.read(template, self.tokenizer, [*self._without_billing(messages), question], tools,
                                         self._with_thinking(variables), parse_special=self._config.parse_special)
        prompt = encode_prompt(self.tokenizer, conversation.render(conversation.messages))
        return prompt.ids[:system_prefix_len(conversation, prompt)]

    def prompt(self, text: str, images: Sequence[Any] = ()) -> Prompt:
        """Returns a raw prompt with images in place of markers: MEDIA, or the model's own token.

        images: as the `image` of messages. Raises RequestError if their number differs from the number of markers.
        """
        if not isinstance(images, list | tuple):
            raise RequestError(f"images must be a list, one for each marker, not {show(images)}", "images")
        text = valid_text(text, "prompt")
        ids = self.tokenizer.encode(self._marked(text), add_special=True, bound=self._bound)
        if self._vision is None:
            if images or MEDIA in text:
                raise RequestError("this model reads text only: leave out `images`", "images")
            return Prompt(tuple(ids))
        reading = Reading(self._vision, self.tokenizer.encode, self._limits, self._bound.tokens)
        for place, image in enumerate(images):
            reading.see({"image": image}, "image", f"images[{place}]")
        seen = self._seen(reading, None) if reading.parts else []
        tower = self._vision.tower
        markers = sum(token in (tower.image_token_id, tower.video_token_id) for token in ids)
        if markers != len(seen):
            raise RequestError(f"the prompt has {markers} markers ({MEDIA}) for {len(seen)} images: write one "
                               "where each image belongs", "images")
        found, _ = with_pictures(ids, seen, tower)
        self._bound.check(len(found))
        return found if seen else Prompt(tuple(ids))

    def _marked(self, text: str) -> str:
        if self._vision is None:
            return text
        token = self.tokenizer.decode([self._vision.tower.image_token_id], skip_special=False)
        around = [mark if self.tokenizer.token_to_id(mark) is not None else "" for mark in _AROUND]
        return text.replace(MEDIA, f"{around[0]}{token}{around[1]}")

    def complete(self, prompt: str | Sequence[int] | Prompt, sampling: SamplingParams = SamplingParams(),
                 output_format: OutputFormat | None = None, add_special: bool = True) -> PreparedRequest:
        """Prepares the continuation of a text (special tokens in it are recognised), of token ids, or of a Prompt.

        add_special: adds the tokens that the tokenizer puts around a text, such as bos.
        """
        if not isinstance(prompt, str):
            self._bound.check(len(prompt))
            ids = tuple(prompt.ids if isinstance(prompt, Prompt) else prompt)
        else:
            ids = tuple(self.tokenizer.encode(prompt, add_special=add_special, bound=self._bound))
        prepared = _prepare(ids, sampling, text_router(self.tokenizer, sampling.stop))
        if isinstance(prompt, Prompt):
            prepared = replace(prepared, request=replace(prepared.request, prompt=prompt))
        if output_format is None:
            return prepared
        return _constrained(prepared, self.grammars.of(output_format))

    def _grammar(self, conversation: Conversation, answer: AnswerForm, form: CallForm) -> PendingGrammar | None:
        choice, wanted = answer.calls, answer.output
        functions = choice.functions(conversation.tools or ())
        restricted = choice.needed or choice.names or any(function.get("strict") for function in functions.values())
        if not functions or not (restricted or wanted):
            return self.grammars.of(wanted) if wanted else None
        calls = CallAnswers(form, functions, choice.needed, choice.parallel, wanted)
        return self.grammars.grammar(lambda known, schemas: call_parts(calls, known.tags, schemas), "tools")

    def saved_prefix(self, messages: Any, *, tools: Any = None, variables: Mapping[str, Any] | None = None,
                     history: str | None = None, pictures: Shown | RequestError | None = None) -> SavedPrefix:
        """Returns the beginning of a conversation's following prompts. If there are no messages but system messages and
        tools, returns the beginning that all such conversations share. Arguments as in `chat`."""
        roles = [message.get("role") if isinstance(message, Mapping) else None for message in messages]
        if {*roles} <= {"system", "developer"}:
            ids = self.system_prefix(messages, tools=tools, variables=variables)
            if not ids:
                raise RequestError("there is nothing to save: conversations share no beginning without a system "
                                   "message or tools", "messages")
            return SavedPrefix(ids, (len(ids),))
        opened = {**(variables or {}), "add_generation_prompt": roles[-1] != "assistant"}
        request = self.chat(messages, tools=tools, variables=opened, history=history, pictures=pictures).request
        if isinstance(request.prompt, Prompt) and request.prompt.pictures:
            raise RequestError("a prompt with pictures cannot be saved: save what comes before them", "messages")
        conversation = Conversation.read(self._template(tools), self.tokenizer, self._without_billing(messages), tools,
                                         _opens(self._with_thinking(variables))[0],
                                         parse_special=self._config.parse_special)
        answer = self._history.last_answer(conversation, self._owner)
        if answer and answer.index == len(roles) - 1 and self._mode(history, variables or {}) == "preserve":
            return SavedPrefix(answer.ids, (), answer)
        return SavedPrefix(request.ids, request.stable_prefixes,
                           answer if answer and request.ids[:len(answer.ids)] == answer.ids else None)

    def keep_answer(self, key: str, ids: Sequence[int], data: bytes) -> None:
        """Adds a recorded answer, see `History.keep_answer`."""
        self._history.keep_answer(key, ids, data)

    def flush(self) -> None:
        self._history.flush()

    def _template(self, tools: Any) -> ChatTemplate:
        return self._override or load_template(self.tokenizer, tools, self._seconds)

    def _with_thinking(self, variables: Mapping[str, Any] | None) -> Mapping[str, Any]:
        """Adds the default of enable_thinking to variables that do not set it."""
        given = variables or {}
        thinking = self._config.thinking
        if thinking is None or _THINKING_VARIABLES & given.keys():
            return given
        return {"enable_thinking": thinking, **given}

    def _turn(self, conversation: Conversation, mode: str, opens: Opens) -> HistoryTurn:
        if opens == "turn":
            return self._history.turn(conversation, mode, self._owner)
        prompt = encode_unfinished(conversation, opens == "message", replace(self._bound, field="messages"))
        start = system_prefix_len(conversation, prompt)
        return HistoryTurn(prompt.ids, (start,) if start else ())

    def _branch(self, conversation: Conversation, end: AnswerEnd, opens: Opens) -> HistoryTurn:
        if opens != "turn":
            raise RequestError("fork_from begins a new answer: leave out continue_final_message and "
                               "add_generation_prompt", "fork_from")
        turn = self._history.branch(conversation, end, self._owner)
        tower = self._vision and self._vision.tower
        if tower and not {tower.image_token_id, tower.video_token_id}.isdisjoint(turn.ids[:turn.kept]):
            raise RequestError("the conversation in fork_from has pictures: leave out fork_from and send it whole",
                               "fork_from")
        return turn

    def _without_billing(self, messages: Any) -> Any:
        cleaned = without_billing_headers(messages)
        if cleaned is messages or self._config.strip_billing_header:
            return cleaned
        if not self._warned.is_set():
            self._warned.set()
            log.warning("the system message begins with a billing header, which changes from request to request and "
                        "keeps prompts from being reused: `strip_billing_header` removes it")
        return messages


def _opens(variables: Mapping[str, Any]) -> tuple[dict[str, Any], Opens]:
    """Separates the variables that choose how the prompt ends."""
    rest = dict(variables)
    begins, continues = (rest.pop(name, None) for name in ("add_generation_prompt", "continue_final_message"))
    for name, value in (("add_generation_prompt", begins), ("continue_final_message", continues)):
        if value not in (None, True, False):
            raise RequestError(f"{name} must be true or false, not {show(value)}", name)
    if begins and continues:
        raise RequestError("continue_final_message excludes add_generation_prompt", "continue_final_message")
    return rest, "message" if continues else "nothing" if begins is False else "turn"


def bare_job(
    ids: Sequence[int], sampling: SamplingParams = SamplingParams(), bound: TokenLimit = UNBOUNDED
) -> PreparedRequest:
    """Prepares token ids for a model without a tokenizer."""
    bound.check(len(ids))
    if sampling.stop:
        raise RequestError("stop strings need a tokenizer: use stop_token_ids", "stop")
    return _prepare(tuple(ids), sampling, TokenRouter())


def _prepare(
    ids: tuple[int, ...],
    sampling: SamplingParams,
    router: OutputRouter,
    stable_prefixes: tuple[int, ...] = (),
    remember: Remember | None = None,
    forced: Callable[[AnswerText], ForcedTokens] | None = None,
    begun: Sequence[int] = (),
) -> PreparedRequest:
    texts = AnswerTexts(router, sampling.stop_token_ids, begun)
    matcher = texts.followers() if router.can_stop or forced else None
    guide = partial(next, map(forced, map(texts.of, count()))) if forced else None
    return PreparedRequest(
        EngineRequest(uuid.uuid4().hex, ids, sampling, stable_prefixes, matcher, guide=guide), texts, remember
    )


def _constrained(
    prepared: PreparedRequest, grammar: PendingGrammar, gap: Sequence[int] = (), opens: bool = False
) -> PreparedRequest:
    """Adds a grammar constraint for each choice."""
    def constraint(text: AnswerText) -> Constraint:
        return GrammarConstraint(grammar.grammar, text, gap, opens)

    constraints = map(constraint, map(prepared.texts.of, count()))
    matcher = prepared.request.matcher or prepared.texts.followers()
    request = replace(prepared.request, matcher=matcher, constraint=partial(next, constraints))
    return replace(prepared, request=request, grammar=grammar)


def prompt_bound(longest: int | None, limits: Limits) -> TokenLimit:
    """Returns the limit of prompts for a context of this length."""
    limit = limits.max_prompt_tokens
    if limit is not None and (longest is None or limit < longest):
        return TokenLimit(limit, f"and may have at most {limit} (max_prompt_tokens): shorten it")
    if longest is None:
        return UNBOUNDED
    return TokenLimit(longest - 1, context_bound(longest))


def counting_bound(longest: int, limits: Limits) -> TokenLimit:
    """Returns the limit of prompts that are only counted, or cut before prefill."""
    return TokenLimit(
        max(longest, limits.max_counted_tokens), "and no more are counted (max_counted_tokens): send less"
    )


def _check(mode: object, budget: object, error: type[ConfigError] | type[RequestError]) -> None:
    if mode not in MODES:
        raise error(f"history must be one of {', '.join(MODES)}, not {show(mode)}", "history")
    if budget is not None and not (type(budget) is int and 0 <= budget <= MOST_TOKENS):
        raise error(f"thinking_budget must be a number of tokens from 0 to {MOST_TOKENS:,}, not {show(budget)}",
                    "thinking_budget")


def read_template(path: Path) -> str:
    """Reads a chat template file. Raises TemplateError if it cannot be read."""
    try:
        with path.open("rb") as file:
            text = file.read(_MAX_TEMPLATE_BYTES + 1)
        if len(text) > _MAX_TEMPLATE_BYTES:
            raise TemplateError(f"the chat template {path} is longer than {_MAX_TEMPLATE_BYTES >> 20} MiB: "
                                "give a file with a template")
        return text.decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise TemplateError(f"the chat template {path} cannot be read: {error}") from error
