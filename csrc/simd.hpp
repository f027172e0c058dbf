// Vectors of 16 lanes for the level that a file is compiled for. The files that include this one are compiled once per
// level (hatch_build.py), with DELTIC_LEVEL naming the namespace; everything here has internal linkage or lives in it.
//
// Results must not depend on how many tokens a call has: products and sums are contracted only where `fma` says so
// (-ffp-contract=off), and sums over lanes are taken in one order.
#pragma once
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#include "deltic.h"
#include "half.hpp"

#ifndef DELTIC_LEVEL
#error "compile with -DDELTIC_LEVEL=portable, avx2, avx512, vnni or bf16"
#endif
#define DELTIC_INLINE inline __attribute__((always_inline))

namespace deltic::DELTIC_LEVEL {
namespace {

constexpr int kLanes = 16;

typedef float Floats __attribute__((vector_size(64)));
typedef int32_t Ints __attribute__((vector_size(64)));
typedef uint32_t Words __attribute__((vector_size(64)));
typedef uint8_t Bytes __attribute__((vector_size(64)));

DELTIC_INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
DELTIC_INLINE int64_t most(int64_t a, int64_t b) { return a < b ? b : a; }
DELTIC_INLINE int64_t pieces_of(int64_t count, int64_t size) { return (count + size - 1) / size; }
DELTIC_INLINE int64_t round_up(int64_t count, int64_t step) { return pieces_of(count, step) * step; }

template <typename V, typename T> DELTIC_INLINE V load(const T *from) {
    V v;
    std::memcpy(&v, from, sizeof v);
    return v;
}
template <typename V, typename T> DELTIC_INLINE void store(T *to, V v) { std::memcpy(to, &v, sizeof v); }

// As wide as a register of this level, for loops that need all of them.
#if defined(__AVX512F__)
constexpr int kNative = 16;
#elif defined(__AVX2__)
constexpr int kNative = 8;
#else
constexpr int kNative = 4;
#endif
typedef float Native __attribute__((vector_size(kNative * 4)));
typedef int32_t NativeMask __attribute__((vector_size(kNative * 4)));
typedef uint32_t NativeWords __attribute__((vector_size(kNative * 4)));

// Per lane: all ones where a < b, and where v is NaN. Comparisons of vectors wider than a register become scalar code,
// so they are made in registers.
union Registers {
    Floats floats;
    Ints ints;
    Native part[kLanes / kNative];
    NativeMask mask[kLanes / kNative];
};
DELTIC_INLINE Ints less(Floats a, Floats b) {
    Registers x{a}, y{b}, out;
    for (int i = 0; i < kLanes / kNative; ++i) out.mask[i] = x.part[i] < y.part[i];
    return out.ints;
}
DELTIC_INLINE Ints is_nan(Floats v) {
    Registers x{v}, out;
    for (int i = 0; i < kLanes / kNative; ++i) out.mask[i] = x.part[i] != x.part[i];
    return out.ints;
}

DELTIC_INLINE Floats loadf(const float *from) { return load<Floats>(from); }
// Taking 0 away changes nothing, adding it would change -0: only the former is left out by the compiler.
template <typename V = Floats> DELTIC_INLINE V splat(float x) { return x - V{}; }
DELTIC_INLINE Ints splat(int32_t x) { return Ints{} + x; }

// The first `count` lanes; the others are 0 (load) or untouched (store).
DELTIC_INLINE Floats load_part(const float *from, int64_t count) {
    Floats v = {};
    std::memcpy(&v, from, size_t(count) * 4);
    return v;
}
DELTIC_INLINE void store_part(float *to, Floats v, int64_t count) { std::memcpy(to, &v, size_t(count) * 4); }

// a * b + c, rounded once where the level has such an instruction.
DELTIC_INLINE Floats fma(Floats a, Floats b, Floats c) {
#if defined(__AVX512F__)
    return (Floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
    union { Floats v; __m256 h[2]; } x{a}, y{b}, z{c};
    z.h[0] = _mm256_fmadd_ps(x.h[0], y.h[0], z.h[0]);
    z.h[1] = _mm256_fmadd_ps(x.h[1], y.h[1], z.h[1]);
    return z.v;
#else
    return a * b + c;
#endif
}
#if !defined(__AVX512F__)  // where it is, Native and Floats are one type
DELTIC_INLINE Native fma(Native a, Native b, Native c) {
#if defined(__FMA__)
    return (Native)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
    return a * b + c;
#endif
}
#endif

DELTIC_INLINE Floats to_floats(Ints v) { return __builtin_convertvector(v, Floats); }

// Widening and narrowing of 16 numbers. (The compiler's own conversions go one by one where sizes differ by four.)
DELTIC_INLINE Ints from_s8(const int8_t *from) {
#if defined(__AVX512F__)
    return (Ints)_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)from));
#elif defined(__AVX2__)
    union { Ints v; __m256i h[2]; } out;
    out.h[0] = _mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)from));
    out.h[1] = _mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)(from + 8)));
    return out.v;
