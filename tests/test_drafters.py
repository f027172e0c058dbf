"""Drafters in earnest: n-grams, another model, the model's own head; options choose them, no answer depends on them."""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from reuse_cases import runtime_of, usage_of
from safetensors.torch import load_file, save_file
from speculation_cases import (
    MODELS,
    PARAMS,
    PATTERNS,
    PROMPT,
    Scripted,
    embedded_prompt,
    embedded_with_head,
    expected,
    headed,
    request_of,
)
from support import (
    Answers,
    drain,
    greedy,
    numbers,
    odd_runtime,
    odd_shape,
    qwen3_runtime,
    reference,
    same_tokens,
    session_over,
    take,
)

from deltic.cache.offload.disk import DiskStore
from deltic.cache.offload.index import TierIndex
from deltic.config import EngineConfig
from deltic.engine.engine import Engine
from deltic.engine.loading import RandomModel, load
from deltic.engine.sequence import Sequence as Running
from deltic.errors import ConfigError
from deltic.ops.types import Batch
from deltic.params import MAX_DRAFTS, PAGE, EngineRequest, SamplingParams
from deltic.runner.memory import share_memory
from deltic.runner.model_runner import ModelRunner
from deltic.spec_decode.draft_length import FixedDraftLength
from deltic.spec_decode.draft_model import DraftModelProposer
from deltic.spec_decode.mtp import MtpRunner, Wants
from deltic.spec_decode.proposers import MtpProposer, NgramProposer, _Ngrams

# The other drafters


def test_long_prompt_is_indexed_over_several_steps() -> None:
    """Everybody's next token waits while it is."""
    class Long:
        tokens = (*range(40000), 7, 8, 9)

    sequence: Any = Long()
    drafter, found = NgramProposer(4), list[list[int]]()
    for step in range(4):
        found += drafter.draft([(sequence, 3)])
        assert len(drafter._known[sequence]._earlier) == min(2 + 16384 * (step + 1), 40003)
    assert found == [[], [], [10, 11, 12], [10, 11, 12]]


@pytest.mark.parametrize("vocabulary", [2, 5, 20])
@pytest.mark.parametrize("begin", [1, 2, 3, 50])
def test_ngrams_find_the_newest_of_the_longest(vocabulary: int, begin: int) -> None:
    def plain(tokens: list[int]) -> list[int]:
        for length in (4, 3, 2):
            for end in range(len(tokens) - 1, length - 1, -1):
                if tokens[end - length:end] == tokens[-length:]:
                    return (tokens[end:] * 5)[:5]
        return []

    for seed in range(20):
        drawn, ngrams = numbers(seed, begin + 60, vocabulary), _Ngrams(begin)
        for end in range(begin, len(drawn)):
            assert ngrams.draft(drawn[:end], 5) == plain(list(drawn[:end]))


def test_ngrams_of_a_long_prompt_are_small() -> None:
    tokens = numbers(1, 100_000, 150_000)
    ngrams = _Ngrams(len(tokens))
    while len(ngrams._earlier) < len(tokens):
        ngrams.draft(tokens, 1)
    assert sys.getsizeof(ngrams._last) + sys.getsizeof(ngrams._earlier) < 16 * len(tokens)


def test_ngrams_draft_earlier_continuations() -> None:
    runtime = load(RandomModel(shape=odd_shape(tie_word_embeddings=True), initializer_range=0.02), EngineConfig(
        dtype="float32", memory="8MiB", threads=1))
    drafter, prompt = NgramProposer(4), numbers(3, 20, 509)
    engine = Engine(runtime_of(runtime), drafter, FixedDraftLength(4))
    engine.add(greedy(prompt, 40))
    answers = drain(engine)
    same_tokens(reference(runtime, prompt, 40), answers["a", 0].tokens, tau=1e-5)
    assert usage_of(answers).accepted_tokens > 20, "this model soon repeats itself"
    assert not drafter._known
    request = EngineRequest("x", (1, 2, 3, 4, 5, 1, 2, 3))
    sequence = engine._sequence(request, 0, 0, engine.keys_of(request))
    assert drafter.draft([(sequence, 3)]) == [[4, 5, 1]]
    sequence.own_keys().append(4)
    assert drafter.draft([(sequence, 6)]) == [[5, 1, 2, 3, 4, 5]]
    sequence.tokens += [9]
    assert drafter.draft([(sequence, 6)]) == [[]]


