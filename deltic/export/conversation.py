"""One conversation in a program, without the engine and without torch: prompts in, logits out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, Protocol

from deltic.errors import RequestError
from deltic.export.program import Program
from deltic.params import common_length

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_LIVE, _KEPT = 0, 1
_HISTORY: Final = 4


class Rewinds(Program, Protocol):
    """A program that can take back tokens."""

    def reserve(self, slots: int, tokens: int, history: int = 1) -> None:
        """As of a program; history: states of each slot, the present one and those to which `rewind` may return."""

    def rewind(self, slot: int, count: int) -> bool:
        """Take back the slot's last tokens; False, and no change, if the states before them are not there any more."""


class ProgramConversation:
    """What a prompt has in common with what was read before is not read again.

        talk = Conversation(open_program(Path("compiled"), EngineConfig()))
        logits = talk.read(prompt)
        while token not in ends: logits = talk.read([*prompt, *answer])

    Attention's K/V could be cut anywhere, recurrent states only where they are kept: those of the last single tokens,
    and that of the end of the last prompt. If none of them will do, the prompt is read from its start.

    computed: tokens that the last call has read.
    """

    def __init__(self, program: Rewinds) -> None:
        self.program, self.computed, self._history, self._prompt = program, 0, list[int](), 0
        program.reserve(2, 2 * program.info.max_context, _HISTORY)
        program.start(_LIVE)

    def read(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        """The logits [V] after these tokens, which are all of the conversation; valid until the next call. RequestError
        if there are none, or more than the context holds."""
        prompt, limit = [*tokens], self.program.info.max_context
        if not prompt:
            raise RequestError("there are no tokens to read: give at least one", "tokens")
        if len(prompt) > limit:
            raise RequestError(f"{len(prompt)} tokens are more than the context of {limit} holds", "tokens")
        # the last token is read again where nothing is new: its logits are wanted
        start = self._return_to(min(common_length(self._history, prompt), len(prompt) - 1))
        self._history, self.computed = prompt[:start], len(prompt) - start
        logits = self.program.feed(_LIVE, prompt[start:])
        self._history = prompt
        if self.computed > 1:
            self.program.copy(_LIVE, _KEPT)
            self._prompt = len(prompt)
        return logits

    def _return_to(self, common: int) -> int:
        """Go back to where the history has so many tokens, or to where fewer are; returns how many."""
        program, known = self.program, len(self._history)
        if _LIVE not in program.slots or program.position(_LIVE) != known:
            program.start(_LIVE)  # a step has failed in the middle
            return 0
        if known == common or program.rewind(_LIVE, known - common):
            self._prompt = self._prompt if self._prompt <= common else 0
            return common
        if 0 < self._prompt <= common:
            program.copy(_KEPT, _LIVE)
            return self._prompt
        program.start(_LIVE)
        self._prompt = 0
        return 0
