// Drawing one of the best tokens: filters and keyed noise as deltic/ops/ref.py and deltic/ops/noise.py have them.
#include <algorithm>
#include <cmath>
#include <cstdint>

#include "deltic.h"
#include "noise.hpp"

namespace {

// One row's candidates: logits, best first, and ids.
struct Row {
    const float *values;
    const int64_t *ids;
    int64_t count;
    double temperature;

    double score(int64_t rank) const { return double(values[rank]) / temperature; }

    // log of the sum of exp(score) over the best `few`
    double log_sum(int64_t few) const {
        double sum = 0;
        for (int64_t rank = 0; rank < few; ++rank) sum += std::exp(score(rank) - score(0));
        return score(0) + std::log(sum);
    }
};

// The id drawn, or -1 if tokens that are no candidates might have been kept.
int64_t draw(const Row &row, bool all, int64_t top_k, double top_p, double min_p, double log_total, uint64_t key) {
    int64_t few = top_k > 0 ? std::min(top_k, row.count) : row.count, kept = 0, certain = 0, chosen = 0;
    double mass = top_k > 0 ? row.log_sum(few) : log_total, together = 0, best = -INFINITY;
    for (int64_t rank = 0; rank < few; ++rank) {
        double chance = std::exp(row.score(rank) - mass);
        together += chance;
        bool in_p = top_p >= 1 || rank == 0 || together - chance < top_p;
        if (!in_p || std::exp(row.score(rank) - row.score(0)) < min_p) continue;
        ++kept;
        double noisy = row.score(rank) + deltic::gumbel(key, uint64_t(row.ids[rank]));
        if (noisy > best) best = noisy, chosen = row.ids[rank];
    }
    // what ties with the last candidate may have been left out
    while (certain < row.count && row.values[certain] > row.values[row.count - 1]) ++certain;
    return all || kept <= certain ? chosen : -1;
}

}  // namespace

extern "C" void deltic_draw(const float *values, const int64_t *ids, int64_t rows, int64_t count, int64_t width,
                            const float *temperatures, const int64_t *top_k, const float *top_p, const float *min_p,
                            const double *log_totals, const int64_t *keys, int64_t *tokens) {
    for (int64_t r = 0; r < rows; ++r) {
        Row row{values + r * count, ids + r * count, count, std::max(double(temperatures[r]), 1e-9)};
        bool greedy = temperatures[r] == 0;
        tokens[r] = greedy ? row.ids[0]
                           : draw(row, count >= width, top_k[r], top_p[r], min_p[r], log_totals[r], uint64_t(keys[r]));
    }
}
