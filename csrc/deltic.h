/* Native CPU kernels of deltic: a flat C interface.
 *
 * Pointers are borrowed: for the call, or, inside structs that are passed again and again, by whoever made them.
 * Activations are float32, row-major. Arguments are not checked: there may be no tokens, rows, logits or emits, but
 * every other size is at least 1. A status is 0; -1 where memory ran out: a step may then have moved states that it
 * reads and writes in place, all else can be done again; -2 where a batch points outside of the stores or the
 * vocabulary, or contradicts itself: nothing was done; -3 where experts could not be read (deltic_expert_store_failure
 * says why), with states as after -1. A pool serves one call at a time; calls on different pools know
 * nothing of each other. */
#ifndef DELTIC_H
#define DELTIC_H
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Changes whenever something below does. */
#define DELTIC_ABI 19
int deltic_abi(void);

/* Tokens of a page, entries of a unit of a replay ring, rows of a matrix that are packed together, slices of columns that
 * are spread over devices (deltic/ops/slices.py); the functions give those that the library was compiled with. */
#define DELTIC_PAGE 16
#define DELTIC_RING 16
#define DELTIC_PANEL 16
#define DELTIC_SLICES 8
int deltic_page(void);
int deltic_ring(void);
int deltic_panel(void);
int deltic_slices(void);

/* ---- Processor levels: which instructions the kernels use. Results differ between levels of x86-64 by rounding. */

enum { DELTIC_PORTABLE, DELTIC_AVX2, DELTIC_AVX512, DELTIC_VNNI, DELTIC_BF16_LEVEL, DELTIC_AMX, DELTIC_LEVELS };
enum { DELTIC_ARM_PORTABLE, DELTIC_DOTPROD, DELTIC_I8MM }; /* of ARM64, where all give the same bits */

/* The best level of this processor. */
int deltic_best_level(void);

/* ---- Threads at a level, and their scratch memory. */

typedef struct deltic_pool deltic_pool;
/* `threads` counts the calling one. NULL if memory ran out, or if the processor or the build lacks the level. */
deltic_pool *deltic_pool_new(int threads, int level);
void deltic_pool_free(deltic_pool *pool);

/* ---- Matrices: the numbers of a GGUF tensor, in the kernels' order, in as many bytes (and rows of padding). */

/* The types, numbered as in GGUF files as far as these have them. */
enum {
    DELTIC_F32 = 0, DELTIC_F16 = 1, DELTIC_Q4_0 = 2, DELTIC_Q4_1 = 3, DELTIC_Q5_0 = 6, DELTIC_Q5_1 = 7, DELTIC_Q8_0 = 8,
    DELTIC_Q2_K = 10, DELTIC_Q3_K = 11, DELTIC_Q4_K = 12, DELTIC_Q5_K = 13, DELTIC_Q6_K = 14, DELTIC_IQ4_NL = 20,
    DELTIC_IQ4_XS = 23, DELTIC_BF16 = 30, DELTIC_MXFP4 = 39,
    DELTIC_INT4 = 1000, DELTIC_INT8 = 1005, /* of keys and values alone: see deltic/ops/kv.py */
    /* which GGUF files do not have: see deltic/loader/four_bits.py */
    DELTIC_NVFP4 = 1001, DELTIC_INT4_32 = 1002, DELTIC_INT4_64 = 1003, DELTIC_INT4_128 = 1004
};

/* data: `deltic_packed_bytes` bytes, aligned to 64, filled by deltic_pack. */
typedef struct {
    int64_t type, rows, columns;
    const void *data;
} deltic_matrix;

/* A linear layer: the rows of up to four matrices, one after another, with equally many columns.
 * slices: 0, and a row is summed from its first column to its last one; or a power of two, up to DELTIC_SLICES, of slices
 * of the columns that are summed so, and then added in pairs. A slice has a range of columns in each of `runs` runs. See
 * column_slices in deltic/ops/slices.py. */
