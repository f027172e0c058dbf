// Host threads that compute offloaded experts, and feed-forwards of offloaded dense layers, for a GPU.
//
// Kernels write requests to memory that GPU and host share, and wait for the answers. No other host code takes part. One
// thread polls for requests. It and its pool's threads share the rows of the products. For a millisecond after the last
// request it polls without a pause, because the requests of a step come more often. Then it sleeps briefly between polls,
// because a launched step may wait for a long step before it. After a minute it sleeps until `wake` announces a step.
#include <algorithm>
#include <atomic>
#include <bit>
#include <chrono>
#include <cmath>
#include <condition_variable>
#include <limits>
#include <memory>
#include <mutex>
#include <new>
#include <thread>
#include <vector>

#include "levels.hpp"
#include "matrix.hpp"
#include "pause.hpp"
#include "pool.hpp"

namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::microseconds;

constexpr auto kAwake = microseconds(1000), kListens = microseconds(60'000'000);
constexpr auto kShortNap = microseconds(50), kLongNap = microseconds(1000);
constexpr int64_t kTokens = DELTIC_PAGE;
constexpr int64_t kRows = 8;  // rows of a matrix in one piece of work

// An expert that some token uses. first, count: its range in the list of all pairs of an expert and a token.
struct Passed {
    int64_t expert, first, count;
};

// A dense layer's feed-forward for a few tokens, with packed weights.
//
// Products of quantized matrices round their input to 8-bit integers. Here the input has about 16 bits, as on a GPU: it
// is multiplied as two tokens, its value in 8 bits and the remainder, and their products are added. The matrix is read
// once for both.
class PackedLayer {
  public:
    PackedLayer(const deltic_beside_model &model)
        : hidden_(model.hidden), size_(model.size), split_(2 * kTokens * std::max(hidden_, size_)),
          doubled_(2 * kTokens * std::max(hidden_, 2 * size_)), halves_(kTokens * 2 * size_), gated_(kTokens * size_),
          out_(kTokens * hidden_) {}

    // Computes the sums [tokens, hidden] of inputs x [tokens, hidden]. factors, shares: as in the mailbox, one per token.
    void compute(deltic_pool *pool, const deltic_expert &weights, const std::vector<float> &x, int64_t tokens,
                 const std::vector<float> &factors, const std::vector<float> &shares) {
        multiply(pool, weights.gate_up, x.data(), tokens, halves_.data());
        deltic::parallel(pool, tokens, [&](int64_t token, int) {
            const float *gate = halves_.data() + token * 2 * size_;
            deltic::kernels(pool).gate_rounded(gate, gate + size_, factors[size_t(token)], shares[size_t(token)], size_,
                                               gated_.data() + token * size_);
        });
        multiply(pool, weights.down, gated_.data(), tokens, out_.data());
    }
    const float *sums(int64_t token) const { return out_.data() + token * hidden_; }

  private:
    static constexpr int64_t kBlock = 256;  // columns that share a scale
    int64_t hidden_, size_;
    std::vector<float> split_, doubled_, halves_, gated_, out_;

    static bool is_plain(int64_t type) { return type == DELTIC_F32 || type == DELTIC_F16 || type == DELTIC_BF16; }

    // y [tokens, rows of the weight] = x weight^T.
    void multiply(deltic_pool *pool, const deltic_weight &weight, const float *x, int64_t tokens, float *y) {
        const int64_t columns = weight.parts[0].columns, stride = deltic::rows_of(weight);
        const auto linear = deltic::kernels(pool).linear;
        bool is_split = false;
        for (int64_t p = 0, row = 0; p < weight.count; row += weight.parts[p++].rows) {
            const deltic_weight part{1, {weight.parts[p]}};
            const int64_t rows = part.parts[0].rows;
            if (is_plain(part.parts[0].type)) {
                linear(pool, x, tokens, part, y + row, stride);
                continue;
            }
            if (!is_split) split(pool, x, columns, tokens);
            is_split = true;
            linear(pool, split_.data(), 2 * tokens, part, doubled_.data(), rows);
            deltic::parallel(pool, tokens, [&](int64_t token, int) {
                const float *most = doubled_.data() + 2 * token * rows, *rest = most + rows;
                for (int64_t i = 0; i < rows; ++i) y[token * stride + row + i] = most[i] + rest[i];
            });
        }
    }

