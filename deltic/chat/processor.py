"""The text side of a model: from messages or text to a `EngineRequest`, and a router for what comes back."""

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

from deltic.chat.billing import without_billing_headers
from deltic.chat.conversation import Conversation, load_template, opening, spell, unfinished
from deltic.chat.deltas import Answer
from deltic.chat.history import MODES, History, HistoryTurn
from deltic.chat.history_store import AnswerStore
from deltic.chat.markers import THINK, closes_thinking
from deltic.chat.output_router import AnswerText, AnswerTexts, OutputRouter, TokenRouter, chat_router, text_router
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
from deltic.params import MOST_TOKENS, Constraint, EngineRequest, Finish, ForcedTokens, Prompt, SamplingParams
from deltic.vision.fetch import Fetcher
from deltic.vision.preprocess import Pixels, Video
from deltic.vision.prompt import Reading, Shown, UnreadImages, with_pictures

log = logging.getLogger("deltic")

_THINKING = frozenset(("enable_thinking", "reasoning_effort"))
"""Variables by which a request says whether the model is to think."""
_PRESERVES = "preserve_thinking"
"""Template variable for the thinking of earlier turns."""
_LONGEST_TEMPLATE = 1 << 20  # bytes: the longest published ones have a few tens of KiB

MEDIA = "<__media__>"
"""Stands for a picture in raw prompts."""
_AROUND = ("<|vision_start|>", "<|vision_end|>")
"""What stands around the tokens of a picture."""

Remember = Callable[[Sequence[int], Finish, Answer, bool], None]
"""Takes the tokens of a finished choice, the one that ended it too, why it ended, what it says, and whether its text
ended with it: in no think block or call, and not at a stop string."""


Opens = Literal["turn", "message", "nothing"]
"""How a prompt ends: with the beginning of the assistant's turn; in its last message, which the answer continues; or
with the end of that message."""


@dataclass(frozen=True, slots=True)
class PreparedRequest:
    """A request, and the texts of its choices.

    remember: to be called once for each choice that finishes, so that following prompts can build on it.
    grammar: that the answer keeps to. It has to be compiled before the engine gets the request.
    """

    request: EngineRequest
    texts: AnswerTexts
    remember: Remember | None = None
    grammar: PendingGrammar | None = None

    def compiled(self) -> PreparedRequest:
        """The job, ready for the engine. RequestError if its grammar cannot be compiled."""
        if self.grammar:
            self.grammar.compile()
        return self

    @property
    def ignored(self) -> tuple[str, ...]:
        """Parts of the request's schemas that the answer is not kept to, once its grammar is compiled."""
        grammar = self.grammar and self.grammar.grammar
        return tuple(f"{grammar.field}.{name}" for name in grammar.ignored) if grammar else ()


