// Kernels around the delta rule and the attention for rows of several tokens. Their tokens are cut into chunks of 64 that
// never cross rows. A tile of a chunk is [64, D], in pieces of 64 columns. A unit is 8 columns, 16 bytes. Units are swizzled
// so that the same unit of eight rows lies in different banks, in the layouts of wgmma: the 128-byte swizzle, or the 64-byte
// swizzle for D = 32.
#define CHUNK 64

template <int D> DEVICE int tile_unit(int t, int u) {
    if constexpr (D >= 64) return (u >> 3) * (CHUNK * 8) + t * 8 + ((u ^ t) & 7);
    return t * 4 + (u ^ (t >> 1 & 3));
}
// Loads 8 numbers of a projection. Its rows are aligned to 16 bytes if D >= 128, else to 8 bytes.
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
    u16 *tiles;          // [N, C / D]: tiles of N chunks
    float *units;        // [N, 2 Hk, 64]: 1 / length of queries and keys
    const i64 *starts, *done, *source, *chunks;  // chunks [N, 2]: row, first token within the row
    int stride, channels, key_heads;
};
// Convolution and SiLU. Grid [C / 128, N]: a block of 128 threads for 128 channels of a chunk. In tiles of values, each 32
// columns are permuted: column 8 q + 2 j + e lies at 8 j + 2 q + e. So a thread's mma accumulators are 8 adjacent columns.
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
    const int head = channel / D, heads = a.channels / D, unit = channel % D / 8;
    u32 out[8][4];
    float square[8] = {};
#pragma unroll
    for (int w = 0; w < 4; ++w) {
        const uint4 taps = __ldg((const uint4 *)a.conv + channel / 2 + w);
        float l[3], h[3];
#pragma unroll
        for (int j = 0; j < 3; ++j) l[j] = low(word(raw[j], w)), h[j] = high(word(raw[j], w));
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const float lo = low(word(raw[i + 3], w)), hi = high(word(raw[i + 3], w));
            const float x = low(taps.x) * l[0] + high(taps.x) * l[1] + low(taps.y) * l[2] + high(taps.y) * lo;
            const float y = low(taps.z) * h[0] + high(taps.z) * h[1] + low(taps.w) * h[2] + high(taps.w) * hi;
            out[i][w] = first + i < tokens ? narrow2(silu(x), silu(y)) : 0;
            square[i] += low(out[i][w]) * low(out[i][w]) + high(out[i][w]) * high(out[i][w]);
            l[0] = l[1], l[1] = l[2], l[2] = lo, h[0] = h[1], h[1] = h[2], h[2] = hi;
        }
    }
    u16 *tile = a.tiles + (i64(chunk) * heads + head) * CHUNK * D;
    const bool value = head >= 2 * a.key_heads;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        const int t = group * 8 + i;
#pragma unroll
        for (int s = D / 16; s; s >>= 1) square[i] += __shfl_xor_sync(~0u, square[i], s);
        if (value) {
#pragma unroll
            for (int w = 0; w < 4; ++w)
                *(u32 *)(tile + tile_unit<D>(t, unit / 4 * 4 + w) * 8 + (unit & 3) * 2) = out[i][w];
            continue;
        }
        *(uint4 *)(tile + tile_unit<D>(t, unit) * 8) = make_uint4(out[i][0], out[i][1], out[i][2], out[i][3]);
        if (unit == 0) a.units[(i64(chunk) * 2 * a.key_heads + head) * CHUNK + t] = rsqrtf(square[i] + 1e-6f);
    }
}

