// Panels times tiles with the integer dot products of ARM64. linear.cpp includes this file in its namespace, in place
// of its generic kernels. The sum of a row and a token takes the same operations in the same order in both.
//
// Accumulators of two tokens may be interleaved, as the matrix products of i8mm produce them. For tokens a = 2 p and
// b = a + 1, vector 2 p of a part has the sums (row, token) 0 a, 0 b, 1 a, 1 b; vector 2 p + 1 has 2 a, 2 b, 3 a, 3 b.
#pragma once

#if defined(__ARM_FEATURE_MATMUL_INT8)
template <int T> constexpr bool kPaired = T % 4 == 0;  // for two tokens, interleaving rows costs more than it saves
#else
template <int T> constexpr bool kPaired = false;
#endif

constexpr int kParts = kLanes / kNative;

// Calls body(std::integral_constant i) for i = 0 .. N - 1: instructions need constant lane numbers.
template <typename Body, int... I> DELTIC_INLINE void each(std::integer_sequence<int, I...>, Body &&body) {
    (body(std::integral_constant<int, I>()), ...);
}
template <int N, typename Body> DELTIC_INLINE void each(Body &&body) {
    each(std::make_integer_sequence<int, N>(), body);
}

// ---- Activations.

// Interleaves the codes of two tokens, 8 columns each, as the matrix product takes them.
void pair_codes(int32_t *codes, int64_t columns, int tokens) {
    for (int64_t pair = 0; pair < columns / 32 * (tokens / 2); ++pair, codes += 16) {
        int64x2_t first[2], second[2];
        for (int i = 0; i < 2; ++i) {
            first[i] = vreinterpretq_s64_s32(vld1q_s32(codes + 4 * i));
            second[i] = vreinterpretq_s64_s32(vld1q_s32(codes + 8 + 4 * i));
        }
        for (int i = 0; i < 2; ++i) {
            vst1q_s32(codes + 8 * i, vreinterpretq_s32_s64(vzip1q_s64(first[i], second[i])));
            vst1q_s32(codes + 8 * i + 4, vreinterpretq_s32_s64(vzip2q_s64(first[i], second[i])));
        }
    }
}

// A number per token, in the lane order of the j-th vector of a part.
template <int T> DELTIC_INLINE NativeInts token_ints(const int32_t *from, int j) {
    if constexpr (kPaired<T>) {
        int64_t both;
        std::memcpy(&both, from + j / 2 * 2, sizeof both);
        return (NativeInts)vdupq_n_s64(both);
    }
    return (NativeInts)vdupq_n_s32(from[j]);
}
template <int T> DELTIC_INLINE Native token_floats(const float *from, int j) {
    return (Native)token_ints<T>((const int32_t *)from, j);
}

// ---- Rows.

// A number per row, in the lane orders of the even and of the odd vectors of a part.
template <int T> struct PerRow {
    Native of[2];

    DELTIC_INLINE explicit PerRow(Native v) {
        if constexpr (kPaired<T>) {
            of[0] = (Native)vzip1q_f32((float32x4_t)v, (float32x4_t)v);
            of[1] = (Native)vzip2q_f32((float32x4_t)v, (float32x4_t)v);
        } else {
            of[0] = of[1] = v;
        }
    }
};

template <int T> struct PairedRows {
    Native of[kParts][T] = {};

    DELTIC_INLINE Sums<T> sums() const {
        Sums<T> all;
        for (int t = 0; t < T; t += 2)
            for (int part = 0; part < kParts; ++part) {
                float32x4_t low = (float32x4_t)of[part][t], high = (float32x4_t)of[part][t + 1];
                all.of[t].part[part] = (Native)vuzp1q_f32(low, high);
                all.of[t + 1].part[part] = (Native)vuzp2q_f32(low, high);
            }
        return all;
    }
};

template <int T> using Int8Rows = std::conditional_t<kPaired<T>, PairedRows<T>, Rows<T>>;

// True if the offset is subtracted from the codes, not from the sums; for a few tokens, both cost the same. Codes of 8
// bits always need it to become signed.
template <class Format, int T>
constexpr bool kCentred = Format::kOffset != kNone && (T > 2 || Format::kBits == 8);

template <class Format, int T> DELTIC_INLINE int8x16_t codes_of(const Block &block, int g, int i) {
    int8x16_t codes = (int8x16_t)Format::code(block, g, i);
    if constexpr (kCentred<Format, T>) codes = vsubq_s8(codes, vdupq_n_s8(int8_t(128 >> (Format::kOffset & 31))));
    return codes;
}

