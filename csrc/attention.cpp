// Gated attention over paged K/V: the computation between the input and output projections of a layer.
//
// A token's result must not depend on the chunking, the batch or the threads: each token and head has one order of
// operations. The context is cut into parts at absolute multiples of kPart positions. Within a part, a score is summed
// over the dimensions in ascending order, weights are relative to the part's maximum score, and weighted values are
// summed over the positions in ascending order. `merge` then combines the parts in ascending order. Whether one thread
// computes all parts or each part is a job, and how many queries share the loaded keys, changes only the speed.
//
// A vector of scores has one position per SIMD lane. Keys of positions that a query must not see affect only masked
// lanes. Values of such positions are not multiplied (int8: their weight is the integer 0).
#include "int4.hpp"
#include "int8.hpp"
#include "levels.hpp"
#include "pool.hpp"
#include "simd.hpp"

namespace deltic::DELTIC_LEVEL {
namespace {

constexpr int64_t kPage = DELTIC_PAGE;
constexpr int64_t kPart = 512;
// Stride between the scores of two queries. A power of two would map all queries of a tile to a few cache sets.
constexpr int64_t kScores = kPart + kLanes;

// Register tile of the inner loops: kTile queries times kWide accumulators, each a full register of the SIMD level.
#if defined(__AVX512F__)
constexpr int kTile = 12, kWide = 2;
#elif defined(__AVX2__)
constexpr int kTile = 4, kWide = 2;
#elif defined(__aarch64__)
constexpr int kTile = 4, kWide = 4;
#else
constexpr int kTile = 2, kWide = 4;
#endif
// Width of a panel of unpacked memory: positions (of keys) or dimensions (of values).
constexpr int64_t kPanel = kWide * kNative;
static_assert(kPanel % kPage == 0);

// Queries per job and K/V head. They share the keys and values that the job unpacks.
constexpr int64_t kJobQueries = 96;
// Chunks of up to this many tokens are cut into a job per part: their results take little memory.
constexpr int64_t kShortChunk = 8;

// ---- Norm, rotation, storage.

Floats take(const float *from, int64_t count) { return count < kLanes ? load_part(from, count) : loadf(from); }

template <typename T> void put(T *to, Floats v, int64_t count) {
    if (count >= kLanes) return store_narrow(to, v);
    T part[kLanes];
    store_narrow(part, v);
    std::memcpy(to, part, size_t(count) * sizeof(T));
}

// Prepares a query or key head: RMS norm if `scale` is not null, RoPE on the first `turned` dimensions, times `factor`.
template <typename T>
void prepare_head(const float *head, const float *scale, const float *cosines, const float *sines, int64_t dim,
                  int64_t turned, float eps, float factor, T *to) {
    Floats squares = {};
    for (int64_t i = 0; i < dim; i += kLanes) {
        Floats x = take(head + i, dim - i);
        squares = fma(x, x, squares);
    }
    Floats inverse = splat(1.0f / std::sqrt(sum_lanes(squares) / float(dim) + eps));
    auto normed = [&](int64_t i, int64_t count) {
        Floats x = take(head + i, count);
        return scale ? x * inverse * take(scale + i, count) : x;
    };
    int64_t half = turned / 2;
    for (int64_t i = 0; i < half; i += kLanes) {
        int64_t j = half + i, count = half - i;
        Floats first = normed(i, count), second = normed(j, count);
        put(to + i, (first * take(cosines + i, count) - second * take(sines + i, count)) * factor, count);
        put(to + j, (second * take(cosines + j, count) + first * take(sines + j, count)) * factor, count);
    }
    for (int64_t i = turned; i < dim; i += kLanes) put(to + i, normed(i, dim - i) * factor, dim - i);
}

// ---- Data shared by the jobs of a call.

struct Call {
    const deltic_attention_layer &layer;
    const deltic_kv &kv;
    const deltic_batch &batch;
    const float *cosines, *sines, *proj;
    float *queries;  // [kv_heads, tokens, group, dim], ready for products with keys
    float *out;
    int64_t dim, group;
    int64_t padded;  // dim, rounded up to a multiple of kPanel
    int64_t record;  // floats of a query's result: weighted values [padded], maximum score, sum of weights

