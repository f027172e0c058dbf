// Experts of which a few lie in memory and the others in files.
#pragma once
#include <cstdint>
#include <exception>
#include <memory>
#include <vector>

#include "deltic.h"

namespace deltic {

// Weights could not be read; the store knows which and why.
struct Unread : std::exception {};

struct Fetch;

// A step's visit to one layer of a store. Experts come in an order of their own: first those that are in memory, then
// the others as they are read, which goes on while there is computing to be done.
class Visit {
  public:
    // rows [experts]: how many rows pass each; of so many tokens. order: becomes the experts that some row passes.
    Visit(deltic_expert_store *store, int64_t layer, const int64_t *rows, int64_t tokens, int64_t *order);
    // Gives up what has not come.
    ~Visit();
    Visit(const Visit &) = delete;

    int64_t count() const { return int64_t(weights_.size()); }
    int64_t resident() const { return resident_; }
    // Rows of an expert's gate.
    int64_t inner() const;
    // Waits for the next expert in the order; returns where those end that are there. Throws Unread.
    int64_t wait();
    const deltic_expert &expert(int64_t place) const { return weights_[size_t(place)]; }
    // Those before `end` have been computed with, and are not needed any more.
    void done(int64_t end);
    // Experts that another layer is likely to want soon: read as far as there is nothing better to do.
    void predict(int64_t layer, const int64_t *experts, int64_t count);

  private:
    void pump();
    bool there(int64_t place) const;
    void set(int64_t place, const uint8_t *at);

    deltic_expert_store *store_;
    int64_t layer_, resident_ = 0, issued_ = 0, done_ = 0;
    std::vector<std::unique_ptr<Fetch>> fetches_; // of the places from `resident_` on
    std::vector<deltic_expert> weights_;
};

}  // namespace deltic
