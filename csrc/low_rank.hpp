// Low-rank adapter terms that are added to the products of a step.
//
// A token's terms use only its own numbers, in one order: dot products of its input with the rows of a, then sums over
// the rank for each row of b. So their bits depend neither on the other tokens nor on the number of threads.
#pragma once
#include <vector>

#include "deltic.h"

namespace deltic {

// The adapters of a step's tokens in one layer. numbers [tokens]: as in deltic_batch.
struct Adapters {
    const deltic_adapter *const *list;
    const int64_t *numbers;
    int64_t layer;

    // The adapter layer of a token; null if it has no adapter.
    const deltic_adapter_layer *of(int64_t token) const {
        return numbers[token] < 0 ? nullptr : list[numbers[token]]->layers + layer;
    }
};

// Collects the terms of one product, then adds them with all threads. Up to kRows consecutive rows with the same
// adapter read its numbers together.
class LowRankSum {
  public:
    explicit LowRankSum(deltic_pool *pool) : pool_(pool) {}

    // Adds the terms of one row. x: the product's input; y: its result.
    void add(const deltic_low_ranks &ranks, const float *x, float *y);

    // Uses scratch slot 22.
    void run();

  private:
    static constexpr int kRows = 4;  // maximum rows of a term
    struct Term {
        const deltic_low_rank *part;
        int64_t between, rows;
        const float *x[kRows];
        float *y[kRows];
    };
    struct Piece {
        int64_t term, first;
    };

    deltic_pool *pool_;
    const deltic_low_rank *open_ = nullptr;  // the adapter whose terms may take another row
    int64_t between_ = 0;
    std::vector<Term> terms_;
    std::vector<Piece> in_, out_;
};

// Adds the terms of a layer's product (DELTIC_IN ...) to y [tokens, stride]. x [tokens, columns]. adapters null: no
// terms.
void add_low_ranks(deltic_pool *pool, const Adapters *adapters, int product, const float *x, int64_t columns, float *y,
                   int64_t stride, int64_t tokens);

}  // namespace deltic
