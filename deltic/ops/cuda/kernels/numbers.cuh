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

struct Cursors {
    i64 *numbers;             // of a step with drafts: count, ids [T], positions [3, T], starts [R + 1], done [R], five others
                              // [R] each, store [T], T others, pages [R, width], draws [T]
    const i64 *drawn;         // where draws say that tokens are, each with its position after it
    int tokens, rows, width;  // T, R
};
// Rows begin where the device has their first tokens, which may be further on than the host knew. One block of 256 threads,
// at least one for each token.
DEVICE void cursors(const Cursors &a) {
    i64 *const positions = a.numbers + 1 + a.tokens, *const starts = positions + 3 * a.tokens, *const done = starts + a.rows + 1;
    i64 *const store = done + 6 * a.rows, *const pages = store + 2 * a.tokens, *const draws = pages + i64(a.rows) * a.width;
    const int rows = int(a.numbers[0]), token = threadIdx.x;
    const bool there = token < starts[rows];
    int row = 0;
    for (int i = 1; i < rows; ++i) row += there && starts[i] <= token;
    const i64 first = starts[row], more = a.drawn[draws[first] + 1] - done[row], position = done[row] + more + token - first;
    __syncthreads();  // all have read the cursors
    if (!there) return;
    for (int axis = 0; axis < 3; ++axis) positions[axis * a.tokens + token] += more;
    store[token] = pages[i64(row) * a.width + position / PAGE] * PAGE + position % PAGE;
    if (token == first) done[row] += more;
}

struct RowKeys {
    const i64 *answers, *done;  // [R]: `noise.answer_key`, and the cursor of a row's first token
    i64 *keys;                  // [R, width]: of the draws after that token and those that follow
    int rows, width;
};
// As `noise.keys_at`. A thread for each key.
DEVICE void row_keys(const RowKeys &a) {
    const int i = blockIdx.x * 256 + threadIdx.x, row = i / a.width;
    if (row >= a.rows) return;
    u64 z = u64(a.answers[row]) + u64(a.done[row]) + 1 + i % a.width + 0x9E3779B97F4A7C15ull;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
    a.keys[i] = i64(z ^ (z >> 31));
}
