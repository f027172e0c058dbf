// The gated delta rule for rows of several tokens, in chunks of 64 (arXiv 2412.06464, section 3.3). S is the state before a
// chunk, S' the state after it, D(t, i) the decay from token i to token t, f the factors that normalise queries and keys:
//   T = (1 + tril(beta D f f k kT, -1))^-1, u = T beta v - (T beta D(., start) f k) S,
//   o = D(., start) f q S + tril(D f f q kT) u, S' = D(end, start) S + (D(end, .) f k)T u.
// `delta_terms` computes all that does not depend on S, for all chunks at once. `delta_scan` loops over the chunks of a row.
// Tensor core operands are bfloat16. Sums, states and the inverse are float32 (products within the inverse: tf32).

template <bool TRANS> DEVICE void load_matrices(u32 (&r)[4], u32 address) {
    if constexpr (TRANS)
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                     : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address) : "memory");
    else
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                     : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address) : "memory");
}
template <bool TRANS> DEVICE void store_matrices(u32 address, u32 a, u32 b, u32 c, u32 d) {
#if __CUDA_ARCH__ >= 900
    if constexpr (TRANS)
        asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1,%2,%3,%4};"
                     :: "r"(address), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
    else
        asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1,%2,%3,%4};"
                     :: "r"(address), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
#else
    const int lane = threadIdx.x & 31, g = lane >> 2, q = lane & 3;
    const u32 words[4] = {a, b, c, d};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        if constexpr (TRANS) {
            const u32 one = __shfl_sync(~0u, address, i * 8 + q * 2), two = __shfl_sync(~0u, address, i * 8 + q * 2 + 1);
            asm volatile("st.shared.u16 [%0], %1;" :: "r"(one + g * 2), "h"(u16(words[i])) : "memory");
            asm volatile("st.shared.u16 [%0], %1;" :: "r"(two + g * 2), "h"(u16(words[i] >> 16)) : "memory");
        } else {
            const u32 row = __shfl_sync(~0u, address, i * 8 + g);
            asm volatile("st.shared.u32 [%0], %1;" :: "r"(row + q * 4), "r"(words[i]) : "memory");
        }
    }
#endif
}

struct DeltaTerms {
    const u16 *proj;     // [T, stride]: ... z, b, a
    const u16 *tiles;    // [N, 2 Hk + Hv]: tiles [64, D] (prompt.cuh) of N chunks
    const float *units;  // [N, 2 Hk, 64]: 1 / length of queries and keys
    const float *decay, *dt_bias;
    u16 *terms;          // [N, Hv]: tiles of W [64, D], P [64, 64] and U [64, D], where u = U - W S, o = ... + P u
    float *gates;        // [N, Hv, 4, 64]: factors of q S, of u in S', sums of log decays, 1 / length of keys
    const i64 *starts, *chunks;
    int key_heads, value_heads, stride, gate_column, tiled;  // gate_column: of b
};

template <int D> struct DeltaShape {
    static constexpr int TILE = CHUNK * D * 2, SCORES = CHUNK * CHUNK * 2, TERMS = 2 * TILE + SCORES, STEPS = D / 16,
                         LINE = 72, MATRIX = CHUNK * LINE * 4,           // bytes of a float32 matrix
                         INNER = 2 * MATRIX + TILE + 6 * CHUNK * 4,  // shared memory of delta_terms: X, M, k, vectors
                         COLUMNS = D >= 64 ? 64 : D, SLICE = CHUNK * COLUMNS * 2,
                         STAGE = 3 * TILE + SCORES + SLICE + 4 * CHUNK * 4, STAGES = 3;
    static_assert(MATRIX >= TILE && STAGE % 1024 == 0, "tiles do not fit");
};

// acc = T diag(scale) tile, with a lower triangular T [64, 64] and a tile [64, D]. Warp w computes rows 16 w ... 16 w + 15.
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
            left[i] = narrow2(t.x * f.x, t.y * f.y);
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

DEVICE u32 round_tf32(float x) {
    u32 r;
    asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(r) : "f"(x));
    return r;
}
// One warp: to [16, 8] = sign * left [16, K] * right [K, 8], in tf32.
template <int LINE, int K> DEVICE void block_product(float *to, const float *left, const float *right, float sign) {
    const int lane = threadIdx.x & 31, g = lane >> 2, q = lane & 3;
    float d[4] = {};
#pragma unroll
    for (int k = 0; k < K; k += 8) {
        u32 a[4], b[2];
#pragma unroll
        for (int i = 0; i < 4; ++i) a[i] = round_tf32(left[(g + (i & 1) * 8) * LINE + k + q + (i >> 1) * 4]);
#pragma unroll
        for (int i = 0; i < 2; ++i) b[i] = round_tf32(right[(k + q + i * 4) * LINE + g]);
        asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
    }
#pragma unroll
    for (int h = 0; h < 2; ++h)
        *(float2 *)(to + (g + h * 8) * LINE + q * 2) = make_float2(sign * d[h * 2], sign * d[h * 2 + 1]);
}

