// Runs every op of the kernels at a level on pseudo-random inputs, and writes what comes out:
//
//   ops LEVEL FILE
//
// Compiled for two machines, or run at two levels, it must write the same bytes.
#include <initializer_list>

#include "inputs.hpp"

// Of the functions that kernels call, this is the one in which C libraries differ: now and then, by the last bit.
extern "C" float log1pf(float x) noexcept {
    volatile double wide = x;
    return float(std::log1p(wide));
}

namespace {

constexpr int64_t kAll = sizeof kTypes / sizeof *kTypes;

// ---- Products.

void products(deltic_pool *pool, const Output &output) {
    for (int64_t t = 0; t < kAll; ++t)
        for (int64_t columns : {512, 96, 33}) {
            const BlockType &kind = kTypes[t];
            if (columns % kind.weights) continue;
            int64_t rows = 37, most = 21;
            deltic_weight plain = weight(kind.type, rows, columns);
            const float *x = activations(most, columns);
            for (int64_t slices : {0, 8}) {
                if (slices && columns != 512) continue;
                plain.slices = slices, plain.runs = slices ? 2 : 1;
                for (int64_t tokens : {1, 2, 3, 4, 5, 6, 8, 12, 13, 21}) {
                    auto *y = array<float>(tokens * rows);
                    check(deltic_linear(pool, x, tokens, &plain, y));
                    output.floats("linear type " + std::to_string(kind.type) + " columns " + std::to_string(columns) +
                                  " slices " + std::to_string(slices) + " tokens " + std::to_string(tokens), y,
                                  tokens * rows);
                }
            }
        }
}

// Numbers that are not finite, in one token each; all are of that token alone.
void sick_tokens(deltic_pool *pool, const Output &output) {
    int64_t columns = 512, rows = 16, tokens = 5;
    for (int64_t type : {DELTIC_F32, DELTIC_BF16, DELTIC_Q8_0, DELTIC_Q4_K}) {
        deltic_weight plain = weight(type, rows, columns);
        float *x = activations(tokens, columns);
        x[70] = INFINITY, x[columns + 9] = NAN;
        for (int64_t i = 0; i < columns; ++i) x[2 * columns + i] *= 1e-36f;
        auto *y = array<float>(tokens * rows);
        check(deltic_linear(pool, x, tokens, &plain, y));
        output.floats("linear of sick tokens, type " + std::to_string(type), y, tokens * rows);
    }
}

deltic_expert expert(int64_t type, int64_t hidden, int64_t width) {
    return {weight(type, 2 * width, hidden), weight(type, hidden, width, 8)};
}

void feed_forwards(deltic_pool *pool, const Output &output) {
    int64_t hidden = 256, width = 512, tokens = 9;
    for (int64_t type : {DELTIC_BF16, DELTIC_Q4_K, DELTIC_Q8_0}) {
        deltic_expert dense = expert(type, hidden, width);
        const float *x = activations(tokens, hidden);
        auto *y = array<float>(tokens * hidden);
        check(deltic_mlp(pool, x, tokens, &dense.gate_up, &dense.down, y));
        output.floats("mlp of type " + std::to_string(type), y, tokens * hidden);
        auto *experts = array<deltic_expert>(7);
        for (int i = 0; i < 7; ++i) experts[i] = expert(type, hidden, 256);
        deltic_moe_layer layer{weight(DELTIC_F32, 7, hidden), experts, 6, 2, 0, 6, 8, 1, 1, nullptr, 0, nullptr};
        check(deltic_moe(pool, x, tokens, &layer, y));
        output.floats("moe of type " + std::to_string(type), y, tokens * hidden);
    }
    for (int64_t wide : {256, 83}) {
        const float *x = numbers(5 * wide, 0, 1), *delta = numbers(5 * wide, 0, 1), *scale = numbers(wide, 1, 0.5f);
        auto *total = array<float>(5 * wide), *normed = array<float>(5 * wide);
        deltic_add_norm(pool, x, delta, scale, total, normed, 5, wide, 1e-6f);
        output.floats("add_norm, the sum, width " + std::to_string(wide), total, 5 * wide);
        output.floats("add_norm, the norm, width " + std::to_string(wide), normed, 5 * wide);
    }
}

// ---- Packed matrices and their blocks.

void blocks(const Output &output) {
    int64_t rows = 19, columns = 512;
    const float *x = numbers(rows * columns, 0, 1);
    for (int64_t type : {DELTIC_Q4_0, DELTIC_Q4_1, DELTIC_Q5_0, DELTIC_Q5_1, DELTIC_Q8_0, DELTIC_Q4_K, DELTIC_Q5_K,
                         DELTIC_Q6_K}) {
        const BlockType &kind = type_of(type);
        int64_t bytes = rows * columns / kind.weights * kind.bytes;
        auto *made = array<uint8_t>(bytes);
        check(deltic_quantize(type, x, rows, columns, made));
        output.write("quantize to type " + std::to_string(type), made, bytes);
    }
    for (const BlockType &kind : kTypes) {
        deltic_matrix packed = matrix(kind.type, rows, columns);
        int64_t wanted[] = {18, 0, 7};
        auto *found = array<float>(3 * columns);
        deltic_unpack_rows(&packed, wanted, 3, found);
        output.floats("rows of type " + std::to_string(kind.type), found, 3 * columns);
    }
}

// ---- Sampling.

void sampling(deltic_pool *pool, const Output &output) {
    int64_t rows = 6, width = 3001;
    for (int64_t count : {1, 40}) {
        float *logits = numbers(rows * width, 0, 6);
        logits[2 * width + 5] = NAN;
        for (int64_t i = 0; i < width; ++i) logits[4 * width + i] = 1;
        const float *repetition = numbers(width, 1.5f, 0.5f), *offset = numbers(width, 0, 1);
        check(deltic_adjust(pool, logits, width, repetition, offset));
        output.floats("adjust, " + std::to_string(count), logits, rows * width);
        std::vector<float> temperatures{0, 1, 1, 0.7f, 1.3f, 2}, top_p{1, 1, 1, 0.9f, 1, 0.8f}, min_p(6);
        std::vector<int64_t> top_k{0, 0, 0, 20, 0, 0}, keys{1, 2, 3, 4, 5, 6};
        min_p[5] = count > 1 ? 0.02f : 0;
        auto *values = array<float>(rows * count);
        auto *ids = array<int64_t>(rows * count), *tokens = array<int64_t>(rows);
        auto *totals = array<double>(rows);
        auto *healthy = array<uint8_t>(rows);
        check(deltic_top(pool, logits, rows, width, count, temperatures.data(), values, ids, totals, healthy));
        std::string name = ", " + std::to_string(count);
        output.write("top, health" + name, healthy, rows);
        for (int64_t row = 0; row < rows; ++row)
            if (!healthy[row]) values[row * count] = logits[row * width] = 0, totals[row] = 0;
        output.floats("top, values" + name, values + 3 * count, count);
        output.write("top, ids" + name, ids + 3 * count, count * 8);
        output.write("top, totals" + name, totals + 3, 8);
        deltic_drawing drawing{temperatures.data(), top_k.data(), top_p.data(), min_p.data(), keys.data(), count > 1,
                               nullptr};
        for (int64_t key = 0; key < 20; ++key) {
            for (int64_t &each : keys) each += 1000;
            check(deltic_draw(pool, logits, rows, width, count, values, ids, totals, &drawing, tokens));
            tokens[2] = tokens[4] = 0;  // of rows that are not healthy
            output.write("draw " + std::to_string(key) + name, tokens, rows * 8);
        }
    }
}

// ---- Models.

constexpr int64_t kHidden = 256, kVocabulary = 300, kTable = 40, kRows = 3, kSlots = 6;
constexpr int64_t kKeyHeads = 2, kValueHeads = 4, kKeyDim = 32, kValueDim = 24, kKernel = 4;
constexpr int64_t kChannels = 2 * kKeyHeads * kKeyDim + kValueHeads * kValueDim, kValues = kValueHeads * kValueDim;
constexpr int64_t kHeads = 6, kKvHeads = 2, kDim = 64, kTurned = 32;

// One layer of each kind, dense or with experts, and their stores.
struct Model {
    deltic_gdn_layer gdn{};
    deltic_attention_layer attention{};
    deltic_states states{};
    deltic_kv kv{};
    deltic_layer layers[2]{};
    deltic_model model{};
    int64_t element;