    bool int4() const { return kv.type == DELTIC_INT4; }
    // Bytes of a token's keys or values in pages of int4 or int8.
    int64_t token_bytes(int bits) const {
        return int4() ? layer.kv_heads * int4_width(dim, bits) : int8_bytes(layer.kv_heads, dim);
    }
    int64_t width() const { return (layer.gate ? 2 : 1) * layer.heads * dim + 2 * layer.kv_heads * dim; }
    int64_t stride() const { return layer.kv_heads * dim; }  // elements between two positions of a page
    const float *query_of(int64_t kv_head, int64_t token) const {
        return queries + (kv_head * batch.tokens + token) * group * dim;
    }
};

// keys: the token's projected keys [kv_heads, dim], followed by its values.
template <typename T> void store_token(const Call &call, int64_t token, const float *keys) {
    const auto &layer = call.layer;
    int64_t dim = call.dim, turned = layer.rotary_dim, at = call.batch.store[token] * call.stride();
    const float *values = keys + call.stride();
    T *key_to = static_cast<T *>(call.kv.keys) + at, *value_to = static_cast<T *>(call.kv.values) + at;
    for (int64_t head = 0; head < layer.kv_heads; ++head)
        prepare_head(keys + head * dim, layer.k_norm, call.cosines + token * turned, call.sines + token * turned, dim,
                     turned, layer.eps, 1.0f, key_to + head * dim);
    for (int64_t i = 0; i < call.stride(); i += kLanes)
        put(value_to + i, take(values + i, call.stride() - i), call.stride() - i);
}

template <> void store_token<Int4>(const Call &call, int64_t token, const float *keys) {
    const auto &layer = call.layer;
    int64_t dim = call.dim, heads = layer.kv_heads, turned = layer.rotary_dim, place = call.batch.store[token];
    auto *key_to = static_cast<uint8_t *>(call.kv.keys) + place * call.token_bytes(kKeyBits);
    auto *value_to = static_cast<uint8_t *>(call.kv.values) + place * call.token_bytes(kValueBits);
    const float *values = keys + call.stride();
    float head_of[kMostDim];
    for (int64_t head = 0; head < heads; ++head) {
        prepare_head(keys + head * dim, layer.k_norm, call.cosines + token * turned, call.sines + token * turned, dim,
                     turned, layer.eps, 1.0f, head_of);
        rotate_head(head_of, dim);
        write_head(head_of, dim, kKeyBits, {key_to, head, heads, dim, kKeyBits});
        std::memcpy(head_of, values + head * dim, size_t(dim) * sizeof(float));
        rotate_head(head_of, dim);
        write_head(head_of, dim, kValueBits, {value_to, head, heads, dim, kValueBits});
    }
}

template <> void store_token<Int8>(const Call &call, int64_t token, const float *keys) {
    const auto &layer = call.layer;
    int64_t dim = call.dim, turned = layer.rotary_dim;
    int64_t place = call.batch.store[token] * int8_bytes(layer.kv_heads, dim), scales = place + call.stride();
    auto *key_to = static_cast<int8_t *>(call.kv.keys), *value_to = static_cast<int8_t *>(call.kv.values);
    float head_of[kInt8Dim];
    for (int64_t head = 0; head < layer.kv_heads; ++head) {
        prepare_head(keys + head * dim, layer.k_norm, call.cosines + token * turned, call.sines + token * turned, dim,
                     turned, layer.eps, 1.0f, head_of);
        write_int8(head_of, dim, key_to + place + head * dim, key_to + scales + head * 4);
        write_int8(keys + call.stride() + head * dim, dim, value_to + place + head * dim, value_to + scales + head * 4);
    }
}

template <typename T> void prepare_token(const Call &call, int64_t token) {
    const auto &layer = call.layer;
    int64_t dim = call.dim, turned = layer.rotary_dim, step = layer.gate ? 2 * dim : dim;
    const float *proj = call.proj + token * call.width();
    float factor = 1.0f / std::sqrt(float(dim));
    for (int64_t head = 0; head < layer.heads; ++head) {
        int64_t place = head / call.group * call.batch.tokens + token;
        float *query = call.queries + (place * call.group + head % call.group) * dim;
        prepare_head(proj + head * step, layer.q_norm, call.cosines + token * turned, call.sines + token * turned, dim,
                     turned, layer.eps, factor, query);
        if constexpr (std::is_same_v<T, Int4>) rotate_head(query, dim);
    }
    store_token<T>(call, token, proj + layer.heads * step);
}

// ---- Products of a tile of queries.

// Transposes 16 rows of 64 bytes, `stride` bytes apart: out[i] has the 32-bit word i of each row.
DELTIC_INLINE void transpose(const void *from, int64_t stride, Words out[kLanes]) {
    auto row = [&](int i) { return static_cast<const char *>(from) + i * stride; };
#if defined(__AVX512F__)
    __m512 part[4][4];  // part[i][c]: its 128-bit lane n has column 4 n + c of the rows 4 i .. 4 i + 3
    for (int i = 0; i < 4; ++i) {
        __m512 r0 = _mm512_loadu_ps(row(4 * i)), r1 = _mm512_loadu_ps(row(4 * i + 1));
        __m512 r2 = _mm512_loadu_ps(row(4 * i + 2)), r3 = _mm512_loadu_ps(row(4 * i + 3));
        __m512d a = (__m512d)_mm512_unpacklo_ps(r0, r1), b = (__m512d)_mm512_unpackhi_ps(r0, r1);
        __m512d c = (__m512d)_mm512_unpacklo_ps(r2, r3), d = (__m512d)_mm512_unpackhi_ps(r2, r3);
        part[i][0] = (__m512)_mm512_unpacklo_pd(a, c);
        part[i][1] = (__m512)_mm512_unpackhi_pd(a, c);
        part[i][2] = (__m512)_mm512_unpacklo_pd(b, d);
        part[i][3] = (__m512)_mm512_unpackhi_pd(b, d);
    }
    for (int c = 0; c < 4; ++c) {
        __m512 a = _mm512_shuffle_f32x4(part[0][c], part[1][c], 0x44);
        __m512 b = _mm512_shuffle_f32x4(part[0][c], part[1][c], 0xee);
        __m512 d = _mm512_shuffle_f32x4(part[2][c], part[3][c], 0x44);
        __m512 e = _mm512_shuffle_f32x4(part[2][c], part[3][c], 0xee);
        out[c] = (Words)_mm512_shuffle_f32x4(a, d, 0x88);
        out[4 + c] = (Words)_mm512_shuffle_f32x4(a, d, 0xdd);
        out[8 + c] = (Words)_mm512_shuffle_f32x4(b, e, 0x88);
        out[12 + c] = (Words)_mm512_shuffle_f32x4(b, e, 0xdd);
    }
#else
    typedef uint32_t Quad __attribute__((vector_size(16)));
    for (int i = 0; i < kLanes; i += 4)
        for (int j = 0; j < kLanes; j += 4) {
            Quad r0 = load<Quad>(row(i) + 4 * j), r1 = load<Quad>(row(i + 1) + 4 * j);
            Quad r2 = load<Quad>(row(i + 2) + 4 * j), r3 = load<Quad>(row(i + 3) + 4 * j);
            Quad a = DELTIC_SHUFFLE(r0, r1, 0, 4, 1, 5), b = DELTIC_SHUFFLE(r0, r1, 2, 6, 3, 7);
            Quad c = DELTIC_SHUFFLE(r2, r3, 0, 4, 1, 5), d = DELTIC_SHUFFLE(r2, r3, 2, 6, 3, 7);
            auto to = [&](int n) { return reinterpret_cast<char *>(out + j + n) + 4 * i; };
            store(to(0), DELTIC_SHUFFLE(a, c, 0, 1, 4, 5));
            store(to(1), DELTIC_SHUFFLE(a, c, 2, 3, 6, 7));
            store(to(2), DELTIC_SHUFFLE(b, d, 0, 1, 4, 5));
            store(to(3), DELTIC_SHUFFLE(b, d, 2, 3, 6, 7));
        }
#endif
}

// Dimensions per call of `columns`: 64 bytes of a row.
template <typename T> constexpr int64_t kGroup = 64 / int64_t(sizeof(T));

// Calls body(d, column) for kGroup dimensions in ascending order. Lane i of `column` is dimension d of row i.
template <typename Body> DELTIC_INLINE void columns(const float *from, int64_t stride, Body &&body) {
    Words words[kLanes];
    transpose(from, stride * 4, words);
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; ++i) body(i, (Floats)words[i]);
}
template <typename Body> DELTIC_INLINE void columns(const uint16_t *from, int64_t stride, Body &&body) {
    Words words[kLanes];
    transpose(from, stride * 2, words);
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; ++i) {
        body(2 * i, (Floats)(words[i] << 16));
        body(2 * i + 1, (Floats)(words[i] & 0xffff0000u));
    }
}

