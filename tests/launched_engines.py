"""Engines on a GPU that launch their steps kernel by kernel instead of replaying graphs, for compute-sanitizer:
`python tests/launched_engines.py "0.8b q4_k"`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from support import numbers, serve
from torch import Tensor

from deltic.cache.block_accounts import BlockAccounts
from deltic.cache.handles import PageList, SequenceCache
from deltic.cache.manager import HybridCache
from deltic.cache.radix_tree import Checkpoint
from deltic.cache.tensors import CachePools
from deltic.config import EngineConfig, ExpertsConfig, ModelConfig
from deltic.engine.loading import RandomModel, load
from deltic.ops.cuda import mtp
from deltic.ops.cuda.decode import DecodeStep
from deltic.ops.cuda.driver import KernelArguments, Module, fields, headers
from deltic.ops.cuda.prefill import PREFIX_GRAIN, Attend, AttentionGroup, AttentionParts
from deltic.ops.kv import as_bytes, take
from deltic.ops.types import Batch, KvView
from deltic.params import PAGE, EngineRequest, SamplingParams
from deltic.runner import cuda_graphs

VOCABULARY = 5003
DENSE, MIXTURE, NARROW = "qwen3.5-4b", "qwen3.5-35b-a3b", {"intermediate_size": 2560}


def model(name: str, head: bool = False, **changes: Any) -> RandomModel:
    """True heads; four layers and few tokens."""
    shape = replace(ModelConfig.preset(name, 4), vocab_size=VOCABULARY, **changes)
    return RandomModel(shape=shape, head=head, initializer_range=0.05)


ENGINES: dict[str, tuple[RandomModel | None, dict[str, Any]]] = {
    "tiny": (None, {"speculate": "mtp:3"}),
    "0.8b": (model("qwen3.5-0.8b", head=True), {"speculate": "mtp:3"}),
    "0.8b q4_k": (model("qwen3.5-0.8b", head=True), {"speculate": "mtp:2", "quant": "q4_k"}),
    "4b": (model(DENSE, **NARROW), {"kv_dtype": "fp8"}),
    "4b small states": (model(DENSE, head=True, **NARROW), {"speculate": "mtp:3", "state_dtype": "bfloat16"}),
    "4b fp8": (model(DENSE, **NARROW), {"quant": "fp8"}),
    "experts": (model(MIXTURE, hidden_size=512, experts=ExpertsConfig(60, 9, 40, 40)), {}),
    "experts q4_k": (model(MIXTURE, hidden_size=512, experts=ExpertsConfig(16, 4, 256, 256)), {"quant": "q4_k"}),
}


class Launched:
    """Takes the place of a graph."""

    def __init__(self, launch: Callable[[], object]) -> None:
        self.replay = launch

    def pool(self) -> None:
        return None


PRODUCT = """
struct Plain { const u16 *x, *weight; void *y; int tokens, rows, columns, wide; };
extern "C" __global__ void plain(const __grid_constant__ Plain a) {
    __shared__ float xs[32][33], weights[32][33];
    const int i = threadIdx.x & 31, j = threadIdx.x >> 5, row = blockIdx.x * 32, token = blockIdx.y * 32;
    float sum = 0;
    for (int k = i; k - i < a.columns; k += 32) {
        xs[j][i] = token + j < a.tokens && k < a.columns ? wide(a.x[i64(token + j) * a.columns + k]) : 0;
        weights[j][i] = row + j < a.rows && k < a.columns ? wide(a.weight[i64(row + j) * a.columns + k]) : 0;
        __syncthreads();
        for (int n = 0; n < 32; ++n) sum += xs[j][n] * weights[i][n];
        __syncthreads();
    }
    if (token + j >= a.tokens || row + i >= a.rows) return;
    const i64 at = i64(token + j) * a.rows + row + i;
    if (a.wide) ((float *)a.y)[at] = sum;
    else ((u16 *)a.y)[at] = narrow(sum);
}
"""


class Plain(KernelArguments):
    """Of `plain`: x [tokens, columns], weight [rows, columns] bf16; y [tokens, rows] bf16, or float32 if it is wide."""

    _fields_ = fields("x weight y", "", "tokens rows columns wide")


@cache
def plain() -> Module:
    return Module(headers() + PRODUCT, torch.device("cuda", torch.cuda.current_device()))


def product(x: Tensor, weight: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """x [T, N], weight [M, N] bfloat16 -> x weight^T [T, M]."""
    assert x.dtype == weight.dtype == torch.bfloat16
    x, weight, y = x.contiguous(), weight.contiguous(), torch.empty(len(x), len(weight), dtype=dtype, device=x.device)
    if y.numel():
        plain().launch("plain", (-(-len(weight) // 32), -(-len(x) // 32)), 1024, Plain(
            x=x, weight=weight, y=y, tokens=len(x), rows=len(weight), columns=x.shape[1],
            wide=int(dtype == torch.float32)), overlap=False)
    torch.cuda.synchronize()  # before their memory is another tensor's
    return y


def attend(self: Attend, query: Tensor, kv: KvView, context: AttentionGroup) -> AttentionParts:
    """As `Attend.__call__`."""
    keys, values = (take(pool.flatten(0, 1), 0, context.places).bfloat16() for pool in (kv.keys, kv.values))
    found = query.new_empty(context.tokens, *query.shape[1:])
    group = query.shape[1] // keys.shape[1]
    for row, (first, start) in enumerate(zip(context.queries.tolist()[:-1], context.keys.tolist()[:-1], strict=True)):
        end, stop = int(context.queries[row + 1]), int(context.keys[row + 1])
        past = torch.ones(end - first, stop - start, dtype=torch.bool, device=query.device).tril(
            stop - start - end + first)
        for head in range(query.shape[1]):
            masses = product(query[PREFIX_GRAIN + context.first:][first:end, head], keys[start:stop, head // group],
                             torch.float32) * query.shape[2]**-0.5
            shares = masses.where(past, float("-inf")).softmax(1).bfloat16()
            found[first:end, head] = product(shares, values[start:stop, head // group].t())
    return AttentionParts(found)


def launch_everything() -> None:
    """Record no graph. What products read of rows that only fill a bucket up, whose sums nobody reads, is written; as
    are the inputs before a sequence's first that convolutions read and do not use. Of a page that is copied only the
    tokens are that are in it. What libraries compute is computed by a plain kernel: initcheck does not see what theirs
    write, and racecheck makes them fail."""
    begin, enter, of_torch = DecodeStep.buffers, mtp.MtpHeadOp._enter, F.linear
    share, keep, copy = BlockAccounts.share_pages, HybridCache._keep, CachePools._copy
    written: dict[int, int] = {}  # tokens of pages that are copies of such as are not full

    def share_pages(accounts: BlockAccounts, pages: Sequence[int], done: int, count: int = 1) -> list[PageList]:
        found = share(accounts, pages, done, count)
        if done % PAGE:
            written.update((own[-1], done % PAGE) for own in found)
        return found

    def keep_here(cache: HybridCache, lease: SequenceCache, done: int, slot: int, page: int | None, *rest: Any,
                  **options: Any) -> Checkpoint:
        if page is not None:
            written[page] = done % PAGE
        return keep(cache, lease, done, slot, page, *rest, **options)

    def copy_some(pools: CachePools, by: Callable[..., None], tensors: tuple[Tensor, ...], source: int,
                  target: int) -> None:
        if tensors[0] is not pools.page_tensors[0]:
            return copy(pools, by, tensors, source, target)
        for tensor in map(as_bytes, tensors):
            tensor[:, target, :written[target]].copy_(tensor[:, source, :written[target]])

    def buffers(step: DecodeStep, *args: Any, **options: Any) -> Any:
        found = begin(step, *args, **options)
        found.y.zero_()
        found.core.zero_()
        return found

    def enter_head(head: mtp.MtpHeadOp, batch: Batch, x: Tensor, *args: Any, **options: Any) -> None:
        x.zero_()
        enter(head, batch, x, *args, **options)

    def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return product(x, weight) if x.is_cuda else of_torch(x, weight, bias)

    def mm(x: Tensor, y: Tensor, out_dtype: torch.dtype = torch.bfloat16, out: Tensor | None = None) -> Tensor:
        found = product(x, y.t(), out_dtype)
        return found if out is None else out.copy_(found)

    DecodeStep.buffers, mtp.MtpHeadOp._enter = buffers, enter_head  # type: ignore[method-assign]
    BlockAccounts.share_pages, HybridCache._keep = share_pages, keep_here  # type: ignore[method-assign]
    CachePools._copy = copy_some  # type: ignore[method-assign]
    F.linear, torch.mm, Attend.__call__ = linear, mm, attend  # type: ignore[assignment, method-assign]
    cuda_graphs.CudaGraphs.capture = lambda self, padded: None  # type: ignore[method-assign]
    mtp.record = lambda launch, pool=None: (Launched(launch), launch())  # type: ignore[assignment]


def run(name: str) -> None:
    """Prompts of one token, of some and of many; rows that decode, some and many; what is kept is used again."""
    weights, options = ENGINES[name]
    runtime = load(weights, EngineConfig(device="cuda", dtype="bfloat16", max_batch=24, max_context=512,
                                         host_memory="0", **{"memory": "1GiB", "speculate": "off", **options}))
    assert runtime.step is not None, "the kernels do not serve this model"
    for states in runtime.views.states:
        states.conv.zero_()
    few, many = [(1, 4), (40, 5), (150, 5)], [(1 + index % 5, 3) for index in range(20)]
    vocabulary = min(VOCABULARY, runtime.config.vocab_size)
    for again, requests in enumerate((few, many, few)):
        answers = serve(runtime, [EngineRequest(f"{again}-{index}", numbers(index, length, vocabulary), SamplingParams(
            temperature=0.8 * (index % 2), max_tokens=count, ignore_eos=True)) for index, (length, count)
            in enumerate(requests)])
        for index, (_, count) in enumerate(requests):
            assert len(answers[f"{again}-{index}", 0].tokens) == count, "a request failed"


if __name__ == "__main__":
    launch_everything()
    for chosen in sys.argv[1:] or ENGINES:
        run(chosen)
        print(chosen, "passed", flush=True)
