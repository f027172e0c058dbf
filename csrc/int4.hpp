// Keys and values in four bits, as deltic/ops/kv.py describes them: rotated heads, rounded to 32 levels (keys) or 16.
#pragma once
#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include "simd.hpp"

namespace deltic::DELTIC_LEVEL {
namespace {

// Of pages in which a number has no address of its own.
struct Int4 {
    uint8_t byte;
};
constexpr int kKeyBits = 5, kValueBits = 4;
constexpr int64_t kMostDim = 256;
constexpr float kSmallestScale = 0x1p-100f;

constexpr int64_t int4_width(int64_t dim, int bits) { return dim * bits / 8 + 2; }

// Each of eight bits in the fifth bit of a byte.
constexpr std::array<std::array<uint8_t, 8>, 256> fifth_bits() {
    std::array<std::array<uint8_t, 8>, 256> table{};
    for (int byte = 0; byte < 256; ++byte)
        for (int bit = 0; bit < 8; ++bit) table[byte][bit] = uint8_t((byte >> bit & 1) << 4);
    return table;
}
constexpr auto kFifthBits = fifth_bits();

inline float sign_of(unsigned index) { return std::popcount(index & index >> 1 & 0x55) & 1 ? -1.0f : 1.0f; }

void hadamard(float *x, int64_t dim) {
    for (int64_t step = 1; step < dim; step *= 2)
        for (int64_t first = 0; first < dim; first += 2 * step)
            for (int64_t i = first; i < first + step; ++i) {
                float left = x[i], right = x[i + step];
                x[i] = left + right;
                x[i + step] = left - right;
            }
}
void rotate_head(float *x, int64_t dim) {
    for (int64_t i = 0; i < dim; ++i) x[i] *= sign_of(unsigned(i));
    hadamard(x, dim);
    float factor = 1.0f / std::sqrt(float(dim));
    for (int64_t i = 0; i < dim; ++i) x[i] *= factor;
}
void rotate_head_back(float *x, int64_t dim) {
    hadamard(x, dim);
    float factor = 1.0f / std::sqrt(float(dim));
    for (int64_t i = 0; i < dim; ++i) x[i] *= factor * sign_of(unsigned(i));
}

// The parts of a token's bytes that are a head's.
template <typename Byte> struct Int4Head {
    Byte *low, *high, *scale;

    Int4Head(Byte *token, int64_t head, int64_t heads, int64_t dim, int bits)
        : low(token + head * dim / 2), high(token + heads * dim / 2 + head * dim / 8),
          scale(token + heads * dim * bits / 8 + head * 2) {}
};

// x [dim], rotated.
void write_head(const float *x, int64_t dim, int bits, const Int4Head<uint8_t> &to) {
    uint32_t most = 0;
    for (int64_t i = 0; i < dim; ++i) {
        uint32_t size = std::bit_cast<uint32_t>(x[i]) & 0x7fffffff;  // NaN is larger than all numbers
        most = most < size ? size : most;
    }
    uint16_t scale;
    narrow(std::bit_cast<float>(most) / float(1 << (bits - 1)), scale);
    if (widen(scale) < kSmallestScale) scale = 0;
    std::memcpy(to.scale, &scale, 2);
    float inverse = scale ? 1.0f / widen(scale) : 0.0f, top = float((1 << bits) - 1);
    uint8_t codes[kMostDim];
    for (int64_t i = 0; i < dim; ++i) {
        float level = x[i] * inverse + top / 2;
        level = level > 0.0f ? level : 0.0f;
        codes[i] = uint8_t(std::bit_cast<uint32_t>((level < top ? level : top) + 0x1p23f));  // to nearest, to even
    }
    for (int64_t i = 0; i < dim / 2; ++i) to.low[i] = uint8_t((codes[2 * i] & 15) | codes[2 * i + 1] << 4);
    if (bits == kValueBits) return;
    for (int64_t i = 0; i < dim / 8; ++i) {
        int byte = 0;
        for (int bit = 0; bit < 8; ++bit) byte |= (codes[8 * i + bit] >> 4) << bit;
        to.high[i] = uint8_t(byte);
    }
}

// to [dim]; from: of `dim` numbers, which may be a part of a head that begins at a multiple of eight.
void read_head(const Int4Head<const uint8_t> &from, int64_t dim, int bits, float *to) {
    alignas(64) uint8_t codes[kMostDim];
    for (int64_t i = 0; i < dim / 2; ++i) {
        codes[2 * i] = from.low[i] & 15;
        codes[2 * i + 1] = from.low[i] >> 4;
    }
    if (bits == kKeyBits)
        for (int64_t i = 0; i < dim / 8; ++i) {
            uint64_t eight, fifths;
            std::memcpy(&eight, codes + 8 * i, 8);
            std::memcpy(&fifths, kFifthBits[from.high[i]].data(), 8);
            eight |= fifths;
            std::memcpy(codes + 8 * i, &eight, 8);
        }
    uint16_t bits16;
    std::memcpy(&bits16, from.scale, 2);
    Native scale = splat<Native>(widen(bits16)), middle = splat<Native>(float((1 << bits) - 1) / 2);
    for (int64_t i = 0; i < dim; i += kNative) store(to + i, (to_floats(native_u8(codes + i)) - middle) * scale);
}

}  // namespace
}  // namespace deltic::DELTIC_LEVEL
