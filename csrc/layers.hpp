// What the level's kernels are put together to.
#pragma once
#include "deltic.h"
#include "levels.hpp"

namespace deltic {

struct Adapters;  // low_rank.hpp

// y [tokens, stride]: its leading columns become x [tokens, columns] weight^T. Scratch slots 0 to 3.
void linear(deltic_pool *pool, const float *x, int64_t tokens, const deltic_weight &weight, float *y, int64_t stride);

// The same (`Kernels::linear_fine`), but where weights have eight bits the activations of each 32 columns have a scale
// of their own and, if `again`, large ones stay float32: for encoders, whose normed states have a few columns of outliers.

// Products that have nothing to do with each other, but for the width of their inputs. Scratch slots 0 to 5.
void linear_many(deltic_pool *pool, const Product *products, int64_t count);

// Scratch slots 0 to 5, and with adapters 22.
void mlp(deltic_pool *pool, const float *x, int64_t tokens, const deltic_weight &gate_up, const deltic_weight &down,
         float *y, const Adapters *adapters = nullptr);

// Scratch slots 0 to 21, and with adapters 22. Throws Unread.
void moe(deltic_pool *pool, const float *x, int64_t tokens, const deltic_moe_layer &layer, float *y,
         const Adapters *adapters = nullptr);

// Scratch slots 0 to 4.
void store_kv(deltic_pool *pool, const deltic_attention_layer &layer, const deltic_weight *weight, const deltic_kv &kv,
              const deltic_batch &batch, const float *cosines, const float *sines, const float *x);

// Scratch slots of all kernels, and 23 to 31. input [tokens, hidden]: of the first layer; null: the tokens' embeddings.
void forward(deltic_pool *pool, const deltic_model &model, const deltic_batch &batch, const float *input,
             float *final_hidden, float *logits);

// Stores the keys and values that a model's only layer makes of its input [tokens, hidden]. Slots as above.
void store_kv(deltic_pool *pool, const deltic_model &model, const deltic_weight &kv, const deltic_batch &batch,
              const float *input);

// See deltic_mtp_follow and deltic_mtp_draft. Slots as above, and 32 to 38.
void follow(deltic_pool *pool, const deltic_mtp &head, const deltic_batch &batch, const float *hidden,
            float *slots);
void draft(deltic_pool *pool, const deltic_mtp &head, const deltic_batch &batch, const int64_t *counts,
           int64_t most, const float *slots, const deltic_drawing &drawing, int64_t *tokens);

// The best tokens of each row, as deltic_top found them: values, ids [rows, count], log_totals [rows].
struct Candidates {
    int64_t count;
    const float *values;
    const int64_t *ids;
    const double *log_totals;
};

// See deltic_draw. Scratch slots 0 and 4.
void draw(deltic_pool *pool, const float *logits, int64_t rows, int64_t width, const Candidates &best,
          const deltic_drawing &how, int64_t *tokens);

}  // namespace deltic
