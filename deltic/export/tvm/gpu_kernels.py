"""GPU kernels: the CPU kernels with their outer loops spread over threads, and separate kernels for products and the
delta rule, whose outer loops have too few iterations."""

# mypy: ignore-errors
from __future__ import annotations

from functools import cache
from math import gcd

from tvm import tirx
from tvm.s_tir import SBlock, SBlockRealize
from tvm.script import tirx as T
from tvm_ffi import structural_map

from deltic.export.tvm.artifact import LANES

_THREADS = 64
"""Number of threads of a block, for outer loops."""
_ROWS = 8
"""Number of tokens whose sums a thread keeps in registers."""
_SPLIT = 8
"""Number of threads that share a sum."""


def spread(kernel: tirx.PrimFunc) -> tirx.PrimFunc:
    """Returns the kernel without vectors, and with each chain of outermost loops spread over the threads of a grid. The
    iterations of these loops are independent."""
    realize = kernel.body
    root = realize.block
    if any(isinstance(loop, tirx.For) and loop.kind == tirx.ForKind.THREAD_BINDING for loop in _parts(root.body)):
        return kernel  # written for a GPU
    bodies = [_over_threads(part) for part in _parts(root.body)]
    body = bodies[0] if len(bodies) == 1 else tirx.SeqStmt(bodies)
    block = SBlock(root.iter_vars, root.reads, root.writes, root.name_hint, body, root.init, root.alloc_buffers,
                   root.match_buffers, root.annotations)
    return kernel.with_body(SBlockRealize(realize.iter_values, realize.predicate, block))


def _parts(body: tirx.Stmt) -> list[tirx.Stmt]:
    return [*body.seq] if isinstance(body, tirx.SeqStmt) else [body]


def _over_threads(loop: tirx.For) -> tirx.For:
    chain, body = [loop], loop.body
    while isinstance(body, tirx.For) and body.kind in (tirx.ForKind.SERIAL, tirx.ForKind.PARALLEL):
        chain.append(body)
        body = body.body
    count = tirx.const(1, "int64")
    for one in chain:
        count = count * tirx.Cast("int64", one.extent)
    block, thread = tirx.Var("block", "int64"), tirx.Var("thread", "int64")
    rest, places = block * _THREADS + thread, dict[tirx.Var, tirx.Expr]()
    for one in reversed(chain):
        extent = tirx.Cast("int64", one.extent)
        places[one.loop_var] = tirx.Cast(str(one.loop_var.ty.dtype), tirx.floormod(rest, extent))
        rest = tirx.floordiv(rest, extent)
    inner = structural_map(body, [(tirx.For, _serial), (tirx.Var, lambda var: places.get(var, var))])
    inner = tirx.IfThenElse(block * _THREADS + thread < count, inner, None)
    inner = _bound(thread, _THREADS, "threadIdx.x", inner)
    return _bound(block, tirx.floordiv(count + (_THREADS - 1), _THREADS), "blockIdx.x", inner)


def _bound(var: tirx.Var, extent, tag: str, body: tirx.Stmt) -> tirx.For:
    axis = tirx.IterVar(None, var, tirx.IterVar.ThreadIndex, tag)
    return tirx.For(var, tirx.const(0, "int64"), extent, tirx.ForKind.THREAD_BINDING, body, axis)


def _serial(loop: tirx.For):
    """Unrolls a vectorized loop: on a GPU each value has its own register."""
    if loop.kind == tirx.ForKind.VECTORIZED:
        return tirx.For(loop.loop_var, loop.min, loop.extent, tirx.ForKind.UNROLLED, loop.body)
    return loop


