/* Native CPU kernels of deltic: a flat C interface. Pointers are borrowed for the call; nothing is allocated for the
 * caller. Matrices are row-major. Types: DELTIC_F32, DELTIC_BF16. */
#ifndef DELTIC_H
#define DELTIC_H
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

enum { DELTIC_F32 = 0, DELTIC_BF16 = 1 };

/* Changes whenever a signature below does. */
int deltic_abi(void);

/* 1 if this processor multiplies bfloat16 pairs (AVX-512 BF16), which deltic_linear_bf16 needs. */
int deltic_has_bf16(void);

/* y [tokens, out] f32 = x [tokens, in] w^T, w [out, in], x and w bfloat16; in is a multiple of 64, tokens at most 8.
 * Each y is summed in one order, whatever tokens and threads are. */
void deltic_linear_bf16(const uint16_t *x, const uint16_t *w, float *y, int64_t tokens, int64_t out, int64_t in,
                        int64_t threads);

/* total = residual + delta (delta may be null), rounded to `type`; normed = total / sqrt(mean(total^2) + eps) * scale.
 * residual, delta, total, normed [tokens, width] of `type`; scale [width] f32. total may be residual. */
void deltic_add_norm(const void *residual, const void *delta, const float *scale, void *total, void *normed,
                     int64_t tokens, int64_t width, float eps, int type);

/* out [tokens, width] = silu(gate_up[:, :width]) * gate_up[:, width:], of `type`. */
void deltic_silu_mul(const void *gate_up, void *out, int64_t tokens, int64_t width, int type);

/* One token of each row through a Gated DeltaNet layer, between its projections, in place. */
typedef struct {
    int64_t rows, key_heads, value_heads, key_dim, value_dim, kernel, ring; /* ring: places of the input ring */
    int64_t proj_stride;                                                    /* elements between rows of proj */
    int type;                                                               /* of proj, conv, inputs and out */
    float eps;
    const void *proj;      /* [rows, channels + values + 2 value_heads]: q, k, v, z, b, a */
    const void *conv;      /* [channels, kernel] */
    const float *decay;    /* [value_heads]: -exp(A_log) */
    const float *dt_bias;  /* [value_heads] */
    const float *norm;     /* [value_dim] */
    const int64_t *slots;  /* [rows] */
    const int64_t *done;   /* [rows]: tokens before this one; 0 starts from zero state */
    float *states;         /* [slots, value_heads, key_dim, value_dim] */
    void *inputs;          /* [slots, ring, channels]: raw inputs, that of position p at place p mod ring */
    void *out;             /* [rows, values] */
} deltic_gdn;
void deltic_gdn_step(const deltic_gdn *layer);

#ifdef __cplusplus
}
#endif
#endif
