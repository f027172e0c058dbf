"""How many tokens the next prompt has in common with the last one and its answer, whatever clients and templates do."""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support import examples
from test_chat_support import MARKERS, QWEN_LIKE, build_prompt
from tokenizers import normalizers

from deltic.chat.choices import AnswerAssembler
from deltic.chat.conversation import encode_prompt
from deltic.chat.history_store import unpack
from deltic.chat.output_router import Answer
from deltic.chat.processor import ChatProcessor, PreparedRequest
from deltic.chat.template import ChatTemplate
from deltic.chat.tokenizer import Tokenizer
from deltic.errors import ConfigError, RequestError
from deltic.params import SamplingParams, TokenEvent, Usage, common_length

TINY = Path(__file__).parents[1] / "deltic" / "models" / "tiny"
TOKENIZER = Tokenizer.from_directory(TINY)
TINY_TEMPLATE = TOKENIZER.chat_template or ""
EOS = TOKENIZER.eos_id or 0
TEMPLATES = pytest.mark.parametrize("template", [TINY_TEMPLATE, QWEN_LIKE], ids=["tiny", "qwen"])
MODES = pytest.mark.parametrize("mode", ["template", "preserve"])
THINKING = pytest.mark.parametrize("thinking", [True, False], ids=["thinks", "answers"])
SYSTEM = {"role": "system", "content": "You edit files."}
TOOLS = [{"type": "function", "function": {"name": "edit", "parameters": {"type": "object", "properties": {
    "path": {"type": "string"}, "line": {"type": "integer"}, "scale": {"type": "number"}, "dry": {"type": "boolean"},
    "marks": {"type": "object"}, "text": {"type": "string"}}}}}]
CALL = """<tool_call>
<function=edit>
<parameter=path>
src/naïve.py
</parameter>
<parameter=line>
{line}
</parameter>
<parameter=scale>
1.50
</parameter>
<parameter=dry>
True
</parameter>
<parameter=marks>
{{"b":[1, 2.0],"a":null}}
</parameter>
<parameter=text>
  print("<think>é")
</parameter>
</function>
</tool_call>"""
THOUGHT = "Let me see:  \n e\u0301…"
UNTYPED = [{"type": "function", "function": {"name": "edit"}}]


def cut_small(text: str, size: int = 1) -> list[int]:
    """Tokens as nobody's tokenizer would cut: those of so many characters each, markers whole."""
    pieces = re.split("(" + "|".join(map(re.escape, MARKERS)) + ")", text)
    parts = [part for piece in pieces for part in ([piece] if piece in MARKERS else
                                                   re.findall(f".{{1,{size}}}", piece, re.DOTALL))]
    return [id for part in parts for id in TOKENIZER.encode(part)]


def shared(left: PreparedRequest, right: PreparedRequest, answer: Sequence[int] = ()) -> int:
    return common_length((*left.request.prompt, *answer), right.request.prompt)


@dataclass
class Store:
    """Notes in a dictionary."""

    notes: dict[str, bytes] = field(default_factory=dict)

    ready = True

    def get(self, key: str) -> bytes | None:
        return self.notes.get(key)

    def put(self, key: str, data: bytes) -> None:
        assert re.fullmatch("[0-9a-f]+", key)
        self.notes[key] = data

    def claim(self, key: str) -> bool:
        return key not in self.notes and not self.notes.update({key: b""})


