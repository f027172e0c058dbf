// float16 as bits, on any processor. Functions have internal linkage: the files of each level have separate copies.
#pragma once
#include <bit>
#include <cstdint>

namespace deltic {

static inline float widen_half(uint16_t bits) {
    uint32_t sign = uint32_t(bits & 0x8000) << 16, rest = bits & 0x7fff;
    if (rest < 0x400) return std::bit_cast<float>(std::bit_cast<uint32_t>(float(rest) * 0x1p-24f) | sign);
    uint32_t exponent = rest >= 0x7c00 ? 255 - 31 : 127 - 15;
    return std::bit_cast<float>(sign | ((exponent << 10) + rest) << 13);
}

// Rounds to nearest, ties to even; infinite from 65520 on. Not for NaN.
static inline uint16_t narrow_half(float value) {
    uint32_t bits = std::bit_cast<uint32_t>(value), sign = bits >> 16 & 0x8000, size = bits & 0x7fffffff;
    if (size >= 0x47800000) return uint16_t(sign | 0x7c00);
    if (size < 0x38800000) {
        // Subnormal: the sum with 0.5 has the last place of a subnormal float16, 2^-24, so it is rounded as needed.
        return uint16_t(sign | (std::bit_cast<uint32_t>(std::bit_cast<float>(size) + 0.5f) - 0x3f000000));
    }
    return uint16_t(sign | (size + 0xfff + (size >> 13 & 1) - (uint32_t(127 - 15) << 23)) >> 13);
}

} // namespace deltic