    Model(int64_t weights, int64_t kept, int64_t cached, bool logs) : element(kept == DELTIC_F32 ? 4 : 2) {
        int64_t other = type_of(weights).weights == 256 ? int64_t(DELTIC_Q8_0) : weights;  // of any columns
        gdn = {weight(other, kChannels + kValues + 2 * kValueHeads, kHidden), weight(other, kHidden, kValues, 8),
               numbers(kChannels * kKernel, 0, 0.5f), numbers(kValueHeads, -0.5f, 0.25f), numbers(kValueHeads, 0, 1),
               numbers(kValueDim, 1, 0.125f), kKeyHeads, kValueHeads, kKeyDim, kValueDim, kKernel, 0, 1e-6f};
        states.recurrent = numbers(kSlots * kValueHeads * kKeyDim * kValueDim, 0, 1);
        states.conv = allocate(kSlots * kKernel * kChannels * element);
        states.places = kKernel, states.type = kept, states.slots = kSlots;
        if (logs) {
            states.units = kSlots;
            states.inputs = allocate(kSlots * DELTIC_RING * kChannels * element);
            states.keys = array<float>(kSlots * DELTIC_RING * kKeyHeads * kKeyDim);
            states.updates = array<float>(kSlots * DELTIC_RING * kValues);
            states.decays = array<float>(kSlots * DELTIC_RING * kValueHeads);
        }
        attention = {weight(weights, (2 * kHeads + 2 * kKvHeads) * kDim, kHidden),
                     weight(other, kHidden, kHeads * kDim, 8), numbers(kDim, 1, 0.125f), numbers(kDim, 1, 0.125f),
                     nullptr, kHeads, kKvHeads, kDim, kTurned, 1, 1e-6f};
        kv.keys = allocate(kRows * kTable * DELTIC_PAGE * kKvHeads * kDim * 4);
        kv.values = allocate(kRows * kTable * DELTIC_PAGE * kKvHeads * kDim * 4);
        kv.type = cached, kv.pages = kRows * kTable;
        layers[0].gdn = &gdn, layers[0].states = &states;
        layers[1].attention = &attention, layers[1].kv = &kv;
        for (deltic_layer &layer : layers) {
            layer.input_norm = numbers(kHidden, 1, 0.125f), layer.post_norm = numbers(kHidden, 1, 0.125f);
            layer.gate_up = weight(weights, 1024, kHidden), layer.down = weight(weights, kHidden, 512, 8);
        }
        model = {kHidden, 2, layers, matrix(DELTIC_F32, kVocabulary, kHidden), weight(other, kVocabulary, kHidden),
                 numbers(kHidden, 1, 0.125f), numbers(kTurned / 2, 0.3f, 0.3f),
                 array_of(std::vector<int64_t>(kTurned / 2)), kTurned, 1e-6f};
    }
    int64_t page_bytes() const {
        return kv.pages * DELTIC_PAGE * kKvHeads * kDim * (kv.type == DELTIC_F32 ? 4 : 2);
    }
};

// A batch with a chunk of each length, of sequences that are `done` tokens long.
struct Batch {
    std::vector<int64_t> ids, positions, starts{0}, done, pages, store, slots, wanted, zero;
    std::vector<uint8_t> append;
    std::vector<int64_t> emit_row, emit_length, emit_slot;
    deltic_batch batch{};