@dataclass
class Talk:
    """A client and what it was told. returns: it sends reasoning back. size: of the model's tokens in characters."""

    chat_processor: ChatProcessor
    mode: str | None = None
    thinking: bool = False
    returns: bool = True
    tools: Any = None
    messages: list[dict[str, Any]] = field(default_factory=list)
    answer_ids: list[int] = field(default_factory=list)
    size: int = 1

    def ask(self, sampling: SamplingParams = SamplingParams(), **variables: Any) -> PreparedRequest:
        return self.chat_processor.chat(self.messages, sampling, tools=self.tools, history=self.mode,
                               variables={"enable_thinking": self.thinking} | variables)

    def say(self, text: str) -> PreparedRequest:
        self.messages.append({"role": "user", "content": text})
        return self.ask()

    def hear(self, job: PreparedRequest, text: str, finish: Any = "stop", thought: str = THOUGHT) -> Answer:
        """The model answers; the client keeps that in its own form."""
        self.answer_ids = cut_small((f"{thought}\n</think>\n\n" if self.thinking else "") + text, self.size)
        answer = finished(job, self.answer_ids, finish)
        self.messages.append(self.returned(answer))
        return answer

    def returned(self, answer: Answer) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": answer.content.strip() + "\n" or None}
        if self.returns and answer.reasoning:
            message["reasoning_content"] = unicodedata.normalize("NFC", answer.reasoning.replace("  \n", "\n")) + "\n"
        if answer.calls:
            message["tool_calls"] = [{"id": call.id, "type": "function", "function": {
                "name": call.name, "arguments": reserialised(call.arguments)}} for call in answer.calls]
        return message

    def restart(self, store: Store, template: str = TINY_TEMPLATE) -> None:
        """The front of a new process."""
        self.chat_processor.flush()
        self.chat_processor = ChatProcessor(TOKENIZER, template, notes=store)

    def result(self, text: str) -> PreparedRequest:
        self.messages.append({"role": "tool", "tool_call_id": "1", "content": text})
        return self.ask()


def finished(job: PreparedRequest, tokens: Sequence[int], finish: Any = "stop", end: int = EOS) -> Answer:
    """What a caller hears who reads the answer to its end."""
    tokens = [*tokens, end] if finish == "stop" else tokens
    last = {"finish": finish, "usage": Usage(0, 0, len(tokens))}
    events = [TokenEvent(job.request.id, 0, token) for token in tokens] or [TokenEvent(job.request.id, 0, None)]
    piece, = AnswerAssembler([job]).take([*events[:-1], replace(events[-1], **last)])
    assert piece.done and piece.remember
    piece.remember()
    return Answer(piece.done.reasoning, piece.done.text, piece.done.calls)


def reserialised(arguments: str) -> str:
    """As other languages write it: other order, other spaces, 1.0 for 1."""
    found = json.loads(arguments)
    assert not found or (found["dry"] is True and found["scale"] == 1.5)
    mangled = {key: float(value) if key == "line" else value for key, value in reversed(found.items())}
    return json.dumps(mangled, separators=(" ,", ":"), indent=1)


def talk(mode: str | None = None, thinking: bool = False, template: str = TINY_TEMPLATE, **more: Any) -> Talk:
    return Talk(ChatProcessor(TOKENIZER, template, notes=more.pop("notes", None)), mode, thinking, **more)


def agent(
    client: Talk, turns: int = 20, steps: int = 3
) -> Iterator[tuple[str, PreparedRequest, PreparedRequest, list[int]]]:
    """A conversation: what came after the last answer, the last prompt, the next prompt, the answer between."""
    client.messages, client.tools = [SYSTEM], TOOLS
    last = client.say("Fix it all")
    for turn in range(turns):
        for step in range(turn % (steps + 1)):
            client.hear(last, f"Step {step}: naïve\n\n" + CALL.format(line=step))
            answer, before, last = client.answer_ids, last, client.result(f"done {step}\n")
            yield "result", before, last, answer
        client.hear(last, f"Turn {turn} is **done**…  \r\nAnything else?")
        answer, before, last = client.answer_ids, last, client.say(f"Then fix {turn}")
        yield "user", before, last, answer


# The promise


@TEMPLATES
@THINKING
@pytest.mark.parametrize("returns", [True, False], ids=["returns", "drops"])
@pytest.mark.covering
def test_preserve_mode_prompts_extend_each_other(template: str, thinking: bool, returns: bool) -> None:
    count = 0
    for _, before, after, answer in agent(talk("preserve", thinking, template, returns=returns)):
        assert shared(before, after, answer) == len(before.request.prompt) + len(answer)
        assert before.request.stable_prefixes[-1] == len(before.request.prompt)
        assert after.request.stable_prefixes[0] == before.request.stable_prefixes[0]
        count += 1
    assert count == 50


