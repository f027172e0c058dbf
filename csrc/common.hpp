// What the kernels share: bfloat16 conversion, and loops that the compiler vectorises for the processor at hand.
#pragma once
#include <bit>
#include <cmath>
#include <cstdint>

#if defined(__x86_64__) && defined(__gnu_linux__)
#define DELTIC_CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define DELTIC_CLONES
#endif

namespace deltic {

inline float widen(uint16_t bits) { return std::bit_cast<float>(uint32_t(bits) << 16); }
inline float widen(float value) { return value; }

// Round to nearest, ties to even; NaN stays NaN.
inline void narrow(float value, uint16_t &bits) {
    uint32_t word = std::bit_cast<uint32_t>(value);
    uint32_t rounded = (word + 0x7fff + ((word >> 16) & 1)) >> 16;
    bits = uint16_t(value != value ? 0x7fc0 : rounded);
}
inline void narrow(float value, float &out) { out = value; }

// exp in float32, relative error below 2e-7; comparisons let NaN pass.
inline float exponential(float x) {
    x = x > 88.0f ? 88.0f : x;
    x = x < -87.0f ? -87.0f : x;
    float n = std::nearbyintf(x * 1.44269504f);
    float r = x - n * 0.693359375f;
    r = r + n * 2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    return p * std::bit_cast<float>((int32_t(n) + 127) << 23);
}

inline float sigmoid(float x) { return 1.0f / (1.0f + exponential(-x)); }

}  // namespace deltic
