// A mixture of experts: who passes which, products grouped by expert, and their sum.
//
// Rows of tokens are put together by expert: first those of expert 0, then those of expert 1 and so on, the shared one
// last. So an expert's weights are read once, whoever many tokens pass it, and all experts are one piece of work.
#include <algorithm>
#include <cmath>

#include "layers.hpp"
#include "levels.hpp"
#include "matrix.hpp"
#include "pool.hpp"

namespace deltic {
namespace {

// Scratch slots; what it calls has those before.
enum { kLogits = 6, kChosen, kShares, kPlaces, kTokens, kProducts, kWide, kGated, kOut, kStarts };

// Which experts tokens pass: chosen, shares, places [tokens, per_token]. A place is a row among those put together by
// expert; tokens [rows]: whose it is. starts [experts + 1]: first row of each expert.
struct Routes {
    int64_t *chosen, *places, *tokens, *starts;
    float *shares;
};

float sigmoid(float x) { return 1.0f / (1.0f + std::exp(-x)); }

// The experts of one token, best first; overwrites the logits. Numbers that are none choose someone too, and the first
// share is none then either.
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

Routes route(deltic_pool *pool, const deltic_moe_layer &layer, float *logits, int64_t tokens) {
    int64_t rows = tokens * layer.per_token, width = layer.experts + layer.shared;
    Routes routes{scratch_of<int64_t>(pool, kChosen, rows), scratch_of<int64_t>(pool, kPlaces, rows),
                  scratch_of<int64_t>(pool, kTokens, rows), scratch_of<int64_t>(pool, kStarts, layer.experts + 1),
                  scratch_of<float>(pool, kShares, rows)};
    parallel(pool, (tokens + 7) / 8, [&](int64_t piece, int) {
        for (int64_t token = piece * 8; token < tokens && token < piece * 8 + 8; ++token)
            choose(logits + token * width, layer, routes.chosen + token * layer.per_token,
                   routes.shares + token * layer.per_token);
    });
    std::fill_n(routes.starts, layer.experts + 1, 0);
    for (int64_t row = 0; row < rows; ++row) ++routes.starts[routes.chosen[row] + 1];
    for (int64_t expert = 0; expert < layer.experts; ++expert) routes.starts[expert + 1] += routes.starts[expert];
    // each expert's start moves on to its end, that is to the next one's start, and is put back
    for (int64_t row = 0; row < rows; ++row) {
        routes.places[row] = routes.starts[routes.chosen[row]]++;
        routes.tokens[routes.places[row]] = row / layer.per_token;
    }
    for (int64_t expert = layer.experts; expert > 0; --expert) routes.starts[expert] = routes.starts[expert - 1];
    routes.starts[0] = 0;
    return routes;
}

// The tokens' sums, [tokens, hidden]; out: what each row gave, those of the shared expert last.
void add_up(deltic_pool *pool, const deltic_moe_layer &layer, const Routes &routes, const float *logits,
            const float *out, int64_t tokens, int64_t hidden, float *y) {
    const float *shared = layer.shared ? out + tokens * layer.per_token * hidden : nullptr;
    parallel(pool, (tokens + 7) / 8, [&](int64_t piece, int) {
        for (int64_t token = piece * 8; token < tokens && token < piece * 8 + 8; ++token) {
            float *sum = y + token * hidden;
            std::fill_n(sum, hidden, 0.0f);
            for (int64_t k = token * layer.per_token; k < (token + 1) * layer.per_token; ++k) {
                const float *from = out + routes.places[k] * hidden;
                float share = routes.shares[k];
                for (int64_t i = 0; i < hidden; ++i) sum[i] += share * from[i];
            }
            if (!shared) continue;
            float gate = sigmoid(logits[token * (layer.experts + 1) + layer.experts]);
            for (int64_t i = 0; i < hidden; ++i) sum[i] += gate * shared[token * hidden + i];
        }
    });
}

}  // namespace

void moe(deltic_pool *pool, const float *x, int64_t tokens, const deltic_moe_layer &layer, float *y) {
    if (!tokens) return;
    int64_t width = rows_of(layer.router), hidden = layer.router.parts[0].columns, rows = tokens * layer.per_token;
    float *logits = scratch_of<float>(pool, kLogits, tokens * width);
    linear(pool, x, tokens, layer.router, logits, width);
    Routes routes = route(pool, layer, logits, tokens);

    int64_t both = rows_of(layer.expert[0].gate_up), all = rows + (layer.shared ? tokens : 0), count = 0;
    const deltic_expert &shared = layer.expert[layer.experts];
    int64_t shared_both = layer.shared ? rows_of(shared.gate_up) : 0;
    float *wide = scratch_of<float>(pool, kWide, rows * both + tokens * shared_both);
    float *gated = scratch_of<float>(pool, kGated, (rows * both + tokens * shared_both) / 2);
    float *out = scratch_of<float>(pool, kOut, all * hidden);
    // first into the experts, then out of them
    auto *in = scratch_of<Product>(pool, kProducts, 2 * (layer.experts + 1)), *back = in + layer.experts + 1;
    auto pass = [&](const deltic_expert &expert, const int64_t *whose, int64_t of, float *up, const float *down_from,
                    float *to) {
        in[count] = {&expert.gate_up, x, whose, of, up, rows_of(expert.gate_up)};
        back[count++] = {&expert.down, down_from, nullptr, of, to, hidden};
    };
    for (int64_t expert = 0; expert < layer.experts; ++expert) {
        int64_t start = routes.starts[expert], of = routes.starts[expert + 1] - start;
        if (of)
            pass(layer.expert[expert], routes.tokens + start, of, wide + start * both, gated + start * both / 2,
                 out + start * hidden);
    }
    int64_t routed = count;
    if (layer.shared)
        pass(shared, nullptr, tokens, wide + rows * both, gated + rows * both / 2, out + rows * hidden);

    linear_many(pool, in, count);
    kernels(pool).silu_mul(pool, wide, gated, rows, both / 2);
    if (layer.shared)
        kernels(pool).silu_mul(pool, wide + rows * both, gated + rows * both / 2, tokens, shared_both / 2);
    // the columns of a group of products are the same
    bool alike = !layer.shared || shared_both == both;
    linear_many(pool, back, alike ? count : routed);
    if (!alike) linear_many(pool, back + routed, count - routed);
    add_up(pool, layer, routes, logits, out, tokens, hidden, y);
}

}  // namespace deltic