#else
    typedef int8_t Small __attribute__((vector_size(16)));
    return __builtin_convertvector(load<Small>(from), Ints);
#endif
}
DELTIC_INLINE Ints from_u8(const uint8_t *from) {
#if defined(__AVX512F__)
    return (Ints)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)from));
#elif defined(__AVX2__)
    union { Ints v; __m256i h[2]; } out;
    out.h[0] = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)from));
    out.h[1] = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)(from + 8)));
    return out.v;
#else
    typedef uint8_t Small __attribute__((vector_size(16)));
    return __builtin_convertvector(load<Small>(from), Ints);
#endif
}
DELTIC_INLINE Words from_u16(const uint16_t *from) {
#if defined(__AVX512F__)
    return (Words)_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)from));
#else
    typedef uint16_t Small __attribute__((vector_size(32)));
    return __builtin_convertvector(load<Small>(from), Words);
#endif
}
DELTIC_INLINE void to_u16(uint16_t *to, Words v) {
#if defined(__AVX512F__)
    _mm256_storeu_si256((__m256i *)to, _mm512_cvtepi32_epi16((__m512i)v));
#else
    typedef uint16_t Small __attribute__((vector_size(32)));
    store(to, __builtin_convertvector(v, Small));
#endif
}
DELTIC_INLINE void to_s8(int8_t *to, Ints v) {
#if defined(__AVX512F__)
    _mm_storeu_si128((__m128i *)to, _mm512_cvtepi32_epi8((__m512i)v));
#else
    typedef int8_t Small __attribute__((vector_size(16)));
    store(to, __builtin_convertvector(v, Small));
#endif
}

// What caches are kept in: float, bfloat16 (as uint16_t) or float16.
struct Half {
    uint16_t bits;
};
// body(T{}) for the T that a type of deltic.h is.
template <typename Body> DELTIC_INLINE void by_type(int64_t type, Body &&body) {
    if (type == DELTIC_BF16) body(uint16_t{});
    else if (type == DELTIC_F16) body(Half{});
    else body(float{});
}

// bfloat16 <-> float32; rounded to nearest, ties to even, NaN stays NaN.
DELTIC_INLINE float widen(uint16_t bits) { return std::bit_cast<float>(uint32_t(bits) << 16); }
DELTIC_INLINE float widen(float value) { return value; }
DELTIC_INLINE void narrow(float value, uint16_t &bits) {
    uint32_t word = std::bit_cast<uint32_t>(value);
    uint32_t rounded = (word + 0x7fff + ((word >> 16) & 1)) >> 16;
    bits = uint16_t(value != value ? 0x7fc0 : rounded);
}
DELTIC_INLINE void narrow(float value, float &out) { out = value; }

DELTIC_INLINE Native load_native(const float *from) { return load<Native>(from); }
DELTIC_INLINE Native load_native(const uint16_t *from) {
    typedef uint16_t Few __attribute__((vector_size(kNative * 2)));
    return (Native)(__builtin_convertvector(load<Few>(from), NativeWords) << 16);
}
DELTIC_INLINE Floats load_wide(const uint16_t *from) { return (Floats)(from_u16(from) << 16); }
DELTIC_INLINE Floats load_wide(const float *from) { return loadf(from); }
DELTIC_INLINE void store_narrow(uint16_t *to, Floats v) {
    Words word = (Words)v;
    Words rounded = (word + 0x7fff + ((word >> 16) & 1)) >> 16;
    Words sick = (Words)is_nan(v);
    rounded = (rounded & ~sick) | (0x7fc0 & sick);
    to_u16(to, rounded);
}
DELTIC_INLINE void store_narrow(float *to, Floats v) { store(to, v); }

// float16 -> float32, also of subnormals and infinities.
DELTIC_INLINE Floats load_half(const uint16_t *from) {
#if defined(__AVX512F__)
    return (Floats)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)from));