// X = (1 + M)^-1 for a strictly lower triangular M, both [64, LINE]; M above its diagonal is scratch memory. A thread for each
// column inverts the diagonal blocks of 16. Pairs of blocks follow: the inverse of ((A, 0), (B, C)) has the lower left block
// -C' B A', with the inverses A' and C'.
template <int LINE> DEVICE void invert(float *M, float *X) {
    const int tid = threadIdx.x, warp = tid >> 5;
    if (tid < 64) {
        const int block = tid & 48, column = tid & 15;
        const float *m = M + block * LINE + block;
        float x[16];
#pragma unroll
        for (int i = 0; i < 16; ++i) {
            float sums[2] = {i == column ? 1.f : 0.f, 0.f};
#pragma unroll
            for (int j = 0; j < i; j += 4) {
                const float4 row = *(const float4 *)(m + i * LINE + j);
                sums[0] -= row.x * x[j];
                if (j + 1 < i) sums[1] -= row.y * x[j + 1];
                if (j + 2 < i) sums[0] -= row.z * x[j + 2];
                if (j + 3 < i) sums[1] -= row.w * x[j + 3];
            }
            x[i] = sums[0] + sums[1];
            X[(block + i) * LINE + block + column] = x[i];
        }
    } else {  // zeros in the blocks above, which later products read
        for (int i = tid - 64; i < 512; i += 64)
            X[(i >> 8) * 32 * LINE + (i >> 4 & 15) * LINE + (i >> 8) * 32 + 16 + (i & 15)] = 0;
    }
    __syncthreads();
    const int at = (warp >> 1) * 32, c = (warp & 1) * 8;
    float *m = M + at * LINE + at, *x = X + at * LINE + at;
    block_product<LINE, 16>(m + 16 + c, m + 16 * LINE, x + c, 1.f);
    __syncthreads();
    block_product<LINE, 16>(x + 16 * LINE + c, x + 16 * LINE + 16, m + 16 + c, -1.f);
    __syncthreads();
    const int r = (warp >> 1) * 16;
#pragma unroll
    for (int n = 0; n < 2; ++n)
        block_product<LINE, 32>(M + r * LINE + 32 + c * 2 + n * 8, M + (32 + r) * LINE, X + c * 2 + n * 8, 1.f);
    __syncthreads();
#pragma unroll
    for (int n = 0; n < 2; ++n)
        block_product<LINE, 32>(X + (32 + r) * LINE + c * 2 + n * 8, X + (32 + r) * LINE + 32,
                                M + 32 + c * 2 + n * 8, -1.f);
    __syncthreads();
}

