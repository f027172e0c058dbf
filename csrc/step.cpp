// The forward pass of a step: embedding, layers, LM head.
#include <cmath>
#include <cstring>

#include "layers.hpp"
#include "levels.hpp"
#include "low_rank.hpp"
#include "matrix.hpp"
#include "pool.hpp"

namespace deltic {
namespace {

// Scratch slots of a step. Its kernels use other slots.
constexpr int kNumbers = 23;
enum { kResidual = 24, kNormed, kDelta, kProj, kMixed, kCosines, kSines, kLast };

// RoPE tables [tokens, rotary_dim]; the second half of a row repeats the first half.
void rotary(deltic_pool *pool, const deltic_model &model, const deltic_batch &batch, float *cosines, float *sines) {
    int64_t half = model.rotary_dim / 2, tokens = batch.tokens;
    parallel(pool, (tokens + 15) / 16, [&](int64_t piece, int) {
        for (int64_t token = piece * 16; token < tokens && token < piece * 16 + 16; ++token)
            for (int64_t i = 0; i < half; ++i) {
                float angle = float(batch.positions[model.axes[i] * tokens + token]) * model.frequencies[i];
                float *cosine = cosines + token * 2 * half + i, *sine = sines + token * 2 * half + i;
                cosine[0] = cosine[half] = float(std::cos(double(angle))) * model.attention_factor;
                sine[0] = sine[half] = float(std::sin(double(angle))) * model.attention_factor;
            }
    });
}

// Copies the rows `index` to consecutive rows of `to`, which may be `rows`, because the index ascends.
void gather(const float *rows, float *to, int64_t width, const int64_t *index, int64_t count) {
    for (int64_t i = 0; i < count; ++i)
        std::memmove(to + i * width, rows + index[i] * width, size_t(width) * sizeof(float));
}

// Adds bias [width] to each row of `rows` [tokens, width].
void add_bias(deltic_pool *pool, float *rows, const float *bias, int64_t tokens, int64_t width) {
    parallel(pool, (tokens + 15) / 16, [&](int64_t piece, int) {
        for (int64_t token = piece * 16; token < tokens && token < piece * 16 + 16; ++token)
            for (int64_t i = 0; i < width; ++i) rows[token * width + i] += bias[i];
    });
}

// Returns the adapter numbers [logits] of the logit tokens; null if the batch has no adapters.
const int64_t *wanted_adapters(deltic_pool *pool, const deltic_batch &batch) {
    if (!batch.adapters) return nullptr;
    auto *numbers = scratch_of<int64_t>(pool, kNumbers, batch.logits);
    for (int64_t i = 0; i < batch.logits; ++i) numbers[i] = batch.adapter[batch.logit_tokens[i]];
    return numbers;
}

struct Step {
    deltic_pool *pool;
    const deltic_model &model;
    const deltic_batch &batch;
    float *residual, *normed, *delta, *cosines, *sines;

    // Runs the mixer of a layer without its output projection. Returns [tokens, columns of that projection].
    float *mix(const deltic_layer &layer, const Adapters *adapters) const {
        const deltic_weight &in = layer.gdn ? layer.gdn->in_proj : layer.attention->qkv;
        const deltic_weight &out = layer.gdn ? layer.gdn->out_proj : layer.attention->o_proj;
        float *proj = scratch_of<float>(pool, kProj, batch.tokens * rows_of(in));
        float *mixed = scratch_of<float>(pool, kMixed, batch.tokens * out.parts[0].columns);
        linear(pool, normed, batch.tokens, in, proj, rows_of(in));
        add_low_ranks(pool, adapters, DELTIC_IN, normed, model.hidden, proj, rows_of(in), batch.tokens);
        if (layer.attention && layer.attention->bias)
            add_bias(pool, proj, layer.attention->bias, batch.tokens, rows_of(in));
        if (layer.gdn)
            kernels(pool).gdn(pool, *layer.gdn, *layer.states, batch, proj, mixed);
        else
            kernels(pool).attention(pool, *layer.attention, *layer.kv, batch, cosines, sines, proj, mixed);
        return mixed;
    }

