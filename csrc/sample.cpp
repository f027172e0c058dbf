// Selection among logits: the most probable tokens of a row, and a check that the row is sound.
#include "levels.hpp"
#include "noise.hpp"
#include "pool.hpp"
#include "simd.hpp"

namespace deltic::DELTIC_LEVEL {
namespace {

constexpr int64_t kRun = 256;  // logits per run; the largest logit of each run locates the best tokens

// Range of a run or a whole row. sick: a logit is not finite.
struct Row {
    float low, high;
    bool sick;
};

Row read_run(const float *logits, int64_t count, float *largest) {
    Floats high = splat(-__builtin_inff()), low = splat(__builtin_inff()), bad = {};
    int64_t i = 0;
    for (; i + kLanes <= count; i += kLanes) {
        Floats v = loadf(logits + i);
        high = maximum(high, v);
        low = choose(less(v, low), v, low);
        bad = bad + (v - v);
    }
    Row row{-max_lanes(-low), max_lanes(high), sum_lanes(bad) != 0};
    for (; i < count; ++i) {
        row.high = row.high < logits[i] ? logits[i] : row.high;
        row.low = logits[i] < row.low ? logits[i] : row.low;
        row.sick |= logits[i] - logits[i] != 0;
    }
    *largest = row.high;
    return row;
}

// Sum of exp((logit - most) * inverse) over a run.
double total_of(const float *logits, int64_t count, float most, float inverse) {
    Floats sum = {};
    int64_t i = 0;
    for (; i + kLanes <= count; i += kLanes) {
        Floats x = (loadf(logits + i) - most) * inverse;
        // terms that `exponential` would clamp count as 0
        sum = sum + choose(less(x, splat(-87.0f)), Floats{}, exponential(x));
    }
    double total = sum_lanes(sum);
    for (; i < count; ++i) total += std::exp(double(logits[i] - most) * inverse);
    return total;
}

struct Entry {
    float value;
    int64_t id;
};
DELTIC_INLINE bool before(const Entry &a, const Entry &b) {
    return a.value > b.value || (a.value == b.value && a.id < b.id);
}

// Inserts an entry into the `count` best ones so far if it is one of them. A full heap has the worst entry on top.
void best_first(Entry *heap, int64_t count, const Entry &fresh, int64_t &filled) {
    auto sink = [&](int64_t at, int64_t size) {
        Entry moving = heap[at];
        for (int64_t child; (child = 2 * at + 1) < size; at = child) {
            if (child + 1 < size && before(heap[child], heap[child + 1])) ++child;
            if (!before(moving, heap[child])) break;
            heap[at] = heap[child];
        }
        heap[at] = moving;
    };
    if (filled < count) {
        heap[filled++] = fresh;
        if (filled == count)
            for (int64_t at = count / 2; at-- > 0;) sink(at, count);
    } else if (before(fresh, heap[0])) {
        heap[0] = fresh;
        sink(0, count);
    }
}

void sort(Entry *entries, int64_t count) {
    for (int64_t step = count / 2 ? count / 2 : 1; step; step /= 2)
        for (int64_t i = step; i < count; ++i) {
            Entry moving = entries[i];
            int64_t at = i;
            for (; at >= step && before(moving, entries[at - step]); at -= step) entries[at] = entries[at - step];
            entries[at] = moving;
        }
}

// The `count` best entries of a row, in order. largest: the largest logit of each run. heap, bound [count]: working
// memory; the result is in `heap`.
void best_of(const float *logits, int64_t width, const float *largest, int64_t count, Entry *heap, Entry *bound) {
    int64_t runs = (width + kRun - 1) / kRun, filled = 0;
    for (int64_t run = 0; run < runs; ++run) best_first(bound, count, {largest[run], run}, filled);
    // `count` runs have a logit of at least this, so smaller logits are not among the best
    float least = filled < count ? -__builtin_inff() : bound[0].value;
    filled = 0;
    for (int64_t run = 0; run < runs; ++run) {
        if (largest[run] < least) continue;
        int64_t end = (run + 1) * kRun < width ? (run + 1) * kRun : width;
        for (int64_t id = run * kRun; id < end; ++id)
            if (logits[id] >= least) best_first(heap, count, {logits[id], id}, filled);
    }
    sort(heap, filled);
    for (; filled < count; ++filled) heap[filled] = {-__builtin_inff(), 0};
}

struct Draw {
    double noisy;
    int64_t id;
};

// Replaces `best` by the token of the run with the largest logit / temperature + noise, if that is larger.
//
// Noise of at least d = best - logit / temperature requires -log(u) <= exp(-d), and 1 - u is never above -log(u). So
// only the few tokens with 1 - u <= exp(-d) need their noise. This test runs in float32, with a margin for rounding.
void draw_run(const float *logits, int64_t first, int64_t count, double temperature, uint64_t key, const int64_t *names,
              float room, Draw &best) {
    float inverse = float(1 / temperature), bound = float(best.noisy);
    float likely[kRun];
    for (int64_t i = 0; i < count; i += kLanes) {
        Floats x = load_part(logits + i, count - i < kLanes ? count - i : kLanes) * inverse - bound + room;
        store(likely + i, exponential(choose(less(Floats{}, x), Floats{}, x)));
    }
    for (int64_t i = 0; i < count; ++i) {
        uint64_t name = uint64_t(names ? names[first + i] : first + i);
        float rest = float(0x1p53 - double(noise_bits(key, name))) * 0x1p-53f;
        if (rest > likely[i] * 1.001f) continue;
        double noisy = double(logits[i]) / temperature + gumbel(key, name);
        if (noisy > best.noisy) best = {noisy, first + i};
    }
}

}  // namespace

void adjust(deltic_pool *pool, float *logits, int64_t width, const float *repetition, const float *offset) {
    constexpr int64_t kTogether = 32768;  // logits per piece
    parallel(pool, (width + kTogether - 1) / kTogether, [&](int64_t piece, int) {
        int64_t i = piece * kTogether, end = i + kTogether < width ? i + kTogether : width;
        for (; i + kLanes <= end; i += kLanes) {
            Floats v = loadf(logits + i);
            if (repetition) {
                Floats by = loadf(repetition + i);
                v = choose(less(Floats{}, v), v / by, v * by);
            }
            store(logits + i, offset ? v + loadf(offset + i) : v);
        }
        for (; i < end; ++i) {
            float v = logits[i];
            if (repetition) v = v > 0 ? v / repetition[i] : v * repetition[i];
            logits[i] = offset ? v + offset[i] : v;
        }
    });
}

// Uses scratch slot 0.
void draw_any(deltic_pool *pool, const float *logits, int64_t rows, int64_t width, const float *temperatures,
              const int64_t *keys, const float *values, const int64_t *ids, const int64_t *names, int64_t *tokens) {
    constexpr int64_t kTogether = 16;  // runs per piece
    int64_t runs = (width + kRun - 1) / kRun, pieces = (runs + kTogether - 1) / kTogether;
    Draw *found = scratch_of<Draw>(pool, 0, rows * pieces);
    parallel(pool, rows * pieces, [&](int64_t piece, int) {
        int64_t row = piece / pieces, end = (piece % pieces + 1) * kTogether;
        double temperature = temperatures[row] > 1e-9f ? temperatures[row] : 1e-9f;
        // the noisy logit of the most probable token is rarely exceeded; only a bound, as ties go to the lower id
        uint64_t name = uint64_t(names ? names[ids[row]] : ids[row]);
        double start = double(values[row]) / temperature + gumbel(uint64_t(keys[row]), name);
        Draw best{std::nextafter(start, -INFINITY), ids[row]};
        float room = float(std::abs(double(values[row])) / temperature) * 1e-5f + 1e-3f;
        for (int64_t run = end - kTogether; run < end && run < runs; ++run) {
            int64_t first = run * kRun, count = width - first < kRun ? width - first : kRun;
            draw_run(logits + row * width + first, first, count, temperature, uint64_t(keys[row]), names, room, best);
        }
        found[piece] = best;
    });
    for (int64_t row = 0; row < rows; ++row) {
        Draw best = found[row * pieces];
        for (int64_t piece = row * pieces; piece < (row + 1) * pieces; ++piece)
            if (found[piece].noisy > best.noisy) best = found[piece];
        tokens[row] = temperatures[row] == 0 ? ids[row] : best.id;
    }
}

// Uses scratch slots 0 to 3.
void top(deltic_pool *pool, const float *logits, int64_t rows, int64_t width, int64_t count, const float *temperatures,
         float *values, int64_t *ids, double *log_totals, uint8_t *healthy) {
    constexpr int64_t kTogether = 64;  // runs per piece
    int64_t runs = (width + kRun - 1) / kRun, pieces = (runs + kTogether - 1) / kTogether;
    float *largest = scratch_of<float>(pool, 0, rows * runs);
    Row *found = scratch_of<Row>(pool, 1, rows * runs);
    double *sums = scratch_of<double>(pool, 2, rows * runs);
    Entry *heaps = scratch_of<Entry>(pool, 3, rows * 2 * count);
    auto each_run = [&](auto &&body) {
        parallel(pool, rows * pieces, [&](int64_t piece, int) {
            int64_t row = piece / pieces, first = piece % pieces * kTogether;
            for (int64_t run = first; run < first + kTogether && run < runs; ++run) {
                int64_t begin = run * kRun, size = begin + kRun < width ? kRun : width - begin;
                body(row, row * runs + run, logits + row * width + begin, size);
            }
        });
    };
    each_run([&](int64_t, int64_t at, const float *from, int64_t size) {
        found[at] = read_run(from, size, largest + at);
    });
    for (int64_t row = 0; row < rows; ++row) {
        Row all = found[row * runs];
        for (int64_t at = row * runs; at < (row + 1) * runs; ++at) {
            all.high = all.high < found[at].high ? found[at].high : all.high;
            all.low = found[at].low < all.low ? found[at].low : all.low;
            all.sick |= found[at].sick;
        }
        found[row * runs] = all;
        healthy[row] = !all.sick && all.high - all.low >= 1e-6f;
    }
    if (temperatures)
        each_run([&](int64_t row, int64_t at, const float *from, int64_t size) {
            float temperature = temperatures[row] > 1e-9f ? temperatures[row] : 1e-9f;
            sums[at] = total_of(from, size, found[row * runs].high, 1.0f / temperature);
        });
    parallel(pool, rows, [&](int64_t row, int) {
        Entry *heap = heaps + row * 2 * count;
        best_of(logits + row * width, width, largest + row * runs, count, heap, heap + count);
        for (int64_t i = 0; i < count; ++i) {
            values[row * count + i] = heap[i].value;
            ids[row * count + i] = heap[i].id;
        }
        if (!temperatures) return;
        double sum = 0, temperature = temperatures[row] > 1e-9f ? temperatures[row] : 1e-9f;
        for (int64_t at = row * runs; at < (row + 1) * runs; ++at) sum += sums[at];
        log_totals[row] = double(found[row * runs].high) / temperature + std::log(sum);
    });
}

}  // namespace deltic::DELTIC_LEVEL
