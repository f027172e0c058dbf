// What the kernels need to know of each quantized type: how the packed fields of matrix.hpp become vectors.
//
// A format says:
//   kWeights, kBytes   of a packed block of 16 rows
//   kGroup             weights that share a scale: 16 or 32
//   kOffset            what is taken from each code, as 128 >> kOffset; kNone: nothing
//   kLow               how a minimum or an addend comes in: kPlain (not at all), kMinima16, kMinima32 (dmin * minimum
//                      of each group is taken away) or kAddend (m of each block of 32 is added)
//   codes(block, g, c) the codes of the g-th 32 columns: c[i] has columns 4 i .. 4 i + 3 of the 16 rows
//   scale(block, g)    of the g-th group, as a number per row; addend(block, g) likewise
//   minima(block, i)   of the groups 2 i and 2 i + 1, as pairs of 16 bits; dmin(block)
#pragma once
#include "simd.hpp"

namespace deltic::DELTIC_LEVEL {
namespace {

constexpr int kNone = -1;
enum Low { kPlain, kMinima16, kMinima32, kAddend };

// Planes of bits; see matrix.hpp.

DELTIC_INLINE void plane8(const uint8_t *from, Bytes c[8]) {
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) c[i] = load<Bytes>(from + 64 * i);
}
DELTIC_INLINE void plane4(const uint8_t *from, Bytes c[8]) {
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
        Words both = load<Words>(from + 64 * i);
        c[i] = (Bytes)(both & 0x0f0f0f0fu);
        c[i + 4] = (Bytes)(both >> 4 & 0x0f0f0f0fu);
    }
}
// Left or, with a negative count, right.
template <int By> DELTIC_INLINE Words shifted(Words v) {
    if constexpr (By > 0) return v << By;
    if constexpr (By < 0) return v >> -By;
    return v;
}
// Two bits of each code, to be `Up` bits higher; one bit.
template <int Up, int S = 0> DELTIC_INLINE void two_bits(Words all, Bytes *c) {
    c[S] |= (Bytes)(shifted<Up - 2 * S>(all) & 0x01010101u * (3 << Up));
    if constexpr (S < 3) two_bits<Up, S + 1>(all, c);
}
template <int Up, int S = 0> DELTIC_INLINE void one_bit(Words all, Bytes *c) {
    c[S] |= (Bytes)(shifted<Up - S>(all) & 0x01010101u * (1 << Up));
    if constexpr (S < 7) one_bit<Up, S + 1>(all, c);
}
template <int Up> DELTIC_INLINE void plane2(const uint8_t *from, Bytes c[8]) {
    two_bits<Up>(load<Words>(from), c);
    two_bits<Up>(load<Words>(from + 64), c + 4);
}
template <int Up> DELTIC_INLINE void plane1(const uint8_t *from, Bytes c[8]) { one_bit<Up>(load<Words>(from), c); }
DELTIC_INLINE void clear(Bytes c[8]) {
    for (int i = 0; i < 8; ++i) c[i] = Bytes{};
}
DELTIC_INLINE void map(const uint8_t *table, Bytes c[8]) {
    Bytes entries = load<Bytes>(table);
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) c[i] = lookup(entries, c[i]);
}

#define DELTIC_FOUR_TIMES(...) {__VA_ARGS__, __VA_ARGS__, __VA_ARGS__, __VA_ARGS__}
// The sixteen numbers of IQ4_NL and IQ4_XS, and of MXFP4 (doubled), each plus 128.
alignas(64) constexpr uint8_t kIq4[64] = DELTIC_FOUR_TIMES(1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181,
                                                           197, 217, 241);
alignas(64) constexpr uint8_t kMxfp4[64] = DELTIC_FOUR_TIMES(128, 129, 130, 131, 132, 134, 136, 140, 128, 127, 126, 125,
                                                             124, 122, 120, 116);

struct Without {
    static constexpr int kOffset = kNone;
    static constexpr Low kLow = kPlain;
    static DELTIC_INLINE Ints minima(const uint8_t *, int) { return Ints{}; }
    static DELTIC_INLINE Floats dmin(const uint8_t *) { return Floats{}; }
    static DELTIC_INLINE Floats addend(const uint8_t *, int) { return Floats{}; }
};

