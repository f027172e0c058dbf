"""Sampling parameters of a step as tensors. `ops.sample` samples with them."""

from __future__ import annotations

from array import array
from collections.abc import Sequence as List
from dataclasses import dataclass, replace
from functools import cache

import torch
from torch import Tensor

from deltic.engine.sequence import Sequence
from deltic.ops.cuda.staging import row_keys
from deltic.ops.noise import answer_key, sample_key
from deltic.ops.types import Adjust, LogitTable, Sampled, Sampling
from deltic.params import SamplingParams, TokenLogprobs
from deltic.runner.logit_masks import forbids, offsets
from deltic.runner.penalties import Penalties, changes_logits, penalizes
from deltic.runner.upload import HostToDeviceBuffer, upload


@dataclass(frozen=True, slots=True)
class SampleRow:
    """One draw: the sequence's next token, or the one after these drafts, if they are right. mask: the allowed tokens,
    as in `Constraint`; None: all."""

    sequence: Sequence
    drafts: tuple[int, ...] = ()
    mask: bytes | None = None

    @property
    def position(self) -> int:
        """The position of the sampled token."""
        return len(self.sequence.tokens) + len(self.drafts)


class AnswerKeys:
    """The noise keys of answers on a device, kept while the same sequences sample."""

    def __init__(self) -> None:
        self._sequences: list[Sequence] = []
        self._keys = torch.empty(0, dtype=torch.int64)

    def write_keys(self, sequences: list[Sequence], done: Tensor, keys: Tensor) -> None:
        """Writes the keys [R, n] int64 of the draws after rows' first tokens and the following ones. done [R] int64:
        cursors of the first tokens, on the device."""
        row_keys(self._of(sequences, keys.device), done, keys)

    def _of(self, sequences: list[Sequence], device: torch.device) -> Tensor:
        if sequences != self._sequences or self._keys.device != device:
            known = array("q", [answer_key(sequence.seed, sequence.choice) for sequence in sequences])
            self._sequences, self._keys = sequences, upload(known, torch.int64, device)
        return self._keys