// Adds the products of 16 columns: the first (quarter = 0) or second half of the 32 columns of x.
template <class Format, int T>
DELTIC_INLINE void add_quarter(const Block &block, int g, int quarter, const int32_t *x, NativeInts sum[T]) {
    int8x16_t codes[4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) codes[i] = codes_of<Format, T>(block, g, 4 * quarter + i);
#if defined(__ARM_FEATURE_MATMUL_INT8)
    if constexpr (kPaired<T>) {
#pragma GCC unroll 2
        for (int i = 0; i < 2; ++i) {
            int32x4_t first = (int32x4_t)codes[2 * i], second = (int32x4_t)codes[2 * i + 1];
            int8x16_t low = (int8x16_t)vzip1q_s32(first, second), high = (int8x16_t)vzip2q_s32(first, second);
#pragma GCC unroll 8
            for (int t = 0; t < T; t += 2) {
                int8x16_t both = (int8x16_t)vld1q_s32(x + 8 * t + 8 * quarter + 4 * i);
                sum[t] = (NativeInts)vmmlaq_s32((int32x4_t)sum[t], low, both);
                sum[t + 1] = (NativeInts)vmmlaq_s32((int32x4_t)sum[t + 1], high, both);
            }
        }
        return;
    }
#endif
#pragma GCC unroll 8
    for (int t = 0; t < T; ++t) {
        int8x16_t token = (int8x16_t)vld1q_s32(x + 8 * t + 4 * quarter);
        int32x4_t dot = (int32x4_t)sum[t];
        dot = vdotq_laneq_s32(dot, codes[0], token, 0);
        dot = vdotq_laneq_s32(dot, codes[1], token, 1);
        dot = vdotq_laneq_s32(dot, codes[2], token, 2);
        sum[t] = (NativeInts)vdotq_laneq_s32(dot, codes[3], token, 3);
    }
}

// Number of groups with a separate scale in 32 columns.
template <class Format> constexpr int kHalves = 32 / Format::kGroup;

// Integer dot products over one such group.
template <class Format, int T>
DELTIC_INLINE void dots(const Block &block, int g, int half, const int32_t *x, const int32_t *whole,
                        NativeInts sum[T]) {
#pragma GCC unroll 8
    for (int t = 0; t < T; ++t) {
        sum[t] = NativeInts{};
        if constexpr (Format::kOffset != kNone && !kCentred<Format, T>)
            sum[t] = token_ints<T>(whole + half * T, t) >> (Format::kOffset & 31);
    }
    if constexpr (kHalves<Format> == 2) {
        add_quarter<Format, T>(block, g, half, x, sum);
    } else {
        add_quarter<Format, T>(block, g, 0, x, sum);
        add_quarter<Format, T>(block, g, 1, x, sum);
    }
}

// Adds the products of the block's g-th 32 columns, for a part of the panel's rows. group: their index in the tile.
template <class Format, int T>
DELTIC_INLINE void add_group(const Block &block, const Int8Tile &tile, int g, int64_t group, Native sum[T]) {
    const int32_t *whole = kHalves<Format> == 1 ? tile.whole32 + group * T : tile.whole16 + 2 * group * T;
#pragma GCC unroll 2
    for (int half = 0; half < kHalves<Format>; ++half) {
        NativeInts dot[T];
        dots<Format, T>(block, g, half, tile.codes + group * 8 * T, whole, dot);
        PerRow<T> scale(Format::scale(block, kHalves<Format> * g + half));
#pragma GCC unroll 8
        for (int t = 0; t < T; ++t) sum[t] = fma(to_floats(dot[t]), scale.of[t % 2], sum[t]);
    }
    if constexpr (Format::kLow == kAddend) {
        PerRow<T> addend(Format::addend(block, g));
#pragma GCC unroll 8
        for (int t = 0; t < T; ++t)
            sum[t] = fma(addend.of[t % 2], token_floats<T>(tile.sums32 + group * T, t), sum[t]);
    }
}

// Adds two groups' minima times their code sums for each token. both, pairs [T]: two 16-bit numbers per word.
template <int T> DELTIC_INLINE void add_minima(NativeInts both, const int32_t *pairs, int32x4_t low[T]) {
    int16x4_t first = vmovn_s32((int32x4_t)both), second = vshrn_n_s32((int32x4_t)both, 16);
    if constexpr (T % 4 == 0) {
        each<T / 4>([&](auto four) DELTIC_INLINE_LAMBDA {
            int16x8_t sums = vreinterpretq_s16_s32(vld1q_s32(pairs + 4 * four));
            each<4>([&](auto lane) DELTIC_INLINE_LAMBDA {
                constexpr int kAt = decltype(lane)::value;
                int32x4_t &to = low[4 * four + lane];
                to = vmlal_laneq_s16(vmlal_laneq_s16(to, first, sums, 2 * kAt), second, sums, 2 * kAt + 1);
            });
        });
    } else {
#pragma GCC unroll 8
        for (int t = 0; t < T; ++t) {
            const auto *sums = (const int16_t *)(pairs + t);
            low[t] = vmlal_s16(vmlal_s16(low[t], first, vld1_dup_s16(sums)), second, vld1_dup_s16(sums + 1));
        }
    }
}

