// A MoE layer: routing, products grouped by expert, and their sum.
//
// A row is a token and one of its experts. Rows are grouped by expert, the shared expert last. So an expert's weights
// are read once for all its tokens, and all experts are one parallel job. If some experts are not in memory, the
// resident experts are computed first, then the others as they arrive. A row's numbers do not depend on its place.
// Experts of other devices are left out. The sums of all devices are added in one order (deltic/ops/slices.py).
#include <algorithm>
#include <cmath>
#include <optional>

#include "expert_store.hpp"
#include "layers.hpp"
#include "levels.hpp"
#include "low_rank.hpp"
#include "matrix.hpp"
#include "pool.hpp"

namespace deltic {
namespace {

// Scratch slots. Lower slots belong to the functions called here.
enum {
    kLogits = 6, kChosen, kShares, kPlaces, kTokens, kProducts, kWide, kGated, kOut, kStarts, kRows, kOrder, kNext,
    kGuess, kGuessed, kGuessShares
};

constexpr int64_t kTogether = 4096; // rows that are computed at a time; bounds the scratch memory
constexpr int64_t kPredicted = 16;  // the next layer's experts are predicted in steps of up to this many tokens

// The routing of all tokens. chosen, shares, places [tokens, per_token]. chosen: expert, counted from the first one on
// this device; -1 if it is not on this device. places: index of the row after grouping by expert. tokens: token of each
// grouped row. rows [own]: number of rows of each expert. order: experts that have rows. starts: first grouped row of
// each expert in `order`, then the end of the last one.
struct Routes {
    int64_t *chosen, *places, *tokens, *rows, *order, *starts;
    float *shares;
};

float sigmoid(float x) { return 1.0f / (1.0f + std::exp(-x)); }

// Selects the experts of one token, best first. Overwrites the logits. NaN logits also select experts; the first share is
// then NaN.
void choose(float *logits, const deltic_moe_layer &layer, int64_t *chosen, float *shares) {
    int64_t experts = layer.experts;
    float most = *std::max_element(logits, logits + experts), sum = 0, total = 0;
    for (int64_t i = 0; i < experts; ++i) sum += logits[i] = std::exp(logits[i] - most);
    for (int64_t i = 0; i < experts; ++i) logits[i] /= sum;
    for (int64_t k = 0; k < layer.per_token; ++k) {
        int64_t best = std::max_element(logits, logits + experts) - logits;
        chosen[k] = best;
        shares[k] = logits[best];
        total += logits[best];
        logits[best] = -1;
    }
    if (layer.normalised)
        for (int64_t k = 0; k < layer.per_token; ++k) shares[k] /= total;
}

// Selects the experts of every token: chosen, shares [tokens, per_token]. Overwrites the logits.
void choose_all(deltic_pool *pool, const deltic_moe_layer &layer, float *logits, int64_t tokens, int64_t *chosen,
                float *shares) {
    int64_t width = rows_of(layer.router);
    parallel(pool, (tokens + 7) / 8, [&](int64_t piece, int) {
        for (int64_t token = piece * 8; token < tokens && token < piece * 8 + 8; ++token)
            choose(logits + token * width, layer, chosen + token * layer.per_token, shares + token * layer.per_token);
    });
}

// Selects the experts of all tokens and counts the rows of each expert.
Routes route(deltic_pool *pool, const deltic_moe_layer &layer, float *logits, int64_t tokens) {
    int64_t rows = tokens * layer.per_token;
    auto numbers = [&](int slot, int64_t count) { return scratch_of<int64_t>(pool, slot, count); };
    Routes routes{numbers(kChosen, rows), numbers(kPlaces, rows), numbers(kTokens, rows),
                  numbers(kRows, layer.own), numbers(kOrder, layer.own), numbers(kStarts, layer.own + 1),
                  scratch_of<float>(pool, kShares, rows)};
    choose_all(pool, layer, logits, tokens, routes.chosen, routes.shares);
    std::fill_n(routes.rows, layer.own, 0);
    for (int64_t row = 0; row < rows; ++row) {
        int64_t &expert = routes.chosen[row];
        expert -= layer.first;
        if (expert < 0 || expert >= layer.own) expert = -1;
        else ++routes.rows[expert];
    }
    return routes;
}

// Groups the rows by expert. The order of the experts is that of `order`, which has `passed` of them.
void put_together(deltic_pool *pool, const deltic_moe_layer &layer, const Routes &routes, int64_t passed,
                  int64_t rows) {
    auto *next = scratch_of<int64_t>(pool, kNext, layer.own);
    int64_t start = 0;
    for (int64_t place = 0; place < passed; ++place) {
        next[routes.order[place]] = routes.starts[place] = start;
        start += routes.rows[routes.order[place]];
    }
    routes.starts[passed] = start;
    for (int64_t row = 0; row < rows; ++row) {
        if (routes.chosen[row] < 0) continue;
        routes.places[row] = next[routes.chosen[row]]++;
        routes.tokens[routes.places[row]] = row / layer.per_token;
    }
}

// Starts to read the experts that the next layer's router would select for this layer's input.
void predict(deltic_pool *pool, Visit &visit, const deltic_moe_layer &next, const float *x, int64_t tokens) {
    int64_t rows = tokens * next.per_token, width = rows_of(next.router);
    float *logits = scratch_of<float>(pool, kGuess, tokens * width);
    float *shares = scratch_of<float>(pool, kGuessShares, rows);
    auto *chosen = scratch_of<int64_t>(pool, kGuessed, rows);
    linear(pool, x, tokens, next.router, logits, width);
    choose_all(pool, next, logits, tokens, chosen, shares);
    visit.predict(next.stored, chosen, rows);
}

// Returns the slice of an expert. ends: of all slices, ascending.
int64_t slice_of(const int64_t *ends, int64_t expert) {
    int64_t slice = 0;
    while (ends[slice] <= expert) ++slice;
    return slice;
}

// Sums the outputs of each token's experts to y [tokens, hidden]. out: outputs of all rows, then those of the shared
// expert's slices [slices, tokens, hidden].
void add_up(deltic_pool *pool, const deltic_moe_layer &layer, const Routes &routes, const float *logits,
            const float *out, int64_t tokens, int64_t hidden, float *y) {
    constexpr int64_t kColumns = 256;  // columns that are added up at a time; the slices' sums then stay in the L1 cache
    const float *shared = layer.shared ? out + tokens * layer.per_token * hidden : nullptr;
    int64_t ends[DELTIC_SLICES], slices = layer.slices, pieces = (hidden + kColumns - 1) / kColumns;
    find_ends(0, layer.own, 1, slices, ends);
    parallel(pool, tokens * pieces, [&](int64_t piece, int) {
        int64_t token = piece / pieces, first = piece % pieces * kColumns, count = std::min(hidden - first, kColumns);
        float sums[DELTIC_SLICES][kColumns];
        for (int64_t slice = 0; slice < slices; ++slice) std::fill_n(sums[slice], count, 0.0f);
        for (int64_t k = token * layer.per_token; k < (token + 1) * layer.per_token; ++k) {
            if (routes.chosen[k] < 0) continue;
            const float *from = out + routes.places[k] * hidden + first;
            float share = routes.shares[k], *sum = sums[slice_of(ends, routes.chosen[k])];
            for (int64_t i = 0; i < count; ++i) sum[i] += share * from[i];
        }
        float gate = shared ? sigmoid(logits[token * (layer.experts + 1) + layer.experts]) : 0;
        for (int64_t slice = 0; shared && slice < slices; ++slice) {
            const float *from = shared + (slice * tokens + token) * hidden + first;
            for (int64_t i = 0; i < count; ++i) sums[slice][i] += gate * from[i];
        }
        for (int64_t step = 1; step < slices; step *= 2)
            for (int64_t slice = 0; slice < slices; slice += 2 * step)
                for (int64_t i = 0; i < count; ++i) sums[slice][i] += sums[slice + step][i];
        std::copy_n(sums[0], count, y + token * hidden + first);
    });
}

}  // namespace

void moe(deltic_pool *pool, const float *x, int64_t tokens, const deltic_moe_layer &layer, float *y,
         const Adapters *adapters) {
    if (!tokens) return;
    int64_t width = rows_of(layer.router), hidden = layer.router.parts[0].columns, rows = tokens * layer.per_token;
    float *logits = scratch_of<float>(pool, kLogits, tokens * width);
    linear(pool, x, tokens, layer.router, logits, width);
    add_low_ranks(pool, adapters, DELTIC_ROUTER, x, hidden, logits, width, tokens);
    Routes routes = route(pool, layer, logits, tokens);
    std::optional<Visit> visit;
    int64_t passed = 0;
    if (layer.store) passed = visit.emplace(layer.store, layer.stored, routes.rows, tokens, routes.order).count();
    else
        for (int64_t expert = 0; expert < layer.own; ++expert)
            if (routes.rows[expert]) routes.order[passed++] = expert;
    put_together(pool, layer, routes, passed, rows);
    if (layer.store && layer.next && tokens <= kPredicted) predict(pool, *visit, *layer.next, x, tokens);

    const deltic_expert &shared = layer.expert[layer.own];
    int64_t both = layer.store ? 2 * visit->inner() : passed ? rows_of(layer.expert[0].gate_up) : 0;
    int64_t shared_both = layer.shared ? rows_of(shared.gate_up) : 0;
    int64_t largest = layer.own ? *std::max_element(routes.rows, routes.rows + layer.own) : 0;
    int64_t most = std::min(rows, std::max(kTogether, largest));
    float *wide = scratch_of<float>(pool, kWide, most * both + tokens * shared_both);
    float *gated = scratch_of<float>(pool, kGated, (most * both + tokens * shared_both) / 2);
    float *out = scratch_of<float>(pool, kOut, (rows + (layer.shared ? layer.slices * tokens : 0)) * hidden);
    // in: products with gate_up; back: products with down
    auto *in = scratch_of<Product>(pool, kProducts, 2 * (layer.own + 1)), *back = in + layer.own + 1;
    int64_t count = 0;
    auto pass = [&](const deltic_expert &expert, const int64_t *whose, int64_t of, int64_t start, int64_t wide_start) {
        in[count] = {&expert.gate_up, x, whose, of, wide + wide_start, rows_of(expert.gate_up)};
        back[count++] = {&expert.down, gated + wide_start / 2, nullptr, of, out + start * hidden, hidden};
    };
    // adds adapter terms to the products of the experts begin .. end - 1 in `order`: with down or with gate_up
    auto adapt = [&](int64_t begin, int64_t end, bool down) {
        int64_t first = routes.starts[begin];
        LowRankSum sum(pool);
        for (int64_t place = begin; place < end; ++place)
            for (int64_t row = routes.starts[place]; row < routes.starts[place + 1]; ++row) {
                const deltic_adapter_layer *own = adapters->of(routes.tokens[row]);
                if (!own || !own->experts) continue;
                const deltic_low_ranks &ranks = own->experts[2 * (layer.first + routes.order[place]) + down];
                if (down) sum.add(ranks, gated + (row - first) * both / 2, out + row * hidden);
                else sum.add(ranks, x + routes.tokens[row] * hidden, wide + (row - first) * both);
            }
        sum.run();
    };
    // computes the experts begin .. end - 1 in `order` and, with_shared, the shared expert
    auto compute = [&](int64_t begin, int64_t end, bool with_shared) {
        int64_t first = routes.starts[begin];
        count = 0;
        for (int64_t place = begin; place < end; ++place) {
            int64_t start = routes.starts[place], expert = routes.order[place];
            pass(visit ? visit->expert(place) : layer.expert[expert], routes.tokens + start, routes.rows[expert], start,
                 (start - first) * both);
        }
        int64_t routed = count, many = routes.starts[end] - first;
        if (with_shared) {
            pass(shared, nullptr, tokens, rows, most * both);
            back[routed].apart = tokens * hidden;
        }
        linear_many(pool, in, count);
        if (adapters) adapt(begin, end, false);
        if (with_shared)
            add_low_ranks(pool, adapters, DELTIC_SHARED_GATE_UP, x, hidden, wide + most * both, shared_both, tokens);
        if (many) kernels(pool).silu_mul(pool, wide, gated, many, both / 2);
        if (with_shared)
            kernels(pool).silu_mul(pool, wide + most * both, gated + most * both / 2, tokens, shared_both / 2);
        // all products of one linear_many call must have the same columns
        bool alike = !with_shared || shared_both == both;
        linear_many(pool, back, alike ? count : routed);
        if (!alike) linear_many(pool, back + routed, count - routed);
        if (adapters) adapt(begin, end, true);
        // the shared expert's adapter term goes to its first slice
        if (with_shared)
            add_low_ranks(pool, adapters, DELTIC_SHARED_DOWN, gated + most * both / 2, shared_both / 2,
                          out + rows * hidden, hidden, tokens);
    };
    // each pass computes as many of the experts in memory as fit kTogether rows, but at least one
    int64_t done = 0, ready = visit ? visit->resident() : passed;
    bool with_shared = layer.shared;
    while (done < passed || with_shared) {
        int64_t end = done;
        while (end < ready && (end == done || routes.starts[end + 1] - routes.starts[done] <= kTogether)) ++end;
        if (end > done || with_shared) compute(done, end, with_shared);
        with_shared = false;
        done = end;
        if (visit) visit->done(done);
        if (done == ready && done < passed) ready = visit->wait();
    }
    add_up(pool, layer, routes, logits, out, tokens, hidden, y);
}

}  // namespace deltic