#elif defined(__F16C__)
    union { Floats v; __m256 h[2]; } out;
    out.h[0] = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)from));
    out.h[1] = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(from + 8)));
    return out.v;
#else
    Words bits = from_u16(from), sign = (bits & 0x8000) << 16, rest = bits & 0x7fff;
    // The exponent is rebased by a product, which also normalises subnormals.
    Floats finite = (Floats)(rest << 13) * std::bit_cast<float>(uint32_t(254 - 15) << 23);
    Words special = (Words)(rest >= 0x7c00);
    return (Floats)(((Words)finite & ~special) | ((0x7f800000 | rest << 13) & special) | sign);
#endif
}

// float16 <-> float32, rounded to nearest, ties to even; infinite from 65520 on, NaN stays NaN. `from_halves`: those in
// the low halves of 32-bit lanes.
#if defined(__AVX512F__)
DELTIC_INLINE __m256i halves(Floats v) {
    return _mm512_cvtps_ph((__m512)v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
DELTIC_INLINE void store_narrow(Half *to, Floats v) { _mm256_storeu_si256((__m256i *)to, halves(v)); }
DELTIC_INLINE Native rounded_half(Native v) { return (Native)_mm512_cvtph_ps(halves((Floats)v)); }
DELTIC_INLINE Native load_native(const Half *from) { return (Native)load_half((const uint16_t *)from); }
DELTIC_INLINE Floats from_halves(Words v) { return (Floats)_mm512_cvtph_ps(_mm512_cvtepi32_epi16((__m512i)v)); }
#elif defined(__F16C__)
DELTIC_INLINE __m128i halves(Native v) {
    return _mm256_cvtps_ph((__m256)v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
DELTIC_INLINE void store_narrow(Half *to, Floats v) {
    Registers x{v};
    for (int i = 0; i < 2; ++i) _mm_storeu_si128((__m128i *)to + i, halves(x.part[i]));
}
DELTIC_INLINE Native rounded_half(Native v) { return (Native)_mm256_cvtph_ps(halves(v)); }
DELTIC_INLINE Native load_native(const Half *from) {
    return (Native)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)from));
}
DELTIC_INLINE Floats from_halves(Words v) {
    uint16_t bits[kLanes];
    to_u16(bits, v);
    return load_half(bits);
}
#else
DELTIC_INLINE uint16_t half_of(float value) { return value != value ? 0x7e00 : narrow_half(value); }
DELTIC_INLINE void store_narrow(Half *to, Floats v) {
    for (int i = 0; i < kLanes; ++i) to[i].bits = half_of(v[i]);
}
DELTIC_INLINE Native rounded_half(Native v) {
    for (int i = 0; i < kNative; ++i) v[i] = widen_half(half_of(v[i]));
    return v;
}
DELTIC_INLINE Native load_native(const Half *from) {
    typedef uint16_t Few __attribute__((vector_size(kNative * 2)));
    NativeWords bits = __builtin_convertvector(load<Few>(from), NativeWords), rest = bits & 0x7fff;
    // as in load_half
    Native finite = (Native)(rest << 13) * std::bit_cast<float>(uint32_t(254 - 15) << 23);
    NativeWords special = (NativeWords)(rest >= 0x7c00);
    return (Native)(((NativeWords)finite & ~special) | ((0x7f800000 | rest << 13) & special) | (bits & 0x8000) << 16);
}
DELTIC_INLINE Floats from_halves(Words v) {
    uint16_t bits[kLanes];
    to_u16(bits, v);
    return load_half(bits);
}
#endif
DELTIC_INLINE Floats load_wide(const Half *from) { return load_half((const uint16_t *)from); }
DELTIC_INLINE float widen(Half value) { return widen_half(value.bits); }
DELTIC_INLINE void narrow(float value, Half &out) {
    Half all[kLanes];
    store_narrow(all, splat(value));
    out = all[0];
}

// Per byte: the table's entry (of the first 16 bytes, which are repeated four times) that the code (0 .. 15) names.
DELTIC_INLINE Bytes lookup(Bytes table, Bytes codes) {
#if defined(__AVX512BW__)
    return (Bytes)_mm512_shuffle_epi8((__m512i)table, (__m512i)codes);
#elif defined(__AVX2__)
    union { Bytes v; __m256i h[2]; } t{table}, c{codes};
    c.h[0] = _mm256_shuffle_epi8(t.h[0], c.h[0]);
    c.h[1] = _mm256_shuffle_epi8(t.h[1], c.h[1]);
    return c.v;
#else
    uint8_t entries[64], bytes[64];
    store(entries, table);
    store(bytes, codes);
    for (int i = 0; i < 64; ++i) bytes[i] = entries[bytes[i]];
    return load<Bytes>(bytes);
#endif
}

// Per lane: acc + the four unsigned bytes of the lane times the four signed bytes of `x`, which all share. Exact.
DELTIC_INLINE Ints dot4(Ints acc, Bytes codes, int32_t x) {
#if defined(__AVX512VNNI__)
    return (Ints)_mm512_dpbusd_epi32((__m512i)acc, (__m512i)codes, _mm512_set1_epi32(x));
#elif defined(__AVX512BW__)
    // by 16-bit products: pairs of 8-bit products would saturate
    __m512i even = _mm512_and_si512((__m512i)codes, _mm512_set1_epi16(255)), odd = _mm512_srli_epi16((__m512i)codes, 8);
    __m512i both = _mm512_set1_epi32(x);
    __m512i low = _mm512_srai_epi16(_mm512_slli_epi16(both, 8), 8), high = _mm512_srai_epi16(both, 8);
    __m512i sum = _mm512_add_epi32(_mm512_madd_epi16(even, low), _mm512_madd_epi16(odd, high));
    return (Ints)_mm512_add_epi32((__m512i)acc, sum);
#elif defined(__AVX2__)
    union { Bytes v; __m256i h[2]; } c{codes};
    union { Ints v; __m256i h[2]; } out{acc};
    __m256i both = _mm256_set1_epi32(x), mask = _mm256_set1_epi16(255);
    __m256i low = _mm256_srai_epi16(_mm256_slli_epi16(both, 8), 8), high = _mm256_srai_epi16(both, 8);
    for (int h = 0; h < 2; ++h) {
        __m256i even = _mm256_and_si256(c.h[h], mask), odd = _mm256_srli_epi16(c.h[h], 8);
        __m256i sum = _mm256_add_epi32(_mm256_madd_epi16(even, low), _mm256_madd_epi16(odd, high));
        out.h[h] = _mm256_add_epi32(out.h[h], sum);
    }
    return out.v;
#else
    Words w = (Words)codes;
    acc += (Ints)(w & 255) * int32_t(int8_t(x));
    acc += (Ints)(w >> 8 & 255) * int32_t(int8_t(x >> 8));
    acc += (Ints)(w >> 16 & 255) * int32_t(int8_t(x >> 16));
    return acc + (Ints)(w >> 24) * (x >> 24);
#endif
}

// Per lane: acc + two signed 16-bit numbers of the lane times the two of `x`, the same for all lanes. Exact.
DELTIC_INLINE Ints dot2(Ints acc, Ints pairs, int32_t x) {
#if defined(__AVX512VNNI__)
    return (Ints)_mm512_dpwssd_epi32((__m512i)acc, (__m512i)pairs, _mm512_set1_epi32(x));
#else
    return acc + (pairs << 16 >> 16) * (x << 16 >> 16) + (pairs >> 16) * (x >> 16);
#endif
}

// Per lane: acc + two bfloat16 of the lane times the two of `x`. The hardware's products flush subnormals and round
// each sum once; elsewhere these are two `fma`.
DELTIC_INLINE Floats dot2_bf16(Floats acc, Words pairs, uint32_t x) {
#if defined(__AVX512BF16__)
    return (Floats)_mm512_dpbf16_ps((__m512)acc, (__m512bh)pairs, (__m512bh)_mm512_set1_epi32(int(x)));
#else
    acc = fma((Floats)(pairs << 16), splat(std::bit_cast<float>(x << 16)), acc);
    return fma((Floats)(pairs & 0xffff0000u), splat(std::bit_cast<float>(x & 0xffff0000u)), acc);
#endif
}

#if defined(__AVX512BF16__)
// 32 numbers as bfloat16, one after another. Subnormals become 0.
DELTIC_INLINE Words narrow_bf16(Floats first, Floats second) {
    return (Words)_mm512_cvtne2ps_pbh((__m512)second, (__m512)first);
}
// Two numbers as bfloat16 in each lane, the first one in its low half. Subnormals become 0.
DELTIC_INLINE Words pair_bf16(Floats low, Floats high) {
    Words both = narrow_bf16(low, high);
    const Words order = {16 << 16 | 0, 17 << 16 | 1, 18 << 16 | 2, 19 << 16 | 3, 20 << 16 | 4, 21 << 16 | 5,
                         22 << 16 | 6, 23 << 16 | 7, 24 << 16 | 8, 25 << 16 | 9, 26 << 16 | 10, 27 << 16 | 11,
                         28 << 16 | 12, 29 << 16 | 13, 30 << 16 | 14, 31 << 16 | 15};
    return (Words)_mm512_permutexvar_epi16((__m512i)order, (__m512i)both);
}
#endif

// Sum and maximum of all lanes, halving: one order everywhere.
DELTIC_INLINE float sum_lanes(Floats v) {
    float lane[16];
    store(lane, v);
    for (int width = 8; width; width /= 2)
        for (int i = 0; i < width; ++i) lane[i] += lane[i + width];
    return lane[0];
}
DELTIC_INLINE float max_lanes(Floats v) {
    float lane[16];
    store(lane, v);
    for (int width = 8; width; width /= 2)
        for (int i = 0; i < width; ++i) lane[i] = lane[i] < lane[i + width] ? lane[i + width] : lane[i];
    return lane[0];
}

// The largest lane of numbers that are not negative.
DELTIC_INLINE int32_t max_lanes(Ints v) {
#if defined(__AVX512F__)
    return _mm512_reduce_max_epi32((__m512i)v);
#else
    int32_t lane[16];
    store(lane, v);
    for (int width = 8; width; width /= 2)
        for (int i = 0; i < width; ++i) lane[i] = lane[i] < lane[i + width] ? lane[i + width] : lane[i];
    return lane[0];
#endif
}
// Sixteen vectors, turned: lane j of the i-th becomes lane i of the j-th.
DELTIC_INLINE void turn(Words v[16]) {
#if defined(__AVX512F__)
    auto *r = (__m512i *)v;
    __m512i a[16];
#pragma GCC unroll 4
    for (int i = 0; i < 16; i += 4) {
        __m512i low01 = _mm512_unpacklo_epi32(r[i], r[i + 1]), high01 = _mm512_unpackhi_epi32(r[i], r[i + 1]);
        __m512i low23 = _mm512_unpacklo_epi32(r[i + 2], r[i + 3]), high23 = _mm512_unpackhi_epi32(r[i + 2], r[i + 3]);
        a[i] = _mm512_unpacklo_epi64(low01, low23);
        a[i + 1] = _mm512_unpackhi_epi64(low01, low23);
        a[i + 2] = _mm512_unpacklo_epi64(high01, high23);
        a[i + 3] = _mm512_unpackhi_epi64(high01, high23);
    }
    // a[4 i + j]: of quarter q lane 4 q + j of the vectors 4 i .. 4 i + 3
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) {
        __m512i even01 = _mm512_shuffle_i32x4(a[j], a[4 + j], 0x88), odd01 = _mm512_shuffle_i32x4(a[j], a[4 + j], 0xdd);
        __m512i even23 = _mm512_shuffle_i32x4(a[8 + j], a[12 + j], 0x88);
        __m512i odd23 = _mm512_shuffle_i32x4(a[8 + j], a[12 + j], 0xdd);
        r[j] = _mm512_shuffle_i32x4(even01, even23, 0x88);
        r[8 + j] = _mm512_shuffle_i32x4(even01, even23, 0xdd);
        r[4 + j] = _mm512_shuffle_i32x4(odd01, odd23, 0x88);
        r[12 + j] = _mm512_shuffle_i32x4(odd01, odd23, 0xdd);
    }
#else
    for (int i = 0; i < 16; ++i)
        for (int j = 0; j < i; ++j) {
            uint32_t kept = v[i][j];
            v[i][j] = v[j][i];
            v[j][i] = kept;
        }
#endif
}

