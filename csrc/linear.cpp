// Few tokens times a large bfloat16 matrix: bound by reading the matrix once.
#include <algorithm>
#include <thread>
#include <vector>

#include "deltic.h"

extern "C" int deltic_abi(void) { return 1; }

#if defined(__x86_64__)
#include <immintrin.h>

namespace {

constexpr int64_t kBlock = 32, kAhead = 2048;

// Row after row, so that each thread reads one stream. Two sums per product: even and odd blocks.
template <int Tokens>
__attribute__((target("avx512f,avx512bw,avx512bf16"))) void rows(const uint16_t *x, const uint16_t *w, float *y,
                                                                 int64_t begin, int64_t end, int64_t out, int64_t in) {
    for (int64_t row = begin; row < end; ++row) {
        const uint16_t *weights = w + row * in;
        __m512 sums[2][Tokens];
        for (int t = 0; t < Tokens; ++t) sums[0][t] = sums[1][t] = _mm512_setzero_ps();
        for (int64_t i = 0; i < in; i += 2 * kBlock) {
            for (int half = 0; half < 2; ++half) {
                const uint16_t *block = weights + i + half * kBlock;
                _mm_prefetch((const char *)(block + kAhead), _MM_HINT_T0);
                __m512bh weight = (__m512bh)_mm512_loadu_si512(block);
                for (int t = 0; t < Tokens; ++t) {
                    __m512bh input = (__m512bh)_mm512_loadu_si512(x + t * in + i + half * kBlock);
                    sums[half][t] = _mm512_dpbf16_ps(sums[half][t], weight, input);
                }
            }
        }
        for (int t = 0; t < Tokens; ++t) y[t * out + row] = _mm512_reduce_add_ps(_mm512_add_ps(sums[0][t], sums[1][t]));
    }
}

using Kernel = void (*)(const uint16_t *, const uint16_t *, float *, int64_t, int64_t, int64_t, int64_t);
constexpr Kernel kKernels[] = {rows<1>, rows<2>, rows<3>, rows<4>, rows<5>, rows<6>, rows<7>, rows<8>};

}  // namespace

extern "C" int deltic_has_bf16(void) {
    return __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512bw") ? 1 : 0;
}

extern "C" void deltic_linear_bf16(const uint16_t *x, const uint16_t *w, float *y, int64_t tokens, int64_t out,
                                   int64_t in, int64_t threads) {
    Kernel kernel = kKernels[tokens - 1];
    // a share is worth a thread from about a tenth of a millisecond of reading on
    int64_t shares = std::max<int64_t>(1, std::min(threads, out * in / (1 << 21)));
    int64_t share = (out + shares - 1) / shares;
    std::vector<std::thread> helpers;
    for (int64_t begin = share; begin < out; begin += share)
        helpers.emplace_back(kernel, x, w, y, begin, std::min(begin + share, out), out, in);
    kernel(x, w, y, 0, std::min(share, out), out, in);
    for (auto &helper : helpers) helper.join();
}

#else

extern "C" int deltic_has_bf16(void) { return 0; }
extern "C" void deltic_linear_bf16(const uint16_t *, const uint16_t *, float *, int64_t, int64_t, int64_t, int64_t) {}

#endif
