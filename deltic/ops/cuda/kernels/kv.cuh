// Keys and values as they lie in the pages: bfloat16 (u16), or float8 e4m3 (u8), which has no infinity: numbers beyond
// its largest one, 448, become that one. Whichever kernel writes them rounds the same float32 number once.

// To the nearest e4m3 number, of two as near the even one.
DEVICE u32 round_e4m3(float x) {
    const u32 bits = __float_as_uint(x), sign = bits >> 24 & 0x80, size = bits & 0x7fffffff;
    if (size > 0x7f800000) return 0x7f;  // not a number
    if (size >= 0x43e00000) return sign | 0x7e;
    if (size < 0x3c800000) return sign | u32(__float2int_rn(__uint_as_float(size) * 512.f));  // multiples of 2^-9
    return sign | ((size + 0x7ffff + (size >> 20 & 1)) >> 20) - 960;
}
// Two of them, the first in the lower byte.
DEVICE u32 narrow2_e4m3(float lo, float hi) {
#if __CUDA_ARCH__ >= 890
    u16 r;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(r) : "f"(hi), "f"(lo));
    return r;
#else
    return round_e4m3(lo) | round_e4m3(hi) << 8;
#endif
}
// The number in the lowest byte. Its bits are those of a half that is 256 times smaller.
DEVICE float spread_e4m3(u32 x) {
    return (x & 0x7f) == 0x7f ? __uint_as_float(0x7fffffff) : half_of((x & 0x80) << 8 | (x & 0x7f) << 7) * 256.f;
}
// One of the numbers in the lower two bytes.
DEVICE float wide_e4m3(u32 x, bool second) {
#if __CUDA_ARCH__ >= 890
    u32 both;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(both) : "h"(u16(x)));
    return half_of(second ? both >> 16 : both);
#else
    return spread_e4m3(second ? x >> 8 : x);
#endif
}
// N consecutive numbers, four in a word.
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

// N numbers of a head, as they lie in the pages.
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
