// Vectors of 16 lanes for the processor level that a file is compiled for. Files that include this header are compiled
// once per level (hatch_build.py), with DELTIC_LEVEL as the namespace. Everything here has internal linkage or is in
// that namespace.
//
// Results must not depend on the number of tokens in a call: products and sums are contracted only in an explicit `fma`
// (-ffp-contract=off), and sums over lanes have a fixed order.
#pragma once
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

// The intrinsics of g++ also require the architecture that introduced them. (No compiler flag sets it: zig spells it
// differently.)
#if defined(__aarch64__) && !defined(__clang__)
#if defined(__ARM_FEATURE_MATMUL_INT8)
#pragma GCC target("arch=armv8.2-a+dotprod+i8mm")
#elif defined(__ARM_FEATURE_DOTPROD)
#pragma GCC target("arch=armv8.2-a+dotprod")
#endif
#endif

#if defined(__AVX2__) || defined(__FMA__)
#include <immintrin.h>
#elif defined(__SSE2__)
#include <emmintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#include "deltic.h"
#include "half.hpp"

#ifndef DELTIC_LEVEL
#error "compile with -DDELTIC_LEVEL=portable or another level of hatch_build.py"
#endif
#define DELTIC_INLINE inline __attribute__((always_inline))
#define DELTIC_INLINE_LAMBDA __attribute__((always_inline))
// Selects lanes of two vectors of four lanes. g++ has clang's builtin only since version 12.
#if defined(__clang__)
#define DELTIC_SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define DELTIC_SHUFFLE(a, b, ...) __builtin_shuffle(a, b, decltype(a < b){__VA_ARGS__})
#endif

