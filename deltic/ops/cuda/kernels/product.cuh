// y[t, n] = sum of x[t, k] * weight[n, k] for up to four tokens: a linear layer of a decode step, near memory bandwidth.
//
// A block multiplies units of ROWS weight rows, cut into segments of 1,024 columns. One warp copies segments to a ring of
// slots in shared memory. It issues the first copies before the kernel waits for its input. The copies are asynchronous and
// use an L2 evict-first policy, so that other data stays in L2. Eight warps multiply; each takes every 8th piece of 64 columns.
//
// A lane loads eight columns of a row. The mma takes column pairs 0 and 2 as one of its 16 rows and pairs 1 and 3 as another
// row. Likewise, each of four tokens occupies two of the mma's eight columns. So one mma multiplies 32 columns of 8 rows, and
// half of its results are unused. The warps' sums are added in the order of the warps, so a token's sums have the same order in
// any batch. Products whose columns may be split over devices are in sliced.cuh, products of more tokens in product_many.cuh.

struct Product {
    const u16 *weight;   // [rows, K]
    const void *x;       // residual, float [T, K], normalised here; or bf16 [T, K]; or value heads, float [T, heads_stride]
    const float *scale;  // [K], of the norm
    void *y;             // kStore, kPart: float [T, rows]; kAdd: float [T, rows], added to; kGate: bf16 [T, rows / 2]
    float eps;
    int tokens, rows;
    // only for up to four tokens:
    int whole, rest;   // units per block; the first `rest` blocks have one more
    int group;         // units per reduction over the warps
    int inverse;       // 65536 / tokens + 1, for divisions by `tokens`
    int slots;         // of the ring, at least 2
};

// A product with adapter terms (lora.cuh). The product is rounded as without adapters, then the term is added.
struct AddedProduct : Product {
    const float *terms;  // [T, rows]
    const i64 *entries;  // [T], negative: the token has no adapter
};

// OUT: kStore or kGate. TERMS: the arguments are an `AddedProduct`.
template <int K, bool NORM, int OUT, int ROWS, bool TERMS = false>
struct Multiplier : Input<Product, K, NORM, 0, 0, kPaired> {
    using Base = Input<Product, K, NORM, 0, 0, kPaired>;
    using Base::a, Base::tid, Base::warp, Base::lane, Base::xs, Base::WARPS;
    static constexpr int PIECES = K / 64, WIDEST = 1024;
    static constexpr int SEGMENT = K < WIDEST ? K : WIDEST, SEGMENTS = (K + WIDEST - 1) / WIDEST,
                         LOADS = SEGMENT > 512 ? 4 : 2;
    // JOINED: a row is one segment; a unit's rows are copied at once, without padding. Odd rows are read with the two 64-byte
    // halves of a piece swapped, so that neighbouring rows use different banks, and x stays in registers. Otherwise rows are
    // padded by 64 bytes.
    static constexpr bool JOINED = SEGMENTS == 1;
    static constexpr int LINE = SEGMENT * 2 + (JOINED ? 0 : 64), SLOT = ROWS * LINE, WIDTH = OUT == kGate ? ROWS / 2 : ROWS;
    static constexpr int COPIES = JOINED ? ROWS / WIDTH : ROWS;  // bulk copies per segment
    int count, pieces, lap = 0, slot = 0;  // pieces: bytes of 32 columns of x of all tokens
    u32 barrier, at, input;   // barrier of the current slot; the lane's first fragment in the slot; its first fragment of x
    char *ring;               // [slots, ROWS, LINE]
    float *partial;           // [2, group, WARPS, T, 8]
    float alone = 0;          // norm factor of the token if there is only one
    bool odd;