class SamplingTable:
    """The sampling parameters of successive steps: all but keys and penalties are kept while the same sequences sample.
    On a CPU results are valid until the next draw."""

    def __init__(self, lands: bool = False) -> None:
        """lands: a GPU writes its results to host memory, which must be read before the next draw but one."""
        self._lands, self._turn = lands, 0
        self._landings: dict[tuple[int, int], Tensor] = {}  # kept: a step that is not collected writes there, too
        self._sequences: list[Sequence] = []
        self._sampling = Sampling(*(torch.empty(0),) * 5)
        self._adjusts, self._keys = False, HostToDeviceBuffer(torch.empty(0, dtype=torch.int64))
        self._turns = self._sampling, self._sampling
        self._answers = AnswerKeys()

    def of(
        self, draws: List[SampleRow], device: torch.device, vocabulary: int, begins: Tensor | None = None
    ) -> Sampling:
        """Returns the parameters; row i is draw i. vocabulary: the number of logits. begins [R] int64, on the device:
        the cursors of the rows, which have equally many draws; None: the host knows the positions."""
        sequences = [draw.sequence for draw in draws]
        if sequences != self._sequences:
            params = [sequence.sampling for sequence in sequences]
            self._sequences, self._sampling = sequences, _sampling(params, device)
            if not self._sampling.greedy or device.type == "cpu":
                self._keys = HostToDeviceBuffer(torch.zeros(len(draws), dtype=torch.int64, device=device))
                self._sampling = replace(self._sampling, key=self._keys.numbers,
                                         kept={} if device.type == "cpu" else None)
            self._turns = self._landing(len(draws), device, 0), self._landing(len(draws), device, 1)
            self._adjusts = any(p.min_tokens or penalizes(p) for p in params)
        adjusts = self._adjusts or any(draw.mask is not None for draw in draws)
        adjust = _adjust(draws, device, vocabulary) if adjusts else None
        if not self._sampling.greedy and begins is not None:
            self._answers.write_keys(sequences[::len(draws) // len(begins)], begins,
                                     self._keys.numbers.view(len(begins), -1))
        elif not self._sampling.greedy:
            self._keys.begin()[:] = [0 if draw.sequence.sampling.temperature == 0 else
                                     sample_key(draw.sequence.seed, draw.sequence.choice, draw.position)
                                     for draw in draws]
            self._keys.send()
        self._turn ^= 1
        sampling = self._turns[self._turn]
        return sampling if adjust is None else replace(sampling, adjust=adjust)

    def _landing(self, draws: int, device: torch.device, turn: int) -> Sampling:
        if not self._lands or device.type != "cuda":
            return self._sampling
        if (draws, turn) not in self._landings:
            self._landings[draws, turn] = torch.zeros(2 * draws, dtype=torch.int64, pin_memory=True)
        return replace(self._sampling, landing=self._landings[draws, turn])


def sampling_of(draws: List[SampleRow], device: torch.device, vocabulary: int) -> Sampling:
    """As `SamplingTable.of`, without a table."""
    return SamplingTable().of(draws, device, vocabulary)


def _sampling(params: List[SamplingParams], device: torch.device) -> Sampling:
    """All but keys and penalties."""
    greedy, reports = all(p.temperature == 0 for p in params), [p.logprobs for p in params if p.logprobs is not None]
    if greedy and not reports:
        return _greedy(len(params), device)
    numbers = array("f", [_number(p.temperature, 1.0) for p in params])
    numbers.extend(_number(p.top_p, 1.0) for p in params)
    numbers.extend(_number(p.min_p, 0.0) for p in params)
    temperature, top_p, min_p = upload(numbers, torch.float32, device).view(3, -1)
    top_k = upload(array("q", [p.top_k or 0 for p in params]), torch.int64, device)
    return Sampling(
        temperature=temperature, top_p=top_p, min_p=min_p, top_k=top_k, key=torch.zeros_like(top_k), greedy=greedy,
        filtered=not greedy and any(map(_filters, params)), top_logprobs=max(reports) if reports else None)


@cache
def _greedy(rows: int, device: torch.device) -> Sampling:
    """The parameters of greedy sequences without reports."""
    zeros, integers = torch.zeros(rows, device=device), torch.zeros(rows, dtype=torch.int64, device=device)
    return Sampling(zeros, integers, zeros + 1, zeros, integers)


def _number(value: float | None, neutral: float) -> float:
    return neutral if value is None else value


def _filters(params: SamplingParams) -> bool:
    return bool(params.top_k) or _number(params.top_p, 1.0) < 1 or bool(params.min_p)


def _adjust(draws: List[SampleRow], device: torch.device, vocabulary: int) -> Adjust | None:
    tables, singles, prompts = list[LogitTable](), list[tuple[int, int, float, float]](), dict[int, Penalties]()
    for row, draw in enumerate(draws):
        mask, table = draw.mask, None
        if changes_logits(draw.sequence):
            penalties = _penalties(draw.sequence, device, vocabulary, prompts)
            table = penalties.table(draw.sequence, row, vocabulary)
            if table and draw.drafts:
                singles += [(row, *entry) for entry in penalties.after_drafts(draw.sequence, draw.drafts)
                            if entry[0] < vocabulary and not (mask and forbids(mask, entry[0]))]
        if mask is not None:
            table = _masked(table or LogitTable(row, None, None), mask, vocabulary, device)
        if table:
            tables.append(table)
    if not tables:
        return None
    rows, tokens, repetitions, offsets = zip(*singles, strict=True) if singles else ((), (), (), ())
    return Adjust(torch.tensor(rows, dtype=torch.int64, device=device),
                  torch.tensor(tokens, dtype=torch.int64, device=device),
                  torch.tensor(repetitions, dtype=torch.float32, device=device),
                  torch.tensor(offsets, dtype=torch.float32, device=device), tuple(tables))


def _masked(table: LogitTable, mask: bytes, vocabulary: int, device: torch.device) -> LogitTable:
    """Adds a mask to a table."""
    masked = offsets(mask, vocabulary, device)
    return replace(table, offset=masked if table.offset is None else masked.add_(table.offset))


def _penalties(sequence: Sequence, device: torch.device, vocabulary: int, prompts: dict[int, Penalties]) -> Penalties:
    """The penalties of a sequence. prompts: those at the ends of prompts by request, shared by all choices."""
    known: Penalties | None = sequence.sampler.penalties
    if known is None:
        shared = None if sequence.generated else prompts.get(id(sequence.request))
        known = shared.fork() if shared else Penalties(sequence, vocabulary, device)
        if not sequence.generated:
            prompts[id(sequence.request)] = known
        sequence.sampler.penalties = known
    return known


def logprobs_of(sampled: Sampled, row: int, wanted: int | None) -> TokenLogprobs | None:
    """The log probabilities of one row, with as many top tokens as its request wants."""
    if wanted is None or sampled.logprobs is None or sampled.top_tokens is None or sampled.top_logprobs is None:
        return None
    top = zip(sampled.top_tokens[row, :wanted].tolist(), sampled.top_logprobs[row, :wanted].tolist(), strict=True)
    return TokenLogprobs(float(sampled.logprobs[row]), tuple(top))


@dataclass(frozen=True, slots=True)
class TokenRanks:
    """Log probabilities [n] float32 and ranks [n] of n known tokens, and those of the k most probable tokens [n, k]."""

    token: Tensor
    rank: Tensor
    top: Tensor
    top_tokens: Tensor

    def report(self) -> list[TokenLogprobs]:
        """Waits for the device."""
        tops = zip(self.top_tokens.tolist(), self.top.tolist(), strict=True)
        return [TokenLogprobs(token, tuple(zip(*top, strict=True)), rank)
                for token, rank, top in zip(self.token.tolist(), self.rank.tolist(), tops, strict=True)]


def scores_of(logits: Tensor, tokens: List[int], top: int) -> TokenRanks:
    """Log probabilities of known tokens and of the `top` most probable ones. logits [n, V]: one row for each token.

    The most probable ones are selected row by row, because the choice among equal ones on a GPU depends on the number
    of rows.
    """
    chances = logits.double().log_softmax(-1)
    known = chances.gather(1, torch.tensor(list(tokens), device=logits.device)[:, None])
    ranks = (chances > known).sum(1) + 1
    values, names = (torch.stack(column) for column in zip(*(row.topk(top) for row in chances), strict=True))
    return TokenRanks(known[:, 0].float(), ranks, values.float(), names)
