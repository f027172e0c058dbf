// Linear layers: panels of 16 weight rows times tiles of up to kTile tokens.
//
// A token's result does not depend on the tile size. Its sums always run in one order: groups of 32 columns in
// sequence, exact integer sums within a group, one `fma` per scale. Each tile reads the weights once. A panel stays in
// L2 until all tiles have read it.
#include <bit>
#include <utility>

#include "formats.hpp"
#include "levels.hpp"
#include "matrix.hpp"
#include "pool.hpp"
#if defined(__AMX_BF16__)
#include "amx.hpp"
#endif

namespace deltic::DELTIC_LEVEL {
namespace {

#if defined(__AVX512F__)
constexpr int kTile = 12;          // two sets of accumulators for 12 tokens, and the weights, fit 32 registers
#elif defined(__ARM_FEATURE_DOTPROD)
constexpr int kTile = 8;           // two sets of accumulators for 4 rows and 8 tokens, and the weights
#elif defined(__AVX2__)
constexpr int kTile = 4;
#else
constexpr int kTile = 2;
#endif
constexpr int64_t kPiece = 65536;  // bytes of weights, about, that justify a piece of work for a thread

// Every tile size is a separate template instance, so only a few sizes exist.
constexpr bool is_size(int size) { return size <= kTile && (size <= 4 || size == 8 || size == 12); }
// Size of the next tile when `rest` tokens are left.
int tile_of(int64_t rest) {
    int size = int(least(rest, kTile));
    while (!is_size(size)) --size;
    return size;
}

// kUnpacks: several tiles share weights that were unpacked once. kAmx: bfloat16 products use AMX tiles.
#if defined(__AVX512F__)
constexpr bool kUnpacks = true;
#else
constexpr bool kUnpacks = false;
#endif
#if defined(__AMX_BF16__)
constexpr bool kAmx = true;
#else
constexpr bool kAmx = false;
#endif
constexpr int kTogether = 64;  // maximum tokens per kernel call in these two cases

// Activation formats. The weight type determines which one a matrix needs.
enum Form { kFloat32, kBfloat16, kInt8x256, kInt8x32, kInt8Fine, kForms };

// A tile of T tokens, quantized to 8 bits.
//   codes    [columns / 32][T][8] int32: four int8 codes each
//   scales   [columns / block][T] float
//   whole32  [columns / 32][T] int32: -128 times the sum of the codes of 32 columns; whole16: the same for 16 columns
//   sums32   [columns / 32][T] float: the sum of the codes of 32 columns
//   pairs32  [columns / 64][T] two int16: code sums of two groups of 32; pairs16 [columns / 32][T]: of two groups of 16
// kInt8Fine has a scale per 32 columns. Optionally, outliers (single numbers much larger than the others of their
// token) have no code and stay in float32. If one token of a tile has an outlier in a column, all tokens get a value
// for that column: 0 for a token whose code holds the number. Adding the 0 changes no bit of that token's result.
//   singles  [columns / 32] int32: number of outlier columns in the group
//   places   [columns / 32][32] int32: indices of these columns in the group
//   values   [columns / 32][32][T] float
struct Int8Tile {
    const int32_t *codes;
    const float *scales;
    const int32_t *whole32, *whole16;
    const float *sums32;
    const int32_t *pairs32, *pairs16;
    const int32_t *singles, *places;
    const float *values;