@TEMPLATES
@THINKING
@pytest.mark.covering
def test_template_mode_prompts_extend_each_other_within_a_turn(template: str, thinking: bool) -> None:
    for kind, before, after, answer in agent(talk("template", thinking, template)):
        if kind == "result":
            assert shared(before, after, answer) == len(before.request.prompt) + len(answer)
            assert len(before.request.prompt) in before.request.stable_prefixes
        else:
            assert shared(before, after) in before.request.stable_prefixes[1:]


@TEMPLATES
def test_dropped_reasoning_is_rendered_by_template(template: str) -> None:
    client = talk("template", True, template, returns=False)
    for kind, before, after, _ in agent(client, turns=8):
        assert "Let me" not in TOKENIZER.decode(after.request.prompt)
        assert shared(before, after) >= before.request.stable_prefixes[1 if kind == "user" else 0]


@THINKING
def test_prompts_without_history_do_not_extend(thinking: bool) -> None:
    """What all this is for: the plain prompts part from what was computed."""
    client = talk("template", thinking)
    client.messages, client.tools = [SYSTEM], TOOLS
    first = client.say("Fix it")
    client.hear(first, "I try.\n\n" + CALL.format(line=7))
    after = client.result("done")
    plain = build_prompt(ChatTemplate(TINY_TEMPLATE), TOKENIZER, client.messages, TOOLS, {"enable_thinking": thinking})
    assert common_length(plain.ids, (*first.request.prompt, *client.answer_ids)) < len(first.request.prompt) + 2
    assert shared(first, after, client.answer_ids) == len(first.request.prompt) + len(client.answer_ids)


def test_preserve_thinking_false_selects_template_mode() -> None:
    for variables, kept in (({}, True), ({"preserve_thinking": True}, True), ({"preserve_thinking": False}, False)):
        client = talk(None, True, QWEN_LIKE, returns=False)
        client.messages = [{"role": "user", "content": "Hi"}]
        first = client.ask(**variables)
        client.hear(first, "Hello.")
        client.messages.append({"role": "user", "content": "And?"})
        after = client.ask(**variables)
        extended = shared(first, after, client.answer_ids) == len(first.request.prompt) + len(client.answer_ids)
        assert extended == kept


def test_modes_are_checked() -> None:
    with pytest.raises(ConfigError, match="one of template, preserve") as wrong:
        ChatProcessor(TOKENIZER, history="all")
    assert wrong.value.option == "history"
    with pytest.raises(RequestError, match="one of template, preserve") as refused:
        ChatProcessor(TOKENIZER).chat([{"role": "user", "content": "Hi"}], history="none")
    assert refused.value.field == "history"


# Other ways on


@MODES
@THINKING
def test_edits_and_regeneration(mode: str, thinking: bool) -> None:
    client = talk(mode, thinking)
    first = client.say("One")
    client.hear(first, "First")
    second = client.say("Two")
    client.hear(second, "Second")
    client.messages[-1:] = []
    again = client.ask()
    assert again.request.prompt == second.request.prompt
    client.messages[-1] = {"role": "user", "content": "Other"}
    edited = client.ask()
    assert shared(second, edited) >= (len(first.request.prompt) if mode == "preserve" else 0) + 5
    client.messages[1] = {"role": "assistant", "content": "Foist"}
    foreign = client.ask()
    plain = build_prompt(ChatTemplate(TINY_TEMPLATE), TOKENIZER, client.messages, None, {"enable_thinking": thinking})
    assert foreign.request.prompt == plain.ids


def test_every_choice_can_be_continued() -> None:
    client = talk("preserve", True)
    job = client.say("Choose")
    for text in ("red", "green", "blue"):
        twin = Talk(client.chat_processor, "preserve", True, messages=client.messages[:])
        twin.hear(job, text)
        after = twin.say("Why?")
        assert shared(job, after, twin.answer_ids) == len(job.request.prompt) + len(twin.answer_ids)