typedef struct {
    int64_t count;
    deltic_matrix parts[4];
    int64_t slices, runs;
} deltic_weight;

/* Bytes of a packed matrix; -1 for an unknown type or columns that are no multiple of its block. All functions below
 * take it for granted that there is such a matrix. */
int64_t deltic_packed_bytes(int64_t type, int64_t rows, int64_t columns);
/* Pack whole rows as they lie in a GGUF file. `first` is the number of the first of them in the matrix, a multiple of
 * DELTIC_PANEL; `count` is one too, unless these are the last rows. */
void deltic_pack(int64_t type, const void *blocks, int64_t first, int64_t count, int64_t columns, void *packed);
/* The numbers of single rows: out [count, columns]. Needs no pool; any thread may call it. */
void deltic_unpack_rows(const deltic_matrix *matrix, const int64_t *rows, int64_t count, float *out);
/* Copies rows of a packed matrix over rows of another one of the same type and columns. Needs no pool. */
void deltic_copy_rows(const deltic_matrix *from, const int64_t *rows, int64_t count, const deltic_matrix *to,
                      const int64_t *places);
/* Rows of numbers to rows of blocks as they lie in a GGUF file, of Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K, Q5_K or Q6_K; -1
 * for another type or columns that are no multiple of its block. No number may be beyond float16 or NaN. Needs no pool;
 * any thread may call it. Likewise to blocks of NVFP4 and INT4_*. */
int deltic_quantize(int64_t type, const float *x, int64_t rows, int64_t columns, void *blocks);

/* y [tokens, rows of all parts] = x [tokens, columns] weight^T. Quantized types multiply with activations rounded to
 * 8 bits in blocks of 256 (of 32 where columns is no multiple of 256), bfloat16 with bfloat16 activations, all others
 * with float32. A row of y does not depend on how many tokens there are. */
int deltic_linear(deltic_pool *pool, const float *x, int64_t tokens, const deltic_weight *weight, float *y);

/* ---- Adapters: low-rank terms that are added to products. */

/* y[first .. first + rows) += b (a x) for one token, in float32. a [rank, columns]; b in panels of DELTIC_PANEL rows,
 * [rows / DELTIC_PANEL, rank, DELTIC_PANEL], rounded up with zeros. type: DELTIC_F32, DELTIC_F16 or DELTIC_BF16. */
typedef struct {
    const void *a, *b;
    int64_t type, rank, columns, first, rows;
} deltic_low_rank;

/* Those of one product. Their rows do not overlap. */
typedef struct {
    int64_t count;
    const deltic_low_rank *parts;
} deltic_low_ranks;

/* The products of a layer. The rows of a router's product are as in deltic_moe_layer. */
enum {
    DELTIC_IN, DELTIC_OUT, DELTIC_GATE_UP, DELTIC_DOWN, DELTIC_ROUTER, DELTIC_SHARED_GATE_UP, DELTIC_SHARED_DOWN,
    DELTIC_PRODUCTS
};
typedef struct {
    deltic_low_ranks products[DELTIC_PRODUCTS];
    const deltic_low_ranks *experts; /* [experts, 2]: gate_up and down of each; null: none */
} deltic_adapter_layer;

typedef struct {
    const deltic_adapter_layer *layers; /* [layers of the model] */
    deltic_low_ranks head;
} deltic_adapter;

/* ---- A step: one ragged batch. Rows of one token come first. See deltic/ops/types.py, class Batch. */

