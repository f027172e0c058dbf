// Whether a batch stays within what it points into.
#pragma once
#include "deltic.h"

namespace deltic {

// Rows have tokens, and these are all.
bool is_sound(const deltic_batch &batch);

// The slots and ring units of all rows and emits; those of one that is folded.
bool fits(const deltic_batch &batch, const deltic_states &states);
bool fits(const deltic_states &states, int64_t source, int64_t ring, int64_t base, int64_t done, int64_t target);

// The pages that are read; more [rows]: for so many tokens that follow the cursor. The places that are written.
bool fits(const deltic_batch &batch, const deltic_kv &kv, const int64_t *more = nullptr);
bool stores_within(const deltic_batch &batch, const deltic_kv &kv);

// All of it, and the tokens' ids.
bool fits(const deltic_batch &batch, const deltic_model &model);

}  // namespace deltic