// Lanes i, i + 4, ... of the result: what `join` makes of all lanes of v[i].
template <typename Join> DELTIC_INLINE Ints of_four(const Ints v[4], Join &&join) {
#if defined(__AVX512F__)
    auto *r = (const __m512i *)v;
    auto both = [&](__m512i a, __m512i b) { return (__m512i)join((Ints)a, (Ints)b); };
    __m512i first = both(_mm512_unpacklo_epi32(r[0], r[1]), _mm512_unpackhi_epi32(r[0], r[1]));
    __m512i second = both(_mm512_unpacklo_epi32(r[2], r[3]), _mm512_unpackhi_epi32(r[2], r[3]));
    __m512i all = both(_mm512_unpacklo_epi64(first, second), _mm512_unpackhi_epi64(first, second));
    all = both(all, _mm512_shuffle_i32x4(all, all, 0x4e));
    return (Ints)both(all, _mm512_shuffle_i32x4(all, all, 0xb1));
#else
    Ints turned[4], all;
    for (int i = 0; i < kLanes; ++i)
        for (int j = 0; j < 4; ++j) turned[j][i] = v[i % 4][i / 4 * 4 + j];
    all = join(join(turned[0], turned[1]), join(turned[2], turned[3]));
    Ints found;
    for (int i = 0; i < 4; ++i) {
        Ints lane = splat(all[i]);
        for (int j = 4; j < kLanes; j += 4) lane = join(lane, splat(all[i + j]));
        for (int j = 0; j < kLanes; j += 4) found[i + j] = lane[0];
    }
    return found;
#endif
}

