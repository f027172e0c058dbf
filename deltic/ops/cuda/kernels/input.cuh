
// The input of a product of up to 16 tokens, in shared memory.

// What a product does with its sums: writes them; adds them to y; writes silu(gate) * up; writes the sums over one
// device's columns, which are then summed over devices.
enum { kStore, kAdd, kGate, kPart };
// The form of an input: bfloat16; 16-bit integers; both; bfloat16 in the order of `put4`.
enum { kPlain, kFixed, kBoth, kPaired };

// The end of slice `index` of `count`, in units, as in `slice_ends` (deltic/ops/slices.py).
DEVICE constexpr int slice_end(int units, int count, int index) {
    int begin = 0;
    for (; count > 1; count /= 2) {
        const int first = (units + 1) / 2;
        if (index < count / 2) units = first;
        else begin += first, units -= first, index -= count / 2;
    }
    return begin + units;
}
// Sums slices in pairs. Neighbouring lanes have the slices of a call; several calls go through all slices.
struct PairedSum {
    float kept[3];  // pending sums of 1, 2 and 4 calls, each kept until the sum that it is paired with is there
    // v: the lane's slice. The call adds `slices` slices, a power of two, from `begin` on of `all`. Returns true after the last
    // ones; v of the first of these lanes is then the sum of all slices.
    DEVICE bool add(float &v, int begin, int slices, int all) {
        for (int apart = 1; apart < slices; apart *= 2) v += __shfl_xor_sync(~0u, v, apart);
        const int turn = begin / slices;
        bool pairs = slices < all;
#pragma unroll
        for (int level = 0; level < 3; ++level) {
            if (pairs && turn >> level & 1) v = kept[level] + v;
            else if (pairs) kept[level] = v, pairs = false;
        }
        return begin + slices >= all;
    }
};
DEVICE constexpr int slice_begin(int units, int count, int index) { return index ? slice_end(units, count, index - 1) : 0; }

// A line holds 64 columns of a tile as 16-bit integers: groups j and j + 4 of 32 columns. An integer is 256 * upper + lower,
// two signed bytes. Bytes 0 to 63 are the upper ones, 64 to 127 the lower ones. Three floats follow: the sums of both groups'
// integers, and the factor from integers to numbers. The n-th 16 of 64 bytes are the four columns from 4 n on and the four from
// 16 + 4 n on of group j, then of group j + 4: the order of tensor core fragments. A line has 144 bytes, so that four lines lie
// in different banks.
constexpr int LINE_BYTES = 144, LINES_BYTES = 4 * LINE_BYTES;

