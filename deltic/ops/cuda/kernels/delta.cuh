// The gated delta rule for rows of several tokens, in chunks of 64 (arXiv 2412.06464, section 3.3). With S the state before
// a chunk, D(t, i) the decay from token i to t, f the factors that normalise queries and keys,
//   T = (1 + tril(beta D f f k kT, -1))^-1, u = T beta v - (T beta D(., start) f k) S,
//   o = D(., start) f q S + tril(D f f q kT) u, S' = D(end, start) S + (D(end, .) f k)T u:
// `delta_terms` makes all that needs no S, for all chunks at once, `delta_scan` goes through the chunks of a row. Operands of
// the tensor cores are bfloat16, sums, states and the inverse float32.

template <bool TRANS> DEVICE void load_matrices(u32 (&r)[4], u32 address) {
    if constexpr (TRANS)
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                     : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address) : "memory");
    else
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                     : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address) : "memory");
}
DEVICE u32 shared_address(const void *p) { return u32(__cvta_generic_to_shared(p)); }
DEVICE u32 pack2(float lo, float hi) { return narrow2(lo, hi); }

struct DeltaTerms {
    const u16 *proj;     // [T, stride]: ... z, b, a
    const u16 *tiles;    // [N, 2 Hk + Hv]: tiles
    const float *units;  // [N, 2 Hk, 64]
    const float *decay, *dt_bias;
    u16 *terms;          // [N, Hv]: -W and P as left operands [warp, step, lane, 8]; U [D / 32, 128 threads, 16]
    float *gates;        // [N, Hv, 4, 64]: factors of q S, of u in S', sums of log decays, 1 / length of keys
    const i64 *starts, *chunks;
    int key_heads, value_heads, stride, gate_column, tiled;  // gate_column: of b
};

template <int D> struct DeltaShape {
    static constexpr int TILE = CHUNK * D * 2, LINE = 72, MATRIX = CHUNK * LINE * 4, STEPS = D / 16,
                         TERMS = 2 * TILE + CHUNK * CHUNK * 2,        // bytes of a chunk's terms
                         INNER = 2 * MATRIX + 2 * TILE + 6 * CHUNK * 4,  // shared memory of delta_terms: q lies in a matrix
                         STATE = D * 64, UPDATE = CHUNK * 64,         // bytes of 32 columns
                         STAGE = 3 * TILE + CHUNK * CHUNK * 2 + UPDATE + 4 * CHUNK * 4, STAGES = 3,
                         SCAN = STAGES * STAGE + STATE + 3 * UPDATE + 64;
    static_assert(MATRIX >= TILE, "the query's tile does not fit");
};

// The lower 64 x 64 matrix T, times the diagonal of `scale`, times a tile [64, D]: warp w has rows 16 w ...
template <int D> DEVICE void lower_product(float (&acc)[D / 8][4], const float *T, const float *scale, u32 tile) {
    constexpr int LINE = DeltaShape<D>::LINE;
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, q = lane & 3;
#pragma unroll
    for (int n = 0; n < D / 8; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) acc[n][i] = 0;
#pragma unroll
    for (int s = 0; s < 4; ++s) {
        if (s > warp) break;
        u32 left[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int row = warp * 16 + g + (i & 1) * 8, column = s * 16 + q * 2 + (i >> 1) * 8;
            const float2 t = *(const float2 *)(T + row * LINE + column), f = *(const float2 *)(scale + column);
            left[i] = pack2(t.x * f.x, t.y * f.y);
        }
        const int token = s * 16 + (lane & 15);
#pragma unroll
        for (int n = 0; n < D / 16; ++n) {
            u32 right[4];
            load_matrices<true>(right, tile + tile_unit<D>(token, n * 2 + (lane >> 4)) * 16);
            multiply(acc[2 * n], left[0], left[1], left[2], left[3], right[0], right[1]);
            multiply(acc[2 * n + 1], left[0], left[1], left[2], left[3], right[2], right[3]);
        }
    }
}