// Subtracts the minima of a block's groups.
template <class Format, int T>
DELTIC_INLINE void take_minima(const Block &block, const Int8Tile &tile, int64_t b, Native sum[T]) {
    constexpr int kPairs = Format::kLow == kMinima16 ? 8 : 4;
    const int32_t *pairs = (kPairs == 8 ? tile.pairs16 : tile.pairs32) + b * kPairs * T;
    PerRow<T> dmin(-Format::dmin(block));
    int32x4_t low[T] = {};
#pragma GCC unroll 8
    for (int i = 0; i < kPairs; ++i) add_minima<T>(Format::minima(block, i), pairs + i * T, low);
#pragma GCC unroll 8
    for (int t = 0; t < T; ++t) {
        int32x4_t rows = low[t];
        if constexpr (kPaired<T>)
            rows = t % 2 ? vzip2q_s32(low[t - 1], low[t]) : vzip1q_s32(low[t], low[t + 1]);
        sum[t] = fma(dmin.of[t % 2], to_floats((NativeInts)rows), sum[t]);
    }
}

template <class Format, int T>
DELTIC_INLINE void times_int8(const uint8_t *panel, const int32_t *memory, int64_t columns, Range range,
                              Int8Rows<T> &total) {
    constexpr int kGroups = Format::kWeights / 32;
    constexpr int64_t kStep = Format::kBytes / kGroups;
    const int64_t ahead = range.ahead;
    Int8Tile tile(memory, columns, T);
    for (int64_t b = range.begin; b < range.end; ++b) {
        const uint8_t *data = panel + b * Format::kBytes;
        auto add = [&](int g, int part, Native sum[T]) DELTIC_INLINE_LAMBDA {
            add_group<Format, T>({data, part * kNative}, tile, g, b * kGroups + g, sum);
        };
        auto finish = [&](int part, Native sum[T]) DELTIC_INLINE_LAMBDA {
            if constexpr (Format::kLow == kMinima16 || Format::kLow == kMinima32)
                take_minima<Format, T>({data, part * kNative}, tile, b, sum);
            PerRow<T> unit(Format::unit({data, part * kNative}));
#pragma GCC unroll 8
            for (int t = 0; t < T; ++t) {
                Native scale = token_floats<T>(tile.scales + b * T, t);
                if constexpr (Format::kUnit) scale = scale * unit.of[t % 2];
                total.of[part][t] = fma(scale, sum[t], total.of[part][t]);
            }
        };
        if constexpr (T > 2) {  // the registers hold the sums of one part only
            for (int part = 0; part < kParts; ++part) {
                Native sum[T] = {};
                for (int g = 0; g < kGroups; ++g) {
                    if (part == 0) fetch<kStep>(data + g * kStep + ahead);
                    add(g, part, sum);
                }
                finish(part, sum);
            }
        } else {
            Native sum[kParts][T] = {};
            for (int g = 0; g < kGroups; ++g) {
                fetch<kStep>(data + g * kStep + ahead);
#pragma GCC unroll 4
                for (int part = 0; part < kParts; ++part) add(g, part, sum[part]);
            }
#pragma GCC unroll 4
            for (int part = 0; part < kParts; ++part) finish(part, sum[part]);
        }
    }
}

// Adds a group of 32 columns for kInt8Fine activations.
template <class Format, int T>
DELTIC_INLINE void add_fine(const Block &block, const Int8Tile &tile, int g, int64_t group, Native sum[T]) {
    NativeInts dot[T];
    Native scale = Format::scale(block, g);
    PerRow<T> scales(scale);
    dots<Format, T>(block, g, 0, tile.codes + group * 8 * T, tile.whole32 + group * T, dot);
#pragma GCC unroll 8
    for (int t = 0; t < T; ++t)
        sum[t] = fma(to_floats(dot[t]) * scales.of[t % 2], token_floats<T>(tile.scales + group * T, t), sum[t]);
    for (int single = 0; single < tile.singles[group]; ++single) {
        const float *value = tile.values + (32 * group + single) * T;
        PerRow<T> weight(Format::number(block, g, tile.places[32 * group + single]) * scale);
#pragma GCC unroll 8
        for (int t = 0; t < T; ++t) sum[t] = fma(weight.of[t % 2], token_floats<T>(value, t), sum[t]);
    }
}