namespace deltic::DELTIC_LEVEL {
namespace {

constexpr int kLanes = 16;

// Vectors as wide as a register of this level, for loops that need all registers.
#if defined(__AVX512F__)
constexpr int kNative = 16;
#elif defined(__AVX2__)
constexpr int kNative = 8;
#else
constexpr int kNative = 4;
#endif
template <typename T> struct Register {
    typedef T Vector __attribute__((vector_size(kNative * 4)));
};
using Native = Register<float>::Vector;
using NativeInts = Register<int32_t>::Vector;
using NativeWords = Register<uint32_t>::Vector;
using NativeBytes = Register<uint8_t>::Vector;

#if defined(__AVX512F__)
typedef Native Floats;
typedef NativeInts Ints;
typedef NativeWords Words;
#else
// 64 bytes in several registers. (Compilers keep vectors wider than a register in memory.)
template <typename T> struct Wide {
    static constexpr int kParts = kLanes / kNative;
    using Part = typename Register<T>::Vector;
    Part part[kParts];

    Wide() = default;
    Wide(T a, T b, T c, T d, T e, T f, T g, T h, T i, T j, T k, T l, T m, T n, T o, T p) requires(sizeof(T) == 4)
        : part{} {
        const T lane[kLanes] = {a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p};
        for (int at = 0; at < kLanes; ++at) part[at / kNative][at % kNative] = lane[at];
    }
    // Reinterprets the bits.
    template <typename From> DELTIC_INLINE explicit Wide(const Wide<From> &from) {
#pragma GCC unroll 4
        for (int i = 0; i < kParts; ++i) part[i] = (Part)from.part[i];
    }
    DELTIC_INLINE T operator[](int lane) const { return part[lane / kNative][lane % kNative]; }
    DELTIC_INLINE auto &operator[](int lane) { return ((T *)part)[lane]; }
};
typedef Wide<float> Floats;
typedef Wide<int32_t> Ints;
typedef Wide<uint32_t> Words;

// Builds a vector from make(i) for each part i.
template <typename V, typename Make> DELTIC_INLINE V by_part(Make &&make) {
    V v;
#pragma GCC unroll 4
    for (int i = 0; i < V::kParts; ++i) v.part[i] = make(i);
    return v;
}
#define DELTIC_BINARY(op)                                                                                              \
    template <typename T> DELTIC_INLINE Wide<T> operator op(const Wide<T> &a, const Wide<T> &b) {                      \
        return by_part<Wide<T>>([&](int i) DELTIC_INLINE_LAMBDA { return a.part[i] op b.part[i]; });                   \
    }                                                                                                                  \
    template <typename T> DELTIC_INLINE Wide<T> operator op(const Wide<T> &a, std::type_identity_t<T> b) {             \
        return by_part<Wide<T>>([&](int i) DELTIC_INLINE_LAMBDA { return a.part[i] op b; });                           \
    }                                                                                                                  \
    template <typename T> DELTIC_INLINE Wide<T> operator op(std::type_identity_t<T> a, const Wide<T> &b) {             \
        return by_part<Wide<T>>([&](int i) DELTIC_INLINE_LAMBDA { return a op b.part[i]; });                           \
    }                                                                                                                  \
    template <typename T, typename B> DELTIC_INLINE Wide<T> &operator op##=(Wide<T> &a, const B &b) {                  \
        return a = a op b;                                                                                             \
    }
DELTIC_BINARY(+)
DELTIC_BINARY(-)
DELTIC_BINARY(*)
DELTIC_BINARY(/)
DELTIC_BINARY(&)
DELTIC_BINARY(|)
DELTIC_BINARY(<<)
DELTIC_BINARY(>>)
#undef DELTIC_BINARY
template <typename T> DELTIC_INLINE Wide<T> operator-(const Wide<T> &a) {
    return by_part<Wide<T>>([&](int i) DELTIC_INLINE_LAMBDA { return -a.part[i]; });
}
template <typename T> DELTIC_INLINE Wide<T> operator~(const Wide<T> &a) {
    return by_part<Wide<T>>([&](int i) DELTIC_INLINE_LAMBDA { return ~a.part[i]; });
}
// All ones in lanes where a < b.
DELTIC_INLINE Ints operator<(const Ints &a, int32_t b) {
    return by_part<Ints>([&](int i) DELTIC_INLINE_LAMBDA { return a.part[i] < b; });
}
#endif

// Calls body(integral constant) for 0 .. Count - 1.
template <int Count, typename Body> constexpr DELTIC_INLINE void unrolled(Body &&body) {
    [&]<int... I>(std::integer_sequence<int, I...>) DELTIC_INLINE_LAMBDA {
        (body(std::integral_constant<int, I>{}), ...);
    }(std::make_integer_sequence<int, Count>{});
}

DELTIC_INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
DELTIC_INLINE int64_t most(int64_t a, int64_t b) { return a < b ? b : a; }
DELTIC_INLINE int64_t pieces_of(int64_t count, int64_t size) { return (count + size - 1) / size; }
DELTIC_INLINE int64_t round_up(int64_t count, int64_t step) { return pieces_of(count, step) * step; }

template <typename V, typename T> DELTIC_INLINE V load(const T *from) {
    V v;
#if !defined(__AVX512F__)
    if constexpr (requires { v.part; }) {
        for (int i = 0; i < V::kParts; ++i)
            std::memcpy(&v.part[i], (const char *)from + i * sizeof v.part[i], sizeof v.part[i]);
        return v;
    }
#endif
    std::memcpy(&v, from, sizeof v);
    return v;
}
template <typename V, typename T> DELTIC_INLINE void store(T *to, V v) {
#if !defined(__AVX512F__)
    if constexpr (requires { v.part; }) {
        for (int i = 0; i < V::kParts; ++i)
            std::memcpy((char *)to + i * sizeof v.part[i], &v.part[i], sizeof v.part[i]);
        return;
    }
#endif
    std::memcpy(to, &v, sizeof v);
}

// Lane masks, all ones where a < b (less) or v is NaN (is_nan).
DELTIC_INLINE Ints less(Floats a, Floats b) {
#if defined(__AVX512F__)
    return a < b;
#else
    return by_part<Ints>([&](int i) DELTIC_INLINE_LAMBDA { return a.part[i] < b.part[i]; });
#endif
}
DELTIC_INLINE Ints is_nan(Floats v) {
#if defined(__AVX512F__)
    return v != v;
#else
    return by_part<Ints>([&](int i) DELTIC_INLINE_LAMBDA { return v.part[i] != v.part[i]; });
#endif
}

DELTIC_INLINE Floats loadf(const float *from) { return load<Floats>(from); }
// x - 0 is x for every x, so compilers drop the subtraction. x + 0 would change -0, so they keep the addition.
template <typename V = Floats> DELTIC_INLINE V splat(float x) { return x - V{}; }
template <typename V = Ints> DELTIC_INLINE V splat(int32_t x) { return V{} + x; }

// Access the first `count` lanes. The others are 0 (load) or untouched (store).
DELTIC_INLINE Floats load_part(const float *from, int64_t count) {
    Floats v = {};
    std::memcpy(&v, from, size_t(count) * 4);
    return v;
}
DELTIC_INLINE void store_part(float *to, Floats v, int64_t count) { std::memcpy(to, &v, size_t(count) * 4); }

// a * b + c. Rounded once if the level has such an instruction.
DELTIC_INLINE Native fma(Native a, Native b, Native c) {
#if defined(__AVX512F__)
    return (Native)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX2__)
    return (Native)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__FMA__)  // tests compare this build with ARM64
    return (Native)_mm_fmadd_ps((__m128)a, (__m128)b, (__m128)c);