// X = (1 + M)^-1 for the strictly lower M, both [64, LINE]; what lies above M's diagonal is used up. Blocks of 16 column by
// column, then pairs of blocks: of ((A, 0), (B, C)) the lower left one is -C' B A' with the inverses A', C'.
template <int LINE> DEVICE void invert(float *M, float *X) {
    const int tid = threadIdx.x;
    if (tid < 64) {
        const int block = tid & 48, column = tid & 15;
        const float *m = M + block * LINE + block;
        float x[16];
#pragma unroll
        for (int i = 0; i < 16; ++i) {
            float sum = i == column ? 1.f : 0.f;
#pragma unroll
            for (int j = 0; j < i; ++j) sum -= m[i * LINE + j] * x[j];
            x[i] = sum;
            X[(block + i) * LINE + block + column] = sum;
        }
    }
    __syncthreads();
    {
        const int at = (tid >> 6) * 32, r = tid >> 2 & 15, c = (tid & 3) * 4;
        float4 y = make_float4(0, 0, 0, 0);
#pragma unroll
        for (int k = 0; k < 16; ++k) {
            const float m = M[(at + 16 + r) * LINE + at + k];
            const float4 x = *(const float4 *)(X + (at + k) * LINE + at + c);
            y.x += m * x.x, y.y += m * x.y, y.z += m * x.z, y.w += m * x.w;
        }
        *(float4 *)(M + (at + r) * LINE + at + 16 + c) = y;
        *(float4 *)(X + (at + r) * LINE + at + 16 + c) = make_float4(0, 0, 0, 0);
        __syncthreads();
        float4 z = make_float4(0, 0, 0, 0);
#pragma unroll
        for (int k = 0; k < 16; ++k) {
            const float m = X[(at + 16 + r) * LINE + at + 16 + k];
            const float4 x = *(const float4 *)(M + (at + k) * LINE + at + 16 + c);
            z.x -= m * x.x, z.y -= m * x.y, z.z -= m * x.z, z.w -= m * x.w;
        }
        *(float4 *)(X + (at + 16 + r) * LINE + at + c) = z;
        __syncthreads();
    }
    const int r = tid >> 2, c = (tid & 3) * 4;  // columns c and c + 16
    float4 y[2] = {}, z[2] = {};
#pragma unroll 8
    for (int k = 0; k < 32; ++k) {
        const float m = M[(32 + r) * LINE + k];
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const float4 x = *(const float4 *)(X + k * LINE + c + h * 16);
            y[h].x += m * x.x, y[h].y += m * x.y, y[h].z += m * x.z, y[h].w += m * x.w;
        }
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) *(float4 *)(M + r * LINE + 32 + c + h * 16) = y[h];
    __syncthreads();
#pragma unroll 8
    for (int k = 0; k < 32; ++k) {
        const float m = X[(32 + r) * LINE + 32 + k];
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const float4 x = *(const float4 *)(M + k * LINE + 32 + c + h * 16);
            z[h].x -= m * x.x, z[h].y -= m * x.y, z[h].z -= m * x.z, z[h].w -= m * x.w;
        }
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) *(float4 *)(X + (32 + r) * LINE + c + h * 16) = z[h];
    __syncthreads();
}