template <class Format, int T>
DELTIC_INLINE void times_fine(const uint8_t *panel, const int32_t *memory, int64_t columns, Range range,
                              Int8Rows<T> &total) {
    constexpr int kGroups = Format::kWeights / 32, kRun = 8;  // each part takes kRun groups at a time
    constexpr int64_t kStep = Format::kBytes / kGroups;
    Int8Tile tile(memory, columns, T);
    int64_t end = range.end * kGroups;
    for (int64_t first = range.begin * kGroups; first < end; first += kRun)
        for (int part = 0; part < kParts; ++part) {
            Native sum[T];
            std::memcpy(sum, total.of[part], sizeof sum);
            for (int64_t group = first; group < least(first + kRun, end); ++group) {
                const uint8_t *data = panel + group / kGroups * Format::kBytes;
                int g = int(group % kGroups);
                if (part == 0) fetch<kStep>(data + g * kStep + range.ahead);
                add_fine<Format, T>({data, part * kNative}, tile, g, group, sum);
            }
            std::memcpy(total.of[part], sum, sizeof sum);
        }
}

// ---- Weights that are floats.

// Calls body(k, first token, sums [parts][up to four tokens]) for all k of the range. With more than four tokens, runs
// of 32 k pass all tokens before the next run starts. sum(part, token): the location of a sum in memory.
template <int T, typename Sum, typename Body> DELTIC_INLINE void by_four(Range range, Sum &&sum, Body &&body) {
    constexpr int kFour = T < 4 ? T : 4;
    static_assert(T % kFour == 0);
    int64_t run = T > 4 ? 32 : range.end - range.begin;
    for (int64_t begin = range.begin; begin < range.end; begin += run)
        for (int first = 0; first < T; first += kFour) {
            Native four[kParts][kFour];
            for (int part = 0; part < kParts; ++part)
                for (int t = 0; t < kFour; ++t) four[part][t] = sum(part, first + t);
            for (int64_t k = begin; k < least(begin + run, range.end); ++k) body(k, first, four);
            for (int part = 0; part < kParts; ++part)
                for (int t = 0; t < kFour; ++t) sum(part, first + t) = four[part][t];
        }
}

template <int T, typename Number, Floats Load(const Number *)>
DELTIC_INLINE void times_floats(const uint8_t *panel, const int32_t *tile, int64_t, Range range, Sums<T> &total) {
    constexpr int kFour = T < 4 ? T : 4;
    auto sum = [&](int part, int t) DELTIC_INLINE_LAMBDA -> Native & { return total.of[t].part[part]; };
    by_four<T>(range, sum, [&](int64_t k, int first, auto &four) DELTIC_INLINE_LAMBDA {
        const Number *numbers = (const Number *)panel + kPanel * k;
        if (first == 0) __builtin_prefetch((const uint8_t *)numbers + range.ahead, 0, 2);
        Floats w = Load(numbers);
#pragma GCC unroll 4
        for (int t = 0; t < kFour; ++t) {
            float32x4_t x = vld1q_dup_f32((const float *)tile + k * T + first + t);
#pragma GCC unroll 4
            for (int part = 0; part < kParts; ++part) four[part][t] = fma(w.part[part], (Native)x, four[part][t]);
        }
    });
}

template <int T>
DELTIC_INLINE void times_bf16(const uint8_t *panel, const int32_t *tile, int64_t, Range range, Rows<T> &total) {
    constexpr int kFour = T < 4 ? T : 4;
    auto sum = [&](int part, int t) DELTIC_INLINE_LAMBDA -> Native & { return total.of[part][t]; };
    by_four<T>(range, sum, [&](int64_t k, int first, auto &four) DELTIC_INLINE_LAMBDA {
        if (first == 0) __builtin_prefetch(panel + 64 * k + range.ahead, 0, 2);
#pragma GCC unroll 2
        for (int column = 0; column < 2; ++column) {
            Native w[kParts];
#pragma GCC unroll 4
            for (int part = 0; part < kParts; ++part) {
                NativeWords pairs = load<NativeWords>(panel + 64 * k + 4 * kNative * part);
                w[part] = (Native)(column ? pairs & 0xffff0000u : pairs << 16);
            }
#pragma GCC unroll 4
            for (int t = 0; t < kFour; ++t) {
                float32x4_t x = vld1q_dup_f32((const float *)tile + (2 * k + column) * T + first + t);
#pragma GCC unroll 4
                for (int part = 0; part < kParts; ++part)
                    four[part][t] = fma(w[part], (Native)x, four[part][t]);
            }
        }
    });
}
