// The terms of adapters, which are added to the products of a step.
//
// A token's terms are built from its own numbers in one order: dots of its input with the rows of a, then sums over the
// rank for each row of b. So its bits depend neither on the other tokens nor on the number of threads.
#pragma once
#include <vector>

#include "deltic.h"

namespace deltic {

// The adapters of a step's tokens in one layer. numbers [tokens]: as in deltic_batch.
struct Adapters {
    const deltic_adapter *const *list;
    const int64_t *numbers;
    int64_t layer;

    // Of a token; null: it has no adapter.
    const deltic_adapter_layer *of(int64_t token) const {
        return numbers[token] < 0 ? nullptr : list[numbers[token]]->layers + layer;
    }
};

// Collects the terms of one product, then adds them with all threads. Neighbouring rows with the same adapter share its
// numbers.
class LowRankSum {
  public:
    explicit LowRankSum(deltic_pool *pool) : pool_(pool) {}

    // Of one row: x is the product's input, y its result.
    void add(const deltic_low_ranks &ranks, const float *x, float *y);

    // Scratch slot 22.
    void run();

  private:
    static constexpr int kRows = 4;  // that read the numbers of an adapter together
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
    const deltic_low_rank *open_ = nullptr;  // whose terms take another row
    int64_t between_ = 0;
    std::vector<Term> terms_;
    std::vector<Piece> in_, out_;
};

// Adds the terms of a layer's product (DELTIC_IN ...) to y [tokens, stride]; x [tokens, columns]. adapters null: none.
void add_low_ranks(deltic_pool *pool, const Adapters *adapters, int product, const float *x, int64_t columns, float *y,
                   int64_t stride, int64_t tokens);

}  // namespace deltic
