// MoE layers for many tokens: grouped GEMMs. A pair is a token and an expert that it selected. Pairs are sorted by expert, so
// that an expert's pairs are one matrix product. The GPU computes where each pair goes; nothing waits for the host.

struct Route {
    const float *logits;          // [T, stride]: of the experts, then of the shared expert's gate
    int *expert, *place, *counts; // [T, each]: expert; place among the expert's pairs; [E]: pairs of an expert, 0 at entry
    float *share;                 // [T, each]: routing weight
    const i64 *count, *starts;    // as in `ExpertsGate`
    int tokens, stride, first, own;  // first, own: range of experts on this device; `expert` is -1 for others
};

struct Group {
    const u16 *x;                         // [T, H]
    const int *expert, *place, *counts;
    u64 *wanted;                          // as in `ExpertsGate`
    const float *share;
    u16 *sorted;                          // [pairs, H]: x sorted by expert, the shared expert's tokens last
    int *rows, *tiles, *total;            // rows [pairs]: index before sorting; tiles [total, 4]: expert, first pair, pairs
    float *weight;                        // [pairs]: share of the sorted pair
    const i64 *count, *starts;
    int tokens, hidden, shift;            // a tile has at most 1 << shift pairs
};

struct alignas(64) TensorMap {
    u64 words[16];
};

struct Grouped {
    TensorMap x;               // [pairs, K]: boxes of 64 columns and the rows of a tile
    const TensorMap *weights;  // [experts]: boxes of 64 columns and 64 rows (gate_up) or 128 rows (down)
    const int *tiles, *total, *rows;
    const float *weight;
    u16 *y;                    // gate_up: [pairs, I], sorted by expert; down: [T, each, H]
    int *counts;               // [E]: cleared for the next layer; null: nothing to clear
    i64 experts, ahead;        // ahead: steps of its guessed first tile that a block prefetches to L2
};

struct Combine {
    const u16 *x;  // [T, each, H]
    u16 *y;        // [T, H]; zeros for padding
    const i64 *count, *starts;
    const int *expert;  // [T, each]: -1 if another device has the expert; null: this device has all experts
    const u16 *shared;    // [T, H]: output of a shared expert that is not in x; null: none
    const float *logits;  // [T] at distance `stride`: logits of its gate
    int tokens, hidden, each, stride;
};

// One warp per token, blocks of 8 warps.
template <int E, int BEST, bool SHARED, bool NORMALISED> DEVICE void route(const Route &a) {
    constexpr int EACH = BEST + SHARED;
    __shared__ int chosen[8][BEST];
    __shared__ float shares[8][BEST];
    launch_dependents();
    wait();
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, token = blockIdx.x * 8 + warp;
    if (token >= real_tokens(a.count, a.starts, a.tokens)) return;
    const float *logits = a.logits + i64(token) * a.stride;
    const float gate = SHARED && lane == 0 ? load(logits + E) : 0.f;
    choose_experts<E, BEST, NORMALISED>(logits, chosen[warp], shares[warp]);
    const i64 first = i64(token) * EACH;
    for (int j = lane; j < BEST; j += 32) {
        const int expert = chosen[warp][j];
        const bool here = u32(expert - a.first) < u32(a.own);
        a.expert[first + j] = here ? expert : -1, a.share[first + j] = shares[warp][j];
        if (here) a.place[first + j] = atomicAdd(a.counts + expert, 1);
    }
    if (SHARED && lane == 0) a.expert[first + BEST] = E, a.share[first + BEST] = sigmoid(gate), a.place[first + BEST] = token;
}