    static int64_t words(int64_t columns, bool fine) {
        return columns / 4 + 4 * (columns / 32) + columns / 16 + (columns + 63) / 64 +
               (fine ? columns / 32 + 2 * columns : 0);
    }
    Int8Tile(const void *from, int64_t columns, int tokens) {
        codes = (const int32_t *)from;
        scales = (const float *)(codes + columns / 4 * tokens);
        whole32 = (const int32_t *)(scales + columns / 32 * tokens);
        whole16 = whole32 + columns / 32 * tokens;
        sums32 = (const float *)(whole16 + columns / 16 * tokens);
        pairs32 = (const int32_t *)(sums32 + columns / 32 * tokens);
        pairs16 = pairs32 + (columns + 63) / 64 * tokens;
        singles = pairs16 + columns / 32 * tokens;
        places = singles + columns / 32;
        values = (const float *)(places + columns);
    }
};

// kBfloat16 packs two columns into a word if an instruction multiplies such pairs. Otherwise a word holds one number,
// widened to float32. An odd last column is followed by a 0.
#if defined(__AVX512BF16__)
constexpr bool kPairs = true;
#else
constexpr bool kPairs = false;
#endif

int64_t token_words(Form form, int64_t columns) {
    if (form == kFloat32) return columns;
    // AMX tiles take whole rows. The pitch is an odd number of cache lines: rows would otherwise share few cache sets.
    if (form == kBfloat16 && kAmx) return (columns + 31) / 32 * 16 | 16;
    if (form == kBfloat16) return kPairs ? (columns + 1) / 2 : (columns + 1) / 2 * 2;
    return Int8Tile::words(columns, form == kInt8Fine);
}

// Outlier threshold: a number is an outlier if its square exceeds kLarge times the mean square of the maxima of its
// token's groups of 32.
constexpr float kLarge = 1.4f;

struct Rounded {
    Floats inverse;
    float scale;
};

// The scale of a block of columns. It is NaN if a number is not finite, so that the result is NaN too.
Rounded scale_of(const float *x, int columns) {
    Ints largest = {};  // magnitudes of floats have the order of their bits
    for (int i = 0; i < columns; i += kLanes) largest = maximum(largest, load<Ints>(x + i) & 0x7fffffff);
    float most = std::bit_cast<float>(max_lanes(largest));
    if (!(most < INFINITY)) return {Floats{}, NAN};
    if (most < 1e-30f) return {Floats{}, 0};
    return {splat(127.0f / most), most / 127.0f};
}

// Quantizes one token into position `t` of a tile of `tokens`.
void round_token(const float *x, int64_t columns, int block, const Int8Tile &tile, int t, int tokens) {
    auto *codes = const_cast<int32_t *>(tile.codes), *whole32 = const_cast<int32_t *>(tile.whole32);
    auto *whole16 = const_cast<int32_t *>(tile.whole16), *pairs32 = const_cast<int32_t *>(tile.pairs32);
    auto *pairs16 = const_cast<int32_t *>(tile.pairs16);
    auto *sums32 = const_cast<float *>(tile.sums32), *scales = const_cast<float *>(tile.scales);
    for (int64_t b = 0; b < columns / block; ++b) {
        Rounded rounded = scale_of(x + b * block, block);
        bool sick = rounded.scale != rounded.scale;
        scales[b * tokens + t] = rounded.scale;
        for (int64_t g = b * block / 32; g < (b + 1) * block / 32; ++g) {
            int32_t sum[2];
            auto integers = [&](int64_t from) DELTIC_INLINE_LAMBDA {
                // adding 1.5 * 2^23 rounds to an integer, ties to even
                Floats v = loadf(x + from) * rounded.inverse + 12582912.0f;
                return sick ? Ints{} : (Ints)v - 0x4b400000;
            };
            to_s8((int8_t *)(codes + 8 * (g * tokens + t)), integers(32 * g), integers(32 * g + 16), sum);
            int both = sum[0] + sum[1];
            whole16[2 * g * tokens + t] = -128 * sum[0];
            whole16[(2 * g + 1) * tokens + t] = -128 * sum[1];
            pairs16[g * tokens + t] = (sum[0] & 0xffff) | sum[1] << 16;
            whole32[g * tokens + t] = -128 * both;
            sums32[g * tokens + t] = float(both);
            int32_t &pair = pairs32[g / 2 * tokens + t];
            pair = g % 2 == 0 ? (both & 0xffff) : (pair & 0xffff) | both << 16;
        }
    }
}

// Quantizes 32 numbers with the step 1 / inverse. Returns a vector whose lanes add up to the sum of the codes.
DELTIC_INLINE Ints round_group(Floats low, Floats high, float inverse, int32_t *codes) {
    // adding 1.5 * 2^23 rounds to an integer, ties to even
    Ints first = (Ints)(low * inverse + 12582912.0f) - 0x4b400000;
    Ints second = (Ints)(high * inverse + 12582912.0f) - 0x4b400000;
    to_s8((int8_t *)codes, first);
    to_s8((int8_t *)(codes + 4), second);
    return first + second;
}

DELTIC_INLINE Floats size_of(Floats v) { return (Floats)((Ints)v & 0x7fffffff); }
// Replaces numbers whose magnitude exceeds `limit` with 0.
DELTIC_INLINE Floats without_large(Floats v, Floats limit) { return choose(less(limit, size_of(v)), Floats{}, v); }

// Lane-wise maxima of the magnitudes of 32 numbers, as bits, whose order is that of the magnitudes.
DELTIC_INLINE Ints largest_of(Floats low, Floats high) {
    return maximum((Ints)low & 0x7fffffff, (Ints)high & 0x7fffffff);
}

// Quantizes one token into position `t` of a tile, in steps of four groups. If `again`, leaves out numbers whose
// magnitude exceeds a limit. Returns the limit (infinity without `again`). A group with a number that is not finite
// gets the scale NaN and arbitrary codes.
float round_fine(const float *x, int64_t columns, bool again, const Int8Tile &tile, int t, int tokens) {
    auto *scales = const_cast<float *>(tile.scales);
    auto *codes = const_cast<int32_t *>(tile.codes), *whole = const_cast<int32_t *>(tile.whole32);
    auto *singles = const_cast<int32_t *>(tile.singles);
    int64_t groups = columns / 32;
    float most[groups + kLanes], lane[kLanes];
    Floats squares = {};
    for (int64_t g = 0; g < groups; g += 4) {
        Ints largest[4] = {};
        for (int64_t i = g; i < least(g + 4, groups); ++i)
            largest[i - g] = largest_of(loadf(x + 32 * i), loadf(x + 32 * i + 16));
        Floats four = (Floats)max_of_four(largest);
        squares = fma(four, four, squares);
        store(most + g, four);
    }
    // max_of_four returns each of its four results in four lanes
    float limit = again ? std::sqrt(kLarge / 4 * sum_lanes(squares) / float(groups)) : INFINITY;
    for (int64_t g = 0; again && g < groups; ++g)
        if (most[g] > limit) {
            Ints rest[4] = {largest_of(without_large(loadf(x + 32 * g), splat(limit)),
                                       without_large(loadf(x + 32 * g + 16), splat(limit)))};
            most[g] = std::bit_cast<float>(max_of_four(rest)[0]);
            singles[g] = 1;
        }
    for (int64_t g = 0; g < groups; g += 4) {
        int count = int(least(4, groups - g));
        Floats four = loadf(most + g), scale = choose(less(four, splat(1e-30f)), Floats{}, four / 127.0f);
        scale = choose(less(four, splat(INFINITY)), scale, splat(NAN));
        store(lane, scale);
        for (int i = 0; i < count; ++i) scales[(g + i) * tokens + t] = lane[i];
        store(lane, choose(less(Floats{}, scale), 1.0f / scale, Floats{}));
        Ints sums[4] = {};
        for (int i = 0; i < count; ++i) {
            Floats low = loadf(x + 32 * (g + i)), high = loadf(x + 32 * (g + i) + 16);
            if (again) low = without_large(low, splat(limit)), high = without_large(high, splat(limit));
            sums[i] = round_group(low, high, lane[i], codes + 8 * ((g + i) * tokens + t));
        }
        int32_t sum[kLanes];
        store(sum, sum_of_four(sums) * -128);
        for (int i = 0; i < count; ++i) whole[(g + i) * tokens + t] = sum[i];
    }
    return limit;
}

// Stores the outliers of all groups in which a token has one. x: the rows of the tokens.
void keep_singles(const float *const *x, const float *limits, int64_t columns, const Int8Tile &tile, int tokens) {
    auto *singles = const_cast<int32_t *>(tile.singles), *places = const_cast<int32_t *>(tile.places);
    auto *values = const_cast<float *>(tile.values);
    for (int64_t g = 0; g < columns / 32; ++g) {
        if (!singles[g]) continue;
        int count = 0;
        for (int64_t i = 0; i < 32; ++i) {
            bool any = false;
            float *value = values + (32 * g + count) * tokens;
            for (int t = 0; t < tokens; ++t) {
                float number = x[t][32 * g + i];
                bool large = std::fabs(number) > limits[t];
                value[t] = large ? number : 0.0f;
                any |= large;
            }
            if (any) places[32 * g + count++] = int32_t(i);
        }
        singles[g] = count;
    }
}

#if defined(__ARM_FEATURE_MATMUL_INT8)
void pair_codes(int32_t *codes, int64_t columns, int tokens);
#endif

// Builds one tile from `tokens` rows of the product's input, starting at row `first`.
void fill_tile(const Product &product, int64_t first, int64_t columns, int tokens, Form form, int32_t *tile) {
    Int8Tile rounded(tile, columns, tokens);
    if (form == kInt8Fine) std::memset(const_cast<int32_t *>(rounded.singles), 0, size_t(columns / 32) * 4);
    const float *rows[kTile];
    float limits[kTile];
    for (int t = 0; t < tokens; ++t) {
        const float *x = product.x + (product.rows ? product.rows[first + t] : first + t) * columns;
        if (form == kFloat32) {
            for (int64_t k = 0; k < columns; ++k) tile[k * tokens + t] = std::bit_cast<int32_t>(x[k]);
        } else if (form == kBfloat16) {
            for (int64_t k = 0; k < columns; k += kLanes) {
                int64_t count = columns - k < kLanes ? columns - k : kLanes;
                if (kAmx) {
                    Floats numbers = count < kLanes ? load_part(x + k, count) : loadf(x + k);
                    store_narrow((uint16_t *)(tile + t * token_words(form, columns)) + k, numbers);
                    continue;
                }
                int32_t pairs[kLanes / 2];
                store_narrow((uint16_t *)pairs, load_part(x + k, count));
                for (int64_t i = 0; i < (count + 1) / 2; ++i)
                    if (kPairs) {
                        tile[(k / 2 + i) * tokens + t] = pairs[i];
                    } else {
                        tile[(k + 2 * i) * tokens + t] = int32_t(uint32_t(pairs[i]) << 16);
                        tile[(k + 2 * i + 1) * tokens + t] = int32_t(uint32_t(pairs[i]) & 0xffff0000u);
                    }
            }
        } else if (form == kInt8Fine) {
            rows[t] = x;
            limits[t] = round_fine(x, columns, product.again, rounded, t, tokens);
        } else {
            round_token(x, columns, form == kInt8x256 ? 256 : 32, rounded, t, tokens);
        }
    }
    if (form == kInt8Fine && product.again) keep_singles(rows, limits, columns, rounded, tokens);
#if defined(__ARM_FEATURE_MATMUL_INT8)
    if (form != kFloat32 && form != kBfloat16 && tokens % 4 == 0) pair_codes(tile, columns, tokens);
#endif
}

// ---- One panel times one tile: y[t][0 .. 15].

template <int T> struct Sums {
    Floats of[T];

    DELTIC_INLINE Sums sums() const { return *this; }
};

// Accumulators of 16 rows in registers.
template <int T> struct Rows {
    static constexpr int kParts = kLanes / kNative;
    Native of[kParts][T] = {};

    DELTIC_INLINE Sums<T> sums() const {
        Sums<T> all;
        for (int t = 0; t < T; ++t)
            for (int part = 0; part < kParts; ++part) ((Native *)&all.of[t])[part] = of[part][t];
        return all;
    }
};

// A range of columns, in blocks of the packed matrix. Kernels prefetch weights into L2 `ahead` bytes before their use.
struct Range {
    int64_t begin, end, ahead;
};

// Prefetches `Bytes` bytes into L2.
template <int64_t Bytes> DELTIC_INLINE void fetch(const uint8_t *from) {
    for (int64_t at = 0; at < Bytes; at += 64) __builtin_prefetch(from + at, 0, 2);
}

#if defined(__ARM_FEATURE_DOTPROD)
#include "linear_arm.hpp"
#else
template <int T> using Int8Rows = Rows<T>;

// Unquantized weights: one number per row and column. `Load` converts a column of the panel to Floats.
template <int T, typename Number, Floats Load(const Number *)>
DELTIC_INLINE void times_floats(const uint8_t *panel, const int32_t *tile, int64_t, Range range, Sums<T> &total) {
    const int64_t ahead = range.ahead;
    for (int64_t k = range.begin; k < range.end; ++k) {
        const Number *numbers = (const Number *)panel + kPanel * k;
        __builtin_prefetch((const uint8_t *)numbers + ahead, 0, 2);
        Floats w = Load(numbers);
#pragma GCC unroll 12
        for (int t = 0; t < T; ++t) total.of[t] = fma(w, splat(std::bit_cast<float>(tile[k * T + t])), total.of[t]);
    }
}

template <int T>
DELTIC_INLINE void times_bf16(const uint8_t *panel, const int32_t *tile, int64_t, Range range, Rows<T> &total) {
    const int64_t ahead = range.ahead;
    for (int64_t k = range.begin; k < range.end; ++k) {
        const uint8_t *pairs = panel + 64 * k;
        __builtin_prefetch(pairs + ahead, 0, 2);
#if defined(__AVX512BF16__)
        NativeWords w = load<NativeWords>(pairs);
#pragma GCC unroll 12
        for (int t = 0; t < T; ++t) total.of[0][t] = dot2_bf16(total.of[0][t], w, uint32_t(tile[k * T + t]));
#else
#pragma GCC unroll 2
        for (int column = 0; column < 2; ++column)  // one at a time, since registers are few
#pragma GCC unroll 12
            for (int t = 0; t < T; ++t) {
                Native x = splat<Native>(std::bit_cast<float>(tile[(2 * k + column) * T + t]));
#pragma GCC unroll 4
                for (int part = 0; part < Rows<T>::kParts; ++part) {
                    NativeWords w = load<NativeWords>(pairs + 4 * kNative * part);
                    Native weight = (Native)(column ? w & 0xffff0000u : w << 16);
                    total.of[part][t] = fma(weight, x, total.of[part][t]);
                }
            }
#endif
    }
}

// Number of groups with a separate scale in 32 columns.
template <class Format> constexpr int kHalves = 32 / Format::kGroup;

// Integer dot products of weight codes and activation codes `x` over 32 columns or half of them. The sums start with
// the correction for the format's offset: `whole` (see Int8Tile), shifted.
template <class Format, int T>
DELTIC_INLINE void dots(const Block &block, int g, int half, const int32_t *x, const int32_t *whole,
                        NativeInts out[T]) {
    constexpr int kEach = 8 / kHalves<Format>;
#if defined(__AVX2__) && !defined(__AVX512F__)
    constexpr bool kSigned = Format::kBits == 8;
#else
    constexpr bool kSigned = false;
#endif
#pragma GCC unroll 12
    for (int t = 0; t < T; ++t)
        out[t] = Format::kOffset == kNone || kSigned ? NativeInts{}
                                                     : splat<NativeInts>(whole[t]) >> (Format::kOffset & 31);
    x += half * kEach;
    NativeWords codes[kEach];
#pragma GCC unroll 8
    for (int i = 0; i < kEach; ++i) codes[i] = Format::code(block, g, half * kEach + i);
#if defined(__AVX2__) && !defined(__AVX512F__)
    const __m256i ones = _mm256_set1_epi16(1);
    if constexpr (kSigned) {
        // Subtracts the offset, 128, and splits the codes into magnitudes and signs. The sum of two products of
        // magnitudes of at most 128 and 127 fits 16 bits.
        static_assert(Format::kOffset == 0);
#pragma GCC unroll 8
        for (int i = 0; i < kEach; ++i) {
            __m256i code = _mm256_xor_si256((__m256i)codes[i], _mm256_set1_epi8(-128)), length = _mm256_abs_epi8(code);
#pragma GCC unroll 12
            for (int t = 0; t < T; ++t) {
                __m256i both = _mm256_maddubs_epi16(length, _mm256_sign_epi8(_mm256_set1_epi32(x[8 * t + i]), code));
                out[t] += (NativeInts)_mm256_madd_epi16(both, ones);
            }
        }
    } else {
        // adds up as many pairs of products in 16 bits as fit
        constexpr int kPair = 2 * 127 * ((1 << Format::kBits) - 1), kFit = 32767 / kPair;
        constexpr int kRun = kFit < kEach ? kFit : kEach;
        static_assert(kEach % kRun == 0);
#pragma GCC unroll 8
        for (int first = 0; first < kEach; first += kRun)
#pragma GCC unroll 12
            for (int t = 0; t < T; ++t) {
                auto products = [&](int i) DELTIC_INLINE_LAMBDA {
                    return _mm256_maddubs_epi16((__m256i)codes[i], _mm256_set1_epi32(x[8 * t + i]));
                };
                __m256i sum = products(first);
#pragma GCC unroll 8
                for (int i = first + 1; i < first + kRun; ++i) sum = _mm256_add_epi16(sum, products(i));
                out[t] += (NativeInts)_mm256_madd_epi16(sum, ones);
            }
    }
#else
#pragma GCC unroll 8
    for (int i = 0; i < kEach; ++i)
#pragma GCC unroll 12
        for (int t = 0; t < T; ++t) out[t] = dot4(out[t], (NativeBytes)codes[i], x[8 * t + i]);
#endif
}

// Scales the integer sums of the block's g-th group and adds them to `sum`. group: index of its 32 columns in the tile.
// Fine: for kInt8Fine activations, which have a scale per group; `sum` then holds totals.
template <class Format, int T, bool Fine>
DELTIC_INLINE void add_dots(const Block &block, const Int8Tile &tile, const NativeInts dot[T], int g, int64_t group,
                            Native sum[T]) {
    Native scale = Format::scale(block, g);
    if constexpr (!Fine) {
        unrolled<T>([&](auto t) DELTIC_INLINE_LAMBDA { sum[t] = fma(to_floats(dot[t]), scale, sum[t]); });
        if constexpr (Format::kLow == kAddend) {
            Native addend = Format::addend(block, g);
#pragma GCC unroll 12
            for (int t = 0; t < T; ++t) sum[t] = fma(addend, splat<Native>(tile.sums32[group * T + t]), sum[t]);
        }
    } else {
#pragma GCC unroll 12
        for (int t = 0; t < T; ++t)
            sum[t] = fma(to_floats(dot[t]) * scale, splat<Native>(tile.scales[group * T + t]), sum[t]);
        for (int single = 0; single < tile.singles[group]; ++single) {
            const float *value = tile.values + (32 * group + single) * T;
            Native weight = Format::number(block, g, tile.places[32 * group + single]) * scale;
#pragma GCC unroll 12
            for (int t = 0; t < T; ++t) sum[t] = fma(weight, splat<Native>(value[t]), sum[t]);
        }
    }
}

// Adds the products of the block's g-th 32 columns, for one part (kNative rows) of the panel. group: their index in the
// tile.
template <class Format, int T, bool Fine = false>
DELTIC_INLINE void add_group(const Block &block, const Int8Tile &tile, int g, int64_t group, Native sum[T]) {
    constexpr int kEach = kHalves<Format>;
#pragma GCC unroll 2
    for (int half = 0; half < kEach; ++half) {
        NativeInts dot[T];
        const int32_t *whole = kEach == 1 ? tile.whole32 : tile.whole16;
        dots<Format, T>(block, g, half, tile.codes + group * 8 * T, whole + (kEach * group + half) * T, dot);
        add_dots<Format, T, Fine>(block, tile, dot, kEach * g + half, group, sum);
    }
}

// Subtracts the minima of a block's groups: dmin * minimum * sum of the activation codes.
template <class Format, int T>
DELTIC_INLINE void take_minima(const Block &block, const Int8Tile &tile, int64_t b, Native sum[T]) {
    constexpr int kPairs = Format::kLow == kMinima16 ? 8 : 4;
    const int32_t *pairs = (kPairs == 8 ? tile.pairs16 : tile.pairs32) + b * kPairs * T;
    Native dmin = -Format::dmin(block);
    NativeInts minima[kPairs];
#pragma GCC unroll 8
    for (int i = 0; i < kPairs; ++i) minima[i] = Format::minima(block, i);
    unrolled<T>([&](auto t) DELTIC_INLINE_LAMBDA {
        NativeInts low = {};
#pragma GCC unroll 8
        for (int i = 0; i < kPairs; ++i) low = dot2(low, minima[i], pairs[i * T + t]);
        sum[t] = fma(dmin, to_floats(low), sum[t]);
    });
}

// The factor of a block's sums. scale: the scale of the activations.
template <class Format> DELTIC_INLINE Native scale_of_block(const Block &block, float scale) {
    Native numbers = splat<Native>(scale);
    return Format::kUnit ? numbers * Format::unit(block) : numbers;
}

template <class Format, int T>
DELTIC_INLINE void times_int8(const uint8_t *panel, const int32_t *memory, int64_t columns, Range range,
                              Rows<T> &total) {
    constexpr int kGroups = Format::kWeights / 32;
    constexpr int64_t kStep = Format::kBytes / kGroups;
    const int64_t ahead = range.ahead;
    Int8Tile tile(memory, columns, T);
    for (int64_t b = range.begin; b < range.end; ++b) {
        const uint8_t *data = panel + b * Format::kBytes;
        Rows<T> sum;
        auto add = [&](int g, int part) DELTIC_INLINE_LAMBDA {
            add_group<Format, T>({data, part * kNative}, tile, g, b * kGroups + g, sum.of[part]);
        };
        auto fetch_next = [&](int g) DELTIC_INLINE_LAMBDA {
            if (!Format::kSequential || ahead) fetch<kStep>(data + g * kStep + ahead);
        };
        if constexpr (T > 2)  // one part at a time: the registers do not hold the sums of all parts
#pragma GCC unroll 4
            for (int part = 0; part < Rows<T>::kParts; ++part)
                for (int g = 0; g < kGroups; ++g) {
                    if (part == 0) fetch_next(g);
                    add(g, part);
                }
        else
            for (int g = 0; g < kGroups; ++g) {
                fetch_next(g);
#pragma GCC unroll 4
                for (int part = 0; part < Rows<T>::kParts; ++part) add(g, part);
            }
#pragma GCC unroll 4
        for (int part = 0; part < Rows<T>::kParts; ++part) {
            const Block block{data, part * kNative};
            if constexpr (Format::kLow == kMinima16 || Format::kLow == kMinima32)
                take_minima<Format, T>(block, tile, b, sum.of[part]);
#pragma GCC unroll 12
            for (int t = 0; t < T; ++t)
                total.of[part][t] = fma(scale_of_block<Format>(block, tile.scales[b * T + t]), sum.of[part][t],
                                        total.of[part][t]);
        }
    }
}

// kInt8Fine activations.
template <class Format, int T>
DELTIC_INLINE void times_fine(const uint8_t *panel, const int32_t *memory, int64_t columns, Range range,
                              Rows<T> &total) {
    constexpr int kGroups = Format::kWeights / 32;
    constexpr int64_t kStep = Format::kBytes / kGroups;
    const int64_t ahead = range.ahead;
    Int8Tile tile(memory, columns, T);
    for (int64_t group = range.begin * kGroups; group < range.end * kGroups; ++group) {
        const uint8_t *data = panel + group / kGroups * Format::kBytes;
        int g = int(group % kGroups);
        fetch<kStep>(data + g * kStep + ahead);
#pragma GCC unroll 4
        for (int part = 0; part < Rows<T>::kParts; ++part)
            add_group<Format, T, true>({data, part * kNative}, tile, g, group, total.of[part]);
    }
}

#endif

#if defined(__AVX512F__)
#include "unpacked.hpp"
#endif

// Weights per row and bytes of a packed block, and the type of the accumulators.
template <int T, int Weights, int Bytes, class Sum> struct Multiply {
    static constexpr int64_t kWeights = Weights, kBytes = Bytes;
    static constexpr bool kSequential = false;
    using Total = Sum;
};
template <int T> struct Float32 : Multiply<T, 1, 64, Sums<T>> {
    static constexpr auto add = times_floats<T, float, loadf>;
};
template <int T> struct Float16 : Multiply<T, 1, 32, Sums<T>> {
    static constexpr auto add = times_floats<T, uint16_t, load_half>;
};
template <int T> struct Bfloat16 : Multiply<T, 2, 64, Rows<T>> {
    static constexpr auto add = times_bf16<T>;
};
template <class Format, int T, bool Fine> struct Int8 : Multiply<T, Format::kWeights, Format::kBytes, Int8Rows<T>> {
    static constexpr bool kSequential = Format::kSequential;
    static DELTIC_INLINE void add(const uint8_t *panel, const int32_t *tile, int64_t columns, Range range,
                                  Int8Rows<T> &total) {
        if constexpr (Fine)
            times_fine<Format, T>(panel, tile, columns, range, total);
        else
            times_int8<Format, T>(panel, tile, columns, range, total);
    }
};

// ---- Slices of columns.

constexpr int kDepth = std::bit_width(unsigned(DELTIC_SLICES));  // depth of the binary tree that adds the slices

// The columns of a matrix: `runs` runs of `width` columns, each cut into the same slices. ends: the end of each slice
// within a run.
struct Columns {
    int64_t all, runs, width, slices, ends[DELTIC_SLICES];
};

// Same as slice_unit in deltic/ops/slices.py.
int64_t slice_unit(const deltic_matrix &matrix) {
    if (block_shape(matrix.type).weights < 32) return 16;
    return matrix.columns % 256 == 0 ? 256 : 32;
}

Columns columns_of(const deltic_weight &weight, const deltic_matrix &matrix) {
    Columns columns{matrix.columns, 1, matrix.columns, 1, {matrix.columns}};
    if (!weight.slices) return columns;
    int64_t unit = slice_unit(matrix), width = weight.runs > 1 ? matrix.columns / weight.runs : matrix.columns;
    columns.slices = weight.slices;
    if (width == matrix.columns || width % unit == 0) {
        columns.runs = matrix.columns / width;
        columns.width = width;
    } else {
        unit = matrix.columns;  // slices would end within a unit: the first slice gets all columns
    }
    find_ends(0, columns.width, unit, weight.slices, columns.ends);
    return columns;
}

// The columns of a slice in one run. With several runs, the next range lies elsewhere: `ahead` becomes its distance.
template <class Times> DELTIC_INLINE Range range_of(const Columns &columns, int64_t slice, int64_t run, int64_t ahead) {
    auto start = [&](int64_t of, int64_t in) { return in * columns.width + (of ? columns.ends[of - 1] : 0); };
    int64_t begin = start(slice, run), end = run * columns.width + columns.ends[slice];
    if (columns.runs > 1) {
        int64_t next = run + 1 < columns.runs ? start(slice, run + 1) : start(slice + 1, 0);
        if (slice + 1 < columns.slices || run + 1 < columns.runs)
            ahead = (next - begin) / Times::kWeights * Times::kBytes;
    }
    auto blocks = [](int64_t count) { return (count + Times::kWeights - 1) / Times::kWeights; };
    return {blocks(begin), blocks(end), ahead};
}

// ---- All panels times all tiles.

// A kernel for one tile size, or for several tiles at once. Writes `rows` (at most 16) rows of the panel for `tokens`.
using Kernel = void (*)(const uint8_t *panel, const int32_t *tile, const Columns &columns, float *y, int64_t stride,
                        int64_t apart, int64_t rows, int64_t tokens);

DELTIC_INLINE void store_rows(const Floats *sums, float *y, int64_t stride, int64_t rows, int64_t tokens) {
    for (int64_t t = 0; t < tokens; ++t) {
        if (rows == kPanel)
            store(y + t * stride, sums[t]);
        else
            store_part(y + t * stride, sums[t], rows);
    }
}

template <int T, class Times>
void write(const uint8_t *panel, const int32_t *tile, const Columns &columns, float *y, int64_t stride, int64_t apart,
           int64_t rows, int64_t tokens) {
    const int64_t ahead = fetch_ahead(Times::kSequential);
    Sums<T> pending[kDepth];  // subtree sums without their sibling, by depth
    for (int64_t slice = 0; slice < columns.slices; ++slice) {
        typename Times::Total total = {};
        for (int64_t run = 0; run < columns.runs; ++run)
            Times::add(panel, tile, columns.all, range_of<Times>(columns, slice, run, ahead), total);
        Sums<T> sums = total.sums();
        int depth = 0;
        for (; !apart && (slice >> depth & 1); ++depth)
#pragma GCC unroll 12
            for (int t = 0; t < T; ++t) sums.of[t] = pending[depth].of[t] + sums.of[t];
        if (apart || slice + 1 == columns.slices)
            store_rows(sums.of, y + slice * apart, stride, rows, tokens);
        else
            pending[depth] = sums;
    }
}

// Like `write`, for several tiles with totals in memory. total(slice, totals [kTogether]) computes those of a slice.
template <typename Total>
DELTIC_INLINE void write_slices(const Columns &columns, float *y, int64_t stride, int64_t apart, int64_t rows,
                                int64_t tokens, Total &&total) {
    Floats sums[kTogether], pending[kDepth][kTogether];
    for (int64_t slice = 0; slice < columns.slices; ++slice) {
        total(slice, sums);
        int depth = 0;
        for (; !apart && (slice >> depth & 1); ++depth)
            for (int64_t t = 0; t < tokens; ++t) sums[t] = pending[depth][t] + sums[t];
        if (apart || slice + 1 == columns.slices)
            store_rows(sums, y + slice * apart, stride, rows, tokens);
        else
            std::memcpy(pending[depth], sums, size_t(tokens) * sizeof(Floats));
    }
}

#if defined(__AVX512F__)
template <class Format>
void write_unpacked(const uint8_t *panel, const int32_t *memory, const Columns &columns, float *y, int64_t stride,
                    int64_t apart, int64_t rows, int64_t tokens) {
    using Times = Multiply<kTile, Format::kWeights, Format::kBytes, Rows<kTile>>;
    constexpr int64_t kBlocks = 256 / Format::kWeights, kGroups = Format::kWeights / 32;
    const int64_t words = token_words(kInt8x32, columns.all), ahead = fetch_ahead(Format::kSequential);
    write_slices(columns, y, stride, apart, rows, tokens, [&](int64_t slice, Native *total) DELTIC_INLINE_LAMBDA {
        std::memset(total, 0, size_t(tokens) * sizeof *total);
        for (int64_t run = 0; run < columns.runs; ++run) {
            Range range = range_of<Times>(columns, slice, run, ahead);
            for (int64_t b = range.begin; b < range.end; b += kBlocks) {
                int groups = int(least(kBlocks, range.end - b) * kGroups);
                Unpacked unpacked;
                unpack<Format>(panel + b * Format::kBytes, groups, range.ahead, unpacked);
                for (int64_t t = 0; t < tokens; t += kTile) {
                    Int8Tile tile(memory + t * words, columns.all, kTile);
                    add_unpacked<Format, kTile>(unpacked, tile, b * kGroups, groups, total + t);
                }
            }
        }
    });
}
#endif

#if defined(__AMX_BF16__)
// Adds the products of 32 columns, or of the last ones, to the accumulators of up to four tiles of tokens. A, B: AMX
// registers for activations and weights.
template <int A, int B>
DELTIC_INLINE void add_tiles(const uint8_t *weights, const uint8_t *x, int64_t pitch, int count) {
    load_tile<B>(weights, 64);
    unrolled<4>([&](auto at) DELTIC_INLINE_LAMBDA {
        constexpr int i = decltype(at)::value;
        if (i >= count) return;
        load_tile<A>(x + 16 * i * pitch, pitch);
        tile_dot2_bf16<i, A, B>();
    });
}

// bfloat16 with AMX: the accumulators of a slice stay in tile registers.
void write_bf16(const uint8_t *panel, const int32_t *memory, const Columns &columns, float *y, int64_t stride,
                int64_t apart, int64_t rows, int64_t tokens) {
    using Times = Multiply<1, 2, 64, Rows<1>>;
    const int64_t ahead = fetch_ahead(false), pitch = token_words(kBfloat16, columns.all) * 4;
    const int count = int(pieces_of(tokens, 16)), height = int(least(tokens, 16));
    write_slices(columns, y, stride, apart, rows, tokens, [&](int64_t slice, Native *total) DELTIC_INLINE_LAMBDA {
        Range range = range_of<Times>(columns, slice, 0, ahead);
        int rest = int((range.end - range.begin) % 16);
        TileShapes shapes;
        for (int i = 0; i < 4; ++i) shapes.set(i, height, 64);
        shapes.set(4, height, 64);
        shapes.set(5, 16, 64);
        shapes.set(6, height, rest ? 4 * rest : 64);
        shapes.set(7, rest ? rest : 16, 64);
        const Tiles tiles(shapes);
        for (int64_t run = 0; run < columns.runs; ++run) {
            range = range_of<Times>(columns, slice, run, ahead);
            for (int64_t k = range.begin; k < range.end; k += 16) {
                const uint8_t *weights = panel + 64 * k, *x = (const uint8_t *)(memory + k);
                fetch<1024>(weights + range.ahead);
                if (range.end - k >= 16)
                    add_tiles<4, 5>(weights, x, pitch, count);
                else
                    add_tiles<6, 7>(weights, x, pitch, count);
            }
        }
        unrolled<4>([&](auto at) DELTIC_INLINE_LAMBDA {
            constexpr int i = decltype(at)::value;
            if (i < count) store_tile<i>(total + 16 * i, 64);
        });
    });
}
#endif

struct KernelSet {
    Form form;
    int64_t tile, together;  // tokens of the largest tile; maximum tokens per call of its kernel
    Kernel of[17];           // by tile size
};

// kernel(size) returns the kernel for a tile size. `size` is an integral constant.
template <typename Make> constexpr KernelSet kernel_set(Form form, int64_t together, Make &&kernel) {
    KernelSet set{form, kTile, together, {}};
    unrolled<kTile>([&](auto at) {
        constexpr int size = decltype(at)::value + 1;
        if constexpr (is_size(size)) set.of[size] = kernel(std::integral_constant<int, size>{});
    });
    return set;
}
template <template <int> class Times> constexpr KernelSet float_set(Form form) {
    return kernel_set(form, kTile, [](auto size) -> Kernel { return write<size(), Times<size()>>; });
}
template <class Format, bool Fine = false> constexpr KernelSet int8_set() {
    Form form = Fine ? kInt8Fine : Format::kWeights == 256 ? kInt8x256 : kInt8x32;
    constexpr bool kShared = kUnpacks && !Fine && !Format::kIsBytes;
    return kernel_set(form, kShared ? kTogether / kTile * kTile : kTile, [](auto size) -> Kernel {
#if defined(__AVX512F__)
        if constexpr (kShared && size() == kTile) return write_unpacked<Format>;
#endif
        if constexpr (!kShared || size() < kTile) return write<size(), Int8<Format, size(), Fine>>;
    });
}
#if defined(__AMX_BF16__)
constexpr KernelSet bf16_set() {
    KernelSet set{kBfloat16, 16, kTogether, {}};
    for (Kernel &kernel : set.of) kernel = write_bf16;
    return set;
}
#else
constexpr KernelSet bf16_set() { return float_set<Bfloat16>(kBfloat16); }
#endif
template <template <int> class Format> KernelSet int8_set(int64_t columns) {
    return columns % 256 == 0 ? int8_set<Format<8>>() : int8_set<Format<1>>();
}

KernelSet kernels_for(int64_t type, int64_t columns, bool fine) {
    if (fine && type == DELTIC_Q8_0) return columns % 256 == 0 ? int8_set<Q8_0<8>, true>() : int8_set<Q8_0<1>, true>();
    switch (type) {
        case DELTIC_F32: return float_set<Float32>(kFloat32);
        case DELTIC_F16: return float_set<Float16>(kFloat32);
        case DELTIC_BF16: return bf16_set();
        case DELTIC_Q4_0: return int8_set<Q4_0>(columns);
        case DELTIC_Q4_1: return int8_set<Q4_1>(columns);
        case DELTIC_Q5_0: return int8_set<Q5_0>(columns);
        case DELTIC_Q5_1: return int8_set<Q5_1>(columns);
        case DELTIC_Q8_0: return int8_set<Q8_0>(columns);
        case DELTIC_Q2_K: return int8_set<Q2_K>();
        case DELTIC_Q3_K: return int8_set<Q3_K>();
        case DELTIC_Q4_K: return int8_set<Q4_K>();
        case DELTIC_Q5_K: return int8_set<Q5_K>();
        case DELTIC_Q6_K: return int8_set<Q6_K>();
        case DELTIC_IQ4_NL: return int8_set<IQ4_NL>(columns);
        case DELTIC_IQ4_XS: return int8_set<IQ4_XS>();
        case DELTIC_MXFP4: return int8_set<MXFP4>(columns);
        case DELTIC_NVFP4: return int8_set<NVFP4>();
        case DELTIC_INT4_32: return int8_set<INT4<8>>();
        case DELTIC_INT4_64: return int8_set<INT4<4>>();
        case DELTIC_INT4_128: return int8_set<INT4<2>>();
        default: return {};
    }
}

// The activation formats that the matrices of one product need.
struct Input {
    uint32_t forms;         // one bit per Form
    int64_t start[kForms];  // rows of earlier products in the same format
    int64_t first_piece;    // first piece in the loop that builds tiles
};

// One matrix of a product.
struct Part {
    deltic_matrix matrix;
    Columns columns;
    KernelSet kernels;
    const int32_t *tiles;
    int64_t product, panel_bytes, panels_per_piece, first_piece, first_row;
};

// Index of the item that contains `piece`. The items' first pieces ascend from 0.
template <class Item> DELTIC_INLINE int64_t owner(const Item *items, int64_t count, int64_t piece) {
    int64_t low = 0, high = count;
    while (high - low > 1) {
        int64_t middle = (low + high) / 2;
        (items[middle].first_piece <= piece ? low : high) = middle;
    }
    return low;
}

void run_piece(const Part &part, const Product &product, int64_t piece) {
    const deltic_matrix &matrix = part.matrix;
    int64_t words = token_words(part.kernels.form, matrix.columns);
    int64_t begin = piece * part.panels_per_piece, end = begin + part.panels_per_piece;
    for (int64_t panel = begin; panel < end && panel * kPanel < matrix.rows; ++panel) {
        int64_t rows = matrix.rows - panel * kPanel < kPanel ? matrix.rows - panel * kPanel : kPanel;
        const uint8_t *weights = (const uint8_t *)matrix.data + panel * part.panel_bytes;
        float *column = product.y + part.first_row + panel * kPanel;
        const KernelSet &kernels = part.kernels;
        for (int64_t first = 0, count; first < product.count; first += count) {
            int64_t rest = product.count - first;
            int64_t size = kernels.tile == kTile ? tile_of(rest) : least(rest, kernels.tile);
            count = size < kernels.tile ? size : least(rest / size * size, kernels.together);
            kernels.of[size](weights, part.tiles + first * words, part.columns, column + first * product.stride,
                             product.stride, product.apart, rows, count);
        }
    }
}

// Builds the tiles for one piece (`kTile` rows) of a product's input, in each format that it needs.
void make_tiles(const Product &product, const Input &input, int32_t *const *tiles, int64_t columns, int64_t piece) {
    int64_t begin = piece * kTile, end = least(begin + kTile, product.count);
    for (int form = 0; form < kForms; ++form) {
        if (!(input.forms >> form & 1)) continue;
        int64_t words = token_words(Form(form), columns);
        for (int64_t first = begin; first < end;) {
            int size = tile_of(end - first);
            fill_tile(product, first, columns, size, Form(form), tiles[form] + (input.start[form] + first) * words);
            first += size;
        }
    }
}

// inputs [count], parts [4 * count]: working memory.
void multiply(deltic_pool *pool, const Product *products, int64_t count, Input *inputs, Part *parts) {
    int64_t columns = products[0].weight->parts[0].columns, fills = 0, pieces = 0, matrices = 0, rows[kForms] = {};
    for (int64_t i = 0; i < count; ++i) {
        const Product &product = products[i];
        int64_t tiles = (product.count + kTile - 1) / kTile, row = 0;
        inputs[i] = {0, {}, fills};
        for (int64_t p = 0; p < product.weight->count; ++p) {
            const deltic_matrix &matrix = product.weight->parts[p];
            KernelSet set = kernels_for(matrix.type, columns, product.fine);
            int64_t bytes = panel_bytes(matrix), together = bytes * tiles < kPiece ? kPiece / (bytes * tiles) : 1;
            inputs[i].forms |= 1u << set.form;
            parts[matrices++] = {matrix, columns_of(*product.weight, matrix), set,    nullptr, i,
                                 bytes,  together,                            pieces, row};
            pieces += (panels_of(matrix.rows) + together - 1) / together;
            row += matrix.rows;
        }
        for (int form = 0; form < kForms; ++form) {
            inputs[i].start[form] = rows[form];
            rows[form] += inputs[i].forms >> form & 1 ? product.count : 0;
        }
        fills += tiles;
    }
    int32_t *tiles[kForms] = {};
    for (int form = 0; form < kForms; ++form)
        if (rows[form]) tiles[form] = scratch_of<int32_t>(pool, form, token_words(Form(form), columns) * rows[form]);
    for (int64_t p = 0; p < matrices; ++p) {
        Form form = parts[p].kernels.form;
        parts[p].tiles = tiles[form] + inputs[parts[p].product].start[form] * token_words(form, columns);
    }
    parallel(pool, fills, [&](int64_t piece, int) {
        int64_t i = owner(inputs, count, piece);
        make_tiles(products[i], inputs[i], tiles, columns, piece - inputs[i].first_piece);
    });
    parallel(pool, pieces, [&](int64_t piece, int) {
        const Part &part = parts[owner(parts, matrices, piece)];
        run_piece(part, products[part.product], piece - part.first_piece);
    });
}

}  // namespace

void linear(deltic_pool *pool, const float *x, int64_t tokens, const deltic_weight &weight, float *y, int64_t stride) {
    if (!tokens) return;
    Product product{&weight, x, nullptr, tokens, y, stride};
    Input input;
    Part parts[4];
    multiply(pool, &product, 1, &input, parts);
}

void linear_fine(deltic_pool *pool, const float *x, int64_t tokens, const deltic_weight &weight, float *y,
                 int64_t stride, bool again) {
    if (!tokens) return;
    Product product{&weight, x, nullptr, tokens, y, stride, 0, true, again};
    Input input;
    Part parts[4];
    multiply(pool, &product, 1, &input, parts);
}

void linear_many(deltic_pool *pool, const Product *products, int64_t count) {
    if (!count) return;
    multiply(pool, products, count, scratch_of<Input>(pool, 4, count), scratch_of<Part>(pool, 5, 4 * count));
}

}  // namespace deltic::DELTIC_LEVEL