@dataclass(frozen=True, slots=True)
class ChatConfig:
    """How conversations are read and answered; ConfigError names what is wrong.

    history: how prompts treat earlier answers, see `deltic.chat.history`. strip_billing_header: remove the billing
    header that coding agents put before the system message. thinking_budget: for requests that say nothing else, see
    `ChatProcessor.chat`. thinking: whether the model is to think where a request says nothing about it; None: the
    template decides. tool_call_parser: how calls are written, one of `deltic.chat.tools.PARSERS`. parse_special:
    messages and tools may spell control tokens, which are ordinary text otherwise.
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
    """Tokenizer and chat template of one model, and what was said with it.

    template: jinja source to use instead of the model's own. notes: keeps what is remembered beyond the process.
    longest: tokens that the context holds, if known. limits: what one request may ask for. vision: what the model sees
    with; image_urls: pictures may be given by http(s) URLs, which are fetched. options: those of ChatConfig.
    """

    def __init__(self, tokenizer: Tokenizer, template: str | None = None, *, notes: AnswerStore | None = None,
                 longest: int | None = None, limits: Limits | None = None, vision: Vision | None = None,
                 image_urls: bool = False, **options: Any) -> None:
        self._config = ChatConfig(**options)
        self.tokenizer = tokenizer
        limits = limits or Limits()
        self._seconds = limits.template_seconds
        self._override = (ChatTemplate(template, tokenizer.special_tokens, self._seconds) if template is not None
                          else None)
        self._bound, self._vision, self._limits = prompt_bound(longest, limits), vision, limits
        self._fetches = image_urls
        self._history, self._owner = History(tokenizer, notes, replace(self._bound, field="messages")), ""
        self._warned = Event()
        self.grammars = Grammars(tokenizer, limits.schema_seconds)

    @classmethod
    def from_directory(cls, directory: Path, template: Path | None = None, **options: Any) -> ChatProcessor:
        """Read a model directory's tokenizer; `template` is a file with a chat template, options those of the class."""
        return cls(Tokenizer.from_directory(directory), read_template(template) if template else None, **options)

    def of(self, owner: str) -> ChatProcessor:
        """A view of this processor for one owner: its prompts use this owner's answer records only."""
        own = copy(self)
        own._owner = owner
        return own

    def chat(self, messages: Any, sampling: SamplingParams = SamplingParams(), *, tools: Any = None,
             answer: AnswerForm = FREE, variables: Mapping[str, Any] | None = None, history: str | None = None,
             thinking_budget: int | None = None,
             pictures: Shown | RequestError | None = None) -> PreparedRequest:
        """The next turn of a conversation.

        tools are shown to the model, whose calls become tool deltas. answer: which of them it may call, or must, and
        what its answer has to look like where it is no call; after the thinking.
        variables: template variables such as enable_thinking, and add_generation_prompt and continue_final_message as
        transformers has them: an answer that does not begin a turn is not remembered.
        history: another mode than this processor's.
        thinking_budget: tokens that the answer may spend in think blocks, another number than the processor's; then the
        open block is closed as the template closes one, and the model goes on freely. It means nothing where the model
        does not think.
        pictures: what parts show, by their fields, or why that cannot be had; then nothing is fetched or decoded here,
        and Unread raised where one is missing.
        RequestError names what is wrong.
        """
        mode = self._mode(history, variables or {})
        budget = self._config.thinking_budget if thinking_budget is None else thinking_budget
        _check(mode, budget, RequestError)
        template, (variables, opens) = self._template(tools), _opens(self._with_thinking(variables))
        reading = Reading(self._vision, self.tokenizer.encode, self._limits, self._bound.tokens,
                          self._fetches) if self._vision else None
        conversation = Conversation.read(template, self.tokenizer, self._without_billing(messages), tools, variables,
                                         see=reading.see if reading else None,
                                         parse_special=self._config.parse_special)
        seen = self._seen(reading, pictures) if reading and reading.parts else []
        turn = self._turn(conversation, mode, opens)
        form = call_form(self._config.tool_call_parser, template.source)
        grammar = self._grammar(conversation, answer, form)
        router = chat_router(self.tokenizer, turn.ids, tools, sampling.stop, form, not answer.calls.parallel,
                             exact=grammar is not None)
        closing = ThinkEnd.of(conversation)
        guide = None if budget is None else partial(
            ThinkingBudget, tokenizer=self.tokenizer, closing=closing, tokens=budget)
        remember = partial(self._history.remember, turn, sampling.stop_token_ids) if opens == "turn" else None
        job = _job(turn.ids, sampling, router, turn.stable_prefixes, remember, guide)
        if seen and self._vision:
            prompt, places = with_pictures(turn.ids, seen, self._vision.tower, turn.stable_prefixes)
            self._bound.check(len(prompt))
            job = replace(job, request=replace(job.request, prompt=prompt, stable_prefixes=places))
        if grammar is None:
            return job
        thinks = THINK in template.source and not closes_thinking(turn.ids, self.tokenizer)
        return _constrained(job, grammar, closing.rest_ids, thinks)

    def _mode(self, history: str | None, variables: Mapping[str, Any]) -> str:
        """The request's mode, or this processor's. `preserve_thinking: false` in a request selects template."""
        if history is None and variables.get(_PRESERVES) is False:
            return "template"
        return self._config.history if history is None else history

    def _seen(self, reading: Reading, pictures: Shown | RequestError | None) -> list[Pixels | Video]:
        """What a conversation shows, in order."""
        if isinstance(pictures, RequestError):
            raise pictures
        if pictures is None:
            pictures = reading.read(Fetcher() if self._fetches else None)
        if any(part.field not in pictures for part in reading.parts):
            raise UnreadImages(reading)
        return reading.show(pictures)

    def within(self, bound: TokenLimit) -> ChatProcessor:
        """The same for prompts of another length, such as those that are only counted."""
        found = copy(self)
        found._bound, found._history = bound, self._history.within(replace(bound, field="messages"))
        return found

    @property
    def sees(self) -> bool:
        """Whether messages may have pictures."""
        return self._vision is not None

    @property
    def fetches(self) -> bool:
        """Whether these may be behind http(s) URLs."""
        return self._fetches

    @property
    def source(self) -> str:
        """The chat template; empty where there is none."""
        try:
            return self._template(None).source
        except TemplateError:
            return ""

    def knows(self, variable: str, tools: Any = None) -> bool:
        """Whether the chat template says anything about a variable."""
        return variable in self._template(tools).source

    def reads(self, field: str, tools: Any = None) -> bool:
        """Whether the chat template looks for a field of this name in something."""
        named = rf"(?:\.|\[\s*['\"]|get\(\s*['\"]){re.escape(field)}\b"
        return re.search(named, self._template(tools).source) is not None

    def opening(self, messages: Any, *, tools: Any = None,
                variables: Mapping[str, Any] | None = None) -> tuple[int, ...]:
        """The ids that all conversations under these system messages and tools begin with; none if they share none."""
        template = self._template(tools)
        question = {"role": "user", "content": "Question"}
        conversation = Conversation.read(template, self.tokenizer, [*self._without_billing(messages), question], tools,
                                         self._with_thinking(variables), parse_special=self._config.parse_special)
        prompt = spell(self.tokenizer, conversation.render(conversation.messages))
        return prompt.ids[:opening(conversation, prompt)]

    def prompt(self, text: str, images: Sequence[Any] = ()) -> Prompt:
        """A raw prompt with pictures, each in the place of a marker: MEDIA, or the model's own token for one. images:
        what messages may have as `image`. RequestError if there are more or fewer than markers."""
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
        """The text with the tokens that the model knows in the place of markers."""
        if self._vision is None:
            return text
        token = self.tokenizer.decode([self._vision.tower.image_token_id], skip_special=False)
        around = [mark if self.tokenizer.token_to_id(mark) is not None else "" for mark in _AROUND]
        return text.replace(MEDIA, f"{around[0]}{token}{around[1]}")

    def complete(self, prompt: str | Sequence[int] | Prompt, sampling: SamplingParams = SamplingParams(),
                 output_format: OutputFormat | None = None, add_special: bool = True) -> PreparedRequest:
        """Continue a text (special tokens in it are recognised), or token ids or a Prompt as they stand.

        output_format: what the continuation has to look like. add_special: put around a text what its tokenizer wants
        there, such as a bos token.
        """
        if not isinstance(prompt, str):
            self._bound.check(len(prompt))
        ids = (self.tokenizer.encode(prompt, add_special=add_special, bound=self._bound) if isinstance(prompt, str)
               else prompt.ids if isinstance(prompt, Prompt) else prompt)
        job = _job(tuple(ids), sampling, text_router(self.tokenizer, sampling.stop))
        if isinstance(prompt, Prompt):
            job = replace(job, request=replace(job.request, prompt=prompt))
        if output_format is None:
            return job
        return _constrained(job, self.grammars.of(output_format))

    def _grammar(self, conversation: Conversation, answer: AnswerForm, form: CallForm) -> PendingGrammar | None:
        """What the answer has to keep to, if anything."""
        choice, wanted = answer.calls, answer.output
        functions = choice.functions(conversation.tools or ())
        restricted = choice.needed or choice.names or any(function.get("strict") for function in functions.values())
        if not functions or not (restricted or wanted):
            return self.grammars.of(wanted) if wanted else None
        calls = CallAnswers(form, functions, choice.needed, choice.parallel, wanted)
        return self.grammars.grammar(lambda known, schemas: call_parts(calls, known.tags, schemas), "tools")

    def flush(self) -> None:
        """Wait until what was said is written, where it is kept beyond the process."""
        self._history.flush()

    def _template(self, tools: Any) -> ChatTemplate:
        return self._override or load_template(self.tokenizer, tools, self._seconds)

    def _with_thinking(self, variables: Mapping[str, Any] | None) -> Mapping[str, Any]:
        """The variables, and whether to think if they do not say it and this processor's options do."""
        given, thinking = variables or {}, self._config.thinking
        return given if thinking is None or _THINKING & given.keys() else {"enable_thinking": thinking, **given}

    def _turn(self, conversation: Conversation, mode: str, opens: Opens) -> HistoryTurn:
        if opens == "turn":
            return self._history.turn(conversation, mode, self._owner)
        prompt = unfinished(conversation, opens == "message", replace(self._bound, field="messages"))
        start = opening(conversation, prompt)
        return HistoryTurn(prompt.ids, (start,) if start else ())

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
    """The variables without those that say what the answer begins, and that."""
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
    """A job for a model without tokenizer: token ids in, token ids out."""
    bound.check(len(ids))
    if sampling.stop:
        raise RequestError("stop strings need a tokenizer: use stop_token_ids", "stop")
    return _job(tuple(ids), sampling, TokenRouter())