// A block of 128 threads for a value head of a chunk.
template <int D> DEVICE void delta_terms(const DeltaTerms &a) {
    using Shape = DeltaShape<D>;
    constexpr int LINE = Shape::LINE;
    extern __shared__ __align__(128) unsigned char memory[];
    float *X = (float *)memory, *M = (float *)(memory + Shape::MATRIX);  // the query's tile lies in X
    unsigned char *rest = memory + 2 * Shape::MATRIX + 2 * Shape::TILE;
    float *sums = (float *)rest, *beta = sums + CHUNK, *unit_q = beta + CHUNK, *unit_k = unit_q + CHUNK,
          *scale_k = unit_k + CHUNK, *carry = scale_k + CHUNK;
    const u32 tile_q = shared_address(memory), tile_k = tile_q + 2 * Shape::MATRIX, tile_v = tile_k + Shape::TILE;
    launch_dependents();
    wait();
    const int tid = threadIdx.x, warp = tid >> 5, lane = tid & 31, g = lane >> 2, q = lane & 3;
    const int head = blockIdx.x, chunk = blockIdx.y;
    const int from = a.tiled ? head % a.key_heads : head / (a.value_heads / a.key_heads);
    const u16 *tiles = a.tiles + i64(chunk) * (2 * a.key_heads + a.value_heads) * CHUNK * D;
    for (int i = tid; i < Shape::TILE / 16; i += 128) {
        copy_weight(tile_q + i * 16, tiles + from * CHUNK * D + i * 8);
        copy_weight(tile_k + i * 16, tiles + (a.key_heads + from) * CHUNK * D + i * 8);
    }
    end_copy();
    for (int i = tid; i < Shape::TILE / 16; i += 128)
        copy_weight(tile_v + i * 16, tiles + (2 * a.key_heads + head) * CHUNK * D + i * 8);
    end_copy();
    float sum = 0;
    if (tid < CHUNK) {
        const int row = int(a.chunks[2 * chunk]);
        const i64 token = a.starts[row] + a.chunks[2 * chunk + 1] + tid;
        float b = 0;
        if (token < a.starts[row + 1]) {
            const u16 *gates = a.proj + token * a.stride + a.gate_column + head;
            b = sigmoid(load(gates));
            const float steep = load(gates + a.value_heads) + __ldg(a.dt_bias + head);
            sum = __ldg(a.decay + head) * (steep > 20.f ? steep : log1pf(__expf(steep)));
        }
        beta[tid] = b;
        const float *units = a.units + i64(chunk) * 2 * a.key_heads * CHUNK + tid;
        unit_q[tid] = __ldcg(units + from * CHUNK) * rsqrtf(float(D));
        unit_k[tid] = __ldcg(units + (a.key_heads + from) * CHUNK);
#pragma unroll
        for (int i = 1; i < 32; i *= 2) {
            const float other = __shfl_up_sync(~0u, sum, i);
            if (lane >= i) sum += other;
        }
        if (tid == 31) carry[0] = sum;
    }
    __syncthreads();
    if (tid < CHUNK) {
        if (warp == 1) sum += carry[0];
        sums[tid] = sum;
    }
    await_copies<1>();
    __syncthreads();
    float *gates = a.gates + (i64(chunk) * a.value_heads + head) * 4 * CHUNK;
    if (tid < CHUNK) {
        const float start = __expf(sum);
        scale_k[tid] = beta[tid] * start * unit_k[tid];
        gates[tid] = start * unit_q[tid];
        gates[CHUNK + tid] = __expf(sums[CHUNK - 1] - sum) * unit_k[tid];
        gates[2 * CHUNK + tid] = sum;
        gates[3 * CHUNK + tid] = unit_k[tid];
    }
    u16 *terms = a.terms + (i64(chunk) * a.value_heads + head) * (Shape::TERMS / 2);
    float scores[8][4] = {};
    {
        float system[8][4] = {};
#pragma unroll
        for (int s = 0; s < Shape::STEPS; ++s) {
            u32 key[4], query[4];
            const int token = warp * 16 + (lane & 15);
            load_matrices<false>(key, tile_k + tile_unit<D>(token, s * 2 + (lane >> 4)) * 16);
            load_matrices<false>(query, tile_q + tile_unit<D>(token, s * 2 + (lane >> 4)) * 16);
#pragma unroll
            for (int n = 0; n < 4; ++n) {
                if (n > warp) break;
                u32 right[4];
                load_matrices<false>(right, tile_k + tile_unit<D>(n * 16 + (lane & 7) + (lane >> 4) * 8,
                                                                  s * 2 + (lane >> 3 & 1)) * 16);
                multiply(system[2 * n], key[0], key[1], key[2], key[3], right[0], right[1]);
                multiply(system[2 * n + 1], key[0], key[1], key[2], key[3], right[2], right[3]);
                multiply(scores[2 * n], query[0], query[1], query[2], query[3], right[0], right[1]);
                multiply(scores[2 * n + 1], query[0], query[1], query[2], query[3], right[2], right[3]);
            }
        }
#pragma unroll
        for (int n = 0; n < 8; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int row = warp * 16 + g + (i >> 1) * 8, column = n * 8 + q * 2 + (i & 1);
                const float between = row >= column ? __expf(sums[row] - sums[column]) * unit_k[column] : 0.f;
                M[row * LINE + column] = row > column ? system[n][i] * between * beta[row] * unit_k[row] : 0.f;
                scores[n][i] *= between * unit_q[row];
            }
    }
#pragma unroll
    for (int s = 0; s < 4; ++s)
        *(uint4 *)(terms + Shape::TILE / 2 + ((warp * 4 + s) * 32 + lane) * 8) = make_uint4(
            pack2(scores[2 * s][0], scores[2 * s][1]), pack2(scores[2 * s][2], scores[2 * s][3]),
            pack2(scores[2 * s + 1][0], scores[2 * s + 1][1]), pack2(scores[2 * s + 1][2], scores[2 * s + 1][3]));
    await_copies<0>();
    __syncthreads();
    invert<LINE>(M, X);
    float acc[D / 8][4];
    lower_product<D>(acc, X, beta, tile_v);
#pragma unroll
    for (int n = 0; n < D / 8; n += 2)
        *(uint4 *)(terms + Shape::TILE / 2 + CHUNK * CHUNK + ((n / 4 * 128 + tid) * 4 + n % 4) * 4) = make_uint4(
            pack2(acc[n][0], acc[n][1]), pack2(acc[n][2], acc[n][3]), pack2(acc[n + 1][0], acc[n + 1][1]),
            pack2(acc[n + 1][2], acc[n + 1][3]));
    lower_product<D>(acc, X, scale_k, tile_k);
#pragma unroll
    for (int s = 0; s < Shape::STEPS; ++s)
        *(uint4 *)(terms + ((warp * Shape::STEPS + s) * 32 + lane) * 8) = make_uint4(
            pack2(-acc[2 * s][0], -acc[2 * s][1]), pack2(-acc[2 * s][2], -acc[2 * s][3]),
            pack2(-acc[2 * s + 1][0], -acc[2 * s + 1][1]), pack2(-acc[2 * s + 1][2], -acc[2 * s + 1][3]));
}

