#include "low_rank.hpp"

#include <algorithm>

#include "levels.hpp"
#include "pool.hpp"

namespace deltic {
namespace {

constexpr int kBetween = 22;       // scratch slot
constexpr int64_t kNumbers = 1 << 15;  // numbers of an adapter that justify a piece of work for a thread

}  // namespace

void LowRankSum::add(const deltic_low_ranks &ranks, const float *x, float *y) {
    if (!ranks.count) return;
    if (open_ != ranks.parts || terms_.back().rows == kRows) {
        open_ = ranks.parts;
        for (int64_t i = 0; i < ranks.count; ++i) {
            const deltic_low_rank &part = ranks.parts[i];
            terms_.push_back({&part, between_, 0, {}, {}});
            between_ += kRows * part.rank;
        }
    }
    for (auto term = terms_.end() - ranks.count; term != terms_.end(); ++term) {
        term->x[term->rows] = x;
        term->y[term->rows++] = y;
    }
}

void LowRankSum::run() {
    if (terms_.empty()) return;
    float *between = scratch_of<float>(pool_, kBetween, between_);
    auto rows_at_once = [](const deltic_low_rank &part) { return std::max<int64_t>(kNumbers / part.columns, 1); };
    auto panels_at_once = [](const deltic_low_rank &part) {
        return std::max<int64_t>(kNumbers / (part.rank * DELTIC_PANEL) / 4 * 4, 4);
    };
    for (int64_t i = 0; i < int64_t(terms_.size()); ++i) {
        const deltic_low_rank &part = *terms_[i].part;
        for (int64_t row = 0; row < part.rank; row += rows_at_once(part)) in_.push_back({i, row});
        int64_t panels = (part.rows + DELTIC_PANEL - 1) / DELTIC_PANEL;
        for (int64_t panel = 0; panel < panels; panel += panels_at_once(part)) out_.push_back({i, panel});
    }
    const Kernels &level = kernels(pool_);
    parallel(pool_, int64_t(in_.size()), [&](int64_t piece, int) {
        const Term &term = terms_[in_[piece].term];
        int64_t first = in_[piece].first, count = std::min(rows_at_once(*term.part), term.part->rank - first);
        level.low_rank_in(*term.part, first, count, term.x, term.rows, between + term.between);
    });
    parallel(pool_, int64_t(out_.size()), [&](int64_t piece, int) {
        const Term &term = terms_[out_[piece].term];
        int64_t begin = out_[piece].first, panels = (term.part->rows + DELTIC_PANEL - 1) / DELTIC_PANEL;
        int64_t end = std::min(begin + panels_at_once(*term.part), panels);
        level.low_rank_out(*term.part, begin, end, between + term.between, term.rows, term.y);
    });
}

void add_low_ranks(deltic_pool *pool, const Adapters *adapters, int product, const float *x, int64_t columns, float *y,
                   int64_t stride, int64_t tokens) {
    if (!adapters) return;
    LowRankSum sum(pool);
    for (int64_t token = 0; token < tokens; ++token)
        if (const deltic_adapter_layer *layer = adapters->of(token))
            sum.add(layer->products[product], x + token * columns, y + token * stride);
    sum.run();
}

}  // namespace deltic