@cache
def linear(inputs: int, panels: int, dtype: str):
    """Computes `kernels.linear`: a block per panel and `_ROWS` tokens, a thread per output and part of its sum."""
    split = gcd(inputs, _SPLIT)
    n = tirx.Var("n", "int64")

    @T.prim_func(s_tir=True, private=True)
    def matrix(x: T.Buffer((n, inputs), "float32"), w: T.Buffer((panels, inputs, LANES), dtype),
               y: T.Buffer((n, panels * LANES), "float32")):
        for panel in T.thread_binding(panels, thread="blockIdx.x"):
            for tile in T.thread_binding(T.ceildiv(n, T.int64(_ROWS)), thread="blockIdx.y"):
                for part in T.thread_binding(split, thread="threadIdx.y"):
                    for lane in T.thread_binding(LANES, thread="threadIdx.x"):
                        with T.sblock("tile"):
                            total = T.sblock_alloc_buffer((_ROWS,), "float32", scope="local")
                            shared = T.sblock_alloc_buffer((_ROWS, split, LANES), "float32", scope="shared")
                            for r in T.unroll(_ROWS):
                                total[r] = T.float32(0)
                            for i in T.serial(inputs // split):
                                for r in T.unroll(_ROWS):
                                    total[r] = total[r] + x[T.min(tile * _ROWS + r, n - 1), i * split + part] * T.cast(
                                        w[panel, i * split + part, lane], "float32")
                            for r in T.unroll(_ROWS):
                                shared[r, part, lane] = total[r]
                            T.tvm_storage_sync("shared")
                            if part == 0:
                                for r in T.serial(_ROWS):
                                    total[0] = T.float32(0)
                                    for s in T.serial(split):
                                        total[0] = total[0] + shared[r, s, lane]
                                    if tile * _ROWS + r < n:
                                        y[tile * _ROWS + r, panel * LANES + lane] = total[0]
    return matrix


@cache
def delta_rule(key_heads: int, value_heads: int, key_dim: int, value_dim: int):
    """Computes `kernels.delta_rule` with one block per head and one thread per column of its state; columns are
    independent."""
    share, keys = value_heads // key_heads, key_heads * key_dim
    channels, values = 2 * keys + value_heads * value_dim, value_heads * value_dim
    n = tirx.Var("n", "int64")

    @T.prim_func(s_tir=True, private=True)
    def rule(mixed: T.Buffer((n, channels), "float32"), gates: T.Buffer((n, 2, value_heads), "float32"),
             before: T.Buffer((1, value_heads, key_dim, value_dim), "float32"), y: T.Buffer((n, values), "float32"),
             after: T.Buffer((1, value_heads, key_dim, value_dim), "float32")):
        for h in T.thread_binding(value_heads, thread="blockIdx.x"):
            for v in T.thread_binding(value_dim, thread="threadIdx.x"):
                with T.sblock("column"):
                    unit = T.sblock_alloc_buffer((2,), "float32", scope="local")
                    sums = T.sblock_alloc_buffer((2,), "float32", scope="local")  # the update, the output
                    for d in T.serial(key_dim):
                        after[0, h, d, v] = before[0, h, d, v]
                    for t in T.serial(n):
                        for part in T.serial(2):
                            unit[part] = T.float32(0)
                            for d in T.serial(key_dim):
                                unit[part] = unit[part] + mixed[t, part * keys + h // share * key_dim + d] * mixed[
                                    t, part * keys + h // share * key_dim + d]
                            unit[part] = T.float32(1) / T.sqrt(unit[part] + T.float32(1e-6))
                        sums[0] = T.float32(0)
                        sums[1] = T.float32(0)
                        for d in T.serial(key_dim):
                            after[0, h, d, v] = after[0, h, d, v] * gates[t, 0, h]
                            sums[0] = sums[0] + after[0, h, d, v] * (
                                mixed[t, keys + h // share * key_dim + d] * unit[1])
                        sums[0] = (mixed[t, 2 * keys + h * value_dim + v] - sums[0]) * gates[t, 1, h]
                        for d in T.serial(key_dim):
                            after[0, h, d, v] = after[0, h, d, v] + (
                                mixed[t, keys + h // share * key_dim + d] * unit[1]) * sums[0]
                            sums[1] = sums[1] + after[0, h, d, v] * (
                                mixed[t, h // share * key_dim + d] * (unit[0] * T.float32(key_dim ** -0.5)))
                        y[t, h * value_dim + v] = sums[1]
    return rule
