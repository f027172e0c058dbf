// The blocks of a vision tower, in parts: norms before the products, rotary positions, GELU by tanh.
#include <new>

#include "layers.hpp"
#include "levels.hpp"
#include "matrix.hpp"
#include "pool.hpp"

namespace deltic {
namespace {

// Scratch slots. Products and attention use 0 to 3.
enum { kNormed = 24, kDelta, kWide };

// Patches per piece. Their activations stay in the caches from one product to the next.
constexpr int64_t kTogether = 192;

template <typename Body> void in_pieces(int64_t patches, Body &&body) {
    for (int64_t first = 0; first < patches; first += kTogether)
        body(first, patches - first < kTogether ? patches - first : kTogether);
}

void project(deltic_pool *pool, const deltic_encoder &tower, const deltic_encoder_layer &block, const float *x,
             int64_t patches, float *qkv) {
    int64_t hidden = tower.hidden;
    float *normed = scratch_of<float>(pool, kNormed, kTogether * hidden);
    const deltic_layer_norm &norm = block.attention_norm;
    in_pieces(patches, [&](int64_t first, int64_t count) {
        kernels(pool).layer_norm(pool, x + first * hidden, nullptr, nullptr, norm.scale, norm.shift, normed, count,
                                 hidden, tower.eps);
        linear(pool, normed, count, block.qkv, qkv + first * 3 * hidden, 3 * hidden);
    });
}

void finish(deltic_pool *pool, const deltic_encoder &tower, const deltic_encoder_layer &block, const float *mixed,
            int64_t patches, float *x) {
    int64_t hidden = tower.hidden, width = rows_of(block.up);
    float *normed = scratch_of<float>(pool, kNormed, kTogether * hidden);
    float *delta = scratch_of<float>(pool, kDelta, kTogether * hidden);
    float *wide = scratch_of<float>(pool, kWide, kTogether * width);
    const deltic_layer_norm &norm = block.output_norm;
    const Kernels &with = kernels(pool);
    in_pieces(patches, [&](int64_t first, int64_t count) {
        float *rows = x + first * hidden;
        linear(pool, mixed + first * hidden, count, block.out, delta, hidden);
        with.add_bias(pool, rows, delta, block.out_bias, count, hidden);
        with.layer_norm(pool, rows, nullptr, nullptr, norm.scale, norm.shift, normed, count, hidden, tower.eps);
        linear(pool, normed, count, block.up, wide, width);
        with.gelu(pool, wide, block.up_bias, count, width, true);
        linear(pool, wide, count, block.down, delta, hidden);
        with.add_bias(pool, rows, delta, block.down_bias, count, hidden);
    });
}

template <typename Body> int guarded(Body &&body) {
    try {
        body();
        return 0;
    } catch (const std::bad_alloc &) {
        return -1;
    }
}

}  // namespace
}  // namespace deltic

extern "C" int deltic_vision_project(deltic_pool *pool, const deltic_encoder *tower, int64_t block, const float *x,
                                     int64_t patches, float *qkv) {
    return deltic::guarded([&] { deltic::project(pool, *tower, tower->layer[block], x, patches, qkv); });
}

extern "C" int deltic_vision_attend(deltic_pool *pool, const deltic_encoder *tower, int64_t block, const float *qkv,
                                    int64_t patches, const deltic_vision_part *part, float *mixed) {
    int64_t starts[2] = {0, patches};
    return deltic::guarded([&] {
        deltic::kernels(pool).full_attention(
            pool, {qkv, tower->layer[block].qkv_bias, part->cosines, part->sines, starts, 1, tower->heads,
                   tower->hidden / tower->heads, part->first_head, part->end_head, part->first, part->end,
                   part->narrow != 0, mixed});
    });
}

extern "C" int deltic_vision_finish(deltic_pool *pool, const deltic_encoder *tower, int64_t block, const float *mixed,
                                    int64_t patches, float *x) {
    return deltic::guarded([&] { deltic::finish(pool, *tower, tower->layer[block], mixed, patches, x); });
}
