// What the level's kernels are put together to.
#pragma once
#include "deltic.h"

namespace deltic {

// y [tokens, stride]: its leading columns become x [tokens, columns] weight^T. Scratch slots 0 to 3.
void linear(deltic_pool *pool, const float *x, int64_t tokens, const deltic_weight &weight, float *y, int64_t stride);

// Scratch slots 0 to 5.
void mlp(deltic_pool *pool, const float *x, int64_t tokens, const deltic_weight &gate_up, const deltic_weight &down,
         float *y);

// Scratch slots of all kernels, and from 24 on.
void forward(deltic_pool *pool, const deltic_model &model, const deltic_batch &batch, float *final_hidden,
             float *logits);

}  // namespace deltic
