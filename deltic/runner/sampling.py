"""Turns the sampling parameters of a step into tensors, with which `ops.sample` samples."""

from __future__ import annotations

import time
from array import array
from collections import Counter
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as List
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cache, partial

import torch
from torch import Tensor

from deltic.engine.fair_executor import FairExecutor
from deltic.engine.sequence import Sequence
from deltic.ops.cuda.staging import row_keys
from deltic.ops.noise import answer_key, sample_key
from deltic.ops.types import Adjust, LogitTable, Sampled, Sampling
from deltic.params import MAX_LOGIT_BIAS, SamplingParams, TokenLogprobs
from deltic.runner.upload import HostToDeviceBuffer, upload


@dataclass(frozen=True, slots=True)
class SampleRow:
    """One draw: the sequence's next token, or the token after these drafts, which counts if they are right. mask: the
    allowed tokens, as in `Constraint`; None: all."""

    sequence: Sequence
    drafts: tuple[int, ...] = ()
    mask: bytes | None = None

    @property
    def position(self) -> int:
        """The position of the sampled token."""
        return len(self.sequence.tokens) + len(self.drafts)


class AnswerKeys:
    """Noise keys of answers on a device. They are reused while the same sequences sample."""

    def __init__(self) -> None:
        self._sequences: list[Sequence] = []
        self._keys = torch.empty(0, dtype=torch.int64)

    def write_keys(self, sequences: list[Sequence], done: Tensor, keys: Tensor) -> None:
        """Writes the keys [R, n] int64 of each row's n draws, which follow its first token and the tokens after it.
        done [R] int64: cursors of the first tokens, on the device."""
        row_keys(self._of(sequences, keys.device), done, keys)

    def _of(self, sequences: list[Sequence], device: torch.device) -> Tensor:
        if sequences != self._sequences or self._keys.device != device:
            known = array("q", [answer_key(sequence.seed, sequence.choice) for sequence in sequences])
            self._sequences, self._keys = sequences, upload(known, torch.int64, device)
        return self._keys


class SamplingTable:
    """The sampling parameters of successive steps. All except keys and penalties are reused while the same sequences
    sample. On a CPU results are valid until the next draw."""

    def __init__(self, lands: bool = False) -> None:
        """lands: a GPU writes its results to host memory, which must be read before the next draw but one."""
        self._lands, self._turn = lands, 0
        self._landings: dict[tuple[int, int], Tensor] = {}  # kept, as a step that is not collected writes there, too
        self._sequences: list[Sequence] = []
        self._sampling = Sampling(*(torch.empty(0),) * 5)
        self._adjusts, self._keys = False, HostToDeviceBuffer(torch.empty(0, dtype=torch.int64))
        self._turns = self._sampling, self._sampling
        self._answers = AnswerKeys()

    def of(
        self, draws: List[SampleRow], device: torch.device, vocabulary: int, begins: Tensor | None = None
    ) -> Sampling:
        """Returns the parameters; row i is draw i. vocabulary: number of logits. begins [R] int64, on the device: the
        cursors of the rows, which all have the same number of draws; None: the host knows the positions."""
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
    """As `SamplingTable.of`, for a single step."""
    return SamplingTable().of(draws, device, vocabulary)


def _sampling(params: List[SamplingParams], device: torch.device) -> Sampling:
    """Returns the parameters without keys and penalties."""
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
    """Returns the parameters of greedy sequences that report no log probabilities."""
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
    """Returns a table with a mask added."""
    masked = offsets(mask, vocabulary, device)
    return replace(table, offset=masked if table.offset is None else masked.add_(table.offset))


def _penalties(sequence: Sequence, device: torch.device, vocabulary: int, prompts: dict[int, Penalties]) -> Penalties:
    """Returns the penalties of a sequence. prompts: by request, those at the prompt's end, which its choices share."""
    known: Penalties | None = sequence.sampler.penalties
    if known is None:
        shared = None if sequence.generated else prompts.get(id(sequence.request))
        known = shared.fork() if shared else Penalties(sequence, vocabulary, device)
        if not sequence.generated:
            prompts[id(sequence.request)] = known
        sequence.sampler.penalties = known
    return known