typedef struct {
    int64_t rows, tokens, logits, emits, table, given; /* table: pages per row of `pages` */
    const int64_t *ids;          /* [tokens] */
    const int64_t *positions;    /* [3, tokens] */
    const int64_t *starts;       /* [rows + 1] */
    const int64_t *done;         /* [rows] */
    const int64_t *pages;        /* [rows, table] */
    const int64_t *store;        /* [tokens] */
    const int64_t *source;       /* [rows] */
    const int64_t *target;       /* [rows] */
    const int64_t *base;         /* [rows]; like the next two not read where the states have no replay rings */
    const int64_t *ring;         /* [rows] */
    const uint8_t *append;       /* [rows] */
    const int64_t *emit_row;     /* [emits] */
    const int64_t *emit_length;  /* [emits] */
    const int64_t *emit_slot;    /* [emits] */
    const int64_t *logit_tokens; /* [logits], ascending */
    const int64_t *given_tokens; /* [given]: those that have no embedding */
    const float *given_rows;     /* [given, hidden]: but these instead */
    /* Only deltic_forward adds the terms of adapters. The bits of a token do not depend on those of other tokens. */
    int64_t adapters;            /* 0: the next two are not read */
    const int64_t *adapter;      /* [tokens]: the number of each token's adapter; -1: none */
    const deltic_adapter *const *adapter_list; /* [adapters] */
} deltic_batch;

typedef struct {
    deltic_weight in_proj;   /* rows q, k, v, z, b, a */
    deltic_weight out_proj;
    const float *conv;       /* [channels, kernel] */
    const float *decay;      /* [value_heads]: -exp(A_log) */
    const float *dt_bias;    /* [value_heads] */
    const float *norm;       /* [value_dim] */
    int64_t key_heads, value_heads, key_dim, value_dim, kernel;
    int64_t tiled;           /* value head i is of key head i mod key_heads, not of i / (value_heads / key_heads) */
    float eps;
} deltic_gdn_layer;

typedef struct {
    float *recurrent;        /* [slots, value_heads, key_dim, value_dim] */
    void *conv;              /* [slots, places, channels] of `type`: raw inputs, that of position p at p mod places */
    int64_t places, type;    /* at least kernel - 1; DELTIC_F32, DELTIC_F16 or DELTIC_BF16 */
    /* Replay rings: units of DELTIC_RING entries, that of position p at p mod that; all null if there are none. */
    void *inputs;            /* [units, ring, channels] of `type`: raw inputs */
    float *keys;             /* [units, ring, key_heads, key_dim] */
    float *updates;          /* [units, ring, value_heads, value_dim] */
    float *decays;           /* [units, ring, value_heads] */
    int64_t slots, units;
} deltic_states;

typedef struct {
    deltic_weight qkv;       /* rows of q (with a gate: per head its query, then its gate), k, v */
    deltic_weight o_proj;
    const float *q_norm, *k_norm; /* [head_dim]; null: heads are not normed */
    const float *bias;       /* [rows of qkv], or null; deltic_forward adds it to what qkv gives */
    int64_t heads, kv_heads, head_dim, rotary_dim;
    int64_t gate;            /* the output is multiplied with sigmoid(gate) */
    float eps;
} deltic_attention_layer;

typedef struct {
    void *keys, *values;     /* [pages, DELTIC_PAGE, kv_heads, head_dim] of `type` */
    int64_t type;            /* DELTIC_F32, DELTIC_F16, DELTIC_BF16; DELTIC_INT4: head_dim a power of two, 16 to 256;
                              * DELTIC_INT8: head_dim up to 1024 */
    int64_t pages;
} deltic_kv;

/* What lies between the projections of a layer. proj [tokens, rows of in_proj or qkv]; out [tokens, value_heads *
 * value_dim or heads * head_dim]. States: rows with base = 0, or done = 0 where there are no rings, start from zero.
 * Written are the target slots, but for those of rows that append and fit, the rings of rows that append, and the emit
 * slots. cosines, sines [tokens, rotary_dim]. */
int deltic_gdn(deltic_pool *pool, const deltic_gdn_layer *layer, const deltic_states *states, const deltic_batch *batch,
               const float *proj, float *out);
int deltic_attention(deltic_pool *pool, const deltic_attention_layer *layer, const deltic_kv *kv,
                     const deltic_batch *batch, const float *cosines, const float *sines, const float *proj,
                     float *out);

