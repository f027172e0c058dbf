// Products with row-major matrices, in the calling thread. The result of a vector depends neither on the other vectors
// nor on the number of rows in a call.
#include "levels.hpp"
#include "simd.hpp"

namespace deltic::DELTIC_LEVEL {
namespace {

constexpr int kSums = 4;  // accumulators per row and vector: one would wait for the latency of each addition
constexpr int64_t kStep = kSums * kLanes;
// Vectors per pass over a row. All accumulators fit into registers.
#if defined(__AVX512F__)
constexpr int kVectors = 4;
#else
constexpr int kVectors = 1;
#endif

template <typename T> DELTIC_INLINE Floats part_of(const T *from, int64_t count) {
    T bits[kLanes] = {};
    std::memcpy(bits, from, size_t(count) * sizeof(T));
    return load_wide(bits);
}

template <int V, typename T>
void dots_of(const T *rows, int64_t count, int64_t columns, const float *const *x, float *out, int64_t stride) {
    const int64_t ahead = fetch_ahead(false);
    for (int64_t row = 0; row < count; ++row) {
        const T *w = rows + row * columns;
        Floats sum[V][kSums] = {};
        int64_t k = 0;
        for (; k + kStep <= columns; k += kStep) {
            for (int64_t line = 0; line < kStep * int64_t(sizeof(T)); line += 64)
                __builtin_prefetch((const uint8_t *)(w + k) + ahead + line, 0, 2);
#pragma GCC unroll 4
            for (int part = 0; part < kSums; ++part) {
                Floats weights = load_wide(w + k + part * kLanes);
#pragma GCC unroll 4
                for (int v = 0; v < V; ++v)
                    sum[v][part] = fma(weights, loadf(x[v] + k + part * kLanes), sum[v][part]);
            }
        }
        for (; k < columns; k += kLanes) {
            int64_t rest = least(kLanes, columns - k);
            Floats weights = part_of(w + k, rest);
#pragma GCC unroll 4
            for (int v = 0; v < V; ++v) sum[v][0] = fma(weights, load_part(x[v] + k, rest), sum[v][0]);
        }
#pragma GCC unroll 4
        for (int v = 0; v < V; ++v)
            out[v * stride + row] = sum_lanes((sum[v][0] + sum[v][1]) + (sum[v][2] + sum[v][3]));
    }
}

template <typename T>
void all_dots(const T *rows, int64_t count, int64_t columns, const float *const *x, int64_t vectors, float *out,
              int64_t stride) {
    for (int64_t v = 0; v < vectors;) {
        const int64_t left = least(vectors - v, kVectors);
        float *to = out + v * stride;
        if (left == 4) dots_of<4>(rows, count, columns, x + v, to, stride);
        else if (left == 3) dots_of<3>(rows, count, columns, x + v, to, stride);
        else if (left == 2) dots_of<2>(rows, count, columns, x + v, to, stride);
        else dots_of<1>(rows, count, columns, x + v, to, stride);
        v += left;
    }
}

// Adds the product of panels [begin, begin + P) of b and `between` [rank] to y.
template <int P, typename T>
DELTIC_INLINE void add_panels(const T *b, int64_t rank, int64_t rows, int64_t begin, const float *between, float *y) {
    Floats sum[P] = {};
    const T *from = b + begin * rank * kLanes;
    for (int64_t k = 0; k < rank; ++k)
#pragma GCC unroll 4
        for (int p = 0; p < P; ++p)
            sum[p] = fma(load_wide(from + (p * rank + k) * kLanes), splat(between[k]), sum[p]);
#pragma GCC unroll 4
    for (int p = 0; p < P; ++p) {
        float *to = y + (begin + p) * kLanes;
        int64_t some = least(kLanes, rows - (begin + p) * kLanes);
        if (some == kLanes) store(to, loadf(to) + sum[p]);
        else store_part(to, load_part(to, some) + sum[p], some);
    }
}

}  // namespace

// out[v * stride + i] = dot product of bfloat16 row i and vector v, in float32.
void dots(const uint16_t *rows, int64_t count, int64_t columns, const float *const *x, int64_t vectors, float *out,
          int64_t stride) {
    all_dots(rows, count, columns, x, vectors, out, stride);
}

// between[v * rank + first + i] = dot product of row first + i of a and vector v.
void low_rank_in(const deltic_low_rank &part, int64_t first, int64_t count, const float *const *x, int64_t vectors,
                 float *between) {
    by_type(part.type, [&](auto kind) {
        const auto *rows = (const decltype(kind) *)part.a + first * part.columns;
        all_dots(rows, count, part.columns, x, vectors, between + first, part.rank);
    });
}

// Adds the product of panels [begin, end) of b and between [vectors, rank] to each y.
void low_rank_out(const deltic_low_rank &part, int64_t begin, int64_t end, const float *between, int64_t vectors,
                  float *const *y) {
    by_type(part.type, [&](auto kind) {
        const auto *b = (const decltype(kind) *)part.b;
        for (int64_t panel = begin; panel < end;) {
            const int64_t some = end - panel < 4 ? 1 : 4;
            for (int64_t v = 0; v < vectors; ++v) {
                const float *by = between + v * part.rank;
                float *to = y[v] + part.first;
                if (some == 4) add_panels<4>(b, part.rank, part.rows, panel, by, to);
                else add_panels<1>(b, part.rank, part.rows, panel, by, to);
            }
            panel += some;
        }
    });
}

// silu(gate * factor) * (other * factor) * share, rounded to bfloat16.
void gate_rounded(const float *gate, const float *other, float factor, float share, int64_t count, float *out) {
    for (int64_t i = 0; i < count; i += kLanes) {
        const int64_t some = least(kLanes, count - i);
        Floats g = load_part(gate + i, some) * factor;
        uint16_t bits[kLanes];
        store_narrow(bits, g * sigmoid(g) * (load_part(other + i, some) * factor) * share);
        store_part(out + i, load_wide(bits), some);
    }
}

}  // namespace deltic::DELTIC_LEVEL