    DEVICE Multiplier(const Product &args, char *shared) : Base(args, (float *)(shared + 512)) {
        count = a.whole + (blockIdx.x < a.rest);
        ring = shared + 1024;
        xs = ring + a.slots * SLOT;
        partial = (float *)(xs + K * 2 * a.tokens);
        pieces = 64 * a.tokens;
        barrier = shared_address(shared);
        odd = JOINED && (lane & 4);
        at = shared_address(ring) + (lane >> 2) % ROWS * LINE + warp * 128 + (lane & 3) * 16 + odd * 64;
        input = shared_address(xs) + warp * 2 * pieces + (lane & 3) * 16 + (lane >> 2 & 1) * 8;
    }
    DEVICE void next() {
        at += SLOT, barrier += 8;
        if (++slot == a.slots) slot = 0, lap ^= 1, at -= a.slots * SLOT, barrier -= a.slots * 8;
    }
    // The copying warp: copies all segments in the order of multiplication. The first ones find empty slots and need no wait.
    DEVICE void copy_all() {
        const u64 policy = read_once();
        const int total = count * SEGMENTS, first = min(a.slots, total), empty = 8 * a.slots, n = lane;
        if (lane == 0) {
            for (int i = 0; i < a.slots; ++i) init_barrier(barrier + 8 * i, COPIERS), init_barrier(barrier + empty + 8 * i, WARPS);
            publish_barriers();
        }
        __syncwarp();
        constexpr int EACH = JOINED ? WIDTH : 1;  // rows per copy
        const int begin = blockIdx.x * WIDTH, row = n * EACH < WIDTH ? begin + n * EACH : a.rows / 2 + begin + n * EACH - WIDTH;
        const char *from = (const char *)a.weight + i64(row) * (K * 2), *end = (const char *)a.weight + i64(a.rows) * (K * 2);
        const i64 step = i64(gridDim.x) * WIDTH * (K * 2);
        at = shared_address(ring) + n * EACH * LINE;
        for (int e = 0, segment = 0; e < total; ++e) {
            if (e == first) __syncthreads();  // the barriers are initialised
            if (e >= first) await_barrier(barrier + empty, lap ^ 1);
            int bytes = EACH * SEGMENT * 2;
            const char *source = from;
            if constexpr (JOINED && OUT != kGate) {
                if (end - from < bytes) bytes = int(end - from);
            } else if constexpr (!JOINED) {
                if (K % SEGMENT && segment == SEGMENTS - 1) bytes = K % SEGMENT * 2;
                if (from >= end) source = end - K * 2;  // rows past the end: copy the last row instead
            }
            if (lane == 0) expect_bytes(barrier, bytes * COPIES);
            __syncwarp();
            COPY_EACH(n < COPIES, at, source, bytes, barrier, policy);
            end_copies(barrier);
            next();
            if (SEGMENTS > 1 && ++segment < SEGMENTS) from += SEGMENT * 2;
            else segment = 0, from += step - (SEGMENTS - 1) * (SEGMENT * 2);
        }
        if (first == total) __syncthreads();
        await_own_copies();
    }
    // True if load j of a segment is within the K columns. Warp w has pieces w, w + 8, ... of 64 columns: two loads each.
    DEVICE bool exists(int segment, int j) const {
        return K % WIDEST == 0 || segment * (WIDEST / 64) + j / 2 * WARPS + warp < PIECES;
    }
    // Loads the fragments of x. Missing tokens read the last one.
    DEVICE void load_x(uint2 (&f)[LOADS], int segment) const {
        const u32 from = input + min(lane >> 3, a.tokens - 1) * 64 + segment * (WIDEST / 32) * pieces;
#pragma unroll
        for (int j = 0; j < LOADS; ++j)
            if (exists(segment, j)) f[j] = load_shared2(from + (j / 2 * (WARPS * 2) + j % 2) * pieces);
    }
    // Waits for the current slot, loads the lane's fragments from it and advances to the next slot.
    DEVICE void load_slot(uint4 (&v)[LOADS], int segment) {
        await_barrier(barrier, lap);
        __syncwarp();
#pragma unroll
        for (int j = 0; j < LOADS; ++j)
            if (exists(segment, j)) v[j] = load_shared(at + j / 2 * (WARPS * 128) + (odd ? -(j % 2) : j % 2) * 64);
        next();
    }
    // Releases the slot from which v was loaded: the one before the current slot or, with `more`, the one before that. The
    // barrier's address depends on v, so that the arrival waits until v is in registers (threadIdx.z is 0). The fence of
    // `release_slot` would also wait for the loads of the following slot, which are in flight.
    DEVICE void release(bool more, const uint4 (&v)[LOADS], int segment) {
        u32 loaded = 0;
#pragma unroll
        for (int j = 0; j < LOADS; ++j)
            if (exists(segment, j)) loaded |= v[j].x;
        __syncwarp();
        if (lane == 0) {
            const int before = 1 + more;
            arrive_barrier(barrier + 8 * (a.slots - before + (slot < before ? a.slots : 0)) + (loaded & threadIdx.z));
        }
    }
    DEVICE void multiply_slot(float (&d)[2][4], const uint2 (&f)[LOADS], const uint4 (&v)[LOADS], int segment) {
#pragma unroll
        for (int j = 0; j < LOADS; ++j) {
            if (!exists(segment, j)) continue;
            const uint4 w = odd ? v[j ^ JOINED] : v[j];
            multiply(d[j % 2], w.x, w.y, w.z, w.w, f[j].x, f[j].y);
        }
    }
    // Stores the warp's sums of a unit and clears the accumulators.
    DEVICE void store_sums(float (&d)[2][4], float *to) {
        const int token = lane & 3;
        if (token < a.tokens) to[token * 8 + (lane >> 2)] = (d[0][0] + d[0][3]) + (d[1][0] + d[1][3]);
#pragma unroll
        for (int i = 0; i < 8; ++i) d[i / 4][i % 4] = 0;
    }
    // Multiplies `units` units. While a slot is multiplied, the next one is loaded to registers.
    DEVICE void multiply_units(int units, float *to, const uint2 (&held)[LOADS]) {
        to += warp * a.tokens * 8;
        const int total = units * SEGMENTS;
        int n = 0, segment = 0;
        float d[2][4] = {};
        const auto advance = [&](const uint4 (&v)[LOADS], uint4 (&following)[LOADS]) {
            const bool last = segment == SEGMENTS - 1, more = ++n < total;
            const int next = last ? 0 : segment + 1;
            if (more) load_slot(following, next);
            if constexpr (JOINED) {
                multiply_slot(d, held, v, 0);
            } else {
                uint2 f[LOADS];
                load_x(f, segment);
                multiply_slot(d, f, v, segment);
            }
            release(more, v, segment);
            if (last) store_sums(d, to), to += WARPS * 8 * a.tokens;
            segment = next;
        };
        uint4 v[2][LOADS];
        load_slot(v[0], 0);
#pragma unroll 1
        while (n < total) {
            advance(v[0], v[1]);
            if (n < total) advance(v[1], v[0]);
        }
    }
    DEVICE float sum(const float *from, int token, int n) const {
        float v = 0;
#pragma unroll
        for (int i = 0; i < WARPS; ++i) v += from[(i * a.tokens + token) * 8 + n];
        return v;
    }
    // Adds the warps' sums of the block's units from i on and writes the results to y.
    DEVICE void finish(int i, int units, const float *from) {
        for (int o = tid; o < units * a.tokens * WIDTH; o += WARPS * 32) {
            const int n = o % WIDTH, slot = (o / WIDTH * a.inverse) >> 16, token = o / WIDTH - slot * a.tokens;
            const int column = (blockIdx.x + (i + slot) * gridDim.x) * WIDTH + n;
            const float *part = from + slot * (WARPS * 8) * a.tokens;
            const float f = !NORM ? 1.f : a.tokens == 1 ? alone : this->factor(token), v = sum(part, token, n) * f;
            if constexpr (OUT == kGate)
                ((u16 *)a.y)[i64(token) * (a.rows / 2) + column] = narrow(silu(v) * (sum(part, token, n + WIDTH) * f));
            else if (column < a.rows)
                ((float *)a.y)[i64(token) * a.rows + column] = v;
        }
    }
    // As `finish`, with adapter terms. A thread issues the loads of AHEAD outputs' terms before it uses any of them.
    DEVICE void finish_with_terms(int i, int units, const float *from) {
        constexpr int AHEAD = 4, STEP = WARPS * 32;
        const auto &added = static_cast<const AddedProduct &>(a);
        const int count = units * a.tokens * WIDTH, half = a.rows / 2;
        for (int first = tid; first < count; first += AHEAD * STEP) {
            float term[AHEAD] = {}, up_term[AHEAD] = {};
            int column[AHEAD], token[AHEAD], slot[AHEAD];
            bool exists[AHEAD];
#pragma unroll
            for (int e = 0; e < AHEAD; ++e) {
                const int o = first + e * STEP;
                slot[e] = (o / WIDTH * a.inverse) >> 16, token[e] = o / WIDTH - slot[e] * a.tokens;
                column[e] = (blockIdx.x + (i + slot[e]) * gridDim.x) * WIDTH + o % WIDTH;
                exists[e] = o < count && column[e] < (OUT == kGate ? half : a.rows);
                if (exists[e]) {
                    const float *const place = added.terms + i64(token[e]) * a.rows + column[e];
                    term[e] = load(place);
                    if (OUT == kGate) up_term[e] = load(place + half);
                }
            }
#pragma unroll
            for (int e = 0; e < AHEAD; ++e) {
                if (!exists[e]) continue;
                const int n = (first + e * STEP) % WIDTH;
                const float *const part = from + slot[e] * (WARPS * 8) * a.tokens;
                const float f = !NORM ? 1.f : a.tokens == 1 ? alone : this->factor(token[e]);
                const bool adapted = added.entries[token[e]] >= 0;
                float v = __fmul_rn(sum(part, token[e], n), f);
                if (adapted) v = __fadd_rn(v, term[e]);
                if constexpr (OUT == kGate) {
                    float up = __fmul_rn(sum(part, token[e], n + WIDTH), f);
                    if (adapted) up = __fadd_rn(up, up_term[e]);
                    ((u16 *)a.y)[i64(token[e]) * half + column[e]] = narrow(silu(v) * up);
                } else {
                    ((float *)a.y)[i64(token[e]) * a.rows + column[e]] = v;
                }
            }
        }
    }
    DEVICE void run() {
        const int each = (WARPS * 8) * a.tokens;
        uint2 held[LOADS];
        if constexpr (JOINED) load_x(held, 0);
        if (NORM && a.tokens == 1) alone = this->factor(0);
        for (int i = 0, turn = 0; i < count; i += a.group, turn ^= 1) {
            const int units = min(a.group, count - i);
            float *to = partial + turn * a.group * each;
            multiply_units(units, to, held);
            this->meet();
            if constexpr (TERMS) {
                finish_with_terms(i, units, to);
            } else {
                finish(i, units, to);
            }
        }
    }
};

// A block has 8 multiplying warps and one copying warp.
template <int K, bool NORM, int OUT, int ROWS, bool TERMS = false> DEVICE void product(const Product &a) {
    extern __shared__ __align__(128) char shared[];
    Multiplier<K, NORM, OUT, ROWS, TERMS> m(a, shared);
    if (m.warp == m.WARPS) return m.copy_all();
    if (NORM && m.tid * 32 < K) prefetch(a.scale + m.tid * 32);
    __syncthreads();
    launch_dependents();
    wait();
    if (!m.count) return;
    m.stage();
    m.run();
}
