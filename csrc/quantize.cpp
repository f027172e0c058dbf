// Quantizes rows of floats to blocks, bit-identical to deltic/loader/gguf/quantize.py, which documents the reasons.
//
// Compiled once, for any processor: vectors of four numbers; the order of sums does not depend on the register width.
#include "deltic.h"
#include "half.hpp"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <iterator>

namespace deltic {
namespace {

typedef float Four __attribute__((vector_size(16)));

Four load(const float *from) {
    Four value;
    std::memcpy(&value, from, sizeof value);
    return value;
}
void store(float *to, Four value) { std::memcpy(to, &value, sizeof value); }
Four all(float value) { return Four{value, value, value, value}; }
Four least(Four a, Four b) { return a < b ? a : b; }
Four most(Four a, Four b) { return a > b ? a : b; }
Four size(Four a) { return a < 0 ? -a : a; }
float sum(Four a) { return (a[0] + a[1]) + (a[2] + a[3]); }

// Rounds to integers between two bounds below 2^22, ties to even: the sum has no bits for fractions.
Four rounded(Four value, float low, float high) {
    const Four whole = all(0x1.8p23f);
    return (most(least(value, all(high)), all(low)) + whole) - whole;
}

// 1 / scale, or 0 where products with that could overflow.
float inverse(float scale) { return std::fabs(scale) >= 0x1p-120f ? 1 / scale : 0; }

struct Range {
    float low, high;
};

template <int kCount> Range range_of(const float *x) {
    Four low = load(x), high = low;
    for (int i = 4; i < kCount; i += 4) {
        low = least(low, load(x + i));
        high = most(high, load(x + i));
    }
    return {std::min({low[0], low[1], low[2], low[3]}), std::max({high[0], high[1], high[2], high[3]})};
}

// The weight with the largest magnitude; the first one of several.
template <int kCount> float farthest(const float *x) {
    Range range = range_of<kCount>(x);
    if (range.high != -range.low) return range.high > -range.low ? range.high : range.low;
    for (int i = 0; i < kCount; ++i) {
        if (std::fabs(x[i]) == range.high) return x[i];
    }
    return range.high;
}

// The first zero among 32 weights, with its sign; positive zero if there is none.
float first_zero(const float *x) {
    const float *found = std::find(x, x + 32, 0.0f);
    return found < x + 32 ? *found : 0;
}

uint8_t *write_half(uint8_t *out, float value) {
    uint16_t bits = narrow_half(value);
    std::memcpy(out, &bits, sizeof bits);
    return out + sizeof bits;
}

// Packs fields of kBits, which start at bit kFrom of each of kCount codes. Each kRun bytes first get the lowest field
// of every byte, then the next field of every byte, and so on.
template <int kFrom, int kBits, int kRun, int kCount> uint8_t *pack(const uint8_t *codes, uint8_t *out) {
    constexpr int kFields = 8 / kBits;
    for (int done = 0; done < kCount; done += kFields * kRun, codes += kFields * kRun, out += kRun) {
        for (int i = 0; i < kRun; ++i) {
            int byte = 0;
            for (int s = 0; s < kFields; ++s) byte |= (codes[s * kRun + i] >> kFrom & ((1 << kBits) - 1)) << s * kBits;
            out[i] = uint8_t(byte);
        }
    }
    return out;
}

// ---- Blocks of 32.

// Q8_0: rounds halves away from zero.
void q8_0(const float *x, uint8_t *block) {
    Range range = range_of<32>(x);
    float scale = std::fabs(std::max(-range.low, range.high)) / 127, factor = inverse(scale);
    auto codes = reinterpret_cast<int8_t *>(write_half(block, scale));
    for (int i = 0; i < 32; ++i) {
        float scaled = x[i] * factor;
        int whole = int(scaled);
        codes[i] = int8_t(whole + int(2 * (scaled - float(whole))));
    }
}

template <int kBits> void write_codes(const uint8_t *codes, uint8_t *out) {
    if constexpr (kBits == 5) out = pack<4, 1, 1, 32>(codes, out);
    pack<0, 4, 16, 32>(codes, out);
}

// Q4_0, Q5_0: the weight of the largest magnitude gets the lowest code, which represents it exactly.
template <int kBits> void around_zero(const float *x, uint8_t *block) {
    constexpr int kHalf = 1 << (kBits - 1);
    float scale = farthest<32>(x) / -kHalf, factor = inverse(scale);
    uint8_t codes[32];
    for (int i = 0; i < 32; ++i) codes[i] = uint8_t(std::min(int(x[i] * factor + (kHalf + 0.5f)), 2 * kHalf - 1));
    write_codes<kBits>(codes, write_half(block, scale));
}

// Q4_1, Q5_1: all codes span the range. A minimum of zero gets the sign of the first zero.
template <int kBits> void above_minimum(const float *x, uint8_t *block) {
    constexpr int kLevels = (1 << kBits) - 1;
    Range range = range_of<32>(x);
    float low = range.low == 0 ? first_zero(x) : range.low;
    float scale = std::fabs(range.high - low) / kLevels, factor = inverse(scale);
    uint8_t codes[32];
    for (int i = 0; i < 32; ++i) codes[i] = uint8_t(std::min(int((x[i] - low) * factor + 0.5f), kLevels));
    write_codes<kBits>(codes, write_half(write_half(block, scale), low));
}

// ---- Blocks of 256.

// Weights of the squared errors in a group: a larger magnitude counts more.
template <int kCount> void weigh(const float *x, float *weights) {
    Four squares = {};
    for (int i = 0; i < kCount; i += 4) squares += load(x + i) * load(x + i);
    float mean = std::sqrt(sum(squares) / kCount);
    for (int i = 0; i < kCount; i += 4) store(weights + i, size(load(x + i)) + mean);
}

// Weights as scale * code - minimum. gain: how much they lower the weighted sum of squared errors.
struct Affine {
    float scale, minimum, gain;
};

// Sums over a group, each term times its error weight.
struct Sums {
    float one, x, q, qq, qx;
};

// Least-squares fit for given codes.
Affine fit(const Sums &sums) {
    float determinant = sums.one * sums.qq - sums.q * sums.q;
    float factor = determinant > 1e-6f * sums.one * sums.qq ? inverse(determinant) : 0;
    float offset = (sums.qq * sums.x - sums.q * sums.qx) * factor;
    float scale = (sums.one * sums.qx - sums.q * sums.x) * factor;
    if (!(offset <= 0)) offset = 0, scale = sums.qx * inverse(sums.qq);
    return {scale, -offset, scale > 0 ? scale * sums.qx + offset * sums.x : -INFINITY};
}

// Searches scale and minimum, both at least 0, for codes from 0 to kLevels.
template <int kLevels> Affine search_affine(const float *x) {
    float weights[32];
    weigh<32>(x, weights);
    Range range = range_of<32>(x);
    float low = std::min(range.low, 0.0f), width = std::max(range.high, 0.0f) - low;
    Four total = {}, sum_x = {};
    for (int i = 0; i < 32; i += 4) {
        total += load(weights + i);
        sum_x += load(weights + i) * load(x + i);
    }
    Affine best = {width / kLevels, -low, -INFINITY};
    for (double step : {-0.9, -0.6, -0.3, 0.0, 0.3, 0.6, 0.9}) {
        float factor = float(kLevels + step) * inverse(width);
        Four sum_q = {}, sum_qq = {}, sum_qx = {};
        for (int i = 0; i < 32; i += 4) {
            Four q = rounded((load(x + i) - low) * factor, 0, kLevels), weighted = load(weights + i) * q;
            sum_q += weighted;
            sum_qq += weighted * q;
            sum_qx += weighted * load(x + i);
        }
        Affine found = fit({sum(total), sum(sum_x), sum(sum_q), sum(sum_qq), sum(sum_qx)});
        if (found.gain > best.gain) best = found;
    }
    return best;
}

// Eight non-negative numbers as multiples (up to 63) of a float16 unit.
struct InUnits {
    float unit;
    uint8_t multiples[8];
};

InUnits in_units(const float *parts) {
    InUnits result = {widen_half(narrow_half(std::fabs(range_of<8>(parts).high) / 63)), {}};
    float factor = inverse(result.unit);
    for (int i = 0; i < 8; i += 4) {
        Four multiples = rounded(load(parts + i) * factor, 0, 63);
        for (int j = 0; j < 4; ++j) result.multiples[i + j] = uint8_t(multiples[j]);
    }
    return result;
}

// Writes the first four of both in the low six bits of a byte each, then the low nibbles of the last four. The high
// bits of the last four go above the six bits.
uint8_t *write_six_bits(const uint8_t *scales, const uint8_t *minima, uint8_t *out) {
    for (int i = 0; i < 4; ++i) {
        out[i] = uint8_t(scales[i] | scales[i + 4] >> 4 << 6);
        out[i + 4] = uint8_t(minima[i] | minima[i + 4] >> 4 << 6);
        out[i + 8] = uint8_t((scales[i + 4] & 15) | minima[i + 4] << 4);
    }
    return out + 12;
}

// Codes: (x + minimum) / scale + kZero, rounded, clamped to 0 .. kMost.
template <int kCount, int kZero, int kMost>
void write_group(const float *x, float minimum, float scale, uint8_t *codes) {
    float factor = inverse(scale), numbers[kCount];
    for (int i = 0; i < kCount; i += 4) {
        store(numbers + i, rounded((load(x + i) + minimum) * factor, -kZero, kMost - kZero));
    }
    for (int i = 0; i < kCount; ++i) codes[i] = uint8_t(int(numbers[i]) + kZero);
}

// Q4_K, Q5_K: eight groups of 32. Each has a scale and a minimum of six bits, in units of d and dmin.
template <int kBits> void with_minima(const float *x, uint8_t *block) {
    constexpr int kLevels = (1 << kBits) - 1;
    float scale[8], minimum[8];
    for (int g = 0; g < 8; ++g) {
        Affine found = search_affine<kLevels>(x + 32 * g);
        scale[g] = found.scale, minimum[g] = found.minimum;
    }
    InUnits scales = in_units(scale), minima = in_units(minimum);
    uint8_t codes[256];
    for (int g = 0; g < 8; ++g) {
        write_group<32, 0, kLevels>(x + 32 * g, minima.unit * minima.multiples[g], scales.unit * scales.multiples[g],
                                    codes + 32 * g);
    }
    block = write_half(write_half(block, scales.unit), minima.unit);
    block = write_six_bits(scales.multiples, minima.multiples, block);
    if constexpr (kBits == 5) block = pack<4, 1, 32, 256>(codes, block);
    pack<0, 4, 32, 256>(codes, block);
}

// Searches the scale of 16 codes from -32 to 31. The code of the weight with the largest magnitude is negative.
float search_around_zero(const float *x) {
    float weights[16];
    weigh<16>(x, weights);
    float largest = farthest<16>(x), best = 0, best_gain = 0;
    for (double step : {-1.2, -0.8, -0.4, 0.0, 0.4, 0.8, 1.2}) {
        float factor = float(-32 + step) * inverse(largest);
        Four sum_qq = {}, sum_qx = {};
        for (int i = 0; i < 16; i += 4) {
            Four q = rounded(load(x + i) * factor, -32, 31), weighted = load(weights + i) * q;
            sum_qq += weighted * q;
            sum_qx += weighted * load(x + i);
        }
        float product = sum(sum_qx), rest = inverse(sum(sum_qq));
        if (product * product * rest > best_gain) best = product * rest, best_gain = product * product * rest;
    }
    return best;
}

// Q6_K: sixteen groups of 16. Each has a signed scale of eight bits, in units of d.
void q6_k(const float *x, uint8_t *block) {
    float scales[16];
    for (int g = 0; g < 16; ++g) scales[g] = search_around_zero(x + 16 * g);
    float unit = widen_half(narrow_half(farthest<16>(scales) / -128)), factor = inverse(unit);
    uint8_t codes[256], *eighths = block + 192;
    for (int g = 0; g < 16; ++g) {
        float eighth = rounded(all(scales[g] * factor), -128, 127)[0];
        eighths[g] = uint8_t(int8_t(eighth));
        write_group<16, 32, 63>(x + 16 * g, 0, unit * eighth, codes + 16 * g);
    }
    pack<4, 2, 32, 256>(codes, pack<0, 4, 64, 256>(codes, block));
    write_half(eighths + 16, unit);
}

// ---- Blocks of 256 that GGUF files do not have, as in deltic/loader/four_bits.py. A byte has two codes, the even one
// in the low bits.

// Rounds a number from 0 to 448 to the nearest e4m3 number, ties to even.
uint8_t narrow_e4m3(float value) {
    const float whole = 0x1.8p23f;
    if (value < 0x1p-6f) return uint8_t((value * 512 + whole) - whole);
    uint32_t bits = std::bit_cast<uint32_t>(value);
    bits += 0x7ffff + (bits >> 20 & 1);
    return uint8_t((bits >> 20) - (120 << 3));
}
float widen_e4m3(uint8_t bits) { return std::bit_cast<float>(uint32_t(bits) << 20) * 0x1p120f; }

void nvfp4(const float *x, uint8_t *block) {
    float most[16], d = 0;
    for (int g = 0; g < 16; ++g) {
        Range range = range_of<16>(x + 16 * g);
        most[g] = std::max(-range.low, range.high);
        d = std::max(d, most[g]);
    }
    d = d / (6 * 448);
    float factor = inverse(d * 6), stored = d * 128;
    std::memcpy(block, &stored, 4);
    uint8_t codes[256];
    for (int g = 0; g < 16; ++g) {
        block[4 + g] = narrow_e4m3(most[g] * factor);
        float of_group = inverse(widen_e4m3(block[4 + g]) * d);
        for (int i = 16 * g; i < 16 * g + 16; ++i) {
            float scaled = x[i] * of_group, size = std::fabs(scaled);
            int code = (size > 0.25f) + (size >= 0.75f) + (size > 1.25f) + (size >= 1.75f) + (size > 2.5f) +
                       (size >= 3.5f) + (size > 5.0f);
            codes[i] = uint8_t(code | (scaled < 0) << 3);
        }
    }
    pack<0, 4, 1, 256>(codes, block + 20);
}

// INT4_*: groups with a scale and an integer zero point, so that 0 stays exactly 0.
template <int kGroup> void int4(const float *x, uint8_t *block) {
    constexpr int kWords = 256 / kGroup;
    uint8_t codes[256];
    for (int g = 0; g < kWords; ++g, block += 4) {
        Range range = range_of<kGroup>(x + kGroup * g);
        float low = std::min(range.low, 0.0f), high = std::max(range.high, 0.0f);
        uint32_t bits = (std::bit_cast<uint32_t>((high - low) / 15) + 128) & 0xffffff00u;
        float factor = inverse(std::bit_cast<float>(bits)), zero = rounded(all(-low * factor), 0, 15)[0];
        bits |= uint32_t(zero);
        std::memcpy(block, &bits, 4);
        for (int i = kGroup * g; i < kGroup * (g + 1); i += 4) {
            Four numbers = rounded(load(x + i) * factor + zero, 0, 15);
            for (int j = 0; j < 4; ++j) codes[i + j] = uint8_t(numbers[j]);
        }
    }
    pack<0, 4, 1, 256>(codes, block);
}

// ---- Types.

struct Type {
    int64_t id, weights, bytes; // per block
    void (*write)(const float *x, uint8_t *block);
};

constexpr Type kTypes[] = {
    {DELTIC_Q4_0, 32, 18, around_zero<4>},   {DELTIC_Q4_1, 32, 20, above_minimum<4>},
    {DELTIC_Q5_0, 32, 22, around_zero<5>},   {DELTIC_Q5_1, 32, 24, above_minimum<5>},
    {DELTIC_Q8_0, 32, 34, q8_0},             {DELTIC_Q4_K, 256, 144, with_minima<4>},
    {DELTIC_Q5_K, 256, 176, with_minima<5>}, {DELTIC_Q6_K, 256, 210, q6_k},
    {DELTIC_NVFP4, 256, 148, nvfp4},         {DELTIC_INT4_32, 256, 160, int4<32>},
    {DELTIC_INT4_64, 256, 144, int4<64>},    {DELTIC_INT4_128, 256, 136, int4<128>},
};

} // namespace
} // namespace deltic

using namespace deltic;

extern "C" int deltic_quantize(int64_t id, const float *x, int64_t rows, int64_t columns, void *blocks) {
    auto type = std::find_if(std::begin(kTypes), std::end(kTypes), [&](const Type &one) { return one.id == id; });
    if (type == std::end(kTypes) || columns % type->weights) return -1;
    auto out = static_cast<uint8_t *>(blocks);
    for (int64_t i = 0; i < rows * (columns / type->weights); ++i) {
        type->write(x + i * type->weights, out + i * type->bytes);
    }
    return 0;
}
