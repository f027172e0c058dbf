// The core of a Gated DeltaNet layer: convolution, gates, delta rule and gated norm.
//
// A token's result does not depend on how its sequence is cut into chunks: the delta rule runs token by token, every
// sum has one order, and raw inputs are rounded to the ring's type before anything is computed.
//
// A slot holds the state after some number of tokens, the base. The updates of later tokens may be in a unit of replay
// entries, one entry per token. `replay` adds them to the state with the same operations as the rule itself, so the
// result has the same bits.
//
// Outputs of the convolution and the gates are in scratch memory, one entry per head and token:
//   key entry:   key [key_pad], query / sqrt(key_dim) [key_pad], key . query
//   value entry: value, later the rule's output [value_pad], decay, beta
// Padding is zero. The batch is processed in windows of tokens so that the entries stay in the cache.
// Uses scratch slots 6 to 8.
#include <math.h>

#include "levels.hpp"
#include "pool.hpp"
#include "simd.hpp"

namespace deltic::DELTIC_LEVEL {
namespace {

constexpr int64_t kSlice = 2 * kNative;  // columns of a head's state that one task updates
constexpr int64_t kBlock = 32;           // tokens per convolution task
constexpr int64_t kNormed = 8;           // tokens per task of the gated norm
constexpr int64_t kWindow = 128;         // tokens that have entries at the same time
constexpr int64_t kReplay = DELTIC_RING;  // replay entries in a unit
constexpr int64_t kFew = 4;               // maximum replay entries that are read without a copy of the state
constexpr float kUnitEps = 1e-6f;

DELTIC_INLINE int64_t padded(int64_t count) { return round_up(count, kLanes); }

struct Row {
    int64_t index, first, tokens, done, source, target;
    int64_t base, next;  // tokens in the state of the source, and of the target after the step
    int64_t unit;        // unit with the replay entries of base .. done - 1

    // True if the chunk is written as replay entries.
    bool appends() const { return next < done + tokens; }
    bool replays() const { return base < done || appends(); }
};

// `count` tokens of a row's chunk, from the chunk's token `begin` on.
struct Part {
    Row row;
    int64_t begin, count;
};

struct Job {
    const deltic_gdn_layer &layer;
    const deltic_states &states;
    const deltic_batch &batch;
    const float *proj;
    float *out;
    int64_t group{}, channels{}, width{};            // value heads per key head; channels of conv; columns of proj
    int64_t key_pad{}, value_pad{}, stage_pad{};     // key_dim and value_dim padded to vectors; the larger of both
    int64_t key_entry{}, value_entry{}, work_size{}; // floats per key entry, value entry and thread's work buffer
    int64_t room{}, base{};                          // tokens that fit into the entries; batch token of entry 0
    float *keys{}, *values{}, *work{};               // key entries; value entries; work buffers of all threads

    Row row(int64_t index) const {
        int64_t first = batch.starts[index], tokens = batch.starts[index + 1] - first, done = batch.done[index];
        Row row{index, first, tokens, done, batch.source[index], batch.target[index], done, done + tokens, 0};
        if (states.keys) {
            row.base = batch.base[index];
            row.unit = batch.ring[index];
            if (batch.append[index]) row.next = done + tokens - row.base <= kReplay ? row.base : done;
        }
        return row;
    }
    // The row's tokens among the batch tokens begin .. end - 1.
    Part part(int64_t index, int64_t begin, int64_t end) const {
        Row whole = row(index);
        int64_t from = most(whole.first, begin), to = least(whole.first + whole.tokens, end);
        return {whole, from - whole.first, to - from};
    }
    float *key_at(int64_t head, int64_t token) const { return keys + (head * room + token - base) * key_entry; }
    float *value_at(int64_t head, int64_t token) const { return values + (head * room + token - base) * value_entry; }
    int64_t key_head(int64_t head) const { return layer.tiled ? head % layer.key_heads : head / group; }
    // Value head number `member` of a key head.
    int64_t value_head(int64_t head, int64_t member) const {
        return layer.tiled ? member * layer.key_heads + head : head * group + member;
    }
    float *state_of(int64_t slot, int64_t head) const {
        return states.recurrent + (slot * layer.value_heads + head) * layer.key_dim * layer.value_dim;
    }
    template <typename T> T *ring_of(int64_t slot) const {
        return static_cast<T *>(states.conv) + slot * states.places * channels;
    }
    // Index of a position's replay entry.
    static int64_t entry_of(const Row &row, int64_t position) { return row.unit * kReplay + position % kReplay; }
    template <typename T> T *replay_inputs(const Row &row, int64_t position) const {
        return static_cast<T *>(states.inputs) + entry_of(row, position) * channels;
    }
    float *replay_key(const Row &row, int64_t position, int64_t head) const {
        return states.keys + (entry_of(row, position) * layer.key_heads + head) * layer.key_dim;
    }
    float *replay_update(const Row &row, int64_t position, int64_t head) const {
        return states.updates + (entry_of(row, position) * layer.value_heads + head) * layer.value_dim;
    }
    float *replay_decay(const Row &row, int64_t position, int64_t head) const {
        return states.decays + entry_of(row, position) * layer.value_heads + head;
    }
    // A thread's work buffer: the state of a slice, the taps, the staged inputs, the updates of a slice.
    float *slice_of(int thread) const { return work + thread * work_size; }
    float *taps_of(int thread) const { return slice_of(thread) + layer.key_dim * kSlice; }
    float *stage_of(int thread) const { return taps_of(thread) + layer.kernel * stage_pad; }
    float *updates_of(int thread) const { return stage_of(thread) + (layer.kernel + kBlock) * stage_pad; }