struct DeltaScan {
    const u16 *tiles, *terms;
    const float *gates;
    float *state;  // [slots, Hv, D, D]
    u16 *core;     // [T, Hv * D]
    const i64 *starts, *done, *source, *target, *firsts, *emit_row, *emit_length, *emit_slot;  // firsts: chunk of each row
    int key_heads, value_heads, tiled, row, emits;  // row: the first with several tokens
};

#if __CUDA_ARCH__ >= 900
DEVICE void expect_bytes(u32 barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" :: "r"(barrier), "r"(bytes) : "memory");
}
DEVICE void copy_bulk(u32 to, const void *from, u32 bytes, u32 barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                 :: "r"(to), "l"(from), "r"(bytes), "r"(barrier) : "memory");
}
DEVICE void await_bytes(u32 barrier, u32 parity) {
    u32 there = 0;
    while (!there)
        asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
                     : "=r"(there) : "r"(barrier), "r"(parity) : "memory");
}
#endif
DEVICE void sync_half() { asm volatile("bar.sync 1, 128;" ::: "memory"); }

// 32 columns of a matrix in shared memory as right operands, rows of 64 bytes: unit u of row t at u ^ (t / 2 % 4).
DEVICE u32 narrow_unit(int t, int u) { return t * 4 + (u ^ (t >> 1 & 3)); }
DEVICE void load_columns(u32 (&b)[8], u32 matrix, int step) {
    const int lane = threadIdx.x & 31, t = step * 16 + (lane & 15);
    load_matrices<true>(*(u32(*)[4])&b[0], matrix + narrow_unit(t, lane >> 4) * 16);
    load_matrices<true>(*(u32(*)[4])&b[4], matrix + narrow_unit(t, 2 + (lane >> 4)) * 16);
}
DEVICE void multiply_columns(float (&acc)[4][4], const uint4 &a, const u32 (&b)[8]) {
#pragma unroll
    for (int n = 0; n < 4; ++n) multiply(acc[n], a.x, a.y, a.z, a.w, b[2 * n], b[2 * n + 1]);
}
DEVICE void store_columns(unsigned char *matrix, int row, const float (&acc)[4][4], int half, float scale) {
    const int q = threadIdx.x & 3;
#pragma unroll
    for (int n = 0; n < 4; ++n)
        *(u32 *)(matrix + narrow_unit(row, n) * 16 + q * 4) = pack2(acc[n][half * 2] * scale, acc[n][half * 2 + 1] * scale);
}

