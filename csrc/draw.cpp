// Draws a token for each row, with the filters of deltic/ops/reference.py and the keyed noise of deltic/ops/noise.py.
//
// The filters keep the first tokens of a row, best first. Each row tries its candidates first. If they may not
// suffice, the row is sorted further on its own, so that no row depends on another.
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <functional>
#include <vector>

#include "layers.hpp"
#include "levels.hpp"
#include "noise.hpp"
#include "pool.hpp"

namespace deltic {
namespace {

struct Filters {
    double temperature, top_p, min_p;
    int64_t top_k;  // maximum number of tokens
    uint64_t key;
    const int64_t *names;  // names of the tokens in the noise; null: their ids
};

// Iterates over the tokens of a row, best first, as long as the filters keep them.
struct Walk {
    const Filters &filters;
    double log_mass;  // log of the sum of exp(score) over the top_k best; read if top_p < 1
    double first = 0, together = 0, loudest = -INFINITY;
    int64_t taken = 0, chosen = 0;

    double score(float logit) const { return double(logit) / filters.temperature; }

    // False if this token, and thus every later one, is not kept.
    bool take(float logit, int64_t id) {
        double own = score(logit);
        if (!taken) first = own, chosen = id;
        if (taken == filters.top_k || std::exp(own - first) < filters.min_p) return false;
        if (filters.top_p < 1) {
            if (taken && together >= filters.top_p) return false;
            together += std::exp(own - log_mass);
        }
        double noisy = own + gumbel(filters.key, uint64_t(filters.names ? filters.names[id] : id));
        if (noisy > loudest) loudest = noisy, chosen = id;
        ++taken;
        return true;
    }
};

// log of the sum of exp(score) over `count` tokens. high: a large score among them.
template <typename Score> double log_sum(int64_t count, double high, Score &&score) {
    double sum = 0;
    for (int64_t i = 0; i < count; ++i) sum += std::exp(score(i) - high);
    return high + std::log(sum);
}

// Draws among the candidates of a row. False if other tokens may be kept or count for the probability mass.
bool draw_near(const float *values, const int64_t *ids, int64_t count, int64_t width, const Filters &filters,
               double log_total, int64_t *token) {
    int64_t certain = count;
    if (count < width)  // tokens tied with the last candidate may be missing
        for (certain = 0; values[certain] > values[count - 1];) ++certain;
    Walk walk{filters, log_total};
    if (filters.top_p < 1 && filters.top_k < width) {
        if (filters.top_k > count) return false;
        walk.log_mass = log_sum(filters.top_k, walk.score(values[0]), [&](int64_t i) { return walk.score(values[i]); });
    }
    int64_t rank = 0;
    while (rank < certain && walk.take(values[rank], ids[rank])) ++rank;
    *token = walk.chosen;
    return rank < certain || certain == width || rank == filters.top_k;
}

// Encodes a token as one word. A larger logit gives a larger word; of equal logits, the lower id does. (NaN gets an
// arbitrary rank.)
uint64_t word_of(float logit, int64_t id) {
    uint32_t bits = std::bit_cast<uint32_t>(logit + 0.0f);  // -0 is 0
    bits = bits >> 31 ? ~bits : bits | 0x80000000u;
    return uint64_t(bits) << 32 | uint32_t(~uint32_t(id));
}
int64_t id_of(uint64_t word) { return int64_t(uint32_t(~uint32_t(word))); }
float logit_of(uint64_t word) {
    uint32_t bits = uint32_t(word >> 32);
    return std::bit_cast<float>(bits >> 31 ? bits & 0x7fffffffu : ~bits);
}

// Draws among all tokens of a row. words [width]: working memory.
int64_t draw_far(const float *logits, int64_t width, const Filters &filters, double log_total, uint64_t *words) {
    for (int64_t id = 0; id < width; ++id) words[id] = word_of(logits[id], id);
    uint64_t *end = words + filters.top_k;
    auto order = std::greater<uint64_t>();
    Walk walk{filters, log_total};
    if (end < words + width) {
        std::nth_element(words, end, words + width, order);
        if (filters.top_p < 1) {
            double high = walk.score(logit_of(*std::max_element(words, end)));
            walk.log_mass = log_sum(filters.top_k, high, [&](int64_t i) { return walk.score(logit_of(words[i])); });
        }
    }
    // sorts about as many tokens as the filters keep
    for (int64_t some = 1024; words < end; some *= 4) {
        uint64_t *stop = words + std::min<int64_t>(some, end - words);
        if (stop < end) std::nth_element(words, stop, end, order);
        std::sort(words, stop, order);
        for (; words < stop; ++words)
            if (!walk.take(logit_of(*words), id_of(*words))) return walk.chosen;
    }
    return walk.chosen;
}

}  // namespace

void draw(deltic_pool *pool, const float *logits, int64_t rows, int64_t width, const Candidates &best,
          const deltic_drawing &how, int64_t *tokens) {
    if (!how.filtered && best.count == 1)
        return kernels(pool).draw_any(pool, logits, rows, width, how.temperatures, how.keys, best.values, best.ids,
                                      how.tokens, tokens);
    std::vector<int64_t> far;
    auto filters_of = [&](int64_t row) {
        int64_t top_k = how.top_k[row] > 0 && how.top_k[row] < width ? how.top_k[row] : width;
        return Filters{std::max(how.temperatures[row], 1e-9f), how.top_p[row], how.min_p[row], top_k,
                       uint64_t(how.keys[row]), how.tokens};
    };
    for (int64_t row = 0; row < rows; ++row) {
        const float *values = best.values + row * best.count;
        const int64_t *ids = best.ids + row * best.count;
        tokens[row] = ids[0];
        if (how.temperatures[row] == 0) continue;
        if (how.top_k[row] <= 0 && how.top_p[row] >= 1 && how.min_p[row] <= 0)
            kernels(pool).draw_any(pool, logits + row * width, 1, width, how.temperatures + row, how.keys + row, values,
                                   ids, how.tokens, tokens + row);
        else if (!draw_near(values, ids, best.count, width, filters_of(row), best.log_totals[row], tokens + row))
            far.push_back(row);
    }
    if (far.empty()) return;
    uint64_t *words = scratch_of<uint64_t>(pool, 4, pool_threads(pool) * width);
    parallel(pool, int64_t(far.size()), [&](int64_t piece, int thread) {
        int64_t row = far[size_t(piece)];
        tokens[row] = draw_far(logits + row * width, width, filters_of(row), best.log_totals[row],
                               words + thread * width);
    });
}

}  // namespace deltic