    Batch(const std::vector<int64_t> &before, const std::vector<int64_t> &lengths, bool logs) : done(before) {
        for (size_t row = 0; row < lengths.size(); ++row) {
            starts.push_back(starts.back() + lengths[row]);
            slots.push_back(int64_t(row));
            wanted.push_back(starts.back() - 1);
            append.push_back(logs && lengths[row] <= 4);
            for (int64_t page = 0; page < kTable; ++page) pages.push_back(page * kRows + int64_t(row));
            for (int64_t place = before[row]; place < before[row] + lengths[row]; ++place) {
                ids.push_back(below(kVocabulary));
                positions.push_back(place);
                store.push_back((place / DELTIC_PAGE * kRows + int64_t(row)) * DELTIC_PAGE + place % DELTIC_PAGE);
            }
        }
        int64_t tokens = starts.back();
        for (int axis = 1; axis < 3; ++axis)
            for (int64_t i = 0; i < tokens; ++i) positions.push_back(positions[size_t(i)]);
        if (lengths.back() > 20) {
            emit_row = {int64_t(lengths.size()) - 1};
            emit_length = {before.back() + 17}, emit_slot = {5};
        }
        batch.rows = int64_t(lengths.size()), batch.tokens = tokens, batch.logits = batch.rows, batch.table = kTable;
        batch.emits = int64_t(emit_row.size());
        batch.ids = ids.data(), batch.positions = positions.data(), batch.starts = starts.data();
        batch.done = done.data(), batch.pages = pages.data(), batch.store = store.data();
        batch.source = batch.target = batch.ring = slots.data();
        batch.base = done.data(), batch.append = append.data(), batch.logit_tokens = wanted.data();
        batch.emit_row = emit_row.data(), batch.emit_length = emit_length.data(), batch.emit_slot = emit_slot.data();
    }
    Batch(const Batch &) = delete;
};

void write_stores(const Model &m, const std::string &name, const Output &output) {
    output.floats(name + ", states", m.states.recurrent, kSlots * kValueHeads * kKeyDim * kValueDim);
    output.write(name + ", inputs", m.states.conv, kSlots * kKernel * kChannels * m.element);
    output.write(name + ", keys", m.kv.keys, m.page_bytes());
    output.write(name + ", values", m.kv.values, m.page_bytes());
}

// Whole steps: prompts, one token of each row, with and without delta logs; last a flush.
void steps(deltic_pool *pool, const std::string &name, int64_t weights, int64_t kept, int64_t cached, bool logs,
           const Output &output) {
    Model m(weights, kept, cached, logs);
    std::vector<int64_t> done{0, 0, 0};
    auto step = [&](std::vector<int64_t> lengths, const std::vector<int64_t> &base) {
        Batch made(done, lengths, logs);
        made.batch.base = base.data();
        auto *logits = array<float>(3 * kVocabulary), *hidden = array<float>(made.batch.tokens * kHidden);
        check(deltic_forward(pool, &m.model, &made.batch, hidden, logits));
        std::string step = name + ", step from " + std::to_string(done[2]);
        output.floats(step + ", logits", logits, 3 * kVocabulary);
        output.floats(step + ", hidden", hidden, made.batch.tokens * kHidden);
        for (size_t row = 0; row < 3; ++row) done[row] += lengths[row];
        return done;
    };
    step({7, 21, 560}, done);
    std::vector<int64_t> base = done;
    step({1, 1, 1}, base);
    step({1, 1, 3}, logs ? base : done);
    if (logs) {
        check(deltic_fold_ring(pool, &m.gdn, &m.states, 1, 2, 2, base[2], done[2], 4));
        check(deltic_fold_ring(pool, &m.gdn, &m.states, 1, 1, 1, base[1], done[1] - 1, 1));
    }
    write_stores(m, name, output);
}

// The mixers alone, and keys and values alone.
void mixers(deltic_pool *pool, int64_t cached, const Output &output) {
    Model m(DELTIC_Q8_0, DELTIC_BF16, cached, false);
    Batch made({0, 0, 0}, {1, 6, 40}, false);
    int64_t tokens = made.batch.tokens;
    const float *cosines = numbers(tokens * kTurned, 0, 1), *sines = numbers(tokens * kTurned, 0, 1);
    std::string name = "mixers, keys of type " + std::to_string(cached);
    auto *out = array<float>(tokens * kHeads * kDim);
    check(deltic_attention(pool, &m.attention, &m.kv, &made.batch, cosines, sines,
                           numbers(tokens * (2 * kHeads + 2 * kKvHeads) * kDim, 0, 1), out));
    output.floats(name + ", attention", out, tokens * kHeads * kDim);
    check(deltic_gdn(pool, &m.gdn, &m.states, &made.batch,
                     numbers(tokens * (kChannels + kValues + 2 * kValueHeads), 0, 1), out));
    output.floats(name + ", delta rule", out, tokens * kValues);
    deltic_weight kv = weight(DELTIC_Q6_K, 2 * kKvHeads * kDim, kHidden);
    check(deltic_store_kv(pool, &m.attention, &kv, &m.kv, &made.batch, cosines, sines, activations(tokens, kHidden)));
    write_stores(m, name, output);
}

void draft_head(deltic_pool *pool, const Output &output) {
    Model m(DELTIC_Q4_K, DELTIC_BF16, DELTIC_BF16, false);
    deltic_mtp head{};
    head.model = m.model, head.model.layer = &m.layers[1], head.model.layers = 1;
    head.fc = weight(DELTIC_Q8_0, kHidden, 2 * kHidden);
    head.kv = weight(DELTIC_Q8_0, 2 * kKvHeads * kDim, kHidden);
    head.norm_embedding = numbers(kHidden, 1, 0.125f), head.norm_hidden = numbers(kHidden, 1, 0.125f);
    Batch prompt({0, 0, 0}, {5, 9, 30}, false);
    float *slots = numbers(kSlots * kHidden, 0, 1);
    check(deltic_mtp_follow(pool, &head, &prompt.batch, numbers(prompt.batch.tokens * kHidden, 0, 1), slots));
    output.floats("drafts, hidden states", slots, kSlots * kHidden);
    Batch next({5, 9, 30}, {1, 1, 1}, false);
    int64_t counts[] = {4, 2, 4}, tokens[12] = {};
    std::vector<int64_t> top_k(12), keys;
    std::vector<float> temperatures(12, 0.8f), top_p(12, 1), min_p(12);
    for (int64_t key = 0; key < 12; ++key) keys.push_back(key);
    deltic_drawing drawing{temperatures.data(), top_k.data(), top_p.data(), min_p.data(), keys.data(), 0, nullptr};
    check(deltic_mtp_draft(pool, &head, &next.batch, counts, 4, slots, &drawing, tokens));
    output.write("drafts, tokens", tokens, sizeof tokens);
    write_stores(m, "drafts", output);
}

// ---- Encoders.

deltic_encoder encoder(int64_t type, int64_t hidden, int64_t heads, int64_t layers) {
    auto *made = array<deltic_encoder_layer>(layers);
    auto norm = [&] { return deltic_layer_norm{numbers(hidden, 1, 0.25f), numbers(hidden, 0, 0.25f)}; };
    for (int64_t i = 0; i < layers; ++i)
        made[i] = {weight(type, 3 * hidden, hidden), weight(type, hidden, hidden), weight(type, 2 * hidden, hidden),
                   weight(type, hidden, 2 * hidden), numbers(3 * hidden, 0, 0.1f), numbers(hidden, 0, 0.1f),
                   numbers(2 * hidden, 0, 0.1f), numbers(hidden, 0, 0.1f), norm(), norm()};
    return {hidden, heads, layers, made, norm(), 1e-6f};
}

void encoders(deltic_pool *pool, const Output &output) {
    int64_t starts[] = {0, 1, 20, 67};
    for (int64_t type : {DELTIC_F32, DELTIC_BF16, DELTIC_Q8_0})
        for (int64_t hidden : {256, 96}) {
            deltic_encoder model = encoder(type, hidden, 4, 2);
            float *x = activations(67, hidden);
            check(deltic_encode(pool, &model, starts, 3, x));
            std::string name = "encoder of type " + std::to_string(type) + ", width " + std::to_string(hidden);
            output.floats(name, x, 67 * hidden);
        }
}

void vision(deltic_pool *pool, const Output &output) {
    int64_t hidden = 144, heads = 2, patches = 500;
    deltic_encoder tower = encoder(DELTIC_F16, hidden, heads, 1);
    float *x = numbers(patches * hidden, 0, 1);
    auto *qkv = array<float>(patches * 3 * hidden), *mixed = array<float>(patches * hidden);
    check(deltic_vision_project(pool, &tower, 0, x, patches, qkv));
    output.floats("vision, qkv", qkv, patches * 3 * hidden);
    int64_t half = hidden / heads / 2;
    for (int64_t narrow : {0, 1}) {
        const float *cosines = numbers(patches * half, 0, 1), *sines = numbers(patches * half, 0, 1);
        deltic_vision_part part{cosines, sines, 0, heads, 0, patches, narrow};
        check(deltic_vision_attend(pool, &tower, 0, qkv, patches, &part, mixed));
        output.floats("vision, attention " + std::to_string(narrow), mixed, patches * hidden);
    }
    check(deltic_vision_finish(pool, &tower, 0, mixed, patches, x));
    output.floats("vision, block", x, patches * hidden);
}

// ---- Experts that the host computes for a GPU.

void cpu_experts(int level, const Output &output) {
    constexpr int64_t hidden = 200, size = 72, experts = 3, tokens = 5, most = 2;
    auto *weights = array<uint16_t>(experts * 3 * size * hidden), *input = array<uint16_t>(DELTIC_PAGE * hidden);
    make_row(type_of(DELTIC_BF16), experts * 3 * size * hidden, (uint8_t *)weights);
    make_row(type_of(DELTIC_BF16), DELTIC_PAGE * hidden, (uint8_t *)input);
    const void *layers[] = {weights};
    deltic_beside_model model{hidden, size, experts, 1, most, layers, nullptr};
    uint32_t *request = array<uint32_t>(3), *answer = array<uint32_t>(1);
    auto *counts = array<int32_t>(DELTIC_PAGE), *chosen = array<int32_t>(DELTIC_PAGE * most);
    auto *sums = array<float>(DELTIC_PAGE * hidden);
    for (int32_t i = 0; i < tokens; ++i) counts[i] = 1 + i % 2, chosen[2 * i] = i % 3, chosen[2 * i + 1] = (i + 1) % 3;
    deltic_mailbox box{request, answer, counts, chosen, numbers(DELTIC_PAGE * most, 0.5f, 0.5f),
                       numbers(DELTIC_PAGE, 1, 0.5f), input, sums};
    deltic_beside *made = deltic_beside_new(&model, &box, 2, level);
    if (!made) fail("no threads for experts");
    deltic_beside_wake(made);
    request[1] = 0, request[2] = uint32_t(tokens);
    __atomic_store_n(request, 1u, __ATOMIC_SEQ_CST);
    while (__atomic_load_n(answer, __ATOMIC_SEQ_CST) != 1) {}
    output.floats("experts for a GPU", sums, tokens * hidden);
    deltic_beside_free(made);
}

}  // namespace