@MODES
@pytest.mark.parametrize("template", [TINY_TEMPLATE, QWEN_LIKE], ids=["tiny", "qwen"])
def test_a_restart_changes_nothing(mode: str, template: str) -> None:
    store, prompts = Store(), []
    for restarts in (False, True):
        client = talk(mode, True, template, notes=store)
        prompts.append([])
        for _, _, after, _ in agent(client, turns=6):
            prompts[-1].append(after.request.prompt)
            if restarts:
                client.restart(store, template)
    assert prompts[0] == prompts[1] and store.notes


@MODES
def test_damaged_records_are_ignored(mode: str) -> None:
    store = Store()
    client = talk(mode, True, notes=store)
    list(agent(client, turns=3))
    plain = build_prompt(ChatTemplate(TINY_TEMPLATE), TOKENIZER, client.messages, TOOLS, {"enable_thinking": True})
    client.chat_processor.flush()
    sound = dict(store.notes)
    for damage in (lambda data: b"", lambda data: data[:-3], lambda data: data[:40], lambda data: b"x" + data,
                   lambda data: data[:60] + b"\0" + data[61:], lambda data: next(iter(sound.values()))[:-4]):
        store.notes = {key: damage(data) for key, data in sound.items()}
        client.chat_processor = ChatProcessor(TOKENIZER, TINY_TEMPLATE, notes=store)
        assert client.ask().request.prompt == plain.ids


def test_records_depend_on_template_and_system_message() -> None:
    store = Store()
    client = talk("preserve", True, notes=store, messages=[SYSTEM])
    client.hear(client.say("Hi"), "Hello")
    after = client.say("And?")
    assert "Let me" in TOKENIZER.decode(after.request.prompt)
    client.restart(store, QWEN_LIKE)
    assert "Let me" not in TOKENIZER.decode(client.ask().request.prompt)
    client.restart(store)
    assert "Let me" in TOKENIZER.decode(client.ask().request.prompt)
    client.messages[0] = {"role": "system", "content": "You edit cats."}
    assert "Let me" not in TOKENIZER.decode(client.ask().request.prompt)


def test_changed_template_output_invalidates_record() -> None:
    template = "{{ '<|im_start|>system\n' ~ reasoning_effort ~ '<|im_end|>\n' }}" + TINY_TEMPLATE
    client = talk("preserve", True, template)
    client.messages = [{"role": "user", "content": "Hi"}]
    client.hear(client.ask(reasoning_effort="low"), "Hello")
    client.messages.append({"role": "user", "content": "And?"})
    assert "Let me" in TOKENIZER.decode(client.ask(reasoning_effort="low").request.prompt)
    changed = TOKENIZER.decode(client.ask(reasoning_effort="high").request.prompt, skip_special=False)
    assert "system\nhigh" in changed and "Let me" not in changed


def test_thinking_may_be_toggled_between_turns() -> None:
    client = talk("preserve", True)
    first = client.say("Hi")
    client.hear(first, "Hello")
    client.thinking = False
    after = client.say("And?")
    assert shared(first, after, client.answer_ids) == len(first.request.prompt) + len(client.answer_ids)
    assert TOKENIZER.decode(after.request.prompt, skip_special=False).endswith("<think>\n\n</think>\n\n")


