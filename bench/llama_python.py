"""llama.cpp through llama-cpp-python: a model that is fed token ids, of several sequences at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class Llama:
    """A GGUF file in llama.cpp.

    context: tokens of each of the sequences. batch: tokens that are fed at once, at most.
    mapped: weights stay where mmap puts them; otherwise they may be copied into an order that computes faster.
    """

    def __init__(self, path: str, threads: int, sequences: int, context: int, batch: int = 512,
                 mapped: bool = False) -> None:
        import llama_cpp  # type: ignore[import-not-found, unused-ignore]

        self.facts = {"version": llama_cpp.__version__, "mapped": mapped}
        self._api: Any = llama_cpp.llama_cpp
        self._api.llama_backend_init()
        options = self._api.llama_model_default_params()
        options.use_extra_bufts = not mapped
        self._model = self._api.llama_model_load_from_file(path.encode(), options)
        settings = self._api.llama_context_default_params()
        settings.n_ctx, settings.n_seq_max = context * sequences, sequences
        settings.n_batch = settings.n_ubatch = batch
        settings.n_threads = settings.n_threads_batch = threads
        self._context = self._api.llama_init_from_model(self._model, settings)
        if not self._model or not self._context:
            raise SystemExit(f"llama.cpp cannot load {path}")
        self._batch = self._api.llama_batch_init(batch, 0, 1)
        self._done = [0] * sequences

    def forget(self) -> None:
        """Every sequence begins anew."""
        self._api.llama_memory_clear(self._api.llama_get_memory(self._context), False)
        self._done = [0] * len(self._done)

    def feed(self, tokens: Sequence[Sequence[int]]) -> None:
        """The next tokens of each sequence, all of them in one batch; logits of each one's last."""
        batch, place = self._batch, 0
        for sequence, ids in enumerate(tokens):
            for index, token in enumerate(ids):
                batch.token[place], batch.pos[place] = token, self._done[sequence] + index
                batch.n_seq_id[place], batch.seq_id[place][0] = 1, sequence
                batch.logits[place] = index == len(ids) - 1
                place += 1
            self._done[sequence] += len(ids)
        batch.n_tokens = place
        if code := self._api.llama_decode(self._context, batch):
            raise SystemExit(f"llama_decode gave {code}")
        self._api.llama_synchronize(self._context)
