// Types of keys and values in the pages: bfloat16 (u16), float8 e4m3 (u8), or Int4: rotated and rounded to four or five bits,
// as deltic/ops/kv.py describes. e4m3 has no infinity: numbers beyond its largest one, 448, become 448. Every kernel that
// writes K/V rounds the same float32 number once.

// Rounds to the nearest e4m3 number, ties to even.
DEVICE u32 round_e4m3(float x) {
    const u32 bits = __float_as_uint(x), sign = bits >> 24 & 0x80, size = bits & 0x7fffffff;
    if (size > 0x7f800000) return 0x7f;  // NaN
    if (size >= 0x43e00000) return sign | 0x7e;
    if (size < 0x3c800000) return sign | u32(__float2int_rn(__uint_as_float(size) * 512.f));  // subnormal: multiples of 2^-9
    return sign | ((size + 0x7ffff + (size >> 20 & 1)) >> 20) - 960;
}
// Rounds two numbers. The first one is in the lower byte.
DEVICE u32 narrow2_e4m3(float lo, float hi) {
#if __CUDA_ARCH__ >= 890
    u16 r;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(r) : "f"(hi), "f"(lo));
    return r;
#else
    return round_e4m3(lo) | round_e4m3(hi) << 8;
#endif
}
// Widens the number in the lowest byte. Its bits are those of a half that is 256 times smaller.
DEVICE float spread_e4m3(u32 x) {
    return (x & 0x7f) == 0x7f ? __uint_as_float(0x7fffffff) : half_of((x & 0x80) << 8 | (x & 0x7f) << 7) * 256.f;
}
// Widens one of the numbers in the lower two bytes.
DEVICE float wide_e4m3(u32 x, bool second) {
#if __CUDA_ARCH__ >= 890
    u32 both;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(both) : "h"(u16(x)));
    return half_of(second ? both >> 16 : both);
#else
    return spread_e4m3(second ? x >> 8 : x);
#endif
}
// Loads N consecutive numbers, four per word.
template <int N> DEVICE void load_words(u32 (&w)[(N + 3) / 4], const u8 *p) {
    if constexpr (N == 2) w[0] = __ldcg((const u16 *)p);
    if constexpr (N == 4) w[0] = __ldcg((const u32 *)p);
    if constexpr (N == 8) {
        const uint2 x = __ldcg((const uint2 *)p);
        w[0] = x.x, w[1] = x.y;
    }
}
template <int N> DEVICE void round_all(u32 (&w)[(N + 3) / 4], const float (&v)[N]) {
#pragma unroll
    for (int i = 0; i < N; i += 2) {
        const u32 both = narrow2_e4m3(v[i], v[i + 1]);
        w[i / 4] = i % 4 ? w[i / 4] | both << 16 : both;
    }
}
template <int N> DEVICE void store_all(u8 *p, const float (&v)[N]) {
    u32 w[(N + 3) / 4];
    round_all<N>(w, v);
    if constexpr (N == 2) {
        asm volatile("st.global.u16 [%0], %1;" :: "l"(p), "h"(u16(w[0])) : "memory");
    } else {
#pragma unroll
        for (int i = 0; i < N; i += 4) asm volatile("st.global.u32 [%0], %1;" :: "l"(p + i), "r"(w[i / 4]) : "memory");
    }
}

// N numbers of a head vector in the type of the pages.
template <int N, class KV> struct Vector {
    static constexpr bool SMALL = sizeof(KV) == 1;
    static constexpr int WORDS = SMALL ? (N + 3) / 4 : N / 2;
    u32 w[WORDS];
    DEVICE void read(const KV *p) { load_words<N>(w, p); }
    DEVICE void take(const u32 *p) {
#pragma unroll
        for (int i = 0; i < WORDS; ++i) w[i] = p[i];
    }
    DEVICE void clear() {
#pragma unroll
        for (int i = 0; i < WORDS; ++i) w[i] = 0;
    }
    DEVICE void round(const float (&v)[N]) {
        if constexpr (SMALL) {
            round_all<N>(w, v);
        } else {
#pragma unroll
            for (int i = 0; i < N; i += 2) w[i / 2] = narrow2(v[i], v[i + 1]);
        }
    }
    DEVICE float at(int i) const {
        if constexpr (SMALL) return wide_e4m3(i & 2 ? w[i / 4] >> 16 : w[i / 4], i & 1);
        else return i & 1 ? high(w[i / 2]) : low(w[i / 2]);
    }
};