// Sums of the first and of the second 16 of 32 numbers.
DELTIC_INLINE void sum16(const int8_t *from, int32_t sums[2]) {
#if defined(__AVX2__)
    __m256i above = _mm256_xor_si256(_mm256_loadu_si256((const __m256i *)from), _mm256_set1_epi8(-128));
    int64_t of8[4];
    _mm256_storeu_si256((__m256i *)of8, _mm256_sad_epu8(above, _mm256_setzero_si256()));
    for (int half = 0; half < 2; ++half) sums[half] = int32_t(of8[2 * half] + of8[2 * half + 1]) - 16 * 128;
#else
    for (int half = 0; half < 2; ++half) {
        int32_t sum = 0;
        for (int i = 0; i < 16; ++i) sum += from[16 * half + i];
        sums[half] = sum;
    }
#endif
}

DELTIC_INLINE Floats choose(Ints mask, Floats yes, Floats no) {
    return (Floats)(((Ints)yes & mask) | ((Ints)no & ~mask));
}
DELTIC_INLINE Ints maximum(Ints a, Ints b) {
    Registers x{.ints = a}, y{.ints = b};
    for (int i = 0; i < kLanes / kNative; ++i) x.mask[i] = x.mask[i] < y.mask[i] ? y.mask[i] : x.mask[i];
    return x.ints;
}
DELTIC_INLINE Ints max_of_four(const Ints v[4]) {
    return of_four(v, [](Ints a, Ints b) __attribute__((always_inline)) { return maximum(a, b); });
}
DELTIC_INLINE Ints sum_of_four(const Ints v[4]) {
    return of_four(v, [](Ints a, Ints b) __attribute__((always_inline)) { return a + b; });
}
// The larger one, and the smaller one; a where either is NaN.
DELTIC_INLINE Floats maximum(Floats a, Floats b) {
#if defined(__AVX512F__)
    return (Floats)_mm512_max_ps((__m512)b, (__m512)a);
#else
    return choose(less(a, b), b, a);
#endif
}
DELTIC_INLINE Floats minimum(Floats a, Floats b) {
#if defined(__AVX512F__)
    return (Floats)_mm512_min_ps((__m512)b, (__m512)a);
#else
    return choose(less(b, a), b, a);
#endif
}

