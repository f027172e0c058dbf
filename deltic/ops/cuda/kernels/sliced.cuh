
// y[t, n] = sum of x[t, k] * weight[n, k] for up to four tokens and weights whose columns may be split over devices. As
// product.cuh, but sums have the order of deltic/ops/slices.py, whatever part of the columns the device has.
//
// A warp multiplies a whole slice of a unit. It takes groups of 32 columns one after the other, counted from the slice's first
// column. Even groups go to one accumulator, odd groups to another. The slices' sums are then added in pairs. None of this
// depends on where the slice lies or which other slices the device has. On one device a unit has eight slices, one per warp.
// On one of several devices it has fewer, and the eight warps multiply several units at once.
//
// Warps with neighbouring slices form a team. A slot holds a piece of each slice of a team. Each team has its own slots, and
// teams do not wait for each other until all units of a group are multiplied. A warp issues its copies one after the other;
// each takes about 70 cycles, whether long or short. If copies are short, two or four warps copy, each for its own teams and in
// its own quarter of the multiprocessor.

// The shape of a slot. SLICES: slices of the device. RUNS: number of equal runs of columns; a slice has one range in each.
// SHORT: slots are short, because a small card leaves little room.
template <int K, int SLICES, int RUNS, int ROWS, bool SHORT> struct SliceShape {
    static constexpr int UNIT = 16, RUN = K / RUNS, RANGE = slice_end(RUN / UNIT, SLICES, 0) * UNIT, COPY = 2304, LANES = 16;
    static_assert(RUN % UNIT == 0 && K % RUNS == 0);
    // WIDEST: columns of a slot at most. Unless SHORT, 8 slots and the input of one token fit in 101 KB.
    static constexpr int FIT = (((101 << 10) - 2 * K) / (8 * ROWS) - 64) / 128 * 64, WIDEST = SHORT ? (ROWS < 8 ? 768 : 448) : FIT > 64 ? FIT : 64;
    static constexpr int PIECES = (RANGE + WIDEST - 1) / WIDEST, PIECE = ((RANGE + PIECES - 1) / PIECES + 63) / 64 * 64;
    static constexpr int PARTS = RUNS * PIECES;  // slots per slice
    static constexpr bool SAME = RUN == SLICES * RANGE, EQUAL = SAME && RANGE == PIECES * PIECE;  // equal ranges; pieces, too
    static constexpr bool WHOLE_GROUPS = SAME && RANGE % 32 == 0;  // no slice ends within a group
    static constexpr int span() {
        int n = 1;
        while (EQUAL && PARTS == 1 && 2 * n <= SLICES && 4 * n * RANGE <= COPY) n *= 2;
        return n;
    }
    // SPAN: slices per copy. JOINED: slices per slot, and warps per team.
    static constexpr int SPAN = span(), JOINED = SPAN > 1 || !SHORT ? SPAN : SLICES < LANES / ROWS ? SLICES : LANES / ROWS;
    // BYTES: per copy, at most. COPYING: warps that copy.
    static constexpr int BYTES = SPAN * PIECE * 2, COPYING = SHORT || BYTES >= 1536 ? 1 : BYTES >= 1024 ? 2 : 4;
    // A line is what one copy writes. Lines are an odd multiple of 64 bytes apart, so that neighbours use different banks.
    static constexpr int LINE = BYTES + 64, LINES = JOINED / SPAN * ROWS, SLOT = LINES * LINE;
    // Byte offset in a slot of a row of the team's slice `slice`.
    static DEVICE int place(int slice, int row) { return (slice / SPAN * ROWS + row) * LINE + slice % SPAN * (RANGE * 2); }
    // First column of part p of a slice, and number of its columns.
    static DEVICE int first(int slice, int p) {
        const int run = p / PIECES;
        return run * RUN + (SAME ? slice * RANGE : slice_begin(RUN / UNIT, SLICES, slice) * UNIT) + (p - run * PIECES) * PIECE;
    }
    static DEVICE int columns(int slice, int p) {
        if constexpr (EQUAL) return PIECE;
        if constexpr (SAME) return min(PIECE, RANGE - p % PIECES * PIECE);  // short, as copying warps have no time for more
        const int range = (slice_end(RUN / UNIT, SLICES, slice) - slice_begin(RUN / UNIT, SLICES, slice)) * UNIT;
        return max(0, min(PIECE, range - p % PIECES * PIECE));
    }
};