// ---- Int4

struct Int4;
template <class KV> constexpr bool IS_INT4 = false;
template <> constexpr bool IS_INT4<Int4> = true;
constexpr int KEY_BITS = 5, VALUE_BITS = 4;
// Inverts w = t + t^3 / 2: t is about w times this polynomial of w^2.
constexpr float INT4_INVERSE_0 = 0.98277253f, INT4_INVERSE_1 = -0.32738898f, INT4_INVERSE_2 = 0.13833282f,
                INT4_INVERSE_3 = -0.02469429f;

DEVICE float sign_of(int i) { return __popc(i & i >> 1 & 0x55) & 1 ? -1.f : 1.f; }
template <int D> constexpr float HADAMARD_FACTOR = D == 64 ? 0.125f : D == 128 ? 0.08838834764831845f : 0.0625f;

// Hadamard transform of D numbers in D / N neighbouring lanes, N consecutive numbers each. own: the lane's place among them.
template <int D, int N> DEVICE void hadamard(float (&v)[N], int own, u32 mask = ~0u) {
#pragma unroll
    for (int step = 1; step < N; step *= 2)
#pragma unroll
        for (int i = 0; i < N; ++i)
            if (!(i & step)) {
                const float left = v[i], right = v[i + step];
                v[i] = left + right, v[i + step] = left - right;
            }
#pragma unroll
    for (int step = 1; step < D / N; step *= 2)
#pragma unroll
        for (int i = 0; i < N; ++i) {
            const float other = __shfl_xor_sync(mask, v[i], step);
            v[i] = own & step ? other - v[i] : v[i] + other;
        }
}
template <int D, int N> DEVICE void rotate(float (&v)[N], int own) {
#pragma unroll
    for (int i = 0; i < N; ++i) v[i] *= sign_of(own * N + i);
    hadamard<D>(v, own);
#pragma unroll
    for (int i = 0; i < N; ++i) v[i] *= HADAMARD_FACTOR<D>;
}
template <int D, int N> DEVICE void rotate_back(float (&v)[N], int own, u32 mask = ~0u) {
    hadamard<D>(v, own, mask);
#pragma unroll
    for (int i = 0; i < N; ++i) v[i] *= HADAMARD_FACTOR<D> * sign_of(own * N + i);
}