def itself(depth: int, **limits: Any) -> DraftModelProposer:
    """The model as its own draft model: drafts nothing wrong, as it draws with the same noise."""
    return DraftModelProposer(runtime_of(odd_runtime(), **limits), 509, depth)


@pytest.mark.parametrize("params", PARAMS)
@pytest.mark.parametrize("batch", [1, 3])
def test_self_drafting_is_always_accepted(params: str, batch: int) -> None:
    drafter, answer = itself(4), expected("odd", params)
    engine = Engine(runtime_of(odd_runtime()), drafter, FixedDraftLength(4))
    for index in range(batch):
        engine.add(request_of(answer.prompt, params, name=f"a{index}"))
    answers = drain(engine)
    for index in range(batch):
        assert answers[f"a{index}", 0].tokens == list(answer.tokens)
        usage = usage_of(answers, f"a{index}")
        assert usage.accepted_tokens == usage.drafted_tokens > 0, "what lies behind the answer's end does not count"
    assert not drafter._caches and drafter._runtime.cache.idle
    drafter._runtime.cache.check()


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("more", [(), (5,), (5, 6, 7)])
@pytest.mark.parametrize("wrong", [0, 2, 3])
def test_a_draft_model_takes_rejected_drafts_back(wrong: int, more: tuple[int, ...], model: str) -> None:
    """Also where the model has gone on alone for some steps: it drafts as if it had never made them, and reads nothing
    again."""
    drafter, fresh = (DraftModelProposer(runtime_of(MODELS[model](), budget=512), 509, 4) for _ in range(2))
    engine = Engine(runtime_of(MODELS[model]()))
    request = EngineRequest("a", expected(model, "greedy").prompt, PARAMS["greedy"])
    sequence = engine._sequence(request, 0, 0, engine.keys_of(request))
    sequence.own_keys()
    leases = []
    for _ in range(12):
        [drafts] = drafter.draft([(sequence, 4)])
        leases.append(drafter._caches[sequence])
        sequence.tokens += [*drafts[:wrong], (drafts[wrong] + 1) % 509, *more]
        found = drafter.draft([(sequence, 4)])
        assert found == fresh.draft([(sequence, 4)])
        fresh.forget(sequence)
        drafter._runtime.cache.check()
    assert all(cache is leases[0] for cache in leases)
    drafter.forget(sequence)
    assert drafter._runtime.cache.idle


def test_another_model_drafts_wrongly_and_changes_nothing() -> None:
    small = runtime_of(qwen3_runtime())
    drafter, answer = DraftModelProposer(small, 509, 3), expected("odd", "greedy")
    engine = Engine(runtime_of(odd_runtime()), drafter, FixedDraftLength(3))
    engine.add(EngineRequest("a", answer.prompt, PARAMS["greedy"]))
    answers = drain(engine)
    same_tokens(answer, answers["a", 0].tokens)
    assert usage_of(answers).accepted_tokens < 5 and small.cache.idle


def test_a_draft_model_without_room_drafts_nothing() -> None:
    drafter, answer = itself(4, pages=2), expected("odd", "greedy")
    engine = Engine(runtime_of(odd_runtime()), drafter, FixedDraftLength(4))
    engine.add(EngineRequest("a", answer.prompt, PARAMS["greedy"]))
    answers = drain(engine)
    same_tokens(answer, answers["a", 0].tokens)
    assert usage_of(answers).drafted_tokens == 0 and drafter._runtime.cache.idle


def read_by(runtime: ModelRunner, tokens: list[int]) -> ModelRunner:
    """The runtime, which appends to `tokens` how many tokens it reads of prompts."""
    def run(batch: Batch) -> torch.Tensor:
        if not batch.layout.logits:
            tokens.append(batch.layout.tokens)
        return runtime.run(batch)

    class Counting:
        def __getattr__(self, name: str) -> Any:
            return run if name == "run" else getattr(runtime, name)

    return cast(ModelRunner, Counting())


