// Whether a batch stays within what it points into: whoever made it, no memory but the stores' is touched.
#include <algorithm>

#include "check.hpp"

namespace deltic {
namespace {

constexpr int64_t kPage = DELTIC_PAGE, kReplay = DELTIC_RING;

bool within(int64_t value, int64_t end) { return value >= 0 && value < end; }

bool all_within(const int64_t *values, int64_t count, int64_t end) {
    return std::all_of(values, values + count, [&](int64_t value) { return within(value, end); });
}

int64_t chunk_of(const deltic_batch &batch, int64_t row) { return batch.starts[row + 1] - batch.starts[row]; }

bool slots_fit(const deltic_batch &batch, int64_t row, const deltic_states &states) {
    int64_t done = batch.done[row], source = batch.source[row];
    if (!within(batch.target[row], states.slots)) return false;
    if (!states.keys) return !done || within(source, states.slots);
    int64_t base = batch.base[row];
    if (base < 0 || base > done || done - base > kReplay || (base && !within(source, states.slots))) return false;
    if (batch.append[row] && (chunk_of(batch, row) > kReplay || source != batch.target[row])) return false;
    return (base == done && !batch.append[row]) || within(batch.ring[row], states.units);
}

bool emits_fit(const deltic_batch &batch, int64_t slots) {
    for (int64_t emit = 0; emit < batch.emits; ++emit) {
        int64_t row = batch.emit_row[emit];
        if (!within(row, batch.rows) || !within(batch.emit_slot[emit], slots)) return false;
        int64_t taken = batch.emit_length[emit] - batch.done[row];
        if (taken <= 0 || taken > chunk_of(batch, row)) return false;
    }
    return true;
}

}  // namespace

bool is_sound(const deltic_batch &batch) {
    if (batch.rows < 0 || batch.starts[0] || batch.starts[batch.rows] != batch.tokens) return false;
    for (int64_t row = 0; row < batch.rows; ++row)
        if (chunk_of(batch, row) <= 0 || batch.done[row] < 0) return false;
    return true;
}

bool fits(const deltic_batch &batch, const deltic_states &states) {
    for (int64_t row = 0; row < batch.rows; ++row)
        if (!slots_fit(batch, row, states)) return false;
    return emits_fit(batch, states.slots);
}

bool fits(const deltic_states &states, int64_t source, int64_t ring, int64_t base, int64_t done, int64_t target) {
    return within(source, states.slots) && within(target, states.slots) && base >= 0 && base <= done &&
           done - base <= kReplay && (base == done || within(ring, states.units));
}

bool fits(const deltic_batch &batch, const deltic_kv &kv, const int64_t *more) {
    for (int64_t row = 0; row < batch.rows; ++row) {
        int64_t tokens = batch.done[row] + chunk_of(batch, row) + (more ? std::max<int64_t>(more[row] - 1, 0) : 0);
        int64_t pages = (tokens + kPage - 1) / kPage;
        if (pages > batch.table || !all_within(batch.pages + row * batch.table, pages, kv.pages)) return false;
    }
    return true;
}

bool stores_within(const deltic_batch &batch, const deltic_kv &kv) {
    return all_within(batch.store, batch.tokens, kv.pages * kPage);
}

bool fits(const deltic_batch &batch, const deltic_model &model) {
    if (!is_sound(batch) || !all_within(batch.ids, batch.tokens, model.embedding.rows)) return false;
    if (!all_within(batch.logit_tokens, batch.logits, batch.tokens)) return false;
    if (!all_within(batch.given_tokens, batch.given, batch.tokens)) return false;
    for (int64_t token = 0; batch.adapters && token < batch.tokens; ++token)
        if (batch.adapter[token] != -1 && !within(batch.adapter[token], batch.adapters)) return false;
    const deltic_states *states = nullptr;
    const deltic_kv *kv = nullptr;
    // the smallest stores count, if they differ at all
    for (const deltic_layer *layer = model.layer; layer < model.layer + model.layers; ++layer) {
        if (layer->gdn && (!states || layer->states->slots < states->slots)) states = layer->states;
        if (layer->attention && (!kv || layer->kv->pages < kv->pages)) kv = layer->kv;
    }
    return (!states || fits(batch, *states)) && (!kv || (fits(batch, *kv) && stores_within(batch, *kv)));
}

}  // namespace deltic