def test_preserved_prompt_beyond_bound_is_rendered() -> None:
    client = talk("preserve", True, returns=False)
    first = client.say("Hi")
    client.hear(first, "Hello")
    whole = len(client.say("And?").request.prompt)
    room = next(room for room in range(2 * whole) if room - room // 4 == whole)  # a quarter is left to the answer
    for longest, kept in ((room + 1, True), (room, False)):
        processor = ChatProcessor(TOKENIZER, TINY_TEMPLATE, longest=longest)
        client = Talk(processor, "preserve", True, returns=False)
        client.hear(client.say("Hi"), "Hello")
        prompt = client.say("And?").request.prompt
        assert ("Let me" in TOKENIZER.decode(prompt)) == (len(prompt) == whole) == kept


def test_conversation_is_rendered_again_when_reasoning_fills_context() -> None:
    """Not in every turn: what the template has dropped leaves room for the next turns."""
    client = Talk(ChatProcessor(TOKENIZER, TINY_TEMPLATE, longest=1000), "preserve", True, returns=False, size=5)
    job, extended = client.say("Hi"), list[bool]()
    for number in range(20):
        client.hear(job, f"Answer {number}.", thought="I think about it. " * 15)
        before, job = job, client.say(f"And {number}?")
        assert len(job.request.prompt) < 1000
        extended.append(shared(before, job, client.answer_ids) == len(before.request.prompt) + len(client.answer_ids))
    assert 0 < extended.count(False) <= 5, extended


def test_a_greeting_before_the_first_question() -> None:
    client = talk("preserve", True, messages=[SYSTEM, {"role": "assistant", "content": "How can I help?"}])
    first = client.say("Hi")
    client.hear(first, "Hello")
    after = client.say("And?")
    assert shared(first, after, client.answer_ids) == len(first.request.prompt) + len(client.answer_ids)


# What is not remembered


def unremembered(text: str, finish: str, sampling: SamplingParams = SamplingParams(), tail: Sequence[int] = ()) -> bool:
    client = talk("preserve", True, tools=TOOLS, messages=[{"role": "user", "content": "Hi"}], notes=(store := Store()))
    job = client.ask(sampling)
    finished(job, [*cut_small(text), *tail], finish)
    client.chat_processor.flush()
    notes = [unpack(key, data, TOKENIZER.vocab_size) for key, data in store.notes.items()]
    assert all(note and note.digest for note in notes)
    return not any(note and note.ids for note in notes)


@pytest.mark.parametrize(("text", "finish", "forgotten"), [
    ("Hm\n</think>\n\nYes", "stop", False),
    ("Hm\n</think>\n\nYes", "length", False),
    ("Hm\n</think>", "length", False),
    ("Hm\n</think>\n\n" + CALL.format(line=1), "length", False),
    ("Hm\n</think>\n\n" + CALL.format(line=1)[:-12], "length", True),
    ("Hm", "length", True),
    ("Hm", "stop", True),
    ("Hm\n</think>\n\nYes", "abort", True),
    ("Hm\n</think>\n\nYes", "error", True),
])
def test_only_whole_answers_are_recorded(text: str, finish: str, forgotten: bool) -> None:
    assert unremembered(text, finish) == forgotten


def test_answer_cut_by_stop_string_is_not_recorded() -> None:
    assert unremembered("Hm\n</think>\n\nYes", "stop", SamplingParams(stop="es"))
    assert not unremembered("Hm\n</think>\n\nYes", "stop", SamplingParams(stop="No"))
    assert unremembered("", "length") and unremembered("\n</think>\n\na", "length", tail=[EOS, *TOKENIZER.encode("b")])


def test_answer_at_token_limit_is_closed_by_template() -> None:
    client = talk("preserve")
    first = client.say("Count")
    client.hear(first, "one, two, th", finish="length")
    after = client.say("Go on")
    rest = after.request.prompt[len(first.request.prompt) + len(client.answer_ids):]
    assert shared(first, after, client.answer_ids) == len(first.request.prompt) + len(client.answer_ids)
    assert TOKENIZER.decode(rest, skip_special=False).startswith("<|im_end|>\n<|im_start|>user\nGo on")


def test_stop_id_is_not_recorded() -> None:
    client, end = talk("preserve"), TOKENIZER.encode("!")[0]
    client.messages = [{"role": "user", "content": "Hi"}]
    first, tokens = client.ask(SamplingParams(stop_token_ids=(end,))), cut_small("Hello")
    finished(first, tokens, end=end)
    client.messages.append({"role": "assistant", "content": "Hello"})
    after = client.say("And?")
    assert shared(first, after, tokens) == len(first.request.prompt) + len(tokens)
    assert after.request.prompt[len(first.request.prompt) + len(tokens)] == EOS


# Notes


def test_later_answer_resolves_ambiguous_record() -> None:
    client = talk("preserve", True)
    first = client.say("Hi")
    client.hear(first, "Hello", thought="Once")
    second = client.say("And?")
    client.hear(second, "Fine")
    finished(first, cut_small("Other\n</think>\n\nHello"))
    after = client.say("So?")
    assert shared(second, after, client.answer_ids) == len(second.request.prompt) + len(client.answer_ids)
    client.messages = [client.messages[0], client.messages[1], {"role": "user", "content": "Why?"}]
    client.messages[1].pop("reasoning_content")
    text = TOKENIZER.decode(client.ask().request.prompt)
    assert "Once" not in text and "Other" not in text


@MODES
def test_defaults_added_by_client_do_not_change_key(mode: str) -> None:
    """Claude Code sends calls back with the defaults of its schemas, whatever the model said."""
    properties = {"path": {"type": "string"}, "dry": {"type": "boolean"}, "scale": {"type": "number"},
                  "all": {"type": "boolean", "default": False}, "times": {"default": 1}}
    tools = [{"type": "function", "function": {"name": "edit", "parameters": {
        "type": "object", "properties": properties}}}]
    cases: list[tuple[dict[str, Any], bool]] = [
        ({}, True), ({"all": False, "times": 1}, True), ({"all": True}, False), ({"times": True}, False)]
    for added, known in cases:
        client = talk(mode, tools=tools)
        first = client.say("Edit it")
        client.hear(first, "<tool_call>\n<function=edit>\n<parameter=dry>\ntrue\n</parameter>\n<parameter=scale>\n1.5\n"
                           "</parameter>\n</function>\n</tool_call>")
        function = client.messages[-1]["tool_calls"][0]["function"]
        function["arguments"] = json.dumps({**added, **json.loads(function["arguments"])})
        after = client.result("done")
        assert (shared(first, after, client.answer_ids) == len(first.request.prompt) + len(client.answer_ids)) is known


def test_threads_may_share_it() -> None:
    processor, failed = ChatProcessor(TOKENIZER, TINY_TEMPLATE), []

    def work(name: str) -> None:
        client = Talk(processor, "preserve", True, messages=[{"role": "system", "content": name}])
        last = client.say("Go")
        for turn in range(15):
            client.hear(last, f"{name} {turn}")
            before, last = last, client.say(f"and {turn}")
            if shared(before, last, client.answer_ids) != len(before.request.prompt) + len(client.answer_ids):
                failed.append(name)
    threads = [Thread(target=work, args=(name,)) for name in ("one", "two", "three")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed


# Spelling


def test_known_ids_are_taken_up_to_a_special_token() -> None:
    known = [*TOKENIZER.encode("<|im_start|>"), *cut_small("system"), EOS, *TOKENIZER.encode("<|im_start|>"),
             *cut_small("user")]
    whole = encode_prompt(TOKENIZER, "<|im_start|>system<|im_end|><|im_start|>user<|im_end|>", known)
    assert whole.kept == len(known) and whole.ids == (*known, EOS)
    parted = encode_prompt(TOKENIZER, "<|im_start|>system<|im_end|><|im_start|>usual", known)
    assert parted.kept == 8 and TOKENIZER.decode(parted.ids, skip_special=False) == parted.text
    longer = encode_prompt(TOKENIZER, "<|im_start|>systematic", known)
    assert longer.kept == 0 and longer.ids == tuple(TOKENIZER.encode(longer.text))
    assert [longer.text[start:end] for _, start, end in longer.anchors] == ["<|im_start|>"]
    assert [whole.text[start:end] for _, start, end in whole.anchors] == [
        "<|im_start|>", "<|im_end|>", "<|im_start|>", "<|im_end|>"]


@MODES
def test_a_tokenizer_that_composes_characters(mode: str) -> None:
    tokenizer = Tokenizer.from_directory(TINY)
    tokenizer._backend.normalizer = normalizers.NFC()
    processor = ChatProcessor(tokenizer, TINY_TEMPLATE)
    client = Talk(processor, mode, True, tools=TOOLS, messages=[{"role": "system", "content": "cafe\u0301 " * 20}])
    first = client.say("re\u0301sume\u0301")
    client.hear(first, "Here: e\u0301\n\n" + CALL.format(line=1))
    after = client.result("u\u0308")
    assert shared(first, after, client.answer_ids) == len(first.request.prompt) + len(client.answer_ids)


texts = st.text(st.sampled_from("ab é\n\r \u0301<{\"</think>\u6f22"), max_size=12)
values = st.recursive(st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), texts),
                      lambda inner: st.one_of(st.lists(inner, max_size=2), st.dictionaries(texts, inner, max_size=2)),
                      max_leaves=3)
