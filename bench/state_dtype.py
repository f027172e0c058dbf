"""What states of recurrent layers lose as bfloat16.

    python bench/state_dtype.py rule            # 32,768 tokens; a minute on one core
    python bench/state_dtype.py rule --tokens 4096 --memory 300
    python bench/state_dtype.py model           # the embedded model reads 8,192 tokens of docs/

rule: the delta rule alone, with heads of a true size and random inputs, token by token, against float64. Each head
forgets with a rate of its own, which changes from token to token as gates of a model do, and by mean is one in as many
tokens as `--memory` says. States are rounded after every N tokens, as `--written` says: 1 is what steps of few
sequences do, 5 what deferred updates do, 16 what full replay rings do. Between these they are float32. Three kinds of
tokens:

all    each one writes, as in a random model: what is in a state is also overwritten, 1 part in 256 a token
weak   each one writes a fiftieth of that
rare   one of 64 writes; the others only forget, which is less than half of the distance between two bfloat16 numbers
       where memory is longer than 512 tokens times N, and is then rounded away

model: logits in float32 and the tokens that are most likely, after each token of a text, against float32 states. Its
heads forget one part in 10 to 1,000 tokens and more.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.nn.functional as F
from common import ROOT, record
from torch import Tensor

from deltic import LLM
from deltic.session import Session

SIZE = 128
"""Rows and columns of a state."""
RARELY = 64


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", choices=("rule", "model"))
    parser.add_argument("--tokens", type=int, help="32,768 of the delta rule, 8,192 of the model")
    parser.add_argument("--memory", type=int, nargs="+", default=[100, 300, 1000, 3000])
    parser.add_argument("--written", type=int, nargs="+", default=[1, 5, 16])
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if args.task == "rule":
        _measure_rule(args, args.tokens or 32768)
    else:
        _measure_model(args, args.tokens or 8192)


def _measure_rule(args: argparse.Namespace, count: int) -> None:
    torch.manual_seed(args.seed)
    heads = [(kind, memory) for kind in ("all", "weak", "rare") for memory in args.memory]
    tokens = _tokens(heads, count)
    exact = _run(tokens, torch.float64, None)
    found = {"float32": _run(tokens, torch.float32, None),
             **{f"bfloat16 every {written}": _run(tokens, torch.float32, written) for written in args.written}}
    quarter, results = count // 4, []
    for index, (kind, memory) in enumerate(heads):
        results.append({"tokens": kind, "memory": memory, **{
            name: {part: _error(run[place, index], exact[place, index]) for part, place in (
                ("first quarter", slice(quarter)), ("last quarter", slice(-quarter, None)))}
            for name, run in found.items()}})
    record("state_dtype", {"task": "rule", "tokens": count, "seed": args.seed, "relative_error_of_outputs": results})


def _measure_model(args: argparse.Namespace, count: int) -> None:
    text = "".join(path.read_text(encoding="utf-8") for path in sorted((ROOT / "docs").glob("*.md")))
    ids = LLM("tiny", memory="16MiB").chat_processor.tokenizer.encode(text)[:count]
    exact = _logits(ids, "float32", 16)
    found = {"float32, one by one": _logits(ids, "float32", 1),
             **{f"bfloat16 every {written}": _logits(ids, "bfloat16", written) for written in args.written}}
    places = list(pairwise(range(0, count + 1, count // 4)))
    record("state_dtype", {"task": "model", "model": "tiny", "tokens": count, **{name: {
        "relative_error_of_logits_by_quarter": [_error(run[first:end], exact[first:end]) for first, end in places],
        "same_by_quarter": [round(float((run[first:end].argmax(-1) == exact[first:end].argmax(-1)).float().mean()), 4)
                            for first, end in places]} for name, run in found.items()}})


def _logits(ids: list[int], state: str, written: int) -> Tensor:
    """After each token, [T, V]; so many are read at once, after which the state is written."""
    session = Session(dtype="float32", memory="256MiB", max_context=len(ids), threads=1, speculate="off",
                      state_dtype=state)
    return torch.cat([session.prefill(ids[first:first + written], all_logits=True)
                      for first in range(0, len(ids), written)])


@dataclass(frozen=True, slots=True)
class _Tokens:
    """query, key [T, heads, SIZE], of length 1; value [T, heads, SIZE]; beta, decay [T, heads]. All float32 numbers."""

    query: Tensor
    key: Tensor
    value: Tensor
    beta: Tensor
    decay: Tensor


def _tokens(heads: list[tuple[str, int]], count: int) -> _Tokens:
    query, key, value = (F.silu(torch.randn(count, len(heads), SIZE)) for _ in range(3))
    gate = torch.randn(count, len(heads))
    for index, (kind, _) in enumerate(heads):
        if kind == "weak":
            gate[:, index] -= 4.5
        if kind == "rare":
            gate[torch.arange(count) % RARELY != 0, index] = -30.0
    steep = F.softplus(torch.randn(count, len(heads)))
    rates = torch.tensor([1.0 / memory for _, memory in heads])
    return _Tokens(F.normalize(query, dim=-1), F.normalize(key, dim=-1), value, gate.sigmoid(),
                   (-steep / steep.mean() * rates).exp())


def _run(tokens: _Tokens, dtype: torch.dtype, written: int | None) -> Tensor:
    """Outputs [T, heads, SIZE]. written: the state is rounded after every so many tokens; None: never."""
    count, heads, _ = tokens.value.shape
    state, outputs = torch.zeros(heads, SIZE, SIZE, dtype=dtype), torch.empty(count, heads, SIZE, dtype=dtype)
    query, key, value, beta, decay = (part.to(dtype) for part in (
        tokens.query, tokens.key, tokens.value, tokens.beta, tokens.decay))
    for index in range(count):
        state.mul_(decay[index, :, None, None])
        column = key[index, :, None]
        update = (value[index, :, None] - column @ state).mul_(beta[index, :, None, None])
        state.baddbmm_(column.mT, update)
        outputs[index] = (query[index, :, None] @ state)[:, 0]
        if written and (index + 1) % written == 0:
            state.copy_(state.bfloat16())
    return outputs


def _error(found: Tensor, wanted: Tensor) -> float:
    return float(f"{float((found.double() - wanted.double()).norm() / wanted.norm()):.2g}")


if __name__ == "__main__":
    main()