// Blocks of 1,024 threads for 32 pairs each. Every block computes where each expert's pairs begin. Block 0 writes the tiles.
template <int E, int BEST, bool SHARED> DEVICE void group(const Group &a) {
    constexpr int EACH = BEST + SHARED;
    static_assert(E <= 1024);
    __shared__ int firsts[E];
    __shared__ u64 sums[33];
    launch_dependents();
    wait();
    const int e = threadIdx.x, lane = e & 31, warp = e >> 5, size = 1 << a.shift;
    const int count = e < E ? __ldcg(a.counts + e) : 0, tokens = real_tokens(a.count, a.starts, a.tokens);
    const u64 own = u64((count + size - 1) >> a.shift) << 32 | u32(count);  // tiles in the upper half, pairs in the lower
    u64 sum = own;
#pragma unroll
    for (int d = 1; d < 32; d *= 2) {
        const u64 other = __shfl_up_sync(~0u, sum, d);
        if (lane >= d) sum += other;
    }
    if (lane == 31) sums[warp + 1] = sum;
    if (e == 0) sums[0] = 0;
    __syncthreads();
    if (warp == 0) {
        u64 all = sums[lane + 1];
#pragma unroll
        for (int d = 1; d < 32; d *= 2) {
            const u64 other = __shfl_up_sync(~0u, all, d);
            if (lane >= d) all += other;
        }
        sums[lane + 1] = all;
    }
    __syncthreads();
    const u64 before = sums[warp] + sum - own;
    const int first = int(u32(before)), tile = int(before >> 32);
    if (e < E) firsts[e] = first;
    if (blockIdx.x == 0) {
        int4 *const tiles = (int4 *)a.tiles;
        const int routed = int(sums[32] >> 32), shared = SHARED ? (tokens + size - 1) >> a.shift : 0;
        for (int n = 0; n * size < count; ++n) tiles[tile + n] = make_int4(e, first + n * size, min(size, count - n * size), 0);
        for (int n = e; n < shared; n += 1024)
            tiles[routed + n] = make_int4(E, tokens * BEST + n * size, min(size, tokens - n * size), 0);
        if (e == 0) *a.total = routed + shared;
        if (a.wanted && count) a.wanted[e] += 1;
    }
    __syncthreads();
    const int pair = blockIdx.x * 32 + warp;
    if (pair >= tokens * EACH) return;
    const int expert = __ldcg(a.expert + pair);
    if (expert < 0) return;
    const int to = (expert == E ? tokens * BEST : firsts[min(expert, E - 1)]) + __ldcg(a.place + pair);
    if (lane == 0) a.rows[to] = pair, a.weight[to] = __ldcg(a.share + pair);
    const u16 *from = a.x + i64(pair / EACH) * a.hidden;
    for (int i = lane * 8; i < a.hidden; i += 256) *(uint4 *)(a.sorted + i64(to) * a.hidden + i) = load8(from + i);
}

#if __CUDA_ARCH__ >= 900
// Copies a box of ROWS rows and 64 columns. In row r, the 16-byte chunk c is stored as chunk c ^ (r % 8) (128-byte swizzle).
template <int ROWS> DEVICE void copy_box(u32 to, const TensorMap *map, int column, int row, u32 barrier, u64 policy) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint "
                 "[%0], [%1, {%2, %3}], [%4], %5;"
                 :: "r"(to), "l"(map), "r"(column), "r"(row), "r"(barrier), "l"(policy) : "memory");
}
DEVICE void prefetch_box(const TensorMap *map, int column, int row) {
    asm volatile("cp.async.bulk.prefetch.tensor.2d.L2.global.tile [%0, {%1, %2}];" :: "l"(map), "r"(column), "r"(row) : "memory");
}
DEVICE void acquire_map(const TensorMap *map) {
    asm volatile("fence.proxy.tensormap::generic.acquire.gpu [%0], 128;" :: "l"(map) : "memory");
}
#else  // without TMA a map has a matrix's address, bytes between rows, rows and columns (driver.py)
template <int ROWS> DEVICE void copy_box(u32 to, const TensorMap *map, int column, int row, u32, u64) {
    const int lane = threadIdx.x & 31, chunk = lane & 7, rows = int(map->words[2]) - row;
    const u64 from = map->words[0] + (column + chunk * 8) * 2, step = map->words[1];
    const bool there = column + chunk * 8 < int(map->words[3]);
#pragma unroll 4
    for (int r = lane >> 3; r < ROWS; r += 4) {
        const bool has = there && r < rows;  // zeros outside of the matrix
        copy_async_or_zero(to + r * 128 + ((chunk ^ (r & 7)) << 4), (const void *)(has ? from + (row + r) * step : map->words[0]), has);
    }
}
DEVICE void prefetch_box(const TensorMap *, int, int) {}
DEVICE void acquire_map(const TensorMap *) {}
#endif
DEVICE u64 read_again() {
    u64 policy;
    asm("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}
DEVICE void load_matrices(u32 (&v)[4], u32 at) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3]) : "r"(at) : "memory");
}

