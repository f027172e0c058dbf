// One token through a Gated DeltaNet layer: convolution over the input ring, gates, delta rule, gated norm.
// The recurrence is that of arXiv 2412.06464: S <- a S; u = beta (v - S^T k); S <- S + k u^T; o = S^T q / sqrt(dk).
#include <vector>

#include "common.hpp"
#include "deltic.h"

namespace deltic {
namespace {

struct Sizes {
    int64_t keys, values, channels, groups;
};

Sizes sizes_of(const deltic_gdn &layer) {
    int64_t keys = layer.key_heads * layer.key_dim, values = layer.value_heads * layer.value_dim;
    return {keys, values, 2 * keys + values, layer.value_heads / layer.key_heads};
}

// Convolved and activated channels [first, first + count) of a row; writes the new inputs into the ring.
template <typename T>
inline __attribute__((always_inline)) void convolve(const deltic_gdn &layer, const T *proj, T *ring, int64_t done,
                                                    int64_t channels, int64_t first, int64_t count, float *out) {
    const T *conv = (const T *)layer.conv;
    T *newest = ring + (done % layer.ring) * channels;
    for (int64_t c = first; c < first + count; ++c) {
        newest[c] = proj[c];
        out[c - first] = widen(proj[c]) * widen(conv[c * layer.kernel + layer.kernel - 1]);
    }
    for (int64_t back = 1; back < layer.kernel && back <= done; ++back) {
        const T *older = ring + ((done - back) % layer.ring) * channels;
        const T *tap = conv + layer.kernel - 1 - back;
        for (int64_t c = first; c < first + count; ++c) out[c - first] += widen(older[c]) * widen(tap[c * layer.kernel]);
    }
    for (int64_t i = 0; i < count; ++i) out[i] *= sigmoid(out[i]);
}

inline __attribute__((always_inline)) float dot(const float *a, const float *b, int64_t n) {
    float lanes[16] = {}, sum = 0;
    int64_t i = 0;
    for (; i + 16 <= n; i += 16)
        for (int lane = 0; lane < 16; ++lane) lanes[lane] += a[i + lane] * b[i + lane];
    for (; i < n; ++i) sum += a[i] * b[i];
    for (float lane : lanes) sum += lane;
    return sum;
}

inline __attribute__((always_inline)) void normalise(float *x, int64_t n, float scale) {
    float factor = scale / std::sqrt(dot(x, x, n) + 1e-6f);
    for (int64_t i = 0; i < n; ++i) x[i] *= factor;
}

// One value head: state [dk, dv] in place; value holds v and then u, out o.
inline __attribute__((always_inline)) void delta(float *state, const float *query, const float *key, float *value,
                                                 float *from_key, float *out, float a, float beta, bool fresh,
                                                 int64_t dk, int64_t dv) {
    if (fresh)
        for (int64_t i = 0; i < dk * dv; ++i) state[i] = 0;
    for (int64_t j = 0; j < dv; ++j) from_key[j] = out[j] = 0;
    for (int64_t i = 0; i < dk; ++i) {
        const float *row = state + i * dv;
        float k = key[i], q = query[i];
        for (int64_t j = 0; j < dv; ++j) {
            from_key[j] += k * row[j];
            out[j] += q * row[j];
        }
    }
    float both = dot(query, key, dk);
    for (int64_t j = 0; j < dv; ++j) {
        value[j] = beta * (value[j] - a * from_key[j]);
        out[j] = a * out[j] + both * value[j];
    }
    for (int64_t i = 0; i < dk; ++i) {
        float *row = state + i * dv, k = key[i];
        for (int64_t j = 0; j < dv; ++j) row[j] = a * row[j] + k * value[j];
    }
}

template <typename T>
inline __attribute__((always_inline)) void gated_norm(const float *x, const T *z, const float *scale, T *out, int64_t n,
                                                      float eps) {
    float factor = 1.0f / std::sqrt(dot(x, x, n) / float(n) + eps);
    for (int64_t i = 0; i < n; ++i) {
        float gate = widen(z[i]);
        narrow(x[i] * factor * scale[i] * gate * sigmoid(gate), out[i]);
    }
}

template <typename T> inline __attribute__((always_inline)) void step(const deltic_gdn &layer) {
    auto [keys, values, channels, groups] = sizes_of(layer);
    int64_t dk = layer.key_dim, dv = layer.value_dim, heads = layer.value_heads;
    static thread_local std::vector<float> scratch;
    scratch.resize(2 * dk + 3 * dv);
    float *query = scratch.data(), *key = query + dk, *value = key + dk, *from_key = value + dv, *out = from_key + dv;
    for (int64_t r = 0; r < layer.rows; ++r) {
        const T *proj = (const T *)layer.proj + r * layer.proj_stride;
        const T *z = proj + channels, *b = z + values, *a = b + heads;
        T *ring = (T *)layer.inputs + layer.slots[r] * layer.ring * channels;
        float *states = layer.states + layer.slots[r] * heads * dk * dv;
        int64_t done = layer.done[r];
        for (int64_t g = 0; g < layer.key_heads; ++g) {
            convolve(layer, proj, ring, done, channels, g * dk, dk, query);
            convolve(layer, proj, ring, done, channels, keys + g * dk, dk, key);
            normalise(query, dk, 1.0f / std::sqrt(float(dk)));
            normalise(key, dk, 1.0f);
            for (int64_t h = g * groups; h < (g + 1) * groups; ++h) {
                convolve(layer, proj, ring, done, channels, 2 * keys + h * dv, dv, value);
                float rate = widen(a[h]) + layer.dt_bias[h];
                float softplus = rate > 20 ? rate : std::log1p(std::exp(rate));
                delta(states + h * dk * dv, query, key, value, from_key, out, std::exp(layer.decay[h] * softplus),
                      1.0f / (1.0f + std::exp(-widen(b[h]))), done == 0, dk, dv);
                gated_norm(out, z + h * dv, layer.norm, (T *)layer.out + r * values + h * dv, dv, layer.eps);
            }
        }
    }
}

DELTIC_CLONES void step_f32(const deltic_gdn &layer) { step<float>(layer); }
DELTIC_CLONES void step_bf16(const deltic_gdn &layer) { step<uint16_t>(layer); }

}  // namespace
}  // namespace deltic

extern "C" void deltic_gdn_step(const deltic_gdn *layer) {
    if (layer->type == DELTIC_F32)
        deltic::step_f32(*layer);
    else
        deltic::step_bf16(*layer);
}