/* Writes slot `target` in `count` layers of one shape, for which `layer` stands: slot `source`, which is as of `base`
 * tokens, brought to `done` by entries of unit `ring`. The source may be the target. */
int deltic_fold_ring(deltic_pool *pool, const deltic_gdn_layer *layer, const deltic_states *states, int64_t count,
                     int64_t source, int64_t ring, int64_t base, int64_t done, int64_t target);

/* Stores keys and values as deltic_attention does. weight: rows k, v; x [tokens, its columns]. Where weight is null, x
 * is its product [tokens, 2 * kv_heads * head_dim] already. Of the layer its norm of keys and its shape count. */
int deltic_store_kv(deltic_pool *pool, const deltic_attention_layer *layer, const deltic_weight *weight,
                    const deltic_kv *kv, const deltic_batch *batch, const float *cosines, const float *sines,
                    const float *x);

/* total [tokens, width] = residual + delta (delta may be null, total may be residual);
 * normed = total / sqrt(mean(total^2) + eps) * scale. */
void deltic_add_norm(deltic_pool *pool, const float *residual, const float *delta, const float *scale, float *total,
                     float *normed, int64_t tokens, int64_t width, float eps);
/* y = down(silu(gate) * up), gate and up being the two halves of the rows of gate_up. */
int deltic_mlp(deltic_pool *pool, const float *x, int64_t tokens, const deltic_weight *gate_up,
               const deltic_weight *down, float *y);

/* ---- Experts of which a few lie in memory and the others in files, which are read while a step computes. Whoever is
 * where, results are the same to the bit. */

typedef struct deltic_expert_store deltic_expert_store;

/* Where a matrix begins: rows of blocks as they lie in a GGUF file. */
typedef struct {
    int64_t file, offset;
} deltic_extent;

typedef struct {
    int64_t slots;                /* experts that are in memory at the same time, at least 1 */
    int64_t rows, columns;        /* of gate and up; down has as many columns and rows */
    int64_t types[3];             /* of gate, up and down */
    const deltic_extent *extents; /* [experts, 3]: gate, up, down */
} deltic_stored_layer;

/* files: descriptors, open for reading as long as the store lives; those with O_DIRECT are read past the page cache.
 * readers: threads that read. refresh: of so many steps one may exchange who stays in memory; those that read prompts
 * (more than 16 tokens) may always. NULL if memory ran out. */
deltic_expert_store *deltic_expert_store_new(const deltic_stored_layer *layers, int64_t count, int64_t experts,
                                             const int *files, int64_t file_count, int readers, int64_t refresh);
void deltic_expert_store_free(deltic_expert_store *store);
/* Reads experts into the first slots of a layer, as far as they go; before the first step. Status 0, -1 or -3. */
int deltic_expert_store_fill(deltic_expert_store *store, int64_t layer, const int64_t *experts, int64_t count);

/* Why status -3 came: what the system calls the error (errno), or one of these; and of which file. */
enum { DELTIC_FILE_ENDED = -1, DELTIC_FILE_CHANGED = -2 };
int64_t deltic_expert_store_failure(const deltic_expert_store *store, int64_t *file);

/* How often each expert of a layer was passed lately [experts]; may be changed between steps. */
float *deltic_expert_store_scores(deltic_expert_store *store, int64_t layer);

/* Since the store was made. Times in nanoseconds. */
typedef struct {
    int64_t bytes;               /* read from files */
    int64_t promotions;          /* experts that took the slot of another one */
    int64_t refreshes;           /* times that those of a layer might */
    int64_t waited;              /* by steps */
    int64_t reading;             /* in which something was being read */
    int64_t predicted, useful;   /* experts that were read ahead of their layer, and those of them that it wanted */
} deltic_expert_counts;
/* hits, misses [layers]: experts that a step wanted of a layer, and that were or were not in memory. Any thread may
 * call it. */
