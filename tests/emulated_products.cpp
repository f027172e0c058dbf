// Runs a product of kernels/product.cuh or kernels/sliced.cuh on the processor: PRODUCT, with its template arguments.
#include "emulated_gpu.h"
#define __shared__
#include "input.cuh"
#include "product.cuh"
#include "sliced.cuh"

// Returns how many copies brought weights to shared memory.
extern "C" int run_product(const Product *a, int grid, int threads) {
    launch(grid, threads, [=] { PRODUCT(*a); });
    return copies;
}
