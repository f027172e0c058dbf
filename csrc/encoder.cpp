// Forward pass of a text encoder: bidirectional attention, and a layer norm after each residual sum (post-norm).
#include <atomic>
#include <new>

#include "layers.hpp"
#include "levels.hpp"
#include "matrix.hpp"
#include "pool.hpp"

namespace deltic {
namespace {

// Scratch slots of the encoder. Matrix products and attention use the slots 0 to 4.
enum { kQkv = 24, kMixed, kDelta, kWide };

// Maximum tokens of a part whose activations stay in the caches from one product to the next: kTogether if all threads
// share the part, kAlone if one thread computes it.
constexpr int64_t kTogether = 192, kAlone = 96;
// Up to this many bytes, a layer's weights stay in L3. Then each thread reads all of them for its own tokens, and no
// thread needs activations from another core's caches. With larger weights, threads share each product.
constexpr int64_t kSmall = 8 << 20;

struct Tokens {
    int64_t first, count;
};

int64_t bytes_of(const deltic_weight &weight) {
    int64_t bytes = 0;
    for (int64_t part = 0; part < weight.count; ++part)
        bytes += panels_of(weight.parts[part].rows) * panel_bytes(weight.parts[part]);
    return bytes;
}

// Calls body(pool, part) for all tokens, part by part. pool: the threads of that part.
template <typename Body> void in_parts(deltic_pool *pool, int64_t tokens, bool small, Body &&body) {
    int64_t threads = pool_threads(pool);
    if (!small || threads == 1) {
        for (int64_t first = 0; first < tokens; first += kTogether)
            body(pool, Tokens{first, tokens - first < kTogether ? tokens - first : kTogether});
        return;
    }
    // equally many parts per thread, each of whole tiles
    constexpr int64_t kTile = 12;
    int64_t rounds = (tokens + threads * kAlone - 1) / (threads * kAlone), parts = rounds * threads;
    int64_t step = ((tokens + parts - 1) / parts + kTile - 1) / kTile * kTile;
    std::atomic<bool> failed{false};  // an exception must not escape from a thread of the pool
    parallel(pool, (tokens + step - 1) / step, [&](int64_t part, int thread) {
        int64_t first = part * step;
        try {
            body(alone(pool, thread), Tokens{first, tokens - first < step ? tokens - first : step});
        } catch (const std::bad_alloc &) {
            failed.store(true, std::memory_order_relaxed);
        }
    });
    if (failed.load(std::memory_order_relaxed)) throw std::bad_alloc();
}

// Computes a layer's queries, keys and values for the tokens of a part.
void project(deltic_pool *pool, const deltic_encoder &model, const deltic_encoder_layer &layer, Tokens part,
             const float *x, float *qkv) {
    int64_t hidden = model.hidden;
    kernels(pool).linear_fine(pool, x + part.first * hidden, part.count, layer.qkv, qkv + part.first * 3 * hidden,
                              3 * hidden, true);
}

// Computes the rest of a layer after its attention, for the tokens of a part.
void finish(deltic_pool *pool, const deltic_encoder &model, const deltic_encoder_layer &layer, Tokens part,
            const float *mixed, float *x) {
    int64_t hidden = model.hidden, width = rows_of(layer.up);
    float *delta = scratch_of<float>(pool, kDelta, part.count * hidden);
    float *wide = scratch_of<float>(pool, kWide, part.count * width), *rows = x + part.first * hidden;
    const Kernels &with = kernels(pool);
    auto add_norm = [&](const float *bias, const deltic_layer_norm &norm) {
        with.layer_norm(pool, rows, delta, bias, norm.scale, norm.shift, rows, part.count, hidden, model.eps);
    };
    with.linear_fine(pool, mixed + part.first * hidden, part.count, layer.out, delta, hidden, false);
    add_norm(layer.out_bias, layer.attention_norm);
    with.linear_fine(pool, rows, part.count, layer.up, wide, width, true);
    with.gelu(pool, wide, layer.up_bias, part.count, width, false);
    with.linear_fine(pool, wide, part.count, layer.down, delta, hidden, false);
    add_norm(layer.down_bias, layer.output_norm);
}

void encode(deltic_pool *pool, const deltic_encoder &model, const int64_t *starts, int64_t sequences, float *x) {
    int64_t tokens = starts[sequences], hidden = model.hidden, dim = hidden / model.heads;
    float *qkv = scratch_of<float>(pool, kQkv, tokens * 3 * hidden);
    float *mixed = scratch_of<float>(pool, kMixed, tokens * hidden);
    const deltic_encoder_layer *layer = model.layer, *end = layer + model.layers;
    bool small = bytes_of(layer->qkv) + bytes_of(layer->out) + bytes_of(layer->up) + bytes_of(layer->down) <= kSmall;
    in_parts(pool, tokens, small, [&](deltic_pool *own, Tokens part) {
        float *rows = x + part.first * hidden;
        kernels(own).layer_norm(own, rows, nullptr, nullptr, model.norm.scale, model.norm.shift, rows, part.count,
                                hidden, model.eps);
        project(own, model, *layer, part, x, qkv);
    });
    for (; layer != end; ++layer) {
        bool narrow = layer->qkv.parts[0].type != DELTIC_F32 && layer->qkv.parts[0].type != DELTIC_F16;
        kernels(pool).full_attention(pool, {qkv, layer->qkv_bias, nullptr, nullptr, starts, sequences, model.heads, dim,
                                            0, model.heads, 0, tokens, narrow, mixed});
        in_parts(pool, tokens, small, [&](deltic_pool *own, Tokens part) {
            finish(own, model, *layer, part, mixed, x);
            if (layer + 1 != end) project(own, model, layer[1], part, x, qkv);
        });
    }
}

}  // namespace
}  // namespace deltic

extern "C" int deltic_encode(deltic_pool *pool, const deltic_encoder *model, const int64_t *starts, int64_t sequences,
                             float *x) {
    if (starts[0]) return -2;
    for (int64_t i = 0; i < sequences; ++i)
        if (starts[i + 1] <= starts[i]) return -2;
    try {
        deltic::encode(pool, *model, starts, sequences, x);
        return 0;
    } catch (const std::bad_alloc &) {
        return -1;
    }
}
