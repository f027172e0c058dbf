"""Train the tiny demo model from nothing: tokenizer, weights and files, by one command.

python examples/tiny/train.py --out deltic/models/tiny
"""

from __future__ import annotations

import argparse
import itertools
import math
import re
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import fast
import torch
import torch.nn.functional as F
from data import Sample, make_sample, pieces, render, samples
from model import (
    CONTROL,
    MARKUP,
    build_model,
    chat_template,
    load_tokenizer,
    model_config,
    save_model,
    save_tokenizer,
    train_tokenizer,
)
from phrases import TRAIN
from tokenizers import Tokenizer
from tokenizers.models import BPE
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast, Qwen3_5ForCausalLM
from transformers.utils import logging

CHUNK = 64  # the delta rule works in chunks of this length, so shorter padding saves nothing
PART_COST = 16384  # what starting one more part costs, in tokens
IGNORE = -100
Batch = list[tuple[Tensor, Tensor, Tensor]]  # inputs, the places that have a label, their labels
Row = list[tuple[int, bool]]
Loss = Callable[[Tensor, Tensor, Tensor], Tensor]  # the summed loss of one part of a batch


def corpus(seed: int, count: int) -> Iterator[str]:
    """What the tokenizer learns from: rendered conversations without the special tokens."""
    untrained = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(BPE()), chat_template=chat_template())
    special = re.compile("|".join(re.escape(token) for token in (*CONTROL, *MARKUP)))
    for sample in itertools.islice(samples(seed, TRAIN), count):
        parts = special.split(render(untrained, sample))
        yield from (part for part in parts if not part.partition("\n")[2].isupper())


class Steps(Dataset[Batch]):
    """Item i is the whole batch of step i, sorted by length into parts of about equal work.

    `sample` gives the conversation of a number; step i has those from i * batch on.
    """

    def __init__(self, folder: Path, sample: Callable[[int], Sample], steps: int, batch: int, tokens: int) -> None:
        self.folder, self.sample, self.steps, self.batch, self.tokens = folder, sample, steps, batch, tokens
        self.tokenizer: PreTrainedTokenizerBase | None = None

    def __len__(self) -> int:
        return self.steps

    def __getitem__(self, step: int) -> Batch:
        if self.tokenizer is None:
            self.tokenizer = load_tokenizer(self.folder)
        first = step * self.batch
        rows = [self._row(i) for i in range(first, first + self.batch)]
        rows.sort(key=len)
        return [_pad(part) for part in self._parts(rows)]

    def _row(self, index: int) -> Row:
        """The token ids of a sample and, beside each, whether the model says it."""
        assert self.tokenizer is not None
        row: Row = []
        for text, spoken in pieces(render(self.tokenizer, self.sample(index))):
            row += [(token, spoken) for token in self.tokenizer.backend_tokenizer.encode(text).ids]
        return row

    def _parts(self, rows: list[Row]) -> Iterator[list[Row]]:
        """Cut sorted rows into parts so that padding and the cost of a further part are least together."""
        widths = [_padded(len(row)) for row in rows]
        edges = [0, *(i for i in range(1, len(rows)) if widths[i] != widths[i - 1]), len(rows)]
        best: list[tuple[int, int]] = [(0, 0)]
        for right in range(1, len(edges)):
            width = widths[edges[right] - 1]
            costs = [(best[left][0] + width * (edges[right] - edges[left]) + PART_COST, left) for left in range(right)]
            best.append(min(costs))
        cuts = [len(edges) - 1]
        while cuts[-1]:
            cuts.append(best[cuts[-1]][1])
        bounds = [edges[i] for i in reversed(cuts)]
        for start, stop in itertools.pairwise(bounds):
            size = max(1, self.tokens // widths[stop - 1])
            yield from (rows[i : min(i + size, stop)] for i in range(start, stop, size))


def _padded(length: int) -> int:
    return -(-(length - 1) // CHUNK) * CHUNK


def _pad(rows: list[Row]) -> tuple[Tensor, Tensor, Tensor]:
    """Inputs, and next-token labels where the model itself speaks."""
    width = _padded(max(len(row) for row in rows))
    inputs = torch.zeros(len(rows), width, dtype=torch.long)
    labels = torch.full((len(rows), width), IGNORE)
    for i, row in enumerate(rows):
        inputs[i, : len(row) - 1] = torch.tensor([token for token, _ in row[:-1]])
        labels[i, : len(row) - 1] = torch.tensor([token if spoken else IGNORE for token, spoken in row[1:]])
    places = (labels.flatten() != IGNORE).nonzero().squeeze(1)
    return inputs, places, labels.flatten()[places]


def optimizer_for(model: nn.Module, rate: float, decay: float) -> torch.optim.AdamW:
    """AdamW that decays matrices only."""
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    others = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": decay}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.98), fused=next(model.parameters()).is_cuda)


def rate_factor(step: int, steps: int, warmup: int) -> float:
    """Linear warm-up, then a cosine down to nothing."""
    if step < warmup:
        return (step + 1) / warmup
    return 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup)))