// Multiplies tiles: x of up to TILE pairs with 128 rows of their expert's matrix. With GATE these are 64 rows of gate and the
// same 64 rows of up. K, ROWS: columns and rows of the matrix. One warp copies, eight multiply.
template <int K, int ROWS, int TILE, int STAGES, bool GATE> struct TileProduct {
    static constexpr int WARPS = 8, STEPS = (K + 63) / 64, INNER = ROWS / 2, BLOCKS = GATE ? (INNER + 63) / 64 : (ROWS + 127) / 128;
    static constexpr int MATRIX = 128 * 128, STAGE = MATRIX + TILE * 128;
    static constexpr int DOWN = TILE >= 64 ? 2 : 1, ACROSS = WARPS / DOWN, TOKENS = TILE / 16 / DOWN, COLUMNS = 16 / ACROSS;
    const Grouped &a;
    const int tid, warp, lane;
    u32 stages;
    Ring ring;

    DEVICE TileProduct(const Grouped &args, u32 stages, void *barriers)
        : a(args), tid(threadIdx.x), warp(threadIdx.x >> 5), lane(threadIdx.x & 31), stages(stages), ring(barriers, STAGES) {}
    DEVICE int4 tile(int item) const { return __ldcg((const int4 *)a.tiles + item / BLOCKS); }
    DEVICE void copy_all(int items) {
        const u64 weights = TILE <= 32 ? read_once() : read_again(), input = read_again();
        int4 next = blockIdx.x < items ? tile(blockIdx.x) : int4{};
        for (int item = blockIdx.x, done = 0; item < items; item += gridDim.x) {
            const int4 own = next;
            const int block = item % BLOCKS;
            if (item + int(gridDim.x) < items) next = tile(item + gridDim.x);
            const TensorMap *map = a.weights + own.x;
            acquire_map(map);
            for (int step = 0; step < STEPS; ++step, ++done, ring.next()) {
                if (done >= STAGES) ring.await_emptied();
                const u32 to = stages + ring.slot * STAGE;
                expect_bytes(ring.filled(), STAGE);
                copy_box<GATE ? 64 : 128>(to, map, step * 64, block * (GATE ? 64 : 128), ring.filled(), weights);
                if (GATE) copy_box<64>(to + MATRIX / 2, map, step * 64, INNER + block * 64, ring.filled(), weights);
                copy_box<TILE>(to + MATRIX, &a.x, step * 64, own.y, ring.filled(), input);
                end_copies(ring.filled());
            }
        }
        await_own_copies();
    }
    // Prefetches weights to L2 before the tiles are known, on the guess that every expert has one tile.
    DEVICE void guess() const {
        const int expert = blockIdx.x / BLOCKS, block = blockIdx.x % BLOCKS;
        if (expert >= a.experts) return;
        const TensorMap *map = a.weights + expert;
        acquire_map(map);
        for (int step = 0; step < a.ahead && step < STEPS; ++step) {
            prefetch_box(map, step * 64, block * (GATE ? 64 : 128));
            if (GATE) prefetch_box(map, step * 64, INNER + block * 64);
        }
    }
    static DEVICE u32 place(u32 base, int row, int chunk) { return base + row * 128 + ((chunk ^ (row & 7)) << 4); }
    DEVICE void multiply_stage(float (&d)[TOKENS][COLUMNS][4]) {
        const u32 matrix = stages + ring.slot * STAGE, x = matrix + MATRIX;
        const int across = warp % ACROSS, down = warp / ACROSS;
        ring.await_filled();
#pragma unroll
        for (int k = 0; k < 4; ++k) {
            u32 token[TOKENS][4], weight[COLUMNS / 2][4];
#pragma unroll
            for (int t = 0; t < TOKENS; ++t)
                load_matrices(token[t], place(x, (down * TOKENS + t) * 16 + (lane & 15), k * 2 + (lane >> 4)));
#pragma unroll
            for (int c = 0; c < COLUMNS / 2; ++c) {  // 8 rows of gate and 8 of up, or 16 rows of down
                const int row = GATE ? (across * (COLUMNS / 2) + c) * 8 + (lane & 7) + (lane >> 4) * 64
                                     : (across * (COLUMNS / 2) + c) * 16 + (lane & 7) + (lane >> 4) * 8;
                load_matrices(weight[c], place(matrix, row, k * 2 + (lane >> 3 & 1)));
            }
#pragma unroll
            for (int t = 0; t < TOKENS; ++t)
#pragma unroll
                for (int c = 0; c < COLUMNS; ++c)
                    multiply(d[t][c], token[t][0], token[t][1], token[t][2], token[t][3], weight[c / 2][c % 2 * 2],
                             weight[c / 2][c % 2 * 2 + 1]);
        }
        ring.release();
    }
    DEVICE void store(const float (&d)[TOKENS][COLUMNS][4], const int4 &own, int block) {
        const int across = warp % ACROSS, down = warp / ACROSS;
#pragma unroll
        for (int t = 0; t < TOKENS; ++t)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int place = (down * TOKENS + t) * 16 + half * 8 + (lane >> 2);
                if (place >= own.z) continue;
                const i64 pair = own.y + place;
                if constexpr (GATE) {
                    const float share = __ldcg(a.weight + pair);
#pragma unroll
                    for (int c = 0; c < COLUMNS / 2; ++c) {
                        const int column = block * 64 + (across * (COLUMNS / 2) + c) * 8 + (lane & 3) * 2;
                        const float (&g)[4] = d[t][2 * c], (&u)[4] = d[t][2 * c + 1];
                        if (column < INNER)
                            *(u32 *)(a.y + pair * INNER + column) = narrow2(silu(g[2 * half]) * u[2 * half] * share,
                                                                            silu(g[2 * half + 1]) * u[2 * half + 1] * share);
                    }
                } else {
                    const i64 row = __ldcg(a.rows + pair);
#pragma unroll
                    for (int c = 0; c < COLUMNS; ++c) {
                        const int column = block * 128 + (across * COLUMNS + c) * 8 + (lane & 3) * 2;
                        if (column < ROWS) *(u32 *)(a.y + row * ROWS + column) = narrow2(d[t][c][2 * half], d[t][c][2 * half + 1]);
                    }
                }
            }
    }
    DEVICE void multiply_all(int items) {
        for (int item = blockIdx.x; item < items; item += gridDim.x) {
            const int4 own = tile(item);
            float d[TOKENS][COLUMNS][4] = {};
#pragma unroll 1
            for (int step = 0; step < STEPS; ++step) multiply_stage(d);
            store(d, own, item % BLOCKS);
        }
    }
};

