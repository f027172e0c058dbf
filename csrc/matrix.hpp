// Memory layout of packed matrices.
//
// A matrix is cut into panels of 16 rows, so that one vector holds the same column of 16 rows. The last panel is padded
// with zero rows. A panel stores its columns block by block. A block has the fields of 16 blocks of the GGUF type, in
// exactly as many bytes. r below is a row of the panel.
//
//   F32            a block is one column: float [16]
//   F16            one column: uint16 [16]
//   BF16           two columns: uint16 [16][2]; an odd last column is padded with 0
//   32 weights     Q4_0 Q5_0 Q8_0 IQ4_NL: half d[16], codes
//                  Q4_1 Q5_1: half d[16], half m[16], codes
//                  MXFP4: uint8 e[16], codes; weight = doubled number of the code table * 2^(e - 128)
//                  If the columns are a multiple of 256, eight such blocks form one: first d[8][16], m[8][16] or
//                  e[8][16], then the codes of all eight. (Fields then start and end on cache lines.)
//   256 weights    Q4_K Q5_K: half d[16], half dmin[16], uint8 low[8][16], uint8 high[4][16], codes of 8 groups of 32
//                      scale of group g: low[g] & 15 | (high[g / 2] >> 4 * (g % 2) & 3) << 4
//                      minimum:          low[g] >> 4 | (high[g / 2] >> 4 * (g % 2) + 2 & 3) << 4
//                  Q2_K: half d[16], half dmin[16], uint8 scales[16][16] (per group of 16: scale in the low four bits,
//                      minimum in the high four), codes of 8 groups of 32
//                  Q6_K: half d[16], int8 scales[16][16] (per group of 16), codes
//                  Q3_K: half d[16], uint8 low[8][16], uint8 high[4][16], codes; scale + 32 of the g-th group of 16:
//                      (low[g / 2] >> 4 * (g % 2) & 15) | (high[g / 4] >> 2 * (g % 4) & 3) << 4
//                  IQ4_XS: half d[16], uint8 low[4][16], uint8 high[2][16], codes; scale + 32 of the g-th group of 32:
//                      (low[g / 2] >> 4 * (g % 2) & 15) | (high[g / 4] >> 2 * (g % 4) & 3) << 4
//                  NVFP4: float d[16], then four times: uint8 e4m3[4][16] (per group of 16), codes of 64 columns;
//                      weight = doubled number of the code table * e4m3 number * d / 256
//                  INT4_32 INT4_64 INT4_128: for each group: uint32 words[16], its codes; weight = scale * (code - low
//                      byte of the word); the scale is the word without its low byte, as a float
//                  (With all scales in front of the codes Zen 4 has two read streams: less than half the speed.)
//
// The codes of 32 weights are bit planes; the groups of a block of 256 follow one another. A plane consists of vectors
// of 64 bytes. Byte [r][b] of a vector belongs to row r and column 4 * i + b, with this i:
//   U8   vectors 0 .. 7: the whole byte is the code of i = vector
//   U4   vectors 0 .. 3: the low four bits are the code of i = vector, the high four that of i = vector + 4
//   U2   vectors 0, 1: bits 2 s and 2 s + 1 are the code of i = 4 * vector + s
//   U1   one vector: bit s is the code of i = s
// Q8_0: U8 of the number + 128. Q4_0, Q4_1, Q4_K, IQ4_NL, IQ4_XS, MXFP4, NVFP4, INT4_*: U4. Q5_0, Q5_1, Q5_K: U4, then
// U1 of the fifth bit. Q6_K: U4 of the low four bits, then U2 of the high two. Q3_K: U2, then U1 of the third bit.
// Q2_K: U2.
// Codes are unsigned, as in GGUF blocks: a weight is d * scale * (code - offset), or the type's variant of that.
#pragma once
#include "deltic.h"

namespace deltic {

constexpr int64_t kPanel = DELTIC_PANEL;

// Weights per row of a block and bytes of a packed block of 16 rows. weights = 0 for an unknown type.
struct BlockShape {
    int64_t weights, bytes;
};
BlockShape block_shape(int64_t type);

static inline int64_t panels_of(int64_t rows) { return (rows + kPanel - 1) / kPanel; }
static inline int64_t panel_bytes(const deltic_matrix &matrix) {
    BlockShape shape = block_shape(matrix.type);
    return (matrix.columns + shape.weights - 1) / shape.weights * shape.bytes;
}
static inline int64_t rows_of(const deltic_weight &weight) {
    int64_t rows = 0;
    for (int64_t part = 0; part < weight.count; ++part) rows += weight.parts[part].rows;
    return rows;
}

// Same as slice_ends in deltic/ops/slices.py, with the first slice starting at column `first`.
static inline void find_ends(int64_t first, int64_t columns, int64_t unit, int64_t count, int64_t *ends) {
    if (count == 1) {
        *ends = first + columns;
        return;
    }
    int64_t half = ((columns + unit - 1) / unit + 1) / 2 * unit;
    if (half > columns) half = columns;
    find_ends(first, half, unit, count / 2, ends);
    find_ends(first + half, columns - half, unit, count / 2, ends + count / 2);
}

}  // namespace deltic
