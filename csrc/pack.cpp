// Converts GGUF blocks to packed matrices (matrix.hpp), and single packed rows back to floats.
//
// The codes of a quantized type are one or two bit planes, in files as in packed blocks. A file's plane packs the
// fields of `run` bytes at a time: first the lowest field of each byte, then the next field of each, and so on. The
// rest of a block is up to eight words, two float16 and up to 16 bytes of scales.
#include "half.hpp"
#include "matrix.hpp"

#include <algorithm>
#include <bit>
#include <cstring>

namespace deltic {
namespace {

constexpr int64_t kVector = 64, kGroup = 32;
constexpr int kWords = 8;          // words of four codes per group
constexpr int kMostWords = 8;
constexpr int kMostScales = 16;    // bytes
constexpr int kLargestBlock = 210; // bytes in a file

// 16 bytes of one row, or four bytes of each of four rows.
typedef uint32_t Quad __attribute__((vector_size(16)));

template <typename T> T load(const void *from) {
    T value;
    std::memcpy(&value, from, sizeof value);
    return value;
}
template <typename T> void store(void *to, T value) { std::memcpy(to, &value, sizeof value); }

// ---- Planes.

// Index of the group's word that field `s` of vector `v` holds.
constexpr int word_of(int bits, int v, int s) { return bits == 4 ? v + 4 * s : v * (8 / bits) + s; }

constexpr uint32_t mask_of(int bits) { return ((1u << bits) - 1) * 0x01010101u; }

// Spreads the lowest four bits to one byte each.
uint32_t spread(uint32_t bits) { return (bits & 15) * 0x00204081u & 0x01010101u; }

// Spreads four codes of four bits to one byte each.
uint32_t spread_nibbles(uint32_t codes) {
    uint32_t pairs = (codes & 0xff) | (codes & 0xff00) << 8;
    return (pairs | pairs << 4) & 0x0f0f0f0fu;
}

// Reads the codes of 16 weights from a file's plane.
template <int kBits, int kRun> Quad read_codes(const uint8_t *plane, int first) {
    if constexpr (kRun == 1 && kBits == 4) {
        uint64_t codes = load<uint64_t>(plane + first / 2);
        return Quad{spread_nibbles(uint32_t(codes)), spread_nibbles(uint32_t(codes >> 16)),
                    spread_nibbles(uint32_t(codes >> 32)), spread_nibbles(uint32_t(codes >> 48))};
    }
    if constexpr (kRun == 1 && kBits == 1) {
        uint32_t bits = load<uint32_t>(plane) >> first;
        return Quad{spread(bits), spread(bits >> 4), spread(bits >> 8), spread(bits >> 12)};
    }
    constexpr int kFields = 8 / kBits;
    int byte = first / (kRun * kFields) * kRun + first % kRun, shift = first / kRun % kFields * kBits;
    Quad codes = load<Quad>(plane + byte);
    return kBits == 8 ? codes ^ 0x80808080u : codes >> shift & mask_of(kBits);
}

void transpose(const Quad *rows, Quad *columns) {
    for (int i = 0; i < 4; ++i) columns[i] = Quad{rows[0][i], rows[1][i], rows[2][i], rows[3][i]};
}

// Packs a plane of 16 rows. The groups of the packed plane are `stride` bytes apart.
template <int kBits, int kRun>
void pack_plane(const uint8_t *const *blocks, int offset, int groups, uint8_t *packed, int64_t stride) {
    for (int group = 0; group < groups; ++group, packed += stride) {
        for (int row = 0; row < kPanel; row += 4) {
            Quad words[kWords];
            for (int half = 0; half < 2; ++half) {
                Quad codes[4];
                for (int i = 0; i < 4; ++i) {
                    codes[i] = read_codes<kBits, kRun>(blocks[row + i] + offset, group * int(kGroup) + half * 16);
                }
                transpose(codes, words + 4 * half);
            }
            for (int v = 0; v < kBits; ++v) {
                Quad fields = {};
                for (int s = 0; s < 8 / kBits; ++s) fields |= words[word_of(kBits, v, s)] << s * kBits;
                store(packed + v * kVector + row * 4, fields);
            }
        }
    }
}

// Writes a row's part of a packed plane to bits `position` and up of its group's codes.
template <int kBits> void unpack_plane(const uint8_t *packed, int64_t row, int position, uint32_t *words) {
    for (int v = 0; v < kBits; ++v) {
        uint32_t fields = load<uint32_t>(packed + v * kVector + row * 4);
        for (int s = 0; s < 8 / kBits; ++s) {
            words[word_of(kBits, v, s)] |= (fields >> s * kBits & mask_of(kBits)) << position;
        }
    }
}

struct Plane {
    int bits, offset; // offset: in a file's block
    decltype(&pack_plane<4, 32>) pack;
    decltype(&unpack_plane<4>) unpack;
};
template <int kBits, int kRun> constexpr Plane plane(int offset) {
    return {kBits, offset, pack_plane<kBits, kRun>, unpack_plane<kBits>};
}

// ---- Bytes of scales: from a file's block to packed order.

template <int kFrom, int kCount> void copy_scales(const uint8_t *block, uint8_t *out) {
    std::memcpy(out, block + kFrom, kCount);
}

// Q4_K, Q5_K. In the file: six bits of the first four scales, six bits of the first four minima, then the low nibbles
// of the last four of both. Their high bits are the top two bits of the bytes before.
void scales_and_minima(const uint8_t *block, uint8_t *out) {
    const uint8_t *scales = block + 4, *minima = scales + 4, *last = scales + 8;
    uint8_t high[8];
    for (int g = 0; g < 4; ++g) {
        out[g] = uint8_t((scales[g] & 15) | minima[g] << 4);
        out[g + 4] = last[g];
        high[g] = uint8_t((scales[g] >> 4 & 3) | (minima[g] >> 4 & 3) << 2);
        high[g + 4] = uint8_t(scales[g] >> 6 | minima[g] >> 6 << 2);
    }
    for (int g = 0; g < 4; ++g) out[g + 8] = uint8_t(high[2 * g] | high[2 * g + 1] << 4);
}

// Q3_K. In the file: the low nibbles of the first eight scales and, in the high halves, of the last eight; then the
// high bits: four consecutive scales use the same bit position of four bytes.
void q3_k_scales(const uint8_t *block, uint8_t *out) {
    const uint8_t *low = block + 96, *high = low + 8;
    for (int g = 0; g < 4; ++g) {
        out[g] = uint8_t((low[2 * g] & 15) | low[2 * g + 1] << 4);
        out[g + 4] = uint8_t(low[2 * g] >> 4 | (low[2 * g + 1] & 0xf0));
        out[g + 8] = 0;
        for (int s = 0; s < 4; ++s) out[g + 8] |= uint8_t((high[s] >> 2 * g & 3) << 2 * s);
    }
}

void iq4_xs_scales(const uint8_t *block, uint8_t *out) {
    std::memcpy(out, block + 4, 4);
    std::memcpy(out + 4, block + 2, 2);
}

// ---- Factors of a row's block: weight = scale * number - minimum.

struct Factors {
    float scale[16], minimum[16]; // one per 16 weights
};

// A row's scales in packed order. d, m: the two float16.
struct Scales {
    float d, m;
    uint32_t words[kMostWords];
    uint8_t bytes[kMostScales];
};

void no_scales(const Scales &of, Factors &factors) {
    for (int i = 0; i < 2; ++i) factors.scale[i] = of.d, factors.minimum[i] = 0;
}
void plus(const Scales &of, Factors &factors) {
    for (int i = 0; i < 2; ++i) factors.scale[i] = of.d, factors.minimum[i] = -of.m;
}
// Half of 2^(e - 127), because the numbers of the table are doubled.
void power(const Scales &of, Factors &factors) {
    int e = of.bytes[0];
    float scale = std::bit_cast<float>(e < 2 ? 0x00200000u << e : uint32_t(e - 1) << 23);
    for (int i = 0; i < 2; ++i) factors.scale[i] = scale, factors.minimum[i] = 0;
}
void scale_and_minimum_of_32(const Scales &of, Factors &factors) {
    for (int i = 0; i < 16; ++i) {
        int low = of.bytes[i / 2], high = of.bytes[8 + i / 4] >> 4 * (i / 2 % 2);
        factors.scale[i] = of.d * float((low & 15) | (high & 3) << 4);
        factors.minimum[i] = of.m * float(low >> 4 | (high >> 2 & 3) << 4);
    }
}
void scale_and_minimum_of_16(const Scales &of, Factors &factors) {
    for (int i = 0; i < 16; ++i) {
        factors.scale[i] = of.d * float(of.bytes[i] & 15);
        factors.minimum[i] = of.m * float(of.bytes[i] >> 4);
    }
}
void signed_of_16(const Scales &of, Factors &factors) {
    for (int i = 0; i < 16; ++i) factors.scale[i] = of.d * float(int8_t(of.bytes[i])), factors.minimum[i] = 0;
}
// Scales of six bits, minus 32: the low four bits from the first `kLow` bytes, the high two from the others.
template <int kLow> void six_bits(const Scales &of, Factors &factors) {
    for (int i = 0; i < 16; ++i) {
        int g = i * kLow / 8, low = of.bytes[g / 2] >> 4 * (g % 2) & 15, high = of.bytes[kLow + g / 4] >> 2 * (g % 4) & 3;
        factors.scale[i] = of.d * float((low | high << 4) - 32), factors.minimum[i] = 0;
    }
}
// e4m3 scales without a sign, and a factor of the row. The bits of an e4m3 number, shifted left by 20, are
// a float32 that is 2^-120 times the number.
void e4m3_of_16(const Scales &of, Factors &factors) {
    float d = std::bit_cast<float>(of.words[0]);
    for (int i = 0; i < 16; ++i) {
        factors.scale[i] = d * (std::bit_cast<float>(uint32_t(of.bytes[i]) << 20) * 0x1p112f), factors.minimum[i] = 0;
    }
}
// Words: a float scale with the zero point in its low byte.
template <int kWords> void zero_points(const Scales &of, Factors &factors) {
    for (int i = 0; i < 16; ++i) {
        uint32_t word = of.words[i * kWords / 16];
        factors.scale[i] = std::bit_cast<float>(word & 0xffffff00u);
        factors.minimum[i] = factors.scale[i] * float(word & 255);
    }
}

// ---- Types.

constexpr int8_t kIq4[] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
constexpr int8_t kE2m1[] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

struct Type {
    int64_t id, weights, bytes; // per block of a file
    int halves;
    int half[2];                // their offsets in a file's block
    int scales;                 // bytes
    void (*read_scales)(const uint8_t *block, uint8_t *out);
    void (*factors)(const Scales &of, Factors &factors);
    int planes;
    Plane plane[2];
    int zero;                   // the code of 0
    const int8_t *numbers;      // table of the numbers of all codes; null: code - zero
    int words;                  // words at the start of a file's block
    int runs;                   // runs of columns with separate scales, codes and (if enough) words; 0: no runs
};

constexpr Type kTypes[] = {
    {DELTIC_F32, 1, 4},
    {DELTIC_F16, 1, 2},
    {DELTIC_BF16, 2, 4},
    {DELTIC_Q4_0, 32, 18, 1, {0}, 0, nullptr, no_scales, 1, {plane<4, 16>(2)}, 8},
    {DELTIC_Q4_1, 32, 20, 2, {0, 2}, 0, nullptr, plus, 1, {plane<4, 16>(4)}},
    {DELTIC_Q5_0, 32, 22, 1, {0}, 0, nullptr, no_scales, 2, {plane<4, 16>(6), plane<1, 1>(2)}, 16},
    {DELTIC_Q5_1, 32, 24, 2, {0, 2}, 0, nullptr, plus, 2, {plane<4, 16>(8), plane<1, 1>(4)}},
    {DELTIC_Q8_0, 32, 34, 1, {0}, 0, nullptr, no_scales, 1, {plane<8, 32>(2)}, 128},
    {DELTIC_IQ4_NL, 32, 18, 1, {0}, 0, nullptr, no_scales, 1, {plane<4, 16>(2)}, 0, kIq4},
    {DELTIC_MXFP4, 32, 17, 0, {}, 1, copy_scales<0, 1>, power, 1, {plane<4, 16>(1)}, 0, kE2m1},
    {DELTIC_Q2_K, 256, 84, 2, {80, 82}, 16, copy_scales<0, 16>, scale_and_minimum_of_16, 1, {plane<2, 32>(16)}},
    {DELTIC_Q3_K, 256, 110, 1, {108}, 12, q3_k_scales, six_bits<8>, 2, {plane<2, 32>(32), plane<1, 32>(0)}, 4},
    {DELTIC_Q4_K, 256, 144, 2, {0, 2}, 12, scales_and_minima, scale_and_minimum_of_32, 1, {plane<4, 32>(16)}},
    {DELTIC_Q5_K, 256, 176, 2, {0, 2}, 12, scales_and_minima, scale_and_minimum_of_32, 2,
     {plane<4, 32>(48), plane<1, 32>(16)}},
    {DELTIC_Q6_K, 256, 210, 1, {208}, 16, copy_scales<192, 16>, signed_of_16, 2,
     {plane<4, 64>(0), plane<2, 32>(128)}, 32},
    {DELTIC_IQ4_XS, 256, 136, 1, {0}, 6, iq4_xs_scales, six_bits<4>, 1, {plane<4, 16>(8)}, 0, kIq4},
    {DELTIC_NVFP4, 256, 148, 0, {}, 16, copy_scales<4, 16>, e4m3_of_16, 1, {plane<4, 1>(20)}, 0, kE2m1, 1, 4},
    {DELTIC_INT4_32, 256, 160, 0, {}, 0, nullptr, zero_points<8>, 1, {plane<4, 1>(32)}, 0, nullptr, 8, 8},
    {DELTIC_INT4_64, 256, 144, 0, {}, 0, nullptr, zero_points<4>, 1, {plane<4, 1>(16)}, 0, nullptr, 4, 4},
    {DELTIC_INT4_128, 256, 136, 0, {}, 0, nullptr, zero_points<2>, 1, {plane<4, 1>(8)}, 0, nullptr, 2, 2},
};

const Type *find(int64_t id) {
    for (const Type &type : kTypes) {
        if (type.id == id) return &type;
    }
    return nullptr;
}

int64_t blocks_of(const Type &type, int64_t columns) { return columns / type.weights + (columns % type.weights != 0); }

// Number of file blocks that form one packed block.
int64_t together_of(const Type &type, int64_t columns) { return type.weights == 32 && columns % 256 == 0 ? 8 : 1; }

int64_t group_bytes(const Type &type) {
    int64_t bits = 0;
    for (int i = 0; i < type.planes; ++i) bits += type.plane[i].bits;
    return bits * kVector;
}

// ---- Packing.

// Unquantized types: `rows` rows of `columns` words, `stride` bytes apart.
template <typename Word>
void pack_words(const uint8_t *from, int64_t stride, int64_t rows, int64_t columns, uint8_t *packed) {
    constexpr int64_t kTile = 64; // columns whose packed words stay in L1 until all rows are written
    constexpr int64_t kSize = sizeof(Word);
    if (rows < kPanel) std::memset(packed, 0, size_t(columns * kPanel * kSize));
    for (int64_t first = 0; first < columns; first += kTile) {
        int64_t count = std::min(columns - first, kTile);
        for (int64_t row = 0; row < rows; ++row) {
            const uint8_t *words = from + row * stride + first * kSize;
            uint8_t *to = packed + (first * kPanel + row) * kSize;
            for (int64_t i = 0; i < count; ++i) store(to + i * kPanel * kSize, load<Word>(words + i * kSize));
        }
    }
}

void pack_words(const Type &type, const uint8_t *from, int64_t rows, int64_t columns, uint8_t *packed) {
    if (type.id == DELTIC_F32) return pack_words<uint32_t>(from, columns * 4, rows, columns, packed);
    if (type.id == DELTIC_F16) return pack_words<uint16_t>(from, columns * 2, rows, columns, packed);
    pack_words<uint32_t>(from, columns * 2, rows, columns / 2, packed);
    if (columns % 2 == 0) return;
    for (int64_t row = 0; row < kPanel; ++row) {
        uint32_t word = row < rows ? load<uint16_t>(from + (row * columns + columns - 1) * 2) : 0;
        store(packed + columns / 2 * kVector + row * 4, word);
    }
}

// Offsets in a packed block of the fields of the `index`-th of `together` file blocks, for types without runs.
struct Fields {
    int64_t half[2], scales, codes;