#elif defined(__aarch64__)
    return (Native)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
    return a * b + c;
#endif
}
DELTIC_INLINE Native to_floats(NativeInts v) { return __builtin_convertvector(v, Native); }
#if !defined(__AVX512F__)  // with AVX-512, Native and Floats are one type
DELTIC_INLINE Floats fma(const Floats &a, const Floats &b, const Floats &c) {
    return by_part<Floats>([&](int i) DELTIC_INLINE_LAMBDA { return fma(a.part[i], b.part[i], c.part[i]); });
}
DELTIC_INLINE Floats to_floats(const Ints &v) {
    return by_part<Floats>([&](int i) DELTIC_INLINE_LAMBDA { return to_floats(v.part[i]); });
}
#endif

// Widen as many numbers as a register has lanes. (The compiler's own conversions are scalar if the sizes differ by a
// factor of four.)
#if defined(__aarch64__)
DELTIC_INLINE uint8x8_t four_bytes(const void *from) {
    uint32_t four;
    std::memcpy(&four, from, sizeof four);
    return vreinterpret_u8_u32(vdup_n_u32(four));
}
#endif
DELTIC_INLINE NativeInts native_s8(const int8_t *from) {
#if defined(__AVX512F__)
    return (NativeInts)_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)from));
#elif defined(__AVX2__)
    return (NativeInts)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)from));
#elif defined(__aarch64__)
    return (NativeInts)vmovl_s16(vget_low_s16(vmovl_s8(vreinterpret_s8_u8(four_bytes(from)))));
#else
    return NativeInts{from[0], from[1], from[2], from[3]};
#endif
}
DELTIC_INLINE NativeInts native_u8(const uint8_t *from) {
#if defined(__AVX512F__)
    return (NativeInts)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)from));
#elif defined(__AVX2__)
    return (NativeInts)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)from));
#elif defined(__aarch64__)
    return (NativeInts)vmovl_u16(vget_low_u16(vmovl_u8(four_bytes(from))));
#else
    return NativeInts{from[0], from[1], from[2], from[3]};
#endif
}
DELTIC_INLINE NativeWords native_u16(const uint16_t *from) {
#if defined(__AVX512F__)
    return (NativeWords)_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)from));
#elif defined(__AVX2__)
    return (NativeWords)_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)from));
#elif defined(__aarch64__)
    return (NativeWords)vmovl_u16(vld1_u16(from));
#else
    return NativeWords{from[0], from[1], from[2], from[3]};
