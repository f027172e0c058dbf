"""What drafting tokens is worth: the same requests with and without, in one process, in turns.

    python bench/speculation.py                    # a quarter of an hour
    python bench/speculation.py --only embedded
    python bench/speculation.py --pairs 2 --quick  # does it work at all
    python bench/experts.py --make OUT.gguf --layers 8 --head && python bench/speculation.py --mixture OUT.gguf
    python bench/random_gguf.py --vocabulary qwen3.5 OUT.gguf && python bench/speculation.py --part OUT.gguf
    python bench/speculation.py --text MODEL.gguf

embedded   the model that comes with deltic, its own head, prompts that it was not trained on: tokens per step and time
forced     random qwen3.5-0.8b with a random head that drafts in earnest; of its drafts each is then made right with a
           probability of 80 %, or none is. `auto` decides by itself how many to make, `fixed` always makes 3.
           Of 1 and of 8 sequences.
mixture    the same with a mixture of experts and its head, whose answers are the text of `experts.py`: so each draft
           may pass other experts than those before it, which have to be read too
part       a part of the matrix of logits drafts and the whole verifies (`--speculate head`). Weights are random,
           so the part contains an eighth of the tokens; it is made to contain each token with a probability
text       the same with a real model: the share of tokens that its part contains, and time
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any

import torch
from common import ROOT, record, spread
from experts import Said, text

from deltic import LLM, RandomModel
from deltic.config import EngineConfig
from deltic.engine.engine import Engine
from deltic.engine.loading import load
from deltic.engine.sequence import Sequence as Running
from deltic.model.draft_vocabulary import DraftVocabulary
from deltic.ops.types import Drafted
from deltic.params import EngineRequest, SamplingParams
from deltic.runner.launch import InFlight
from deltic.runner.model_runner import ModelRunner
from deltic.runner.sampling import SampleRow
from deltic.spec_decode.controller import drafter_of
from deltic.spec_decode.draft_length import AdaptiveDraftLength, DraftLength, FixedDraftLength, Growth
from deltic.spec_decode.mtp import PendingDrafts, Wants
from deltic.spec_decode.partial_head import HeadProposer
from deltic.spec_decode.proposers import MtpProposer

DEPTH = 3


@dataclass
class Forced:
    """Lets the head draft, then makes each draft right with a probability, for as long as those before it are."""

    head: MtpProposer
    share: float
    answers: dict[str, Sequence[int]]
    limit: int = DEPTH

    def __post_init__(self) -> None:
        self._random = random.Random(1)
        runner = self.head._head
        self._pending, runner.draft_ahead = runner.draft_ahead, self._draft_ahead  # type: ignore[assignment, method-assign]
        self._known: dict[Running, torch.Tensor] = {}
        self._rows: list[torch.Tensor] = []

    def draft(self, wants: Wants) -> list[list[int]]:
        self.head.draft(wants)
        return [self._draft(sequence, count) for sequence, count in wants]

    def _draft(self, sequence: Running, count: int) -> list[int]:
        return self._right(self.answers[sequence.request.id][sequence.generated:sequence.generated + count])

    def _right(self, answer: Sequence[int]) -> list[int]:
        return [token if self._random.random() < self.share else token ^ 1 for token in answer]

    def draft_ahead(self, flight: InFlight) -> None:
        self._rows = [self._table(share.sequence) for share in flight.scheduled]
        self.head.draft_ahead(flight)

    def _table(self, sequence: Running) -> torch.Tensor:
        """What is drafted after each place of the sequence [limit, places], where a device drafts."""
        if sequence not in self._known:
            tokens = [*sequence.request.ids, *self._right(self.answers[sequence.request.id])]
            tokens += [0] * (2 * self.limit + 2)
            table = torch.tensor(tokens).unfold(0, self.limit, 1).t()[:, 1:].contiguous()
            self._known[sequence] = table.to(self.head._runtime.device)
        return self._known[sequence]

    def _draft_ahead(self, *args: Any) -> Drafted:
        """Make drafts right where they are, on the device: a small kernel for each row."""
        drafted = self._pending(*args)
        each, first = drafted.numbers.split((2 * drafted.rows * drafted.drafts, 2 * drafted.rows))
        for row, table in enumerate(self._rows):
            torch.index_select(table[:drafted.drafts], 1, first[2 * row + 1:2 * row + 2],
                               out=each.view(drafted.drafts, 2, drafted.rows)[:, 0, row:row + 1])
        return drafted

    def take_pending(self, wants: Wants) -> PendingDrafts | None:
        return self.head.take_pending(wants)

    def drop_pending(self, sequence: Running) -> None:
        self.head.drop_pending(sequence)

    def forget(self, sequence: Running) -> None:
        self._known.pop(sequence, None)


class PlantedPart(HeadProposer):
    """Lets a part draft, then makes it contain each token of an answer with a probability."""

    def __init__(self, proposer: HeadProposer, share: float, answers: dict[str, Sequence[int]]) -> None:
        super().__init__(proposer._runtime, proposer.head, proposer.limit)
        draw = random.Random(1)
        self._answers = answers
        self._known = {name: [draw.random() < share for _ in answer] for name, answer in answers.items()}

    def choose(self, hidden: torch.Tensor, draws: Sequence[SampleRow]) -> list[int]:
        super().choose(hidden, draws)
        return [self._draft(draw.sequence.request.id, draw.sequence.generated + len(draw.drafts)) for draw in draws]

    def _draft(self, request: str, place: int) -> int:
        token = self._answers[request][place]
        return token if self._known[request][place] else token ^ 1

    def knows(self, vocabulary: DraftVocabulary, sequence: Running, place: int) -> bool:
        at = place - len(sequence.request.prompt)
        return self._known[sequence.request.id][max(at, 0)]


@dataclass(frozen=True)
class Served:
    """What a run gave: seconds from the first token on, tokens of every request, steps."""

    seconds: float
    answers: dict[str, list[int]]
    steps: int
    drafted: int
    accepted: int


def main() -> None:
    args = _arguments()
    if args.mixture:
        return _forced(args, args.mixture.stem, {"packed_weights": "on"})
    if args.part:
        return _part(args)
    if args.text:
        return _text(args)
    if args.only in (None, "embedded"):
        _embedded(args)
    if args.only in (None, "forced"):
        for kind in args.weights or ("Q8_0", "bfloat16"):
            _forced(args, kind, {"quant": "q8_0"} if kind == "Q8_0" else {})


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--threads", type=int, help="default: what deltic chooses for the model")
    parser.add_argument("--quick", action="store_true", help="small sizes: only shows that everything works")
    parser.add_argument("--only", choices=("embedded", "forced"))
    parser.add_argument("--weights", action="append", choices=("Q8_0", "bfloat16"), help="of `forced` (default: both)")
    parser.add_argument("--mixture", metavar="MODEL.gguf", type=Path, help="only this, which has a head")
    parser.add_argument("--part", metavar="RANDOM.gguf", type=Path, help="only this, with random weights")
    parser.add_argument("--text", metavar="MODEL.gguf", type=Path, help="only this, a real model")
    parser.add_argument("--batch", type=int, action="append", choices=(1, 8), help="of `forced` (default: both)")
    return parser.parse_args()


def plain_runtime(runtime: ModelRunner) -> ModelRunner:
    """The same weights and memory without a head."""
    return replace(runtime, mtp=None, partial_head=None, options=replace(runtime.options, speculate="off"))


def _embedded(args: argparse.Namespace) -> None:
    """Conversations whose phrasings were held out of the training."""
    sys.path.insert(0, str(ROOT / "examples" / "tiny"))
    from data import heldout_set

    llm = LLM(threads=args.threads, prefix_cache=False)
    sampling = SamplingParams(temperature=0.0, max_tokens=120)
    jobs = [llm.chat_processor.chat(sample.messages, sampling, tools=sample.tools,
                                    variables={"enable_thinking": sample.thinking})
            for sample in heldout_set(1, 1)[:4 if args.quick else 24]]
    requests = [replace(job.request, id=str(index), matcher=None) for index, job in enumerate(jobs)]
    assert isinstance(llm.runtime, ModelRunner)
    with_head, without = llm.runtime, plain_runtime(llm.runtime)
    runs: dict[str, list[Served]] = {"auto": [], "off": []}
    for pair in range(args.pairs + 1):
        turns = [("auto", with_head), ("off", without)]
        for name, runtime in turns if pair % 2 else reversed(turns):
            served = _one_by_one(runtime, requests)
            if pair:
                runs[name].append(served)
    tokens = sum(map(len, runs["auto"][0].answers.values()))
    same = sum(runs["auto"][0].answers[name] == answer for name, answer in runs["off"][0].answers.items())
    _record(args, runs, {"task": "embedded", "requests": len(requests), "tokens": tokens, "same_answers": same,
                         "threads": with_head.threads,
                         "tokens_per_step": round((tokens - len(requests)) / runs["auto"][0].steps, 3)})


def _one_by_one(runtime: ModelRunner, requests: Sequence[EngineRequest]) -> Served:
    return serve_one_by_one(Engine(runtime), requests)


def serve_one_by_one(engine: Engine, requests: Sequence[EngineRequest]) -> Served:
    runs = [serve(engine, [request]) for request in requests]
    return Served(sum(run.seconds for run in runs), {name: answer for run in runs for name, answer in
                                                     run.answers.items()},
                  sum(run.steps for run in runs), sum(run.drafted for run in runs), sum(run.accepted for run in runs))


def _forced(args: argparse.Namespace, kind: str, options: dict[str, Any]) -> None:
    model = str(args.mixture) if args.mixture else RandomModel("qwen3.5-0.8b", 4 if args.quick else None, head=True)
    runtime = load(model, EngineConfig(threads=args.threads, max_context=1024, max_batch=8, prefix_cache=False,
                                       memory="2GiB", **options))
    plain = plain_runtime(runtime)
    head = drafter_of(runtime)
    assert isinstance(head, MtpProposer)
    for batch in args.batch or (1, 8):
        tokens = 24 if args.quick else 64 if batch == 1 else 32
        requests = [_said(index, tokens) if args.mixture else _request(runtime, index, tokens)
                    for index in range(batch)]
        answers: dict[str, Sequence[int]] = {**serve(Engine(plain), requests).answers}
        cases = [(0.8, "auto"), (0.0, "auto")] if batch > 1 else [(0.8, "fixed"), (0.8, "auto"), (0.0, "auto")]
        for share, name in cases:
            depth: DraftLength = (FixedDraftLength(DEPTH) if name == "fixed" else
                            AdaptiveDraftLength(DEPTH, Growth.of(runtime.config)))
            turns = [(name, Engine(runtime, Forced(head, share, answers), depth)), ("off", Engine(plain))]
            runs = _in_turns(args, turns, requests)
            _record(args, runs, {"task": "mixture" if args.mixture else "forced", "weights": kind,
                                 "threads": runtime.threads, "batch": batch, "acceptance": share,
                                 "drafts": name, "tokens_per_step": round(
                                     (sum(map(len, answers.values())) - batch) / runs[name][0].steps / batch, 3)})


def _part(args: argparse.Namespace) -> None:
    runtime, drafter = _with_part(args, args.part)
    plain = plain_runtime(runtime)
    requests = [_request(runtime, 0, 24 if args.quick else 256)]
    answers: dict[str, Sequence[int]] = {**serve(Engine(plain), requests).answers}
    for share in (1.0, 0.97, 0.94, 0.9, 0.8, 0.0):
        turns = [("auto", Engine(runtime, PlantedPart(drafter, share, answers))), ("off", Engine(plain))]
        runs = _in_turns(args, turns, requests)
        assert all(run.answers == answers for found in runs.values() for run in found), "a draft changes an answer"
        _record(args, runs, {"task": "part", "weights": args.part.stem, "threads": runtime.threads, "acceptance": share,
                             "depth": drafter.limit, "head_share": round(drafter.head.share, 3),
                             "tokens_per_pass": round((len(answers["0"]) - 1) / runs["auto"][0].steps, 3)})


def _text(args: argparse.Namespace) -> None:
    runtime, drafter = _with_part(args, args.text)
    plain, requests = plain_runtime(runtime), _questions(args.text, 1 if args.quick else 8)
    engine = Engine(runtime, drafter)
    runs = _in_turns(args, [("auto", engine), ("off", Engine(plain))], requests, serve_one_by_one)
    same = runs["auto"][0].answers == runs["off"][0].answers
    tokens = sum(map(len, runs["auto"][0].answers.values()))
    _record(args, runs, {"task": "text", "weights": args.text.stem, "threads": runtime.threads, "tokens": tokens,
                         "depth": drafter.limit, "head_share": round(drafter.head.share, 3),
                         "same_answers": same,
                         "tokens_per_pass": round((tokens - len(requests)) / runs["auto"][0].steps, 3)})


def _with_part(args: argparse.Namespace, path: Path) -> tuple[ModelRunner, HeadProposer]:
    runtime = load(str(path), EngineConfig(threads=args.threads, max_context=1024, max_batch=8, prefix_cache=False,
                                           memory="2GiB", speculate="head"))
    drafter = drafter_of(runtime)
    assert isinstance(drafter, HeadProposer), "the file has no packed matrix of logits"
    drafter.head.build()
    return runtime, drafter


def _questions(path: Path, count: int) -> list[EngineRequest]:
    """Half of them are answered with the likeliest tokens, half with drawn ones."""
    essays = json.loads((Path(__file__).parent / "essays.json").read_text(encoding="utf-8"))
    subjects = ["tea", "bridges", "the moon", "bees", "a lighthouse", "bread", "glaciers", "a library"]
    found = list[EngineRequest]()
    with LLM(path, speculate="off") as llm:
        for index, subject in enumerate(subjects[:count]):
            text = f"{essays['English'][:600]}\n\nWrite a short text like this one about {subject}."
            sampling = SamplingParams(temperature=0.0 if index % 2 else 0.8, seed=index, max_tokens=200)
            job = llm.chat_processor.chat([{"role": "user", "content": text}], sampling)
            found.append(replace(job.request, id=str(index), matcher=None))
    return found


def _in_turns(args: argparse.Namespace, turns: list[tuple[str, Engine]], requests: Sequence[EngineRequest],
              run: Callable[[Engine, Sequence[EngineRequest]], Served] | None = None) -> dict[str, list[Served]]:
    """The runs of each engine, but for a first one."""
    runs: dict[str, list[Served]] = {name: [] for name, _ in turns}
    for pair in range(args.pairs + 1):
        for name, engine in turns if pair % 2 else reversed(turns):
            served = (run or serve)(engine, requests)
            if pair:
                runs[name].append(served)
    return runs


def _request(runtime: ModelRunner, index: int, tokens: int) -> EngineRequest:
    rng = random.Random(index)
    prompt = tuple(rng.randrange(runtime.config.vocab_size) for _ in range(64))
    return EngineRequest(str(index), prompt, SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True))


def _said(index: int, tokens: int) -> EngineRequest:
    words = [*islice(text(index), 64 + tokens)]
    return EngineRequest(
        str(index),
        tuple(words[:64]),
        SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True),
        guide=lambda: Said(words[64:]),
    )


def serve(engine: Engine, requests: Sequence[EngineRequest]) -> Served:
    for request in requests:
        engine.add(request)
    answers: dict[str, list[int]] = {request.id: [] for request in requests}
    began, before = None, engine.stats.steps
    drafted, accepted = sum(engine.speculator.stats.drafted_at), sum(engine.speculator.stats.accepted_at)
    while engine.has_work:
        for event in engine.step():
            if event.token is not None:
                answers[event.request].append(event.token)
        if began is None and all(answers.values()):
            began, before = time.perf_counter(), engine.stats.steps
    assert began is not None
    stats = engine.speculator.stats
    return Served(time.perf_counter() - began, answers, engine.stats.steps - before,
                  sum(stats.drafted_at) - drafted, sum(stats.accepted_at) - accepted)


def _record(args: argparse.Namespace, runs: dict[str, list[Served]], facts: dict[str, Any]) -> None:
    name = next(name for name in runs if name != "off")
    ratios = [off.seconds / on.seconds for on, off in zip(runs[name], runs["off"], strict=True)]
    first = runs[name][0]
    record("speculation", {"depth": DEPTH, **facts, "unit": "s", "pairs": len(ratios),
                           **{who: spread([run.seconds for run in found]) for who, found in runs.items()},
                           "drafted": first.drafted, "accepted": first.accepted,
                           "gain": round(median(ratios), 4), "gains": spread(ratios)})


if __name__ == "__main__":
    main()