void deltic_expert_store_count(const deltic_expert_store *store, deltic_expert_counts *counts, int64_t *hits,
                               int64_t *misses);

/* A mixture of experts: each token passes `per_token` of them, those with the largest softmax of the router's logits (of
 * equal ones the lower number first), and the shared one, if there is one. */
typedef struct {
    deltic_weight gate_up, down;
} deltic_expert;
typedef struct deltic_moe_layer {
    deltic_weight router;        /* rows of the experts; with a shared one, last the row of its gate */
    const deltic_expert *expert; /* [own], and the shared one behind them */
    int64_t experts, per_token;
    int64_t first, own;          /* the neighbouring experts whose weights are here; others are left out of the sum */
    int64_t slices;              /* of these experts, as of slice_ends(own, 1, slices): at least 1, up to DELTIC_SLICES */
    int64_t shared;              /* whether there is a shared expert, whose `down` has as many slices */
    int64_t normalised;          /* the shares of a token's experts add up to 1 */
    deltic_expert_store *store;  /* null: `expert` has all; else it has the shared one alone, in its place */
    int64_t stored;              /* the layer's number in the store */
    const struct deltic_moe_layer *next; /* one of the same store whose experts shall be predicted, or null */
} deltic_moe_layer;

/* y [tokens, hidden]: the sum of what deltic_mlp gives for each of a token's experts times its share, and of the shared
 * expert times sigmoid of its gate. Slices are added in pairs; in a slice the best expert comes first, last the slice of
 * the shared one. An expert's weights are read once, for all tokens that pass it. A row of y does not depend on the other
 * tokens. */
int deltic_moe(deltic_pool *pool, const float *x, int64_t tokens, const deltic_moe_layer *layer, float *y);

/* ---- Experts that threads of the host compute beside a GPU, which asks for them through memory that both see. */

typedef struct deltic_beside deltic_beside;

/* weights [layers]: bfloat16 [experts, 3, size, hidden] of each layer: an expert's gate, the other half of its rows, then
 * what comes after them, [hidden, size]. Read as long as the object lives.
 * packed [layers]: where a layer's weights are null, it has one expert, which is packed. Gate and other half are
 * one matrix or several. packed is null if no layer is like that. */
typedef struct {
    int64_t hidden, size, experts, layers;
    int64_t most;               /* experts of a token */
    const void *const *weights;
    const deltic_expert *packed;
} deltic_beside_model;

/* Who asks writes a request, and last its number, another one than before; then it may not touch the request until
 * `answer` is that number, which is when `sums` are there. Both numbers begin alike. */
typedef struct {
    uint32_t *request;          /* [3]: its number, the layer, the tokens, up to DELTIC_PAGE */
    uint32_t *answer;           /* [1] */
    const int32_t *counts;      /* [DELTIC_PAGE]: experts of each token, none or more */
    const int32_t *experts;     /* [DELTIC_PAGE, most]: which, in the order in which they are added up */
    const float *shares;        /* [DELTIC_PAGE, most] */
    const float *factors;       /* [DELTIC_PAGE]: what the products of a token's input are to be multiplied with */
    const uint16_t *input;      /* [DELTIC_PAGE, hidden] bfloat16 */
    float *sums;                /* [DELTIC_PAGE, hidden]: of tokens that have experts; NaN if the request makes no sense */
} deltic_mailbox;

/* Sums of down(silu(gate) * other * share) over a token's experts, with what lies between the products rounded to
 * bfloat16. A token's bits depend on its own experts alone, and on no number of threads. `threads` at a level take part.
 * NULL if memory or threads ran out, or if the processor or the build lacks the level. */
deltic_beside *deltic_beside_new(const deltic_beside_model *model, const deltic_mailbox *mailbox, int threads, int level);
/* Ends the threads when a request that they are at is done. */
void deltic_beside_free(deltic_beside *beside);
/* Requests may come: threads listen from now on, and for a minute after the last one. Needs no turn; any thread may call
 * it. */
