
// Terms that adapters (LoRA) add to a product of up to 16 tokens. Each token may have another adapter. `shrink` computes
// sums[t, r] = sum over k of x[t, k] * a[r, k]. `expand` computes terms[t, n] = sum over r of sums[t, r] * b[n, r]. The next
// product adds the terms to its own sums.
//
// A table holds the addresses of all a and b. A step names a table entry for each token, so that a recorded graph stays valid
// while adapters are loaded and unloaded. Both kernels have one block per multiprocessor. Their blocks and one of the previous
// product leave no room there for a block of the next product. So the next product's blocks start where those of the previous
// product end: one per multiprocessor.
//
// The order of a sum depends only on the number of columns (`shrink`) or on the rank (`expand`), never on other tokens.

constexpr int MOST_TERMS = 4, MOST_TOKENS = 16;  // terms of a product; tokens of a step

// An adapter's term for a range of rows of a product.
struct Term {
    const u16 *a;       // [rank, K]
    const u16 *b;       // [rows, rank], times the adapter's scale
    int first, rows;    // range of rows of the product
    int rank, offset;   // rank: a multiple of 8; 0: no term. offset: of its first sum within the token's sums
};
struct Shrink {
    const void *x;         // [T, K] float, not normed yet, or [T, K] bf16
    const float *scale;    // [K] of the norm
    const Term *table;     // the product's MOST_TERMS terms of entry 0; those of entry e are e * stride terms later
    const i64 *entries;    // [T], negative: the token has no adapter
    float *sums;           // [T, room]
    float eps;
    int tokens, columns, stride, room;
};
struct Expand {
    const Term *table;
    const i64 *entries;
    const float *sums;     // [T, room]
    float *terms;          // [T, rows]; not written for tokens without an adapter
    int tokens, rows, stride, room;
};

// A token's existing terms come first.
typedef Term Terms[MOST_TOKENS][MOST_TERMS];

// Loads the terms of all tokens. The whole block calls it.
template <class Args> DEVICE void load_terms(const Args &a, Terms &known) {
    if (threadIdx.x < MOST_TOKENS * MOST_TERMS) {
        const int token = threadIdx.x / MOST_TERMS, i = threadIdx.x % MOST_TERMS;
        const i64 entry = token < a.tokens ? a.entries[token] : -1;
        uint4 *const to = (uint4 *)&known[token][i];
        const uint4 *const from = (const uint4 *)(a.table + entry * a.stride + i), none = make_uint4(0, 0, 0, 0);
        to[0] = entry < 0 ? none : __ldcg(from);
        to[1] = entry < 0 ? none : __ldcg(from + 1);
    }
    __syncthreads();
}

