// Keys and values in eight bits, as deltic/ops/kv.py describes them, and their products with queries and weights, which
// are rounded to 15 bits. Sums of products are exact integers, so that they do not depend on the level or on the order.
#pragma once
#include <bit>
#include <cmath>
#include <cstring>
#include "simd.hpp"

namespace deltic::DELTIC_LEVEL {
namespace {

struct Int8 {
    int8_t code;
};
// With so many dimensions, or positions of a part, the sums stay below 2^31.
constexpr int64_t kInt8Dim = 1024;
constexpr float kLargestCode = 127, kLargestFactor = 16383;
constexpr float kSmallestInt8 = 0x1p-100f;  // a vector of smaller numbers is stored as zeros

// The codes of all heads, then their scales.
constexpr int64_t int8_bytes(int64_t heads, int64_t dim) { return heads * (dim + 4); }

// The largest magnitude among x [count], NaN if one is.
inline float largest(const float *x, int64_t count) {
    Ints high = {};
    int64_t whole = count / kLanes * kLanes;
    for (int64_t i = 0; i < whole; i += kLanes) high = maximum(high, (Ints)load<Words>(x + i) & 0x7fffffff);
    if (whole < count) high = maximum(high, (Ints)load_part(x + whole, count - whole) & 0x7fffffff);
    return std::bit_cast<float>(max_lanes(high));
}

// The unit in which `top` is `code`, and its inverse.
struct Unit {
    float size, inverse;