void deltic_beside_wake(deltic_beside *beside);
/* Since it was made: experts that were computed, each once for a request, and the time that requests took. Any thread may
 * call it. */
void deltic_beside_count(const deltic_beside *beside, int64_t *experts, int64_t *nanoseconds);

/* Changes a row of logits in place: positive ones are divided by repetition [width], others multiplied by it; then
 * offset [width] is added, where -inf forbids the token. Either may be null: 1, or 0, everywhere. */
int deltic_adjust(deltic_pool *pool, float *logits, int64_t width, const float *repetition, const float *offset);

/* The `count` largest logits of each row, best first and of equal ones the lower id first: values, ids [rows, count]
 * (-inf and 0 where the row has fewer). healthy [rows]: all logits are finite, and they differ by 1e-6 or more. With
 * temperatures [rows], taken to be at least 1e-9, also log_totals [rows]: log of the sum of exp(logit / temperature);
 * else both are null. */
int deltic_top(deltic_pool *pool, const float *logits, int64_t rows, int64_t width, int64_t count,
               const float *temperatures, float *values, int64_t *ids, double *log_totals, uint8_t *healthy);

/* How tokens are drawn; all [rows]. temperature 0: the best token. top_k 0: all. filtered: some row has top_k, top_p or
 * min_p. */
typedef struct {
    const float *temperatures;
    const int64_t *top_k;
    const float *top_p, *min_p;
    const int64_t *keys;
    int64_t filtered;
    const int64_t *tokens; /* [width]: the ids that logits have in the noise; null: their numbers in the row */
} deltic_drawing;

/* Draws a token of each row: among those that the filters keep, the largest logit / temperature + Gumbel noise of (key,
 * id) wins. values, ids [rows, count], log_totals [rows]: what deltic_top found with these temperatures; without
 * filters a count of 1 does, and log_totals is not read. What a row gives depends on that row and on `count` alone.
 * Rows that are not healthy get any token. */
int deltic_draw(deltic_pool *pool, const float *logits, int64_t rows, int64_t width, int64_t count, const float *values,
                const int64_t *ids, const double *log_totals, const deltic_drawing *drawing, int64_t *tokens);

/* ---- A whole model. */

/* One of gdn and attention is null. */
typedef struct {
    const float *input_norm, *post_norm; /* [hidden] */
    const deltic_gdn_layer *gdn;
    const deltic_states *states;
    const deltic_attention_layer *attention;
    const deltic_kv *kv;
    deltic_weight gate_up, down; /* not read where there are experts */
    const deltic_moe_layer *moe; /* null: the layer is dense */
} deltic_layer;

typedef struct {
    int64_t hidden, layers;
    const deltic_layer *layer;
    deltic_matrix embedding;
    deltic_weight head;
    const float *norm;
    const float *frequencies; /* [rotary_dim / 2]: radians per position */
    const int64_t *axes;      /* [rotary_dim / 2]: which of the three positions turns a frequency */
    int64_t rotary_dim;       /* of every attention layer */
    float eps;
    float attention_factor;   /* multiplies cosines and sines; 1 without YaRN */
} deltic_model;

/* Runs a step. logits [logits, vocabulary]: of the tokens in logit_tokens. final_hidden [tokens, hidden]: all tokens
 * after the last norm; null if they are not wanted, which spares work. */
int deltic_forward(deltic_pool *pool, const deltic_model *model, const deltic_batch *batch, float *final_hidden,
                   float *logits);

/* ---- A draft head (multi-token prediction): one more attention layer, which takes a token and the hidden state before
 * it, after the model's last norm, and drafts the token that follows. */