// Blocks of 8 warps. NORM: the input is normed. A block computes a group of ROWS sums of a token at once.
template <bool NORM> DEVICE void shrink(const Shrink &a) {
    constexpr int WARPS = 8, ROWS = NORM ? 4 : 1, STEP = WARPS * 256;
    __shared__ __align__(16) Terms known;
    __shared__ float parts[WARPS][ROWS + 1];
    const int tid = threadIdx.x, warp = tid >> 5, lane = tid & 31;
    launch_dependents();
    load_terms(a, known);
    // of token `lane`: own: number of its groups; end: number of groups of all tokens up to it
    int own = 0;
    if (lane < MOST_TOKENS)
        for (int i = 0; i < MOST_TERMS; ++i) own += known[lane][i].rank / ROWS;
    int end = own;
    for (int apart = 1; apart < 32; apart *= 2) {
        const int before = __shfl_up_sync(~0u, end, apart);
        if (lane >= apart) end += before;
    }
    const int groups = __shfl_sync(~0u, end, 31);
    int token, sum_at;  // of a group: its token, and the index of its first sum within the token's sums
    const auto rows_of = [&](int group) {
        token = __popc(__ballot_sync(~0u, end <= group));
        sum_at = (group - __shfl_sync(~0u, end - own, token)) * ROWS;
        int i = 0;
        while (i < MOST_TERMS - 1 && sum_at >= known[token][i].offset + known[token][i].rank) ++i;
        return known[token][i].a + i64(sum_at - known[token][i].offset) * a.columns;
    };
    for (int group = blockIdx.x; group < groups; group += gridDim.x) {
        const u16 *const from = rows_of(group);
        for (int at = tid * 64; at < ROWS * a.columns; at += WARPS * 32 * 64) prefetch(from + at);
    }
    wait();
    for (int group = blockIdx.x; group < groups; group += gridDim.x) {
        const u16 *const from = rows_of(group);
        float sum[ROWS] = {}, square = 0;
#pragma unroll (NORM ? 2 : 4)
        for (int k = tid * 8; k < a.columns; k += STEP) {
            float v[8];
            if constexpr (NORM) {
                float s[8];
                load_all<8>(v, (const float *)a.x + i64(token) * a.columns + k);
                load_all<8>(s, a.scale + k);
#pragma unroll
                for (int i = 0; i < 8; i += 2) {
                    square = __fmaf_rn(v[i], v[i], __fmaf_rn(v[i + 1], v[i + 1], square));
                    const u32 two = narrow2(v[i] * s[i], v[i + 1] * s[i + 1]);  // rounded as in the product
                    v[i] = low(two), v[i + 1] = high(two);
                }
            } else {
                load_all<8>(v, (const u16 *)a.x + i64(token) * a.columns + k);
            }
#pragma unroll
            for (int r = 0; r < ROWS; ++r) {
                float w[8];
                load_all<8>(w, from + i64(r) * a.columns + k);
#pragma unroll
                for (int i = 0; i < 8; ++i) sum[r] = __fmaf_rn(v[i], w[i], sum[r]);
            }
        }
        square = warp_sum(square);
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
            const float all = warp_sum(sum[r]);
            if (lane == 0) parts[warp][r] = all;
        }
        if (lane == 0) parts[warp][ROWS] = square;
        __syncthreads();
        if (tid < ROWS) {
            float all = 0, squares = 0;
            for (int w = 0; w < WARPS; ++w) all += parts[w][tid], squares += parts[w][ROWS];
            a.sums[i64(token) * a.room + sum_at + tid] = NORM ? __fmul_rn(all, rsqrtf(squares / a.columns + a.eps)) : all;
        }
        __syncthreads();
    }
}

// Blocks of 512 threads. A thread computes one row of a token.
DEVICE void expand(const Expand &a) {
    constexpr int THREADS = 512;
    __shared__ __align__(16) Terms known;
    launch_dependents();
    load_terms(a, known);
    const int chunks = (a.rows + THREADS - 1) / THREADS, items = a.tokens * chunks;
    // Sets the thread's token and row, and returns the row's term; its rank is 0 if the row has no term.
    const auto term_of = [&](int item, int &token, int &row) {
        token = item / chunks, row = (item - token * chunks) * THREADS + threadIdx.x;
        int i = 0;
        while (i < MOST_TERMS && u32(row - known[token][i].first) >= u32(known[token][i].rows)) ++i;
        return i < MOST_TERMS ? known[token][i] : Term{};
    };
    int token, row;
    for (int item = blockIdx.x; item < items; item += gridDim.x) {
        const Term own = term_of(item, token, row);
        const u16 *const from = own.b + i64(row - own.first) * own.rank;
        for (int at = 0; at < own.rank; at += 64) prefetch(from + at);
    }
    wait();
    for (int item = blockIdx.x; item < items; item += gridDim.x) {
        const Term own = term_of(item, token, row);
        if (row >= a.rows || a.entries[token] < 0) continue;
        const float *const sums = a.sums + i64(token) * a.room + own.offset;
        const u16 *const from = own.b + i64(row - own.first) * own.rank;
        float sum = 0;
#pragma unroll 1
        for (int r = 0; r < own.rank; r += 16) {
            float v[2][8] = {}, w[2][8] = {};
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                if (half == 0 || r + 8 < own.rank)
                    load_all<8>(v[half], sums + r + half * 8), load_all<8>(w[half], from + r + half * 8);
            }
#pragma unroll
            for (int i = 0; i < 16; ++i) sum = __fmaf_rn(v[i / 8][i % 8], w[i / 8][i % 8], sum);
        }
        a.terms[i64(token) * a.rows + row] = sum;
    }
}