// Args: has x, scale, eps and tokens as in `Product`. HEAD: columns of a value head, if x is the outputs of value heads, which
// are normed first with the squares of slices of SLICE columns; else 0. FORM: kFixed is for tiles (packed.cuh; K is a multiple
// of 256): each 256 columns are 16-bit integers of at most 32,512. ONE: there is only one token.
template <class Args, int K, bool NORM, int HEAD, int SLICE, int FORM, bool ONE = false> struct Input {
    static constexpr int WARPS = 8;
    static constexpr bool FIXED = FORM == kFixed || FORM == kBoth;  // x is kept as integers
    const Args &a;
    const int tid, warp, lane;
    float *squares;  // [WARPS, 16]
    char *xs;        // [K / 32, T, 64 bytes]
    char *lines;     // [K / 256, T, 4, LINE_BYTES]

    DEVICE Input(const Args &args, float *of_squares)
        : a(args), tid(threadIdx.x), warp(threadIdx.x >> 5), lane(threadIdx.x & 31), squares(of_squares) {}
    static DEVICE void meet() { meet_eight_warps(); }
    DEVICE int tokens() const { return ONE ? 1 : a.tokens; }
    DEVICE char *place(int column, int token) const { return xs + (column / 32 * tokens() + token) * 64 + column % 32 * 2; }
    // Stores four columns. kPaired: column pairs 0, 2, 1, 3 of eight columns, the order of a lane's fragments in product.cuh.
    DEVICE void put4(int column, int token, uint2 v) {
        if constexpr (FORM == kPaired) {
            char *const to = place(column & ~7, token) + (column & 4);
            *(u32 *)to = v.x, *(u32 *)(to + 8) = v.y;
        } else *(uint2 *)place(column, token) = v;
    }
    DEVICE void put_words(int column, int token, uint4 v) {
        *(uint4 *)place(column, token) = FORM == kPaired ? make_uint4(v.x, v.z, v.y, v.w) : v;
    }
    // Stores the thread's eight columns. With integers, the whole warp must call this with the 256 columns of a tile.
    DEVICE void put8(int column, int token, const float (&v)[8]) {
        if constexpr (FORM != kFixed)
            put_words(column, token, make_uint4(narrow2(v[0], v[1]), narrow2(v[2], v[3]), narrow2(v[4], v[5]), narrow2(v[6], v[7])));
        if constexpr (FIXED) {
            u32 most = 0, q[8], sum = 0;
#pragma unroll
            for (int i = 0; i < 8; ++i) most = max(most, __float_as_uint(v[i]) & 0x7fffffffu);
            const float top = __uint_as_float(warp_max(most)), inverse = top > 1e-30f ? 32512.f * reciprocal(top) : 0.f;
#pragma unroll
            for (int i = 0; i < 8; ++i) sum += q[i] = __float_as_uint(__fmaf_rn(v[i], inverse, BIAS));
            const int group = lane >> 2;
            char *const line = lines + (column / 256 * tokens() + token) * LINES_BYTES + group % 4 * LINE_BYTES;
            u32 *const at = (u32 *)(line + lane % 2 * 32 + group / 4 * 8 + lane % 4 / 2 * 4);
            at[16] = bytes_of_four(q[0], q[1], q[2], q[3], 0x40), at[20] = bytes_of_four(q[4], q[5], q[6], q[7], 0x40);
#pragma unroll
            for (int i = 0; i < 8; ++i) q[i] += 128;
            at[0] = bytes_of_four(q[0], q[1], q[2], q[3], 0x51), at[4] = bytes_of_four(q[4], q[5], q[6], q[7], 0x51);
            sum += __shfl_xor_sync(~0u, sum, 1);
            sum += __shfl_xor_sync(~0u, sum, 2);
            if (lane % 4 == 0) {
                *(float *)(line + 128 + group / 4 * 4) = float(int(sum - 32 * __float_as_uint(BIAS)));
                if (group < 4) *(float *)(line + 136) = top * (1.f / 32512.f);
            }
        }
    }
    static constexpr float BIAS = 12582912.f;  // 1.5 * 2^23: the last bit of its mantissa is worth 1
    static DEVICE u32 bytes_of_four(u32 a, u32 b, u32 c, u32 d, u32 which) {
        return __byte_perm(__byte_perm(a, b, which), __byte_perm(c, d, which), 0x5410);
    }
    // Stages x times the scale of the norm. The factor of a token is applied to the product's sums (`factor`). N: tokens at
    // once. A thread issues the loads of AHEAD passes before it uses any of them.
    template <int N> DEVICE void stage_normalised(int token) {
        constexpr int PASSES = (K + 1023) / 1024, AHEAD = least(PASSES, N == 1 ? 8 : N == 2 ? 5 : 2);
        float sum[N] = {};
#pragma unroll 1
        for (int from = 0; from < PASSES; from += AHEAD) {
            float4 v[AHEAD][N];
#pragma unroll
            for (int p = 0; p < AHEAD; ++p)
#pragma unroll
                for (int n = 0; n < N; ++n) {
                    const int k = (from + p) * 1024 + tid * 4;
                    v[p][n] = k < K && token + n < tokens() ? load4((const float *)a.x + i64(token + n) * K + k)
                                                            : make_float4(0, 0, 0, 0);
                }
#pragma unroll
            for (int p = 0; p < AHEAD; ++p) {
                const int k = (from + p) * 1024 + tid * 4;
                const float4 s = k < K ? __ldg((const float4 *)(a.scale + k)) : make_float4(0, 0, 0, 0);
#pragma unroll
                for (int n = 0; n < N; ++n) {
                    const float4 f = v[p][n];
                    sum[n] = __fmaf_rn(f.x, f.x, __fmaf_rn(f.y, f.y, __fmaf_rn(f.z, f.z, __fmaf_rn(f.w, f.w, sum[n]))));
                    if (k < K && token + n < tokens())
                        put4(k, token + n, make_uint2(narrow2(f.x * s.x, f.y * s.y), narrow2(f.z * s.z, f.w * s.w)));
                }
            }
        }
        put_squares(token, sum);
    }
    // As `stage_normalised`, for tiles: a warp stages 256 columns at once.
    template <int N> DEVICE void stage_normalised_tiles(int token) {
        constexpr int PASSES = (K + 2047) / 2048, AHEAD = least(PASSES, N == 1 ? 4 : N == 2 ? 2 : 1);
        float sum[N] = {};
#pragma unroll 1
        for (int from = 0; from < PASSES; from += AHEAD) {
            float v[AHEAD][N][8];
#pragma unroll
            for (int p = 0; p < AHEAD; ++p)
#pragma unroll
                for (int n = 0; n < N; ++n) {
                    const int k = (from + p) * 2048 + tid * 8;
                    if (k < K && token + n < tokens()) load_all<8>(v[p][n], (const float *)a.x + i64(token + n) * K + k);
                    else {
#pragma unroll
                        for (int i = 0; i < 8; ++i) v[p][n][i] = 0;
                    }
                }
#pragma unroll
            for (int p = 0; p < AHEAD; ++p) {
                const int k = (from + p) * 2048 + tid * 8;
                float s[8];
                if (k < K) load_all<8>(s, a.scale + k);
#pragma unroll
                for (int n = 0; n < N; ++n) {
                    float f[8], part[2];
#pragma unroll
                    for (int i = 0; i < 8; ++i) {
                        const float x = v[p][n][i];
                        part[i % 2] = i < 2 ? __fmul_rn(x, x) : __fmaf_rn(x, x, part[i % 2]);
                        f[i] = __fmul_rn(x, s[i]);
                    }
                    sum[n] = __fadd_rn(__fadd_rn(part[0], part[1]), sum[n]);
                    if (k < K && token + n < tokens()) put8(k, token + n, f);
                }
            }
        }
        put_squares(token, sum);
    }
    // Stores the warp's sums of squares of N tokens.
    template <int N> DEVICE void put_squares(int token, const float (&sum)[N]) {
#pragma unroll
        for (int n = 0; n < N; ++n) {
            const float all = warp_sum(sum[n]);
            if (lane == 0 && token + n < tokens()) squares[warp * 16 + token + n] = all;
        }
    }
    // Stages the outputs of value heads as written by gdn.cuh: gated, without the factor of the norm. The sums of squares of
    // their slices follow in x.
    DEVICE void stage_heads(int token) {
        constexpr int PASSES = (K + 2047) / 2048, SLICES = HEAD / SLICE, STRIDE = heads_stride(K, SLICE);
        const float *const x = (const float *)a.x + i64(token) * STRIDE;
        float v[PASSES][8], squares[PASSES][SLICES];
#pragma unroll
        for (int p = 0; p < PASSES; ++p) {
            const int k = min(p * 2048 + tid * 8, K - 8);
            load_all<8>(v[p], x + k);
            // every block reads all of these few L2 lines: loads of four numbers make fewer requests
            const float *const own = x + K + k / HEAD * SLICES;
            if constexpr (SLICES % 4 == 0) {
                load_all<SLICES>(squares[p], own);
            } else {
#pragma unroll
                for (int i = 0; i < SLICES; ++i) squares[p][i] = load(own + i);
            }
        }
#pragma unroll
        for (int p = 0; p < PASSES; ++p) {
            const int k = p * 2048 + tid * 8;
            float mean = 0;
#pragma unroll
            for (int i = 0; i < SLICES; ++i) mean += squares[p][i];
            const float factor = rsqrtf(mean / HEAD + a.eps);
#pragma unroll
            for (int j = 0; j < 8; j += 2) {  // rounded to bfloat16, as where gdn.cuh stores normed heads
                const u32 two = narrow2(__fmul_rn(v[p][j], factor), __fmul_rn(v[p][j + 1], factor));
                v[p][j] = low(two), v[p][j + 1] = high(two);
            }
            if (k < K) put8(k, token, v[p]);
        }
    }
    // Stages `width` columns of x from `begin` on, without a norm. WHOLE: all columns. A thread issues N loads before it uses
    // any of them.
    template <bool WHOLE> DEVICE void stage_columns(int begin, int width) {
        constexpr int N = ONE ? least((K + 2047) / 2048, 9) : K > 8192 ? 6 : K > 4096 ? 4 : 2;
        const int each = WHOLE ? K / 8 : width / 8, count = tokens() * each;
#pragma unroll 1
        for (int first = tid; first < count; first += 256 * N) {
            uint4 v[N];
#pragma unroll
            for (int n = 0; n < N; ++n) {
                const int e = first + n * 256, token = e / each;
                if (e < count) v[n] = load8((const u16 *)a.x + (WHOLE ? i64(e) * 8 : i64(token) * K + begin + (e - token * each) * 8));
            }
#pragma unroll
            for (int n = 0; n < N; ++n) {
                const int e = first + n * 256, token = e / each, column = (e - token * each) * 8;
                if (e >= count) continue;
                if constexpr (!FIXED) put_words(column, token, v[n]);
                else {
                    const float f[8] = {low(v[n].x), high(v[n].x), low(v[n].y), high(v[n].y),
                                        low(v[n].z), high(v[n].z), low(v[n].w), high(v[n].w)};
                    put8(column, token, f);
                }
            }
        }
    }
    DEVICE void stage() {
        if constexpr (HEAD > 0) {
            for (int token = 0; token < tokens(); ++token) stage_heads(token);
        } else if constexpr (NORM) {
            constexpr int N = K > 2048 ? 2 : 4;
            if (tokens() == 1) {
                if constexpr (FIXED) stage_normalised_tiles<1>(0);
                else stage_normalised<1>(0);
            } else if constexpr (!ONE) {
                for (int token = 0; token < tokens(); token += N) {
                    if constexpr (FIXED) stage_normalised_tiles<N>(token);
                    else stage_normalised<N>(token);
                }
            }
        } else {
            stage_columns<true>(0, K);
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