@pytest.mark.parametrize("model", MODELS)
def test_draft_model_prefills_only_new_tokens(model: str) -> None:
    """Though its last drafts were wrong when the turn before ended."""
    read: list[int] = []
    drafter = DraftModelProposer(read_by(runtime_of(MODELS[model](), budget=512), read), 509, 4)
    engine = Engine(runtime_of(odd_runtime()), drafter, FixedDraftLength(4))
    prompt, turns = numbers(1, 200, 509), []
    for turn in range(3):
        end = reference(odd_runtime(), prompt, 12).tokens[8]
        engine.add(EngineRequest("a", prompt, SamplingParams(temperature=0.0, max_tokens=100, stop_token_ids=(end,))))
        answer = drain(engine)["a", 0].tokens
        prompt = (*prompt, *answer, *numbers(50 + turn, 5, 509))
        turns.append(sum(read))
        read.clear()
    assert 200 <= turns[0] <= 202 and max(turns[1:]) <= 12


@pytest.mark.parametrize("model", MODELS)
def test_a_draft_model_reads_a_common_beginning_once(model: str) -> None:
    """Of the choices of one request, and of requests that share their opening."""
    read: list[int] = []
    engine = Engine(runtime_of(odd_runtime()), DraftModelProposer(read_by(runtime_of(MODELS[model]()), read), 509, 4),
                    FixedDraftLength(4))
    opening = numbers(1, 200, 509)
    engine.add(
        EngineRequest("a", (*opening, *numbers(2, 20, 509)), replace(PARAMS["drawn"], n=3), stable_prefixes=(200,))
    )
    drain(engine)
    assert sum(read) <= 220 + 3 * 25, "after the prompt it reads what it drafted wrongly"
    read.clear()
    for name in "bc":
        engine.add(
            EngineRequest(name, (*opening, *numbers(ord(name), 30, 509)), PARAMS["greedy"], stable_prefixes=(200,))
        )
    drain(engine)
    assert 60 <= sum(read) <= 60 + 2 * 25


def test_a_draft_model_reads_no_more_at_once_than_a_step_may() -> None:
    """Answers go on meanwhile, without drafts for who is not read yet."""
    read: list[int] = []
    drafter = DraftModelProposer(read_by(runtime_of(odd_runtime(), budget=16), read), 509, 4)
    engine = Engine(runtime_of(odd_runtime(), budget=512), drafter, FixedDraftLength(4))
    engine.add(greedy(numbers(1, 10, 509), 60, "a"))
    answers: Answers = {}
    take(answers, engine.step())
    engine.add(greedy(numbers(2, 200, 509), 60, "b"))
    counts = []
    while engine.has_work:
        events = engine.step()
        take(answers, events)
        counts.append(sum(event.request == "a" for event in events))
        assert sum(read[-1:]) <= 16
    assert max(read) == 16 and min(counts[:12]) > 0 and sum(counts[:12]) >= 4 * 12
    assert usage_of(answers, "b").accepted_tokens > 30
    for name, prompt in (("a", numbers(1, 10, 509)), ("b", numbers(2, 200, 509))):
        same_tokens(reference(odd_runtime(), prompt, 60), answers[name, 0].tokens)


@pytest.mark.parametrize("short", ["delta_logs", "pages", "slots"])
def test_a_draft_model_with_room_for_one_reads_nothing_twice(short: str) -> None:
    small, read = runtime_of(odd_runtime(), pages=9 if short == "pages" else 256), list[int]()
    while short != "pages" and getattr(small.cache, short).free > 1:
        assert getattr(small.cache, short).take()
    drafter = DraftModelProposer(read_by(small, read), 509, 4)
    engine = Engine(runtime_of(odd_runtime()), drafter, FixedDraftLength(4))
    for index in range(3):
        engine.add(greedy(numbers(index, 100, 509), 30 + index, f"r{index}"))
    answers = drain(engine)
    for index in range(3):
        same_tokens(reference(odd_runtime(), numbers(index, 100, 509), 30 + index), answers[f"r{index}", 0].tokens)
    assert 100 <= sum(read) <= 3 * 140 and not drafter._caches and not drafter._refused


# Options


