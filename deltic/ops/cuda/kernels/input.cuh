
// The input of a product of up to 16 tokens, in shared memory.
enum { kStore, kAdd, kGate };  // what becomes of a product's sums

// Args: has x, scale, gate, eps, tokens and stride as `Product` says. HEAD: columns of a value head, whose outputs are
// normed and gated first as in gdn.cuh, squares by slices of SLICE; 0: not. PACKED: for tiles (packed.cuh), K is a multiple
// of 256, and sums over 32 columns are wanted too.
template <class Args, int K, bool NORM, int HEAD, int SLICE, bool PACKED> struct Input {
    static constexpr int WARPS = 8;
    const Args &a;
    const int tid, warp, lane;
    float *squares;  // [WARPS, 16]
    char *xs;        // [K / 32, T, 64 bytes]
    char *sums;      // of tiles [K / 256, T, 32 bytes]: over 32 columns, as two bf16, the second what the first has lost

    DEVICE Input(const Args &args, float *of_squares)
        : a(args), tid(threadIdx.x), warp(threadIdx.x >> 5), lane(threadIdx.x & 31), squares(of_squares) {}
    static DEVICE void meet() { meet_eight_warps(); }
    // Of a tile a lane has four columns each of both halves of 32; else eight in a row.
    DEVICE char *place(int column, int token) const {
        const int j = column % 32, at = PACKED ? (j & 12) * 4 + (j >> 4) * 8 : j * 2;
        return xs + (column / 32 * a.tokens + token) * 64 + at;
    }
    DEVICE void keep_sum(int column, int token, float sum) {
        if (column % 32) return;
        const u16 first = narrow(sum);
        u16 *to = (u16 *)(sums + (column / 256 * a.tokens + token) * 32 + column / 64 % 4 * 8 + column / 32 % 2 * 2);
        to[0] = first, to[2] = narrow(sum - wide(first));
    }
    // Of tiles whole warps come here, with columns one behind the other.
    DEVICE void put4(int column, int token, uint2 v) {
        *(uint2 *)place(column, token) = v;
        if constexpr (PACKED) {
            float sum = (low(v.x) + high(v.x)) + (low(v.y) + high(v.y));
            for (int other = 1; other < 8; other *= 2) sum += __shfl_xor_sync(~0u, sum, other);
            keep_sum(column, token, sum);
        }
    }
    DEVICE void put8(int column, int token, uint4 v) {
        if constexpr (PACKED) {
            *(uint2 *)place(column, token) = make_uint2(v.x, v.y);
            *(uint2 *)place(column + 4, token) = make_uint2(v.z, v.w);
            float sum = ((low(v.x) + high(v.x)) + (low(v.y) + high(v.y))) + ((low(v.z) + high(v.z)) + (low(v.w) + high(v.w)));
            for (int other = 1; other < 4; other *= 2) sum += __shfl_xor_sync(~0u, sum, other);
            keep_sum(column, token, sum);
        } else *(uint4 *)place(column, token) = v;
    }
    // x into shared memory; with a norm, times its scale: what is the same for a whole token is multiplied at the end.
    template <int N> DEVICE void stage_normalised(int token) {
        constexpr int PASSES = (K + 1023) / 1024;
        float4 v[PASSES][N];
#pragma unroll
        for (int p = 0; p < PASSES; ++p)
#pragma unroll
            for (int n = 0; n < N; ++n) {
                const int k = p * 1024 + tid * 4;
                v[p][n] = k < K && token + n < a.tokens ? load4((const float *)a.x + i64(token + n) * K + k)
                                                        : make_float4(0, 0, 0, 0);
            }
        float sum[N];
#pragma unroll
        for (int p = 0; p < PASSES; ++p) {
            const int k = p * 1024 + tid * 4;
            const float4 s = k < K ? __ldg((const float4 *)(a.scale + k)) : make_float4(0, 0, 0, 0);
#pragma unroll
            for (int n = 0; n < N; ++n) {
                const float4 f = v[p][n];
                sum[n] = __fmaf_rn(f.x, f.x, __fmaf_rn(f.y, f.y, __fmaf_rn(f.z, f.z, __fmaf_rn(f.w, f.w, p ? sum[n] : 0.f))));
                if (k < K && token + n < a.tokens)
                    put4(k, token + n, make_uint2(narrow2(f.x * s.x, f.y * s.y), narrow2(f.z * s.z, f.w * s.w)));
            }
        }
#pragma unroll
        for (int n = 0; n < N; ++n) {
            const float all = warp_sum(sum[n]);
            if (lane == 0 && token + n < a.tokens) squares[warp * 16 + token + n] = all;
        }
    }
    // Eight columns of a thread, which have their squares from the threads that have the head's others.
    DEVICE void stage_heads(int token) {
        for (int first = 0; first < K; first += 2048) {
            const int k = first + tid * 8, place_k = min(k, K - 8);
            float v[8], z[8], scale[8], square[8], mean = 0;
            load_all<8>(v, (const float *)a.x + i64(token) * K + place_k);
            load_all<8>(z, a.gate + i64(token) * a.stride + place_k);
            load_all<8>(scale, a.scale + place_k % HEAD);
#pragma unroll
            for (int j = 0; j < 8; ++j) square[j] = __fmul_rn(v[j], v[j]);
#pragma unroll
            for (int other = SLICE / 16; other; other >>= 1)
#pragma unroll
                for (int j = 0; j < 8; ++j) square[j] += __shfl_xor_sync(~0u, square[j], other);
#pragma unroll
            for (int other = 4; other; other >>= 1)
#pragma unroll
                for (int j = 0; j < other; ++j) square[j] += square[j + other];
#pragma unroll
            for (int i = 0; i < HEAD / SLICE; ++i) mean += __shfl_sync(~0u, square[0], i * (SLICE / 8), HEAD / 8);
            const float factor = rsqrtf(mean / HEAD + a.eps);
#pragma unroll
            for (int j = 0; j < 8; ++j) v[j] = v[j] * factor * scale[j] * silu(z[j]);
            if (k < K)
                put8(k, token, make_uint4(narrow2(v[0], v[1]), narrow2(v[2], v[3]), narrow2(v[4], v[5]),
                                          narrow2(v[6], v[7])));
        }
    }
    DEVICE void stage() {
        if constexpr (HEAD > 0) {
            for (int token = 0; token < a.tokens; ++token) stage_heads(token);
        } else if constexpr (NORM) {
            constexpr int N = K > 2048 ? 2 : 4;
            if (a.tokens == 1) stage_normalised<1>(0);
            else
                for (int token = 0; token < a.tokens; token += N) stage_normalised<N>(token);
        } else {
#pragma unroll 4
            for (int e = tid; e < a.tokens * (K / 8); e += 256) {
                const int token = e / (K / 8);
                put8((e - token * (K / 8)) * 8, token, load8((const u16 *)a.x + i64(e) * 8));
            }
        }
        meet();
    }
    DEVICE float factor(int token) const {
        float sum = 0;
#pragma unroll
        for (int i = 0; i < WARPS; ++i) sum += squares[i * 16 + token];
        return rsqrtf(sum / K + a.eps);
    }
};