def part_loss(model: Qwen3_5ForCausalLM, inputs: Tensor, places: Tensor, labels: Tensor) -> Tensor:
    """The summed loss of one part; logits are computed where there is a label only."""
    hidden = model.model(input_ids=inputs, use_cache=False).last_hidden_state
    logits = F.linear(hidden.flatten(0, 1)[places], model.lm_head.weight)
    return F.cross_entropy(logits, labels, reduction="sum")


def train_step(loss_of: Loss, batch: Batch, device: torch.device) -> Tensor:
    """Leave the gradients of the batch's mean loss in the parameters; return that loss."""
    count = sum(len(labels) for _, _, labels in batch)
    total = torch.zeros((), device=device)
    for part in batch:
        loss = loss_of(*(t.to(device, non_blocking=True) for t in part)) / count
        loss.backward()
        total += loss.detach()
    return total


def train(
    model: nn.Module,
    loss_of: Loss,
    loader: DataLoader[Batch],
    args: argparse.Namespace,
    measure: Callable[[], str] = lambda: "",
) -> None:
    """Minimise the loss over the loader's batches; what `measure` says ends each line of progress."""
    optimizer = optimizer_for(model, args.rate, args.decay)
    factor = partial(rate_factor, steps=args.steps, warmup=args.warmup)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
    device = next(model.parameters()).device
    model.train()
    began, tokens, losses = time.perf_counter(), 0, []
    last = began
    for step, batch in enumerate(loader, 1):
        losses.append(train_step(loss_of, batch, device))
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        tokens += sum(inputs.numel() for inputs, _, _ in batch)
        if step % args.report == 0 or step == args.steps:
            loss = torch.stack(losses).mean().item()
            now = time.perf_counter()
            rate = tokens / (now - last) / 1e3
            line = f"step {step:5}  loss {loss:.4f}  {rate:7.1f} k tokens/s  {now - began:6.1f} s"
            print(f"{line}  {measure()}".rstrip(), flush=True)
            last, tokens, losses = time.perf_counter(), 0, []


def options(description: str) -> argparse.ArgumentParser:
    """What a training command asks for."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--out", type=Path, required=True, help="folder for the model's files")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--batch", type=int, default=384, help="conversations in a step")
    parser.add_argument("--tokens", type=int, default=65536, help="padded tokens that fit the device at once")
    parser.add_argument("--rate", type=float, default=2e-3)
    parser.add_argument("--decay", type=float, default=0.05)
    parser.add_argument("--warmup", type=int, default=100)
    parser.add_argument("--workers", type=int, default=14)
    parser.add_argument("--report", type=int, default=100, help="steps between two lines of progress")
    parser.add_argument("--seed", type=int, default=1)
    return parser


def prepare(seed: int) -> torch.device:
    """Set up transformers and torch for training; the device to train on."""
    logging.set_verbosity_error()
    fast.install()
    torch.manual_seed(seed)
    torch.backends.cuda.matmul.allow_tf32 = True
    torch.backends.cudnn.allow_tf32 = True
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def conversations(args: argparse.Namespace) -> DataLoader[Batch]:
    """The batches to train on."""
    sample = partial(make_sample, args.seed, split=TRAIN)
    steps = Steps(args.out, sample, args.steps, args.batch, args.tokens)
    ahead = 4 if args.workers else None
    pin = torch.cuda.is_available()
    return DataLoader(steps, batch_size=None, num_workers=args.workers, prefetch_factor=ahead, pin_memory=pin)


def main() -> None:
    parser = options("Train the tiny demo model.")
    parser.add_argument("--corpus", type=int, default=12000, help="conversations the tokenizer learns from")
    args = parser.parse_args()
    device = prepare(args.seed)
    args.out.mkdir(parents=True, exist_ok=True)
    save_tokenizer(train_tokenizer(corpus(args.seed, args.corpus)), args.out)
    tokenizer = load_tokenizer(args.out)
    model = build_model(model_config(tokenizer)).to(device)
    print(f"{len(tokenizer)} tokens, {sum(p.numel() for p in model.parameters())} parameters, {device}", flush=True)
    train(model, partial(part_loss, model), conversations(args), args)
    save_model(model, args.out)


if __name__ == "__main__":
    main()