    void split(deltic_pool *pool, const float *x, int64_t columns, int64_t tokens) {
        deltic::parallel(pool, tokens, [&](int64_t token, int) {
            for (int64_t first = 0; first < columns; first += kBlock)
                split_block(x + token * columns + first, std::min(kBlock, columns - first),
                            split_.data() + 2 * token * columns + first, columns);
        });
    }

    // most: the values as 8-bit integers times a scale. most + apart: the remainders.
    static void split_block(const float *x, int64_t count, float *most, int64_t apart) {
        float largest = 0;
        for (int64_t i = 0; i < count; ++i) largest = std::max(largest, std::fabs(x[i]));
        // a block stays as it is if its largest number is infinite, huge or almost zero
        const bool whole = largest < 1e30f && largest > 1e-30f;
        const float inverse = whole ? 127.0f / largest : 0.0f, scale = largest / 127.0f;
        for (int64_t i = 0; i < count; ++i) {
            // adding 1.5 * 2^23 rounds to an integer
            const float code = x[i] * inverse + 12582912.0f;
            most[i] = whole ? (code - 12582912.0f) * scale : x[i];
            most[apart + i] = x[i] - most[i];
        }
    }
};

}  // namespace

struct deltic_beside {
    deltic_beside_model model;
    deltic_mailbox mail;
    std::vector<const uint16_t *> weights;
    deltic_pool *pool = nullptr;
    std::thread listener;

    std::atomic<bool> closing{false}, asleep{false};
    std::atomic<uint32_t> wakes{0};
    std::atomic<int64_t> computed{0}, nanoseconds{0};
    std::mutex lock;
    std::condition_variable news;

    // The current request. Pair number: token * most + index of the expert among the token's experts.
    std::vector<float> x;                            // [kTokens, hidden]
    std::vector<float> gated;                        // [pairs, size]
    std::vector<float> partial;                      // [threads, 2, pairs, kRows]
    std::vector<Passed> passed;
    std::vector<int64_t> place, pairs, at;           // expert's index in `passed`; pairs by expert; pair's index there
    std::vector<const float *> inputs, gated_inputs; // of each of `pairs`

    // For a packed layer: the tokens that use the expert, their factors and shares.
    std::unique_ptr<PackedLayer> packed;
    std::vector<deltic_expert> packed_weights;
    std::vector<int64_t> present;
    std::vector<float> factors, shares;

    deltic_beside(const deltic_beside_model &model, const deltic_mailbox &mail, int threads)
        : model(model), mail(mail) {
        for (int64_t i = 0; i < model.layers; ++i) weights.push_back(static_cast<const uint16_t *>(model.weights[i]));
        const size_t most = size_t(kTokens * model.most);
        x.resize(size_t(kTokens * model.hidden));
        gated.resize(most * size_t(model.size));
        partial.resize(size_t(threads) * 2 * most * kRows);
        place.assign(size_t(model.experts), -1);
        passed.reserve(most);
        pairs.resize(most), at.resize(most), inputs.resize(most), gated_inputs.resize(most);
        if (!model.packed) return;
        packed = std::make_unique<PackedLayer>(model);
        packed_weights.assign(model.packed, model.packed + model.layers);
    }

    ~deltic_beside() {
        if (listener.joinable()) {
            closing.store(true);
            { std::lock_guard guard(lock); }
            news.notify_all();
            listener.join();
        }
        deltic_pool_free(pool);
    }

    uint32_t asked() const { return std::atomic_ref<uint32_t>(*mail.request).load(std::memory_order_acquire); }

    void wake() {
        wakes.fetch_add(1);
        if (!asleep.load()) return;
        { std::lock_guard guard(lock); }
        news.notify_one();
    }

