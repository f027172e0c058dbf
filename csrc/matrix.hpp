// How packed matrices lie in memory.
//
// A matrix is cut into panels of 16 rows, so that one vector holds the same column of 16 rows. Rows beyond the last
// one are zero. A panel runs over its columns block by block; a block has the fields of 16 blocks of the GGUF type, in
// exactly as many bytes. k counts the columns of a block, r the rows of the panel.
//
//   F32            a block is one column: float [16]
//   F16            one column: uint16 [16]
//   BF16           two columns: uint16 [16][2]; an odd last column is padded with 0
//   32 weights     Q4_0 Q5_0 Q8_0 IQ4_NL: half d[16], codes
//                  Q4_1 Q5_1: half d[16], half m[16], codes
//                  MXFP4: uint8 e[16], codes (a weight is the table's number, doubled, times 2^(e - 128))
//                  Where the columns are a multiple of 256, eight such blocks make one: d[8][16], m[8][16] or e[8][16]
//                  first, then the codes of all eight. (So they lie on whole cache lines.)
//   256 weights    Q4_K Q5_K: half d[16], half dmin[16], uint8 low[8][16], uint8 high[4][16], codes of 8 groups of 32
//                      scale of group g: low[g] & 15 | (high[g / 2] >> 4 * (g % 2) & 3) << 4
//                      minimum:          low[g] >> 4 | (high[g / 2] >> 4 * (g % 2) + 2 & 3) << 4
//                  Q2_K: half d[16], half dmin[16], uint8 scales[16][16] (scale of group of 16 in the low four bits,
//                      minimum in the high ones), codes of 8 groups of 32
//                  Q6_K: half d[16], int8 scales[16][16] (of groups of 16), codes
//                  Q3_K: half d[16], uint8 low[8][16], uint8 high[4][16], codes; scale of group of 16 g, less 32:
//                      (low[g / 2] >> 4 * (g % 2) & 15) | (high[g / 4] >> 2 * (g % 4) & 3) << 4
//                  IQ4_XS: half d[16], uint8 low[4][16], uint8 high[2][16], codes; scale of group of 32 g, less 32:
//                      (low[g / 2] >> 4 * (g % 2) & 15) | (high[g / 4] >> 2 * (g % 4) & 3) << 4
//                  NVFP4: float d[16], then four times: uint8 e4m3[4][16] (of groups of 16), codes of 64 columns; a
//                      weight is the table's number, doubled, times the e4m3 number times d / 256
//                  INT4_32 INT4_64 INT4_128: for each group: uint32 words[16], its codes; a weight is a float, which a
//                      word is without its low byte, times (code - low byte)
//                  (Zen 4 reads scales in front of all codes at less than half the speed: as a second stream.)
//
// The codes of 32 weights (all of a block of 256 one after another) are planes of bits; every plane is made of vectors
// of 64 bytes, byte [r][b] belonging to row r and column 4 * i + b for the i that is said:
//   U8   vectors 0 .. 7: the code of i = vector, whole
//   U4   vectors 0 .. 3: low half the code of i = vector, high half that of i = vector + 4
//   U2   vectors 0, 1: bits 2 s, 2 s + 1 that of i = 4 * vector + s
//   U1   one vector: bit s that of i = s
//   Q8_0: U8 of the number + 128. Q4_0, Q4_1, Q4_K, IQ4_NL, IQ4_XS, MXFP4, NVFP4, INT4_*: U4. Q5_0, Q5_1, Q5_K: U4, then
//   U1 of the fifth bit. Q6_K: U4 of the low four bits, then U2 of the high two. Q3_K: U2, then U1 of the third bit. Q2_K:
//   U2.
// Codes are unsigned, as in GGUF blocks: a weight is d * scale * (code - offset) and so on.
#pragma once
#include "deltic.h"

namespace deltic {

constexpr int64_t kPanel = DELTIC_PANEL;

// Weights per block and bytes of a packed block of 16 rows; weights = 0 for an unknown type.
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

// As slice_ends in deltic/ops/slices.py, from column `first` on.
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
