"""The steps of a model as TIR for a GPU: those for a CPU with their outer loops spread over threads, and own kernels for
products and the delta rule, where one thread would have too much to do."""

# mypy: ignore-errors
from __future__ import annotations

from functools import cache
from math import gcd

from tvm import tirx
from tvm.script import tirx as T

from deltic.artifacts.tvm.kernels import LANES

_THREADS = 64
"""Threads of a block that share a kernel's outer loops."""
_ROWS = 8
"""Tokens whose sums a thread keeps in registers."""
_SPLIT = 8
"""Threads that share a sum."""


def spread(kernel: tirx.PrimFunc) -> tirx.PrimFunc:
    """The kernel with each chain of outermost loops, which are independent of each other, over the threads of a grid,
    and without vectors."""
    realize = kernel.body
    root = realize.block
    parts = root.body.seq if isinstance(root.body, tirx.SeqStmt) else [root.body]
    bodies = [_over_threads(part) for part in parts]
    body = bodies[0] if len(bodies) == 1 else tirx.SeqStmt(bodies)
    block = tirx.SBlock(root.iter_vars, root.reads, root.writes, root.name_hint, body, root.init, root.alloc_buffers,
                        root.match_buffers, root.annotations)
    return kernel.with_body(tirx.SBlockRealize(realize.iter_values, realize.predicate, block))


def _over_threads(loop: tirx.For) -> tirx.For:
    chain, body = [loop], loop.body
    while isinstance(body, tirx.For) and body.kind in (tirx.ForKind.SERIAL, tirx.ForKind.PARALLEL):
        chain.append(body)
        body = body.body
    count = T.int64(1)
    for one in chain:
        count = count * tirx.Cast("int64", one.extent)
    block, thread = tirx.Var("block", "int64"), tirx.Var("thread", "int64")
    rest, places = block * _THREADS + thread, {}
    for one in reversed(chain):
        extent = tirx.Cast("int64", one.extent)
        places[one.loop_var] = tirx.Cast(one.loop_var.dtype, tirx.floormod(rest, extent))
        rest = tirx.floordiv(rest, extent)
    inner = tirx.stmt_functor.substitute(tirx.stmt_functor.ir_transform(body, None, _serial, ["tirx.For"]), places)
    inner = tirx.IfThenElse(block * _THREADS + thread < count, inner, None)
    inner = _bound(thread, _THREADS, "threadIdx.x", inner)
    return _bound(block, tirx.floordiv(count + (_THREADS - 1), _THREADS), "blockIdx.x", inner)


def _bound(var: tirx.Var, extent, tag: str, body: tirx.Stmt) -> tirx.For:
    axis = tirx.IterVar(None, var, tirx.IterVar.ThreadIndex, tag)
    return tirx.For(var, T.int64(0), extent, tirx.ForKind.THREAD_BINDING, body, axis)


def _serial(loop: tirx.For):
    """Vectors of 16 numbers are for a CPU; here each number is a register of its own."""
    if loop.kind == tirx.ForKind.VECTORIZED:
        return tirx.For(loop.loop_var, loop.min, loop.extent, tirx.ForKind.UNROLLED, loop.body)
    return loop


@cache
def linear(inputs: int, panels: int, dtype: str):
    """As `kernels.linear`: a block for each panel and `_ROWS` tokens, a thread for each output and part of its sum."""
    split = gcd(inputs, _SPLIT)

    @T.prim_func(s_tir=True, private=True)
    def matrix(x_handle: T.handle, w_handle: T.handle, y_handle: T.handle):
        T.func_attr({"tirx.noalias": True, "tirx.is_scheduled": True})
        n = T.int64()
        x = T.match_buffer(x_handle, (n, inputs), "float32")
        w = T.match_buffer(w_handle, (panels, inputs, LANES), dtype)
        y = T.match_buffer(y_handle, (n, panels * LANES), "float32")
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