// exp, relative error below 2e-7, clamped to the range of normal numbers; NaN stays NaN.
DELTIC_INLINE Floats exponential(Floats x) {
    x = maximum(minimum(x, splat(88.0f)), splat(-87.0f));
    // adding and taking away 1.5 * 2^23 rounds to an integer
    Floats shifted = fma(x, splat(1.44269504f), splat(12582912.0f));
    Floats n = shifted - 12582912.0f;
    Floats r = fma(n, splat(-0.693359375f), x);
    r = fma(n, splat(2.12194440e-4f), r);
    Floats p = splat(1.9875691500e-4f);
    p = fma(p, r, splat(1.3981999507e-3f));
    p = fma(p, r, splat(8.3334519073e-3f));
    p = fma(p, r, splat(4.1665795894e-2f));
    p = fma(p, r, splat(1.6666665459e-1f));
    p = fma(p, r, splat(5.0000001201e-1f));
    p = fma(p * r, r, r) + 1.0f;
    Ints power = ((Ints)shifted - 0x4b400000 + 127) << 23;
    return p * (Floats)power;
}
DELTIC_INLINE Floats sigmoid(Floats x) { return 1.0f / (1.0f + exponential(-x)); }
DELTIC_INLINE float sigmoid(float x) { return sigmoid(splat(x))[0]; }

}  // namespace
}  // namespace deltic::DELTIC_LEVEL
