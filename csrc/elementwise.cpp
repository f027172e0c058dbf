// Norm and gate of a layer for a few tokens, where a tensor library spends its time on calls.
#include "common.hpp"
#include "deltic.h"

namespace deltic {
namespace {

constexpr int kLanes = 16;

template <typename T>
inline __attribute__((always_inline)) void add_norm(const T *residual, const T *delta, const float *scale, T *total,
                                                    T *normed, int64_t tokens, int64_t width, float eps) {
    for (int64_t t = 0; t < tokens; ++t) {
        const T *from = residual + t * width, *add = delta ? delta + t * width : nullptr;
        T *sum = total + t * width, *out = normed + t * width;
        float lanes[kLanes] = {};
        for (int64_t i = 0; i < width; ++i) {
            narrow(add ? widen(from[i]) + widen(add[i]) : widen(from[i]), sum[i]);
        }
        int64_t i = 0;
        for (; i + kLanes <= width; i += kLanes)
            for (int lane = 0; lane < kLanes; ++lane) lanes[lane] += widen(sum[i + lane]) * widen(sum[i + lane]);
        float squares = 0;
        for (; i < width; ++i) squares += widen(sum[i]) * widen(sum[i]);
        for (float lane : lanes) squares += lane;
        float factor = 1.0f / std::sqrt(squares / float(width) + eps);
        for (int64_t j = 0; j < width; ++j) narrow(widen(sum[j]) * factor * scale[j], out[j]);
    }
}

template <typename T>
inline __attribute__((always_inline)) void silu_mul(const T *gate_up, T *out, int64_t tokens, int64_t width) {
    for (int64_t t = 0; t < tokens; ++t) {
        const T *gate = gate_up + 2 * t * width, *up = gate + width;
        for (int64_t i = 0; i < width; ++i) {
            float g = widen(gate[i]);
            narrow(g * sigmoid(g) * widen(up[i]), out[t * width + i]);
        }
    }
}

DELTIC_CLONES void add_norm_f32(const float *r, const float *d, const float *s, float *t, float *n, int64_t tokens,
                                int64_t width, float eps) {
    add_norm(r, d, s, t, n, tokens, width, eps);
}
DELTIC_CLONES void add_norm_bf16(const uint16_t *r, const uint16_t *d, const float *s, uint16_t *t, uint16_t *n,
                                 int64_t tokens, int64_t width, float eps) {
    add_norm(r, d, s, t, n, tokens, width, eps);
}
DELTIC_CLONES void silu_mul_f32(const float *g, float *out, int64_t tokens, int64_t width) {
    silu_mul(g, out, tokens, width);
}
DELTIC_CLONES void silu_mul_bf16(const uint16_t *g, uint16_t *out, int64_t tokens, int64_t width) {
    silu_mul(g, out, tokens, width);
}

}  // namespace
}  // namespace deltic

extern "C" void deltic_add_norm(const void *residual, const void *delta, const float *scale, void *total, void *normed,
                                int64_t tokens, int64_t width, float eps, int type) {
    if (type == DELTIC_F32)
        deltic::add_norm_f32((const float *)residual, (const float *)delta, scale, (float *)total, (float *)normed,
                             tokens, width, eps);
    else
        deltic::add_norm_bf16((const uint16_t *)residual, (const uint16_t *)delta, scale, (uint16_t *)total,
                              (uint16_t *)normed, tokens, width, eps);
}

extern "C" void deltic_silu_mul(const void *gate_up, void *out, int64_t tokens, int64_t width, int type) {
    if (type == DELTIC_F32)
        deltic::silu_mul_f32((const float *)gate_up, (float *)out, tokens, width);
    else
        deltic::silu_mul_bf16((const uint16_t *)gate_up, (uint16_t *)out, tokens, width);
}
