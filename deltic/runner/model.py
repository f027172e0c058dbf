"""What an engine steps."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from deltic.cache.manager import HybridCache
from deltic.cache.memory_plan import MemoryPlan
from deltic.config import EngineConfig, GenerationDefaults, ModelConfig
from deltic.ops.types import Batch, Sampled, Sampling
from deltic.runner.expert_offload import ExpertOffload
from deltic.runner.image_embeds import Encode
from deltic.runner.input_batch import BucketNumbers
from deltic.spec_decode.mtp import MtpRunner


class Model(Protocol):
    """A model with its cache, wherever it computes.

    name: what people call it.
    config: what the checkpoint is.
    options: how it is run, with the limits of a request.
    generation: what is taken where a request leaves something open.
    memory: how much may run at once.
    cache: grants the pages and slots that batches name, and carries out what it asks to be done to them
        (`cache.pools`).
    mtp_runner: the draft head over this cache, if it is used.
    draft: the model that drafts for this one, if another does.
    encode: makes rows of pictures, if it sees.
    experts: those that are not all in memory, if it has such.
    verifies: steps with drafts have buckets, as those that only decode (`engine.batch`); then drafts and prompts are
        not to be in one step.
    defers_state_writes: in steps of many rows, what most tokens do to their rows' states is to stay in replay rings for
    a while, as writing all states takes longer.
    numbers: where the integers of buckets' steps lie, if it has recorded such.
    """

    name: str
    config: ModelConfig
    options: EngineConfig
    generation: GenerationDefaults
    memory: MemoryPlan
    cache: HybridCache
    mtp_runner: MtpRunner | None
    draft: Model | None
    encode: Encode | None
    experts: ExpertOffload | None
    verifies: bool
    defers_state_writes: bool
    numbers: BucketNumbers

    @property
    def device(self) -> torch.device:
        """Where it takes batches and gives logits."""

    def run(self, batch: Batch) -> Tensor:
        """Run one step and return the logits [L, V] float32 of its `logit_tokens`, which stay valid until the next one.
        Moves no cursor. With a draft head the batch must ask for the hidden states."""

    def run_hidden(self, batch: Batch) -> tuple[Tensor, Tensor | None]:
        """As `run`; with the hidden states [T, H] float32 of all tokens after the final norm, if the batch asks for
        them."""

    def sample(self, logits: Tensor, sampling: Sampling) -> Sampled:
        """Choose from logits [L, V] float32, which may be changed."""
