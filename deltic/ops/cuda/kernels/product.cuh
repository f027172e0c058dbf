// y[t, n] = sum of x[t, k] * weight[n, k] for up to 16 tokens: a linear layer of a decode step, near the memory's speed.
//
// A block works on units of ROWS rows of the weight, cut into segments of 1,024 columns. One warp copies segments into a
// ring of slots in shared memory, the first ones before the kernel waits for its input; the copies are asynchronous and
// leave other data in the second-level cache. Eight warps multiply: each has every 8th piece of 64 columns. Of eight columns
// that a lane has of a row, the tensor cores take two and two as those of one of their 16 rows, the others as those of
// another one; and of each of four tokens, too, in two of their eight columns. So one instruction multiplies 32 columns
// of 8 rows, and half of what it gives is of no use. The sum over the warps is made in their order. So a token's sums have
// one order, whatever the batch. Products whose columns may be split over devices are those of sliced.cuh.

struct Product {
    const u16 *weight;   // [rows, K]
    const void *x;       // residual [T, K] float, to be normalised; or [T, K] bf16; or [T, heads_stride] float of heads
    const float *scale;  // [K] of the norm
    void *y;             // kStore, kPart: float [T, rows]; kAdd: float [T, rows], added to; kGate: bf16 [T, rows / 2]
    float eps;
    int tokens, rows;
    int whole, rest;   // units of every block; so many blocks have one more
    int group;         // units between two sums over the warps
    int inverse;       // 65536 / tokens + 1, to divide by
    int slots;         // of the ring, at least 2
};

// With what adapters add to the product of each token that has one (lora.cuh). The product itself is rounded as always.
struct AddedProduct : Product {
    const float *terms;  // [T, rows]
    const i64 *entries;  // [T], negative: the token has none
};

