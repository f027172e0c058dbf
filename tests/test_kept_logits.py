"""Logits that are kept with the ends of prompts lie inside of the memory that the cache was given."""

from __future__ import annotations

from typing import Any

from support import drain, greedy, numbers, odd_shape

from deltic.config import EngineConfig
from deltic.engine.engine import Engine
from deltic.engine.loading import RandomModel, load

VOCABULARY = 60_000


def engine_of(**options: Any) -> Engine:
    model = RandomModel(shape=odd_shape(vocab_size=VOCABULARY), initializer_range=0.1)
    return Engine(load(model, EngineConfig(dtype="float32", memory="16MiB", threads=1, max_context=256, **options)))


def kept_bytes(engine: Engine) -> int:
    """Bytes of all logits that outlive a step."""
    cache = engine.runtime.cache
    kept = (*cache.tree._checkpoints, *cache.accounts.snapshots.values())
    rows = [one.logits for one in kept if one.logits is not None]
    return sum(row.untyped_storage().nbytes() for row in rows)


def test_kept_logits_stay_within_the_plan() -> None:
    engine = engine_of()
    plan = engine.runtime.memory
    assert plan.rows is not None and plan.rows * 4 * VOCABULARY <= (16 << 20) // 16 + 4 * VOCABULARY
    prompts = [numbers(seed, 20, VOCABULARY) for seed in range(30)]
    first = {}
    for index, prompt in enumerate(prompts):
        engine.add(greedy(prompt, 3, f"r{index}", n=1 + index % 3, temperature=1.0, seed=index))
        while engine.has_work:
            for event in engine.step():
                first[event.request, event.choice] = event
            assert kept_bytes(engine) <= plan.rows * 4 * VOCABULARY
            engine.check()
    assert len(engine.runtime.cache.tree) > 2 * plan.rows, "more states are kept than logits"


def test_a_prompt_whose_logits_had_to_go_is_answered_the_same() -> None:
    engine = engine_of()
    prompts = [numbers(seed, 20, VOCABULARY) for seed in range(12)]
    answers = []
    for _ in range(2):
        for index, prompt in enumerate(prompts):
            engine.add(greedy(prompt, 6, f"r{index}"))
        found = drain(engine)
        answers.append([found[f"r{index}", 0].tokens for index in range(12)])
    assert answers[0] == answers[1]
    for cached in (0, 20):  # those used last are known
        engine.add(greedy(numbers(99, 20, VOCABULARY), 6))
        usage = drain(engine)["a", 0].last.usage
        assert usage is not None and usage.cached_tokens == cached


def test_choices_are_served_where_only_one_prompt_end_keeps_its_logits() -> None:
    engine = engine_of()
    engine.runtime.cache.rows = 1
    for index in range(4):
        engine.add(greedy(numbers(index, 40, VOCABULARY), 5, f"r{index}", n=6, temperature=1.0, seed=index))
    found = drain(engine)
    assert len(found) == 24 and all(len(answer.tokens) == 5 for answer in found.values())
    assert kept_bytes(engine) <= 4 * VOCABULARY
