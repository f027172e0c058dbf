// The C interface over the kernels of a pool's level: no exception leaves it.
#include <new>

#include "check.hpp"
#include "expert_store.hpp"
#include "layers.hpp"
#include "levels.hpp"
#include "matrix.hpp"
#include "pool.hpp"

namespace {

// Status of a call that may run out of memory, or of files to read. sound: whether its batch is.
template <typename Call> int guarded(Call &&call, bool sound = true) {
    if (!sound) return -2;
    try {
        call();
        return 0;
    } catch (const std::bad_alloc &) {
        return -1;
    } catch (const deltic::Unread &) {
        return -3;
    }
}

}  // namespace

extern "C" {

int deltic_linear(deltic_pool *pool, const float *x, int64_t tokens, const deltic_weight *weight, float *y) {
    return guarded([&] { deltic::linear(pool, x, tokens, *weight, y, deltic::rows_of(*weight)); });
}

int deltic_gdn(deltic_pool *pool, const deltic_gdn_layer *layer, const deltic_states *states, const deltic_batch *batch,
               const float *proj, float *out) {
    return guarded([&] { deltic::kernels(pool).gdn(pool, *layer, *states, *batch, proj, out); },
                   deltic::is_sound(*batch) && deltic::fits(*batch, *states));
}

int deltic_attention(deltic_pool *pool, const deltic_attention_layer *layer, const deltic_kv *kv,
                     const deltic_batch *batch, const float *cosines, const float *sines, const float *proj,
                     float *out) {
    return guarded([&] { deltic::kernels(pool).attention(pool, *layer, *kv, *batch, cosines, sines, proj, out); },
                   deltic::is_sound(*batch) && deltic::fits(*batch, *kv) && deltic::stores_within(*batch, *kv));
}

int deltic_fold_ring(deltic_pool *pool, const deltic_gdn_layer *layer, const deltic_states *states, int64_t count,
                     int64_t source, int64_t ring, int64_t base, int64_t done, int64_t target) {
    return guarded([&] {
        deltic::kernels(pool).fold_ring(pool, *layer, states, count, source, ring, base, done, target);
    }, deltic::fits(*states, source, ring, base, done, target));
}

int deltic_store_kv(deltic_pool *pool, const deltic_attention_layer *layer, const deltic_weight *weight,
                    const deltic_kv *kv, const deltic_batch *batch, const float *cosines, const float *sines,
                    const float *x) {
    return guarded([&] { deltic::store_kv(pool, *layer, weight, *kv, *batch, cosines, sines, x); },
                   deltic::stores_within(*batch, *kv));
}

void deltic_add_norm(deltic_pool *pool, const float *residual, const float *delta, const float *scale, float *total,
                     float *normed, int64_t tokens, int64_t width, float eps) {
    deltic::kernels(pool).add_norm(pool, residual, delta, scale, total, normed, tokens, width, eps);
}

int deltic_mlp(deltic_pool *pool, const float *x, int64_t tokens, const deltic_weight *gate_up,
               const deltic_weight *down, float *y) {
    return guarded([&] { deltic::mlp(pool, x, tokens, *gate_up, *down, y); });
}

int deltic_moe(deltic_pool *pool, const float *x, int64_t tokens, const deltic_moe_layer *layer, float *y) {
    return guarded([&] { deltic::moe(pool, x, tokens, *layer, y); });
}

int deltic_adjust(deltic_pool *pool, float *logits, int64_t width, const float *repetition, const float *offset) {
    return guarded([&] { deltic::kernels(pool).adjust(pool, logits, width, repetition, offset); });
}

int deltic_top(deltic_pool *pool, const float *logits, int64_t rows, int64_t width, int64_t count,
               const float *temperatures, float *values, int64_t *ids, double *log_totals, uint8_t *healthy) {
    return guarded([&] {
        deltic::kernels(pool).top(pool, logits, rows, width, count, temperatures, values, ids, log_totals, healthy);
    });
}

int deltic_draw(deltic_pool *pool, const float *logits, int64_t rows, int64_t width, int64_t count, const float *values,
                const int64_t *ids, const double *log_totals, const deltic_drawing *drawing, int64_t *tokens) {
    return guarded([&] {
        deltic::draw(pool, logits, rows, width, {count, values, ids, log_totals}, *drawing, tokens);
    });
}

int deltic_forward(deltic_pool *pool, const deltic_model *model, const deltic_batch *batch, float *final_hidden,
                   float *logits) {
    return guarded([&] { deltic::forward(pool, *model, *batch, nullptr, final_hidden, logits); },
                   deltic::fits(*batch, *model));
}

int deltic_mtp_follow(deltic_pool *pool, const deltic_mtp *head, const deltic_batch *batch, const float *hidden,
                       float *slots) {
    return guarded([&] { deltic::follow(pool, *head, *batch, hidden, slots); }, deltic::fits(*batch, head->model));
}

int deltic_mtp_draft(deltic_pool *pool, const deltic_mtp *head, const deltic_batch *batch,
                      const int64_t *counts, int64_t most, const float *slots, const deltic_drawing *drawing,
                      int64_t *tokens) {
    return guarded([&] { deltic::draft(pool, *head, *batch, counts, most, slots, *drawing, tokens); },
                   deltic::fits(*batch, head->model) && deltic::fits(*batch, *head->model.layer[0].kv, counts));
}
}
