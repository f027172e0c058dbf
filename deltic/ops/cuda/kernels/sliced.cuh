
// y[t, n] = sum of x[t, k] * weight[n, k] for up to 16 tokens, where devices may have parts of the columns: as product.cuh,
// but the order of a sum is that of deltic/ops/slices.py, whatever part of the columns the device has.
//
// A slice is cut into groups of 32 columns, counted from its first column on, and warp w has every 8th of them from the
// w-th on. It multiplies them one after the other into one accumulator, which is zero before the first one. The sum of a
// slice is that over the warps in their order; the slices' sums are added in pairs. No step of this depends on where the
// slice lies or which others the device has. A slot of the ring is a piece of a slice or several slices side by side, so
// that weights are copied in runs as long as elsewhere.

// The shape of a slot. SLICES: of the device. RUNS: a slice has a range of columns in each of so many equal runs.
template <int K, int SLICES, int RUNS, int MOST> struct SliceShape {
    static constexpr int UNIT = 16, WIDEST = 1024, RUN = K / RUNS, RANGE = slice_end(RUN / UNIT, SLICES, 0) * UNIT;
    static_assert(RUN % UNIT == 0 && K % RUNS == 0);
    // all ranges are equal, and whole groups
    static constexpr bool EQUAL = RUN % (SLICES * 32) == 0;
    static constexpr int PIECES = (RANGE + WIDEST - 1) / WIDEST, PIECE = ((RANGE + PIECES - 1) / PIECES + 31) / 32 * 32;
    static constexpr int PARTS = RUNS * PIECES;  // slots of a slice, if it has several
    static constexpr int joined() {
        int n = 1;
        while (EQUAL && PARTS == 1 && 2 * n <= MOST && 2 * n <= SLICES && 2 * n * RANGE <= WIDEST) n *= 2;
        return n;
    }
    static constexpr int JOINED = joined();  // slices of a slot
    static constexpr int EACH = (PIECE / 32 + 7) / 8, LOADS = JOINED * EACH, WIDTH = JOINED * PIECE;
    // rows lie an odd number of 64 bytes apart, so that two of them are not in the same banks
    static constexpr int LINE = WIDTH * 2 % 128 ? WIDTH * 2 : WIDTH * 2 + 64;
    // Columns of part p of a slice: the first one, and how many.
    static DEVICE int first(int slice, int p) {
        const int run = PIECES > 1 ? p / PIECES : p, piece = PIECES > 1 ? p - run * PIECES : 0;
        return run * RUN + (EQUAL ? slice * RANGE : slice_begin(RUN / UNIT, SLICES, slice) * UNIT) + piece * PIECE;
    }
    static DEVICE int columns(int slice, int p) {
        const int piece = PIECES > 1 ? p % PIECES : 0;
        if constexpr (EQUAL && PIECES == 1) return WIDTH;
        const int range = EQUAL ? RANGE : slice_end(RUN / UNIT, SLICES, slice) * UNIT - slice_begin(RUN / UNIT, SLICES, slice) * UNIT;
        return max(0, min(PIECE, range - piece * PIECE));
    }
};

// OUT: kAdd: y is added to; kPart: the sum of the device's slices is written to y. The other parameters are those of
// `Multiplier`. `group` of `Product`: slices whose sums over the warps are made at once: all of some units, or a power of two.
template <int K, int OUT, int FOURS, int ROWS, int HEAD, int SLICE, int SLICES, int RUNS>
struct SlicedMultiplier : Input<Product, K, false, HEAD, SLICE, kPaired> {
    using Base = Input<Product, K, false, HEAD, SLICE, kPaired>;
    using Base::a, Base::tid, Base::warp, Base::lane, Base::xs, Base::WARPS;
    using Shape = SliceShape<K, SLICES, RUNS, FOURS == 1 ? 8 : 2>;
    static constexpr int PARTS = Shape::PARTS, JOINED = Shape::JOINED, EACH = Shape::EACH, LOADS = Shape::LOADS,
                         LINE = Shape::LINE, SLOT = ROWS * LINE, STEPS = SLICES / JOINED * PARTS;  // STEPS: slots of a unit
    int count, lap = 0, slot = 0;
    int slice = 0, part = 0;  // of the slot that is multiplied
    u32 barrier, at, input;   // of the current slot: its barrier, the lane's first fragment; the lane's first one of x
    char *ring;               // [slots, ROWS, LINE]
    float *partial;           // [2, group, WARPS, T, ROWS]
    float old = 0, kept[3];   // kept: sums of 1, 2 and 4 times `group` slices that wait for those they are paired with