@pytest.mark.parametrize(("option", "words"), [("mtp", "this model has no draft head"),
                                               ("mtp:2", "speculate=mtp:2: this model has no draft head")])
def test_model_without_a_head_is_an_error(option: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        load(RandomModel(shape=odd_shape()), EngineConfig(memory="8MiB", speculate=option))
    assert caught.value.option == "speculate"


@pytest.mark.parametrize(("option", "kind"), [("auto", MtpProposer), ("mtp:2", MtpProposer), ("off", type(None)),
                                              ("ngram:5", NgramProposer)])
def test_options_choose_the_drafter(option: str, kind: type) -> None:
    runtime = load(RandomModel(shape=odd_shape(), head=True), EngineConfig(memory="8MiB", speculate=option))
    engine = Engine(runtime)
    assert isinstance(engine.speculator.drafter, kind) and (runtime.mtp_runner is None) == (kind is not MtpProposer)
    assert engine.speculator.depth.limit == {"auto": 3, "mtp:2": 2, "off": 0, "ngram:5": 5}[option]


def test_a_draft_model_is_loaded_beside() -> None:
    """With a vocabulary of its own it is refused."""
    runtime = load(None, EngineConfig(memory="64MiB", speculate="draft:tiny:2"))
    engine = Engine(runtime)
    assert isinstance(engine.speculator.drafter, DraftModelProposer) and engine.speculator.depth.limit == 2
    assert runtime.draft is not None and runtime.draft.cache is not runtime.cache
    with pytest.raises(ConfigError, match="the draft model /nowhere: there is no directory '/nowhere'") as caught:
        load(None, EngineConfig(memory="64MiB", speculate="draft:/nowhere"))
    assert caught.value.option == "speculate"
    with pytest.raises(ConfigError, match="must share one tokenizer"):
        Engine(load(RandomModel(shape=odd_shape()), EngineConfig(memory="64MiB", speculate="draft:tiny")))


def test_options_of_the_model_do_not_apply_to_its_draft_model(tmp_path: Path) -> None:
    options = EngineConfig(memory="64MiB", speculate="draft:tiny", cache_dir=str(tmp_path), cache_disk_gb=1.0)
    both = share_memory(options)
    assert [each.cache_disk_gb for each in both] == [1.0, 10.0] and both[1].cache_dir is None
    experts = share_memory(EngineConfig(memory="64MiB", speculate="draft:tiny", expert_memory="auto",
                                        expert_reserve="2GiB", expert_refresh=3, expert_profile="p"))
    assert [each.expert_refresh for each in experts] == [3, 1] and not experts[1].offloads_experts


def test_too_little_memory_for_delta_logs_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    runtime = load(RandomModel(shape=odd_shape()), EngineConfig(memory="100KiB", speculate="ngram", max_context=64))
    assert "nothing is drafted" in caplog.text and runtime.cache.delta_logs.size == 0


class Failing:
    """Drafts rightly at first."""

    limit = 3

    def __init__(self, answer: Sequence[int]) -> None:
        self.scripted, self.calls = Scripted({("a", 0): answer}, PATTERNS["right"], 3), 0

    def draft(self, wants: Wants) -> list[list[int]]:
        self.calls += 1
        if self.calls > 2:
            raise MemoryError("nothing left")
        return self.scripted.draft(wants)

    def forget(self, sequence: Running) -> None:
        raise AssertionError("it is switched off")


def test_l8_failing_drafter_affects_no_answer(caplog: pytest.LogCaptureFixture) -> None:
    answer = expected("odd", "greedy")
    drafter = Failing(answer.tokens)
    engine = Engine(runtime_of(odd_runtime()), drafter, FixedDraftLength(3))
    engine.add(EngineRequest("a", answer.prompt, PARAMS["greedy"]))
    answers = drain(engine)
    same_tokens(answer, answers["a", 0].tokens)
    assert usage_of(answers).accepted_tokens == 6 and drafter.calls == 3
    assert caplog.text.count("switched off") == 1 and engine.stats.failed == 0


class Forgetful(Scripted):
    """Runs out of memory when a sequence is over."""

    def forget(self, sequence: Running) -> None:
        raise MemoryError("nothing left")


class Odd(Scripted):
    """Answers with what a test says."""

    def draft(self, wants: Wants) -> list[list[int]]:
        return self.answers["it", 0]  # type: ignore[return-value]


@pytest.mark.parametrize("drafter", [
    Forgetful({}, PATTERNS["right"], 3), *(Odd({("it", 0): drafts}, PATTERNS["right"], 3)  # type: ignore[dict-item]
                                           for drafts in ([], [[9999]], [[-1, 3]], [[1], [2]], None))])
def test_l8_nonsensical_drafter_is_switched_off(drafter: Scripted, caplog: pytest.LogCaptureFixture) -> None:
    answer, other = expected("odd", "greedy"), numbers(9, 30, 509)
    engine = Engine(runtime_of(odd_runtime()), drafter, FixedDraftLength(3))
    engine.add(greedy(answer.prompt, 5, "a"))
    if isinstance(drafter, Forgetful):
        engine.add(greedy(other, 30, "b"))
    answers = drain(engine)
    assert answers["a", 0].tokens == list(answer.tokens[:5])
    if isinstance(drafter, Forgetful):
        same_tokens(reference(odd_runtime(), other, 30), answers["b", 0].tokens)
    assert caplog.text.count("switched off") == 1 and engine.stats.failed == 0 and not engine.has_work


# The model's own head


def test_the_heads_rows_are_made_of_the_models_own_states() -> None:
    """However the tokens came, and whatever was drafted in between; so prefixes may be shared."""
    runtime, answer = headed(), expected("odd", "greedy")
    tokens = (*answer.prompt, *answer.tokens)
    whole, parts, rng = session_over(runtime, budget=512), session_over(runtime, budget=7), random.Random(4)
    whole.prefill(tokens)
    parts.prefill(answer.prompt[:-5])
    while parts.position < len(tokens):
        done, count = parts.position, rng.randint(1, 5)
        right = min(rng.randint(0, count), len(tokens) - done)
        wanted = [*tokens[done:done + right], *((token + 1) % 500 for token in range(count - right))]
        parts.verify(wanted)
        parts.accept(right)
        if rng.random() < 0.3:
            snapshot = parts.snapshot()
            parts.step(3)
            parts.restore(snapshot)
            parts.drop(snapshot)
    for kind in (0, 1):
        ours, theirs = (session.runtime.pools.page_tensors[kind][-1].flatten(0, 1)[places(session)]
                        for session in (parts, whole))
        assert float((ours - theirs).abs().max()) < 1e-4 < float(theirs.abs().max())
    ours, theirs = (session.runtime.pools.named_slots["hidden"][0, session._cache.slot]
                    for session in (parts, whole))
    assert float((ours - theirs).abs().max()) < 1e-3


def places(session: Any) -> list[int]:
    return [session._cache.pages[i // PAGE] * PAGE + i % PAGE for i in range(session.position)]


@pytest.mark.parametrize("params", PARAMS)
@pytest.mark.parametrize(("depth", "batch"), [(1, 3), (3, 1), (MAX_DRAFTS, 3)])
def test_l6_with_a_head_that_drafts_wrong(params: str, depth: int, batch: int) -> None:
    runtime, answer = headed(), expected("odd", params)
    engine = Engine(runtime_of(runtime), depth=FixedDraftLength(depth))
    for index in range(batch):
        engine.add(replace(request_of(answer.prompt, params, name=f"a{index}"), speculate=index != 2))
    answers = drain(engine)
    for index in range(batch):
        assert answers[f"a{index}", 0].tokens == list(answer.tokens)
        assert (usage_of(answers, f"a{index}").drafted_tokens > 0) == (index != 2)


@pytest.mark.parametrize("params", ["greedy", "drawn", "filters"])
def test_drafts_of_one_call_are_those_of_many(params: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiled head drafts as many tokens as are wanted of each sequence at once; other backends one by one."""
    answer = expected("odd", params)

    def drafted() -> list[list[list[int]]]:
        engine, seen = Engine(runtime_of(headed()), depth=FixedDraftLength(4)), list[list[list[int]]]()
        drafter = engine.speculator.drafter
        assert isinstance(drafter, MtpProposer)
        original = drafter.draft

        def spy(wants: Wants) -> list[list[int]]:
            seen.append(original(wants))
            return seen[-1]

        monkeypatch.setattr(drafter, "draft", spy)
        for index in range(3):
            engine.add(EngineRequest(f"a{index}", answer.prompt, replace(PARAMS[params], max_tokens=20 + index)))
        drain(engine)
        return seen

    at_once = drafted()
    monkeypatch.setattr(MtpRunner, "draft", lambda *arguments: None)
    one_by_one = drafted()
    assert at_once == one_by_one and len(at_once) > 10
    assert {len(row) for step in at_once for row in step} == {1, 2, 3, 4}


def test_a_head_serves_what_was_kept_without_drafts(tmp_path: Path) -> None:
    """Prefixes from the tree, from host memory and from disk bring the head's rows and hidden state with them."""
    runtime, answer = headed(), expected("odd", "greedy")
    for place in ("tree", "disk"):
        tiers = [TierIndex(DiskStore(tmp_path, "x", 1 << 30), threads=False)] if place == "disk" else []
        engine = Engine(runtime_of(runtime, tiers=tiers))
        engine.add(greedy(answer.prompt, 30, "before"))
        drain(engine)
        if tiers:
            engine.close()
            engine = Engine(runtime_of(runtime, tiers=[TierIndex(DiskStore(tmp_path, "x", 1 << 30), threads=False)]))
        drafted: list[list[int]] = []
        drafter = engine.speculator.drafter
        assert drafter is not None
        original = drafter.draft

        def spy(wants: Wants, draft: Any = original, drafted: Any = drafted) -> list[list[int]]:
            drafted.append(draft(wants)[0])
            return drafted[-1:]

        drafter.draft = spy  # type: ignore[method-assign]
        engine.speculator.depth = FixedDraftLength(3)
        engine.add(greedy((*answer.prompt, *answer.tokens[:30], *numbers(9, 9, 509)), 8))
        answers = drain(engine)
        assert usage_of(answers).cached_tokens == PROMPT + 29
        if place == "tree":
            seen = drafted
    assert drafted == seen and len(drafted) > 3
@pytest.mark.parametrize("params", ["greedy", "drawn", "filters"])
def test_l6_with_the_trained_head(params: str) -> None:
    """Which is nearly always right where the model speaks, also where it draws."""
    runtime, prompt = embedded_with_head(), embedded_prompt()
    found = []
    for depth in (0, 3):
        engine = Engine(runtime_of(runtime), depth=FixedDraftLength(depth))
        for index in range(3):
            engine.add(EngineRequest(f"a{index}", prompt, replace(PARAMS[params], ignore_eos=False, seed=index)))
        answers = drain(engine)
        found.append([answers[f"a{index}", 0].tokens for index in range(3)])
    assert found[0] == found[1]
    drafted, accepted = sum(engine.speculator.stats.drafted_at), sum(engine.speculator.stats.accepted_at)
    assert accepted > 0.6 * drafted > 0


def test_a_head_whose_norms_have_the_offset_drafts_as_well(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As converters of other programs save it: nothing is added to them again. Beyond its end the answer is hard to
    draft, and a head with other norms is right half as often."""
    original, prompt = embedded_with_head(), embedded_prompt()
    assert original.path is not None
    for file in original.path.iterdir():
        if file.name != "mtp.safetensors":
            (tmp_path / file.name).symlink_to(file)
    save_file({name: tensor.float() + ("norm" in name)
               for name, tensor in load_file(original.path / "mtp.safetensors").items()}, tmp_path / "mtp.safetensors")
    caplog.clear()
    changed = load(str(tmp_path), original.options)
    assert len([record for record in caplog.records if "draft head's norms" in record.getMessage()]) == 1
    accepted = []
    for runtime in (original, changed):
        engine = Engine(runtime_of(runtime), depth=FixedDraftLength(3))
        engine.add(EngineRequest("a", prompt, replace(PARAMS["greedy"], max_tokens=96)))
        drain(engine)
        accepted.append((sum(engine.speculator.stats.drafted_at), sum(engine.speculator.stats.accepted_at)))
    assert accepted[0] == accepted[1] and accepted[0][1] > 0
