// RMS norm and SiLU gate of a layer.
#include "levels.hpp"
#include "pool.hpp"
#include "simd.hpp"

namespace deltic::DELTIC_LEVEL {
namespace {

void norm_token(const float *residual, const float *delta, const float *scale, float *total, float *normed,
                int64_t width, float eps) {
    Floats squares = {};
    int64_t whole = width / kLanes * kLanes, rest = width - whole;
    for (int64_t i = 0; i < whole; i += kLanes) {
        Floats sum = delta ? loadf(residual + i) + loadf(delta + i) : loadf(residual + i);
        store(total + i, sum);
        squares = fma(sum, sum, squares);
    }
    if (rest) {
        Floats sum = load_part(residual + whole, rest);
        if (delta) sum = sum + load_part(delta + whole, rest);
        store_part(total + whole, sum, rest);
        squares = fma(sum, sum, squares);
    }
    Floats factor = splat(1.0f / std::sqrt(sum_lanes(squares) / float(width) + eps));
    for (int64_t i = 0; i < whole; i += kLanes) store(normed + i, loadf(total + i) * factor * loadf(scale + i));
    if (rest)
        store_part(normed + whole, load_part(total + whole, rest) * factor * load_part(scale + whole, rest), rest);
}

void gate_token(const float *gate, const float *up, float *out, int64_t width) {
    int64_t i = 0;
    for (; i + kLanes <= width; i += kLanes) {
        Floats g = loadf(gate + i);
        store(out + i, g * sigmoid(g) * loadf(up + i));
    }
    if (i < width) {
        Floats g = load_part(gate + i, width - i);
        store_part(out + i, g * sigmoid(g) * load_part(up + i, width - i), width - i);
    }
}

// Tokens per piece, enough to make the overhead of a piece negligible.
int64_t tokens_per_piece(int64_t width) { return width > 8192 ? 1 : 8192 / width + 1; }

template <typename Body> void by_token(deltic_pool *pool, int64_t tokens, int64_t width, Body &&body) {
    int64_t step = tokens_per_piece(width);
    parallel(pool, (tokens + step - 1) / step, [&](int64_t piece, int) {
        int64_t end = piece * step + step < tokens ? piece * step + step : tokens;
        for (int64_t token = piece * step; token < end; ++token) body(token);
    });
}

}  // namespace

void add_norm(deltic_pool *pool, const float *residual, const float *delta, const float *scale, float *total,
              float *normed, int64_t tokens, int64_t width, float eps) {
    by_token(pool, tokens, width, [&](int64_t token) {
        int64_t at = token * width;
        norm_token(residual + at, delta ? delta + at : nullptr, scale, total + at, normed + at, width, eps);
    });
}

void silu_mul(deltic_pool *pool, const float *gate_up, float *out, int64_t tokens, int64_t width) {
    by_token(pool, tokens, width, [&](int64_t token) {
        gate_token(gate_up + 2 * token * width, gate_up + (2 * token + 1) * width, out + token * width, width);
    });
}

}  // namespace deltic::DELTIC_LEVEL
