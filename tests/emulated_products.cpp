// Runs a product of kernels/product.cuh or kernels/sliced.cuh on the processor: PRODUCT, with its template arguments.
#include "emulated_gpu.h"
#define __shared__
#include "input.cuh"
#include "product.cuh"
#include "sliced.cuh"

// Returns how many copies brought weights to shared memory; -1 if a block does not end.
extern "C" int run_product(const Product *a, int grid, int threads) {
    return launch(grid, threads, [=] { PRODUCT(*a); }) < 0 ? -1 : copies;
}