    template <typename Body> DELTIC_INLINE void each_emit(const Row &row, int64_t length, Body &&body) const {
        for (int64_t emit = 0; emit < batch.emits; ++emit)
            if (batch.emit_row[emit] == row.index && batch.emit_length[emit] == length) body(batch.emit_slot[emit]);
    }
    // Returns the position up to which the row can run from `position`: its next emit, or `stop`.
    int64_t next_stop(const Row &row, int64_t position, int64_t stop) const {
        for (int64_t emit = 0; emit < batch.emits; ++emit) {
            int64_t length = batch.emit_length[emit];
            if (batch.emit_row[emit] == row.index && length > position && length < stop) stop = length;
        }
        return stop;
    }
};

// ---- Raw inputs: staging, convolution, ring.

// Rounds numbers as a store to the ring does; see `narrow`.
DELTIC_INLINE Native as_stored(Native v, float) { return v; }
DELTIC_INLINE Native as_stored(Native v, uint16_t) {
    NativeWords word = (NativeWords)v, sick = (NativeWords)(v != v);
    word = (word + 0x7fff + ((word >> 16) & 1)) & 0xffff0000u;
    return (Native)((word & ~sick) | (0x7fc00000u & sick));
}
DELTIC_INLINE Native as_stored(Native v, Half) { return rounded_half(v); }
template <typename T> DELTIC_INLINE float as_stored(float value) {
    T kept;
    narrow(value, kept);
    return widen(kept);
}

// Copies the raw inputs of `count` tokens, from the chunk's token `begin` on, and of the kernel - 1 tokens before them,
// as floats. ahead: floats to the inputs that are staged next. These are prefetched, because a call reads too few
// channels of each token for the hardware prefetcher to recognise the pattern.
template <typename T>
void stage_inputs(const Job &job, const Row &row, int64_t begin, int64_t count, int64_t channel, int64_t channels,
                  int64_t ahead, float *to) {
    int64_t before = job.layer.kernel - 1, whole = channels / kNative * kNative;
    for (int64_t token = begin - before; token < begin + count; ++token, to += job.stage_pad) {
        std::memset(to + whole, 0, size_t(padded(channels) - whole) * 4);
        if (token >= 0) {
            const float *from = job.proj + (row.first + token) * job.width + channel;
            for (int64_t j = 0; j < channels; j += kLanes) __builtin_prefetch(from + ahead + j);
            for (int64_t j = 0; j < whole; j += kNative) store(to + j, as_stored(load_native(from + j), T{}));
            for (int64_t j = whole; j < channels; ++j) to[j] = as_stored<T>(from[j]);
        } else if (row.done + token >= 0) {
            int64_t position = row.done + token, place = position % job.states.places, j = 0;
            const T *from = position < row.base ? job.ring_of<T>(row.source) + place * job.channels
                                                : job.replay_inputs<T>(row, position);
            from += channel;
            for (; j + kLanes <= channels; j += kLanes) store(to + j, load_wide(from + j));
            for (; j < channels; ++j) to[j] = widen(from[j]);
        } else {
            std::memset(to, 0, size_t(whole) * 4);
        }
    }
}

// [channels, 4] -> four rows; written so that compilers vectorise it.
void split_four(const float *__restrict from, int64_t channels, float *__restrict a, float *__restrict b,
                float *__restrict c, float *__restrict d) {
    for (int64_t i = 0; i < channels; ++i, from += 4) {
        a[i] = from[0];
        b[i] = from[1];
        c[i] = from[2];
        d[i] = from[3];
    }
}

// Transposes the taps of `channels` channels to [kernel, stage_pad].
void arrange_taps(const Job &job, int64_t channel, int64_t channels, float *to) {
    int64_t kernel = job.layer.kernel, stride = job.stage_pad;
    const float *from = job.layer.conv + channel * kernel;
    std::memset(to, 0, size_t(kernel * stride) * 4);
    if (kernel == 4) return split_four(from, channels, to, to + stride, to + 2 * stride, to + 3 * stride);
    for (int64_t tap = 0; tap < kernel; ++tap)
        for (int64_t i = 0; i < channels; ++i) to[tap * stride + i] = from[i * kernel + tap];
}

DELTIC_INLINE Floats silu(Floats x) { return x / (1.0f + exponential(-x)); }

// to [count, stride] = silu(convolution of the staged inputs). Kernel: the number of taps; 0: `any` taps.
template <int64_t Kernel>
void convolve(const float *staged, const float *taps, int64_t any, int64_t pad, int64_t count, int64_t channels,
              float *to, int64_t stride) {
    int64_t kernel = Kernel ? Kernel : any;
    for (int64_t token = 0; token < count; ++token, staged += pad, to += stride)
        for (int64_t j = 0; j < channels; j += kLanes) {
            Floats sum = {};
            for (int64_t tap = 0; tap < kernel; ++tap)
                sum = fma(loadf(taps + tap * pad + j), loadf(staged + tap * pad + j), sum);
            store(to + j, silu(sum));
        }
}

template <typename T>
void mix_channels(const Job &job, const Row &row, int64_t begin, int64_t count, int64_t channel, int64_t channels,
                  int64_t ahead, float *to, int64_t stride, int thread) {
    float *staged = job.stage_of(thread), *taps = job.taps_of(thread);
    int64_t kernel = job.layer.kernel;
    stage_inputs<T>(job, row, begin, count, channel, channels, ahead, staged);
    arrange_taps(job, channel, channels, taps);
    auto run = kernel == 4 ? convolve<4> : convolve<0>;
    run(staged, taps, kernel, job.stage_pad, count, channels, to, stride);
}

// Stores a raw input of the chunk, for `count` channels from `first` on.
template <typename T>
void keep_input(const Job &job, const Row &row, int64_t position, int64_t first, int64_t count, T *to) {
    const float *raw = job.proj + (row.first + position - row.done) * job.width + first;
    int64_t j = 0;
    for (; j + kLanes <= count; j += kLanes) store_narrow(to + j, loadf(raw + j));
    for (; j < count; ++j) narrow(raw[j], to[j]);
}

// Brings the ring of `slot` to `length` tokens of the row's sequence, for `count` channels from `first` on.
template <typename T>
void advance_ring(const Job &job, const Row &row, int64_t slot, int64_t length, int64_t first, int64_t count) {
    int64_t places = job.states.places, channels = job.channels;
    const T *from = job.ring_of<T>(row.source) + first;
    T *to = job.ring_of<T>(slot) + first;
    if (row.base == 0 || slot != row.source)
        for (int64_t at = 0; at < places * channels; at += channels) {
            if (row.base) std::memcpy(to + at, from + at, size_t(count) * sizeof(T));
            else std::memset(to + at, 0, size_t(count) * sizeof(T));
        }
    for (int64_t position = most(row.base, length - places); position < length; ++position) {
        T *place = to + position % places * channels;
        if (position >= row.done) keep_input<T>(job, row, position, first, count, place);
        else std::memcpy(place, job.replay_inputs<T>(row, position) + first, size_t(count) * sizeof(T));
    }
}

// Writes all rings and replay inputs of the row. Emit slots precede the target slot, which may be the source of both.
// The target slot precedes the new replay entries, which may overwrite entries that it needs.
template <typename T> void advance_rings(const Job &job, const Row &row, int64_t first, int64_t count) {
    for (int64_t emit = 0; emit < job.batch.emits; ++emit)
        if (job.batch.emit_row[emit] == row.index)
            advance_ring<T>(job, row, job.batch.emit_slot[emit], job.batch.emit_length[emit], first, count);
    if (row.next > row.base) advance_ring<T>(job, row, row.target, row.next, first, count);
    if (!row.appends()) return;
    for (int64_t position = row.done; position < row.done + row.tokens; ++position)
        keep_input<T>(job, row, position, first, count, job.replay_inputs<T>(row, position) + first);
}

// ---- Entries.

// `count` is a multiple of 16.
DELTIC_INLINE float dot(const float *a, const float *b, int64_t count) {
    Native sum = {};
    for (int64_t j = 0; j < count; j += kNative) sum = fma(load_native(a + j), load_native(b + j), sum);
    float lane[kNative];
    store(lane, sum);
#pragma GCC unroll 4
    for (int width = kNative / 2; width; width /= 2)
        for (int i = 0; i < width; ++i) lane[i] += lane[i + width];
    return lane[0];
}
DELTIC_INLINE void scale(float *x, int64_t count, float factor) {
    for (int64_t j = 0; j < count; j += kNative) store(x + j, load_native(x + j) * splat<Native>(factor));
}

// Normalises key and query of a key entry to length 1 and divides the query by sqrt(key_dim).
void finish_key(const Job &job, float *entry) {
    float *key = entry, *query = entry + job.key_pad;
    int64_t pad = job.key_pad;
    scale(key, pad, 1.0f / std::sqrt(dot(key, key, pad) + kUnitEps));
    scale(query, pad, 1.0f / (std::sqrt(dot(query, query, pad) + kUnitEps) * std::sqrt(float(job.layer.key_dim))));
    entry[2 * pad] = dot(key, query, pad);
}

float softplus(float x) { return x > 20.0f ? x : log1pf(expf(x)); }

void finish_value(const Job &job, int64_t head, int64_t token, float *entry) {
    const float *raw = job.proj + (token + 1) * job.width - 2 * job.layer.value_heads;
    float b = raw[head], a = raw[job.layer.value_heads + head];
    entry[job.value_pad] = expf(job.layer.decay[head] * softplus(a + job.layer.dt_bias[head]));
    entry[job.value_pad + 1] = 1.0f / (1.0f + expf(-b));
}

// Computes the entries of a key head and its value heads, for `count` tokens of the row's chunk from `begin` on.
template <typename T>
void prepare(const Job &job, const Row &row, int64_t begin, int64_t count, int64_t head, int thread) {
    const deltic_gdn_layer &layer = job.layer;
    int64_t token = row.first + begin, keys = layer.key_heads * layer.key_dim;
    float *entry = job.key_at(head, token);
    auto mix = [&](int64_t channel, int64_t channels, int64_t next, float *to, int64_t stride) {
        mix_channels<T>(job, row, begin, count, channel, channels, next - channel, to, stride, thread);
    };
    int64_t query = head * layer.key_dim, key = keys + query;
    auto channel_of = [&](int64_t member) { return 2 * keys + job.value_head(head, member) * layer.value_dim; };
    mix(query, layer.key_dim, key, entry + job.key_pad, job.key_entry);
    mix(key, layer.key_dim, channel_of(0), entry, job.key_entry);
    for (int64_t t = 0; t < count; ++t) finish_key(job, entry + t * job.key_entry);
    for (int64_t member = 0; member < job.group; ++member) {
        int64_t value = job.value_head(head, member);
        entry = job.value_at(value, token);
        int64_t next = member + 1 < job.group ? channel_of(member + 1) : query + layer.key_dim;
        mix(channel_of(member), layer.value_dim, next, entry, job.value_entry);
        for (int64_t t = 0; t < count; ++t) finish_value(job, value, token + t, entry + t * job.value_entry);
    }
}

// ---- The delta rule, on N registers of columns of a state: S <- a S; u = beta (v - S'k); S <- S + k u'; o = S'q.
// The output is computed from the old state as a S'q + (k.q) u. So one pass reads the state and one pass writes it.

template <int N> struct Columns {
    Native at[N];
};

// Adds one row of the state to S'k and S'q.
template <int N>
DELTIC_INLINE void recall_row(const Columns<N> &row, float key, float query, Columns<N> &by_key, Columns<N> &by_query) {
    for (int n = 0; n < N; ++n) by_key.at[n] = fma(splat<Native>(key), row.at[n], by_key.at[n]);
    for (int n = 0; n < N; ++n) by_query.at[n] = fma(splat<Native>(query), row.at[n], by_query.at[n]);
}

template <int N> DELTIC_INLINE Columns<N> load_row(const float *from) {
    Columns<N> row;
    for (int n = 0; n < N; ++n) row.at[n] = load_native(from + n * kNative);
    return row;
}
template <int N> DELTIC_INLINE void store_row(float *to, const Columns<N> &row) {
    for (int n = 0; n < N; ++n) store(to + n * kNative, row.at[n]);
}

// Returns one row of a S + k u'.
template <int N>
DELTIC_INLINE Columns<N> updated_row(Columns<N> row, float decay, float key, const Columns<N> &update) {
    for (int n = 0; n < N; ++n) row.at[n] = fma(splat<Native>(key), update.at[n], row.at[n] * splat<Native>(decay));
    return row;
}

template <int N>
DELTIC_INLINE void recall(const float *state, int64_t stride, const float *key, const float *query, int64_t key_dim,
                          Columns<N> &by_key, Columns<N> &by_query) {
    by_key = by_query = {};
    for (int64_t i = 0; i < key_dim; ++i)
        recall_row<N>(load_row<N>(state + i * stride), key[i], query[i], by_key, by_query);
}

template <int N>
DELTIC_INLINE void remember(const float *from, float *to, int64_t stride, float decay, const float *key,
                            int64_t key_dim, const Columns<N> &update) {
    for (int64_t i = 0; i < key_dim; ++i)
        store_row<N>(to + i * stride, updated_row<N>(load_row<N>(from + i * stride), decay, key[i], update));
}

// Does `remember` for one token and `recall` for the next token in one pass over the state.
template <int N>
DELTIC_INLINE void remember_and_recall(float *state, float decay, const float *key, const Columns<N> &update,
                                       const float *next_key, const float *next_query, int64_t key_dim,
                                       Columns<N> &by_key, Columns<N> &by_query) {
    by_key = by_query = {};
    for (int64_t i = 0; i < key_dim; ++i) {
        Columns<N> row = updated_row<N>(load_row<N>(state + i * N * kNative), decay, key[i], update);
        store_row<N>(state + i * N * kNative, row);
        recall_row<N>(row, next_key[i], next_query[i], by_key, by_query);
    }
}

// Returns the token's u and overwrites its value with its output. by_key: S'k; by_query: S'q; match: k . q.
template <int N>
DELTIC_INLINE Columns<N> settle(float *value, float decay, float beta, float match, const Columns<N> &by_key,
                                const Columns<N> &by_query) {
    Columns<N> update, v = load_row<N>(value);
    for (int n = 0; n < N; ++n) {
        update.at[n] = fma(splat<Native>(-decay), by_key.at[n], v.at[n]) * splat<Native>(beta);
        v.at[n] = fma(splat<Native>(match), update.at[n], by_query.at[n] * splat<Native>(decay));
    }
    store_row<N>(value, v);
    return update;
}

// The replay entries of a slice, oldest first. updates: [count, N registers].
struct Past {
    int64_t count;
    const float *key[kReplay];
    float decay[kReplay];
    const float *updates;
};

// Applies the replay entries to R rows of a slice, from row `first` on: enough independent chains for the FMA units.
template <int N, int R> DELTIC_INLINE void replay_rows(float *state, const Past &past, int64_t first) {
    Columns<N> row[R];
    for (int r = 0; r < R; ++r) row[r] = load_row<N>(state + (first + r) * N * kNative);
    for (int64_t i = 0; i < past.count; ++i) {
        Columns<N> update = load_row<N>(past.updates + i * N * kNative);
        for (int r = 0; r < R; ++r) row[r] = updated_row<N>(row[r], past.decay[i], past.key[i][first + r], update);
    }
    for (int r = 0; r < R; ++r) store_row<N>(state + (first + r) * N * kNative, row[r]);
}

template <int N> void replay(float *state, const Past &past, int64_t key_dim) {
    int64_t i = 0;
    for (; i + 4 <= key_dim; i += 4) replay_rows<N, 4>(state, past, i);
    for (; i < key_dim; ++i) replay_rows<N, 1>(state, past, i);
}

// Runs the rule for `count` tokens on a slice of a state, a contiguous [key_dim, N registers]. Writes the tokens' u to
// `updates` if it is not null.
template <int N>
void run_tokens(const Job &job, float *state, const float *key, float *entry, int64_t column, int64_t count,
                float *updates) {
    int64_t key_dim = job.layer.key_dim, pad = job.key_pad;
    Columns<N> by_key, by_query;
    recall<N>(state, N * kNative, key, key + pad, key_dim, by_key, by_query);
    for (; count; --count, key += job.key_entry, entry += job.value_entry) {
        float decay = entry[job.value_pad], beta = entry[job.value_pad + 1];
        Columns<N> update = settle<N>(entry + column, decay, beta, key[2 * pad], by_key, by_query);
        if (updates) {
            store_row<N>(updates, update);
            updates += N * kNative;
        }
        const float *next = key + job.key_entry;
        if (count == 1) remember<N>(state, state, N * kNative, decay, key, key_dim, update);
        else remember_and_recall<N>(state, decay, key, update, next, next + pad, key_dim, by_key, by_query);
    }
}

// Copies `rows` rows of `count` floats; their strides are `stride` and `to_stride` floats.
void copy_columns(const float *from, int64_t stride, float *to, int64_t to_stride, int64_t rows, int64_t count) {
    for (int64_t i = 0; i < rows; ++i, from += stride, to += to_stride) {
        int64_t j = 0;
        for (; j + kNative <= count; j += kNative) store(to + j, load_native(from + j));
        if (j < count) std::memcpy(to + j, from + j, size_t(count - j) * 4);
    }
}

// Applies the replay entries of the positions begin .. end - 1 to the columns of a value head from `column` on: state
// [key_dim, width]. updates: a buffer for the updates of these entries.
void replay_slice(const Job &job, const Row &row, int64_t begin, int64_t end, int64_t head, int64_t column,
                  int64_t count, int64_t width, float *state, float *updates) {
    Past past{end - begin, {}, {}, updates};
    if (count < width) std::memset(updates, 0, size_t(past.count * width) * 4);
    for (int64_t i = 0; i < past.count; ++i) {
        past.key[i] = job.replay_key(row, begin + i, job.key_head(head));
        past.decay[i] = *job.replay_decay(row, begin + i, head);
        std::memcpy(updates + i * width, job.replay_update(row, begin + i, head) + column, size_t(count) * 4);
    }
    auto run = width > kNative ? replay<2> : replay<1>;
    run(state, past, job.layer.key_dim);
}

// Runs a part on the columns of a value head from `column` on, at most kSlice, in a contiguous copy that fits L1.
void run_slice(const Job &job, const Part &part, int64_t head, int64_t column, int thread) {
    const Row &row = part.row;
    int64_t rows = job.layer.key_dim, stride = job.layer.value_dim, count = least(stride - column, kSlice);
    int64_t position = row.done + part.begin, end = position + part.count;
    int64_t width = count > kNative ? 2 * kNative : kNative;
    // earlier parts have left the target at min(next, position) tokens and written later tokens as replay entries
    int64_t base = part.begin ? least(row.next, position) : row.base;
    float *state = job.slice_of(thread), *updates = row.appends() ? job.updates_of(thread) : nullptr;
    const float *from = job.state_of(part.begin ? row.target : row.source, head) + column;
    auto save = [&](int64_t slot) {
        copy_columns(state, width, job.state_of(slot, head) + column, stride, rows, count);
    };
    if (base == 0 || count < width) std::memset(state, 0, size_t(rows * width) * 4);
    if (base) copy_columns(from, stride, state, width, rows, count);
    if (base < position)
        replay_slice(job, row, base, position, head, column, count, width, state, job.updates_of(thread));
    if (row.appends() && row.next > base) save(row.target);
    while (position < end) {
        int64_t token = row.first + position - row.done, stop = job.next_stop(row, position, end);
        auto run = width > kNative ? run_tokens<2> : run_tokens<1>;
        run(job, state, job.key_at(job.key_head(head), token), job.value_at(head, token), column, stop - position,
            updates);
        for (; position < stop && updates; ++position, updates += width)
            std::memcpy(job.replay_update(row, position, head) + column, updates, size_t(count) * 4);
        position = stop;
        job.each_emit(row, position, save);
    }
    if (!row.appends()) save(row.target);
}

// Runs one token on N registers of columns, without a contiguous copy.
template <int N>
DELTIC_INLINE void step_columns(const Job &job, const float *from, float *to, const float *key, float *entry,
                                int64_t column) {
    int64_t key_dim = job.layer.key_dim, stride = job.layer.value_dim, pad = job.key_pad;
    Columns<N> by_key, by_query;
    recall<N>(from + column, stride, key, key + pad, key_dim, by_key, by_query);
    float decay = entry[job.value_pad], beta = entry[job.value_pad + 1];
    Columns<N> update = settle<N>(entry + column, decay, beta, key[2 * pad], by_key, by_query);
    remember<N>(from + column, to + column, stride, decay, key, key_dim, update);
}

// At most kFew replay entries, for columns of a value head.
struct Recent {
    int64_t count;
    const float *keys[kFew], *updates[kFew];
    float decays[kFew];

