// The MTP draft head: one more attention layer, which drafts the token that follows the next one.
#include <cstring>
#include <vector>

#include "layers.hpp"
#include "levels.hpp"
#include "matrix.hpp"
#include "pool.hpp"

namespace deltic {
namespace {

// Scratch slots of the draft head. Its callees use other slots.
enum { kEmbedded = 32, kBefore, kPart, kJoined, kInput, kHidden, kLogits };

void copy_row(float *to, const float *from, int64_t width) { std::memcpy(to, from, size_t(width) * sizeof(float)); }

// Returns the layer's input [tokens, hidden]. before: the hidden states before the tokens.
float *enter(deltic_pool *pool, const deltic_mtp &head, int64_t tokens, const int64_t *ids,
             const float *before) {
    const deltic_model &model = head.model;
    int64_t hidden = model.hidden;
    float *embedded = scratch_of<float>(pool, kEmbedded, tokens * hidden);
    float *part = scratch_of<float>(pool, kPart, tokens * hidden);
    float *joined = scratch_of<float>(pool, kJoined, tokens * 2 * hidden);
    float *input = scratch_of<float>(pool, kInput, tokens * hidden);
    deltic_unpack_rows(&model.embedding, ids, tokens, embedded);
    const float *from[] = {embedded, before}, *norms[] = {head.norm_embedding, head.norm_hidden};
    for (int half = 0; half < 2; ++half) {
        // `input` is a buffer for the sum, which is not needed
        kernels(pool).add_norm(pool, from[half], nullptr, norms[half], input, part, tokens, hidden, model.eps);
        for (int64_t token = 0; token < tokens; ++token)
            copy_row(joined + (2 * token + half) * hidden, part + token * hidden, hidden);
    }
    linear(pool, joined, tokens, head.fc, input, hidden);
    return input;
}

// The batch of a draft step: single-token rows, one position after the previous step.
struct Drafts {
    std::vector<int64_t> ids, positions, starts, done, pages, store, index;

    // Selects the rows of `batch` that draft more than `depth` tokens.
    Drafts(const deltic_batch &batch, const int64_t *counts, int64_t depth, const int64_t *tokens, int64_t stride) {
        for (int64_t row = 0; row < batch.rows; ++row)
            if (counts[row] > depth) index.push_back(row);
        for (int64_t row : index) {
            int64_t place = batch.done[row] + depth;
            const int64_t *table = batch.pages + row * batch.table;
            ids.push_back(depth ? tokens[row * stride + depth - 1] : batch.ids[row]);
            done.push_back(place);
            store.push_back(table[place / DELTIC_PAGE] * DELTIC_PAGE + place % DELTIC_PAGE);
            pages.insert(pages.end(), table, table + batch.table);
        }
        for (int axis = 0; axis < 3; ++axis)
            for (int64_t row : index) positions.push_back(batch.positions[axis * batch.rows + row] + depth);
        for (int64_t row = 0; row <= int64_t(index.size()); ++row) starts.push_back(row);
    }
    deltic_batch batch(int64_t table) const {
        deltic_batch batch{};
        batch.rows = batch.tokens = batch.logits = int64_t(index.size());
        batch.table = table;
        batch.ids = ids.data();
        batch.positions = positions.data();
        batch.starts = batch.logit_tokens = starts.data();
        batch.done = done.data();
        batch.pages = pages.data();
        batch.store = store.data();
        return batch;
    }
};

// Sampling parameters and sampled tokens of a draft step.
struct Drawn {
    static constexpr int64_t kCandidates = 64;
    std::vector<int64_t> tokens, top_k, keys;
    std::vector<float> temperatures, top_p, min_p;
    const int64_t *names;  // token ids of the logits; null: their indices
    bool filtered, greedy = true;