typedef struct {
    deltic_model model;         /* its layer and norm, the embedding of its tokens, the rows that it drafts with */
    deltic_weight fc;           /* [hidden, 2 * hidden]: columns of the embedding, then of the hidden state */
    deltic_weight kv;           /* the rows k, v of its layer's qkv */
    const float *norm_embedding, *norm_hidden; /* [hidden] */
    const int64_t *tokens;      /* the id of each row that it drafts with; null: the row's number */
} deltic_mtp;

/* To be called after every step of the model: stores the head's keys and values of the step's tokens. hidden [tokens,
 * hidden]: what deltic_forward gave. slots [slots, hidden]: the hidden state of each slot's last token; read at the
 * sources, written at the targets of rows that do not append, and at the emit slots. */
int deltic_mtp_follow(deltic_pool *pool, const deltic_mtp *head, const deltic_batch *batch, const float *hidden,
                       float *slots);

/* Drafts what follows the tokens of a batch of single-token rows, counts[row] of at most `most` tokens each: tokens
 * [rows, most], drawn as `drawing` says, whose keys are [rows, most]. The pages of a row must have room for as many
 * tokens from `done` on; their keys and values are overwritten. */
int deltic_mtp_draft(deltic_pool *pool, const deltic_mtp *head, const deltic_batch *batch,
                      const int64_t *counts, int64_t most, const float *slots, const deltic_drawing *drawing,
                      int64_t *tokens);

/* ---- An encoder: layers in which all tokens of a sequence see each other, with norms behind the sums (BERT). */

typedef struct {
    const float *scale, *shift; /* [hidden] */
} deltic_layer_norm;

typedef struct {
    deltic_weight qkv, out, up, down;                             /* rows of qkv: q, k, v of all heads each */
    const float *qkv_bias, *out_bias, *up_bias, *down_bias;       /* as many as there are rows */
    deltic_layer_norm attention_norm, output_norm;
} deltic_encoder_layer;

typedef struct {
    int64_t hidden, heads, layers;
    const deltic_encoder_layer *layer;
    deltic_layer_norm norm;     /* of the embeddings */
    float eps;
} deltic_encoder;

/* x [tokens, hidden]: the sum of each token's embeddings before their norm; becomes the last layer's output. Sequence i
 * has the tokens from starts[i] to starts[i + 1]; starts [sequences + 1] begins with 0 and ascends. What a sequence gets
 * does not depend on the others. */
int deltic_encode(deltic_pool *pool, const deltic_encoder *model, const int64_t *starts, int64_t sequences, float *x);

/* ---- A vision tower: an encoder whose norms come before attention and feed-forward, whose queries and keys turn with a
 * patch's row and column, and whose GELU is the approximation by a hyperbolic tangent. Its `norm` is not read. A block is
 * three calls, of which each can be made for some of the patches at a time. */

/* Which part of the attention within one picture. */
typedef struct {
    const float *cosines, *sines;    /* [patches, head_dim / 2]: numbers i and i + head_dim / 2 of a head turn together */
    int64_t first_head, end_head;    /* of these heads */
    int64_t first, end;              /* and these patches, which look at all of them */
    int64_t narrow;                  /* queries, keys, weights and values may be rounded to bfloat16 */
} deltic_vision_part;

/* qkv [patches, 3 * hidden] = the norm of x [patches, hidden] times qkv^T, still without its bias. */
int deltic_vision_project(deltic_pool *pool, const deltic_encoder *tower, int64_t block, const float *x,
                          int64_t patches, float *qkv);
/* mixed [patches, hidden]: the part of it that is asked for. qkv: of all patches of one picture. */
int deltic_vision_attend(deltic_pool *pool, const deltic_encoder *tower, int64_t block, const float *qkv,
                         int64_t patches, const deltic_vision_part *part, float *mixed);
/* x [patches, hidden] += mixed times out^T, with its bias, then += the feed-forward of its norm. */
int deltic_vision_finish(deltic_pool *pool, const deltic_encoder *tower, int64_t block, const float *mixed,
                         int64_t patches, float *x);