def logprobs_of(sampled: Sampled, row: int, wanted: int | None) -> TokenLogprobs | None:
    """Returns the log probabilities of one row with `wanted` top tokens; None if the request wants none."""
    if wanted is None or sampled.logprobs is None or sampled.top_tokens is None or sampled.top_logprobs is None:
        return None
    top = zip(sampled.top_tokens[row, :wanted].tolist(), sampled.top_logprobs[row, :wanted].tolist(), strict=True)
    return TokenLogprobs(float(sampled.logprobs[row]), tuple(top))


@dataclass(frozen=True, slots=True)
class TokenRanks:
    """Log probabilities [n] float32 and ranks [n] of n known tokens; log probabilities and ids of the top k [n, k]."""

    token: Tensor
    rank: Tensor
    top: Tensor
    top_tokens: Tensor

    def report(self) -> list[TokenLogprobs]:
        """Returns the numbers on the host, after waiting for the device."""
        tops = zip(self.top_tokens.tolist(), self.top.tolist(), strict=True)
        return [TokenLogprobs(token, tuple(zip(*top, strict=True)), rank)
                for token, rank, top in zip(self.token.tolist(), self.rank.tolist(), tops, strict=True)]


def scores_of(logits: Tensor, tokens: List[int], top: int) -> TokenRanks:
    """Returns log probabilities of known tokens and of the `top` most probable ones. logits [n, V]: a row per token.

    Selects the most probable tokens row by row, because the choice among equal ones on a GPU depends on the number of
    rows.
    """
    chances = logits.double().log_softmax(-1)
    known = chances.gather(1, torch.tensor(list(tokens), device=logits.device)[:, None])
    ranks = (chances > known).sum(1) + 1
    values, names = (torch.stack(column) for column in zip(*(row.topk(top) for row in chances), strict=True))
    return TokenRanks(known[:, 0].float(), ranks, values.float(), names)


_FORBIDDEN = float("-inf")


def penalizes(params: SamplingParams) -> bool:
    """Returns True if the parameters change logits throughout the answer."""
    return bool(params.repetition_penalty not in (None, 1.0) or params.presence_penalty or params.frequency_penalty
                or params.logit_bias)


def changes_logits(sequence: Sequence) -> bool:
    """Returns True if the parameters may change logits of this sequence's next tokens."""
    params = sequence.sampling
    return penalizes(params) or _is_short(sequence)


def _is_short(sequence: Sequence, drafts: int = 0) -> bool:
    """Returns True if `min_tokens` forbids an end after `drafts` drafts. With a constraint, `LogitMasks` does that."""
    return bool(sequence.eos and sequence.constraint is None
                and sequence.generated + drafts < sequence.sampling.min_tokens)