    DEVICE SlicedMultiplier(const Product &args, char *shared) : Base(args, (float *)(shared + 512)) {
        count = a.whole + (blockIdx.x < a.rest);
        ring = shared + 1024;
        xs = ring + a.slots * SLOT;
        partial = (float *)(xs + K * 2 * a.tokens);
        barrier = shared_address(shared);
        at = shared_address(ring) + (lane >> 2) % ROWS * LINE + warp * 64 + (lane & 3) * 16;
        input = shared_address(xs) + (lane >> 2 & 1) * 8;
    }
    DEVICE void next() {
        at += SLOT, barrier += 8;
        if (++slot == a.slots) slot = 0, lap ^= 1, at -= a.slots * SLOT, barrier -= a.slots * 8;
    }
    // The copying warp: all slots in the order in which they are multiplied; the first ones need no room to be made.
    DEVICE void copy_all() {
        const u64 policy = read_once();
        const int total = count * STEPS, early = min(a.slots, total), empty = 8 * a.slots;
        if (lane == 0) {
            for (int i = 0; i < a.slots; ++i) init_barrier(barrier + 8 * i, COPIERS), init_barrier(barrier + empty + 8 * i, WARPS);
            publish_barriers();
        }
        __syncwarp();
        at = shared_address(ring) + lane * LINE;
        int done = 0;
        for (int unit = 0; unit < count; ++unit) {
            const int row = min((int(blockIdx.x) + unit * int(gridDim.x)) * ROWS + lane, a.rows - 1);
            const char *const from = (const char *)a.weight + i64(row) * (K * 2);
            for (int s = 0; s < SLICES; s += JOINED)
                for (int p = 0; p < PARTS; ++p, ++done) {
                    if (done == early) __syncthreads();  // the barriers are there
                    if (done >= early) await_barrier(barrier + empty, lap ^ 1);
                    const int bytes = Shape::columns(s, p) * 2;
                    if (lane == 0) expect_bytes(barrier, bytes * ROWS);
                    __syncwarp();
                    COPY_EACH(lane < ROWS && bytes > 0, at, from + Shape::first(s, p) * 2, bytes, barrier, policy);
                    end_copies(barrier);
                    next();
                }
        }
        if (early == total) __syncthreads();
        await_own_copies();
    }
    // Whether a warp has an i-th group of a part of so many columns.
    DEVICE bool exists(int i, int columns) const {
        if constexpr (Shape::EQUAL && Shape::PIECES == 1 && Shape::PIECE % 256 == 0) return true;
        return (i * WARPS + warp) * 32 < (Shape::EQUAL && Shape::PIECES == 1 ? Shape::PIECE : columns);
    }
    // A lane's fragments of the current slot, when they are there.
    DEVICE void load_slot(uint4 (&v)[LOADS]) {
        await_barrier(barrier, lap);
        __syncwarp();
#pragma unroll
        for (int j = 0; j < LOADS; ++j) {
            if (exists(j % EACH, Shape::PIECE)) v[j] = load_shared(at + j / EACH * (Shape::RANGE * 2) + j % EACH * (WARPS * 64));
        }
        next();
    }
    // As of `Multiplier`.
    DEVICE void release(bool more, const uint4 (&v)[LOADS]) {
        u32 loaded = 0;
#pragma unroll
        for (int j = 0; j < LOADS; ++j) {
            if (exists(j % EACH, Shape::PIECE)) loaded |= v[j].x;
        }
        __syncwarp();
        if (lane == 0) {
            const int before = 1 + more;
            arrive_barrier(barrier + 8 * (a.slots - before + (slot < before ? a.slots : 0)) + (loaded & threadIdx.z));
        }
    }
    // Products of a slot with four tokens from 4 * four on; those that do not exist are the last one. to: of the slot's
    // first slice.
    DEVICE void multiply_slot(float (&d)[4], int four, const uint4 (&v)[LOADS], float *to) {
        const int token = min(4 * four + (lane >> 3), a.tokens - 1), columns = Shape::columns(slice, part);
        const int column = Shape::first(slice, part) + warp * 32 + (lane & 3) * 8, own = 4 * four + (lane & 3);
        const u32 from = input + (column / 32 * a.tokens + token) * 64 + column % 32 * 2;
        uint2 f[LOADS];
#pragma unroll
        for (int j = 0; j < LOADS; ++j) {
            f[j] = make_uint2(0, 0);
            if (exists(j % EACH, columns) && has_column(j % EACH, columns))
                f[j] = load_shared2(from + (j / EACH * (Shape::RANGE / 32) + j % EACH * WARPS) * 64 * a.tokens);
        }
#pragma unroll
        for (int m = 0; m < JOINED; ++m) {
#pragma unroll
            for (int i = 0; i < EACH; ++i) {
                const int j = m * EACH + i;
                if (exists(i, columns)) {
                    const uint4 w = has_column(i, columns) ? v[j] : make_uint4(0, 0, 0, 0);
                    multiply(d, w.x, w.y, w.z, w.w, f[j].x, f[j].y);
                }
            }
            if (PARTS > 1 && part < PARTS - 1) continue;
            if (own < a.tokens && (lane >> 2) < ROWS) to[m * (WARPS * a.tokens * ROWS) + own * ROWS + (lane >> 2)] = d[0] + d[3];
#pragma unroll
            for (int i = 0; i < 4; ++i) d[i] = 0;
        }
    }
    // Whether a lane's columns of a group are the part's: a slice may end in the middle of one.
    DEVICE bool has_column(int i, int columns) const {
        return Shape::EQUAL || (i * WARPS + warp) * 32 + (lane & 3) * 8 < columns;
    }
    // Products of so many slices. While a slot is multiplied the next one comes to registers.
    DEVICE void multiply_slices(int slices, float *to) {
        to += warp * a.tokens * ROWS;
        const int total = slices / JOINED * PARTS, each = JOINED * WARPS * ROWS * a.tokens;
        int n = 0;
        float d[FOURS][4] = {};
        const auto advance = [&](const uint4 (&v)[LOADS], uint4 (&following)[LOADS]) {
            const bool more = ++n < total;
            if (more) load_slot(following);
#pragma unroll
            for (int four = 0; four < FOURS; ++four) {
                if (four == 0 || 4 * four < a.tokens) multiply_slot(d[four], four, v, to);
            }
            release(more, v);
            if (PARTS == 1 || ++part == PARTS) {
                part = 0, to += each;
                if ((slice += JOINED) == SLICES) slice = 0;
            }
        };
        uint4 v[2][LOADS];
        load_slot(v[0]);
#pragma unroll 1
        while (n < total) {
            advance(v[0], v[1]);
            if (n < total) advance(v[1], v[0]);
        }
    }
    // Of a thread: its slice of those that are summed at once, `slices` of each unit; and of which unit, token and row.
    struct Place {
        int slice, unit, token, row;
    };
    DEVICE Place place_of(int slices) const {
        const int number = tid >> __popc(slices - 1), of = number / ROWS, unit = (of * a.inverse) >> 16;
        return {tid & (slices - 1), unit, of - unit * a.tokens, number % ROWS};
    }
    DEVICE float *place_in_y(const Place &p, int unit) const {
        const int column = (int(blockIdx.x) + unit * int(gridDim.x)) * ROWS + p.row;
        return column < a.rows ? (float *)a.y + i64(p.token) * a.rows + column : nullptr;
    }
    // What a thread's next sum is added to. first: the unit from which on sums are made.
    DEVICE void load_old(int first, int units, int slices) {
        const Place p = place_of(slices);
        if (p.unit < units && p.slice == 0)
            if (float *const y = place_in_y(p, first + p.unit)) old = load(y);
    }
    // The sums of the slices from `begin` on, `slices` of each unit.
    DEVICE void finish(int first, int units, int begin, int slices, const float *from) {
        const Place p = place_of(slices);
        const bool own = p.unit < units;
        float v = 0;
        if (own) {
            const int stride = a.tokens * ROWS;
            from += (p.unit * slices + p.slice) * WARPS * stride + p.token * ROWS + p.row;
            v = from[0];
#pragma unroll
            for (int i = 1; i < WARPS; ++i) v += from[i * stride];
        }
        for (int apart = 1; apart < slices; apart *= 2) v += __shfl_xor_sync(~0u, v, apart);
        if (slices < SLICES) {
            const int turn = begin / slices;
            bool pairs = true;
#pragma unroll
            for (int level = 0; level < 3; ++level) {
                if (pairs && turn >> level & 1) v = kept[level] + v;
                else if (pairs) kept[level] = v, pairs = false;
            }
            if (begin + slices < SLICES) return;
        }
        if (!own || p.slice) return;
        if (float *const y = place_in_y(p, first + p.unit)) *y = OUT == kAdd ? old + v : v;
    }
    DEVICE void run() {
        const int each = WARPS * ROWS * a.tokens, slices = min(a.group, SLICES), most = max(1, a.group / SLICES);
        for (int unit = 0, turn = 0; unit < count; unit += most) {
            const int units = min(most, count - unit);
            for (int begin = 0; begin < SLICES; begin += slices, turn ^= 1) {
                float *const to = partial + turn * a.group * each;
                if (OUT == kAdd && begin == 0 && unit) load_old(unit, units, slices);
                multiply_slices(units * slices, to);
                this->meet();
                finish(unit, units, begin, slices, to);
            }
        }
    }
    DEVICE void load_first() { load_old(0, min(max(1, a.group / SLICES), count), min(a.group, SLICES)); }
};

// Blocks of 8 warps that multiply and one that copies.
template <int K, int OUT, int FOURS, int ROWS, int HEAD, int SLICE, int SLICES, int RUNS> DEVICE void sliced(const Product &a) {
    extern __shared__ __align__(128) char shared[];
    SlicedMultiplier<K, OUT, FOURS, ROWS, HEAD, SLICE, SLICES, RUNS> m(a, shared);
    if (m.warp == m.WARPS) return m.copy_all();
    __syncthreads();
    launch_dependents();
    wait();
    if (!m.count) return;
    if constexpr (OUT == kAdd) m.load_first();
    m.stage();
    m.run();
}
