// Traits of the quantized types: how the packed fields of matrix.hpp are converted to vectors.
//
// A format defines:
//   kWeights, kBytes   weights per row and bytes of a packed block of 16 rows
//   kGroup             weights per scale: 16 or 32
//   kOffset            each code is reduced by 128 >> kOffset; kNone: by nothing
//   kLow               how minima or addends enter: kPlain (there are none), kMinima16, kMinima32 (dmin * minimum of
//                      each group is subtracted) or kAddend (m of each block of 32 is added)
//   kBits              bits per code that code() returns
//   code(block, g, i)  codes of columns 4 i .. 4 i + 3 of the g-th 32 columns, for each row
//   scale(block, g)    scale of the g-th group for each row; addend(block, g) likewise
//   kSequential        true if the kernels read the bytes of a block in order
//   kUnit, unit(block) true if all scales of a block lack a common factor; that factor
//   minima(block, i)   minima of the groups 2 i and 2 i + 1, as 16-bit pairs; dmin(block): their factor
// The vectors cover as many rows as a register has lanes, which is one part of the panel.
#pragma once
#include "simd.hpp"

namespace deltic::DELTIC_LEVEL {
namespace {

constexpr int kNone = -1;
enum Low { kPlain, kMinima16, kMinima32, kAddend };

// A packed block, addressed from its row `first` on.
struct Block {
    const uint8_t *data;
    int first;

