// Runs gdn_spread of kernels/gdn.cuh on the processor: SHAPE, its template arguments.
#include "emulated_gpu.h"
#define __shared__ thread_local
typedef float State;
DEVICE float __expf(float x) { return std::exp(x); }
DEVICE float sigmoid(float x) { return 1 / (1 + std::exp(-x)); }
DEVICE float wide(u16 x) { return low(x); }
DEVICE float wide(float x) { return x; }
DEVICE float load(const u16 *p) { return low(*p); }
DEVICE float4 load4_once(const float *p, u64) { return load4(p); }
DEVICE void store4_once(float *p, float4 v, u64) { store4(p, v); }
template <int N> DEVICE void warp_sums(float (&sums)[N]) {
    for (float &sum : sums) sum = warp_sum(sum);
}
// Only gdn_stream has these.
template <int BYTES> DEVICE void copy_async(u32, const void *) {}
DEVICE void await_copies() {}
DEVICE bool is_copier(int) { return false; }
DEVICE void meet_copiers() {}
DEVICE float4 take4(const float *p) { return *(const float4 *)p; }
#include "gdn.cuh"

// Returns how many blocks have waited for what came before; -1 if one of them does not end.
extern "C" int run_gdn(const Gdn *a, int grid, int threads) {
    return launch(grid, threads, [=] { gdn_spread<SHAPE>(*a); });
}