    Drawn(const std::vector<int64_t> &rows, const deltic_drawing &from, int64_t depth, int64_t most,
          const int64_t *names)
        : tokens(rows.size()), names(names), filtered(from.filtered) {
        for (int64_t row : rows) {
            greedy &= from.temperatures[row] == 0;
            temperatures.push_back(from.temperatures[row]);
            top_k.push_back(from.top_k[row]);
            top_p.push_back(from.top_p[row]);
            min_p.push_back(from.min_p[row]);
            keys.push_back(from.keys[row * most + depth]);
        }
    }
    void draw(deltic_pool *pool, const float *logits, int64_t vocabulary) {
        auto rows = int64_t(tokens.size());
        bool few = filtered && !greedy;
        int64_t count = few ? (vocabulary < kCandidates ? vocabulary : kCandidates) : 1;
        std::vector<float> values(size_t(rows * count), 0.0f);
        std::vector<int64_t> ids(size_t(rows * count), 0);
        std::vector<double> totals(size_t(rows), 0.0);
        std::vector<uint8_t> healthy(size_t(rows), 0);
        kernels(pool).top(pool, logits, rows, vocabulary, count, few ? temperatures.data() : nullptr, values.data(),
                      ids.data(), few ? totals.data() : nullptr, healthy.data());
        if (greedy)
            for (int64_t row = 0; row < rows; ++row) tokens[size_t(row)] = ids[size_t(row * count)];
        else
            deltic::draw(pool, logits, rows, vocabulary, {count, values.data(), ids.data(), totals.data()},
                         {temperatures.data(), top_k.data(), top_p.data(), min_p.data(), keys.data(), few, names},
                         tokens.data());
        if (names)
            for (int64_t &token : tokens) token = names[token];
    }
};

}  // namespace

void follow(deltic_pool *pool, const deltic_mtp &head, const deltic_batch &batch, const float *hidden,
            float *slots) {
    int64_t width = head.model.hidden;
    float *before = scratch_of<float>(pool, kBefore, batch.tokens * width);
    for (int64_t row = 0; row < batch.rows; ++row)
        for (int64_t token = batch.starts[row]; token < batch.starts[row + 1]; ++token) {
            const float *from = token > batch.starts[row] ? hidden + (token - 1) * width
                                                          : slots + batch.source[row] * width;
            if (token > batch.starts[row] || batch.done[row]) copy_row(before + token * width, from, width);
            else std::memset(before + token * width, 0, size_t(width) * sizeof(float));
        }
    float *input = enter(pool, head, batch.tokens, batch.ids, before);
    store_kv(pool, head.model, head.kv, batch, input);
    for (int64_t emit = 0; emit < batch.emits; ++emit) {
        int64_t row = batch.emit_row[emit];
        int64_t token = batch.starts[row] + batch.emit_length[emit] - batch.done[row] - 1;
        copy_row(slots + batch.emit_slot[emit] * width, hidden + token * width, width);
    }
    for (int64_t row = 0; row < batch.rows; ++row)
        if (!batch.append[row])
            copy_row(slots + batch.target[row] * width, hidden + (batch.starts[row + 1] - 1) * width, width);
}

void draft(deltic_pool *pool, const deltic_mtp &head, const deltic_batch &batch, const int64_t *counts,
           int64_t most, const float *slots, const deltic_drawing &drawing, int64_t *tokens) {
    int64_t width = head.model.hidden, vocabulary = rows_of(head.model.head);
    std::vector<float> state(size_t(batch.rows * width), 0.0f);
    for (int64_t row = 0; row < batch.rows; ++row)
        if (batch.done[row]) copy_row(&state[size_t(row * width)], slots + batch.source[row] * width, width);
    for (int64_t depth = 0; depth < most; ++depth) {
        Drafts drafts(batch, counts, depth, tokens, most);
        deltic_batch step = drafts.batch(batch.table);
        float *before = scratch_of<float>(pool, kBefore, step.rows * width);
        for (int64_t i = 0; i < step.rows; ++i)
            copy_row(before + i * width, &state[size_t(drafts.index[size_t(i)] * width)], width);
        float *hidden = scratch_of<float>(pool, kHidden, step.rows * width);
        float *logits = scratch_of<float>(pool, kLogits, step.rows * vocabulary);
        float *input = enter(pool, head, step.rows, step.ids, before);
        forward(pool, head.model, step, input, hidden, logits);
        Drawn drawn(drafts.index, drawing, depth, most, head.tokens);
        drawn.draw(pool, logits, vocabulary);
        for (int64_t i = 0; i < step.rows; ++i) {
            int64_t row = drafts.index[size_t(i)];
            tokens[row * most + depth] = drawn.tokens[size_t(i)];
            copy_row(&state[size_t(row * width)], hidden + i * width, width);
        }
    }
}

}  // namespace deltic
