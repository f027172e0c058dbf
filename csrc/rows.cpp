// Products of matrices that lie in memory row by row, in the calling thread. What a vector gets does not depend on the
// others, nor on how many rows are asked for at a time.
#include "levels.hpp"
#include "simd.hpp"

namespace deltic::DELTIC_LEVEL {
namespace {

constexpr int kSums = 4;  // of a row and a vector, side by side: additions wait for each other
constexpr int64_t kStep = kSums * kLanes;
// Vectors that a row is multiplied with at once, so that all sums are in registers.
#if defined(__AVX512F__)
constexpr int kVectors = 4;
#else
constexpr int kVectors = 1;
#endif

DELTIC_INLINE Floats part_of(const uint16_t *from, int64_t count) {
    uint16_t bits[kLanes] = {};
    std::memcpy(bits, from, size_t(count) * 2);
    return load_wide(bits);
}

template <int V>
void dots_of(const uint16_t *rows, int64_t count, int64_t columns, const float *const *x, float *out, int64_t stride) {
    const int64_t ahead = fetch_ahead(false);
    for (int64_t row = 0; row < count; ++row) {
        const uint16_t *w = rows + row * columns;
        Floats sum[V][kSums] = {};
        int64_t k = 0;
        for (; k + kStep <= columns; k += kStep) {
            for (int64_t line = 0; line < kStep * 2; line += 64)
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

}  // namespace

// out[v * stride + i]: of row i of bfloat16 and vector v, in float32.
void dots(const uint16_t *rows, int64_t count, int64_t columns, const float *const *x, int64_t vectors, float *out,
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

// SiLU of the gate times the other half times the share, rounded to bfloat16. factor: of both halves.
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