// Blocks (32 columns of the state, value head, row) of 256 threads. The first four warps have the state in registers,
// 16 T rows each, and make the updates u, the others make the outputs.
template <int D> struct Scan {
    using Shape = DeltaShape<D>;
    static constexpr int T = D >= 64 ? D / 64 : 1;
    const DeltaScan &a;
    unsigned char *memory, *state_columns, *updates, *scaled, *partial;
    int warp, lane, g, q, block, head, row, tokens;
    i64 start, done;
    float s[T][4][4];

    DEVICE Scan(const DeltaScan &args, unsigned char *shared) : a(args), memory(shared) {
        state_columns = memory + Shape::STAGES * Shape::STAGE;
        updates = state_columns + Shape::STATE, scaled = updates + Shape::UPDATE, partial = scaled + Shape::UPDATE;
        warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, q = lane & 3;
        block = blockIdx.x, head = blockIdx.y, row = a.row + blockIdx.z;
        start = a.starts[row], done = a.done[row], tokens = int(a.starts[row + 1] - start);
    }
    DEVICE int state_row(int t) const { return (warp * T + t) * 16 + g; }
    DEVICE bool has_rows(int t) const { return (warp * T + t) * 16 < D; }
    DEVICE float *state_at(i64 slot, int r) const {
        return a.state + ((slot * a.value_heads + head) * D + r) * D + block * 32 + q * 8;
    }
    DEVICE void load_state() {
#pragma unroll
        for (int t = 0; t < T; ++t)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                float4 x = make_float4(0, 0, 0, 0), y = x;
                if (done && has_rows(t)) {
                    const float *from = state_at(a.source[row], state_row(t) + half * 8);
                    x = load4(from), y = load4(from + 4);
                }
                s[t][0][half * 2] = x.x, s[t][0][half * 2 + 1] = x.y, s[t][1][half * 2] = x.z, s[t][1][half * 2 + 1] = x.w;
                s[t][2][half * 2] = y.x, s[t][2][half * 2 + 1] = y.y, s[t][3][half * 2] = y.z, s[t][3][half * 2 + 1] = y.w;
            }
    }
    DEVICE void store_state(i64 slot, const float (&x)[T][4][4]) const {
#pragma unroll
        for (int t = 0; t < T; ++t)
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                if (!has_rows(t)) continue;
                float *to = state_at(slot, state_row(t) + h * 8);
                store4(to, make_float4(x[t][0][h * 2], x[t][0][h * 2 + 1], x[t][1][h * 2], x[t][1][h * 2 + 1]));
                store4(to + 4, make_float4(x[t][2][h * 2], x[t][2][h * 2 + 1], x[t][3][h * 2], x[t][3][h * 2 + 1]));
            }
    }
    DEVICE void publish_state() {
#pragma unroll
        for (int t = 0; t < T; ++t)
#pragma unroll
            for (int half = 0; half < 2; ++half)
                if (has_rows(t)) store_columns(state_columns, state_row(t) + half * 8, s[t], half, 1.f);
    }
    // x = factor x + kT u
    DEVICE void advance(float (&x)[T][4][4], float factor, u32 tile_k, const unsigned char *u) const {
#pragma unroll
        for (int t = 0; t < T; ++t)
#pragma unroll
            for (int n = 0; n < 4; ++n)
#pragma unroll
                for (int i = 0; i < 4; ++i) x[t][n][i] *= factor;
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            u32 right[8];
            load_columns(right, shared_address(u), k);
#pragma unroll
            for (int t = 0; t < T; ++t) {
                if (!has_rows(t)) continue;
                u32 left[4];
                load_matrices<true>(left, tile_k + tile_unit<D>(k * 16 + (lane & 7) + (lane >> 4) * 8,
                                                                (warp * T + t) * 2 + (lane >> 3 & 1)) * 16);
                multiply_columns(x[t], make_uint4(left[0], left[1], left[2], left[3]), right);
            }
        }
    }
    // The states after tokens of this chunk that somebody wants, but for the chunk's last.
    DEVICE void emit(int first, int count, const float *gates, u32 tile_k) {
        for (int e = 0; e < a.emits; ++e) {
            if (a.emit_row[e] != row) continue;
            const i64 last = a.emit_length[e] - done - 1 - first;
            if (last < 0 || last >= count - 1) continue;
            const float *sums = gates + 2 * CHUNK, *unit = gates + 3 * CHUNK;
            for (int i = threadIdx.x; i < CHUNK * 16; i += 128) {
                const int t = i >> 4, at = narrow_unit(t, i >> 2 & 3) * 16 + (i & 3) * 4;
                const u32 u = *(const u32 *)(updates + at);
                const float factor = t <= last ? __expf(sums[last] - sums[t]) * unit[t] : 0.f;
                *(u32 *)(partial + at) = pack2(low(u) * factor, high(u) * factor);
            }
            sync_half();
            float x[T][4][4];
#pragma unroll
            for (int t = 0; t < T; ++t)
#pragma unroll
                for (int n = 0; n < 4; ++n)
#pragma unroll
                    for (int i = 0; i < 4; ++i) x[t][n][i] = s[t][n][i];
            advance(x, __expf(sums[last]), tile_k, partial);
            store_state(a.emit_slot[e], x);
            sync_half();
        }
    }
    DEVICE void emit_end(i64 length) {
        for (int e = 0; e < a.emits; ++e)
            if (a.emit_row[e] == row && a.emit_length[e] == length) store_state(a.emit_slot[e], s);
    }