// A lane's N of the D codes of a rotated head vector. Words: the low four bits of the codes, then their fifth bits and the
// scale; with N = 2 all in one word.
template <int D, int BITS> struct Int4Vector {
    static constexpr int N = D / 32, WORDS = N == 2 ? 1 : 2, FIFTHS = N == 2 ? 8 : 0;
    static constexpr float HALF = 1 << BITS - 1, MIDDLE = HALF - 0.75f, TOP = 2 * HALF - 1;
    u32 w[WORDS];

    // Byte offsets of a head's low bits, fifth bits and scale in the pool.
    struct Place {
        i64 low, high, scale;
        DEVICE Place(i64 token, int head, int heads) {
            const i64 first = token * heads * (D * BITS / 8 + 2);
            low = first + head * (D / 2), high = first + heads * (D / 2) + head * (D / 8);
            scale = first + heads * (D * BITS / 8) + head * 2;
        }
    };
    DEVICE void read(const u8 *pool, i64 token, int head, int heads) {
        const int lane = threadIdx.x & 31;
        const Place at(token, head, heads);
        const u8 *const low = pool + at.low + lane * (N / 2);
        u32 rest = u32(__ldcg((const u16 *)(pool + at.scale))) << 16;
        if constexpr (BITS == 5)
            rest |= (__ldcg(pool + at.high + lane * N / 8) >> lane * N % 8 & (1 << N) - 1) << FIFTHS;
        if constexpr (N == 8) w[0] = __ldcg((const u32 *)low), w[1] = rest;
        if constexpr (N == 4) w[0] = __ldcg((const u16 *)low), w[1] = rest;
        if constexpr (N == 2) w[0] = __ldcg(low) | rest;
    }
    DEVICE void write(u8 *pool, i64 token, int head, int heads) const {
        const int lane = threadIdx.x & 31;
        const Place at(token, head, heads);
        u8 *const low = pool + at.low + lane * (N / 2);
        if constexpr (N == 8) *(u32 *)low = w[0];
        if constexpr (N == 4) *(u16 *)low = u16(w[0]);
        if constexpr (N == 2) *low = u8(w[0]);
        if (lane == 0) *(u16 *)(pool + at.scale) = u16(w[WORDS - 1] >> 16);
        if constexpr (BITS == 5) {
            u32 fifths = (w[WORDS - 1] >> FIFTHS & (1 << N) - 1) << lane * N % 8;
#pragma unroll
            for (int step = 1; step < 8 / N; step *= 2) fifths |= __shfl_xor_sync(~0u, fifths, step);
            if (lane * N % 8 == 0) pool[at.high + lane * N / 8] = u8(fifths);
        }
    }
    DEVICE void take(const u32 *p) {
#pragma unroll
        for (int i = 0; i < WORDS; ++i) w[i] = p[i];
    }
    DEVICE void clear() {
#pragma unroll
        for (int i = 0; i < WORDS; ++i) w[i] = 0;
    }
    // The level that a code stands for, in units of `scale`; exact.
    DEVICE static float level(float code) {
        const float u = code - MIDDLE;
        return u * (u * u + 2 * HALF * HALF);
    }
    // Returns t for a number in units of the levels. `code` makes the code from t, for a scale of either sign. Neither uses
    // fused multiply-add, so that all processors round alike.
    DEVICE static float inverse(float x, float factor) {
        float w = __fmul_rn(x, factor);
        w = w < 1.5f ? w : 1.5f, w = w > -1.5f ? w : -1.5f;
        const float square = __fmul_rn(w, w);
        float y = __fadd_rn(__fmul_rn(square, INT4_INVERSE_3), INT4_INVERSE_2);
        y = __fadd_rn(__fmul_rn(y, square), INT4_INVERSE_1);
        return __fmul_rn(w, __fadd_rn(__fmul_rn(y, square), INT4_INVERSE_0));
    }
    // Returns 2^23 + code, a float whose lowest bits are the code.
    DEVICE static float code(float t, float sign) {
        float code = __fadd_rn(__fmul_rn(t, sign * HALF), MIDDLE);
        code = code < TOP ? code : TOP, code = code > 0 ? code : 0;
        return __fadd_rn(code, 8388608.f);
    }
    // Rounds a head vector. All lanes call it.
    DEVICE void round(const float (&v)[N]) {
        u32 most = 0;
#pragma unroll
        for (int i = 0; i < N; ++i) most = max(most, __float_as_uint(v[i]) & 0x7fffffff);  // NaN compares as the largest
        most = __reduce_max_sync(~0u, most);
        float unit = __fdiv_rn(__uint_as_float(most), level(TOP));
        if (unit < 0x1p-100f) unit = 0;
        const float back = unit == 0 ? 0.f : __fdiv_rn(1.f, unit);
        float x[N], squares[2] = {};
#pragma unroll
        for (int i = 0; i < N; ++i) x[i] = __fmul_rn(v[i], back), squares[0] = __fadd_rn(squares[0], __fmul_rn(x[i], x[i]));
        warp_sums(squares);
        float factor = 0, sign = 1, dot = 0, norm = 0;  // of the best scale: its levels have the largest cosine with x
#pragma unroll 1
        for (int turn = 0; turn < 3; ++turn) {
            float sums[8] = {}, factors[2];  // for two scales and both signs: dot products levels * x, levels * levels
#pragma unroll
            for (int s = 0; s < 2; ++s) {
                const int parts = turn == 0 ? 22 + 3 * s : turn == 1 ? 28 + 2 * s : 32 + 3 * s;
                factors[s] = __fdiv_rn(0.5f / (HALF * HALF * HALF), parts * (1.f / 32));
#pragma unroll
                for (int i = 0; i < N; ++i) {
                    const float t = inverse(x[i], factors[s]);
#pragma unroll
                    for (int n = 0; n < 2; ++n) {
                        const float own = level(code(t, n ? -1.f : 1.f) - 8388608.f);
                        float *const sum = sums + s * 4 + n * 2;
                        sum[0] = __fadd_rn(sum[0], __fmul_rn(own, x[i])), sum[1] = __fadd_rn(sum[1], __fmul_rn(own, own));
                    }
                }
            }
            warp_sums(sums);
#pragma unroll
            for (int k = 0; k < 4; ++k) {
                const float other = sums[2 * k], others = sums[2 * k + 1];
                if (norm == 0 || __fmul_rn(__fmul_rn(other, other), norm) > __fmul_rn(__fmul_rn(dot, dot), others))
                    factor = factors[k / 2], sign = k % 2 ? -1.f : 1.f, dot = other, norm = others;
            }
        }
        const float scale = unit == 0 ? 0.f : __fmul_rn(unit, __fdiv_rn(squares[0], dot));
        u32 low = 0, fifths = 0;
#pragma unroll
        for (int i = 0; i < N; ++i) {
            const u32 own = __float_as_uint(code(inverse(x[i], factor), sign));
            low |= (own & 15) << 4 * i, fifths |= (own >> 4 & 1) << i;
        }
        const u32 rest = narrow2(scale, 0.f) << 16 | fifths << FIFTHS;
        if constexpr (N == 2) w[0] = low | rest;
        else w[0] = low, w[1] = rest;
    }
    // Returns number i in units of `scale`.
    DEVICE float at(int i) const {
        u32 code = w[0] >> 4 * i & 15;
        if constexpr (BITS == 5) code |= (w[WORDS - 1] >> i + FIFTHS & 1) << 4;
        const float u = __uint_as_float(0x4a000000 | code << 2) - (2097152.f + MIDDLE);  // the bits of 2^21 + code
        return u * (u * u + 2 * HALF * HALF);
    }
    DEVICE float scale() const { return __uint_as_float(w[WORDS - 1] & 0xffff0000); }
};

