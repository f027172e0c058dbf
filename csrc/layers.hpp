// Functions built from the kernels of the SIMD level: products, layers, a whole step, drafting and sampling.
#pragma once
#include "deltic.h"
#include "levels.hpp"

namespace deltic {

struct Adapters;  // low_rank.hpp

// Writes x [tokens, columns] weight^T to the first columns of y [tokens, stride]. Uses scratch slots 0 to 3.
void linear(deltic_pool *pool, const float *x, int64_t tokens, const deltic_weight &weight, float *y, int64_t stride);

// `Kernels::linear_fine` is the same for encoders, whose normed states have a few columns of outliers. With 8-bit
// weights, the activations of each 32 columns have their own scale and, if `again`, large ones stay float32.

// Computes independent products whose inputs have the same width. Uses scratch slots 0 to 5.
void linear_many(deltic_pool *pool, const Product *products, int64_t count);

// Uses scratch slots 0 to 5; with adapters also 22.
void mlp(deltic_pool *pool, const float *x, int64_t tokens, const deltic_weight &gate_up, const deltic_weight &down,
         float *y, const Adapters *adapters = nullptr);

// Uses scratch slots 0 to 21; with adapters also 22. Throws Unread.
void moe(deltic_pool *pool, const float *x, int64_t tokens, const deltic_moe_layer &layer, float *y,
         const Adapters *adapters = nullptr);

// Stores keys and values as deltic_store_kv does. Uses scratch slots 0 to 4.
void store_kv(deltic_pool *pool, const deltic_attention_layer &layer, const deltic_weight *weight, const deltic_kv &kv,
              const deltic_batch &batch, const float *cosines, const float *sines, const float *x);

// Runs a step. input [tokens, hidden]: the input of the first layer; null: the tokens' embeddings. Uses the scratch
// slots of all kernels, and 23 to 31.
void forward(deltic_pool *pool, const deltic_model &model, const deltic_batch &batch, const float *input,
             float *final_hidden, float *logits);

// Stores the keys and values of a model's only layer for its input [tokens, hidden]. Scratch slots as in `forward`.
void store_kv(deltic_pool *pool, const deltic_model &model, const deltic_weight &kv, const deltic_batch &batch,
              const float *input);

// See deltic_mtp_follow and deltic_mtp_draft. Scratch slots as in `forward`, and 32 to 38.
void follow(deltic_pool *pool, const deltic_mtp &head, const deltic_batch &batch, const float *hidden,
            float *slots);
void draft(deltic_pool *pool, const deltic_mtp &head, const deltic_batch &batch, const int64_t *counts,
           int64_t most, const float *slots, const deltic_drawing &drawing, int64_t *tokens);

// The best tokens of each row, as returned by deltic_top: values, ids [rows, count], log_totals [rows].
struct Candidates {
    int64_t count;
    const float *values;
    const int64_t *ids;
    const double *log_totals;
};

// See deltic_draw. Uses scratch slots 0 and 4.
void draw(deltic_pool *pool, const float *logits, int64_t rows, int64_t width, const Candidates &best,
          const deltic_drawing &how, int64_t *tokens);

}  // namespace deltic
