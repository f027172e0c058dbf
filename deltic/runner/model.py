"""The interface of a loaded model, as engines and sessions use it."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from deltic.cache.manager import HybridCache
from deltic.cache.memory_plan import MemoryPlan
from deltic.config import EngineConfig, GenerationDefaults, ModelConfig
from deltic.ops.capabilities import Capabilities
from deltic.ops.types import Batch, Sampled, Sampling
from deltic.runner.expert_offload import ExpertOffload
from deltic.runner.image_embeds import Encode
from deltic.runner.input_batch import BucketNumbers
from deltic.spec_decode.mtp import MtpRunner


class Model(Protocol):
    """A model with its cache, on any backend.

    name: the name that users know.
    config: the checkpoint's architecture.
    options: how it runs, with the limits of a request.
    generation: defaults for what a request leaves open.
    memory: how much may run at once.
    cache: grants the pages and slots of batches, and carries out operations on its pools (`cache.pools`).
    mtp_runner: the draft head over this cache, if it is used.
    draft: the draft model, if there is one.
    encode: computes image embeddings, if the model has a vision tower.
    experts: the offloaded experts, if there are any.
    capabilities: what the backend can do.
    numbers: the memory of buckets' integers that recorded CUDA graphs read.
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
    capabilities: Capabilities
    numbers: BucketNumbers

    @property
    def device(self) -> torch.device:
        """The device of batches and logits."""

    def run(self, batch: Batch) -> Tensor:
        """Runs one step. Returns the logits [L, V] float32 of its `logit_tokens`, valid until the next step. Moves no
        cursor. With a draft head the batch must ask for the hidden states."""

    def run_hidden(self, batch: Batch) -> tuple[Tensor, Tensor | None]:
        """As `run`; also returns the hidden states [T, H] float32 of all tokens after the final norm, if the batch asks
        for them."""

    def sample(self, logits: Tensor, sampling: Sampling) -> Sampled:
        """Samples from logits [L, V] float32, which it may change."""