    Unit(float top, float code) : size(top / code), inverse(code / top) {
        if (top < kSmallestInt8) size = inverse = 0;
    }
};

// To the nearest integer, to even; |x| < 2^22.
DELTIC_INLINE Ints to_nearest(Floats x) { return (Ints)(x + 0x1.8p23f) - 0x4b400000; }

// x [dim] -> codes [dim] and the scale.
inline void write_int8(const float *x, int64_t dim, int8_t *codes, int8_t *scale) {
    Unit unit(largest(x, dim), kLargestCode);
    std::memcpy(scale, &unit.size, 4);
    int64_t whole = dim / kLanes * kLanes;
    for (int64_t i = 0; i < whole; i += kLanes) to_s8(codes + i, to_nearest(loadf(x + i) * unit.inverse));
    if (whole == dim) return;
    int8_t rest[kLanes];
    to_s8(rest, to_nearest(load_part(x + whole, dim - whole) * unit.inverse));
    std::memcpy(codes + whole, rest, size_t(dim - whole));
}

// ---- Products. A quad is four codes in a lane: of a position's neighbouring dimensions, or of a dimension at
// neighbouring positions. It is multiplied with four factors that all lanes share.

constexpr bool kByteProducts =
#if defined(__aarch64__) && defined(__ARM_FEATURE_DOTPROD)
    true;
#else
    false;
#endif
// The place in a quad of each of four positions: its even places meet the first two factors, its odd ones the others.
constexpr int kPlaces[4] = {0, kByteProducts ? 1 : 2, kByteProducts ? 2 : 1, 3};

#if defined(__aarch64__) && defined(__ARM_FEATURE_DOTPROD)
struct Quads {
    int8x16_t codes;
    DELTIC_INLINE explicit Quads(const int8_t *from) : codes(vld1q_s8(from)) {}
};
struct Sum {
    int32x4_t high{}, low{};
    DELTIC_INLINE void add(const Quads &quads, const int32_t *factors) {
        high = vdotq_s32(high, quads.codes, vreinterpretq_s8_s32(vdupq_n_s32(factors[0])));
        low = vdotq_s32(low, quads.codes, vreinterpretq_s8_s32(vdupq_n_s32(factors[1])));
    }
    DELTIC_INLINE NativeInts total() const { return (NativeInts)vaddq_s32(vshlq_n_s32(high, 7), low); }
};
#else
typedef int16_t NativeShorts __attribute__((vector_size(kNative * 4)));
struct Quads {
    NativeInts even, odd;
    DELTIC_INLINE explicit Quads(const int8_t *from) {
        auto both = load<NativeShorts>(from);
        even = (NativeInts)(both << 8 >> 8);
        odd = (NativeInts)(both >> 8);
    }
};
struct Sum {
    NativeInts sum{};
    DELTIC_INLINE void add(const Quads &quads, const int32_t *factors) {
        sum = dot2(dot2(sum, quads.even, factors[0]), quads.odd, factors[1]);
    }
    DELTIC_INLINE NativeInts total() const { return sum; }
};
#endif

// Four factors, for the places 0 .. 3 of a quad, or (spread) for its positions 0 .. 3 as kPlaces puts them.
template <bool kSpread> DELTIC_INLINE uint64_t factors_of(const int16_t *from) {
    uint64_t four;
    std::memcpy(&four, from, sizeof four);
    if constexpr (kByteProducts) {  // the upper bytes of all four, then their lower seven bits
        uint64_t bytes = 0;
        for (int i = 0; i < 4; ++i)
            bytes |= uint64_t(uint8_t(from[i] >> 7)) << (8 * i) | uint64_t(from[i] & 127) << (32 + 8 * i);
        return bytes;
    }
    if constexpr (kSpread) return four;
    return (four & 0xffff00000000ffff) | (four >> 16 & 0xffff0000) | (four & 0xffff0000) << 16;
}

// done(r, w, sum) for the sums over so many quads, which are `step` bytes apart. factors: [quads, R, 2].
template <int R, int W, typename Done>
DELTIC_INLINE void multiply(const int8_t *from, int64_t step, const int32_t *factors, int64_t quads, Done &&done) {
    Sum sum[R][W];
    for (int64_t i = 0; i < quads; ++i, from += step, factors += 2 * R)
#pragma GCC unroll 4
        for (int w = 0; w < W; ++w) {
            Quads codes(from + w * 4 * kNative);
#pragma GCC unroll 16
            for (int r = 0; r < R; ++r) sum[r][w].add(codes, factors + 2 * r);
        }
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
        for (int w = 0; w < W; ++w) done(r, w, sum[r][w].total());
}

// Values of four positions, `stride` bytes apart, in 16 or 64 dimensions -> quads of neighbouring dimensions.
#if defined(__AVX512BW__)
constexpr int64_t kWoven = 64;
DELTIC_INLINE void weave(const int8_t *from, int64_t stride, int8_t *to) {
    // so that the quads of each 128 bits follow those of the 128 bits before
    const __m512i order = _mm512_set_epi32(15, 11, 7, 3, 14, 10, 6, 2, 13, 9, 5, 1, 12, 8, 4, 0);
    __m512i row[4];
    for (int i = 0; i < 4; ++i)
        row[kPlaces[i]] = _mm512_permutexvar_epi32(order, _mm512_loadu_si512(from + i * stride));
    __m512i low01 = _mm512_unpacklo_epi8(row[0], row[1]), high01 = _mm512_unpackhi_epi8(row[0], row[1]);
    __m512i low23 = _mm512_unpacklo_epi8(row[2], row[3]), high23 = _mm512_unpackhi_epi8(row[2], row[3]);
    _mm512_storeu_si512(to, _mm512_unpacklo_epi16(low01, low23));
    _mm512_storeu_si512(to + 64, _mm512_unpackhi_epi16(low01, low23));
    _mm512_storeu_si512(to + 128, _mm512_unpacklo_epi16(high01, high23));
    _mm512_storeu_si512(to + 192, _mm512_unpackhi_epi16(high01, high23));
}
#else
constexpr int64_t kWoven = 16;
DELTIC_INLINE void weave(const int8_t *from, int64_t stride, int8_t *to) {
    typedef int8_t Bytes __attribute__((vector_size(16)));
    typedef int16_t Pairs __attribute__((vector_size(16)));
    Bytes row[4];
    for (int i = 0; i < 4; ++i) row[kPlaces[i]] = load<Bytes>(from + i * stride);
    auto low = [](Bytes a, Bytes b) DELTIC_INLINE_LAMBDA {
        return (Pairs)DELTIC_SHUFFLE(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
    };
    auto high = [](Bytes a, Bytes b) DELTIC_INLINE_LAMBDA {
        return (Pairs)DELTIC_SHUFFLE(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
    };
    Pairs low01 = low(row[0], row[1]), high01 = high(row[0], row[1]);
    Pairs low23 = low(row[2], row[3]), high23 = high(row[2], row[3]);
    store(to, DELTIC_SHUFFLE(low01, low23, 0, 8, 1, 9, 2, 10, 3, 11));
    store(to + 16, DELTIC_SHUFFLE(low01, low23, 4, 12, 5, 13, 6, 14, 7, 15));
    store(to + 32, DELTIC_SHUFFLE(high01, high23, 0, 8, 1, 9, 2, 10, 3, 11));
    store(to + 48, DELTIC_SHUFFLE(high01, high23, 4, 12, 5, 13, 6, 14, 7, 15));
}
#endif
// The same of fewer dimensions.
inline void weave_part(const int8_t *from, int64_t stride, int64_t dim, int8_t *to) {
    for (int64_t d = 0; d < dim; ++d)
        for (int i = 0; i < 4; ++i) to[4 * d + kPlaces[i]] = from[i * stride + d];
}

}  // namespace
}  // namespace deltic::DELTIC_LEVEL
