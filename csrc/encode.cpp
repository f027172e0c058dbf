// What lies between the products of an encoder's layer: attention of all tokens of a sequence to each other, norms that
// take the mean away, and an exact GELU.
//
// A token's result depends on its own sequence alone: sums over keys run in one order, whatever the batch is.
#include <vector>

#include "levels.hpp"
#include "pool.hpp"
#include "simd.hpp"

namespace deltic::DELTIC_LEVEL {
namespace {

#if defined(__AVX512F__)
constexpr int kKeys = 12;    // scores of so many keys and 16 queries are summed up in registers
constexpr int kRows = 8;     // so are so many queries' results, of 32 numbers of a head each
constexpr int kVectors = 2;
#elif defined(__AVX2__)
constexpr int kKeys = 4, kRows = 4, kVectors = 1;
#else
constexpr int kKeys = 2, kRows = 2, kVectors = 1;
#endif
constexpr int64_t kQueries = 256;  // of one piece of work

// Scores of one tile of keys: out [kKeys][16 queries]. q [dim][16], k [dim][kKeys].
DELTIC_INLINE void scores(const float *q, const float *k, int64_t dim, float *out) {
    Floats sum[kKeys] = {};
    for (int64_t d = 0; d < dim; ++d) {
        Floats queries = loadf(q + d * kLanes);
#pragma GCC unroll 12
        for (int t = 0; t < kKeys; ++t) sum[t] = fma(queries, splat(k[d * kKeys + t]), sum[t]);
    }
#pragma GCC unroll 12
    for (int t = 0; t < kKeys; ++t) store(out + t * kLanes, sum[t]);
}

// p [keys][16]: scores become exp(score - the query's largest). Returns what they sum up to, per query.
DELTIC_INLINE Floats weigh(float *p, int64_t keys) {
    Floats largest = loadf(p);
    for (int64_t k = 1; k < keys; ++k) largest = maximum(largest, loadf(p + k * kLanes));
    Floats total = {};
    for (int64_t k = 0; k < keys; ++k) {
        Floats weight = exponential(loadf(p + k * kLanes) - largest);
        store(p + k * kLanes, weight);
        total = total + weight;
    }
    return total;
}

// out[query][16 * V]: the values v [keys][stride], weighted by p [keys][16], for kRows of the queries.
template <int V> DELTIC_INLINE void mix(const float *p, const float *v, int64_t keys, int64_t stride, Floats out[kRows][V]) {
    Floats sum[kRows][V] = {};
    for (int64_t k = 0; k < keys; ++k) {
        Floats value[V];
        for (int i = 0; i < V; ++i) value[i] = loadf(v + k * stride + i * kLanes);
#pragma GCC unroll 8
        for (int row = 0; row < kRows; ++row) {
            Floats weight = splat(p[k * kLanes + row]);
            for (int i = 0; i < V; ++i) sum[row][i] = fma(weight, value[i], sum[row][i]);
        }
    }
    for (int row = 0; row < kRows; ++row)
        for (int i = 0; i < V; ++i) out[row][i] = sum[row][i];
}

// One head of one sequence, in a thread's own memory.
struct Head {
    const float *qkv, *bias;  // of the sequence's first token, and [3 * hidden]; both from this head's queries on
    float *out;
    int64_t tokens, hidden, dim, padded;
    float *keys, *values, *queries, *weights;

    static int64_t floats(int64_t tokens, int64_t dim) {
        int64_t padded = round_up(dim, kLanes), room = round_up(tokens, kKeys);
        return room * dim + room * padded + kLanes * dim + room * kLanes;
    }
    Head(const float *qkv, const float *bias, float *out, int64_t tokens, int64_t hidden, int64_t dim, float *memory)
        : qkv(qkv), bias(bias), out(out), tokens(tokens), hidden(hidden), dim(dim), padded(round_up(dim, kLanes)) {
        int64_t room = round_up(tokens, kKeys);
        weights = memory;
        queries = weights + room * kLanes;
        values = queries + kLanes * dim;
        keys = values + room * padded;
    }

    // keys [tiles][dim][kKeys], values [tokens][padded]
    void pack() const {
        for (int64_t token = 0; token < round_up(tokens, kKeys); ++token) {
            float *key = keys + token / kKeys * kKeys * dim + token % kKeys;
            const float *from = qkv + token * 3 * hidden + hidden;
            for (int64_t d = 0; d < dim; ++d) key[d * kKeys] = token < tokens ? from[d] + bias[hidden + d] : 0;
        }
        for (int64_t token = 0; token < tokens; ++token) {
            std::memcpy(values + token * padded, qkv + token * 3 * hidden + 2 * hidden, size_t(dim) * 4);
            std::memset(values + token * padded + dim, 0, size_t(padded - dim) * 4);
        }
    }

