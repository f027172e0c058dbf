// What lies around the delta rule and the attention of rows of several tokens. Their tokens are cut into chunks of 64 that
// never cross rows; the tiles of a chunk are [64, D], 8 columns to a unit of 16 bytes, unit u of row t at place
// u ^ (t % 8): eight rows of one unit then lie in different banks.
#define CHUNK 64

template <int D> DEVICE int tile_unit(int t, int u) { return t * (D / 8) + (u ^ (t & (D >= 64 ? 7 : D / 8 - 1))); }
// 8 numbers of a projection, whose rows begin at multiples of 16 bytes where heads are large, else of 8.
template <int D> DEVICE uint4 load_unit(const u16 *p) {
    if constexpr (D >= 128) return load8(p);
    const uint2 x = __ldcg((const uint2 *)p), y = __ldcg((const uint2 *)(p + 4));
    return make_uint4(x.x, x.y, y.x, y.y);
}
DEVICE u32 word(const uint4 &v, int i) { return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w; }

struct PromptConv {
    const u16 *proj;     // [T, stride]: q, k, v (the convolved channels), z, b, a
    const u16 *conv;     // [C, 4]
    const u16 *ring;     // [slots, 4, C]
    u16 *tiles;          // [N, C / D]: tiles
    float *units;        // [N, 2 Hk, 64]: 1 / length of queries and keys
    const i64 *starts, *done, *source, *chunks;  // chunks [N, 2]: row, first token in it
    int stride, channels, key_heads;
};
// Convolution and silu: a block of 128 threads for 128 channels of a chunk. In a tile of values the columns of 32 are
// ordered so that the accumulators of a thread that multiplies have 8 neighbours: column 8 q + 2 j + e at 8 j + 2 q + e.
template <int D> DEVICE void prompt_conv(const PromptConv &a) {
    launch_dependents();
    wait();
    const int tid = threadIdx.x, group = tid >> 4, chunk = blockIdx.y, channel = blockIdx.x * 128 + (tid & 15) * 8;
    const int row = int(a.chunks[2 * chunk]), first = int(a.chunks[2 * chunk + 1]) + group * 8;
    const i64 start = a.starts[row], done = a.done[row];
    const int tokens = int(a.starts[row + 1] - start);
    const u16 *old = a.ring + a.source[row] * 4 * a.channels + channel;
    uint4 raw[11];
#pragma unroll
    for (int j = 0; j < 11; ++j) {
        const int p = first + j - 3;
        raw[j] = make_uint4(0, 0, 0, 0);
        if (p < 0 && done + p >= 0) raw[j] = load8(old + ((done + p) & 3) * a.channels);
        if (p >= 0 && p < tokens) raw[j] = load_unit<D>(a.proj + (start + p) * a.stride + channel);
    }
    uint2 taps[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) taps[i] = __ldg((const uint2 *)a.conv + channel + i);
    const int head = channel / D, heads = a.channels / D, unit = channel % D / 8;
    u16 *tile = a.tiles + (i64(chunk) * heads + head) * CHUNK * D;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        const int t = group * 8 + i;
        u32 out[4];
        float square = 0;
#pragma unroll
        for (int w = 0; w < 4; ++w) {
            const u32 x0 = word(raw[i], w), x1 = word(raw[i + 1], w), x2 = word(raw[i + 2], w), x3 = word(raw[i + 3], w);
            const uint2 lo = taps[2 * w], hi = taps[2 * w + 1];
            const float l = low(lo.x) * low(x0) + high(lo.x) * low(x1) + low(lo.y) * low(x2) + high(lo.y) * low(x3);
            const float h = low(hi.x) * high(x0) + high(hi.x) * high(x1) + low(hi.y) * high(x2) + high(hi.y) * high(x3);
            out[w] = first + i < tokens ? narrow2(silu(l), silu(h)) : 0;
            square += low(out[w]) * low(out[w]) + high(out[w]) * high(out[w]);
        }
        if (head < 2 * a.key_heads) {
            *(uint4 *)(tile + tile_unit<D>(t, unit) * 8) = make_uint4(out[0], out[1], out[2], out[3]);
        } else {
#pragma unroll
            for (int w = 0; w < 4; ++w)
                *(u32 *)(tile + tile_unit<D>(t, unit / 4 * 4 + w) * 8 + (unit & 3) * 2) = out[w];
        }
#pragma unroll
        for (int s = D / 16; s; s >>= 1) square += __shfl_xor_sync(~0u, square, s);
        if (unit == 0 && head < 2 * a.key_heads)
            a.units[(i64(chunk) * 2 * a.key_heads + head) * CHUNK + t] = rsqrtf(square + 1e-6f);
    }
}

