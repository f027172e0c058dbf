// The kernel table of every processor level.
#pragma once
#include "deltic.h"

namespace deltic {

// Some rows of x times a weight: row i of y [count, stride] gets x[rows[i]] weight^T in its leading columns. rows null:
// the rows 0, 1, ...
struct Product {
    const deltic_weight *weight;
    const float *x;
    const int64_t *rows;
    int64_t count;
    float *y;
    int64_t stride;
    int64_t apart = 0;                 // distance in floats between the y of two slices; 0: slices are added in pairs
    bool fine = false, again = false;  // as in linear_fine
};

// Full attention within each sequence. Sequence i has the tokens starts[i] .. starts[i + 1] - 1.
struct Attention {
    const float *qkv, *bias;        // [tokens, 3 * hidden], [3 * hidden]: queries of all heads, then keys, then values
    const float *cosines, *sines;   // [tokens, head_dim / 2]: rotary factors of queries and keys; null: no rotation
    const int64_t *starts;          // [sequences + 1]
    int64_t sequences, heads, head_dim;
    int64_t first_head, end_head;   // range of heads to compute
    int64_t first, end;             // range of queries to compute in each sequence, as far as it has them
    bool narrow;                    // allows rounding of queries, keys, attention weights and values to bfloat16
    float *out;                     // [tokens, hidden]
};

// Functions that every level defines in its namespace, from the same sources. See deltic.h and matrix.hpp.
#define DELTIC_KERNELS                                                                                                 \
    void linear(deltic_pool *pool, const float *x, int64_t tokens, const deltic_weight &weight, float *y,              \
                int64_t stride);                                                                                       \
    void linear_fine(deltic_pool *pool, const float *x, int64_t tokens, const deltic_weight &weight, float *y,         \
                     int64_t stride, bool again);                                                                      \
    void linear_many(deltic_pool *pool, const Product *products, int64_t count);                                       \
    void gdn(deltic_pool *pool, const deltic_gdn_layer &layer, const deltic_states &states, const deltic_batch &batch, \
            const float *proj, float *out);                                                                            \
    void attention(deltic_pool *pool, const deltic_attention_layer &layer, const deltic_kv &kv,                        \
                  const deltic_batch &batch, const float *cosines, const float *sines, const float *proj, float *out); \
    void fold_ring(deltic_pool *pool, const deltic_gdn_layer &layer, const deltic_states *states, int64_t count,       \
                   int64_t source, int64_t ring, int64_t base, int64_t done, int64_t target);                          \
    void store_kv(deltic_pool *pool, const deltic_attention_layer &layer, const deltic_kv &kv,                         \
                  const deltic_batch &batch, const float *cosines, const float *sines, const float *proj);             \
    void add_norm(deltic_pool *pool, const float *residual, const float *delta, const float *scale, float *total,      \
                  float *normed, int64_t tokens, int64_t width, float eps);                                            \
    void silu_mul(deltic_pool *pool, const float *gate_up, float *out, int64_t tokens, int64_t width);                 \
    void top(deltic_pool *pool, const float *logits, int64_t rows, int64_t width, int64_t count,                       \
             const float *temperatures, float *values, int64_t *ids, double *log_totals, uint8_t *healthy);            \
    void adjust(deltic_pool *pool, float *logits, int64_t width, const float *repetition, const float *offset);        \
    void draw_any(deltic_pool *pool, const float *logits, int64_t rows, int64_t width, const float *temperatures,      \
                  const int64_t *keys, const float *values, const int64_t *ids, const int64_t *names,                  \
                  int64_t *tokens);                                                                                    \
    void full_attention(deltic_pool *pool, const Attention &work);                                                     \
    void layer_norm(deltic_pool *pool, const float *residual, const float *delta, const float *bias,                   \
                    const float *scale, const float *shift, float *out, int64_t tokens, int64_t width, float eps);     \
    void gelu(deltic_pool *pool, float *x, const float *bias, int64_t tokens, int64_t width, bool tanh);               \
    void add_bias(deltic_pool *pool, float *x, const float *delta, const float *bias, int64_t tokens, int64_t width);    \
    void dots(const uint16_t *rows, int64_t count, int64_t columns, const float *const *x, int64_t vectors,            \
              float *out, int64_t stride);                                                                             \
    void gate_rounded(const float *gate, const float *other, float factor, float share, int64_t count, float *out);    \
    void low_rank_in(const deltic_low_rank &part, int64_t first, int64_t count, const float *const *x,                 \
                     int64_t vectors, float *between);                                                                 \
    void low_rank_out(const deltic_low_rank &part, int64_t begin, int64_t end, const float *between, int64_t vectors,  \
                      float *const *y);

#define DELTIC_DECLARE(level)                                                                                          \
    namespace level {                                                                                                  \
    DELTIC_KERNELS                                                                                                     \
    }
DELTIC_DECLARE(portable)
#if defined(__x86_64__)
DELTIC_DECLARE(avx2)
DELTIC_DECLARE(avx512)
DELTIC_DECLARE(vnni)
DELTIC_DECLARE(bf16)
DELTIC_DECLARE(amx)  // only linear layers; the other kernels are those of bf16
#elif defined(__aarch64__)
DELTIC_DECLARE(dotprod)
DELTIC_DECLARE(i8mm)
#endif

struct Kernels {
    decltype(&portable::linear) linear;
    decltype(&portable::linear_fine) linear_fine;
    decltype(&portable::linear_many) linear_many;
    decltype(&portable::gdn) gdn;
    decltype(&portable::attention) attention;
    decltype(&portable::fold_ring) fold_ring;
    decltype(&portable::store_kv) store_kv;
    decltype(&portable::add_norm) add_norm;
    decltype(&portable::silu_mul) silu_mul;
    decltype(&portable::top) top;
    decltype(&portable::adjust) adjust;
    decltype(&portable::draw_any) draw_any;
    decltype(&portable::full_attention) full_attention;
    decltype(&portable::layer_norm) layer_norm;
    decltype(&portable::gelu) gelu;
    decltype(&portable::add_bias) add_bias;
    // These run in the calling thread only. See rows.cpp.
    decltype(&portable::dots) dots;
    decltype(&portable::gate_rounded) gate_rounded;
    decltype(&portable::low_rank_in) low_rank_in;
    decltype(&portable::low_rank_out) low_rank_out;
};

// Prefetch distance of weights into L2, in bytes. The kernels compute too slowly for the hardware prefetchers of some
// processors to detect the stream.
int64_t fetch_ahead(bool sequential);

// The kernels of a level; null if the processor or the build lacks it.
const Kernels *kernels_of(int level);

// The kernels of a pool's level.
const Kernels &kernels(const deltic_pool *pool);

}  // namespace deltic
