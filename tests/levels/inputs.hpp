// Inputs of the kernels that are the same bits on every machine, and the file that outputs are written to.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <string>
#include <vector>

#include "deltic.h"

[[noreturn]] inline void fail(const char *what) {
    std::fprintf(stderr, "ops: %s\n", what);
    std::exit(2);
}
inline void check(int status) {
    if (status) fail("a kernel failed");
}

// ---- Memory that lives as long as the program.

inline void *allocate(int64_t bytes) {
    void *memory = std::aligned_alloc(64, size_t(bytes + 63) / 64 * 64 + 64);
    if (!memory) fail("no memory");
    return std::memset(memory, 0, size_t(bytes + 63) / 64 * 64 + 64);
}
template <typename T> T *array(int64_t count) { return static_cast<T *>(allocate(count * int64_t(sizeof(T)))); }
template <typename T> const T *array_of(const std::vector<T> &values) {
    T *made = array<T>(int64_t(values.size()));
    std::memcpy(made, values.data(), values.size() * sizeof(T));
    return made;
}

// ---- Pseudo-random numbers: splitmix64.

inline uint64_t counter;
inline uint64_t draw() {
    uint64_t bits = counter += 0x9e3779b97f4a7c15u;
    bits = (bits ^ bits >> 30) * 0xbf58476d1ce4e5b9u;
    bits = (bits ^ bits >> 27) * 0x94d049bb133111ebu;
    return bits ^ bits >> 31;
}
inline int64_t below(int64_t end) { return int64_t(draw() >> 1) % end; }
inline float number(float middle, float reach) {
    return middle + reach * (float(int64_t(draw() >> 40)) / 8388608.0f - 1.0f);
}
inline float *numbers(int64_t count, float middle, float reach) {
    float *made = array<float>(count);
    for (int64_t i = 0; i < count; ++i) made[i] = number(middle, reach);
    return made;
}
// Tokens' numbers: some much larger than the others, one token of zeros.
inline float *activations(int64_t tokens, int64_t width) {
    float *x = numbers(tokens * width, 0, 1);
    for (int64_t i = 0; i < tokens * width; i += 97) x[i] *= 37;
    if (tokens > 4) std::memset(x + 3 * width, 0, size_t(width) * 4);
    return x;
}

// ---- Weights: random codes, moderate scales.

struct BlockType {
    int64_t type, weights, bytes;
    int scales[2];  // places of float16 scales; -1: none
};
inline constexpr BlockType kTypes[] = {
    {DELTIC_F32, 1, 4, {-1, -1}},       {DELTIC_F16, 1, 2, {-1, -1}},       {DELTIC_BF16, 1, 2, {-1, -1}},
    {DELTIC_Q4_0, 32, 18, {0, -1}},     {DELTIC_Q4_1, 32, 20, {0, 2}},      {DELTIC_Q5_0, 32, 22, {0, -1}},
    {DELTIC_Q5_1, 32, 24, {0, 2}},      {DELTIC_Q8_0, 32, 34, {0, -1}},     {DELTIC_IQ4_NL, 32, 18, {0, -1}},
    {DELTIC_MXFP4, 32, 17, {-1, -1}},   {DELTIC_Q2_K, 256, 84, {80, 82}},   {DELTIC_Q3_K, 256, 110, {108, -1}},
    {DELTIC_Q4_K, 256, 144, {0, 2}},    {DELTIC_Q5_K, 256, 176, {0, 2}},    {DELTIC_Q6_K, 256, 210, {208, -1}},
    {DELTIC_IQ4_XS, 256, 136, {0, -1}}, {DELTIC_NVFP4, 256, 148, {-1, -1}}, {DELTIC_INT4_32, 256, 160, {-1, -1}},
    {DELTIC_INT4_64, 256, 144, {-1, -1}}, {DELTIC_INT4_128, 256, 136, {-1, -1}},
};
inline const BlockType &type_of(int64_t type) {
    for (const BlockType &known : kTypes)
        if (known.type == type) return known;
    fail("unknown type");
}

inline void make_row(const BlockType &kind, int64_t columns, uint8_t *to) {
    for (int64_t i = 0; i < columns / kind.weights; ++i, to += kind.bytes) {
        if (kind.weights == 1) {
            float value = number(0, 0.125f);
            uint32_t bits;
            std::memcpy(&bits, &value, 4);
            uint16_t half = uint16_t((draw() & 0x83ff) | (8 + below(6)) << 10), top = uint16_t(bits >> 16);
            std::memcpy(to, kind.bytes == 4 ? (void *)&bits : kind.type == DELTIC_F16 ? (void *)&half : (void *)&top,
                        size_t(kind.bytes));
            continue;
        }
        for (int64_t byte = 0; byte < kind.bytes; ++byte) to[byte] = uint8_t(draw() >> 56);
        if (kind.type == DELTIC_MXFP4) to[0] = uint8_t(115 + below(10));
        if (kind.type == DELTIC_NVFP4) {
            float factor = number(0.01f, 0.005f);
            std::memcpy(to, &factor, 4);
            for (int at = 4; at < 20; ++at) to[at] &= 0x7f;
        }
        for (int64_t word = 0; kind.type > DELTIC_NVFP4 && word < (kind.bytes - 128) / 4; ++word) {
            to[4 * word] &= 15;
            to[4 * word + 3] = uint8_t((draw() & 0x80) | 0x3a);  // scales from 2^-11 on
        }
        for (int place : kind.scales) {
            if (place < 0) continue;
            uint16_t scale = uint16_t((draw() & 0x83ff) | (2 + below(4)) << 10);
            std::memcpy(to + place, &scale, 2);
        }
    }
}

inline deltic_matrix matrix(int64_t type, int64_t rows, int64_t columns) {
    const BlockType &kind = type_of(type);
    int64_t row = columns / kind.weights * kind.bytes;
    auto *blocks = array<uint8_t>(rows * row);
    for (int64_t i = 0; i < rows; ++i) make_row(kind, columns, blocks + i * row);
    int64_t bytes = deltic_packed_bytes(type, rows, columns);
    if (bytes < 0) fail("these columns cannot be packed");
    auto *packed = array<uint8_t>(bytes);
    deltic_pack(type, blocks, 0, rows, columns, packed);
    return {type, rows, columns, packed};
}
inline deltic_weight weight(int64_t type, int64_t rows, int64_t columns, int64_t slices = 0, int64_t runs = 1) {
    return {1, {matrix(type, rows, columns)}, slices, runs};
}

// ---- Outputs: for each case a line with its name and bytes, then these.

struct Output {
    FILE *file;

    void write(const std::string &name, const void *data, int64_t bytes) const {
        std::fprintf(file, "%s %lld\n", name.c_str(), (long long)bytes);
        if (std::fwrite(data, 1, size_t(bytes), file) != size_t(bytes)) fail("cannot write");
    }
    // NaN has one form: processors differ in what they make.
    void floats(const std::string &name, float *data, int64_t count) const {
        for (int64_t i = 0; i < count; ++i)
            if (data[i] != data[i]) std::memcpy(data + i, "\0\0\xc0\x7f", 4);
        write(name, data, count * 4);
    }
};
