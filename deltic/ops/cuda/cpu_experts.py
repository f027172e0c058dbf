"""What kernels are told of the host's threads that compute experts beside the card (kernels/beside.cuh)."""

from __future__ import annotations

import torch

from deltic.ops.cpu.offloaded_experts import TOKENS, OffloadedExperts

PATIENCE = 5.0
"""Seconds that the card waits for the host. Then its tokens become NaN, an error of their requests, as a card that
waits for ever would have to be reset."""
_STATE = 4
"""Numbers that the card keeps, before those of each token."""


class HostExperts:
    """The mailbox of `beside`, as members of the kernels' structs.

    request: of `AskHostArgs`. answer: of `AddHostArgs`.
    """

    def __init__(self, beside: OffloadedExperts, device: torch.device, patience: float | None = None) -> None:
        """To be made when the host itself has asked for the last time: the card counts on from there. patience: seconds
        instead of `PATIENCE`."""
        patience = PATIENCE if patience is None else patience
        self.beside, self._before = beside, (beside.computed(), beside.computing())
        state = torch.zeros(_STATE + TOKENS, dtype=torch.int32)
        state[0] = beside.words[0][0]
        self._state = state.to(device)
        request, answer = beside.words
        self.request: dict[str, object] = {
            "state": self._state, "request": request, "answer": answer, "counts": beside.counts,
            "experts": beside.experts, "shares": beside.shares, "factors": beside.factors, "input": beside.input}
        self.answer: dict[str, object] = {"state": self._state, "answer": answer, "sums": beside.sums,
                                          "limit": round(patience * 1e9)}

    def computed(self) -> int:
        """Experts that were computed for the card, each once for a request. For any thread."""
        return self.beside.computed() - self._before[0]

    def computing(self) -> float:
        """Seconds that these took. For any thread."""
        return self.beside.computing() - self._before[1]
