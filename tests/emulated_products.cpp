// Runs a product on the processor: PRODUCT of kernels/product.cuh, sliced.cuh or product_many.cuh, with its template arguments.
// STAGED: norms the input of product_many.cuh.
#include "emulated_gpu.h"
#define __shared__
#include "input.cuh"
#include "product.cuh"
#include "sliced.cuh"
#include "product_many.cuh"

// Returns how many copies brought weights to shared memory; -1 if a block does not end.
extern "C" int run_product(const Product *a, int grid, int threads) {
    return launch(grid, threads, [=] { PRODUCT(*a); }) < 0 ? -1 : copies;
}
extern "C" int run_stage(const Stage *a, int threads) { return launch(a->tokens, threads, [=] { STAGED(*a); }); }