struct PromptRing {
    const u16 *proj;  // [T, stride]
    u16 *ring;        // [slots, 4, C]
    const i64 *starts, *done, *source, *target, *emit_row, *emit_length, *emit_slot;
    int stride, channels, row, emits;  // row: the first with several tokens
};
// The rings of the rows' targets and of what they emit: a thread for 8 channels of a row, for all that the row writes.
template <int D> DEVICE void prompt_ring(const PromptRing &a) {
    launch_dependents();
    wait();
    const int row = a.row + blockIdx.y, channel = (blockIdx.x * blockDim.x + threadIdx.x) * 8;
    if (channel >= a.channels) return;
    const i64 start = a.starts[row], done = a.done[row], end = done + a.starts[row + 1] - start;
    uint4 old[4];
#pragma unroll
    for (int i = 0; i < 4; ++i)
        old[i] = done ? load8(a.ring + (a.source[row] * 4 + i) * a.channels + channel) : make_uint4(0, 0, 0, 0);
    for (int e = 0; e <= a.emits; ++e) {
        if (e < a.emits && a.emit_row[e] != row) continue;
        const i64 length = e < a.emits ? a.emit_length[e] : end, slot = e < a.emits ? a.emit_slot[e] : a.target[row];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const i64 position = length - 1 - ((length - 1 - i) & 3);
            *(uint4 *)(a.ring + (slot * 4 + i) * a.channels + channel) =
                position < done ? old[i] : load_unit<D>(a.proj + (start + position - done) * a.stride + channel);
        }
    }
}

struct CopySlot {
    float *state;  // [slots, state_size]
    u16 *ring;     // [slots, ring_size]
    const i64 *target, *emit_row, *emit_slot;
    int state_size, ring_size, rows;
};
// What rows of one token, the first `rows`, emit is what they have just written. Blocks (x, emit).
DEVICE void copy_slot(const CopySlot &a) {
    launch_dependents();
    wait();
    const i64 row = a.emit_row[blockIdx.y], slot = a.emit_slot[blockIdx.y];
    if (row >= a.rows || a.target[row] == slot) return;
    const i64 from = a.target[row];
    const int first = blockIdx.x * blockDim.x + threadIdx.x, step = gridDim.x * blockDim.x;
    for (int i = first; i < a.state_size / 4; i += step)
        ((float4 *)(a.state + slot * a.state_size))[i] = __ldcg((const float4 *)(a.state + from * a.state_size) + i);
    for (int i = first; i < a.ring_size / 8; i += step)
        ((uint4 *)(a.ring + slot * a.ring_size))[i] = __ldcg((const uint4 *)(a.ring + from * a.ring_size) + i);
}

struct GatedNorm {
    const u16 *proj, *core;  // [T, stride]; [T, Hv * D]
    const float *norm;       // [D]
    u16 *y;                  // [T, Hv * D]
    float eps;
    int stride, channels, values, token;  // token: the first of those that are asked for
};
// RMS norm of each head, times silu(z): a thread for 8 numbers; blocks (token, 2048 values).
template <int D> DEVICE void gated_norm(const GatedNorm &a) {
    launch_dependents();
    wait();
    const int column = (blockIdx.y * blockDim.x + threadIdx.x) * 8;
    const i64 token = a.token + i64(blockIdx.x);
    const bool real = column < a.values;
    uint4 x = make_uint4(0, 0, 0, 0), z = x;
    if (real) {
        x = load8(a.core + token * a.values + column);
        z = load_unit<D>(a.proj + token * a.stride + a.channels + column);
    }
    float square = 0;
#pragma unroll
    for (int w = 0; w < 4; ++w) square += low(word(x, w)) * low(word(x, w)) + high(word(x, w)) * high(word(x, w));
#pragma unroll
    for (int s = D / 16; s; s >>= 1) square += __shfl_xor_sync(~0u, square, s);
    if (!real) return;
    const float factor = rsqrtf(square / D + a.eps);
    u32 out[4];
#pragma unroll
    for (int w = 0; w < 4; ++w) {
        const float2 scale = __ldg((const float2 *)(a.norm + column % D) + w);
        out[w] = narrow2(low(word(x, w)) * factor * scale.x * silu(low(word(z, w))),
                         high(word(x, w)) * factor * scale.y * silu(high(word(z, w))));
    }
    *(uint4 *)(a.y + token * a.values + column) = make_uint4(out[0], out[1], out[2], out[3]);
}