    // Runs one layer. select: drops all but the logit tokens after the mixer. Returns the number of tokens left.
    int64_t run(const deltic_layer &layer, bool first, bool select) const {
        const deltic_weight &out = layer.gdn ? layer.gdn->out_proj : layer.attention->o_proj;
        int64_t tokens = batch.tokens, hidden = model.hidden;
        Adapters own{batch.adapter_list, batch.adapter, &layer - model.layer};
        const Adapters *adapters = batch.adapters ? &own : nullptr;
        kernels(pool).add_norm(pool, residual, first ? nullptr : delta, layer.input_norm, residual, normed, tokens,
                               hidden, model.eps);
        float *mixed = mix(layer, adapters);
        if (select) {
            tokens = batch.logits;
            gather(mixed, mixed, out.parts[0].columns, batch.logit_tokens, tokens);
            gather(residual, residual, hidden, batch.logit_tokens, tokens);
            own.numbers = wanted_adapters(pool, batch);
        }
        linear(pool, mixed, tokens, out, delta, hidden);
        add_low_ranks(pool, adapters, DELTIC_OUT, mixed, out.parts[0].columns, delta, hidden, tokens);
        kernels(pool).add_norm(pool, residual, delta, layer.post_norm, residual, normed, tokens, hidden, model.eps);
        if (layer.moe) moe(pool, normed, tokens, *layer.moe, delta, adapters);
        else mlp(pool, normed, tokens, layer.gate_up, layer.down, delta, adapters);
        return tokens;
    }
};

}  // namespace

void linear(deltic_pool *pool, const float *x, int64_t tokens, const deltic_weight &weight, float *y, int64_t stride) {
    kernels(pool).linear(pool, x, tokens, weight, y, stride);
}

void linear_many(deltic_pool *pool, const Product *products, int64_t count) {
    kernels(pool).linear_many(pool, products, count);
}

void mlp(deltic_pool *pool, const float *x, int64_t tokens, const deltic_weight &gate_up, const deltic_weight &down,
         float *y, const Adapters *adapters) {
    int64_t both = rows_of(gate_up), width = both / 2;
    float *wide = scratch_of<float>(pool, 4, tokens * both), *gated = scratch_of<float>(pool, 5, tokens * width);
    linear(pool, x, tokens, gate_up, wide, both);
    add_low_ranks(pool, adapters, DELTIC_GATE_UP, x, gate_up.parts[0].columns, wide, both, tokens);
    kernels(pool).silu_mul(pool, wide, gated, tokens, width);
    linear(pool, gated, tokens, down, y, rows_of(down));
    add_low_ranks(pool, adapters, DELTIC_DOWN, gated, width, y, rows_of(down), tokens);
}

void store_kv(deltic_pool *pool, const deltic_attention_layer &layer, const deltic_weight *weight, const deltic_kv &kv,
              const deltic_batch &batch, const float *cosines, const float *sines, const float *x) {
    if (weight) {
        float *proj = scratch_of<float>(pool, 4, batch.tokens * rows_of(*weight));
        linear(pool, x, batch.tokens, *weight, proj, rows_of(*weight));
        x = proj;
    }
    kernels(pool).store_kv(pool, layer, kv, batch, cosines, sines, x);
}

void store_kv(deltic_pool *pool, const deltic_model &model, const deltic_weight &kv, const deltic_batch &batch,
              const float *input) {
    const deltic_layer &layer = model.layer[0];
    int64_t tokens = batch.tokens, hidden = model.hidden;
    float *residual = scratch_of<float>(pool, kResidual, tokens * hidden);
    float *normed = scratch_of<float>(pool, kNormed, tokens * hidden);
    float *cosines = scratch_of<float>(pool, kCosines, tokens * model.rotary_dim);
    float *sines = scratch_of<float>(pool, kSines, tokens * model.rotary_dim);
    rotary(pool, model, batch, cosines, sines);
    kernels(pool).add_norm(pool, input, nullptr, layer.input_norm, residual, normed, tokens, hidden, model.eps);
    store_kv(pool, *layer.attention, &kv, *layer.kv, batch, cosines, sines, normed);
}

void forward(deltic_pool *pool, const deltic_model &model, const deltic_batch &batch, const float *input,
             float *final_hidden, float *logits) {
    int64_t tokens = batch.tokens, hidden = model.hidden;
    float *row[7];
    for (int slot = kResidual; slot <= kDelta; ++slot)
        row[slot - kResidual] = scratch_of<float>(pool, slot, tokens * hidden);
    for (int slot = kCosines; slot <= kSines; ++slot)
        row[slot - kResidual] = scratch_of<float>(pool, slot, tokens * model.rotary_dim);
    Step step{pool, model, batch, row[0], row[1], row[2], row[5], row[6]};
    rotary(pool, model, batch, step.cosines, step.sines);
    parallel(pool, (tokens + 15) / 16, [&](int64_t piece, int) {
        int64_t begin = piece * 16, end = begin + 16 < tokens ? begin + 16 : tokens;
        float *to = step.residual + begin * hidden;
        if (input) std::memcpy(to, input + begin * hidden, size_t((end - begin) * hidden) * sizeof(float));
        else deltic_unpack_rows(&model.embedding, batch.ids + begin, end - begin, to);
    });
    if (!input)
        for (int64_t index = 0; index < batch.given; ++index)
            std::memcpy(step.residual + batch.given_tokens[index] * hidden, batch.given_rows + index * hidden,
                        size_t(hidden) * sizeof(float));
    for (int64_t index = 0; index < model.layers; ++index)
        tokens = step.run(model.layer[index], index == 0, index + 1 == model.layers && !final_hidden);
    float *last = scratch_of<float>(pool, kLast, batch.logits * hidden), *normed = final_hidden ? final_hidden : last;
    kernels(pool).add_norm(pool, step.residual, step.delta, model.norm, step.residual, normed, tokens, hidden,
                           model.eps);
    if (final_hidden) gather(final_hidden, last, hidden, batch.logit_tokens, batch.logits);
    linear(pool, last, batch.logits, model.head, logits, rows_of(model.head));
    if (!batch.adapters) return;
    const int64_t *numbers = wanted_adapters(pool, batch);
    LowRankSum sum(pool);
    for (int64_t i = 0; i < batch.logits; ++i)
        if (numbers[i] >= 0)
            sum.add(batch.adapter_list[numbers[i]]->head, last + i * hidden, logits + i * rows_of(model.head));
    sum.run();
}

}  // namespace deltic