    Recent(const Job &job, const Row &row, int64_t head, int64_t column) : count(row.done - row.base) {
        for (int64_t i = 0; i < count; ++i) {
            keys[i] = job.replay_key(row, row.base + i, job.key_head(head));
            updates[i] = job.replay_update(row, row.base + i, head) + column;
            decays[i] = *job.replay_decay(row, row.base + i, head);
        }
    }
    // Returns a row of the state with these entries applied. from: the row without them; null: zeros.
    template <int N> DELTIC_INLINE Columns<N> brought(const float *from, int64_t row) const {
        Columns<N> state{};
        if (from) state = load_row<N>(from);
        for (int64_t i = 0; i < count; ++i)
            state = updated_row<N>(state, decays[i], keys[i][row], load_row<N>(updates[i]));
        return state;
    }
};

// Runs one token after a few replay entries, on N registers of columns, without a copy of the state. The token becomes
// a replay entry too, or the target state receives the entries and the token.
template <int N> DELTIC_INLINE void step_behind(const Job &job, const Row &row, int64_t head, int64_t column) {
    int64_t key_dim = job.layer.key_dim, stride = job.layer.value_dim, pad = job.key_pad;
    const float *from = row.base ? job.state_of(row.source, head) + column : nullptr;
    const float *key = job.key_at(job.key_head(head), row.first);
    float *entry = job.value_at(head, row.first);
    Recent recent(job, row, head, column);
    Columns<N> by_key{}, by_query{};
    for (int64_t i = 0; i < key_dim; ++i) {
        Columns<N> state = recent.brought<N>(from ? from + i * stride : nullptr, i);
        recall_row<N>(state, key[i], key[pad + i], by_key, by_query);
    }
    float decay = entry[job.value_pad], beta = entry[job.value_pad + 1];
    Columns<N> update = settle<N>(entry + column, decay, beta, key[2 * pad], by_key, by_query);
    if (row.appends()) return store_row<N>(job.replay_update(row, row.done, head) + column, update);
    float *to = job.state_of(row.target, head) + column;
    for (int64_t i = 0; i < key_dim; ++i) {
        Columns<N> state = recent.brought<N>(from ? from + i * stride : nullptr, i);
        store_row<N>(to + i * stride, updated_row<N>(state, decay, key[i], update));
    }
}

// True if `step_behind` can run the only token of a row: at most kFew replay entries, whole registers of columns, no
// emit and, if the token is appended, no write of the target.
bool has_few_behind(const Job &job, const Row &row) {
    if (row.done - row.base > kFew || (row.appends() && row.next != row.base)) return false;
    return job.layer.value_dim % kNative == 0 && job.next_stop(row, row.done, row.done + 2) > row.done + 1;
}

// Runs the only token of a row on a value head's state.
void step_head(const Job &job, const Row &row, int64_t head, int thread) {
    int64_t columns = job.layer.value_dim, size = job.layer.key_dim * columns, column = 0;
    const float *from = job.state_of(row.source, head), *key = job.key_at(job.key_head(head), row.first);
    float *to = job.state_of(row.target, head), *entry = job.value_at(head, row.first);
    // more columns at a time would need more registers than the level has
    constexpr int kMost = kNative == 16 ? 8 : 4;
    if (row.replays() && has_few_behind(job, row)) {
        for (; columns - column >= kMost * kNative; column += kMost * kNative)
            step_behind<kMost>(job, row, head, column);
        for (; column < columns; column += kNative) step_behind<1>(job, row, head, column);
        return;
    }
    if (row.replays()) {
        for (; column < columns; column += kSlice) run_slice(job, {row, 0, 1}, head, column, thread);
        return;
    }
    if (row.done == 0) {
        std::memset(to, 0, size_t(size) * 4);
        from = to;
    }
    for (; columns - column >= kMost * kNative; column += kMost * kNative)
        step_columns<kMost>(job, from, to, key, entry, column);
    for (; columns - column >= 2 * kNative; column += 2 * kNative) step_columns<2>(job, from, to, key, entry, column);
    for (; columns - column >= kNative; column += kNative) step_columns<1>(job, from, to, key, entry, column);
    if (column < columns) run_slice(job, {row, 0, 1}, head, column, thread);
    job.each_emit(row, row.done + 1, [&](int64_t slot) {
        std::memcpy(job.state_of(slot, head), to, size_t(size) * 4);
    });
}

// ---- Gated norm.

// out = x / sqrt(mean(x^2) + eps) * norm * silu(z)
void norm_head(const Job &job, int64_t head, int64_t token) {
    int64_t count = job.layer.value_dim, at = head * count;
    const float *x = job.value_at(head, token), *z = job.proj + token * job.width + job.channels + at;
    float *out = job.out + token * job.layer.value_heads * count + at;
    float mean = dot(x, x, padded(count)) / float(count);
    float factor = 1.0f / std::sqrt(mean + job.layer.eps);
    int64_t j = 0;
    for (; j + kLanes <= count; j += kLanes) {
        __builtin_prefetch(z + count + j);  // the z of the next head
        store(out + j, loadf(x + j) * factor * loadf(job.layer.norm + j) * silu(loadf(z + j)));
    }
    if (j == count) return;
    Floats scaled = loadf(x + j) * factor * load_part(job.layer.norm + j, count - j);
    store_part(out + j, scaled * silu(load_part(z + j, count - j)), count - j);
}

// ---- Tasks.

// Writes the keys and decays of a part as replay entries, for a key head. No other task may still need the entries that
// this overwrites.
void append_entries(const Job &job, const Part &part, int64_t head) {
    const Row &row = part.row;
    for (int64_t position = row.done + part.begin, end = position + part.count; position < end; ++position) {
        int64_t token = row.first + position - row.done;
        std::memcpy(job.replay_key(row, position, head), job.key_at(head, token), size_t(job.layer.key_dim) * 4);
        for (int64_t member = 0; member < job.group; ++member) {
            int64_t value = job.value_head(head, member);
            *job.replay_decay(row, position, value) = job.value_at(value, token)[job.value_pad];
        }
    }
}

// Does all work of a row of one token for one key head.
template <typename T> void step_single(const Job &job, const Row &row, int64_t head, int thread) {
    const deltic_gdn_layer &layer = job.layer;
    int64_t keys = layer.key_heads * layer.key_dim;
    prepare<T>(job, row, 0, 1, head, thread);
    advance_rings<T>(job, row, head * layer.key_dim, layer.key_dim);
    advance_rings<T>(job, row, keys + head * layer.key_dim, layer.key_dim);
    for (int64_t member = 0; member < job.group; ++member) {
        int64_t value = job.value_head(head, member);
        advance_rings<T>(job, row, 2 * keys + value * layer.value_dim, layer.value_dim);
        step_head(job, row, value, thread);
        norm_head(job, value, row.first);
    }
    if (row.appends()) append_entries(job, {row, 0, 1}, head);
}

// The tokens begin .. end - 1 of the batch. They belong to the rows first .. last - 1.
struct Window {
    int64_t begin, end, first, last;
};

Window window_at(const Job &job, int64_t begin, int64_t first) {
    Window window{begin, least(begin + kWindow, job.batch.starts[job.batch.rows]), first, first};
    while (job.batch.starts[window.first + 1] <= begin) ++window.first;
    while (window.last < job.batch.rows && job.batch.starts[window.last] < window.end) ++window.last;
    return window;
}

int64_t blocks_of(const Job &job, const Window &window, int64_t row) {
    return pieces_of(job.part(row, window.begin, window.end).count, kBlock);
}

// Computes the entries of a block of a row's tokens in the window, for one key head.
template <typename T> void prepare_piece(const Job &job, const Window &window, int64_t piece, int thread) {
    int64_t block = piece / job.layer.key_heads, row = window.first;
    for (; block >= blocks_of(job, window, row); ++row) block -= blocks_of(job, window, row);
    Part part = job.part(row, window.begin, window.end);
    int64_t skip = block * kBlock, count = least(kBlock, part.count - skip);
    prepare<T>(job, part.row, part.begin + skip, count, piece % job.layer.key_heads, thread);
}

// Computes the entries of a window, and does all work of the rows of one token, which are first in the batch.
template <typename T> void prepare_window(const Job &job, deltic_pool *pool, const Window &window, int64_t singles) {
    int64_t heads = job.layer.key_heads, blocks = 0;
    for (int64_t row = window.first; row < window.last; ++row) blocks += blocks_of(job, window, row);
    parallel(pool, (singles + blocks) * heads, [&](int64_t piece, int thread) {
        if (piece < singles * heads) step_single<T>(job, job.row(piece / heads), piece % heads, thread);
        else prepare_piece<T>(job, window, piece - singles * heads, thread);
    });
}

// Runs the rule in a window. Updates the rings of the rows that end in the window: all reads of these rings are done.
template <typename T> void run_window(const Job &job, deltic_pool *pool, const Window &window) {
    int64_t slices = pieces_of(job.layer.value_dim, kSlice), per_row = job.layer.value_heads * slices;
    int64_t rows = window.last - window.first;
    parallel(pool, rows * (per_row + 1), [&](int64_t piece, int thread) {
        bool ring = piece >= rows * per_row;
        int64_t index = ring ? piece - rows * per_row : piece / per_row, slice = piece % per_row;
        Part part = job.part(window.first + index, window.begin, window.end);
        if (!ring) run_slice(job, part, slice / slices, slice % slices * kSlice, thread);
        else if (part.begin + part.count == part.row.tokens) advance_rings<T>(job, part.row, 0, job.channels);
    });
}

// Does the work that must follow the rule: norms, and keys and decays of the new replay entries.
void finish_window(const Job &job, deltic_pool *pool, const Window &window) {
    int64_t rows = window.last - window.first;
    parallel(pool, pieces_of(window.end - window.begin, kNormed) + rows, [&](int64_t piece, int) {
        if (piece < rows) {
            Part part = job.part(window.first + piece, window.begin, window.end);
            for (int64_t head = 0; part.row.appends() && head < job.layer.key_heads; ++head)
                append_entries(job, part, head);
            return;
        }
        piece -= rows;
        int64_t begin = window.begin + piece * kNormed, end = least(begin + kNormed, window.end);
        for (int64_t head = 0; head < job.layer.value_heads; ++head)
            for (int64_t token = begin; token < end; ++token) norm_head(job, head, token);
    });
}

template <typename T> void run(Job &job, deltic_pool *pool, int64_t singles) {
    const deltic_batch &batch = job.batch;
    int64_t end = batch.starts[batch.rows];
    if (singles == batch.rows) return prepare_window<T>(job, pool, {singles, singles, singles, singles}, singles);
    for (int64_t begin = singles, row = singles; begin < end;) {
        Window window = window_at(job, begin, row);
        job.base = begin - singles;
        prepare_window<T>(job, pool, window, begin == singles ? singles : 0);
        run_window<T>(job, pool, window);
        finish_window(job, pool, window);
        begin = window.end;
        row = window.first;
    }
}

Job job_of(const deltic_gdn_layer &layer, const deltic_states &states, const deltic_batch &batch, const float *proj,
           float *out) {
    Job job{layer, states, batch, proj, out};
    int64_t values = layer.value_heads * layer.value_dim;
    job.group = layer.value_heads / layer.key_heads;
    job.channels = 2 * layer.key_heads * layer.key_dim + values;
    job.width = job.channels + values + 2 * layer.value_heads;
    job.key_pad = padded(layer.key_dim);
    job.value_pad = padded(layer.value_dim);
    job.key_entry = 2 * job.key_pad + kLanes;
    job.value_entry = job.value_pad + kLanes;
    job.stage_pad = most(job.key_pad, job.value_pad);
    job.work_size = padded((layer.key_dim + kReplay) * kSlice + (2 * layer.kernel + kBlock) * job.stage_pad);
    return job;
}

}  // namespace

void gdn(deltic_pool *pool, const deltic_gdn_layer &layer, const deltic_states &states, const deltic_batch &batch,
         const float *proj, float *out) {
    Job job = job_of(layer, states, batch, proj, out);
    int64_t singles = 0;
    while (singles < batch.rows && batch.starts[singles + 1] - batch.starts[singles] == 1) ++singles;
    job.room = singles + least(batch.tokens - singles, kWindow);
    job.keys = scratch_of<float>(pool, 6, layer.key_heads * job.room * job.key_entry);
    job.values = scratch_of<float>(pool, 7, layer.value_heads * job.room * job.value_entry);
    job.work = scratch_of<float>(pool, 8, pool_threads(pool) * job.work_size);
    by_type(states.type, [&](auto kept) { run<decltype(kept)>(job, pool, singles); });
}

void fold_ring(deltic_pool *pool, const deltic_gdn_layer &layer, const deltic_states *states, int64_t count,
               int64_t source, int64_t ring, int64_t base, int64_t done, int64_t target) {
    deltic_batch none{};
    // a row without tokens: it writes the state with all replay entries to its target
    Row row{0, 0, 0, done, source, target, base, done, ring};
    int64_t slices = pieces_of(layer.value_dim, kSlice), per_layer = layer.value_heads * slices + 1;
    int64_t work_size = job_of(layer, *states, none, nullptr, nullptr).work_size;
    float *work = scratch_of<float>(pool, 8, pool_threads(pool) * work_size);
    parallel(pool, count * per_layer, [&](int64_t piece, int thread) {
        Job job = job_of(layer, states[piece / per_layer], none, nullptr, nullptr);
        job.work = work;
        int64_t slice = piece % per_layer;
        if (slice < per_layer - 1) run_slice(job, {row, 0, 0}, slice / slices, slice % slices * kSlice, thread);
        else by_type(job.states.type, [&](auto kept) {
            advance_ring<decltype(kept)>(job, row, target, done, 0, job.channels);
        });
    });
}

}  // namespace deltic::DELTIC_LEVEL