#endif
}
// Conversions of 16 numbers. Narrowing keeps the low 16 or 8 bits of each 32-bit lane.
DELTIC_INLINE Words from_u16(const uint16_t *from) {
#if defined(__AVX512F__)
    return native_u16(from);
#else
    return by_part<Words>([&](int i) DELTIC_INLINE_LAMBDA { return native_u16(from + i * kNative); });
#endif
}
DELTIC_INLINE void to_u16(uint16_t *to, Words v) {
#if defined(__AVX512F__)
    _mm256_storeu_si256((__m256i *)to, _mm512_cvtepi32_epi16((__m512i)v));
#elif defined(__AVX2__)
    v = v & 0xffff;  // _mm256_packus_epi32 would clamp larger values
    __m256i both = _mm256_packus_epi32((__m256i)v.part[0], (__m256i)v.part[1]);
    _mm256_storeu_si256((__m256i *)to, _mm256_permute4x64_epi64(both, 0xd8));
#elif defined(__aarch64__)
    for (int i = 0; i < 4; ++i) vst1_u16(to + 4 * i, vmovn_u32((uint32x4_t)v.part[i]));
#else
    for (int i = 0; i < kLanes; ++i) to[i] = uint16_t(v[i]);
#endif
}
DELTIC_INLINE void to_s8(int8_t *to, Ints v) {
#if defined(__AVX512F__)
    _mm_storeu_si128((__m128i *)to, _mm512_cvtepi32_epi8((__m512i)v));
#elif defined(__AVX2__)
    __m256i low = _mm256_setr_epi8(0, 4, 8, 12, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1,  //
                                   -1, -1, -1, -1, 0, 4, 8, 12, -1, -1, -1, -1, -1, -1, -1, -1);
    __m256i high = _mm256_setr_epi8(-1, -1, -1, -1, -1, -1, -1, -1, 0, 4, 8, 12, -1, -1, -1, -1,  //
                                    -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, 0, 4, 8, 12);
    __m256i both = _mm256_or_si256(_mm256_shuffle_epi8((__m256i)v.part[0], low),
                                   _mm256_shuffle_epi8((__m256i)v.part[1], high));
    _mm_storeu_si128((__m128i *)to, _mm_or_si128(_mm256_castsi256_si128(both), _mm256_extracti128_si256(both, 1)));
#elif defined(__aarch64__)
    for (int i = 0; i < 2; ++i) {
        int16x4_t low = vmovn_s32((int32x4_t)v.part[2 * i]), high = vmovn_s32((int32x4_t)v.part[2 * i + 1]);
        vst1_s8(to + 8 * i, vmovn_s16(vcombine_s16(low, high)));
    }
#else
    for (int i = 0; i < kLanes; ++i) to[i] = int8_t(v[i]);
#endif
}

// float16. Caches store float, bfloat16 (as uint16_t) or Half.
struct Half {
    uint16_t bits;
};
// Calls body(T{}) with the element type T of a type of deltic.h.
template <typename Body> DELTIC_INLINE void by_type(int64_t type, Body &&body) {
    if (type == DELTIC_BF16) body(uint16_t{});
    else if (type == DELTIC_F16) body(Half{});
    else body(float{});
}

// bfloat16 <-> float32. Rounds to nearest, ties to even; NaN stays NaN.
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
    return (Native)(native_u16(from) << 16);
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

// float16 -> float32, including subnormals and infinities.
DELTIC_INLINE Native native_half(const uint16_t *from) {
#if defined(__AVX512F__)
    return (Native)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)from));
#elif defined(__F16C__)
    return (Native)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)from));
#elif defined(__aarch64__)
    return (Native)vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(from)));
#else
    NativeWords bits = native_u16(from), sign = (bits & 0x8000) << 16, rest = bits & 0x7fff;
    // The product rebases the exponent and also normalizes subnormals.
    Native finite = (Native)(rest << 13) * std::bit_cast<float>(uint32_t(254 - 15) << 23);
    NativeWords special = (NativeWords)(rest >= 0x7c00);
    return (Native)(((NativeWords)finite & ~special) | ((0x7f800000 | rest << 13) & special) | sign);
#endif
}
// 2^-8 times unsigned e4m3 numbers, including subnormals. Shifted left by 7, their bits are a float16.
DELTIC_INLINE Native native_e4m3(const uint8_t *from) {
#if defined(__AVX512F__)
    __m256i bits = _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i *)from));
    return (Native)_mm512_cvtph_ps(_mm256_slli_epi16(bits, 7));
#elif defined(__F16C__)
    return (Native)_mm256_cvtph_ps(_mm_slli_epi16(_mm_cvtepu8_epi16(_mm_loadl_epi64((const __m128i *)from)), 7));