    void serve(uint32_t done) {
        uint32_t seen = 0;
        auto last = Clock::now();
        while (!closing.load(std::memory_order_relaxed)) {
            if (const uint32_t number = asked(); number != done) {
                const auto began = Clock::now();
                answer();
                last = Clock::now();
                nanoseconds.fetch_add(std::chrono::nanoseconds(last - began).count(), std::memory_order_relaxed);
                std::atomic_ref<uint32_t>(*mail.answer).store(number, std::memory_order_release);
                done = number;
                continue;
            }
            if (const uint32_t fresh = wakes.load(); fresh != seen) {
                seen = fresh;
                // an empty job wakes the pool's threads, which then poll for work too
                deltic::parallel(pool, deltic::pool_threads(pool), [](int64_t, int) {});
                last = Clock::now();
                continue;
            }
            const auto idle = std::chrono::duration_cast<microseconds>(Clock::now() - last);
            if (idle < kAwake)
                for (int i = 0; i < 16; ++i) DELTIC_PAUSE();
            else nap(idle, seen);
        }
    }

    void nap(microseconds idle, uint32_t seen) {
        std::unique_lock guard(lock);
        asleep.store(true);
        auto told = [&] { return closing.load() || wakes.load() != seen; };
        if (idle < kListens) news.wait_for(guard, std::clamp(idle / 16, kShortNap, kLongNap), told);
        else news.wait(guard, told);
        asleep.store(false);
    }

    void answer() {
        const int64_t layer = mail.request[1], tokens = mail.request[2];
        if (!is_sound(layer, tokens)) return fail();
        if (!weights[size_t(layer)]) return answer_packed(packed_weights[size_t(layer)], tokens);
        put_together(tokens);
        const uint16_t *experts = weights[size_t(layer)];
        gate(experts);
        down(experts, tokens);
        for (const Passed &one : passed) place[size_t(one.expert)] = -1;
        computed.fetch_add(int64_t(passed.size()), std::memory_order_relaxed);
    }

    void fail() {
        for (int64_t i = 0; i < kTokens * model.hidden; ++i) mail.sums[i] = std::numeric_limits<float>::quiet_NaN();
    }

    void answer_packed(const deltic_expert &expert, int64_t tokens) {
        present.clear(), factors.clear(), shares.clear();
        const int64_t hidden = model.hidden;
        for (int64_t token = 0; token < tokens; ++token) {
            if (!mail.counts[token]) continue;
            widen(token, int64_t(present.size()));
            present.push_back(token), factors.push_back(mail.factors[token]);
            shares.push_back(mail.shares[token * model.most]);
        }
        if (present.empty()) return;
        try {
            packed->compute(pool, expert, x, int64_t(present.size()), factors, shares);
        } catch (const std::bad_alloc &) {
            return fail();
        }
        for (size_t i = 0; i < present.size(); ++i)
            std::copy_n(packed->sums(int64_t(i)), hidden, mail.sums + present[i] * hidden);
        computed.fetch_add(1, std::memory_order_relaxed);
    }

    // Converts a token's input to float32, into a row of x.
    void widen(int64_t token, int64_t row) {
        const int64_t hidden = model.hidden;
        for (int64_t i = 0; i < hidden; ++i)
            x[size_t(row * hidden + i)] = std::bit_cast<float>(uint32_t(mail.input[token * hidden + i]) << 16);
    }

    bool is_sound(int64_t layer, int64_t tokens) const {
        if (layer >= model.layers || tokens > kTokens) return false;
        for (int64_t token = 0; token < tokens; ++token) {
            if (mail.counts[token] < 0 || mail.counts[token] > model.most) return false;
            for (int64_t i = 0; i < mail.counts[token]; ++i) {
                const int64_t expert = mail.experts[token * model.most + i];
                if (expert < 0 || expert >= model.experts) return false;
            }
        }
        return true;
    }

