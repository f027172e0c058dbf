// A store of experts, some in memory, the others in files.
#pragma once
#include <cstdint>
#include <exception>
#include <memory>
#include <vector>

#include "deltic.h"

namespace deltic {

// Weights could not be read. The store records the file and the error.
struct Unread : std::exception {};

struct Fetch;

// A step's use of one layer of a store. It orders the experts: first the resident ones, then the others as they are
// read. Reads continue while the step computes.
class Visit {
  public:
    // rows [experts]: number of rows of each expert. tokens: of the step. order: receives the experts that have rows.
    Visit(deltic_expert_store *store, int64_t layer, const int64_t *rows, int64_t tokens, int64_t *order);
    // Cancels unfinished fetches.
    ~Visit();
    Visit(const Visit &) = delete;

    int64_t count() const { return int64_t(weights_.size()); }
    int64_t resident() const { return resident_; }
    // Rows of an expert's gate.
    int64_t inner() const;
    // Waits for the next expert in the order. Returns the end of the experts that are ready. Throws Unread.
    int64_t wait();
    const deltic_expert &expert(int64_t place) const { return weights_[size_t(place)]; }
    // The step has computed all experts before `end` and does not need them any more.
    void done(int64_t end);
    // Experts that another layer will probably need soon. They are read at low priority, into free stages.
    void predict(int64_t layer, const int64_t *experts, int64_t count);

  private:
    void pump();
    bool there(int64_t place) const;
    void set(int64_t place, const uint8_t *at);

    deltic_expert_store *store_;
    int64_t layer_, resident_ = 0, issued_ = 0, done_ = 0;
    std::vector<std::unique_ptr<Fetch>> fetches_; // of the experts from `resident_` on in the order
    std::vector<deltic_expert> weights_;
};

}  // namespace deltic