/* ---- Devices: memory and streams of the processor and of NVIDIA GPUs.
 *
 * Device 0 is the processor, device 1 the first GPU that the CUDA driver shows (CUDA's number 0), and so on. The driver
 * (libcuda.so.1) is opened at run time; without it the processor is the only device. GPUs are used in their primary
 * contexts, as the CUDA runtime and torch use them: addresses may be exchanged with them. The thread's current context
 * is the same after a call as before.
 *
 * Every function returns 0 or one of the statuses below, in which case nothing was done and deltic_devices_error has the
 * reason. Any thread may call; a stream serves one thread at a time.
 *
 * Checked are null pointers, numbers of devices and streams, sizes, addresses that are given back, and that what is
 * copied or set lies within memory of deltic_device_allocate where it begins in such memory. Other addresses are taken
 * as they are: of a GPU the driver refuses most that it does not know; a wrong one of the host's memory ends the
 * process. Not noticed are an address that is given back twice after it was allocated anew, memory that is given back
 * while another thread uses it, and a deltic_devices that was closed. */

enum { DELTIC_NO_MEMORY = -1, DELTIC_BAD_ARGUMENT = -2, DELTIC_NO_DEVICE = -4, DELTIC_DEVICE_FAILED = -5 };

typedef struct deltic_devices deltic_devices;
/* Finds the devices. A machine without a GPU or a driver is no error. */
int deltic_devices_open(deltic_devices **devices);
/* Gives back all memory and streams that are left, and the GPUs' contexts. */
int deltic_devices_close(deltic_devices *devices);
/* The reason of this thread's last failed call; "" if none has failed. Valid until its next call. */
const char *deltic_devices_error(deltic_devices *devices);

enum { DELTIC_DEVICE_CPU, DELTIC_DEVICE_CUDA };

typedef struct {
    int64_t kind;                       /* DELTIC_DEVICE_CPU or DELTIC_DEVICE_CUDA */
    int64_t number;                     /* of a GPU: CUDA's */
    int64_t memory_total, memory_free;  /* bytes; of the machine, whatever the process may have of it */
    int64_t major, minor;               /* compute capability of a GPU; 0 */
    int64_t cores;                      /* processors that the process may run on; multiprocessors of a GPU */
    char name[256];
} deltic_device_properties;

int deltic_device_count(deltic_devices *devices, int64_t *count);
/* Of a GPU this makes its context, if nobody has yet: only that has an account of free memory. */
int deltic_device_get(deltic_devices *devices, int64_t device, deltic_device_properties *properties);

/* At least 1 byte; not set to anything; aligned to 64 bytes, of a GPU to 256. */
int deltic_device_allocate(deltic_devices *devices, int64_t device, int64_t bytes, void **memory);
/* Waits for what a GPU's streams still do with it. NULL is fine. */
int deltic_device_free(deltic_devices *devices, void *memory);

/* A stream does its copies one after another. Those of the processor are done when the call returns. */
int deltic_stream_new(deltic_devices *devices, int64_t device, int64_t *stream);
/* Waits for what it still has to do. Numbers of streams do not come again. */
int deltic_stream_free(deltic_devices *devices, int64_t stream);
int deltic_stream_synchronize(deltic_devices *devices, int64_t stream);

/* Copies between any two devices; sets bytes to a value from 0 to 255. stream: of a GPU that takes part, or of the
 * processor where none does; 0: the call returns when all is done. On a stream of a GPU the memory must stay as it is
 * until the stream was synchronized. Source and target may overlap on the processor only. */
int deltic_device_copy(deltic_devices *devices, int64_t target_device, void *target, int64_t source_device,
                       const void *source, int64_t bytes, int64_t stream);
int deltic_device_set(deltic_devices *devices, int64_t device, void *memory, int value, int64_t bytes,
                      int64_t stream);

#ifdef __cplusplus
}
#endif
#endif