int main(int count, char **arguments) {
    if (count < 3) fail("wanted: LEVEL FILE");
    int level = std::atoi(arguments[1]);
    deltic_pool *pool = deltic_pool_new(2, level);
    if (!pool) fail("this processor has no such level");
    Output output{std::fopen(arguments[2], "wb")};
    if (!output.file) fail("cannot write");
    products(pool, output);
    sick_tokens(pool, output);
    feed_forwards(pool, output);
    blocks(output);
    sampling(pool, output);
    for (int64_t cached : {DELTIC_F32, DELTIC_F16, DELTIC_BF16, DELTIC_INT4, DELTIC_INT8})
        mixers(pool, cached, output);
    steps(pool, "Q4_K", DELTIC_Q4_K, DELTIC_BF16, DELTIC_BF16, true, output);
    steps(pool, "F32", DELTIC_F32, DELTIC_F32, DELTIC_F32, false, output);
    steps(pool, "BF16", DELTIC_BF16, DELTIC_F16, DELTIC_F16, true, output);
    steps(pool, "int4", DELTIC_Q6_K, DELTIC_BF16, DELTIC_INT4, true, output);
    steps(pool, "int8", DELTIC_Q6_K, DELTIC_BF16, DELTIC_INT8, true, output);
    draft_head(pool, output);
    encoders(pool, output);
    vision(pool, output);
    cpu_experts(level, output);
    if (std::fclose(output.file)) fail("cannot write");
}