// Types with blocks of 32 weights, of which `Blocks` (1 or 8) make a packed one: `Head` bytes of d, perhaps m, each,
// then the codes.
template <int Blocks, int Bytes16, int Head> struct Small : Without {
    static constexpr int kWeights = 32 * Blocks, kGroup = 32, kBytes = 16 * Bytes16 * Blocks;
    static DELTIC_INLINE const uint8_t *code(const uint8_t *block, int g) {
        return block + Head * Blocks + (16 * Bytes16 - Head) * g;
    }
    static DELTIC_INLINE Floats scale(const uint8_t *block, int g) {
        return load_half((const uint16_t *)block + 16 * g);
    }
    static DELTIC_INLINE Floats addend(const uint8_t *block, int g) { return scale(block, Blocks + g); }
};

template <int Blocks> struct Q8_0 : Small<Blocks, 34, 32> {
    static constexpr int kOffset = 0;
    static DELTIC_INLINE void codes(const uint8_t *block, int g, Bytes c[8]) { plane8(Q8_0::code(block, g), c); }
    // What is multiplied with the scale, of one of 32 columns.
    static DELTIC_INLINE Floats number(const uint8_t *block, int g, int column) {
        Words four = load<Words>(Q8_0::code(block, g) + 64 * (column / 4));
        return to_floats((Ints)(four >> 8 * (column % 4) & 255) - 128);
    }
};
template <int Blocks, int Bytes16, int Head> struct FourBits : Small<Blocks, Bytes16, Head> {
    static DELTIC_INLINE void codes(const uint8_t *block, int g, Bytes c[8]) { plane4(FourBits::code(block, g), c); }
};
template <int Blocks> struct Q4_0 : FourBits<Blocks, 18, 32> {
    static constexpr int kOffset = 4;
};
template <int Blocks> struct Q4_1 : FourBits<Blocks, 20, 64> {
    static constexpr Low kLow = kAddend;
};
template <int Blocks, int Bytes16, int Head> struct FiveBits : Small<Blocks, Bytes16, Head> {
    static DELTIC_INLINE void codes(const uint8_t *block, int g, Bytes c[8]) {
        plane4(FiveBits::code(block, g), c);
        plane1<4>(FiveBits::code(block, g) + 256, c);
    }
};
template <int Blocks> struct Q5_0 : FiveBits<Blocks, 22, 32> {
    static constexpr int kOffset = 3;
};
template <int Blocks> struct Q5_1 : FiveBits<Blocks, 24, 64> {
    static constexpr Low kLow = kAddend;
};
template <int Blocks> struct IQ4_NL : FourBits<Blocks, 18, 32> {
    static constexpr int kOffset = 0;
    static DELTIC_INLINE void codes(const uint8_t *block, int g, Bytes c[8]) {
        FourBits<Blocks, 18, 32>::codes(block, g, c);
        map(kIq4, c);
    }
};
template <int Blocks> struct MXFP4 : FourBits<Blocks, 17, 16> {
    static constexpr int kOffset = 0;
    static DELTIC_INLINE void codes(const uint8_t *block, int g, Bytes c[8]) {
        FourBits<Blocks, 17, 16>::codes(block, g, c);
        map(kMxfp4, c);
    }
    // 2^(e - 128)
    static DELTIC_INLINE Floats scale(const uint8_t *block, int g) {
        Ints e = from_u8(block + 16 * g), normal = (e - 1) << 23, tiny = splat(0x200000) << e, is_tiny = e < 2;
        return (Floats)((tiny & is_tiny) | (normal & ~is_tiny));
    }
};

// Blocks of 256 weights.
template <int Bytes16> struct Super : Without {
    static constexpr int kWeights = 256, kBytes = 16 * Bytes16;
    static DELTIC_INLINE Floats d(const uint8_t *block) { return load_half((const uint16_t *)block); }
    static DELTIC_INLINE Floats dmin(const uint8_t *block) { return load_half((const uint16_t *)block + 16); }
};