// Grid [Hv, N]: a block of 128 threads for each value head of a chunk.
template <int D> DEVICE void delta_terms(const DeltaTerms &a) {
    using Shape = DeltaShape<D>;
    constexpr int LINE = Shape::LINE;
    extern __shared__ __align__(1024) unsigned char memory[];
    float *X = (float *)memory, *M = (float *)(memory + Shape::MATRIX);  // X holds q before the inverse, M holds v after it
    unsigned char *rest = memory + 2 * Shape::MATRIX + Shape::TILE;
    float *sums = (float *)rest, *beta = sums + CHUNK, *unit_q = beta + CHUNK, *unit_k = unit_q + CHUNK,
          *scale_k = unit_k + CHUNK, *carry = scale_k + CHUNK;
    const u32 tile_q = shared_address(memory), tile_v = tile_q + Shape::MATRIX, tile_k = tile_v + Shape::MATRIX;
    launch_dependents();
    wait();
    const int tid = threadIdx.x, warp = tid >> 5, lane = tid & 31, g = lane >> 2, q = lane & 3;
    const int head = blockIdx.x, chunk = blockIdx.y;
    const int from = a.tiled ? head % a.key_heads : head / (a.value_heads / a.key_heads);
    const u16 *tiles = a.tiles + i64(chunk) * (2 * a.key_heads + a.value_heads) * CHUNK * D;
    for (int i = tid; i < Shape::TILE / 16; i += 128) {
        copy_async<16>(tile_q + i * 16, tiles + from * CHUNK * D + i * 8);
        copy_async<16>(tile_k + i * 16, tiles + (a.key_heads + from) * CHUNK * D + i * 8);
    }
    float sum = 0;
    if (tid < CHUNK) {
        const int row = int(a.chunks[2 * chunk]);
        const i64 token = a.starts[row] + a.chunks[2 * chunk + 1] + tid;
        float b = 0;
        if (token < a.starts[row + 1]) {
            const u16 *gates = a.proj + token * a.stride + a.gate_column + head;
            b = sigmoid(load(gates));
            const float steep = load(gates + a.value_heads) + __ldg(a.dt_bias + head);
            sum = __ldg(a.decay + head) * (steep > 20.f ? steep : log1pf(exponential(steep)));
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
    await_copies();
    __syncthreads();
    float *gates = a.gates + (i64(chunk) * a.value_heads + head) * 4 * CHUNK;
    if (tid < CHUNK) {
        const float start = exponential(sum);
        scale_k[tid] = beta[tid] * start * unit_k[tid];
        gates[tid] = start * unit_q[tid];
        gates[CHUNK + tid] = exponential(sums[CHUNK - 1] - sum) * unit_k[tid];
        gates[2 * CHUNK + tid] = sum;
        gates[3 * CHUNK + tid] = unit_k[tid];
    }
    u16 *terms = a.terms + (i64(chunk) * a.value_heads + head) * (Shape::TERMS / 2);
    u16 *scores_tile = terms + Shape::TILE / 2, *updates = scores_tile + Shape::SCORES / 2;
    {
        float scores[8][4] = {}, system[8][4] = {};
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
            for (int h = 0; h < 2; ++h) {
                const int row = warp * 16 + g + h * 8, column = n * 8 + q * 2;
                u32 *const score = (u32 *)(scores_tile + tile_unit<64>(row, n) * 8 + q * 2);
                if (n > warp * 2 + 1) {
                    *score = 0;
                    continue;
                }
                const float2 from = *(const float2 *)(sums + column), unit = *(const float2 *)(unit_k + column);
                const float x = row >= column ? exponential(sums[row] - from.x) * unit.x : 0.f;
                const float y = row > column ? exponential(sums[row] - from.y) * unit.y : 0.f;
                const float own = beta[row] * unit_k[row];
                *(float2 *)(M + row * LINE + column) = make_float2(
                    row > column ? system[n][h * 2] * x * own : 0.f, row > column + 1 ? system[n][h * 2 + 1] * y * own : 0.f);
                *score = narrow2(scores[n][h * 2] * x * unit_q[row], scores[n][h * 2 + 1] * y * unit_q[row]);
            }
    }
    __syncthreads();
    invert<LINE>(M, X);
    for (int i = tid; i < Shape::TILE / 16; i += 128)
        copy_async<16>(tile_v + i * 16, tiles + (2 * a.key_heads + head) * CHUNK * D + i * 8);
    float acc[D / 8][4];
    lower_product<D>(acc, X, scale_k, tile_k);
    await_copies();
    __syncthreads();
#pragma unroll
    for (int n = 0; n < D / 8; n += 2)  // W replaces k; a warp writes and reads its own rows only
        store_matrices<false>(tile_k + tile_unit<D>(warp * 16 + (lane & 15), n + (lane >> 4)) * 16,
                              narrow2(acc[n][0], acc[n][1]), narrow2(acc[n][2], acc[n][3]),
                              narrow2(acc[n + 1][0], acc[n + 1][1]), narrow2(acc[n + 1][2], acc[n + 1][3]));
    __syncwarp();
    constexpr int PIECE = Shape::COLUMNS / 8;
#pragma unroll
    for (int i = 0; i < 16 * D / 8; i += 32) {
        const int at = i / (16 * PIECE) * (CHUNK * PIECE) + warp * 16 * PIECE + i % (16 * PIECE) + lane;
        ((uint4 *)terms)[at] = ((const uint4 *)(memory + 2 * Shape::MATRIX))[at];
    }
    lower_product<D>(acc, X, beta, tile_v);
#pragma unroll
    for (int n = 0; n < D / 8; n += 4)
#pragma unroll
        for (int h = 0; h < 2; ++h)
            *(uint4 *)(updates + tile_unit<D>(warp * 16 + g + h * 8, n + q) * 8) = make_uint4(
                narrow2(acc[n][h * 2], acc[n][h * 2 + 1]), narrow2(acc[n + 1][h * 2], acc[n + 1][h * 2 + 1]),
                narrow2(acc[n + 2][h * 2], acc[n + 2][h * 2 + 1]), narrow2(acc[n + 3][h * 2], acc[n + 3][h * 2 + 1]));
}