    // Converts the inputs to float32 and groups the pairs by expert, so that an expert's rows are read once.
    void put_together(int64_t tokens) {
        passed.clear();
        for (int64_t token = 0; token < tokens; ++token) {
            if (!mail.counts[token]) continue;
            widen(token, token);
            for (int64_t i = 0; i < mail.counts[token]; ++i) {
                const int64_t expert = mail.experts[token * model.most + i];
                int64_t &mine = place[size_t(expert)];
                if (mine < 0) mine = int64_t(passed.size()), passed.push_back({expert, 0, 0});
                ++passed[size_t(mine)].count;
            }
        }
        int64_t first = 0;
        for (Passed &one : passed) one.first = first, first += one.count, one.count = 0;
        for (int64_t token = 0; token < tokens; ++token)
            for (int64_t i = 0; i < mail.counts[token]; ++i) {
                const int64_t pair = token * model.most + i;
                Passed &one = passed[size_t(place[size_t(mail.experts[pair])])];
                const auto index = size_t(one.first + one.count++);
                pairs[index] = pair, at[size_t(pair)] = int64_t(index);
                inputs[index] = x.data() + token * model.hidden;
                gated_inputs[index] = gated.data() + pair * model.size;
            }
    }

    float *scratch(int thread) { return partial.data() + int64_t(thread) * 2 * kTokens * model.most * kRows; }

    void gate(const uint16_t *experts) {
        const int64_t hidden = model.hidden, size = model.size, blocks = (size + kRows - 1) / kRows;
        const deltic::Kernels &kernels = deltic::kernels(pool);
        deltic::parallel(pool, int64_t(passed.size()) * blocks, [&](int64_t piece, int thread) {
            const Passed &one = passed[size_t(piece / blocks)];
            const int64_t row = piece % blocks * kRows, rows = std::min(kRows, size - row);
            const uint16_t *from = experts + (one.expert * 3 * size + row) * hidden;
            float *gates = scratch(thread), *others = gates + one.count * kRows;
            kernels.dots(from, rows, hidden, inputs.data() + one.first, one.count, gates, kRows);
            kernels.dots(from + size * hidden, rows, hidden, inputs.data() + one.first, one.count, others, kRows);
            for (int64_t i = 0; i < one.count; ++i) {
                const int64_t pair = pairs[size_t(one.first + i)];
                kernels.gate_rounded(gates + i * kRows, others + i * kRows, mail.factors[pair / model.most],
                                     mail.shares[pair], rows, gated.data() + pair * size + row);
            }
        });
    }

    void down(const uint16_t *experts, int64_t tokens) {
        const int64_t hidden = model.hidden, size = model.size;
        const deltic::Kernels &kernels = deltic::kernels(pool);
        deltic::parallel(pool, passed.empty() ? 0 : (hidden + kRows - 1) / kRows, [&](int64_t piece, int thread) {
            const int64_t row = piece * kRows, rows = std::min(kRows, hidden - row);
            float *products = scratch(thread);
            for (const Passed &one : passed)
                kernels.dots(experts + (one.expert * 3 + 2) * size * hidden + row * size, rows, size,
                             gated_inputs.data() + one.first, one.count, products + one.first * kRows, kRows);
            for (int64_t token = 0; token < tokens; ++token)
                for (int64_t i = 0; i < mail.counts[token]; ++i) {
                    const float *from = products + at[size_t(token * model.most + i)] * kRows;
                    float *to = mail.sums + token * hidden + row;
                    for (int64_t j = 0; j < rows; ++j) to[j] = i ? to[j] + from[j] : from[j];
                }
        });
    }
};

extern "C" {

deltic_beside *deltic_beside_new(const deltic_beside_model *model, const deltic_mailbox *mailbox, int threads,
                                 int level) {
    try {
        auto beside = std::make_unique<deltic_beside>(*model, *mailbox, threads < 1 ? 1 : threads);
        beside->pool = deltic_pool_new(threads, level);
        if (!beside->pool) return nullptr;
        deltic::be_patient(beside->pool, kAwake.count());
        beside->listener = std::thread([own = beside.get(), done = *mailbox->answer] { own->serve(done); });
        return beside.release();
    } catch (...) {
        return nullptr;
    }
}

void deltic_beside_free(deltic_beside *beside) { delete beside; }

void deltic_beside_wake(deltic_beside *beside) { beside->wake(); }

void deltic_beside_count(const deltic_beside *beside, int64_t *experts, int64_t *nanoseconds) {
    *experts = beside->computed.load(std::memory_order_relaxed);
    *nanoseconds = beside->nanoseconds.load(std::memory_order_relaxed);
}
}
