// Kernels between the matrix products of an encoder layer or a vision tower block: bidirectional attention within a
// sequence, layer norm, GELU.
//
// A token's result depends only on its own sequence: sums over keys have one order, whatever the batch and whatever
// range of heads and queries a call computes.
#include <vector>

#include "levels.hpp"
#include "pool.hpp"
#include "simd.hpp"

namespace deltic::DELTIC_LEVEL {
namespace {

#if defined(__AVX512F__)
constexpr int kKeys = 12;    // register tile of the scores: kKeys keys by 16 queries
constexpr int kRows = 8;     // register tile of the results: kRows queries by kVectors vectors of 16 dimensions
constexpr int kVectors = 2;
#elif defined(__AVX2__) || defined(__aarch64__)
constexpr int kKeys = 4, kRows = 4, kVectors = 1;
#else
constexpr int kKeys = 2, kRows = 2, kVectors = 1;
#endif
constexpr int64_t kBlock = 480;      // keys per block: their scores with 16 queries stay in L1
constexpr int64_t kTogether = 128;   // queries that are processed with a block of keys while the block stays in L2
constexpr int64_t kQueries = 1024;   // maximum number of queries of a task
static_assert(kBlock % kKeys == 0 && kBlock % 2 == 0 && kTogether % kLanes == 0 && kQueries % kTogether == 0);

// Loads 16 floats, or the first `count` of them.
DELTIC_INLINE Floats some(const float *from, int64_t count) {
    return count == kLanes ? loadf(from) : load_part(from, count);
}
DELTIC_INLINE void put(float *to, Floats v, int64_t count) {
    if (count == kLanes) store(to, v);
    else store_part(to, v, count);
}

// Operand types. An operand is a 32-bit word: one float, or two bfloat16 that are neighbours along the summed axis.
struct Float32 {
    static constexpr int64_t kNumbers = 1;
    static DELTIC_INLINE Floats dot(Floats sum, Words vector, uint32_t number) {
        return fma((Floats)vector, splat(std::bit_cast<float>(number)), sum);
    }
    static DELTIC_INLINE Words word(const Floats *numbers) { return (Words)numbers[0]; }
    static DELTIC_INLINE Words words(const float *numbers) { return load<Words>(numbers); }
    static constexpr float kUnit = 1.0f;  // 1 / ln(base of `power`): queries are scaled by it
    static DELTIC_INLINE Floats power(Floats score) { return exponential(score); }
};
#if defined(__AVX512BF16__)
// 2^x with a relative error below 8e-5, far smaller than bfloat16's rounding error.
DELTIC_INLINE Floats power_of_two(Floats x) {
    __m512 whole = _mm512_roundscale_ps((__m512)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    Floats r = x - (Floats)whole, p = splat(5.5171570e-2f);
    p = fma(p, r, splat(2.4261111e-1f));
    p = fma(p, r, splat(6.9326100e-1f));
    p = fma(p, r, splat(9.9992807e-1f));
    return (Floats)_mm512_scalef_ps((__m512)p, whole);
}
struct Bfloat16 {
    static constexpr int64_t kNumbers = 2;
    static DELTIC_INLINE Floats dot(Floats sum, Words pairs, uint32_t pair) { return dot2_bf16(sum, pairs, pair); }
    static DELTIC_INLINE Words word(const Floats *numbers) { return pair_bf16(numbers[0], numbers[1]); }
    static DELTIC_INLINE Words words(const float *numbers) {
        return narrow_bf16(loadf(numbers), loadf(numbers + kLanes));
    }
    static constexpr float kUnit = 1.44269504f;
    static DELTIC_INLINE Floats power(Floats score) { return power_of_two(score); }
};
#endif

// Computes the scores of one tile of keys: out [kKeys][16 queries]. q [steps][16], k [steps][kKeys].
template <class Kind> DELTIC_INLINE void scores(const uint32_t *q, const uint32_t *k, int64_t steps, float *out) {
    Floats sum[kKeys] = {};
    for (int64_t step = 0; step < steps; ++step) {
        Words queries = load<Words>(q + step * kLanes);
#pragma GCC unroll 12
        for (int t = 0; t < kKeys; ++t) sum[t] = Kind::dot(sum[t], queries, k[step * kKeys + t]);
    }
#pragma GCC unroll 12
    for (int t = 0; t < kKeys; ++t) store(out + t * kLanes, sum[t]);
}

// Replaces the scores p [keys][16] (floats) with the weights power(score - largest) as operand words [steps][16].
// Returns the sums of the weights.
template <class Kind> DELTIC_INLINE Floats weigh(float *p, int64_t keys, Floats largest) {
    Floats total = {};
    for (int64_t k = 0; k < keys; k += Kind::kNumbers) {
        Floats weight[Kind::kNumbers] = {};
        for (int64_t i = 0; i < Kind::kNumbers && k + i < keys; ++i) {
            weight[i] = Kind::power(loadf(p + (k + i) * kLanes) - largest);
            total = total + weight[i];
        }
        store(p + k / Kind::kNumbers * kLanes, Kind::word(weight));
    }
    return total;
}

// out [kRows queries][16 * V] = sums of the values v [steps][stride], weighted by p [steps][16].
template <class Kind, int V>
DELTIC_INLINE void mix(const uint32_t *p, const uint32_t *v, int64_t steps, int64_t stride, Floats out[kRows][V]) {
    Floats sum[kRows][V] = {};
    for (int64_t step = 0; step < steps; ++step) {
        Words value[V];
        for (int i = 0; i < V; ++i) value[i] = load<Words>(v + step * stride + i * kLanes);
#pragma GCC unroll 8
        for (int row = 0; row < kRows; ++row)
            for (int i = 0; i < V; ++i) sum[row][i] = Kind::dot(sum[row][i], value[i], p[step * kLanes + row]);
    }
    for (int row = 0; row < kRows; ++row)
        for (int i = 0; i < V; ++i) out[row][i] = sum[row][i];
}

// One head of one sequence, in a thread's scratch memory.
template <class Kind> struct Head {
    const Attention &work;
    int64_t start, tokens, column;  // first token and length of the sequence; the head's first column in q, k or v
    int64_t hidden, dim, padded, wide, steps;
    uint32_t *keys, *values, *queries;
    float *weights, *found, *largest, *total, *row;

    static int64_t words(int64_t tokens, int64_t dim) {
        int64_t padded = round_up(dim, kLanes), steps = pieces_of(dim, Kind::kNumbers);
        int64_t wide = round_up(dim, kLanes * Kind::kNumbers);
        return round_up(tokens, kKeys) * steps + kLanes + round_up(pieces_of(tokens, Kind::kNumbers) * padded, kLanes) +
               kTogether * (steps + padded + 2) + kBlock * kLanes + (kLanes + 1) * wide;
    }
    Head(const Attention &work, int64_t start, int64_t tokens, int64_t head, float *memory)
        : work(work), start(start), tokens(tokens), column(head * work.head_dim), hidden(work.heads * work.head_dim),
          dim(work.head_dim), padded(round_up(dim, kLanes)), wide(round_up(dim, kLanes * Kind::kNumbers)),
          steps(pieces_of(dim, Kind::kNumbers)) {
        weights = memory;
        found = weights + kBlock * kLanes;
        largest = found + kTogether * padded;
        total = largest + kTogether;
        row = total + kTogether;
        queries = (uint32_t *)(row + (kLanes + 1) * wide);
        values = queries + kTogether * steps;
        keys = values + round_up(pieces_of(tokens, Kind::kNumbers) * padded, kLanes);
    }

    const float *input(int64_t token, int part) const {
        return work.qkv + (start + token) * 3 * hidden + part * hidden + column;
    }

    // Writes a token's query (part 0) or key (part 1) to row `place`: adds the bias, multiplies by `factor`, applies
    // RoPE. Zeros follow the head's numbers.
    DELTIC_INLINE void take(int64_t token, int part, float factor, int64_t place) const {
        const float *from = input(token, part), *bias = work.bias + part * hidden + column;
        float *row = this->row + place * wide, *plain = this->row + kLanes * wide;
        for (int64_t d = 0; d < wide; d += kLanes) {
            int64_t count = most(0, least(kLanes, dim - d));
            store(row + d, (some(from + d, count) + some(bias + d, count)) * factor);
        }
        if (!work.cosines) return;
        int64_t half = dim / 2;
        std::memcpy(plain, row, size_t(dim) * 4);
        for (int64_t d = 0; d < half; d += kLanes) {
            int64_t count = least(kLanes, half - d);
            Floats left = some(plain + d, count), right = some(plain + half + d, count);
            Floats cosine = some(work.cosines + (start + token) * half + d, count);
            Floats sine = some(work.sines + (start + token) * half + d, count);
            put(row + d, fma(left, cosine, -(right * sine)), count);
            put(row + half + d, fma(right, cosine, left * sine), count);
        }
    }

    // Writes the queries (part 0) or keys (part 1) of `count` <= 16 tokens to a tile: words[step * width + token].
    // Each step writes a whole vector of 16 words, with zeros from `count` on. If `width` is below 16, this overwrites
    // the 16 - width words after the step.
    void place(uint32_t *words, int64_t width, int64_t first, int64_t count, int part, float factor) const {
        constexpr int64_t kStep = kLanes * Kind::kNumbers;  // numbers of a vector
        for (int64_t d = 0; d < dim; d += kStep) {
            Words turned[kLanes] = {};
            for (int64_t token = 0; token < count; ++token) {
                if (d == 0) take(first + token, part, factor, token);
                turned[token] = Kind::words(row + token * wide + d);
            }
            turn(turned);
            int64_t step = d / Kind::kNumbers, rows = least(kLanes, steps - step);
            for (int64_t i = 0; i < rows; ++i) store(words + (step + i) * width, turned[i]);
        }
    }

    // Packs all keys of the sequence as [tiles][steps][kKeys] and all values as [tokens / kNumbers][padded].
    void pack() const {
        for (int64_t token = 0; token < tokens; token += kKeys)
            place(keys + token * steps, kKeys, token, least(kKeys, tokens - token), 1, 1.0f);
        for (int64_t token = 0; token < tokens; token += Kind::kNumbers)
            for (int64_t d = 0; d < padded; d += kLanes) {
                Floats numbers[Kind::kNumbers] = {};
                int64_t count = least(kLanes, dim - d);
                for (int64_t i = 0; i < Kind::kNumbers && token + i < tokens; ++i)
                    numbers[i] = some(input(token + i, 2) + d, count);
                store(values + token / Kind::kNumbers * padded + d, Kind::word(numbers));
            }
    }

    // Computes kTogether queries from `first` on, but none from `end` on.
    void run(int64_t first, int64_t end) const {
        int64_t count = least(kTogether, end - first);
        float factor = Kind::kUnit / std::sqrt(float(dim));
        int64_t room = round_up(count, kLanes);
        std::memset(found, 0, size_t(room * padded) * 4);
        std::memset(total, 0, size_t(room) * 4);
        for (int64_t query = 0; query < count; query += kLanes)
            place(queries + query * steps, kLanes, first + query, least(kLanes, count - query), 0, factor);
        for (int64_t query = 0; query < room; query += kLanes) store(largest + query, splat(-3e38f));
        for (int64_t key = 0; key < tokens; key += kBlock)
            for (int64_t query = 0; query < count; query += kLanes)
                pass(key, least(kBlock, tokens - key), query, least(kLanes, count - query));
        for (int64_t query = 0; query < count; ++query) write(first + query, query);
    }

    // Processes a block of `count` keys for 16 queries. Only the first `rows` queries are valid.
    void pass(int64_t key, int64_t count, int64_t query, int64_t rows) const {
        const uint32_t *q = queries + query * steps;
        for (int64_t k = 0; k < count; k += kKeys)
            scores<Kind>(q, keys + (key + k) * steps, steps, weights + k * kLanes);
        Floats before = loadf(largest + query), now = before;
        for (int64_t k = 0; k < count; ++k) now = maximum(now, loadf(weights + k * kLanes));
        float factor[kLanes];
        Floats fade = Kind::power(before - now);
        store(factor, fade);
        store(largest + query, now);
        store(total + query, fma(loadf(total + query), fade, weigh<Kind>(weights, count, now)));
        for (int64_t row = 0; row < rows; row += kRows) {
            int64_t d = 0, wide = kVectors * kLanes;
            for (; d + wide <= padded; d += wide) add<kVectors>(key, count, query, row, d, factor);
            for (; d < padded; d += kLanes) add<1>(key, count, query, row, d, factor);
        }
    }

    template <int V>
    DELTIC_INLINE void add(int64_t key, int64_t count, int64_t query, int64_t row, int64_t d,
                           const float *factor) const {
        Floats mixed[kRows][V];
        mix<Kind, V>((const uint32_t *)weights + row, values + key / Kind::kNumbers * padded + d,
                     pieces_of(count, Kind::kNumbers), padded, mixed);
        for (int r = 0; r < kRows; ++r)
            for (int i = 0; i < V; ++i) {
                float *sum = found + (query + row + r) * padded + d + i * kLanes;
                store(sum, fma(loadf(sum), splat(factor[row + r]), mixed[r][i]));
            }
    }

    void write(int64_t token, int64_t query) const {
        float inverse = 1.0f / total[query];
        const float *bias = work.bias + 2 * hidden + column;
        for (int64_t d = 0; d < dim; d += kLanes) {
            int64_t part = least(kLanes, dim - d);
            // the weights of a query add up to 1, so the bias of the values can be added at the end
            Floats value = fma(loadf(found + query * padded + d), splat(inverse), some(bias + d, part));
            put(work.out + (start + token) * hidden + column + d, value, part);
        }
    }
};

struct Piece {
    int64_t start, tokens, head, first, end;
};

template <class Kind> void attend(deltic_pool *pool, const Attention &work) {
    std::vector<Piece> pieces;
    int64_t longest = 0, step = kQueries, threads = pool_threads(pool);
    for (int64_t sequence = 0; sequence < work.sequences; ++sequence)
        longest = most(longest, work.starts[sequence + 1] - work.starts[sequence]);
    // with few heads and sequences, tasks have fewer queries, so that even one head of one sequence uses all threads
    int64_t heads = work.sequences * (work.end_head - work.first_head), queries = least(longest, work.end) - work.first;
    if (heads * pieces_of(queries, step) < threads)
        step = round_up(pieces_of(queries, pieces_of(threads, heads)), kTogether);
    for (int64_t sequence = 0; sequence < work.sequences; ++sequence) {
        int64_t start = work.starts[sequence], tokens = work.starts[sequence + 1] - start;
        int64_t end = least(tokens, work.end);
        for (int64_t head = work.first_head; head < work.end_head; ++head)
            for (int64_t first = work.first; first < end; first += step)
                pieces.push_back({start, tokens, head, first, least(first + step, end)});
    }
    int64_t each = round_up(Head<Kind>::words(longest, work.head_dim), kLanes);
    float *memory = scratch_of<float>(pool, 0, each * threads);
    parallel(pool, int64_t(pieces.size()), [&](int64_t number, int thread) {
        const Piece &piece = pieces[size_t(number)];
        Head<Kind> head(work, piece.start, piece.tokens, piece.head, memory + each * thread);
        head.pack();
        for (int64_t first = piece.first; first < piece.end; first += kTogether) head.run(first, piece.end);
    });
}

// erf with an error below 5e-7: x times a quotient of polynomials in x^2, which was fitted by least squares with
// iteratively adapted weights.
DELTIC_INLINE Floats error_function(Floats x) {
    x = maximum(minimum(x, splat(4.0f)), splat(-4.0f));
    Floats s = x * x;
    Floats above = splat(1.97474037e-06f), below = splat(3.74798874e-05f);
    above = fma(above, s, splat(2.88040697e-04f));
    below = fma(below, s, splat(1.21639157e-03f));
    above = fma(above, s, splat(4.00381256e-03f));
    below = fma(below, s, splat(1.54447658e-02f));
    above = fma(above, s, splat(5.34679964e-02f));
    below = fma(below, s, splat(1.16478212e-01f));
    above = fma(above, s, splat(1.96253479e-01f));
    below = fma(below, s, splat(5.07256269e-01f));
    above = fma(above, s, splat(1.12837899e+00f));
    below = fma(below, s, splat(1.0f));
    return x * above / below;
}
DELTIC_INLINE Floats gelu_of(Floats x) {
    Floats half = x * 0.5f;
    return fma(half, error_function(x * 0.70710678f), half);
}

// The tanh approximation of GELU: x times the sigmoid of twice the argument of tanh.
DELTIC_INLINE Floats gelu_tanh_of(Floats x) {
    Floats inner = fma(x * x, splat(0.044715f), splat(1.0f));
    return x * sigmoid(x * inner * 1.59576912f);
}

void norm_token(const float *residual, const float *delta, const float *bias, const float *scale, const float *shift,
                float *out, int64_t width, float eps) {
    Floats total = {}, squares = {};
    int64_t whole = width / kLanes * kLanes, rest = width - whole;
    for (int64_t i = 0; i < width; i += kLanes) {
        int64_t part = least(kLanes, width - i);
        Floats sum = part == kLanes ? loadf(residual + i) : load_part(residual + i, part);
        if (delta)
            sum = sum + (part == kLanes ? loadf(delta + i) + loadf(bias + i)
                                        : load_part(delta + i, part) + load_part(bias + i, part));
        if (part == kLanes) store(out + i, sum);
        else store_part(out + i, sum, part);
        total = total + sum;
    }
    float mean = sum_lanes(total) / float(width);
    for (int64_t i = 0; i < whole; i += kLanes) {
        Floats apart = loadf(out + i) - mean;
        squares = fma(apart, apart, squares);
    }
    if (rest) {
        float apart[kLanes] = {};
        for (int64_t i = 0; i < rest; ++i) apart[i] = out[whole + i] - mean;
        squares = fma(loadf(apart), loadf(apart), squares);
    }
    Floats factor = splat(1.0f / std::sqrt(sum_lanes(squares) / float(width) + eps));
    for (int64_t i = 0; i < whole; i += kLanes)
        store(out + i, fma((loadf(out + i) - mean) * factor, loadf(scale + i), loadf(shift + i)));
    if (rest)
        store_part(out + whole, fma((load_part(out + whole, rest) - mean) * factor, load_part(scale + whole, rest),
                                    load_part(shift + whole, rest)), rest);
}

// Calls body(row) in pieces of so many rows that the cost of distributing them is negligible.
template <typename Body> void by_row(deltic_pool *pool, int64_t rows, int64_t width, Body &&body) {
    int64_t step = width > 8192 ? 1 : 8192 / width + 1;
    parallel(pool, pieces_of(rows, step), [&](int64_t piece, int) {
        for (int64_t row = piece * step; row < least(piece * step + step, rows); ++row) body(row);
    });
}

}  // namespace

void full_attention(deltic_pool *pool, const Attention &work) {
#if defined(__AVX512BF16__)
    if (work.narrow) return attend<Bfloat16>(pool, work);
#endif
    attend<Float32>(pool, work);
}

void layer_norm(deltic_pool *pool, const float *residual, const float *delta, const float *bias, const float *scale,
                const float *shift, float *out, int64_t tokens, int64_t width, float eps) {
    by_row(pool, tokens, width, [&](int64_t token) {
        int64_t at = token * width;
        norm_token(residual + at, delta ? delta + at : nullptr, bias, scale, shift, out + at, width, eps);
    });
}

void gelu(deltic_pool *pool, float *x, const float *bias, int64_t tokens, int64_t width, bool tanh) {
    by_row(pool, tokens, width, [&](int64_t token) {
        float *row = x + token * width;
        for (int64_t i = 0; i < width; i += kLanes) {
            int64_t count = least(kLanes, width - i);
            Floats v = some(row + i, count) + some(bias + i, count);
            put(row + i, tanh ? gelu_tanh_of(v) : gelu_of(v), count);
        }
    });
}

void add_bias(deltic_pool *pool, float *x, const float *delta, const float *bias, int64_t tokens, int64_t width) {
    by_row(pool, tokens, width, [&](int64_t token) {
        for (int64_t i = 0; i < width; i += kLanes) {
            int64_t count = least(kLanes, width - i), at = token * width + i;
            put(x + at, some(x + at, count) + (some(delta + at, count) + some(bias + i, count)), count);
        }
    });
}

}  // namespace deltic::DELTIC_LEVEL
