// Runs kernels/lora.cuh on the processor.
#include "emulated_gpu.h"
#define __shared__ static
#include "lora.cuh"

// Both return how many blocks have waited for what came before.
extern "C" int run_shrink(const Shrink *a, int norm, int grid, int threads) {
    return launch(grid, threads, [=] { norm ? shrink<true>(*a) : shrink<false>(*a); });
}
extern "C" int run_expand(const Expand *a, int grid, int threads) {
    return launch(grid, threads, [=] { expand(*a); });
}
