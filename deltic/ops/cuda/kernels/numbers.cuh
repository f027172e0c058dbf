// Copies the integers of a step from host memory to the device, where the step's kernels read them. ops/input_columns.py
// defines their offsets.

struct Numbers {
    const i64 *host;   // [N], pinned host memory
    i64 *numbers;      // [N], on the device
    const i64 *drawn;  // tokens that the device drew; null: `host` has the tokens
    int count, tokens;  // count: N. tokens: number of ids, from IDS_OFFSET on; host ends with their indices in `drawn`
};
// One block of 256 threads per 1,024 integers.
DEVICE void numbers(const Numbers &a) {
    const int first = blockIdx.x * 1024 + threadIdx.x;
    i64 v[4];
#pragma unroll
    for (int p = 0; p < 4; ++p) {
        const int i = first + p * 256;
        const bool taken = a.drawn && i >= IDS_OFFSET && i < IDS_OFFSET + a.tokens;
        if (i < a.count) v[p] = __ldcv(a.host + (taken ? a.count - a.tokens + i - IDS_OFFSET : i));
    }
#pragma unroll
    for (int p = 0; p < 4; ++p) {
        const int i = first + p * 256;
        const bool taken = a.drawn && i >= IDS_OFFSET && i < IDS_OFFSET + a.tokens;
        if (i < a.count) a.numbers[i] = taken ? a.drawn[v[p]] : v[p];
    }
}

struct Cursors {
    i64 *numbers;             // the `VerifyColumns` of a step with drafts
    const i64 *drawn;         // the column `draws` has each token's index here; its position is the next number
    int tokens, rows, width;  // of the bucket. width: pages per row
};
// Moves the rows to the device's positions of their first tokens, which may be further on than the host assumed. One block of
// 256 threads, at least one thread per token.
DEVICE void cursors(const Cursors &a) {
    const VerifyColumns step(a.numbers, a.rows, a.tokens, a.width);
    const int rows = int(step.count[0]), token = threadIdx.x;
    const bool there = token < step.starts[rows];
    int row = 0;
    for (int i = 1; i < rows; ++i) row += there && step.starts[i] <= token;
    const i64 first = step.starts[row], more = a.drawn[step.draws[first] + 1] - step.done[row],
              position = step.done[row] + more + token - first;
    __syncthreads();  // all threads have read the cursors
    if (!there) return;
    for (int axis = 0; axis < 3; ++axis) step.positions[axis * a.tokens + token] += more;
    step.store[token] = step.pages[i64(row) * a.width + position / PAGE] * PAGE + position % PAGE;
    if (token == first) step.done[row] += more;
}

struct RowKeys {
    const i64 *answers, *done;  // [R]: `noise.answer_key`; the cursor of the row's first token
    i64 *keys;                  // [R, width]: of the draws after that token and the following ones
    int rows, width;
};
// Computes `noise.keys_at`. One thread per key.
DEVICE void row_keys(const RowKeys &a) {
    const int i = blockIdx.x * 256 + threadIdx.x, row = i / a.width;
    if (row >= a.rows) return;
    u64 z = u64(a.answers[row]) + u64(a.done[row]) + 1 + i % a.width + 0x9E3779B97F4A7C15ull;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
    a.keys[i] = i64(z ^ (z >> 31));
}