calls = st.dictionaries(st.sampled_from(["path", "line", "marks"]), texts, max_size=2)
answers = st.tuples(texts, texts, st.lists(calls, max_size=2))


def spoken(reasoning: str, content: str, calls: list[dict[str, str]]) -> str:
    bodies = ["<tool_call>\n<function=edit>\n" + "".join(
        f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in call.items()) + "</function>\n</tool_call>"
        for call in calls]
    return f"{reasoning}\n</think>\n\n{content}" + "".join(f"\n\n{body}" for body in bodies)


@settings(deadline=None, max_examples=examples(150))
@given(st.data(), st.sampled_from(["template", "preserve"]), st.sampled_from([TINY_TEMPLATE, QWEN_LIKE]),
       st.sampled_from([TOOLS, UNTYPED]), st.booleans())
def test_random_conversations(data: st.DataObject, mode: str, template: str, tools: Any, returns: bool) -> None:
    """Spliced prompts say what the template renders, and nothing fails that would not fail without history."""
    processor, variables = ChatProcessor(TOKENIZER, template), {"enable_thinking": True}
    messages: list[dict[str, Any]] = [{"role": "user", "content": "Hi"}]
    for _ in range(data.draw(st.integers(1, 4))):
        job = processor.chat(messages, tools=tools, variables=variables, history=mode)
        found = finished(job, cut_small(spoken(*data.draw(answers))), data.draw(st.sampled_from(["stop", "length"])))
        message: dict[str, Any] = {"role": "assistant", "content": found.content}
        if returns:
            message["reasoning_content"] = found.reasoning
        if found.calls:
            message["tool_calls"] = [{"function": {"name": call.name, "arguments": call.arguments}}
                                     for call in found.calls]
        following = data.draw(st.sampled_from([("user", "And?"), ("tool", "ok")]))
        messages = [*messages, message, {"role": following[0], "content": following[1]}]
        after = processor.chat(messages, tools=tools, variables=variables, history=mode)
        text = TOKENIZER.decode(after.request.prompt, skip_special=False)
        plain = build_prompt(ChatTemplate(template), TOKENIZER, messages, tools, variables).text
        if mode == "template":
            assert without_values(text) == without_values(plain)
            assert tools is TOOLS or text == plain
        assert text.endswith("<think>\n")
        assert all(0 < at <= len(after.request.prompt) for at in after.request.stable_prefixes)