// A lane's part of a key and of a value.
template <int D, class KV> struct Stored {
    typedef Vector<D / 32, KV> Key;
    typedef Vector<D / 32, KV> Value;
};
template <int D> struct Stored<D, Int4> {
    typedef Int4Vector<D, KEY_BITS> Key;
    typedef Int4Vector<D, VALUE_BITS> Value;
};

// Rotates, rounds and stores a head vector. A whole warp calls it.
template <int D> DEVICE void store_int4(void *pool, bool key, i64 token, int head, int heads, float (&v)[D / 32]) {
    rotate<D>(v, threadIdx.x & 31);
    if (key) {
        Int4Vector<D, KEY_BITS> kept;
        kept.round(v);
        kept.write((u8 *)pool, token, head, heads);
    } else {
        Int4Vector<D, VALUE_BITS> kept;
        kept.round(v);
        kept.write((u8 *)pool, token, head, heads);
    }
}

struct GatherInt4 {
    const u8 *pool;     // [pages * PAGE, kv_heads, width]
    u16 *y;             // [count, kv_heads, D] bfloat16
    const i64 *places;  // [count]
    int count, heads;
};
// Gathers keys or values of some tokens; they stay rotated. One warp per head of a token.
template <int D, int BITS> DEVICE void gather_int4(const GatherInt4 &a) {
    launch_dependents();
    wait();
    constexpr int N = D / 32;
    const int item = blockIdx.x * 8 + (threadIdx.x >> 5), index = item / a.heads, head = item - index * a.heads;
    if (index >= a.count) return;
    Int4Vector<D, BITS> kept;
    kept.read(a.pool, a.places[index], head, a.heads);
    float v[N];
#pragma unroll
    for (int i = 0; i < N; ++i) v[i] = kept.at(i) * kept.scale();
    store_all<N>(a.y + i64(item) * D + (threadIdx.x & 31) * N, v);
}
