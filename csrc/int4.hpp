// int4 keys and values (format: deltic/ops/kv.py). Each head is rotated by a signed Hadamard transform and rounded to
// 32 levels (keys) or 16 levels (values). The levels are denser near zero.
#pragma once
#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include "simd.hpp"

namespace deltic::DELTIC_LEVEL {
namespace {

// Element type of int4 pages, in which a single number has no address.
struct Int4 {
    uint8_t byte;
};
constexpr int kKeyBits = 5, kValueBits = 4;
constexpr int64_t kMostDim = 256;
constexpr float kSmallestScale = 0x1p-100f;
// Candidate scales, relative to the scale that maps the outermost level to the largest magnitude.
constexpr float kScales[] = {22 / 32.0f, 25 / 32.0f, 28 / 32.0f, 30 / 32.0f, 32 / 32.0f, 35 / 32.0f};
// Inverse of w = t + t^3 / 2: t is about w times this polynomial of w^2.
constexpr float kInverse[] = {0.98277253f, -0.32738898f, 0.13833282f, -0.02469429f};

constexpr int64_t int4_width(int64_t dim, int bits) { return dim * bits / 8 + 2; }

// Table: spreads the eight bits of a byte to the fifth bits of eight bytes.
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

// Pointers to a head's bytes within a token: low four bits, fifth bits (keys only), bfloat16 scale.
template <typename Byte> struct Int4Head {
    Byte *low, *high, *scale;

    Int4Head(Byte *token, int64_t head, int64_t heads, int64_t dim, int bits)
        : low(token + head * dim / 2), high(token + heads * dim / 2 + head * dim / 8),
          scale(token + heads * dim * bits / 8 + head * 2) {}
};

// Maps codes to levels, in units of the scale, and numbers to codes.
struct Levels {
    float half, middle, twice;

    explicit Levels(int bits) : half(float(1 << (bits - 1))), middle(half - 0.75f), twice(2 * half * half) {}
    template <typename V> DELTIC_INLINE V at(V codes) const {
        V u = codes - middle;
        return u * (u * u + twice);
    }
    float largest() const { return at(2 * half - 1); }
    // Returns t, the input of `codes`, for a scale of either sign. x: in units of the levels.
    DELTIC_INLINE Floats inverse(Floats x, float scale) const {
        Floats w = x * (0.5f / (half * half * half) / scale), top = splat(1.5f);
        w = choose(less(w, top), w, top);
        w = choose(less(-top, w), w, -top);
        Floats square = w * w;
        return w * (((square * kInverse[3] + kInverse[2]) * square + kInverse[1]) * square + kInverse[0]);
    }
    DELTIC_INLINE Floats codes(Floats t, float sign) const {
        Floats code = t * (sign * half) + middle, top = splat(2 * half - 1);
        code = choose(less(code, top), code, top);
        code = choose(less(Floats{}, code), code, Floats{});
        return code + 0x1p23f - 0x1p23f;  // rounds to nearest, ties to even
    }
};

// Finds the scale and sign whose levels have the largest cosine with x [dim]. dot: product of levels and x.
struct BestScale {
    float scale, sign, dot, squares;

    BestScale(const float *x, int64_t dim, const Levels &levels) : scale(kScales[0]), sign(1), dot(0), squares(0) {
        for (float tried : kScales) {
            Floats dots[2] = {}, all[2] = {};
            for (int64_t i = 0; i < dim; i += kLanes) {
                Floats t = levels.inverse(loadf(x + i), tried);
                for (int negative = 0; negative < 2; ++negative) {
                    Floats level = levels.at(levels.codes(t, negative ? -1.0f : 1.0f));
                    dots[negative] += level * loadf(x + i);
                    all[negative] += level * level;
                }
            }
            for (int negative = 0; negative < 2; ++negative) {
                float other = sum_lanes(dots[negative]), others = sum_lanes(all[negative]);
                if (squares && !(other * other * squares > dot * dot * others)) continue;
                scale = tried, sign = negative ? -1.0f : 1.0f, dot = other, squares = others;
            }
        }
    }
};

// Quantizes a rotated head x [dim]. Overwrites x.
void write_head(float *x, int64_t dim, int bits, const Int4Head<uint8_t> &to) {
    uint32_t most = 0;
    for (int64_t i = 0; i < dim; ++i) {
        uint32_t size = std::bit_cast<uint32_t>(x[i]) & 0x7fffffff;  // the bits of NaN compare above all numbers
        most = most < size ? size : most;
    }
    const Levels levels(bits);
    float unit = std::bit_cast<float>(most) / levels.largest(), inverse = 1.0f / unit;
    if (unit < kSmallestScale) unit = inverse = 0;
    Floats squares = {};
    for (int64_t i = 0; i < dim; i += kLanes) {
        Floats scaled = loadf(x + i) * inverse;
        squares += scaled * scaled;
        store(x + i, scaled);
    }
    const BestScale best(x, dim, levels);
    uint16_t scale = 0;
    if (unit != 0) narrow(unit * (sum_lanes(squares) / best.dot), scale);
    std::memcpy(to.scale, &scale, 2);
    uint8_t codes[kMostDim];
    for (int64_t i = 0; i < dim; i += kLanes) {
        Words code = (Words)(levels.codes(levels.inverse(loadf(x + i), best.scale), best.sign) + 0x1p23f);
        for (int lane = 0; lane < kLanes; ++lane) codes[i + lane] = uint8_t(code[lane]);
    }
    for (int64_t i = 0; i < dim / 2; ++i) to.low[i] = uint8_t((codes[2 * i] & 15) | codes[2 * i + 1] << 4);
    if (bits == kValueBits) return;
    for (int64_t i = 0; i < dim / 8; ++i) {
        int byte = 0;
        for (int bit = 0; bit < 8; ++bit) byte |= (codes[8 * i + bit] >> 4) << bit;
        to.high[i] = uint8_t(byte);
    }
}

// Dequantizes `dim` numbers. from: a head, or a part of a head that begins at a multiple of eight.
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
    const Levels levels(bits);
    float scale = widen(bits16);
    for (int64_t i = 0; i < dim; i += kNative) store(to + i, levels.at(to_floats(native_u8(codes + i))) * scale);
}

}  // namespace
}  // namespace deltic::DELTIC_LEVEL
