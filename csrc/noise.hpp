// The keyed noise of draws: deltic/ops/noise.py says what it is.
#pragma once
#include <cmath>
#include <cstdint>

namespace deltic {

// 53 random bits of a draw's key and a token's id: the finaliser of splitmix64.
static inline uint64_t noise_bits(uint64_t key, uint64_t id) {
    uint64_t word = key + id * 0x9E3779B97F4A7C15u;
    word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9u;
    word = (word ^ word >> 27) * 0x94D049BB133111EBu;
    return (word ^ word >> 31) >> 11;
}

// Standard Gumbel noise; finite.
static inline double gumbel(uint64_t key, uint64_t id) {
    double uniform = (double(noise_bits(key, id)) + 0.5) * 0x1p-53, below_one = 1 - 0x1p-53;
    return -std::log(-std::log(uniform < below_one ? uniform : below_one));
}

}  // namespace deltic
