"""Train the tiny demo model from nothing: tokenizer, weights and files, by one command.

python examples/tiny/train.py --out deltic/models/tiny
"""

from __future__ import annotations

import argparse
import itertools
import re
import shutil
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from batches import Batch, Steps
from client_prompts import training_sample
from data import samples
from model import CONTROL, MARKUP, load_model, save_model, save_tokenizer, train_tokenizer
from network import Network, fresh
from optimizer import Optimizer, Rates
from phrases import TRAIN
from render import render
from torch import Tensor, nn
from torch.utils.data import DataLoader

Loss = Callable[[Batch], Tensor]


def corpus(seed: int, count: int) -> Iterator[str]:
    """What the tokenizer learns from: rendered conversations without the special tokens."""
    special = re.compile("|".join(re.escape(token) for token in (*CONTROL, *MARKUP)))
    for sample in itertools.islice(samples(seed, TRAIN), count):
        parts = special.split(render([*sample.messages, sample.target], sample.tools))
        yield from (part for part in parts if not part.partition("\n")[2].isupper())


def mean_loss(network: Network, batch: Batch) -> Tensor:
    """The mean loss of a batch; logits are computed where there is a label only."""
    hidden = network(batch.ids, batch.place)
    return F.cross_entropy(network.logits(hidden.flatten(0, 1)[batch.said]), batch.labels)


def rate_factor(progress: float, step: int, warmup: int) -> float:
    """Linear warm-up, a plateau, then linearly down to nothing from 0.3 of the way on."""
    return min((step + 1) / warmup, (1 - progress) / 0.7, 1.0)


def train(
    model: nn.Module,
    loss_of: Loss,
    loader: DataLoader[Batch],
    args: argparse.Namespace,
    report: Callable[[], str],
) -> None:
    """Minimise the loss over the loader's batches; what `report` does and says ends each line of progress.

    Training is over after `args.steps` steps or `args.seconds`, whichever comes first; the rates go down to nothing
    at that end.
    """
    optimizer = Optimizer(model, Rates())
    device = next(model.parameters()).device
    model.train()
    began, losses, tokens = time.perf_counter(), [], 0
    last, reported = began, 0
    for step, batch in enumerate(loader):
        now = time.perf_counter()
        progress = max(step / args.steps, (now - began) / args.seconds)
        if progress >= 1:
            break
        with torch.autocast("cuda", torch.bfloat16, enabled=device.type == "cuda"):
            loss = loss_of(batch.to(device))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step(args.rate * rate_factor(progress, step, args.warmup))
        losses.append(loss.detach())
        tokens += batch.ids.numel()
        if step % 10 == 9 and (time.perf_counter() - last > args.report or step < 20):
            loss_now = torch.stack(losses[reported:]).mean().item()
            now = time.perf_counter()
            line = f"step {step + 1:5}  loss {loss_now:.4f}  {tokens / (now - last) / 1e3:7.1f} k tokens/s"
            print(f"{line}  {now - began:6.1f} s  {report()}".rstrip(), flush=True)
            last, tokens, reported = time.perf_counter(), 0, len(losses)
    loss_now = torch.stack(losses[-50:]).mean().item()
    print(f"{len(losses)} steps, {time.perf_counter() - began:.1f} s, loss {loss_now:.4f}", flush=True)


def options(description: str) -> argparse.ArgumentParser:
    """What a training command asks for."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--out", type=Path, required=True, help="folder for the model's files")
    parser.add_argument("--steps", type=int, default=4000)
    parser.add_argument("--seconds", type=float, default=86400.0, help="end training after this time at the latest")
    parser.add_argument(
        "--batch", type=int, default=400, help="conversations made for a step; the first that fill it count"
    )
    parser.add_argument("--rows", type=int, default=64, help="rows that a step packs its conversations into")
    parser.add_argument("--width", type=int, default=1024, help="tokens in a row")
    parser.add_argument("--warmup", type=int, default=50)
    parser.add_argument("--rate", type=float, default=1.0, help="factor of all learning rates")
    parser.add_argument("--workers", type=int, default=15)
    parser.add_argument("--report", type=float, default=15.0, help="seconds between two lines of progress")
    parser.add_argument("--seed", type=int, default=1)
    return parser


def prepare(seed: int) -> torch.device:
    """Set up torch for training; the device to train on."""
    torch.manual_seed(seed)
    torch.backends.cuda.matmul.allow_tf32 = True
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def compiled(layers: nn.ModuleList, device: torch.device) -> None:
    """Let a GPU run the layers as compiled kernels."""
    if device.type == "cuda":
        for layer in layers:
            layer.compile(dynamic=False)


def conversations(args: argparse.Namespace) -> DataLoader[Batch]:
    """The batches to train on."""
    sample = partial(training_sample, args.seed)
    steps = Steps(args.out, sample, args.steps, args.batch, args.rows, args.width)
    ahead = 4 if args.workers else None
    pin = torch.cuda.is_available()
    return DataLoader(steps, batch_size=None, num_workers=args.workers, prefetch_factor=ahead, pin_memory=pin)


def main() -> None:
    parser = options("Train the tiny demo model.")
    parser.add_argument("--corpus", type=int, default=12000, help="conversations the tokenizer learns from")
    parser.add_argument("--start", type=Path, help="begin with the weights and tokenizer of this folder")
    args = parser.parse_args()
    device = prepare(args.seed)
    args.out.mkdir(parents=True, exist_ok=True)
    if args.start:
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(args.start / name, args.out / name)
    elif not (args.out / "tokenizer.json").is_file():
        save_tokenizer(train_tokenizer(corpus(args.seed, args.corpus)), args.out)
    network = (load_model(args.start) if args.start else fresh()).to(device)
    compiled(network.model.layers, device)
    print(f"{sum(p.numel() for p in network.parameters())} parameters, {device}", flush=True)

    def report() -> str:
        save_model(network, args.out)
        return ""

    train(network, partial(mean_loss, network), conversations(args), args, report)
    save_model(network, args.out)


if __name__ == "__main__":
    main()