// Six bits of a scale (part 0) or minimum (part 1) in nibbles and pairs of bits.
template <int Bytes16> struct SixBits : Super<Bytes16> {
    static constexpr int kGroup = 32;
    static constexpr Low kLow = kMinima32;
    static constexpr int kCodes = 64 + 192;
    static DELTIC_INLINE Ints field(const uint8_t *block, int g, int part) {
        Ints low = from_u8(block + 64 + 16 * g), high = from_u8(block + 192 + 16 * (g / 2));
        return (low >> 4 * part & 15) | (high >> (4 * (g % 2) + 2 * part) & 3) << 4;
    }
    static DELTIC_INLINE Floats scale(const uint8_t *block, int g) {
        return Super<Bytes16>::d(block) * to_floats(field(block, g, 0));
    }
    static DELTIC_INLINE Ints minima(const uint8_t *block, int i) {
        return field(block, 2 * i, 1) | field(block, 2 * i + 1, 1) << 16;
    }
};
struct Q4_K : SixBits<144> {
    static DELTIC_INLINE void codes(const uint8_t *block, int g, Bytes c[8]) { plane4(block + kCodes + 256 * g, c); }
};
struct Q5_K : SixBits<176> {
    static DELTIC_INLINE void codes(const uint8_t *block, int g, Bytes c[8]) {
        plane4(block + kCodes + 320 * g, c);
        plane1<4>(block + kCodes + 320 * g + 256, c);
    }
};
struct Q2_K : Super<84> {
    static constexpr int kGroup = 16;
    static constexpr Low kLow = kMinima16;
    static DELTIC_INLINE void codes(const uint8_t *block, int g, Bytes c[8]) {
        clear(c);
        plane2<0>(block + 64 + 256 + 128 * g, c);
    }
    static DELTIC_INLINE Floats scale(const uint8_t *block, int g) {
        return d(block) * to_floats(from_u8(block + 64 + 16 * g) & 15);
    }
    static DELTIC_INLINE Ints minima(const uint8_t *block, int i) {
        return from_u8(block + 64 + 32 * i) >> 4 | from_u8(block + 64 + 32 * i + 16) >> 4 << 16;
    }
};
struct Q6_K : Super<210> {
    static constexpr int kGroup = 16, kOffset = 2;
    static DELTIC_INLINE void codes(const uint8_t *block, int g, Bytes c[8]) {
        plane4(block + 32 + 256 + 384 * g, c);
        plane2<4>(block + 32 + 256 + 384 * g + 256, c);
    }
    static DELTIC_INLINE Floats scale(const uint8_t *block, int g) {
        return d(block) * to_floats(from_s8((const int8_t *)block + 32 + 16 * g));
    }
};
// Scales of six bits less 32: nibbles, two to a byte, and pairs of bits, four to a byte.
template <int Bytes16, int Groups> struct Signed : Super<Bytes16> {
    static constexpr int kCodes = 32 + 8 * Groups + 4 * Groups;
    static DELTIC_INLINE Floats scale(const uint8_t *block, int g) {
        Ints low = from_u8(block + 32 + 16 * (g / 2)) >> 4 * (g % 2) & 15;
        Ints high = from_u8(block + 32 + 8 * Groups + 16 * (g / 4)) >> 2 * (g % 4) & 3;
        return Super<Bytes16>::d(block) * to_floats((low | high << 4) - 32);
    }
};
struct Q3_K : Signed<110, 16> {
    static constexpr int kGroup = 16, kOffset = 5;
    static DELTIC_INLINE void codes(const uint8_t *block, int g, Bytes c[8]) {
        clear(c);
        plane2<0>(block + kCodes + 192 * g, c);
        plane1<2>(block + kCodes + 192 * g + 128, c);
    }
};
struct IQ4_XS : Signed<136, 8> {
    static constexpr int kGroup = 32, kOffset = 0;
    static DELTIC_INLINE void codes(const uint8_t *block, int g, Bytes c[8]) {
        plane4(block + kCodes + 256 * g, c);
        map(kIq4, c);
    }
};

}  // namespace
}  // namespace deltic::DELTIC_LEVEL