struct PromptHeads {
    const u16 *proj;     // [T, stride]: per head query and gate, then keys, then values
    const float *query_norm, *key_norm;
    const float *turns;  // [T, rotary]
    u16 *query;          // [T, heads, D]
    u16 *keys, *values;  // [pages * PAGE, kv_heads, D]
    const i64 *store;    // [T]
    float eps;
    int heads, kv_heads, stride, rotary, token;  // token: the first of those that are asked for
};
// Queries and keys normalised and rotated, keys and values stored: a warp for each; blocks (token, 8 of them).
template <int D> DEVICE void prompt_heads(const PromptHeads &a) {
    __shared__ float buffers[8][D];
    launch_dependents();
    wait();
    constexpr int N = D / 32;
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, job = blockIdx.y * 8 + warp;
    const i64 token = a.token + i64(blockIdx.x);
    if (job >= a.heads + 2 * a.kv_heads) return;
    const u16 *row = a.proj + token * a.stride;
    float v[N];
    u16 *to;
    if (job < a.heads) {
        turn<D>(v, row + job * 2 * D, a.query_norm, a.turns + token * a.rotary, a.rotary, a.eps, buffers[warp]);
        to = a.query + (token * a.heads + job) * D;
    } else {
        const int kv = (job - a.heads) % a.kv_heads;
        const bool key = job < a.heads + a.kv_heads;
        const u16 *raw = row + a.heads * 2 * D + (job - a.heads) * D;
        if (key) turn<D>(v, raw, a.key_norm, a.turns + token * a.rotary, a.rotary, a.eps, buffers[warp]);
        else load_all<N>(v, raw + lane * N);
        to = (key ? a.keys : a.values) + (a.store[token] * a.kv_heads + kv) * D;
    }
    store_all<N>(to + lane * N, v);
}

struct PromptGate {
    const u16 *proj;           // [T, stride]
    const u16 *own, *prefix;   // [n, heads, D]: attention to the row's own tokens and to what lies before; or null
    const float *own_mass, *prefix_mass;  // [n, heads]: logarithms of the sums of exponentials
    u16 *y;                    // [T, heads * D]
    int heads, size, stride, token;
};
// Joins the two parts of the attention where there are two, times sigmoid(gate): a thread for 8 numbers; blocks (token,
// 2048 numbers).
DEVICE void prompt_gate(const PromptGate &a) {
    launch_dependents();
    wait();
    const int column = (blockIdx.y * blockDim.x + threadIdx.x) * 8, queries = a.heads * a.size;
    if (column >= queries) return;
    const i64 token = blockIdx.x, at = token * queries + column;
    const int head = column / a.size;
    const uint4 x = load8(a.own + at);
    const u16 *gates = a.proj + (a.token + token) * a.stride + head * 2 * a.size + a.size + column % a.size;
    const uint4 gate = load_unit<64>(gates);
    uint4 y = make_uint4(0, 0, 0, 0);
    float share = 0;
    if (a.prefix) {
        y = load8(a.prefix + at);
        share = sigmoid(load(a.prefix_mass + token * a.heads + head) - load(a.own_mass + token * a.heads + head));
    }
    u32 out[4];
#pragma unroll
    for (int w = 0; w < 4; ++w) {
        const float l = low(word(x, w)) + share * (low(word(y, w)) - low(word(x, w)));
        const float h = high(word(x, w)) + share * (high(word(y, w)) - high(word(x, w)));
        out[w] = narrow2(l * sigmoid(low(word(gate, w))), h * sigmoid(high(word(gate, w))));
    }
    *(uint4 *)(a.y + (a.token + token) * queries + column) = make_uint4(out[0], out[1], out[2], out[3]);
}