    // Pointers to fields of 1, 2 or 4 bytes per row at `offset`, or to four codes per row.
    DELTIC_INLINE const uint8_t *bytes(int offset) const { return data + offset + first; }
    DELTIC_INLINE const uint16_t *halves(int offset) const { return (const uint16_t *)(data + offset) + first; }
    DELTIC_INLINE const uint32_t *words(int offset) const { return (const uint32_t *)(data + offset) + first; }
    DELTIC_INLINE const uint8_t *codes(int offset) const { return data + offset + 4 * first; }
};

// The i-th vector of codes from bit planes; see matrix.hpp.

DELTIC_INLINE NativeWords plane8(const uint8_t *from, int i) { return load<NativeWords>(from + 64 * i); }
DELTIC_INLINE NativeWords plane4(const uint8_t *from, int i) {
    NativeWords both = load<NativeWords>(from + 64 * (i % 4));
#if defined(__aarch64__)  // NEON can shift bytes
    if (i >= 4) return (NativeWords)((NativeBytes)both >> 4);
#endif
    return (i < 4 ? both : both >> 4) & 0x0f0f0f0fu;
}
// Shifts left, or right for a negative count.
DELTIC_INLINE NativeWords shifted(NativeWords v, int by) { return by < 0 ? v >> -by : v << by; }
// Two bits or one bit of each code, shifted left by `up`.
DELTIC_INLINE NativeWords plane2(const uint8_t *from, int i, int up) {
    return shifted(load<NativeWords>(from + 64 * (i / 4)), up - 2 * (i % 4)) & 0x01010101u * (3u << up);
}
DELTIC_INLINE NativeWords plane1(const uint8_t *from, int i, int up) {
    return shifted(load<NativeWords>(from), up - i) & 0x01010101u * (1u << up);
}
DELTIC_INLINE NativeWords map(const uint8_t *table, NativeWords codes) {
    return (NativeWords)lookup(load<NativeBytes>(table), (NativeBytes)codes);
}

#define DELTIC_FOUR_TIMES(...) {__VA_ARGS__, __VA_ARGS__, __VA_ARGS__, __VA_ARGS__}
// The sixteen numbers of IQ4_NL and IQ4_XS, plus 128; those of MXFP4 and NVFP4, doubled, plus 16.
alignas(64) constexpr uint8_t kIq4[64] = DELTIC_FOUR_TIMES(1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181,
                                                           197, 217, 241);
alignas(64) constexpr uint8_t kE2m1[64] = DELTIC_FOUR_TIMES(16, 17, 18, 19, 20, 22, 24, 28, 16, 15, 14, 13, 12, 10, 8, 4);

struct Without {
    static constexpr bool kIsBytes = false;  // true: the codes are bytes and need no unpacking
    static constexpr int kOffset = kNone;
    static constexpr Low kLow = kPlain;
    static constexpr bool kSequential = false, kUnit = false;
    static DELTIC_INLINE Native unit(const Block &) { return Native{}; }
    static DELTIC_INLINE NativeInts minima(const Block &, int) { return NativeInts{}; }
    static DELTIC_INLINE Native dmin(const Block &) { return Native{}; }
    static DELTIC_INLINE Native addend(const Block &, int) { return Native{}; }
};

// Types with blocks of 32 weights. A packed block consists of `Blocks` (1 or 8) such blocks: first `Head` bytes of d,
// and of m if the type has it, for each, then the codes. Bytes16: bytes of one row's block.
template <int Blocks, int Bytes16, int Head> struct Small : Without {
    static constexpr int kWeights = 32 * Blocks, kGroup = 32, kBytes = 16 * Bytes16 * Blocks;
    static DELTIC_INLINE const uint8_t *planes(const Block &block, int g) {
        return block.codes(Head * Blocks + (16 * Bytes16 - Head) * g);
    }
    static DELTIC_INLINE Native scale(const Block &block, int g) { return native_half(block.halves(32 * g)); }
    static DELTIC_INLINE Native addend(const Block &block, int g) { return scale(block, Blocks + g); }
};

template <int Blocks> struct Q8_0 : Small<Blocks, 34, 32> {
    static constexpr bool kIsBytes = true;
    static constexpr int kBits = 8, kOffset = 0;
    static DELTIC_INLINE NativeWords code(const Block &block, int g, int i) {
        return plane8(Q8_0::planes(block, g), i);
    }
    // The factor of the scale in the weight of one of 32 columns.
    static DELTIC_INLINE Native number(const Block &block, int g, int column) {
        NativeWords four = code(block, g, column / 4);
        return to_floats((NativeInts)(four >> 8 * (column % 4) & 255) - 128);
    }
};
template <int Blocks, int Bytes16, int Head> struct FourBits : Small<Blocks, Bytes16, Head> {
    static DELTIC_INLINE NativeWords code(const Block &block, int g, int i) {
        return plane4(FourBits::planes(block, g), i);
    }
};
template <int Blocks> struct Q4_0 : FourBits<Blocks, 18, 32> {
    static constexpr int kBits = 4, kOffset = 4;
};
template <int Blocks> struct Q4_1 : FourBits<Blocks, 20, 64> {
    static constexpr int kBits = 4;
    static constexpr Low kLow = kAddend;
};
template <int Blocks, int Bytes16, int Head> struct FiveBits : Small<Blocks, Bytes16, Head> {
    static DELTIC_INLINE NativeWords code(const Block &block, int g, int i) {
        const uint8_t *planes = FiveBits::planes(block, g);
        return plane4(planes, i) | plane1(planes + 256, i, 4);
    }
};
template <int Blocks> struct Q5_0 : FiveBits<Blocks, 22, 32> {
    static constexpr int kBits = 5, kOffset = 3;
};
template <int Blocks> struct Q5_1 : FiveBits<Blocks, 24, 64> {
    static constexpr int kBits = 5;
    static constexpr Low kLow = kAddend;
};
template <int Blocks> struct IQ4_NL : FourBits<Blocks, 18, 32> {
    static constexpr int kBits = 8, kOffset = 0;
    static DELTIC_INLINE NativeWords code(const Block &block, int g, int i) {
        return map(kIq4, FourBits<Blocks, 18, 32>::code(block, g, i));
    }
};
template <int Blocks> struct MXFP4 : FourBits<Blocks, 17, 16> {
    static constexpr int kBits = 5, kOffset = 3;
    static DELTIC_INLINE NativeWords code(const Block &block, int g, int i) {
        return map(kE2m1, FourBits<Blocks, 17, 16>::code(block, g, i));
    }
    // 2^(e - 128), with subnormal results for e < 2.
    static DELTIC_INLINE Native scale(const Block &block, int g) {
        NativeInts e = native_u8(block.bytes(16 * g)), normal = (e - 1) << 23, is_tiny = e < 2;
        NativeInts tiny = splat<NativeInts>(0x200000) << e;
        return (Native)((tiny & is_tiny) | (normal & ~is_tiny));
    }
};

// Types with blocks of 256 weights.
template <int Bytes16> struct Super : Without {
    static constexpr int kWeights = 256, kBytes = 16 * Bytes16;
    static DELTIC_INLINE Native d(const Block &block) { return native_half(block.halves(0)); }
    static DELTIC_INLINE Native dmin(const Block &block) { return native_half(block.halves(32)); }
};

// A scale (part 0) or minimum (part 1) of six bits: four bits in one byte, two in another.
template <int Bytes16> struct SixBits : Super<Bytes16> {
    static constexpr int kGroup = 32;
    static constexpr Low kLow = kMinima32;
    static constexpr int kCodes = 64 + 192;
    static DELTIC_INLINE NativeInts field(const Block &block, int g, int part) {
        NativeInts low = native_u8(block.bytes(64 + 16 * g)), high = native_u8(block.bytes(192 + 16 * (g / 2)));
        return (low >> 4 * part & 15) | (high >> (4 * (g % 2) + 2 * part) & 3) << 4;
    }
    static DELTIC_INLINE Native scale(const Block &block, int g) {
        return Super<Bytes16>::d(block) * to_floats(field(block, g, 0));
    }
    static DELTIC_INLINE NativeInts minima(const Block &block, int i) {
        return field(block, 2 * i, 1) | field(block, 2 * i + 1, 1) << 16;
    }
};
struct Q4_K : SixBits<144> {
    static constexpr int kBits = 4;
    static DELTIC_INLINE NativeWords code(const Block &block, int g, int i) {
        return plane4(block.codes(kCodes + 256 * g), i);
    }
};
struct Q5_K : SixBits<176> {
    static constexpr int kBits = 5;
    static DELTIC_INLINE NativeWords code(const Block &block, int g, int i) {
        const uint8_t *planes = block.codes(kCodes + 320 * g);
        return plane4(planes, i) | plane1(planes + 256, i, 4);
    }
};
struct Q2_K : Super<84> {
    static constexpr int kBits = 2, kGroup = 16;
    static constexpr Low kLow = kMinima16;
    static DELTIC_INLINE NativeWords code(const Block &block, int g, int i) {
        return plane2(block.codes(64 + 256 + 128 * g), i, 0);
    }
    static DELTIC_INLINE Native scale(const Block &block, int g) {
        return d(block) * to_floats(native_u8(block.bytes(64 + 16 * g)) & 15);
    }
    static DELTIC_INLINE NativeInts minima(const Block &block, int i) {
        return native_u8(block.bytes(64 + 32 * i)) >> 4 | native_u8(block.bytes(64 + 32 * i + 16)) >> 4 << 16;
    }
};
struct Q6_K : Super<210> {
    static constexpr int kBits = 6, kGroup = 16, kOffset = 2;
    static DELTIC_INLINE NativeWords code(const Block &block, int g, int i) {
        const uint8_t *planes = block.codes(32 + 256 + 384 * g);
        return plane4(planes, i) | plane2(planes + 256, i, 4);
    }
    static DELTIC_INLINE Native scale(const Block &block, int g) {
        return d(block) * to_floats(native_s8((const int8_t *)block.bytes(32 + 16 * g)));
    }
};
// Scales of six bits minus 32: low four bits two to a byte, high two bits four to a byte.
template <int Bytes16, int Groups> struct Signed : Super<Bytes16> {
    static constexpr int kCodes = 32 + 8 * Groups + 4 * Groups;
    static DELTIC_INLINE Native scale(const Block &block, int g) {
        NativeInts low = native_u8(block.bytes(32 + 16 * (g / 2))) >> 4 * (g % 2) & 15;
        NativeInts high = native_u8(block.bytes(32 + 8 * Groups + 16 * (g / 4))) >> 2 * (g % 4) & 3;
        return Super<Bytes16>::d(block) * to_floats((low | high << 4) - 32);
    }
};
struct Q3_K : Signed<110, 16> {
    static constexpr int kBits = 3, kGroup = 16, kOffset = 5;
    static DELTIC_INLINE NativeWords code(const Block &block, int g, int i) {
        const uint8_t *planes = block.codes(kCodes + 192 * g);
        return plane2(planes, i, 0) | plane1(planes + 128, i, 2);
    }
};
struct IQ4_XS : Signed<136, 8> {
    static constexpr int kBits = 8, kGroup = 32, kOffset = 0;
    static DELTIC_INLINE NativeWords code(const Block &block, int g, int i) {
        return map(kIq4, plane4(block.codes(kCodes + 256 * g), i));
    }
};

// Types that GGUF files do not have. Each run of columns has its scales in front of its codes.
struct NVFP4 : Without {
    static constexpr int kWeights = 256, kBytes = 16 * 148, kBits = 5, kGroup = 16, kOffset = 3;
    static constexpr int kRun = 64 + 2 * 256;
    static constexpr bool kSequential = true, kUnit = true;
    static DELTIC_INLINE NativeWords code(const Block &block, int g, int i) {
        return map(kE2m1, plane4(block.codes(64 + kRun * (g / 2) + 64 + 256 * (g % 2)), i));
    }
    static DELTIC_INLINE Native unit(const Block &block) { return (Native)load<NativeWords>(block.words(0)); }
    static DELTIC_INLINE Native scale(const Block &block, int g) {
        return native_e4m3(block.bytes(64 + kRun * (g / 4) + 16 * (g % 4)));
    }
};
// Groups: groups of a block of 256, each with a scale and a zero point. kRun: number of 32-column groups in one of
// them.
template <int Groups> struct INT4 : Without {
    static constexpr int kWeights = 256, kBytes = 16 * (4 * Groups + 128), kBits = 4, kGroup = 32, kRun = 8 / Groups;
    static constexpr bool kSequential = true;
    static constexpr Low kLow = kAddend;
    static DELTIC_INLINE NativeWords code(const Block &block, int g, int i) {
        return plane4(block.codes(64 * (g / kRun + 1) + 256 * g), i);
    }
    static DELTIC_INLINE NativeWords word(const Block &block, int g) {
        return load<NativeWords>(block.words((64 + 256 * kRun) * (g / kRun)));
    }
    static DELTIC_INLINE Native scale(const Block &block, int g) { return (Native)(word(block, g) & 0xffffff00u); }
    static DELTIC_INLINE Native addend(const Block &block, int g) {
        return -scale(block, g) * to_floats((NativeInts)(word(block, g) & 255));
    }
};

}  // namespace
}  // namespace deltic::DELTIC_LEVEL