class Penalties:
    """The changes of one sequence's next logits, over the whole vocabulary.

    Each call adds only the tokens since the last one, so a step costs time in proportion to its new tokens. Choices of
    one request share the tensors until they differ.
    """

    __slots__ = ("_offset", "_penalizes", "_read", "_repetition", "_shared", "_short", "factor")

    def __init__(self, sequence: Sequence, vocabulary: int, device: torch.device) -> None:
        params = sequence.sampling
        self._shared = False
        self.factor = 1.0 if params.repetition_penalty is None else params.repetition_penalty
        self._penalizes = bool(params.presence_penalty or params.frequency_penalty)
        self._read = len(sequence.tokens)
        self._short = _is_short(sequence)
        self._repetition: Tensor | None = None
        self._offset: Tensor | None = None
        if self.factor != 1.0:
            self._repetition = torch.ones(vocabulary, device=device)
            self._repetition[torch.frombuffer(array("q", sequence.tokens), dtype=torch.int64).to(device)] = self.factor
        if self._penalizes or params.logit_bias or self._short:
            self._offset = torch.zeros(vocabulary, device=device)
            changed = {*params.logit_bias, *(sequence.sampler.counts if self._penalizes else ()),
                       *(sequence.eos if self._short else ())}
            self._write(sequence, self._offset, changed)

    def fork(self) -> Penalties:
        """Returns a copy for another choice of the request, which shares the tensors."""
        other = object.__new__(Penalties)
        self._shared = True
        for name in self.__slots__:
            setattr(other, name, getattr(self, name))
        return other

    def table(self, sequence: Sequence, row: int, vocabulary: int) -> LogitTable | None:
        """Returns the changes of a row's logits for the sequence's next token; None if there are none."""
        self._follow(sequence)
        if self._repetition is None and self._offset is None:
            return None
        return LogitTable(row, *(None if tensor is None else tensor[:vocabulary]
                            for tensor in (self._repetition, self._offset)))

    def after_drafts(self, sequence: Sequence, drafts: tuple[int, ...]) -> Iterator[tuple[int, float, float]]:
        """Yields the differences from `table` after these drafts: tokens, their repetition factors and offsets. Call it
        after `table`."""
        counts = Counter(drafts if self._repetition is not None or self._penalizes else ())
        short = _is_short(sequence, len(drafts))
        for token in {*counts, *(sequence.eos if self._short and not short else ())}:
            met = token in counts or (self._repetition is not None and float(self._repetition[token]) != 1.0)
            yield (token, self.factor if met else 1.0,
                   _offset(sequence.sampling, token, sequence.sampler.counts[token] + counts[token],
                           short and token in sequence.eos))

    def _follow(self, sequence: Sequence) -> None:
        """Updates the tensors with the tokens since the last call."""
        params, new = sequence.sampling, {*sequence.tokens[self._read:]}
        self._read = len(sequence.tokens)
        if self._repetition is not None and new:
            self._own()
            for token in new:
                self._repetition[token] = self.factor
        changed = new if self._penalizes else set[int]()
        if self._short and sequence.generated >= params.min_tokens:
            self._short, changed = False, {*changed, *sequence.eos}
        if self._offset is None or not changed:
            return
        if not self._penalizes and not params.logit_bias:
            self._offset = None  # only `min_tokens` had changed logits
            return
        self._own()
        self._write(sequence, self._offset, changed)

    def _own(self) -> None:
        """Copies the tensors if other choices share them."""
        if self._shared:
            self._repetition, self._offset = (None if tensor is None else tensor.clone()
                                              for tensor in (self._repetition, self._offset))
            self._shared = False

    def _write(self, sequence: Sequence, offset: Tensor, tokens: set[int]) -> None:
        places = array("q", tokens)
        if not places:
            return
        values = array("f", [_offset(sequence.sampling, token, sequence.sampler.counts[token] if self._penalizes else 0,
                                     self._short and token in sequence.eos) for token in places])
        offset[torch.frombuffer(places, dtype=torch.int64).to(offset.device)] = torch.frombuffer(
            values, dtype=torch.float32).to(offset.device)


def _offset(params: SamplingParams, token: int, count: int, banned: bool) -> float:
    """Returns the logit offset of a token that occurs `count` times in the answer."""
    if banned:
        return _FORBIDDEN
    bias = params.logit_bias.get(token)
    if bias is not None and bias <= -MAX_LOGIT_BIAS:
        return _FORBIDDEN
    penalty = params.presence_penalty + params.frequency_penalty * count if count else 0.0
    return (0.0 if bias is None else bias) - penalty


_THREADS = 2
"""Threads that compute masks: without the interpreter's lock, usually in a fraction of a millisecond."""
SLOW = 0.002
"""Processor seconds per mask from which on a sequence's masks count as slow: then its next mask is computed before the
sequence may run again, so that other sequences do not wait for it."""

Asked = Mapping[Sequence, "Future[list[bytes | None]]"]
"""The masks of each sequence: for its next token and for the token after each draft; None: all tokens are allowed."""