    Fields(const Type &type, int64_t index, int64_t together) {
        for (int i = 0; i < 2; ++i) half[i] = (i * together + index) * 2 * kPanel;
        scales = (type.halves * 2 * together + index * type.scales) * kPanel;
        codes = (type.halves * 2 + type.scales) * kPanel * together + index * group_bytes(type);
    }
};

// Offsets in a packed block of a type with runs: first the common words, then for each run its word (if it has one),
// scales and codes.
struct Runs {
    int64_t common, words, scales, groups, size;

    explicit Runs(const Type &type)
        : common(type.words % type.runs), words(type.words / type.runs), scales(type.scales / type.runs),
          groups(type.weights / kGroup / type.runs),
          size((4 * words + scales) * kPanel + groups * group_bytes(type)) {}
    int64_t run(int64_t i) const { return common * 4 * kPanel + i * size; }
    int64_t word(int64_t i) const { return i < common ? i * 4 * kPanel : run(i - common); }
    int64_t scale(int64_t i) const { return run(i / scales) + (4 * words + i % scales) * kPanel; }
    int64_t codes(int64_t i) const { return run(i) + (4 * words + scales) * kPanel; }
};

void pack_runs(const Type &type, const uint8_t *const *blocks, uint8_t *packed) {
    const Runs runs(type);
    const Plane &plane = type.plane[0];
    for (int row = 0; row < kPanel; ++row) {
        uint8_t scales[kMostScales];
        for (int i = 0; i < type.words; ++i) store(packed + runs.word(i) + 4 * row, load<uint32_t>(blocks[row] + 4 * i));
        if (type.scales) type.read_scales(blocks[row], scales);
        for (int i = 0; i < type.scales; ++i) packed[runs.scale(i) + row] = scales[i];
    }
    for (int i = 0; i < type.runs; ++i) {
        int first = plane.offset + i * int(runs.groups * kGroup) * plane.bits / 8;
        plane.pack(blocks, first, int(runs.groups), packed + runs.codes(i), group_bytes(type));
    }
}

void pack_block(const Type &type, const uint8_t *const *blocks, const Fields &fields, uint8_t *packed) {
    if (type.runs) return pack_runs(type, blocks, packed);
    for (int i = 0; i < type.halves; ++i) {
        uint8_t *to = packed + fields.half[i];
        for (int row = 0; row < kPanel; ++row) store(to + 2 * row, load<uint16_t>(blocks[row] + type.half[i]));
    }
    for (int row = 0; row < kPanel && type.scales; ++row) {
        uint8_t scales[kMostScales];
        type.read_scales(blocks[row], scales);
        for (int i = 0; i < type.scales; ++i) packed[fields.scales + i * kPanel + row] = scales[i];
    }
    uint8_t *codes = packed + fields.codes;
    for (int i = 0; i < type.planes; ++i) {
        const Plane &plane = type.plane[i];
        plane.pack(blocks, plane.offset, int(type.weights / kGroup), codes, group_bytes(type));
        codes += plane.bits * kVector;
    }
}

void pack_panel(const Type &type, const uint8_t *from, int64_t rows, int64_t columns, uint8_t *packed) {
    if (!type.planes) return pack_words(type, from, rows, columns, packed);
    int64_t count = blocks_of(type, columns), together = together_of(type, columns);
    // A block that packs to zeros replaces missing rows.
    uint8_t zeros[kLargestBlock] = {};
    if (type.plane[0].bits == 8) std::memset(zeros + type.plane[0].offset, 0x80, kGroup);
    const uint8_t *blocks[kPanel];
    for (int64_t i = 0; i < count; ++i) {
        for (int64_t row = 0; row < kPanel; ++row) {
            blocks[row] = row < rows ? from + (row * count + i) * type.bytes : zeros;
            // Hardware prefetchers do not follow sixteen streams: prefetch the next blocks (harmless past the last).
            for (int64_t at = 0; at < type.bytes; at += kVector) __builtin_prefetch(blocks[row] + type.bytes + at);
        }
        pack_block(type, blocks, Fields(type, i % together, together), packed);
        if ((i + 1) % together == 0) packed += type.bytes * kPanel * together;
    }
}

// ---- Unpacking.

float word_number(const Type &type, const uint8_t *panel, int64_t row, int64_t column) {
    if (type.id == DELTIC_F32) return load<float>(panel + (column * kPanel + row) * 4);
    if (type.id == DELTIC_F16) return widen_half(load<uint16_t>(panel + (column * kPanel + row) * 2));
    uint32_t bits = load<uint16_t>(panel + column / 2 * kVector + row * 4 + column % 2 * 2);
    return std::bit_cast<float>(bits << 16);
}

void unpack_group(const Type &type, const uint8_t *packed, int64_t row, const float *scale, const float *minimum,
                  float *out) {
    uint32_t words[kWords] = {};
    for (int i = 0, position = 0; i < type.planes; position += type.plane[i++].bits) {
        type.plane[i].unpack(packed, row, position, words);
        packed += type.plane[i].bits * kVector;
    }
    uint8_t codes[kGroup];
    std::memcpy(codes, words, sizeof codes);
    int numbers[kGroup];
    for (int i = 0; i < kGroup; ++i) numbers[i] = type.numbers ? type.numbers[codes[i]] : codes[i] - type.zero;
    for (int half = 0; half < 2; ++half) {
        for (int i = half * 16; i < half * 16 + 16; ++i) out[i] = float(numbers[i]) * scale[half] - minimum[half];
    }
}

void unpack_runs(const Type &type, const uint8_t *packed, int64_t row, float *out) {
    const Runs runs(type);
    Scales scales = {};
    Factors factors;
    for (int i = 0; i < type.words; ++i) scales.words[i] = load<uint32_t>(packed + runs.word(i) + 4 * row);
    for (int i = 0; i < type.scales; ++i) scales.bytes[i] = packed[runs.scale(i) + row];
    type.factors(scales, factors);
    for (int64_t group = 0; group < type.weights / kGroup; ++group) {
        const uint8_t *codes = packed + runs.codes(group / runs.groups) + group % runs.groups * group_bytes(type);
        unpack_group(type, codes, row, factors.scale + 2 * group, factors.minimum + 2 * group, out + group * kGroup);
    }
}

void unpack_block(const Type &type, const uint8_t *packed, const Fields &fields, int64_t row, float *out) {
    if (type.runs) return unpack_runs(type, packed, row, out);
    Scales scales = {};
    Factors factors;
    for (int i = 0; i < type.halves; ++i) {
        (i ? scales.m : scales.d) = widen_half(load<uint16_t>(packed + fields.half[i] + 2 * row));
    }
    for (int i = 0; i < type.scales; ++i) scales.bytes[i] = packed[fields.scales + i * kPanel + row];
    type.factors(scales, factors);
    const uint8_t *codes = packed + fields.codes;
    for (int64_t group = 0; group < type.weights / kGroup; ++group, codes += group_bytes(type)) {
        unpack_group(type, codes, row, factors.scale + 2 * group, factors.minimum + 2 * group, out + group * kGroup);
    }
}

void unpack_row(const Type &type, const uint8_t *panel, int64_t row, int64_t columns, float *out) {
    if (!type.planes) {
        for (int64_t column = 0; column < columns; ++column) out[column] = word_number(type, panel, row, column);
        return;
    }
    int64_t together = together_of(type, columns);
    for (int64_t i = 0; i < columns / type.weights; ++i) {
        const uint8_t *packed = panel + i / together * together * type.bytes * kPanel;
        unpack_block(type, packed, Fields(type, i % together, together), row, out + i * type.weights);
    }
}

// ---- Copying.

// Copies a row's part of `count` fields, each of kWidth bytes per panel row. Returns the size of all fields in bytes.
template <int64_t kWidth>
int64_t copy_fields(const uint8_t *from, int64_t row, uint8_t *to, int64_t place, int64_t count) {
    for (int64_t i = 0; i < count; ++i) {
        std::memcpy(to + (i * kPanel + place) * kWidth, from + (i * kPanel + row) * kWidth, kWidth);
    }
    return count * kPanel * kWidth;
}

void copy_row(const Type &type, const uint8_t *from, int64_t row, uint8_t *to, int64_t place, int64_t columns) {
    if (!type.planes) {
        int64_t words = blocks_of(type, columns);
        type.bytes == 2 ? copy_fields<2>(from, row, to, place, words) : copy_fields<4>(from, row, to, place, words);
        return;
    }
    int64_t together = together_of(type, columns), codes = type.weights / kGroup * group_bytes(type) / kVector;
    for (int64_t i = 0; i < columns / type.weights; i += together) {
        if (type.runs) {
            const Runs runs(type);
            copy_fields<4>(from, row, to, place, runs.common);
            for (int64_t run = 0; run < type.runs; ++run) {
                int64_t at = runs.run(run), scales = at + 4 * runs.words * kPanel;
                copy_fields<4>(from + at, row, to + at, place, runs.words);
                copy_fields<1>(from + scales, row, to + scales, place, runs.scales);
                at = runs.codes(run);
                copy_fields<4>(from + at, row, to + at, place, runs.groups * group_bytes(type) / kVector);
            }
            from += type.bytes * kPanel, to += type.bytes * kPanel;
            continue;
        }
        int64_t halves = copy_fields<2>(from, row, to, place, type.halves * together);
        from += halves, to += halves;
        int64_t scales = copy_fields<1>(from, row, to, place, type.scales * together);
        from += scales, to += scales;
        int64_t planes = copy_fields<4>(from, row, to, place, codes * together);
        from += planes, to += planes;
    }
}

} // namespace

BlockShape block_shape(int64_t id) {
    const Type *type = find(id);
    return type ? BlockShape{type->weights, type->bytes * kPanel} : BlockShape{0, 0};
}

} // namespace deltic

