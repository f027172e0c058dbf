// The integers of a step, from memory of the host to where the step's kernels read them.

struct Numbers {
    const i64 *host;   // [N], in its memory
    i64 *numbers;      // [N]
    const i64 *drawn;  // what tokens are taken from; null: they are among the numbers
    int count, tokens;  // count: N, of which the second one and the next ones are tokens; the last ones say which of `drawn`
};
// A block of 256 threads for each 1,024.
DEVICE void numbers(const Numbers &a) {
    const int first = blockIdx.x * 1024 + threadIdx.x;
    i64 v[4];
#pragma unroll
    for (int p = 0; p < 4; ++p) {
        const int i = first + p * 256;
        const bool taken = a.drawn && i && i <= a.tokens;
        if (i < a.count) v[p] = __ldcv(a.host + (taken ? a.count - a.tokens + i - 1 : i));
    }
#pragma unroll
    for (int p = 0; p < 4; ++p) {
        const int i = first + p * 256;
        const bool taken = a.drawn && i && i <= a.tokens;
        if (i < a.count) a.numbers[i] = taken ? a.drawn[v[p]] : v[p];
    }
}
