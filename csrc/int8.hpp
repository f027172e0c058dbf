// int8 keys and values (format: deltic/ops/kv.py) and their products with queries and attention weights, which are
// rounded to eight bits too. Sums of products are exact integers: they depend on neither the SIMD level nor the order.
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
constexpr int64_t kInt8Dim = 1024;  // maximum head_dim
constexpr float kLargestCode = 127;
constexpr float kSmallestInt8 = 0x1p-100f;  // a vector whose numbers are all smaller is stored as zeros

// Bytes of a token's keys or values: the codes of all heads, then their float32 scales.
constexpr int64_t int8_bytes(int64_t heads, int64_t dim) { return heads * (dim + 4); }

// Returns the largest magnitude in x [count]; NaN if x contains NaN.
inline float largest(const float *x, int64_t count) {
    Ints high = {};
    int64_t whole = count / kLanes * kLanes;
    for (int64_t i = 0; i < whole; i += kLanes) high = maximum(high, (Ints)load<Words>(x + i) & 0x7fffffff);
    if (whole < count) high = maximum(high, (Ints)load_part(x + whole, count - whole) & 0x7fffffff);
    return std::bit_cast<float>(max_lanes(high));
}

// The scale that maps `top` to the code 127, and its inverse.
struct Unit {
    float size, inverse;

    explicit Unit(float top) : size(top / kLargestCode), inverse(kLargestCode / top) {
        if (top < kSmallestInt8) size = inverse = 0;
    }
};

// Rounds to the nearest integer, ties to even; |x| < 2^22.
DELTIC_INLINE Ints to_nearest(Floats x) { return (Ints)(x + 0x1.8p23f) - 0x4b400000; }

// Quantizes x [dim] to codes [dim] and a float32 scale.
inline void write_int8(const float *x, int64_t dim, int8_t *codes, int8_t *scale) {
    Unit unit(largest(x, dim));
    std::memcpy(scale, &unit.size, 4);
    int64_t whole = dim / kLanes * kLanes;
    for (int64_t i = 0; i < whole; i += kLanes) to_s8(codes + i, to_nearest(loadf(x + i) * unit.inverse));
    if (whole == dim) return;
    int8_t rest[kLanes];
    to_s8(rest, to_nearest(load_part(x + whole, dim - whole) * unit.inverse));
    std::memcpy(codes + whole, rest, size_t(dim - whole));
}

// ---- Products. A quad is four codes in a 32-bit lane: four neighbouring dimensions of one position, or one dimension
// at four neighbouring positions. It is multiplied by four factors in -127 .. 127, which all lanes share.

// Quads contain codes plus kBias: VNNI multiplies unsigned bytes by signed bytes.
#if defined(__AVX512VNNI__)
constexpr int kBias = 128;
template <typename V> DELTIC_INLINE V biased(V codes) { return (V)((Words)codes ^ 0x80808080u); }
#else
constexpr int kBias = 0;
template <typename V> DELTIC_INLINE V biased(V codes) { return codes; }
#endif

// Returns the amount that kBias adds to a sum of products. sums: the sums of factors per lane.
inline int32_t bias_of(Ints sums) {
    if (!kBias) return 0;
    int32_t lane[kLanes], all = 0;
    store(lane, sums);
    for (int32_t each : lane) all += each;
    return kBias * all;
}

