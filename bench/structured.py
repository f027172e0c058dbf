"""What a schema costs a step: random qwen3.5-0.8b, its whole vocabulary, an answer that is one JSON object.

    python bench/structured.py           # a minute
    python bench/structured.py --quick   # does it work at all

The vocabulary is made up: the embedded model's tokens, then pairs of them. Answers with and without the schema take
turns.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from functools import partial
from itertools import product
from statistics import median
from types import SimpleNamespace
from typing import Any

from common import record, spread

from deltic import LLM, RandomModel, SamplingParams
from deltic.chat.output_router import AnswerText, OutputRouter
from deltic.chat.response_format import JsonSchema
from deltic.chat.structured import GrammarConstraint, Grammars
from deltic.engine.engine import Engine
from deltic.params import Constraint, EngineRequest

SCHEMA = {"type": "object", "additionalProperties": False, "required": ["name", "age", "tags", "when"], "properties": {
    "name": {"type": "string", "minLength": 400}, "age": {"type": "integer"},
    "when": {"type": "string", "format": "date"},
    "tags": {"type": "array", "items": {"type": "string", "maxLength": 20}}}}


def main() -> None:
    args = _arguments()
    model = RandomModel("qwen3.5-0.8b", layers=4 if args.quick else None)
    llm = LLM(model, dtype=args.dtype, max_batch=1, max_context=1024, threads=args.threads, prefix_cache=False)
    vocabulary = _vocabulary(llm.runtime.config.vocab_size)
    grammars, began = Grammars(vocabulary), time.perf_counter()
    grammars.warm()
    warm, began = time.perf_counter() - began, time.perf_counter()
    pending = grammars.of(JsonSchema(SCHEMA, True))
    pending.compile()
    grammar = pending.grammar
    compiled = time.perf_counter() - began
    held: list[float] = []
    constraint = partial(_Timed, partial(GrammarConstraint, grammar), held)
    found: dict[str, list[float]] = {"free": [], "schema": []}
    with llm, llm.worker.hold() as engine:
        for turn in range(2 * args.repeat + 2):
            name = ("free", "schema")[turn % 2]
            seconds = _steps(engine, constraint if turn % 2 else None, args.tokens, turn)
            found[name] += seconds if turn > 1 else []
    free, schema = median(found["free"]), median(found["schema"])
    record("structured", {"task": "mask", "model": "qwen3.5-0.8b", "dtype": args.dtype, "unit": "ms",
                          "vocabulary": grammar.vocabulary.compiled.vocab_size, "tables": 1e3 * warm,
                          "compile": 1e3 * compiled, "free": spread([1e3 * each for each in found["free"]]),
                          "schema": spread([1e3 * each for each in found["schema"]]),
                          "mask": spread([1e3 * each for each in held]), "cost": schema / free - 1})


class _Timed:
    """A constraint, and the seconds that its masks take."""

    def __init__(self, make: Any, held: list[float]) -> None:
        self._inner: Constraint = make(AnswerText(OutputRouter(lambda token: b"")))
        self._held = held
        self.fitting, self.push = self._inner.fitting, self._inner.push

    def allowed(self, drafts: Sequence[int], /) -> list[bytes | None]:
        began = time.perf_counter()
        masks = self._inner.allowed(drafts)
        self._held.append(time.perf_counter() - began)
        return masks


def _steps(engine: Engine, constraint: Any, tokens: int, seed: int) -> list[float]:
    """Seconds of each step that gave a token but the first."""
    params = SamplingParams(temperature=1.0, seed=seed, max_tokens=tokens, ignore_eos=True, max_repeat=0)
    engine.add(EngineRequest(f"r{seed}", tuple(range(100, 132)), params, constraint=constraint))
    seconds = list[float]()
    while engine.has_work:
        began = time.perf_counter()
        events = engine.step()
        assert all(event.error is None for event in events), events[0].error
        seconds += [time.perf_counter() - began] * sum(event.token is not None for event in events)
    return seconds[1:]


def _vocabulary(size: int) -> Any:
    """What grammars ask of a tokenizer."""
    with LLM(threads=1, max_context=256) as llm:
        known = llm.chat_processor.tokenizer
        base = [known.token_bytes(token) for token in range(known.vocab_size - len(known.added))]
    pairs = (one + other for one, other in product(base[200:], repeat=2))
    spelled = dict.fromkeys([*base, *(text for text, _ in zip(pairs, range(2 * size), strict=False))])
    tokens = [*[*spelled][:size - 1], b"<end>"]
    return SimpleNamespace(vocab_size=size, eos_id=size - 1, bos_id=None, ends=(size - 1,), added={"<end>": size - 1},
                           token_bytes=tokens.__getitem__,
                           encode=lambda text, **_: [tokens.index(bytes([byte])) for byte in text.encode()])


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, help="default: what deltic chooses for the model")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--tokens", type=int, default=60)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="a small model: only shows that everything works")
    return parser.parse_args()


if __name__ == "__main__":
    main()