#if __CUDA_ARCH__ >= 900
    DEVICE void fetch(int chunk, int stage, u32 barrier, i64 first_chunk) const {
        const u32 to = shared_address(memory + stage * Shape::STAGE);
        const i64 at = first_chunk + chunk;
        const int from = a.tiled ? head % a.key_heads : head / (a.value_heads / a.key_heads);
        const u16 *tiles = a.tiles + at * (2 * a.key_heads + a.value_heads) * CHUNK * D;
        const u16 *terms = a.terms + (at * a.value_heads + head) * (Shape::TERMS / 2);
        constexpr int P = CHUNK * CHUNK * 2;
        expect_bytes(barrier, Shape::STAGE);
        copy_bulk(to, tiles + from * CHUNK * D, Shape::TILE, barrier);
        copy_bulk(to + Shape::TILE, tiles + (a.key_heads + from) * CHUNK * D, Shape::TILE, barrier);
        copy_bulk(to + 2 * Shape::TILE, terms, Shape::TILE + P, barrier);
        copy_bulk(to + 3 * Shape::TILE + P, (const unsigned char *)terms + Shape::TILE + P + block * Shape::UPDATE,
                  Shape::UPDATE, barrier);
        copy_bulk(to + 3 * Shape::TILE + P + Shape::UPDATE, a.gates + (at * a.value_heads + head) * 4 * CHUNK,
                  4 * CHUNK * 4, barrier);
    }
    DEVICE void run() {
        const u32 barriers = shared_address(partial + Shape::UPDATE);
        const int chunks = (tokens + CHUNK - 1) / CHUNK;
        const i64 first_chunk = a.firsts[row];
        const bool copies = threadIdx.x == 128, states = warp < 4;
        if (copies) {
            for (int i = 0; i < Shape::STAGES; ++i)
                asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" :: "r"(barriers + i * 8) : "memory");
            asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
            for (int i = 0; i < Shape::STAGES - 1 && i < chunks; ++i) fetch(i, i, barriers + i * 8, first_chunk);
        }
        if (states) {
            load_state();
            publish_state();
        }
        __syncthreads();
        int stage = 0, parity = 0;
        for (int chunk = 0; chunk < chunks; ++chunk) {
            if (copies && chunk + Shape::STAGES - 1 < chunks) {
                const int next = stage ? stage - 1 : Shape::STAGES - 1;
                fetch(chunk + Shape::STAGES - 1, next, barriers + next * 8, first_chunk);
            }
            await_bytes(barriers + stage * 8, parity);
            const unsigned char *data = memory + stage * Shape::STAGE, *terms = data + 2 * Shape::TILE;
            const float *gates = (const float *)(terms + Shape::TILE + CHUNK * CHUNK * 2 + Shape::UPDATE);
            const u32 tile_q = shared_address(data), tile_k = tile_q + Shape::TILE;
            const int first = chunk * CHUNK, count = min(CHUNK, tokens - first), w = warp & 3;
            float acc[4][4];
            if (states) {
                const uint4 *u = (const uint4 *)(terms + Shape::TILE + CHUNK * CHUNK * 2) + threadIdx.x * 2;
#pragma unroll
                for (int n = 0; n < 4; n += 2) {
                    const uint4 x = u[n / 2];
                    acc[n][0] = low(x.x), acc[n][1] = high(x.x), acc[n][2] = low(x.y), acc[n][3] = high(x.y);
                    acc[n + 1][0] = low(x.z), acc[n + 1][1] = high(x.z), acc[n + 1][2] = low(x.w);
                    acc[n + 1][3] = high(x.w);
                }
            } else {
#pragma unroll
                for (int n = 0; n < 4; ++n)
#pragma unroll
                    for (int i = 0; i < 4; ++i) acc[n][i] = 0;
            }
#pragma unroll
            for (int k = 0; k < Shape::STEPS; ++k) {
                u32 right[8], left[4];
                load_columns(right, shared_address(state_columns), k);
                if (states) {
                    const uint4 x = ((const uint4 *)terms)[(w * Shape::STEPS + k) * 32 + lane];
                    left[0] = x.x, left[1] = x.y, left[2] = x.z, left[3] = x.w;
                } else {
                    load_matrices<false>(left, tile_q + tile_unit<D>(w * 16 + (lane & 15), k * 2 + (lane >> 4)) * 16);
                }
                multiply_columns(acc, make_uint4(left[0], left[1], left[2], left[3]), right);
            }
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int t = w * 16 + g + half * 8;
                if (states) {
                    store_columns(updates, t, acc, half, 1.f);
                    store_columns(scaled, t, acc, half, gates[CHUNK + t]);
                } else {
#pragma unroll
                    for (int n = 0; n < 4; ++n) acc[n][half * 2] *= gates[t], acc[n][half * 2 + 1] *= gates[t];
                }
            }
            __syncthreads();
            if (states) {
                if (a.emits) emit(first, count, gates, tile_k);
                advance(s, __expf(gates[2 * CHUNK + CHUNK - 1]), tile_k, scaled);
                publish_state();
                if (a.emits) emit_end(done + first + count);
            } else {
                const uint4 *scores = (const uint4 *)(terms + Shape::TILE);
#pragma unroll
                for (int k = 0; k < 4; ++k) {
                    if (k > w) break;
                    u32 right[8];
                    load_columns(right, shared_address(updates), k);
                    multiply_columns(acc, scores[(w * 4 + k) * 32 + lane], right);
                }
#pragma unroll
                for (int h = 0; h < 2; ++h) {
                    const int t = w * 16 + g + h * 8;
                    if (t < count)
                        *(uint4 *)(a.core + (start + first + t) * (a.value_heads * D) + head * D + block * 32 + q * 8) =
                            make_uint4(pack2(acc[0][h * 2], acc[0][h * 2 + 1]), pack2(acc[1][h * 2], acc[1][h * 2 + 1]),
                                       pack2(acc[2][h * 2], acc[2][h * 2 + 1]), pack2(acc[3][h * 2], acc[3][h * 2 + 1]));
                }
            }
            __syncthreads();
            if (++stage == Shape::STAGES) stage = 0, parity ^= 1;
        }
        if (states) store_state(a.target[row], s);
    }
#else
    DEVICE void run() {}
#endif
};

template <int D> DEVICE void delta_scan(const DeltaScan &a) {
    extern __shared__ __align__(128) unsigned char memory[];
    launch_dependents();
    wait();
    Scan<D>(a, memory).run();
}