#elif defined(__aarch64__)
    uint16x4_t bits = vshl_n_u16(vget_low_u16(vmovl_u8(four_bytes(from))), 7);
    return (Native)vcvt_f32_f16(vreinterpret_f16_u16(bits));
#else
    // as float32 bits, they are 2^-120 times the numbers; the product also normalizes subnormals
    return (Native)(native_u8(from) << 20) * 0x1p112f;
#endif
}
DELTIC_INLINE Floats load_half(const uint16_t *from) {
#if defined(__AVX512F__)
    return native_half(from);
#else
    return by_part<Floats>([&](int i) DELTIC_INLINE_LAMBDA { return native_half(from + i * kNative); });
#endif
}

// float16 <-> float32. Rounds to nearest, ties to even; infinite from 65520 on; NaN stays NaN. from_halves reads the
// low halves of 32-bit lanes.
#if defined(__AVX512F__)
DELTIC_INLINE __m256i halves(Floats v) {
    return _mm512_cvtps_ph((__m512)v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
DELTIC_INLINE void store_narrow(Half *to, Floats v) { _mm256_storeu_si256((__m256i *)to, halves(v)); }
DELTIC_INLINE Native rounded_half(Native v) { return (Native)_mm512_cvtph_ps(halves((Floats)v)); }
DELTIC_INLINE Floats from_halves(Words v) { return (Floats)_mm512_cvtph_ps(_mm512_cvtepi32_epi16((__m512i)v)); }
#elif defined(__F16C__)
DELTIC_INLINE __m128i halves(Native v) {
    return _mm256_cvtps_ph((__m256)v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
DELTIC_INLINE void store_narrow(Half *to, Floats v) {
    for (int i = 0; i < 2; ++i) _mm_storeu_si128((__m128i *)to + i, halves(v.part[i]));
}
DELTIC_INLINE Native rounded_half(Native v) { return (Native)_mm256_cvtph_ps(halves(v)); }
DELTIC_INLINE Floats from_halves(Words v) {
    uint16_t bits[kLanes];
    to_u16(bits, v);
    return load_half(bits);
}
#elif defined(__aarch64__)
// NaN becomes 0x7e00, as in the code without such an instruction.
DELTIC_INLINE uint16x4_t halves(Native v) {
    uint16x4_t sound = vmovn_u32((uint32x4_t)(v == v));
    return vbsl_u16(sound, vreinterpret_u16_f16(vcvt_f16_f32((float32x4_t)v)), vdup_n_u16(0x7e00));
}
DELTIC_INLINE void store_narrow(Half *to, Floats v) {
    for (int i = 0; i < 4; ++i) vst1_u16((uint16_t *)to + 4 * i, halves(v.part[i]));
}
DELTIC_INLINE Native rounded_half(Native v) { return (Native)vcvt_f32_f16(vreinterpret_f16_u16(halves(v))); }
DELTIC_INLINE Floats from_halves(Words v) {
    return by_part<Floats>([&](int i) DELTIC_INLINE_LAMBDA {
        return (Native)vcvt_f32_f16(vreinterpret_f16_u16(vmovn_u32((uint32x4_t)v.part[i])));
    });
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
DELTIC_INLINE Floats from_halves(Words v) {
    uint16_t bits[kLanes];
    to_u16(bits, v);
    return load_half(bits);
}
#endif
DELTIC_INLINE Native load_native(const Half *from) { return native_half((const uint16_t *)from); }
DELTIC_INLINE Floats load_wide(const Half *from) { return load_half((const uint16_t *)from); }
DELTIC_INLINE float widen(Half value) { return widen_half(value.bits); }
DELTIC_INLINE void narrow(float value, Half &out) {
    Half all[kLanes];
    store_narrow(all, splat(value));
    out = all[0];
}

// Per byte: the table entry with the index `codes` (0 .. 15). The table's first 16 bytes are repeated.
DELTIC_INLINE NativeBytes lookup(NativeBytes table, NativeBytes codes) {
#if defined(__AVX512BW__)
    return (NativeBytes)_mm512_shuffle_epi8((__m512i)table, (__m512i)codes);
#elif defined(__AVX2__)
    return (NativeBytes)_mm256_shuffle_epi8((__m256i)table, (__m256i)codes);
#elif defined(__aarch64__)
    return (NativeBytes)vqtbl1q_u8((uint8x16_t)table, (uint8x16_t)codes);
#else
    for (int i = 0; i < 4 * kNative; ++i) codes[i] = table[codes[i]];
    return codes;
#endif
}

// With AVX2, `dots` has its own code, which depends on the bits per code.
#if defined(__AVX512F__) || !defined(__AVX2__)
// Per lane: acc + the four unsigned bytes of the lane times the four signed bytes of `x`, which all lanes share. Exact.
DELTIC_INLINE NativeInts dot4(NativeInts acc, NativeBytes codes, const int32_t &x) {
#if defined(__AVX512VNNI__)
    // compilers load the broadcast operand into a separate register and then run out of registers
    asm("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(acc) : "v"(codes), "m"(x));
    return acc;
#elif defined(__AVX512BW__)
    // uses 16-bit products: pairs of 8-bit products would saturate
    __m512i even = _mm512_and_si512((__m512i)codes, _mm512_set1_epi16(255)), odd = _mm512_srli_epi16((__m512i)codes, 8);
    __m512i both = _mm512_set1_epi32(x);
    __m512i low = _mm512_srai_epi16(_mm512_slli_epi16(both, 8), 8), high = _mm512_srai_epi16(both, 8);
    __m512i sum = _mm512_add_epi32(_mm512_madd_epi16(even, low), _mm512_madd_epi16(odd, high));
    return (NativeInts)_mm512_add_epi32((__m512i)acc, sum);
#else
    NativeWords w = (NativeWords)codes;
    acc += (NativeInts)(w & 255) * int32_t(int8_t(x));
    acc += (NativeInts)(w >> 8 & 255) * int32_t(int8_t(x >> 8));
    acc += (NativeInts)(w >> 16 & 255) * int32_t(int8_t(x >> 16));
    return acc + (NativeInts)(w >> 24) * (x >> 24);
#endif
}
#endif

// Per lane: acc + two signed 16-bit numbers of the lane times the two of `x`, which all lanes share. Exact.
DELTIC_INLINE NativeInts dot2(NativeInts acc, NativeInts pairs, const int32_t &x) {
#if defined(__AVX512VNNI__)
    asm("vpdpwssd %2%{1to16%}, %1, %0" : "+v"(acc) : "v"(pairs), "m"(x));
    return acc;
#elif defined(__AVX512BW__)
    return acc + (NativeInts)_mm512_madd_epi16((__m512i)pairs, _mm512_set1_epi32(x));
#elif defined(__AVX2__) && !defined(__AVX512F__)
    return acc + (NativeInts)_mm256_madd_epi16((__m256i)pairs, _mm256_set1_epi32(x));
#elif defined(__SSE2__) && !defined(__AVX512F__)
    return acc + (NativeInts)_mm_madd_epi16((__m128i)pairs, _mm_set1_epi32(x));
#else
    return acc + (pairs << 16 >> 16) * (x << 16 >> 16) + (pairs >> 16) * (x >> 16);
#endif
}

#if defined(__AVX512BF16__)
// Per lane: acc + two bfloat16 of the lane times the two of `x`. Treats subnormals as 0 and rounds each sum once.
DELTIC_INLINE Native dot2_bf16(Native acc, NativeWords pairs, uint32_t x) {
    return (Native)_mm512_dpbf16_ps((__m512)acc, (__m512bh)pairs, (__m512bh)_mm512_set1_epi32(int(x)));
}
// Converts 32 numbers to bfloat16, in order. Subnormals become 0.
DELTIC_INLINE Words narrow_bf16(Floats first, Floats second) {
    return (Words)_mm512_cvtne2ps_pbh((__m512)second, (__m512)first);
}
// Converts two numbers per lane to bfloat16, the first one in the low half. Subnormals become 0.
DELTIC_INLINE Words pair_bf16(Floats low, Floats high) {
    Words both = narrow_bf16(low, high);
    const Words order = {16 << 16 | 0, 17 << 16 | 1, 18 << 16 | 2, 19 << 16 | 3, 20 << 16 | 4, 21 << 16 | 5,
                         22 << 16 | 6, 23 << 16 | 7, 24 << 16 | 8, 25 << 16 | 9, 26 << 16 | 10, 27 << 16 | 11,
                         28 << 16 | 12, 29 << 16 | 13, 30 << 16 | 14, 31 << 16 | 15};
    return (Words)_mm512_permutexvar_epi16((__m512i)order, (__m512i)both);
}
#endif

// Sum and maximum of all lanes, by halving: the order is the same at every level.
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

// The largest lane of non-negative numbers.
DELTIC_INLINE int32_t max_lanes(Ints v) {
#if defined(__AVX512F__)
    return _mm512_reduce_max_epi32((__m512i)v);
#elif defined(__aarch64__)
    int32x4_t low = vmaxq_s32((int32x4_t)v.part[0], (int32x4_t)v.part[1]);
    return vmaxvq_s32(vmaxq_s32(low, vmaxq_s32((int32x4_t)v.part[2], (int32x4_t)v.part[3])));
#else
    int32_t lane[16];
    store(lane, v);
    for (int width = 8; width; width /= 2)
        for (int i = 0; i < width; ++i) lane[i] = lane[i] < lane[i + width] ? lane[i + width] : lane[i];
    return lane[0];
#endif
}
#if defined(__aarch64__)
// Transposes four vectors.
DELTIC_INLINE void turn_four(uint32x4_t v[4]) {
    uint64x2_t a = (uint64x2_t)vzip1q_u32(v[0], v[1]), b = (uint64x2_t)vzip2q_u32(v[0], v[1]);
    uint64x2_t c = (uint64x2_t)vzip1q_u32(v[2], v[3]), d = (uint64x2_t)vzip2q_u32(v[2], v[3]);
    v[0] = (uint32x4_t)vzip1q_u64(a, c);
    v[1] = (uint32x4_t)vzip2q_u64(a, c);
    v[2] = (uint32x4_t)vzip1q_u64(b, d);
    v[3] = (uint32x4_t)vzip2q_u64(b, d);
}
#endif
// Transposes sixteen vectors: lane j of the i-th becomes lane i of the j-th.
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
    // a[4 i + j]: its quarter q has lane 4 q + j of the vectors 4 i .. 4 i + 3
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
#elif defined(__aarch64__)
    for (int i = 0; i < 4; ++i)
        for (int j = 0; j <= i; ++j) {
            uint32x4_t below[4], above[4];
            for (int k = 0; k < 4; ++k) {
                below[k] = (uint32x4_t)v[4 * i + k].part[j];
                above[k] = (uint32x4_t)v[4 * j + k].part[i];
            }
            turn_four(below);
            turn_four(above);
            for (int k = 0; k < 4; ++k) {
                v[4 * j + k].part[i] = (NativeWords)below[k];
                v[4 * i + k].part[j] = (NativeWords)above[k];
            }
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

// Reduces each of four vectors with `join`. Lanes i, i + 4, ... of the result are the reduction of all lanes of v[i].
template <typename Join> DELTIC_INLINE Ints of_four(const Ints v[4], Join &&join) {
#if defined(__AVX512F__)
    auto *r = (const __m512i *)v;
    auto both = [&](__m512i a, __m512i b) { return (__m512i)join((Ints)a, (Ints)b); };
    __m512i first = both(_mm512_unpacklo_epi32(r[0], r[1]), _mm512_unpackhi_epi32(r[0], r[1]));
    __m512i second = both(_mm512_unpacklo_epi32(r[2], r[3]), _mm512_unpackhi_epi32(r[2], r[3]));
    __m512i all = both(_mm512_unpacklo_epi64(first, second), _mm512_unpackhi_epi64(first, second));
    all = both(all, _mm512_shuffle_i32x4(all, all, 0x4e));
    return (Ints)both(all, _mm512_shuffle_i32x4(all, all, 0xb1));
#elif defined(__aarch64__)
    Ints parts[4];  // parts[k]: part k of all four vectors
    for (int i = 0; i < 4; ++i)
        for (int k = 0; k < 4; ++k) parts[k].part[i] = v[i].part[k];
    Ints all = join(join(parts[0], parts[1]), join(parts[2], parts[3]));
    uint32x4_t turned[4];
    for (int i = 0; i < 4; ++i) turned[i] = (uint32x4_t)all.part[i];
    turn_four(turned);
    for (int j = 0; j < 4; ++j) parts[j] = by_part<Ints>([&](int) { return (NativeInts)turned[j]; });
    return join(join(parts[0], parts[1]), join(parts[2], parts[3]));
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

// Narrows 32 numbers to bytes. sums: of the first and of the second 16.
DELTIC_INLINE void to_s8(int8_t *to, Ints first, Ints second, int32_t sums[2]) {
#if defined(__AVX512F__)
    __m256i codes = _mm256_set_m128i(_mm512_cvtepi32_epi8((__m512i)second), _mm512_cvtepi32_epi8((__m512i)first));
    _mm256_storeu_si256((__m256i *)to, codes);
#else
    to_s8(to, first);
    to_s8(to + 16, second);
#endif
#if defined(__AVX2__)
#if !defined(__AVX512F__)
    __m256i codes = _mm256_loadu_si256((const __m256i *)to);
#endif
    __m256i of8 = _mm256_sad_epu8(_mm256_xor_si256(codes, _mm256_set1_epi8(-128)), _mm256_setzero_si256());
    __m256i of16 = _mm256_add_epi64(of8, _mm256_shuffle_epi32(of8, 0x4e));
    sums[0] = _mm256_extract_epi32(of16, 0) - 16 * 128;
    sums[1] = _mm256_extract_epi32(of16, 4) - 16 * 128;
#elif defined(__aarch64__)
    for (int half = 0; half < 2; ++half) sums[half] = vaddlvq_s8(vld1q_s8(to + 16 * half));
#else
    for (int half = 0; half < 2; ++half) {
        int32_t sum = 0;
        for (int i = 0; i < 16; ++i) sum += to[16 * half + i];
        sums[half] = sum;
    }
#endif
}

DELTIC_INLINE Floats choose(Ints mask, Floats yes, Floats no) {
    return (Floats)(((Ints)yes & mask) | ((Ints)no & ~mask));
}
DELTIC_INLINE Ints maximum(Ints a, Ints b) {
#if defined(__AVX512F__)
    return a < b ? b : a;
#else
    return by_part<Ints>([&](int i) DELTIC_INLINE_LAMBDA { return a.part[i] < b.part[i] ? b.part[i] : a.part[i]; });
#endif
}
DELTIC_INLINE Ints max_of_four(const Ints v[4]) {
    return of_four(v, [](Ints a, Ints b) DELTIC_INLINE_LAMBDA { return maximum(a, b); });
}
DELTIC_INLINE Ints sum_of_four(const Ints v[4]) {
    return of_four(v, [](Ints a, Ints b) DELTIC_INLINE_LAMBDA { return a + b; });
}
// Lane-wise maximum and minimum; a if either is NaN.
DELTIC_INLINE Floats maximum(Floats a, Floats b) {
#if defined(__AVX512F__)
    return (Floats)_mm512_max_ps((__m512)b, (__m512)a);
#elif defined(__AVX2__)
    return by_part<Floats>([&](int i) DELTIC_INLINE_LAMBDA {
        return (Native)_mm256_max_ps((__m256)b.part[i], (__m256)a.part[i]);
    });
#else
    return choose(less(a, b), b, a);
#endif
}
DELTIC_INLINE Floats minimum(Floats a, Floats b) {
#if defined(__AVX512F__)
    return (Floats)_mm512_min_ps((__m512)b, (__m512)a);
#elif defined(__AVX2__)
    return by_part<Floats>([&](int i) DELTIC_INLINE_LAMBDA {
        return (Native)_mm256_min_ps((__m256)b.part[i], (__m256)a.part[i]);
    });
#else
    return choose(less(b, a), b, a);
#endif
}

// exp with a relative error below 2e-7. Clamped to the range of normal numbers; NaN stays NaN.
DELTIC_INLINE Floats exponential(Floats x) {
    x = maximum(minimum(x, splat(88.0f)), splat(-87.0f));
    // adding and subtracting 1.5 * 2^23 rounds to an integer
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