template <int K, int ROWS, int TILE, int STAGES, bool GATE> DEVICE void grouped(const Grouped &a) {
    extern __shared__ __align__(128) char shared[];
    const u32 base = (shared_address(shared) + 1023) & ~1023u;
    TileProduct<K, ROWS, TILE, STAGES, GATE> g(a, base, shared + (base - shared_address(shared)) + STAGES * (128 + TILE) * 128);
    const bool copies = g.warp == g.WARPS;
    launch_dependents();
    if (copies) g.ring.init(g.lane);
    if (copies && g.lane == 0) g.guess();
    __syncthreads();
    wait();
    const int items = __ldcg(a.total) * g.BLOCKS;
    if (a.counts && blockIdx.x == 0)
        for (int i = threadIdx.x; i < a.experts; i += 288) a.counts[i] = 0;
    if (!copies) g.multiply_all(items);
    else if (!BULK_COPIES || g.lane == 0) g.copy_all(items);
}

// Sums the outputs of each token's experts, best first, the shared expert last. Grid [T, parts of 2,048 columns], 256 threads.
DEVICE void combine(const Combine &a) {
    launch_dependents();
    wait();
    const int i = (blockIdx.y * 256 + threadIdx.x) * 8;
    if (i >= a.hidden) return;
    float sum[8] = {};
    const int each = int(blockIdx.x) < real_tokens(a.count, a.starts, a.tokens) ? a.each : 0;
    const u16 *row = a.x + i64(blockIdx.x) * a.each * a.hidden + i;
#pragma unroll 4
    for (int j = 0; j < each; ++j) {
        if (a.expert && __ldcg(a.expert + i64(blockIdx.x) * a.each + j) < 0) continue;
        float v[8];
        load_all<8>(v, row + i64(j) * a.hidden);
#pragma unroll
        for (int n = 0; n < 8; ++n) sum[n] += v[n];
    }
    if (a.shared && each) {
        const float gate = sigmoid(load(a.logits + i64(blockIdx.x) * a.stride));
        float v[8];
        load_all<8>(v, a.shared + i64(blockIdx.x) * a.hidden + i);
#pragma unroll
        for (int n = 0; n < 8; ++n) sum[n] += gate * v[n];
    }
    *(uint4 *)(a.y + i64(blockIdx.x) * a.hidden + i) = make_uint4(narrow2(sum[0], sum[1]), narrow2(sum[2], sum[3]),
                                                                  narrow2(sum[4], sum[5]), narrow2(sum[6], sum[7]));
}