#if defined(__AVX512VNNI__)
struct Quads {
    NativeBytes codes;
    DELTIC_INLINE explicit Quads(const int8_t *from) : codes(load<NativeBytes>(from)) {}
    DELTIC_INLINE NativeInts add(NativeInts sum, const int32_t &factors) const { return dot4(sum, codes, factors); }
};
#elif defined(__AVX512BW__)
struct Quads {
    __m512i sizes;
    __mmask64 negative;
    DELTIC_INLINE explicit Quads(const int8_t *from) {
        __m512i codes = _mm512_loadu_si512(from);
        sizes = _mm512_abs_epi8(codes);
        negative = _mm512_movepi8_mask(codes);
    }
    DELTIC_INLINE NativeInts add(NativeInts sum, const int32_t &factors) const {
        __m512i all = _mm512_set1_epi32(factors);
        __m512i turned = _mm512_mask_sub_epi8(all, negative, _mm512_setzero_si512(), all);
        __m512i pairs = _mm512_maddubs_epi16(sizes, turned);  // at most 2 * 127 * 127
        return sum + (NativeInts)_mm512_madd_epi16(pairs, _mm512_set1_epi16(1));
    }
};
#elif defined(__AVX2__)
struct Quads {
    __m256i codes, sizes;
    DELTIC_INLINE explicit Quads(const int8_t *from)
        : codes(_mm256_loadu_si256((const __m256i *)from)), sizes(_mm256_abs_epi8(codes)) {}
    DELTIC_INLINE NativeInts add(NativeInts sum, const int32_t &factors) const {
        __m256i pairs = _mm256_maddubs_epi16(sizes, _mm256_sign_epi8(_mm256_set1_epi32(factors), codes));
        return sum + (NativeInts)_mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
    }
};
#elif defined(__aarch64__)
struct Quads {
    int8x16_t codes;
    DELTIC_INLINE explicit Quads(const int8_t *from) : codes(vld1q_s8(from)) {}
    DELTIC_INLINE NativeInts add(NativeInts sum, const int32_t &factors) const {
        int8x16_t all = vreinterpretq_s8_s32(vdupq_n_s32(factors));
#if defined(__ARM_FEATURE_DOTPROD)
        return (NativeInts)vdotq_s32((int32x4_t)sum, codes, all);
#else
        int32x4_t low = vpaddlq_s16(vmull_s8(vget_low_s8(codes), vget_low_s8(all)));
        int32x4_t high = vpaddlq_s16(vmull_s8(vget_high_s8(codes), vget_high_s8(all)));
        return sum + (NativeInts)vpaddq_s32(low, high);
#endif
    }
};
#else
// Codes widened to 16 bits: the even and the odd bytes of each lane.
typedef int16_t NativeShorts __attribute__((vector_size(kNative * 4)));
struct Quads {
    NativeShorts even, odd;
    DELTIC_INLINE explicit Quads(const void *from) {
        auto both = load<NativeShorts>(static_cast<const int8_t *>(from));
        even = both << 8 >> 8;
        odd = both >> 8;
    }
    DELTIC_INLINE NativeInts add(NativeInts sum, const int32_t &factors) const {
        int32_t all[kNative];
        for (int32_t &each : all) each = factors;
        Quads shared(all);
#if defined(__SSE2__)
        __m128i first = _mm_madd_epi16((__m128i)even, (__m128i)shared.even);
        return sum + (NativeInts)_mm_add_epi32(first, _mm_madd_epi16((__m128i)odd, (__m128i)shared.odd));
#else
        NativeShorts first = even * shared.even, second = odd * shared.odd;  // at most 127 * 127 each
        auto pairs = (NativeInts)first, others = (NativeInts)second;
        return sum + (pairs << 16 >> 16) + (pairs >> 16) + (others << 16 >> 16) + (others >> 16);
#endif
    }
};
#endif

// Prefetches a head of two pages into L2, row by row. A call prefetches one cache line of each page: a burst of
// prefetches would stall the loads after it.
struct Fetch {
    const int8_t *first, *second;  // the next cache line of each page
    int64_t lines, skip;           // lines per row; bytes from their end to the next row
    int64_t left;                  // lines left in this row

    Fetch(const void *one, const void *other, int64_t dim, int64_t step)
        : first(static_cast<const int8_t *>(one)), second(static_cast<const int8_t *>(other)),
          lines(pieces_of(dim, 64)), skip(step - lines * 64), left(lines) {}
    // Prefetches nothing new: the same line each time.
    explicit Fetch(const void *one)
        : first(static_cast<const int8_t *>(one)), second(first), lines(1), skip(-64), left(1) {}
    DELTIC_INLINE void operator()() {
        __builtin_prefetch(first, 0, 2);
        __builtin_prefetch(second, 0, 2);
        int64_t way = 64;
        if (--left == 0) way += skip, left = lines;
        first += way, second += way;
    }
};

// Calls done(r, w, sum) with the sums over `quads` quads, for R rows of factors [quads, R] and W registers of columns.
// step: bytes between two quads of a column.
template <int R, int W, typename Done>
DELTIC_INLINE void multiply(const int8_t *from, int64_t step, const int32_t *factors, int64_t quads, Fetch &fetch,
                            Done &&done) {
    NativeInts sum[R][W] = {};
    for (int64_t i = 0; i < quads; ++i, from += step, factors += R) {
        fetch();
#pragma GCC unroll 4
        for (int w = 0; w < W; ++w) {
            Quads codes(from + w * 4 * kNative);
#pragma GCC unroll 16
            for (int r = 0; r < R; ++r) sum[r][w] = codes.add(sum[r][w], factors[r]);
        }
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
        for (int w = 0; w < W; ++w) done(r, w, sum[r][w]);
}

// Interleaves the values of four positions, `stride` bytes apart, for kWoven dimensions: one quad per dimension.
#if defined(__AVX512BW__)
constexpr int64_t kWoven = 64;
DELTIC_INLINE void weave(const int8_t *from, int64_t stride, int8_t *to) {
    // unpack instructions work within 128-bit lanes: this permutation makes the quads contiguous
    const __m512i order = _mm512_set_epi32(15, 11, 7, 3, 14, 10, 6, 2, 13, 9, 5, 1, 12, 8, 4, 0);
    __m512i row[4];
    for (int i = 0; i < 4; ++i)
        row[i] = biased(_mm512_permutexvar_epi32(order, _mm512_loadu_si512(from + i * stride)));
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
    for (int i = 0; i < 4; ++i) row[i] = load<Bytes>(from + i * stride);
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
// The same for fewer dimensions.
inline void weave_part(const int8_t *from, int64_t stride, int64_t dim, int8_t *to) {
    for (int64_t d = 0; d < dim; ++d)
        for (int i = 0; i < 4; ++i) to[4 * d + i] = int8_t(from[i * stride + d] + kBias);
}

}  // namespace
}  // namespace deltic::DELTIC_LEVEL