using namespace deltic;

extern "C" int64_t deltic_packed_bytes(int64_t id, int64_t rows, int64_t columns) {
    const Type *type = find(id);
    if (!type || rows < 0 || columns <= 0 || (columns % type->weights && id != DELTIC_BF16)) return -1;
    int64_t panels = rows / kPanel + (rows % kPanel != 0), bytes;
    bool overflow = __builtin_mul_overflow(blocks_of(*type, columns), type->bytes * kPanel, &bytes) ||
                    __builtin_mul_overflow(bytes, panels, &bytes);
    return overflow ? -1 : bytes;
}

extern "C" void deltic_pack(int64_t id, const void *blocks, int64_t first, int64_t count, int64_t columns,
                            void *packed) {
    const Type &type = *find(id);
    int64_t panel = blocks_of(type, columns) * type.bytes * kPanel;
    // In a file, a row with an odd number of bfloat16 ends with half a block.
    int64_t row = type.bytes * columns / type.weights;
    auto from = static_cast<const uint8_t *>(blocks);
    auto to = static_cast<uint8_t *>(packed) + first / kPanel * panel;
    for (int64_t done = 0; done < count; done += kPanel, to += panel) {
        pack_panel(type, from + done * row, std::min(count - done, kPanel), columns, to);
    }
}

extern "C" void deltic_unpack_rows(const deltic_matrix *matrix, const int64_t *rows, int64_t count, float *out) {
    const Type &type = *find(matrix->type);
    int64_t panel = panel_bytes(*matrix);
    auto data = static_cast<const uint8_t *>(matrix->data);
    for (int64_t i = 0; i < count; ++i, out += matrix->columns) {
        unpack_row(type, data + rows[i] / kPanel * panel, rows[i] % kPanel, matrix->columns, out);
    }
}

extern "C" void deltic_copy_rows(const deltic_matrix *from, const int64_t *rows, int64_t count, const deltic_matrix *to,
                                 const int64_t *places) {
    const Type &type = *find(from->type);
    int64_t panel = panel_bytes(*from);
    auto source = static_cast<const uint8_t *>(from->data);
    auto target = static_cast<uint8_t *>(const_cast<void *>(to->data));
    for (int64_t i = 0; i < count; ++i) {
        copy_row(type, source + rows[i] / kPanel * panel, rows[i] % kPanel, target + places[i] / kPanel * panel,
                 places[i] % kPanel, from->columns);
    }
}