    // 16 queries, or what is left of them
    void run(int64_t first) const {
        int64_t count = least(kLanes, tokens - first);
        float factor = 1.0f / std::sqrt(float(dim));
        for (int64_t query = 0; query < kLanes; ++query) {
            const float *from = qkv + (first + query) * 3 * hidden;
            for (int64_t d = 0; d < dim; ++d)
                queries[d * kLanes + query] = query < count ? (from[d] + bias[d]) * factor : 0;
        }
        for (int64_t key = 0; key < tokens; key += kKeys) scores(queries, keys + key * dim, dim, weights + key * kLanes);
        float inverse[kLanes];
        store(inverse, 1.0f / weigh(weights, tokens));
        for (int64_t row = 0; row < count; row += kRows) {
            int64_t d = 0;
            for (; d + kVectors * kLanes <= padded; d += kVectors * kLanes) write<kVectors>(first, row, count, d, inverse);
            for (; d < padded; d += kLanes) write<1>(first, row, count, d, inverse);
        }
    }

    template <int V>
    DELTIC_INLINE void write(int64_t first, int64_t row, int64_t count, int64_t d, const float *inverse) const {
        Floats mixed[kRows][V];
        mix<V>(weights + row, values + d, tokens, padded, mixed);
        for (int64_t r = row; r < least(row + kRows, count); ++r)
            for (int i = 0; i < V; ++i) {
                int64_t at = d + i * kLanes, part = least(kLanes, dim - at);
                // the weights of a query sum up to 1, so that the values' bias may come last
                Floats value = fma(mixed[r - row][i], splat(inverse[r]), load_part(bias + 2 * hidden + at, part));
                store_part(out + (first + r) * hidden + at, value, part);
            }
    }
};

struct Piece {
    int64_t start, tokens, head, first;
};

// erf, within 5e-7: a quotient of polynomials in x^2 that was fitted to it by least squares with moving weights.
DELTIC_INLINE Floats error_function(Floats x) {
    x = choose(less(splat(4.0f), x), splat(4.0f), x);
    x = choose(less(x, splat(-4.0f)), splat(-4.0f), x);
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

// Pieces of so many rows that handing them out costs nothing.
template <typename Body> void by_row(deltic_pool *pool, int64_t rows, int64_t width, Body &&body) {
    int64_t step = width > 8192 ? 1 : 8192 / width + 1;
    parallel(pool, pieces_of(rows, step), [&](int64_t piece, int) {
        for (int64_t row = piece * step; row < least(piece * step + step, rows); ++row) body(row);
    });
}

}  // namespace

void full_attention(deltic_pool *pool, const float *qkv, const float *bias, const int64_t *starts, int64_t sequences,
                    int64_t heads, int64_t head_dim, float *out) {
    std::vector<Piece> pieces;
    int64_t longest = 0, hidden = heads * head_dim;
    for (int64_t sequence = 0; sequence < sequences; ++sequence) {
        int64_t start = starts[sequence], tokens = starts[sequence + 1] - start;
        longest = most(longest, tokens);
        for (int64_t head = 0; head < heads; ++head)
            for (int64_t first = 0; first < tokens; first += kQueries) pieces.push_back({start, tokens, head, first});
    }
    int64_t each = round_up(Head::floats(longest, head_dim), kLanes);
    float *memory = scratch_of<float>(pool, 0, each * pool_threads(pool));
    parallel(pool, int64_t(pieces.size()), [&](int64_t number, int thread) {
        const Piece &piece = pieces[size_t(number)];
        int64_t column = piece.head * head_dim;
        Head head(qkv + piece.start * 3 * hidden + column, bias + column, out + piece.start * hidden + column,
                  piece.tokens, hidden, head_dim, memory + each * thread);
        head.pack();
        for (int64_t first = piece.first; first < least(piece.first + kQueries, piece.tokens); first += kLanes)
            head.run(first);
    });
}

void layer_norm(deltic_pool *pool, const float *residual, const float *delta, const float *bias, const float *scale,
                const float *shift, float *out, int64_t tokens, int64_t width, float eps) {
    by_row(pool, tokens, width, [&](int64_t token) {
        int64_t at = token * width;
        norm_token(residual + at, delta ? delta + at : nullptr, bias, scale, shift, out + at, width, eps);
    });
}

void gelu(deltic_pool *pool, float *x, const float *bias, int64_t tokens, int64_t width) {
    by_row(pool, tokens, width, [&](int64_t token) {
        float *row = x + token * width;
        int64_t i = 0;
        for (; i + kLanes <= width; i += kLanes) store(row + i, gelu_of(loadf(row + i) + loadf(bias + i)));
        if (i < width)
            store_part(row + i, gelu_of(load_part(row + i, width - i) + load_part(bias + i, width - i)), width - i);
    });
}

}  // namespace deltic::DELTIC_LEVEL
