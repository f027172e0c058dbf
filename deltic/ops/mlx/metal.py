"""A Metal kernel of the gated delta rule. It has never run on Metal: a test compiles its source as C++ and compares it
with the operations on arrays that all other devices use."""

from __future__ import annotations

from functools import cache
from typing import Any

import mlx.core as mx

from deltic.ops.mlx.memory import Array

SOURCE = """
    uint column = thread_position_in_grid.x;
    uint head = thread_position_in_grid.y;
    uint row = thread_position_in_grid.z;
    size_t place = size_t(row) * HEADS + head;
    auto old = states + (size_t(slots[row]) * HEADS + head) * KEYS * VALUES + column;
    auto result = after + place * KEYS * VALUES + column;
    auto k = key + place * KEYS;
    auto q = query + place * KEYS;
    bool started = begun[row] != 0;
    float faded = decay[place];
    float from_key = 0, from_query = 0, both = 0;
    for (int i = 0; i < KEYS; ++i) {
        float state = started ? faded * float(old[i * VALUES]) : 0.0f;
        from_key += state * k[i];
        from_query += state * q[i];
        both += k[i] * q[i];
    }
    float change = (value[place * VALUES + column] - from_key) * beta[place];
    for (int i = 0; i < KEYS; ++i) {
        float state = started ? faded * float(old[i * VALUES]) : 0.0f;
        result[i * VALUES] = state + k[i] * change;
    }
    output[place * VALUES + column] = from_query + both * change;
    update[place * VALUES + column] = change;
"""
"""One thread per column of a state, so that neighbouring threads read neighbouring numbers."""
INPUTS = ("states", "slots", "begun", "query", "key", "value", "decay", "beta")
OUTPUTS = ("output", "after", "update")


def available() -> bool:
    """Returns True if there is a Metal device."""
    return bool(mx.metal.is_available())


@cache
def _kernel() -> Any:
    return mx.fast.metal_kernel(name="deltic_delta_step", input_names=list(INPUTS), output_names=list(OUTPUTS),
                                source=SOURCE)


def delta_step(states: Array, slots: Array, begun: Array, query: Array, key: Array, value: Array, decay: Array,
               beta: Array) -> tuple[Array, Array, Array]:
    """Computes one token of each row from its slot of `states` [S, Hv, Dk, Dv], or from zero where begun [R] is 0.
    query, key [R, Hv, Dk], value [R, Hv, Dv], decay, beta [R, Hv] float32. -> outputs [R, Hv, Dv], states, updates."""
    rows, heads, values = value.shape
    shape = (rows, heads, key.shape[-1], values)
    output, after, update = _kernel()(
        inputs=[states, slots, begun, query, key, value, decay, beta],
        template=[("HEADS", heads), ("KEYS", key.shape[-1]), ("VALUES", values)],
        grid=(values, heads, rows),
        threadgroup=(min(values, 128), 1, 1),
        output_shapes=[value.shape, shape, value.shape],
        output_dtypes=[mx.float32] * 3,
    )
    return output, after, update