def _job(
    ids: tuple[int, ...],
    sampling: SamplingParams,
    router: OutputRouter,
    boundaries: tuple[int, ...] = (),
    remember: Remember | None = None,
    guide: Callable[[AnswerText], ForcedTokens] | None = None,
) -> PreparedRequest:
    texts = AnswerTexts(router, sampling.stop_token_ids)
    matcher = texts.followers() if router.can_stop or guide else None
    guides = partial(next, map(guide, map(texts.of, count()))) if guide else None
    return PreparedRequest(
        EngineRequest(uuid.uuid4().hex, ids, sampling, boundaries, matcher, guide=guides), texts, remember
    )


def _constrained(
    job: PreparedRequest, grammar: PendingGrammar, gap: Sequence[int] = (), opens: bool = False
) -> PreparedRequest:
    """The job with answers that are kept within a grammar, each with its text."""
    def constraint(text: AnswerText) -> Constraint:
        return GrammarConstraint(grammar.grammar, text, gap, opens)

    constraints = map(constraint, map(job.texts.of, count()))
    matcher = job.request.matcher or job.texts.followers()
    request = replace(job.request, matcher=matcher, constraint=partial(next, constraints))
    return replace(job, request=request, grammar=grammar)


def prompt_bound(longest: int | None, limits: Limits) -> TokenLimit:
    """Of prompts for a context that holds so many tokens, if that is known."""
    limit = limits.max_prompt_tokens
    if limit is not None and (longest is None or limit < longest):
        return TokenLimit(limit, f"and may have at most {limit} (max_prompt_tokens): shorten it")
    if longest is None:
        return UNBOUNDED
    return TokenLimit(longest - 1, context_bound(longest))


def counting_bound(longest: int, limits: Limits) -> TokenLimit:
    """Of prompts that are only counted, or cut before they are read."""
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
    """The chat template in a file; TemplateError if it cannot be read."""
    try:
        with path.open("rb") as file:
            text = file.read(_LONGEST_TEMPLATE + 1)
        if len(text) > _LONGEST_TEMPLATE:
            raise TemplateError(f"the chat template {path} is longer than {_LONGEST_TEMPLATE >> 20} MiB: it is none")
        return text.decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise TemplateError(f"the chat template {path} cannot be read: {error}") from error