// OUT: kAdd adds the sums to y; kPart writes the sums of the device's slices to y. HEAD, SLICE: as in `Input`. SLICES, RUNS,
// SHORT: as in `SliceShape`. Others: as in `Multiplier`.
template <int K, int OUT, int ROWS, int HEAD, int SLICE, int SLICES, int RUNS, bool SHORT, bool TERMS = false>
struct SlicedMultiplier : Input<Product, K, false, HEAD, SLICE, kPaired> {
    using Base = Input<Product, K, false, HEAD, SLICE, kPaired>;
    using Base::a, Base::tid, Base::warp, Base::lane, Base::xs, Base::WARPS;
    using Shape = SliceShape<K, SLICES, RUNS, ROWS, SHORT>;
    static constexpr int JOINED = Shape::JOINED, TEAMS = WARPS / JOINED, COPYING = Shape::COPYING;
    static constexpr int PARTS = Shape::PARTS, SLOT = Shape::SLOT, UNITS = WARPS / SLICES;  // UNITS: multiplied at once
    int count, lap = 0, slot = 0;
    u32 barriers, ring, input;     // input: x, plus the lane's offset of 0 or 8 bytes
    float *partial;                // [2, group, SLICES, T, ROWS]
    float old = 0, term = 0;

    DEVICE const AddedProduct &added() const { return static_cast<const AddedProduct &>(a); }
    DEVICE SlicedMultiplier(const Product &args, char *shared) : Base(args, (float *)(shared + 512)) {
        count = a.whole + (blockIdx.x < a.rest);
        xs = shared + 1024 + a.slots * SLOT;
        partial = (float *)(xs + K * 2 * a.tokens);
        barriers = shared_address(shared);
        ring = shared_address(shared + 1024);
        input = shared_address(xs) + (lane >> 2 & 1) * 8;
    }
    // Advances to the team's next slot. All teams have the same number of slots.
    DEVICE void next() {
        if ((slot += TEAMS) >= a.slots) slot -= a.slots, lap ^= 1;
    }
    // Copying warp `own`: copies pieces for its teams in turns. The first ones find empty slots and need no wait.
    DEVICE void copy_all(int own) {
        const u64 policy = read_once();
        const int total = (count + UNITS - 1) / UNITS * PARTS, early = min(a.slots / TEAMS, total), empty = 8 * a.slots;
        if (own == 0 && lane == 0) {
            for (int i = 0; i < a.slots; ++i) init_barrier(barriers + 8 * i, COPIERS), init_barrier(barriers + empty + 8 * i, JOINED);
            publish_barriers();
        }
        meet_copying_warps<COPYING>();
        const int line = min(lane, Shape::LINES - 1), row = line % ROWS;
        int done = 0;
        for (int unit = 0; unit < count; unit += UNITS)
            for (int p = 0; p < PARTS; ++p, ++done, next()) {
                if (done == early) __syncthreads();  // the barriers are initialised
                for (int team = own; team < TEAMS; team += COPYING) {
                    const int of = unit + team * JOINED / SLICES, slice = team * JOINED % SLICES;
                    if (of < count) copy_slot(slot + team, done >= early, of, slice, p, line, row, empty, policy);
                }
            }
        if (early == total) __syncthreads();
        await_own_copies();
    }
    // Copies part p of the team's slices, from `slice` on. used: the slot has held data. line, row: of the lane's copy.
    DEVICE void copy_slot(int slot, bool used, int unit, int slice, int p, int line, int row, int empty, u64 policy) {
        const u32 barrier = barriers + 8 * slot;
        if (used) await_barrier(barrier + empty, lap ^ 1);
        int all = 0;
#pragma unroll
        for (int i = 0; i < JOINED; ++i) all += Shape::columns(slice + i, p);
        if (lane == 0) expect_bytes(barrier, all * 2 * ROWS);
        __syncwarp();
        const int own = slice + line / ROWS * Shape::SPAN, bytes = Shape::SPAN * Shape::columns(own, p) * 2;
        const i64 of = min((int(blockIdx.x) + unit * int(gridDim.x)) * ROWS + row, a.rows - 1);
        COPY_EACH(lane < Shape::LINES && bytes > 0, ring + slot * SLOT + line * Shape::LINE,
                  (const char *)a.weight + of * (K * 2) + Shape::first(own, p) * 2, bytes, barrier, policy);
        end_copies(barrier);
    }
    // Multiplies part p of a slice. d: accumulators of even and odd groups.
    DEVICE void multiply_part(float (&d)[2][4], int slice, int p) {
        constexpr int AHEAD = 4;  // groups loaded to registers at once
        const int columns = Shape::columns(slice, p), groups = Shape::EQUAL ? Shape::PIECE / 32 : (columns + 31) / 32;
        const int column = Shape::first(slice, p) + (lane & 3) * 8;
        const u32 from = input + column / 32 * a.tokens * 64 + column % 32 * 2, barrier = barriers + 8 * slot;
        const u32 at = ring + slot * SLOT + Shape::place(warp % JOINED, (lane >> 2) % ROWS) + (lane & 3) * 16;
        const auto multiply_groups = [&](int first) {
            uint4 w[AHEAD];
            uint2 x[AHEAD];
#pragma unroll
            for (int i = 0; i < AHEAD; ++i) {
                const int group = first + i;
                if (group >= groups) continue;
                const bool mine = Shape::WHOLE_GROUPS || group * 32 + (lane & 3) * 8 < columns;
                w[i] = mine ? load_shared(at + group * 64) : make_uint4(0, 0, 0, 0);
                // missing tokens read the last one
                x[i] = mine ? load_shared2(from + (group * a.tokens + min(lane >> 3, a.tokens - 1)) * 64) : make_uint2(0, 0);
            }
#pragma unroll
            for (int i = 0; i < AHEAD; ++i)
                if (first + i < groups) multiply(d[i % 2], w[i].x, w[i].y, w[i].z, w[i].w, x[i].x, x[i].y);
        };
        await_barrier(barrier, lap);
        __syncwarp();
        if constexpr (Shape::EQUAL) {
#pragma unroll
            for (int group = 0; group < Shape::PIECE / 32; group += AHEAD) multiply_groups(group);
        } else {
#pragma unroll 1
            for (int group = 0; group < groups; group += AHEAD) multiply_groups(group);
        }
        __syncwarp();
        if (lane == 0) arrive_barrier(barrier + 8 * a.slots);  // all data of the slot has been multiplied
        next();
    }
    // Multiplies `units` units and stores the sums of their slices.
    DEVICE void multiply_units(int units, float *to) {
        const int own = warp / SLICES, slice = warp % SLICES;
        to += warp * a.tokens * ROWS;
#pragma unroll 1
        for (int unit = 0; unit < units; unit += UNITS, to += WARPS * a.tokens * ROWS) {
            const bool exists = UNITS == 1 || unit + own < units;
            float d[2][4] = {};
#pragma unroll 1
            for (int p = 0; p < PARTS && exists; ++p) multiply_part(d, slice, p);
            const int token = lane & 3;
            if (exists && token < a.tokens && (lane >> 2) < ROWS)
                to[token * ROWS + (lane >> 2)] = (d[0][0] + d[0][3]) + (d[1][0] + d[1][3]);
        }
    }
    // Address in y of output `number` of [unit, token, row], from unit `first` on; null past the last row.
    DEVICE float *place_in_y(int first, int number) const {
        const int of = number / ROWS, unit = (of * a.inverse) >> 16, token = of - unit * a.tokens;
        const int row = (int(blockIdx.x) + (first + unit) * int(gridDim.x)) * ROWS + number % ROWS;
        return row < a.rows ? (float *)a.y + i64(token) * a.rows + row : nullptr;
    }
    DEVICE void finish(int first, int units, const float *from) {
        const int stride = a.tokens * ROWS;
        for (int number = tid; number < units * stride; number += WARPS * 32) {
            const int unit = (number / ROWS * a.inverse) >> 16;
            const float *const own = from + number + unit * (SLICES - 1) * stride;
            float v[SLICES];
#pragma unroll
            for (int i = 0; i < SLICES; ++i) v[i] = own[i * stride];
#pragma unroll
            for (int apart = 1; apart < SLICES; apart *= 2)
#pragma unroll
                for (int i = 0; i < SLICES; i += 2 * apart) v[i] += v[i + apart];
            if (float *const y = place_in_y(first, number)) {
                if (OUT == kAdd && (first || number != tid)) old = load(y);
                if constexpr (TERMS) {
                    if (first || number != tid) term = load(added().terms + (y - (float *)a.y));
                    if (added().entries[number / ROWS - unit * a.tokens] >= 0) v[0] = __fadd_rn(v[0], term);
                }
                *y = OUT == kAdd ? old + v[0] : v[0];
            }
        }
    }
    DEVICE void run() {
        const int each = SLICES * ROWS * a.tokens;
        for (int unit = 0, turn = 0; unit < count; unit += a.group, turn ^= 1) {
            const int units = min(a.group, count - unit);
            float *const to = partial + turn * a.group * each;
            multiply_units(units, to);
            this->meet();
            finish(unit, units, to);
        }
    }
    // Loads what the thread's first sum is added to: the value of y and the adapter term.
    DEVICE void load_first() {
        if (tid < min(a.group, count) * a.tokens * ROWS)
            if (float *const y = place_in_y(0, tid)) {
                old = load(y);
                if constexpr (TERMS) term = load(added().terms + (y - (float *)a.y));
            }
    }
};

// A block has 8 multiplying warps and COPYING copying warps.
template <int K, int OUT, int ROWS, int HEAD, int SLICE, int SLICES, int RUNS, bool SHORT, bool TERMS = false>
DEVICE void sliced(const Product &a) {
    extern __shared__ __align__(128) char shared[];
    SlicedMultiplier<K, OUT, ROWS, HEAD, SLICE, SLICES, RUNS, SHORT, TERMS> m(a, shared);
    if (m.warp >= m.WARPS) return m.copy_all(m.warp - m.WARPS);
    m.slot = m.warp / m.JOINED;
    __syncthreads();
    launch_dependents();
    wait();
    if (!m.count) return;
    if constexpr (OUT == kAdd) m.load_first();
    m.stage();
    m.run();
}