def without_values(text: str) -> str:
    """Arguments have the model's spelling in one text and the template's in the other."""
    return re.sub(r"(<parameter=\w+>\n).*?\n</parameter>", r"\1", text, flags=re.DOTALL)


@settings(deadline=None, max_examples=examples(100))
@given(st.lists(st.dictionaries(texts, values, max_size=3), max_size=2), st.dictionaries(texts, values, max_size=3),
       values)
def test_odd_arguments_and_schemas_raise_nothing(calls: list[Any], properties: dict[str, Any], schema: Any) -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"properties": properties, "$ref": schema}}}]
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "", "tool_calls": [
        {"function": {"name": "f", "arguments": arguments}} for arguments in calls]}]
    plain = build_prompt(ChatTemplate(TINY_TEMPLATE), TOKENIZER, messages, tools)
    assert ChatProcessor(TOKENIZER, TINY_TEMPLATE).chat(messages, tools=tools).request.prompt == plain.ids


def test_template_receives_typed_arguments() -> None:
    template = ("{%- for m in messages if m.tool_calls -%}{{- m.tool_calls[0].function.arguments.line + 1 -}}"
                "{%- endfor -%}" + TINY_TEMPLATE)
    client = talk("template", True, template, tools=TOOLS)
    client.hear(client.say("Hi"), CALL.format(line=1))
    after = client.result("ok")
    assert TOKENIZER.decode(after.request.prompt, skip_special=False).startswith("2.0<|im_start|>")
