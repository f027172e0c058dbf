// A whole encoder: layers that see all of a sequence, norms behind the sums.
#include <new>

#include "layers.hpp"
#include "levels.hpp"
#include "matrix.hpp"
#include "pool.hpp"

namespace deltic {
namespace {

// Scratch slots; products and attention have 0 to 4.
enum { kQkv = 24, kMixed, kDelta, kWide };

// Tokens whose activations stay in the caches from one product to the next.
constexpr int64_t kTogether = 192;

struct Tokens {
    int64_t first, count;
};

template <typename Body> void in_pieces(int64_t tokens, Body &&body) {
    for (int64_t first = 0; first < tokens; first += kTogether)
        body(Tokens{first, tokens - first < kTogether ? tokens - first : kTogether});
}

void encode(deltic_pool *pool, const deltic_encoder &model, const int64_t *starts, int64_t sequences, float *x) {
    int64_t tokens = starts[sequences], hidden = model.hidden, dim = hidden / model.heads;
    float *qkv = scratch_of<float>(pool, kQkv, tokens * 3 * hidden);
    float *mixed = scratch_of<float>(pool, kMixed, tokens * hidden);
    float *delta = scratch_of<float>(pool, kDelta, kTogether * hidden);
    const Kernels &with = kernels(pool);
    with.layer_norm(pool, x, nullptr, nullptr, model.norm.scale, model.norm.shift, x, tokens, hidden, model.eps);
    for (int64_t number = 0; number < model.layers; ++number) {
        const deltic_encoder_layer &layer = model.layer[number];
        int64_t width = rows_of(layer.up);
        float *wide = scratch_of<float>(pool, kWide, kTogether * width);
        in_pieces(tokens, [&](Tokens part) {
            with.linear_fine(pool, x + part.first * hidden, part.count, layer.qkv, qkv + part.first * 3 * hidden,
                             3 * hidden, true);
        });
        with.full_attention(pool, {qkv, layer.qkv_bias, nullptr, nullptr, starts, sequences, model.heads, dim, 0,
                                   model.heads, 0, tokens, false, mixed});
        in_pieces(tokens, [&](Tokens part) {
            float *rows = x + part.first * hidden;
            auto add_norm = [&](const float *bias, const deltic_layer_norm &norm) {
                with.layer_norm(pool, rows, delta, bias, norm.scale, norm.shift, rows, part.count, hidden, model.eps);
            };
            with.linear_fine(pool, mixed + part.first * hidden, part.count, layer.out, delta, hidden, false);
            add_norm(layer.out_bias, layer.attention_norm);
            with.linear_fine(pool, rows, part.count, layer.up, wide, width, true);
            with.gelu(pool, wide, layer.up_bias, part.count, width, false);
            with.linear_fine(pool, wide, part.count, layer.down, delta, hidden, false);
            add_norm(layer.down_bias, layer.output_norm);
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