// OUT: kStore or kGate. FOURS: of tokens, at most. TERMS: the arguments are an `AddedProduct`.
template <int K, bool NORM, int OUT, int FOURS, int ROWS, bool TERMS = false>
struct Multiplier : Input<Product, K, NORM, 0, 0, kPaired> {
    using Base = Input<Product, K, NORM, 0, 0, kPaired>;
    using Base::a, Base::tid, Base::warp, Base::lane, Base::xs, Base::WARPS;
    static constexpr int PIECES = K / 64, WIDEST = 1024;
    static constexpr int SEGMENT = K < WIDEST ? K : WIDEST, SEGMENTS = (K + WIDEST - 1) / WIDEST,
                         LOADS = SEGMENT > 512 ? 4 : 2;
    // a unit that is one segment is copied at once; other rows lie 64 bytes further apart than they are long, so that two
    // of them are not in the same banks: of the former, odd rows are read the other way round
    static constexpr bool JOINED = SEGMENTS == 1, HELD = JOINED && FOURS == 1;  // HELD: x stays in registers
    static constexpr int LINE = SEGMENT * 2 + (JOINED ? 0 : 64), SLOT = ROWS * LINE, WIDTH = OUT == kGate ? ROWS / 2 : ROWS;
    static constexpr int COPIES = JOINED ? ROWS / WIDTH : ROWS;  // of a segment
    int count, pieces, lap = 0, slot = 0;  // pieces: bytes of 32 columns of x
    u32 barrier, at, input;   // of the current slot: its barrier, the lane's first fragment; the lane's first one of x
    char *ring;               // [slots, ROWS, LINE]
    float *partial;           // [2, group, WARPS, T, 8]
    float alone = 0;          // the norm's factor of the only token
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
    // The copying warp: all segments in the order in which they are multiplied; the first ones need no room to be made.
    DEVICE void copy_all() {
        const u64 policy = read_once();
        const int total = count * SEGMENTS, first = min(a.slots, total), empty = 8 * a.slots, n = lane;
        if (lane == 0) {
            for (int i = 0; i < a.slots; ++i) init_barrier(barrier + 8 * i, COPIERS), init_barrier(barrier + empty + 8 * i, WARPS);
            publish_barriers();
        }
        __syncwarp();
        constexpr int EACH = JOINED ? WIDTH : 1;  // rows of a copy
        const int begin = blockIdx.x * WIDTH, row = n * EACH < WIDTH ? begin + n * EACH : a.rows / 2 + begin + n * EACH - WIDTH;
        const char *from = (const char *)a.weight + i64(row) * (K * 2), *end = (const char *)a.weight + i64(a.rows) * (K * 2);
        const i64 step = i64(gridDim.x) * WIDTH * (K * 2);
        at = shared_address(ring) + n * EACH * LINE;
        for (int e = 0, segment = 0; e < total; ++e) {
            if (e == first) __syncthreads();  // the barriers are there
            if (e >= first) await_barrier(barrier + empty, lap ^ 1);
            int bytes = EACH * SEGMENT * 2;
            const char *source = from;
            if constexpr (JOINED && OUT != kGate) {
                if (end - from < bytes) bytes = int(end - from);
            } else if constexpr (!JOINED) {
                if (K % SEGMENT && segment == SEGMENTS - 1) bytes = K % SEGMENT * 2;
                if (from >= end) source = end - K * 2;  // rows that do not exist
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
    // Whether a lane's load j of a segment exists: pieces of 64 columns go round the warps, each is two loads.
    DEVICE bool exists(int segment, int j) const {
        return K % WIDEST == 0 || segment * (WIDEST / 64) + j / 2 * WARPS + warp < PIECES;
    }
    // Of tokens from 4 * four on; those that do not exist are the last one.
    DEVICE void load_x(uint2 (&f)[LOADS], int segment, int four) const {
        const u32 from = input + min(4 * four + (lane >> 3), a.tokens - 1) * 64 + segment * (WIDEST / 32) * pieces;
#pragma unroll
        for (int j = 0; j < LOADS; ++j)
            if (exists(segment, j)) f[j] = load_shared2(from + (j / 2 * (WARPS * 2) + j % 2) * pieces);
    }
    // A lane's fragments of the current slot, when they are there.
    DEVICE void load_slot(uint4 (&v)[LOADS], int segment) {
        await_barrier(barrier, lap);
        __syncwarp();
#pragma unroll
        for (int j = 0; j < LOADS; ++j)
            if (exists(segment, j)) v[j] = load_shared(at + j / 2 * (WARPS * 128) + (odd ? -(j % 2) : j % 2) * 64);
        next();
    }
    // What the slot before the current one held, or with `more` the one before that, has come to registers: the address of
    // the barrier cannot be had before. A fence, as of `release_slot`, would also wait for the slot that is on its way.
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
    // A unit's sums; after them others begin.
    DEVICE void store_sums(float (&d)[FOURS][2][4], float *to) {
#pragma unroll
        for (int four = 0; four < FOURS; ++four) {
            const int token = 4 * four + (lane & 3);
            if (token < a.tokens)
                to[token * 8 + (lane >> 2)] = (d[four][0][0] + d[four][0][3]) + (d[four][1][0] + d[four][1][3]);
#pragma unroll
            for (int i = 0; i < 8; ++i) d[four][i / 4][i % 4] = 0;
        }
    }
    // Products of so many units. While a slot is multiplied the next one comes to registers.
    DEVICE void multiply_units(int units, float *to, const uint2 (&held)[LOADS]) {
        to += warp * a.tokens * 8;
        const int total = units * SEGMENTS;
        int n = 0, segment = 0;
        float d[FOURS][2][4] = {};
        const auto advance = [&](const uint4 (&v)[LOADS], uint4 (&following)[LOADS]) {
            const bool last = segment == SEGMENTS - 1, more = ++n < total;
            const int next = last ? 0 : segment + 1;
            if (more) load_slot(following, next);
            if constexpr (HELD) {
                multiply_slot(d[0], held, v, 0);
            } else {
#pragma unroll
                for (int four = 0; four < FOURS; ++four)
                    if (four == 0 || 4 * four < a.tokens) {
                        uint2 f[LOADS];
                        load_x(f, segment, four);
                        multiply_slot(d[four], f, v, segment);
                    }
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
    // The sums of units i ... of this block, to where they belong.
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
    // The same with terms. Those of several numbers are on their way before one of them is waited for.
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
        if constexpr (HELD) load_x(held, 0, 0);
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

// Blocks of 8 warps that multiply and one that copies.
template <int K, bool NORM, int OUT, int FOURS, int ROWS, bool TERMS = false> DEVICE void product(const Product &a) {
    extern __shared__ __align__(128) char shared[];
    Multiplier<K, NORM, OUT, FOURS, ROWS, TERMS> m(a, shared);
    if (m.warp == m.WARPS) return m.copy_all();
    if (NORM && m.tid * 32 < K) prefetch(a.scale + m.tid * 32);
    __syncthreads();
    launch_dependents();
    wait();
    if (!m.count) return;
    m.stage();
    m.run();
}