class LogitMasks:
    """Computes the masks of constraints in threads."""

    def __init__(self) -> None:
        self._threads: ThreadPoolExecutor | None = None
        self._slow_threads: FairExecutor | None = None

    def begin(self, running: List[Sequence]) -> None:
        """Starts the next mask of each sequence with slow masks, in a thread that clients share fairly by processor
        time. Such sequences have no drafts."""
        for sequence in running:
            if slow(sequence) and sequence.sampler.mask is None and sequence.answering:
                self._slow_threads = self._slow_threads or FairExecutor(1, "deltic-slow-masks")
                sequence.sampler.mask = self._slow_threads.submit(sequence.client, partial(_masks, sequence, ()))

    def ask(self, sequences: List[tuple[Sequence, tuple[int, ...]]]) -> Asked:
        """Starts the masks of the sequences with constraints, for their next tokens and drafts."""
        wanted = [(sequence, drafts) for sequence, drafts in sequences if sequence.constraint]
        if wanted and self._threads is None:
            self._threads = ThreadPoolExecutor(_THREADS, "deltic-masks")
        return {sequence: self._asked(self._threads, sequence, drafts) for sequence, drafts in wanted if self._threads}

    @staticmethod
    def _asked(threads: ThreadPoolExecutor, sequence: Sequence, drafts: tuple[int, ...]) -> Future[list[bytes | None]]:
        """Returns the future of a sequence's masks: that of `begin`, if there is one and the sequence has no drafts."""
        begun, sequence.sampler.mask = sequence.sampler.mask, None
        if begun is None:
            return threads.submit(_masks, sequence, drafts)
        return threads.submit(_masks_after, begun, sequence, drafts) if drafts else begun


def slow(sequence: Sequence) -> bool:
    """Returns True if the last masks of a sequence were slow."""
    return sequence.sampler.mask_seconds >= SLOW


def offsets(mask: bytes, vocabulary: int, device: torch.device) -> Tensor:
    """Returns offsets [vocabulary] float32 of logits: 0 where the mask's bit is set, -inf elsewhere."""
    size = -(-vocabulary // 8)
    whole = torch.frombuffer(bytearray(mask[:size].ljust(size, b"\0")), dtype=torch.uint8)
    return _table(device)[whole.to(device).int()].view(-1)[:vocabulary]


def forbids(mask: bytes, token: int) -> bool:
    return token >= 8 * len(mask) or not mask[token >> 3] >> (token & 7) & 1


def _masks(sequence: Sequence, drafts: tuple[int, ...]) -> list[bytes | None]:
    assert sequence.constraint
    began = time.thread_time()
    masks = sequence.constraint.allowed(drafts)
    sequence.sampler.mask_seconds = (time.thread_time() - began) / len(masks)
    return [mask and _without_ends(sequence, mask, sequence.generated + place) for place, mask in enumerate(masks)]


def _masks_after(begun: Future[list[bytes | None]], sequence: Sequence, drafts: tuple[int, ...]
                 ) -> list[bytes | None]:
    """Computes masks after waiting for `begun`, because a constraint serves one thread at a time."""
    begun.exception()
    return _masks(sequence, drafts)


def _without_ends(sequence: Sequence, mask: bytes, generated: int) -> bytes:
    """Returns the mask without the end tokens that are not allowed yet, unless it allows no other tokens."""
    params = sequence.sampling
    if generated < params.min_tokens:
        ends = sequence.eos
    elif params.ignore_eos:
        ends = sequence.eos.difference(params.stop_token_ids)
    else:
        return mask
    rest = bytearray(mask)
    for end in ends:
        if end < 8 * len(rest):
            rest[end >> 3] &= ~(1 << (end & 7))
    return bytes(rest) if rest.count(0) < len(rest) else mask


@cache
def _table(device: torch.device) -> Tensor:
    """Returns the offsets [256, 8] for each value of a mask byte."""
    bits = torch.arange(256)[:, None] >> torch.arange(8) & 1
    return torch.where(bits == 1, 0.0, -torch.inf).to(device)