template <typename Body> DELTIC_INLINE void columns(const Half *from, int64_t stride, Body &&body) {
    Words words[kLanes];
    transpose(from, stride * 2, words);
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; ++i) {
        body(2 * i, from_halves(words[i] & 0xffff));
        body(2 * i + 1, from_halves(words[i] >> 16));
    }
}

// Prefetches one cache line of each position of a page into L2, which takes more prefetches at a time than L1.
template <typename T> DELTIC_INLINE void fetch_lines(const T *page, int64_t stride) {
    for (int i = 0; i < kPage; ++i) __builtin_prefetch(page + i * stride, 0, 2);
}

// Scores of a tile of queries [dim, R] at the positions of a panel of keys [dim, kPanel].
template <int R> void score_panel(const float *queries, const float *panel, int64_t dim, float *scores) {
    Native sum[R][kWide] = {};
    for (int64_t d = 0; d < dim; ++d, queries += R, panel += kPanel) {
        Native key[kWide];
#pragma GCC unroll 4
        for (int w = 0; w < kWide; ++w) key[w] = load_native(panel + w * kNative);
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
            for (int w = 0; w < kWide; ++w) sum[r][w] = fma(splat<Native>(queries[r]), key[w], sum[r][w]);
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
        for (int w = 0; w < kWide; ++w) store(scores + r * kScores + w * kNative, sum[r][w]);
}

// The same for one page, whose keys are read directly: for a tile that shares them with no other tile. next: data to
// prefetch, with the layout of `keys`.
template <int R, typename T>
void score_page(const float *queries, const T *keys, int64_t stride, int64_t dim, float *scores, const T *next) {
    Floats sum[R] = {};
    for (int64_t d = 0; d < dim; d += kGroup<T>) {
        fetch_lines(next + d, stride);
        columns(keys + d, stride, [&](int64_t column, Floats key) {
            const float *query = queries + (d + column) * R;
#pragma GCC unroll 16
            for (int r = 0; r < R; ++r) sum[r] = fma(splat(query[r]), key, sum[r]);
        });
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) store(scores + r * kScores, sum[r]);
}

// Adds values [count, W registers], times the weights of each of R queries, to that query's sums.
template <int R, int W, typename T>
void weigh(const T *values, int64_t stride, const float *weights, int64_t count, float *sums, int64_t record) {
    Native sum[R][W];
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
        for (int w = 0; w < W; ++w) sum[r][w] = load_native(sums + r * record + w * kNative);
    for (int64_t i = 0; i < count; ++i, values += stride) {
        Native value[W];
#pragma GCC unroll 4
        for (int w = 0; w < W; ++w) value[w] = load_native(values + w * kNative);
#pragma GCC unroll 16
        for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
            for (int w = 0; w < W; ++w) sum[r][w] = fma(splat<Native>(weights[r * kScores + i]), value[w], sum[r][w]);
    }
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
        for (int w = 0; w < W; ++w) store(sums + r * record + w * kNative, sum[r][w]);
}

// Calls body(std::integral_constant R), where R is the padded size of a tile of `rows` queries.
template <typename Body> DELTIC_INLINE void by_rows(int64_t rows, Body &&body) {
    if constexpr (kTile <= 4) {
        body(std::integral_constant<int, kTile>());
    } else {
        if (rows <= 4) return body(std::integral_constant<int, 4>());
        if (rows <= 8) return body(std::integral_constant<int, 8>());
        body(std::integral_constant<int, 12>());
    }
}

// ---- Results of parts.

// Replaces scores with weights exp(score - maximum). Writes the maximum and the sum of the weights to `tail`.
void soften(float *scores, int64_t count, float *tail) {
    const Ints kLane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    int64_t whole = count / kLanes * kLanes;
    Floats none = splat(-INFINITY), high = none;
    for (int64_t i = 0; i < whole; i += kLanes) high = maximum(high, loadf(scores + i));
    Ints seen = kLane < int32_t(count - whole);
    if (whole < count) high = maximum(high, choose(seen, loadf(scores + whole), none));
    float top = max_lanes(high);
    Floats sum = {};
    for (int64_t i = 0; i < whole; i += kLanes) {
        Floats weight = exponential(loadf(scores + i) - top);
        store(scores + i, weight);
        sum += weight;
    }
    if (whole < count) {
        Floats weight = choose(seen, exponential(loadf(scores + whole) - top), Floats{});
        store(scores + whole, weight);
        sum += weight;
    }
    tail[0] = top;
    tail[1] = sum_lanes(sum);
}

// Merges the result of the next part into that of all earlier parts.
void merge(float *total, const float *part, int64_t padded) {
    float top = total[padded] < part[padded] ? part[padded] : total[padded];
    Floats old = exponential(splat(total[padded] - top)), fresh = exponential(splat(part[padded] - top));
    for (int64_t i = 0; i < padded; i += kLanes) store(total + i, fma(loadf(part + i), fresh, loadf(total + i) * old));
    total[padded] = top;
    total[padded + 1] = total[padded + 1] * old[0] + part[padded + 1] * fresh[0];
}

// Writes the output of a token's head from its result over all parts.
void finish(const Call &call, const float *total, int64_t token, int64_t head) {
    int64_t dim = call.dim;
    float *to = call.out + (token * call.layer.heads + head) * dim;
    const float *gate = call.layer.gate ? call.proj + token * call.width() + (2 * head + 1) * dim : nullptr;
    Floats inverse = splat(1.0f / total[call.padded + 1]);
    float back[kMostDim];
    if (call.int4()) {
        std::memcpy(back, total, size_t(dim) * sizeof(float));
        rotate_head_back(back, dim);
        total = back;
    }
    for (int64_t i = 0; i < dim; i += kLanes) {
        Floats mean = loadf(total + i) * inverse;
        put(to + i, gate ? mean * sigmoid(take(gate + i, dim - i)) : mean, dim - i);
    }
}

// ---- Jobs.

// A block of tokens of a row's chunk, for the K/V heads [head, head + heads), over the parts [part, end).
struct Job {
    int64_t row, first, tokens, head, heads, part, end;
    float *results;  // results of all parts, for `merge_parts`; null: this job itself writes the output
    int64_t step;    // floats between the results of two parts
};

// Rows per K/V head in a job's arrays: one per query, plus padding of the last tile.
int64_t rows_of(const Call &call, int64_t tokens) { return round_up(tokens * call.group, 4); }

// A thread's scratch memory for int8.
struct Int8Space {
    static constexpr int64_t kBlock = 64;  // positions whose weights share one unit (scale)

    float *key_scales = nullptr, *value_scales = nullptr;  // [heads, kPart]
    float *units = nullptr, *weight_units = nullptr;       // [rows]: units of query codes, of weight codes
    int32_t *biases = nullptr, *weight_biases = nullptr;   // [rows]: `bias_of` these codes
    int32_t *factors = nullptr;                            // [kBlock / 4, rows of the tile]: a tile's weight codes
    int8_t *block = nullptr;                               // [kBlock / 4, padded]: quads of values

    Int8Space() = default;
    static int64_t floats(const Call &call, int64_t rows) {
        if (call.kv.type != DELTIC_INT8) return 0;
        return rows * (kPart / 2 + 4) + kBlock / 4 * (kTile + call.padded) + 2 * kLanes;
    }
    Int8Space(const Call &call, int64_t rows, float *from) {
        block = reinterpret_cast<int8_t *>(from);
        factors = reinterpret_cast<int32_t *>(from + kBlock / 4 * call.padded);
        key_scales = from + kBlock / 4 * (call.padded + kTile);  // a head has at least four rows
        value_scales = key_scales + rows * (kPart / 4);
        units = value_scales + rows * (kPart / 4);
        weight_units = units + rows;
        biases = reinterpret_cast<int32_t *>(weight_units + rows);
        weight_biases = biases + rows;
    }
};
// Offsets between -1/2 and 1/2, one per position of a block. In any run of positions they are spread evenly.
constexpr struct Dither {
    float at[Int8Space::kBlock];

    constexpr Dither() : at{} {
        for (int i = 0; i < Int8Space::kBlock; ++i) {
            int turned = 0;
            for (int bit = 0; bit < 6; ++bit) turned |= (i >> bit & 1) << (5 - bit);
            at[i] = (float(turned) + 0.5f) / Int8Space::kBlock - 0.5f;
        }
    }
} kDither;

// A thread's scratch memory.
struct Space {
    float *queries, *scores, *panel, *total, *part;
    Int8Space int8;

    static int64_t panel_floats(const Call &call) { return most(call.dim, kPart) * kPanel; }
    static int64_t floats(const Call &call, int64_t rows) {
        return rows * (call.dim + kScores + 2 * call.record) + panel_floats(call) + kLanes +
               Int8Space::floats(call, rows);
    }
    Space(const Call &call, int64_t rows, float *from) {
        scores = from;
        total = scores + rows * kScores;
        part = total + rows * call.record;
        panel = part + rows * call.record;
        queries = panel + panel_floats(call);
        int8 = Int8Space(call, rows, queries + rows * call.dim + kLanes);
    }
};

template <typename T> struct Worker {
    static constexpr bool kInt4 = std::is_same_v<T, Int4>, kInt8 = std::is_same_v<T, Int8>;
    const Call &call;
    const Job &job;
    const Space &space;
    int64_t queries = job.tokens * call.group, rows = rows_of(call, job.tokens), dim = call.dim;
    int64_t start = 0;      // first position of the part
    int64_t positions = 0;  // positions of the part that the job's last token sees

    // Number of positions of the part that a query sees.
    int64_t seen(int64_t query) const {
        int64_t index = call.batch.done[job.row] + job.first + query / call.group;
        return most(0, least(kPart, index + 1 - start));
    }
    int64_t tile_rows(int64_t tile) const { return least(kTile, queries - tile); }

    // Keys or values in the page of a position, from the job's first head on; int4: from the first head on.
    const T *page(const void *pool, int64_t position) const {
        int64_t number = call.batch.pages[job.row * call.batch.table + (start + position) / kPage];
        if constexpr (kInt4)
            return static_cast<const T *>(pool) + number * kPage * call.token_bytes(bits_of(pool));
        else if constexpr (kInt8)
            return static_cast<const T *>(pool) + number * kPage * call.token_bytes(8) + job.head * dim;
        else return static_cast<const T *>(pool) + number * kPage * call.stride() + job.head * dim;
    }
    int bits_of(const void *pool) const { return pool == call.kv.keys ? kKeyBits : kValueBits; }
    // Unpacks the int4 key or value [dim] of the job's head at a position of a page.
    void read_int4(const T *page, int64_t position, int bits, float *to) const {
        const auto *token = reinterpret_cast<const uint8_t *>(page) + position % kPage * call.token_bytes(bits);
        read_head({token, job.head, call.layer.kv_heads, dim, bits}, dim, bits, to);
    }
    // Returns the data to prefetch during the work on a page of keys: the next keys, then the part's first values.
    const T *after_keys(int64_t position) const {
        return position + kPage < positions ? page(call.kv.keys, position + kPage) : page(call.kv.values, 0);
    }
    // The same for values: two pages ahead, because values take less work per byte.
    const T *after_values(int64_t position) const {
        int64_t next = position + 2 * kPage;
        return page(call.kv.values, next < positions ? next : position);
    }

    // Packs the queries tile by tile, each tile as [dim, rows of the tile].
    void pack_queries() {
        for (int64_t h = 0; h < job.heads; ++h) {
            const float *from = call.query_of(job.head + h, call.batch.starts[job.row] + job.first);
            for (int64_t tile = 0; tile < queries; tile += kTile)
                by_rows(tile_rows(tile), [&](auto padded) {
                    pack_tile<padded.value>(from + tile * dim, space.queries + (h * rows + tile) * dim);
                });
        }
    }
    // Padding rows of a tile contain whatever follows in memory. Their results are never read.
    template <int R> void pack_tile(const float *from, float *to) {
        int64_t whole = dim / kLanes * kLanes;
        // a store writes 16 lanes; the next dimension overwrites those past the tile's rows
        for (int64_t d = 0; d < whole; d += kLanes)
            columns(from + d, dim, [&](int64_t i, Floats column) { store(to + (d + i) * R, column); });
        for (int64_t d = whole; d < dim; ++d)
            for (int64_t r = 0; r < R; ++r) to[d * R + r] = from[r * dim + d];
    }

    // Calls body(row, query, head) for all queries.
    template <typename Body> void each_query(Body &&body) {
        for (int64_t h = 0; h < job.heads; ++h)
            for (int64_t query = 0; query < queries; ++query) body(h * rows + query, query, job.head + h);
    }

    void run() {
        if constexpr (kInt8) pack_codes();
        else pack_queries();
        int64_t last = call.batch.done[job.row] + job.first + job.tokens;
        for (int64_t part = job.part; part < job.end; ++part) {
            start = part * kPart;
            positions = least(kPart, last - start);
            float *result = job.results ? job.results + part * job.step : part ? space.part : space.total;
            run_part(result);
            if (result == space.part)
                each_query([&](int64_t row, int64_t query, int64_t) {
                    if (seen(query)) merge(space.total + row * call.record, result + row * call.record, call.padded);
                });
        }
        if (!job.results) finish_job(space.total);
    }

    // Writes the output from the results over all parts.
    void finish_job(const float *total) {
        each_query([&](int64_t row, int64_t query, int64_t head) {
            int64_t token = call.batch.starts[job.row] + job.first + query / call.group;
            finish(call, total + row * call.record, token, head * call.group + query % call.group);
        });
    }
    // The same if each part was a job of its own: merges the results first.
    void merge_parts() {
        each_query([&](int64_t row, int64_t query, int64_t) {
            int64_t index = call.batch.done[job.row] + job.first + query / call.group;
            float *total = job.results + row * call.record;
            for (int64_t part = 1; part <= index / kPart; ++part) merge(total, total + part * job.step, call.padded);
        });
        finish_job(job.results);
    }

    // A single tile uses each key and value only once: unpacking them to memory would not pay.
    static bool direct(const Call &call, int64_t tokens) {
        if (kInt4 || tokens * call.group > kTile) return false;
        return kInt8 || (call.dim % kGroup<T> == 0 && call.dim % kPanel == 0);
    }

    void run_part(float *result) {
        if constexpr (kInt8) {
            score_int8();
            weigh_int8(result);
        } else {
            bool straight = direct(call, job.tokens);
            std::memset(result, 0, size_t(job.heads * rows * call.record) * sizeof(float));
            if constexpr (kInt4) score();
            else straight ? score_directly() : score();
            soften_all(result);
            if constexpr (kInt4) weigh_panels(result);
            else straight ? weigh_directly(result) : weigh_panels(result);
        }
    }
    void soften_all(float *result) {
        each_query([&](int64_t row, int64_t query, int64_t) {
            if (int64_t count = seen(query))
                soften(space.scores + row * kScores, count, result + row * call.record + call.padded);
        });
    }

    // Processes all heads of a page before the next page: sequential reads are fastest.
    void score_directly() {
        by_rows(queries, [&](auto padded) {
            for (int64_t i = 0; i < positions; i += kPage) {
                const T *keys = page(call.kv.keys, i), *next = after_keys(i);
                for (int64_t h = 0; h < job.heads; ++h) {
                    const float *own = space.queries + h * rows * dim;
                    float *scores = space.scores + h * rows * kScores + i;
                    if constexpr (kPanel > kPage) {
                        score_page<padded.value>(own, keys + h * dim, call.stride(), dim, scores, next + h * dim);
                    } else {  // too few registers to transpose keys within the loop
                        unpack_keys(keys + h * dim, next + h * dim, space.panel);
                        score_panel<padded.value>(own, space.panel, dim, scores);
                    }
                }
            }
        });
    }

    void weigh_directly(float *result) {
        int64_t shared = seen(0);
        for (int64_t i = 0; i < positions; i += kPage) {
            const T *values = page(call.kv.values, i), *next = after_values(i);
            for (int64_t h = 0; h < job.heads; ++h)
                for (int64_t d = 0; d < dim; d += kPanel) {
                    const T *from = values + h * dim + d;
                    fetch_lines(next + h * dim + d, call.stride());
                    weigh_tile(from, call.stride(), i, least(positions, i + kPage), shared,
                               space.scores + h * rows * kScores, 0, result + h * rows * call.record + d);
                }
        }
    }

    void score() {
        for (int64_t i = 0; i < positions; i += kPanel) {
            for (int64_t j = 0; j < kPanel && i + j < positions; j += kPage)
                unpack_keys(page(call.kv.keys, i + j), after_keys(i + j), space.panel + j);
            for (int64_t tile = 0; tile < queries; tile += kTile) {
                if (seen(tile + tile_rows(tile) - 1) <= i) continue;
                by_rows(tile_rows(tile), [&](auto rows) {
                    score_panel<rows.value>(space.queries + tile * dim, space.panel, dim,
                                            space.scores + tile * kScores + i);
                });
            }
        }
    }
    // Unpacks the keys of a page as [dim, kPanel].
    void unpack_keys(const T *keys, const T *next, float *to) {
        if constexpr (kInt4) {
            alignas(64) float rows[kPage * kMostDim];
            for (int64_t i = 0; i < kPage; ++i) read_int4(keys, i, kKeyBits, rows + i * dim);
            for (int64_t d = 0; d < dim; d += kLanes)
                columns(rows + d, dim, [&](int64_t i, Floats key) { store(to + (d + i) * kPanel, key); });
        } else unpack_plain_keys(keys, next, to);
    }
    void unpack_plain_keys(const T *keys, const T *next, float *to) {
        int64_t whole = dim / kGroup<T> * kGroup<T>;
        for (int64_t d = 0; d < whole; d += kGroup<T>) {
            fetch_lines(next + d, call.stride());
            columns(keys + d, call.stride(), [&](int64_t i, Floats key) { store(to + (d + i) * kPanel, key); });
        }
        for (int64_t d = whole; d < dim; ++d)
            for (int64_t i = 0; i < kPage; ++i) to[d * kPanel + i] = widen(keys[i * call.stride() + d]);
    }

    void weigh_panels(float *result) {
        for (int64_t d = 0; d < dim; d += kPanel) {
            unpack_values(d);
            for (int64_t tile = 0; tile < queries; tile += kTile)
                weigh_tile(space.panel, kPanel, 0, positions, seen(tile), space.scores + tile * kScores, tile,
                           result + tile * call.record + d);
        }
    }
    // Unpacks the part's values in the dimensions from `first` on, as [positions, kPanel].
    void unpack_values(int64_t first) {
        int64_t width = least(kPanel, dim - first);
        if constexpr (kInt4) return unpack_int4_values(first, width);
        else for (int64_t i = 0; i < positions; ++i) {
            const T *values = page(call.kv.values, i) + i % kPage * call.stride() + first;
            float *to = space.panel + i * kPanel;
            if (width == kPanel)
                for (int w = 0; w < kPanel; w += kNative) store(to + w, load_native(values + w));
            else
                for (int w = 0; w < kPanel; ++w) to[w] = w < width ? widen(values[w]) : 0.0f;
        }
    }

    void unpack_int4_values(int64_t first, int64_t width) {
        for (int64_t i = 0; i < positions; ++i) {
            const auto *token = reinterpret_cast<const uint8_t *>(page(call.kv.values, i));
            token += i % kPage * call.token_bytes(kValueBits);
            Int4Head<const uint8_t> from(token, job.head, call.layer.kv_heads, dim, kValueBits);
            from.low += first / 2;
            float *to = space.panel + i * kPanel;
            read_head(from, width, kValueBits, to);
            std::fill(to + width, to + kPanel, 0.0f);
        }
    }

    // ---- int8: scores and weighted values are integer sums. Factors of a tile: [quads, rows of the tile].

    static constexpr int64_t kBlock = Int8Space::kBlock;

    // Calls body(row of the job's arrays, tile, integral constant of its padded rows) for the tiles of a head that see
    // more than the first `before` positions of the part.
    template <typename Body> void each_tile(int64_t head, int64_t before, Body &&body) {
        for (int64_t tile = 0; tile < queries; tile += kTile)
            if (seen(tile + tile_rows(tile) - 1) > before)
                by_rows(tile_rows(tile), [&](auto padded) { body(head * rows + tile, tile, padded); });
    }
    int64_t query_quads() const { return pieces_of(dim, 4); }
    int32_t *query_factors(int64_t row) const {
        return reinterpret_cast<int32_t *>(space.queries) + row * query_quads();
    }
    void pack_codes() {
        for (int64_t h = 0; h < job.heads; ++h) {
            const float *from = call.query_of(job.head + h, call.batch.starts[job.row] + job.first);
            for (int64_t tile = 0; tile < queries; tile += kTile)
                by_rows(tile_rows(tile), [&](auto padded) {
                    for (int64_t r = 0; r < tile_rows(tile); ++r)
                        pack_query(from + (tile + r) * dim, h * rows + tile + r, padded.value,
                                   query_factors(h * rows + tile) + r);
                });
        }
    }
    // Rounds a query to eight bits and writes its quads to `to`. step: words between two quads.
    void pack_query(const float *query, int64_t row, int64_t step, int32_t *to) {
        alignas(64) int8_t codes[kInt8Dim];
        Unit unit(largest(query, dim));
        Ints sums = {};
        for (int64_t i = 0; i < dim; i += kLanes) {
            Ints rounded = to_nearest(take(query + i, dim - i) * unit.inverse);
            to_s8(codes + i, rounded);
            sums += rounded;
        }
        space.int8.units[row] = unit.size;
        space.int8.biases[row] = bias_of(sums);
        for (int64_t quad = 0; quad < query_quads(); ++quad) std::memcpy(to + quad * step, codes + 4 * quad, 4);
    }

    // Reads the scales of the job's heads at the positions of a page.
    void read_scales(const T *page, int64_t position, float *scales) {
        const auto *from = reinterpret_cast<const char *>(page) - job.head * dim + call.stride() + job.head * 4;
        int64_t step = call.token_bytes(8);
        for (int64_t h = 0; h < job.heads; ++h)
            for (int i = 0; i < kPage; ++i)
                std::memcpy(scales + h * kPart + position + i, from + i * step + h * 4, sizeof *scales);
    }

    void score_int8() {
        int64_t quads = query_quads(), step = call.token_bytes(8);
        auto *panel = reinterpret_cast<int8_t *>(space.panel);
        for (int64_t i = 0; i < positions; i += kPanel) {
            for (int64_t j = i; j < least(i + kPanel, positions); j += kPage) {
                read_scales(page(call.kv.keys, j), j, space.int8.key_scales);
                fetch_lines(page(call.kv.values, j) + call.stride() - job.head * dim, step);
            }
            for (int64_t h = 0; h < job.heads; ++h) {
                for (int64_t j = 0; j < kPanel && i + j < positions; j += kPage)
                    unpack_codes(page(call.kv.keys, i + j) + h * dim, panel + 4 * j);
                Fetch fetch = after_panel(i, h);
                each_tile(h, i, [&](int64_t row, int64_t, auto padded) {
                    const float *units = space.int8.units + row, *scales = space.int8.key_scales + h * kPart + i;
                    const int32_t *biases = space.int8.biases + row;
                    float *scores = space.scores + row * kScores + i;
                    multiply<padded.value, kWide>(
                        panel, 4 * kPanel, query_factors(row), quads, fetch, [&](int r, int w, NativeInts sum)
                        DELTIC_INLINE_LAMBDA {
                            Native scaled = to_floats(sum - biases[r]) * load_native(scales + w * kNative) * units[r];
                            store(scores + r * kScores + w * kNative, scaled);
                        });
                    fetch = Fetch(panel);
                });
            }
        }
    }
    // Prefetches the keys two panels ahead, after the last keys the part's first values.
    Fetch after_panel(int64_t position, int64_t h) const {
        int64_t next = position + 2 * kPanel;
        if (next < positions) return fetch_of(call.kv.keys, next, h);
        return fetch_of(call.kv.values, least(next - positions, positions - 1), h);
    }
    // Prefetches two pages from a position on, within the part.
    Fetch fetch_of(const void *pool, int64_t position, int64_t h) const {
        const T *one = page(pool, position) + h * dim;
        const T *other = position + kPage < positions ? page(pool, position + kPage) + h * dim : one;
        return Fetch(one, other, dim, call.token_bytes(8));
    }
    // Unpacks the keys of a page as quads [dim / 4, kPanel].
    void unpack_codes(const T *keys, int8_t *to) {
        int64_t step = call.token_bytes(8), whole = dim / 64 * 64;
        for (int64_t d = 0; d < whole; d += 64) {
            Words words[kLanes];
            transpose(keys + d, step, words);
#pragma GCC unroll 16
            for (int i = 0; i < kLanes; ++i) store(to + (d / 4 + i) * 4 * kPanel, biased(words[i]));
        }
        // bytes past the last dimension are multiplied by factors of 0
        for (int64_t d = whole; d < dim; d += 4)
            for (int i = 0; i < kPage; ++i) {
                uint32_t quad;
                std::memcpy(&quad, keys + i * step + d, 4);
                quad ^= kBias * 0x01010101u;
                std::memcpy(to + d * kPanel + 4 * i, &quad, 4);
            }
    }

    void weigh_int8(float *result) {
        for (int64_t i = 0; i < positions; i += kPage) read_scales(page(call.kv.values, i), i, space.int8.value_scales);
        soften_all(result);
        for (int64_t i = 0; i < positions; i += kBlock)
            for (int64_t h = 0; h < job.heads; ++h) weigh_block(h, i, result);
    }
    // Rounds weights times value scales of a block to eight-bit factors. The query sees `count` of its positions.
    // kDither is added before rounding so that many small weights keep their sum.
    void pack_weights(const float *weights, const float *scales, int64_t count, int64_t row, int64_t step,
                      int32_t *to) {
        alignas(64) int8_t codes[kBlock];
        float scaled[kBlock];
        for (int64_t i = 0; i < kBlock; i += kLanes) {
            Floats weight = i < count ? take(weights + i, count - i) * take(scales + i, count - i) : Floats{};
            store(scaled + i, weight);
        }
        Unit unit(largest(scaled, kBlock));
        Ints sums = {};
        Floats top = splat(kLargestCode);
        for (int64_t i = 0; i < kBlock; i += kLanes) {
            Ints rounded = to_nearest(minimum(loadf(scaled + i) * unit.inverse + loadf(kDither.at + i), top));
            to_s8(codes + i, rounded);
            sums += rounded;
        }
        space.int8.weight_units[row] = unit.size;
        space.int8.weight_biases[row] = bias_of(sums);
        for (int64_t quad = 0; quad < kBlock / 4; ++quad) std::memcpy(to + quad * step, codes + 4 * quad, 4);
    }
    // Adds the weighted values of the block that begins at position `first`.
    void weigh_block(int64_t h, int64_t first, float *result) {
        int64_t end = least(positions, first + kBlock), step = call.token_bytes(8), padded = call.padded;
        int8_t *block = space.int8.block;
        for (int64_t i = first; i < end; i += 4) {
            const T *from = page(call.kv.values, i) + h * dim + i % kPage * step;
            weave_all(from, step, block + (i - first) * padded);
        }
        bool last = end == positions, tiled = false;
        int32_t *factors = space.int8.factors;
        each_tile(h, first, [&](int64_t row, int64_t tile, auto padded_rows) {
            constexpr int R = padded_rows.value;
            for (int64_t r = 0; r < tile_rows(tile); ++r)
                pack_weights(space.scores + (row + r) * kScores + first, space.int8.value_scales + h * kPart + first,
                             least(seen(tile + r) - first, kBlock), row + r, R, factors + r);
            const float *units = space.int8.weight_units + row;
            const int32_t *biases = space.int8.weight_biases + row;
            Fetch fetch(block);
            for (int64_t d = 0; d < padded; d += kPanel) {
                float *to = result + row * call.record + d;
                // each half of the dimensions prefetches two of the next block's four pages
                if (!last && !tiled && d % pieces_of(padded, 2) == 0)
                    fetch = fetch_of(call.kv.values, least(end + (d ? 2 * kPage : 0), positions - 1), h);
                multiply<R, kWide>(block + 4 * d, 4 * padded, factors, pieces_of(end - first, 4), fetch,
                                   [&](int r, int w, NativeInts sum) DELTIC_INLINE_LAMBDA {
                                       Native scaled = to_floats(sum - biases[r]);
                                       float *own = to + r * call.record + w * kNative;
                                       Native before = first ? load_native(own) : Native{};
                                       store(own, fma(scaled, splat<Native>(units[r]), before));
                                   });
            }
            tiled = true;
        });
    }
    void weave_all(const T *from, int64_t step, int8_t *to) {
        const auto *codes = reinterpret_cast<const int8_t *>(from);
        int64_t whole = dim / kWoven * kWoven;
        for (int64_t d = 0; d < whole; d += kWoven) weave(codes + d, step, to + 4 * d);
        weave_part(codes + whole, step, dim - whole, to + 4 * whole);
    }

    // Adds the weighted values of positions [first, end); `values` points to `first`. All queries of the tile see the
    // positions before `shared` and process them together, and the other positions one query at a time.
    template <typename V>
    void weigh_tile(const V *values, int64_t stride, int64_t first, int64_t end, int64_t shared, const float *weights,
                    int64_t tile, float *sums) {
        int64_t middle = most(first, least(end, shared));
        if (first < middle)
            by_rows(tile_rows(tile), [&](auto padded) {
                weigh<padded.value, kWide>(values, stride, weights + first, middle - first, sums, call.record);
            });
        if (middle == end) return;
        for (int64_t r = 0; r < tile_rows(tile); ++r) {
            int64_t count = least(end, seen(tile + r)) - middle;
            if (count > 0)
                weigh<1, kWide>(values + (middle - first) * stride, stride, weights + r * kScores + middle, count,
                                sums + r * call.record, call.record);
        }
    }
};

// The jobs of a call, the long ones first: prefill rows, which are last in the batch, are planned from their ends.
template <typename T> struct Plan {
    const Call &call;
    int64_t threads;
    int64_t block = most(1, kJobQueries / call.group);  // tokens per job
    int64_t jobs = 0, cut = 0;                          // jobs to run; jobs that are cut into one per part
    int64_t rows = rows_of(call, block);                // maximum rows of a job
    int64_t results = 0;                                // floats of the results of cut jobs
    int64_t parts = 0;                                  // parts of all blocks of tokens

    // Calls body(job, cuts) for all jobs. cuts: cut the job into one per part.
    template <typename Body> void each(Body &&body) {
        const auto &batch = call.batch;
        for (int64_t row = batch.rows - 1; row >= 0; --row) {
            int64_t chunk = batch.starts[row + 1] - batch.starts[row];
            // A job takes whole pages (all heads) if there is enough work for all threads.
            bool together = parts >= 2 * threads && Worker<T>::direct(call, chunk);
            int64_t heads = together ? call.layer.kv_heads : 1;
            for (int64_t first = (chunk - 1) / block * block; first >= 0; first -= block)
                for (int64_t head = 0; head < call.layer.kv_heads; head += heads) {
                    int64_t tokens = least(block, chunk - first);
                    int64_t end = (batch.done[row] + first + tokens - 1) / kPart + 1;
                    int64_t step = heads * rows_of(call, tokens) * call.record;
                    body(Job{row, first, tokens, head, heads, 0, end, nullptr, step}, chunk <= kShortChunk && end > 1);
                }
        }
    }
    void count() {
        each([&](const Job &job, bool) { parts += job.head == 0 ? job.end : 0; });
        each([&](const Job &job, bool cuts) {
            jobs += cuts ? job.end : 1;
            cut += cuts;
            results += cuts ? job.end * job.step : 0;
            rows = most(rows, job.heads * rows_of(call, job.tokens));
        });
    }
    // list [jobs]: the jobs to run. whole [cut]: the jobs that are cut.
    void fill(Job *list, Job *whole, float *memory) {
        each([&](Job job, bool cuts) {
            if (!cuts) {
                *list++ = job;
                return;
            }
            job.results = memory;
            memory += job.end * job.step;
            *whole++ = job;
            for (int64_t part = 0; part < whole[-1].end; ++part) {
                job.part = part;
                job.end = part + 1;
                *list++ = job;
            }
        });
    }
};

// Calls body(T{}) for the element type T of K/V pages.
template <typename Body> void by_kv_type(int64_t type, Body &&body) {
    if (type == DELTIC_INT4) body(Int4{});
    else if (type == DELTIC_INT8) body(Int8{});
    else by_type(type, body);
}

// Calls body(token) in pieces so large that distributing them costs nothing.
template <typename Body> void by_token(deltic_pool *pool, int64_t tokens, int64_t width, Body &&body) {
    int64_t at_once = 16384 / width + 1;
    parallel(pool, pieces_of(tokens, at_once), [&](int64_t piece, int) {
        int64_t end = least(tokens, (piece + 1) * at_once);
        for (int64_t token = piece * at_once; token < end; ++token) body(token);
    });
}

// Uses scratch slots 16 to 19.
template <typename T> void run(deltic_pool *pool, Call &call) {
    int64_t tokens = call.batch.tokens;
    call.queries = scratch_of<float>(pool, 16, (tokens * call.layer.heads + kLanes) * call.dim);  // pads the last tile
    by_token(pool, tokens, call.width(), [&](int64_t token) { prepare_token<T>(call, token); });

    Plan<T> plan{call, pool_threads(pool)};
    plan.count();
    Job *jobs = scratch_of<Job>(pool, 17, plan.jobs + plan.cut), *whole = jobs + plan.jobs;
    plan.fill(jobs, whole, scratch_of<float>(pool, 18, plan.results));
    int64_t floats = round_up(Space::floats(call, plan.rows), kLanes);
    float *memory = scratch_of<float>(pool, 19, floats * pool_threads(pool));
    auto space_of = [&](int thread) { return Space(call, plan.rows, memory + thread * floats); };
    parallel(pool, plan.jobs, [&](int64_t piece, int thread) {
        Space space = space_of(thread);
        Worker<T>{call, jobs[piece], space}.run();
    });
    // Merging a few parts is faster than waking a thread.
    int64_t merged = plan.results < 65536 ? most(1, plan.cut) : 1;
    parallel(pool, (plan.cut + merged - 1) / merged, [&](int64_t piece, int thread) {
        Space space = space_of(thread);
        for (int64_t i = piece * merged; i < least(plan.cut, (piece + 1) * merged); ++i)
            Worker<T>{call, whole[i], space}.merge_parts();
    });
}

}  // namespace

void attention(deltic_pool *pool, const deltic_attention_layer &layer, const deltic_kv &kv, const deltic_batch &batch,
               const float *cosines, const float *sines, const float *proj, float *out) {
    int64_t padded = round_up(layer.head_dim, kPanel);
    Call call{layer,  kv, batch, cosines, sines, proj, nullptr, out, layer.head_dim, layer.heads / layer.kv_heads,
              padded, padded + kLanes};
    by_kv_type(kv.type, [&](auto kept) { run<decltype(kept)>(pool, call); });
}

void store_kv(deltic_pool *pool, const deltic_attention_layer &layer, const deltic_kv &kv, const deltic_batch &batch,
              const float *cosines, const float *sines, const float *proj) {
    Call call{layer, kv, batch, cosines, sines, proj, nullptr, nullptr, layer.head_dim};
    int64_t width = 2 * call.stride();
    by_token(pool, batch.tokens, width, [&](int64_t token) {
        const float *keys = proj + token * width;
        by_kv_type(kv.type, [&](auto kept) { store_token<decltype(kept)>(call, token, keys); });
    });
}

}  // namespace deltic::DELTIC_LEVEL
