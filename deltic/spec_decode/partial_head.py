"""Lets the model draft for itself, and defers the pass over its matrix of logits.

The layers process each token of a group once, in order. A part of the matrix chooses the token that they process next.
Then one pass over the whole matrix gives the logits after each token, so its bytes are read once for the group. These
logits are the model's own: a draft that differs from the token drawn from them ends the group, and the layers' work on
later tokens is dropped with the state delta log.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as List
from dataclasses import dataclass, replace
from itertools import chain
from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor

from deltic.engine.sequence import Sequence
from deltic.engine.step_plan import PlannedRow, StepPlan
from deltic.model.draft_vocabulary import DraftVocabulary
from deltic.model.partial_head import PartialHead
from deltic.runner.input_batch import InputBatch, build
from deltic.runner.sampling import SampleRow, SamplingTable
from deltic.spec_decode.draft_length import Acceptance
from deltic.spec_decode.mtp import Wants

if TYPE_CHECKING:
    from deltic.runner.model_runner import Model

MAX_ROWS: Final = 4
"""Maximum number of sequences in a step with groups: with more, arithmetic costs more than reading the matrix."""
_PATIENCE: Final = 24
"""Number of tokens of an answer before the part is built: shorter answers end before the part pays."""
_MAX_SEEN: Final = 2048
"""Maximum number of tokens of a sequence that `see` handles in one step: a millisecond, if all are new."""


class HeadProposer:
    """Plans groups of tokens for the model to draft in the step that verifies them."""

    def __init__(self, runtime: Model, head: PartialHead, limit: int) -> None:
        self.limit, self.head, self._runtime = limit, head, runtime
        self._memory, self._params = InputBatch(), SamplingTable()
        self._seen: dict[Sequence, int] = {}

    def draft(self, wants: Wants) -> list[list[int]]:
        """Returns no drafts. It is called if the host would have to know the drafts of the step."""
        return [[] for _ in wants]

    def take_groups(self, wants: Wants) -> TokenGroups | None:
        """Returns the groups of the next step; None if a mask or a forced token depends on drafts, if an adapter may
        change the matrix, or if the part is not built yet."""
        asks = any(sequence.guide or sequence.constraint or sequence.adapter for sequence, _ in wants)
        if self.head.vocabulary is None or asks:
            return None
        return TokenGroups(self, frozenset(sequence for sequence, _ in wants), max(count for _, count in wants))

    def observe(self, sequence: Sequence, acceptance: Acceptance) -> None:
        """Records for each new token of a sequence, as if it had been a draft, if the part contains it. Then adds the
        missing tokens to the part."""
        vocabulary = self.head.vocabulary
        if vocabulary is None:
            if sequence.generated >= _PATIENCE:
                self.head.start_build()
            return
        begin = self._seen.get(sequence, 0)
        end = self._seen[sequence] = min(begin + _MAX_SEEN, len(sequence.tokens))
        for place in range(begin, end):
            acceptance.observe(self.knows(vocabulary, sequence, place))
        vocabulary.see(sequence.tokens[begin:end])

    def knows(self, vocabulary: DraftVocabulary, sequence: Sequence, place: int) -> bool:
        """True if the part contains the token at this place."""
        return sequence.tokens[place] in vocabulary

    def forget(self, sequence: Sequence) -> None:
        self._seen.pop(sequence, None)

    def choose(self, hidden: Tensor, draws: List[SampleRow]) -> list[int]:
        """Draws the next draft of each sequence as the model would, from the part's logits. hidden [R, H]."""
        vocabulary = self.head.vocabulary
        assert vocabulary is not None
        logits = self.head.partial(hidden, vocabulary)
        sampling = self._params.of(draws, logits.device, vocabulary.size)
        if sampling.greedy and sampling.adjust is None:
            return vocabulary.ids[logits.argmax(-1)].tolist()
        spread = vocabulary.spread(logits)
        return self._runtime.sample(spread, replace(sampling, top_logprobs=None)).tokens.tolist()

    def run(self, rows: List[PlannedRow], sequences: List[Sequence]) -> tuple[list[PlannedRow], Tensor]:
        """Runs rows with drafts that are not chosen yet. Returns the rows with their drafts, and the logits [L, V]
        float32 after each token."""
        runtime, tokens = self._runtime, [[row.tokens[0]] for row in rows]
        hidden = [list[Tensor]() for _ in rows]
        for index in range(max(row.drafts for row in rows) + 1):
            active = [number for number, row in enumerate(rows) if row.drafts >= index]
            plan = StepPlan(tuple([_single(rows[number], index, tokens[number][-1]) for number in active]))
            states = runtime.run_hidden(build(plan, runtime.device, hidden=True, memory=self._memory))[1]
            assert states is not None
            for number, state in zip(active, states.clone(), strict=True):  # the next token overwrites the states
                hidden[number].append(state)
            active = [number for number in active if rows[number].drafts > index]
            if active:
                draws = [SampleRow(sequences[number], tuple(tokens[number][1:])) for number in active]
                drawn = self.choose(torch.stack([hidden[number][-1] for number in active]), draws)
                for number, token in zip(active, drawn, strict=True):
                    tokens[number].append(token)
        found = [replace(row, tokens=tuple(own)) for row, own in zip(rows, tokens, strict=True)]
        return found, self.head.whole(torch.stack([*chain(*hidden)]))


@dataclass(frozen=True, slots=True)
class TokenGroups:
    """Groups of tokens that a step drafts by itself. most: the largest number of drafts of a sequence."""

    proposer: HeadProposer
    sequences: frozenset[Sequence]
    most: int

    def covers(self, sequences: Iterable[Sequence]) -> bool:
        """True if all of these sequences have groups."""
        return self.sequences.issuperset(sequences)

    def resolve(self, plan: StepPlan, sequences: list[Sequence]) -> tuple[StepPlan, list[Sequence]]:
        """Returns the plan without drafts, and the sequence of each row. Used if other sequences join the step."""
        rows = [replace(row, tokens=row.tokens[:1], logits=1, drafts=0) if row.drafts else row for row in plan.rows]
        order = sorted(range(len(rows)), key=lambda index: (len(rows[index].tokens) > 1, rows[index].slot))
        return replace(plan, rows=tuple([rows[index] for index in order])), [sequences[index] for index in order]


def _single(row: PlannedRow, index: int, token: int) -> PlannedRow:
    """Returns the row of token `index` of a group, without logits. The first token is no draft: it writes the state, so
    that the log has no more than the drafts, and a step replays few tokens."""
    done, base = row.done + index, row.done + 1
    if not index:
        base = row.done if row.base is None else row.base
    rotary = row.rotary if isinstance(row.rotary, int) else (
        row.rotary[0][index:index + 1], row.rotary[1][index:index + 1], row.rotary[2][index:index + 1])
    checkpoints = tuple([each for each in row.checkpoints if each[0] == done + 1])
    return replace(row, tokens=(token,), done=done, logits=0, drafts=0, base=base, append=index > 0,
                   checkpoints=checkpoints, rotary=rotary)