struct PromptRing {
    const u16 *proj;  // [T, stride]
    u16 *ring;        // [slots, 4, C]
    const i64 *starts, *done, *source, *target, *emit_row, *emit_length, *emit_slot;
    int stride, channels, row, emits;  // row: the first of several tokens; emits: state checkpoints
};
// Writes the convolution rings of the rows' target slots and of their state checkpoints. A thread has 8 channels of a row in
// all rings that the row writes.
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
    float *state;  // [slots, state_size]: 32-bit words, for any State
    u16 *ring;     // [slots, ring_size]
    const i64 *target, *emit_row, *emit_slot;
    int state_size, ring_size, rows;
};
// Copies state checkpoints of the first `rows` rows, which have one token each: such a checkpoint is the state that the row
// has just written to its target slot. Grid [x, checkpoints].
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
    int stride, channels, values, token;  // token: the first one to process
};
// RMS norm of each head, times silu(z). Grid [tokens, values / 2048], a thread for 8 numbers.
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
    const u16 *proj;     // as in attention.cuh, for the same FORMs
    const float *query_norm, *key_norm, *bias;
    const float *turns;  // [T, rotary]
    u16 *query;          // [T, heads, D]
    u16 *keys, *values;  // [pages * PAGE, kv_heads, D], of the type KV
    const i64 *store;    // [T]
    float eps;
    int heads, kv_heads, stride, rotary, token;  // token: the first one to process
};
// Normalises and rotates queries and keys, and stores keys and values in the pages. Grid [tokens]: a warp has every eighth
// head of the token and loads all its heads at once. A lane has elements lane * D / 32 ... of a head. Their partners in the
// rotation all belong to one other lane. KV: type of keys and values in the pages (kv.cuh).
template <int D, int HEADS, class KV, int FORM> DEVICE void prompt_heads(const PromptHeads &a) {
    launch_dependents();
    wait();
    constexpr int N = D / 32, MOST = (HEADS + 7) / 8, WIDTH = FORM & kGated ? 2 * D : D;
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, first = lane * N, half = a.rotary / 2;
    const i64 token = a.token + i64(blockIdx.x), place = a.store[token];
    const u16 *row = a.proj + token * a.stride + first;
    const bool second = first >= half, turned = first < a.rotary;
    float v[MOST][N], cosine[N] = {}, sine[N] = {};
#pragma unroll
    for (int i = 0; i < MOST; ++i) {
        const int head = warp + i * 8;
        const int column = head < a.heads ? head * WIDTH : a.heads * WIDTH + (head - a.heads) * D;
        if (head < HEADS) load_head<FORM>(v[i], row + column, a.bias + column + first);
    }
    if (turned) {
        const float *turns = a.turns + token * a.rotary + (second ? first - half : first);
        load_all<N>(cosine, turns);
        load_all<N>(sine, turns + half);
    }
#pragma unroll
    for (int i = 0; i < MOST; ++i) {
        const int head = warp + i * 8;
        if (head >= HEADS) break;
        const bool query = head < a.heads, value = head >= a.heads + a.kv_heads;
        if (!value) {
            float factor = 1, sum = 0;
            if constexpr (FORM & kNormed) {
#pragma unroll
                for (int k = 0; k < N; ++k) sum += v[i][k] * v[i][k];
                factor = rsqrtf(warp_sum(sum) / D + a.eps);
            }
            const float *norm = (query ? a.query_norm : a.key_norm) + first;
#pragma unroll
            for (int k = 0; k < N; ++k) {
                const float x = FORM & kNormed ? v[i][k] * factor * __ldg(norm + k) : v[i][k];
                const float other = __shfl_sync(~0u, x, second ? lane - half / N : lane + half / N);
                v[i][k] = turned ? x * cosine[k] + (second ? other : -other) * sine[k] : x;
            }
        }
        if constexpr (IS_INT4<KV>) {
            if (!query) {
                store_int4<D>(value ? a.values : a.keys, !value, place, (head - a.heads) % a.kv_heads, a.kv_heads, v[i]);
                continue;
            }
            rotate<D>(v[i], lane);
        } else if constexpr (sizeof(KV) == 1) {
            if (!query) {
                const i64 at = (place * a.kv_heads + (head - a.heads) % a.kv_heads) * D;
                store_all<N>((KV *)(value ? a.values : a.keys) + at + first, v[i]);
                continue;
            }
        }
        u16 *to = query ? a.query + (token * a.heads + head) * D
                        : (u16 *)(value ? a.values : a.keys) + (place * a.kv_heads + (head - a.heads) % a.kv_heads) * D;
        u32 out[N / 2];
#pragma unroll
        for (int k = 0; k < N; k += 2) out[k / 2] = narrow2(v[i][k], v[i][k + 1]);
        if constexpr (N == 8) *(uint4 *)(to + first) = make_uint4(out[0], out[1], out[2], out[3]);
        if constexpr (N == 4) *(uint2 *)(to + first) = make_uint2(out[0], out[1]);
        if constexpr (N == 2) *(u32 *)(to + first) = out[0];
    }
}

struct PromptGate {
    const u16 *proj;           // [T, stride]
    const float *bias;         // [stride]; null unless kBiased
    const u16 *own, *prefix;   // [n, heads, D]: attention to the causal square (prefill.py) and the prefix; null: own has all
    const float *own_mass, *prefix_mass;  // [n, heads]: log-sum-exps
    u16 *y;                    // [T, heads * D]
    int heads, size, stride, token;
};
// Joins the two parts of the attention if there are two, and multiplies with sigmoid(gate) if FORM has a gate. Grid
// [n, heads * D / 2048], a thread for 8 numbers. ROTATED: the head size if values are rotated, else 0.
template <int FORM, int ROTATED> DEVICE void prompt_gate(const PromptGate &a) {
    launch_dependents();
    wait();
    const int column = (blockIdx.y * blockDim.x + threadIdx.x) * 8, queries = a.heads * a.size;
    if (column >= queries) return;
    const i64 token = blockIdx.x, at = token * queries + column;
    const int head = column / a.size;
    const uint4 x = load8(a.own + at);
    float gate[8] = {};
    if constexpr (FORM & kGated) {
        const int from = head * 2 * a.size + a.size + column % a.size;
        const uint4 v = load_unit<64>(a.proj + (a.token + token) * a.stride + from);
#pragma unroll
        for (int i = 0; i < 8; ++i)
            gate[i] = (i & 1 ? high(word(v, i / 2)) : low(word(v, i / 2))) + (FORM & kBiased ? __ldg(a.bias + from + i) : 0.f);
    }
    uint4 y = make_uint4(0, 0, 0, 0);
    float share = 0;
    if (a.prefix) {
        y = load8(a.prefix + at);
        share = sigmoid(load(a.prefix_mass + token * a.heads + head) - load(a.own_mass + token * a.heads + head));
    }
    u32 out[4];
    float v[8];
#pragma unroll
    for (int w = 0; w < 4; ++w) {
        v[2 * w] = low(word(x, w)) + share * (low(word(y, w)) - low(word(x, w)));
        v[2 * w + 1] = high(word(x, w)) + share * (high(word(y, w)) - high(word(x, w)));
    }
    if constexpr (ROTATED > 0) {
        constexpr int LANES = ROTATED / 8;  // of a head; the lanes of other heads may have exited
        const int lane = threadIdx.x & 31, own = lane & LANES - 1;
        rotate_back<ROTATED>(v, own, LANES == 32 ? ~0u : (1u << LANES % 32) - 1 << lane - own);
    }
#pragma unroll
    for (int w = 0; w < 4; ++w)
        out[w] = FORM & kGated ? narrow2(v[2 * w] * sigmoid(gate[2 * w]), v[2 * w + 1] * sigmoid(gate[2 * w + 1]))
                               : narrow2(v[2 * w], v[2 * w + 1]);
    *(uint4 *)(a.y + (a.token + token) * queries + column) = make_uint4(out[0], out[1], out[2], out[3]);
}
