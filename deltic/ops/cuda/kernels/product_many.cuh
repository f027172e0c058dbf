
// y[t, n] = sum of x[t, k] * weight[n, k] for 5 to 16 tokens. Sums have the order of product.cuh or, for products whose columns
// may be split over devices, that of sliced.cuh. A token's bits therefore do not depend on how many tokens a step has.
//
// The input of many tokens is large, so it does not stay in shared memory. Warps divide the columns, and each warp multiplies
// its columns with all rows of the block. It takes groups of 32 columns one after the other. No other thread needs what a thread
// loads: each thread copies its own fragments of weights and input to its own places of a ring, and waits for its own copies
// alone. A block multiplies TILES * 16 rows in a pass; the ring goes on over the passes.
//
// A lane loads eight columns of a row. An mma multiplies column pairs 0 and 2, and another one pairs 1 and 3, each with its own
// sum: the sums that product.cuh has as two rows of one mma. Even and odd groups have their own sums, too.

// The input of a product of many tokens, normed: product_many reads it as [K / 32, T, 32].
struct Stage {
    const float *x, *scale;  // [T, K], and [K] of the norm
    u16 *y;                  // x times the scale
    float *factors;          // [T]: what the norm multiplies a token's sums with
    float eps;
    int tokens;
};
// One block of 256 threads per token.
template <int K> DEVICE void stage_many(const Stage &a) {
    extern __shared__ __align__(128) char shared[];
    launch_dependents();
    wait();
    Input<Stage, K, true, 0, 0, kPlain> input(a, (float *)shared);
    input.xs = (char *)a.y;
    input.template stage_normalised<1>(blockIdx.x);
    input.meet();
    if (input.tid == 0) a.factors[blockIdx.x] = input.factor(blockIdx.x);
}

// NORM: x is [K / 32, T, 32] of `stage_many`, and scale its factors; else x is [T, K]. OUT, TERMS: as in product.cuh. SLICES,
// RUNS: as in `SliceShape`, for kAdd and kPart. STAGES: groups of columns that the ring holds.
template <int K, bool NORM, int OUT, int TILES, int STAGES, int SLICES, int RUNS, bool TERMS> struct ManyTokens {
    static constexpr int WARPS = 8, ROWS = 16 * TILES, FRAGMENTS = 2 * TILES + 2;
    static constexpr int FRAGMENT = WARPS * 32 * 16, STAGE = FRAGMENTS * FRAGMENT;  // bytes
    static constexpr bool SLICED = OUT == kAdd || OUT == kPart;
    // PARTS: parts of a block, each with rows of its own. UNITS: units of a part's pass, of 8 rows each; with a gate also of
    // the 8 rows that are gated.
    static constexpr int PARTS = WARPS / SLICES, UNITS = OUT == kGate ? TILES : 2 * TILES, WIDTH = 8 * UNITS;
    static constexpr int RUN = K / RUNS, OUTPUTS = (PARTS * WIDTH * 16 + 255) / 256;  // OUTPUTS: per thread and pass, at most
    static_assert(SLICED || SLICES == WARPS && RUNS == 1);
    const Product &a;
    const int tid, warp, lane, slice, rows;  // rows: of y
    int begin, end, passes;                  // the part's units
    int first, columns;                      // first column of the warp's slice in a run, and number of its columns
    u32 ring;
    float *sums;                             // [WARPS, T, ROWS]
    // A place in the order of multiplication: group of 32 columns of a run and a pass.
    struct Place {
        int pass = 0, run = 0, group = 0;
        u32 stage = 0;
    };

    DEVICE const AddedProduct &added() const { return static_cast<const AddedProduct &>(a); }
    DEVICE ManyTokens(const Product &args, char *shared)
        : a(args), tid(threadIdx.x), warp(tid >> 5), lane(tid & 31), slice(warp % SLICES),
          rows(OUT == kGate ? args.rows / 2 : args.rows) {
        const int units = (rows + 7) / 8, parts = gridDim.x * PARTS, part = blockIdx.x * PARTS + warp / SLICES;
        begin = begin_of(units, part, parts), end = begin_of(units, part + 1, parts);
        passes = ((units + parts - 1) / parts + UNITS - 1) / UNITS;
        if constexpr (SLICED) {
            first = slice_begin(RUN / 16, SLICES, slice) * 16;
            columns = slice_end(RUN / 16, SLICES, slice) * 16 - first;
        } else {
            first = warp * 64, columns = (K / 64 - warp + WARPS - 1) / WARPS * 64;  // pieces of 64, every 8th
        }
        ring = shared_address(shared) + tid * 16;
        sums = (float *)(shared + STAGES * STAGE);
    }
    // First unit of a part.
    static DEVICE int begin_of(int units, int part, int parts) { return u32(units * part) / u32(parts); }
    DEVICE int groups() const { return (columns + 31) / 32; }
    DEVICE void advance(Place &p) const {
        if ((p.stage += STAGE) == STAGES * STAGE) p.stage = 0;
        if (++p.group < groups()) return;
        p.group = 0;
        if (++p.run < RUNS) return;
        p.run = 0, ++p.pass;
    }
    // The lane's first column at a place. It exists if `has_column`.
    DEVICE int column(const Place &p) const {
        const int own = SLICED ? p.run * RUN + first + p.group * 32 : first + p.group / 2 * (64 * WARPS) + p.group % 2 * 32;
        return own + (lane & 3) * 8;
    }
    DEVICE bool has_column(const Place &p) const { return p.group * 32 + (lane & 3) * 8 < columns; }
    // Copies the weights of a place. What does not exist becomes zero.
    DEVICE void copy_weights(const Place &p) const {
        const bool has = p.pass < passes && has_column(p);
        const int unit = begin + p.pass * UNITS;
        const u16 *const from = (const u16 *)a.weight + (has ? column(p) : 0);
#pragma unroll
        for (int i = 0; i < 2 * TILES; ++i) {
            const int of = unit + (OUT == kGate ? i / 2 : i), row = of * 8 + (lane >> 2);
            const bool there = has && of < end && row < rows;
            const i64 at = there ? i64(row + (OUT == kGate && i % 2 ? rows : 0)) * K : 0;
            copy_async_or_zero(ring + p.stage + i * FRAGMENT, from + at, there);
        }
    }
    // Copies the input of a place. Missing tokens read the last one.
    DEVICE void copy_input(const Place &p) const {
        const bool has = p.pass < passes && has_column(p);
        const int own = has ? column(p) : 0;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            if (i && a.tokens <= 8) break;
            const int token = min(8 * i + (lane >> 2), a.tokens - 1);
            const i64 at = NORM ? i64(own / 32 * a.tokens + token) * 32 + own % 32 : i64(token) * K + own;
            copy_async_or_zero(ring + p.stage + (2 * TILES + i) * FRAGMENT, (const u16 *)a.x + at, has);
        }
        commit_copies();
    }
    // Multiplies the group at p. d: sums of the group's parity, of tiles, of eight tokens each, of the column pairs' halves.
    DEVICE void multiply_group(float (&d)[TILES][2][2][4], const Place &p) const {
        uint4 x[2];
        x[0] = load_shared(ring + p.stage + 2 * TILES * FRAGMENT);
        if (a.tokens > 8) x[1] = load_shared(ring + p.stage + (2 * TILES + 1) * FRAGMENT);
#pragma unroll
        for (int tile = 0; tile < TILES; ++tile) {
            const uint4 u = load_shared(ring + p.stage + 2 * tile * FRAGMENT);
            const uint4 v = load_shared(ring + p.stage + (2 * tile + 1) * FRAGMENT);
#pragma unroll
            for (int eight = 0; eight < 2; ++eight) {
                if (eight && a.tokens <= 8) break;
                multiply(d[tile][eight][0], u.x, v.x, u.z, v.z, x[eight].x, x[eight].z);
                multiply(d[tile][eight][1], u.y, v.y, u.w, v.w, x[eight].y, x[eight].w);
            }
        }
    }
    // Stores the warp's sums of a pass. d: of even and odd groups.
    DEVICE void store_sums(const float (&d)[2][TILES][2][2][4]) const {
        float *const to = sums + warp * a.tokens * ROWS + (lane >> 2);
#pragma unroll
        for (int tile = 0; tile < TILES; ++tile)
#pragma unroll
            for (int eight = 0; eight < 2; ++eight)
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const int token = eight * 8 + (lane & 3) * 2 + i % 2;
                    if (token < a.tokens)
                        to[token * ROWS + tile * 16 + i / 2 * 8] = (d[0][tile][eight][0][i] + d[0][tile][eight][1][i]) +
                                                                   (d[1][tile][eight][0][i] + d[1][tile][eight][1][i]);
                }
    }
    // The n-th output of a thread in a pass: token, row of y, and where the first slice's sum is. row < 0: there is none.
    struct Output {
        int token, row, at;
    };
    DEVICE Output output(int pass, int n) const {
        const int number = tid + n * 256, own = number % WIDTH, other = number / WIDTH;
        const int token = other % a.tokens, part = other / a.tokens, unit = pass * UNITS + own / 8;
        if (part >= PARTS) return {0, -1, 0};
        const int parts = gridDim.x * PARTS, index = blockIdx.x * PARTS + part, units = (rows + 7) / 8;
        const int from = begin_of(units, index, parts), to = begin_of(units, index + 1, parts);
        const int row = (from + unit) * 8 + own % 8, place = OUT == kGate ? own / 8 * 16 + own % 8 : own;
        return {token, from + unit < to && row < rows ? row : -1, (part * SLICES * a.tokens + token) * ROWS + place};
    }
    // The sum over the warps that have the same rows.
    DEVICE float sum(int at) const {
        float v[SLICES];
#pragma unroll
        for (int i = 0; i < SLICES; ++i) v[i] = sums[at + i * a.tokens * ROWS];
        if constexpr (!SLICED) {
            float all = 0;
#pragma unroll
            for (int i = 0; i < SLICES; ++i) all += v[i];
            return all;
        }
#pragma unroll
        for (int apart = 1; apart < SLICES; apart *= 2)
#pragma unroll
            for (int i = 0; i < SLICES; i += 2 * apart) v[i] += v[i + apart];
        return v[0];
    }
    // A sum with the norm's factor and the adapter's term. row: of the weight.
    DEVICE float finished(int at, int token, int row) const {
        float v = sum(at);
        if constexpr (NORM) v = __fmul_rn(v, load(a.scale + token));
        if constexpr (TERMS)
            if (added().entries[token] >= 0) v = __fadd_rn(v, load(added().terms + i64(token) * a.rows + row));
        return v;
    }
    DEVICE void finish(int pass, const float (&old)[OUTPUTS]) const {
#pragma unroll
        for (int n = 0; n < OUTPUTS; ++n) {
            const Output o = output(pass, n);
            if (o.row < 0) continue;
            const float v = finished(o.at, o.token, o.row);
            const i64 to = i64(o.token) * rows + o.row;
            if constexpr (OUT == kGate) ((u16 *)a.y)[to] = narrow(silu(v) * finished(o.at + 8, o.token, o.row + rows));
            else ((float *)a.y)[to] = OUT == kAdd ? old[n] + v : v;
        }
    }
    // Multiplies the group at `now`, and starts the copies at `ahead`, in the place of the ring that was multiplied before.
    DEVICE void step(float (&d)[TILES][2][2][4], Place &now, Place &ahead) const {
        await_copies_but<STAGES - 2>();
        multiply_group(d, now);
        copy_weights(ahead), copy_input(ahead);
        advance(now), advance(ahead);
    }
    DEVICE void run() {
        Place ahead, now;
#pragma unroll
        for (int i = 0; i < STAGES - 1; ++i) copy_weights(ahead), advance(ahead);
        launch_dependents();
        wait();
        ahead = Place();
#pragma unroll
        for (int i = 0; i < STAGES - 1; ++i) copy_input(ahead), advance(ahead);
#pragma unroll 1
        for (int pass = 0; pass < passes; ++pass) {
            float d[2][TILES][2][2][4] = {}, old[OUTPUTS];
            if constexpr (OUT == kAdd) {
#pragma unroll
                for (int n = 0; n < OUTPUTS; ++n) {
                    const Output o = output(pass, n);
                    if (o.row >= 0) old[n] = load((const float *)a.y + i64(o.token) * rows + o.row);
                }
            }
#pragma unroll 1
            for (int run = 0; run < RUNS; ++run)
#pragma unroll 1
                for (int group = 0; group < groups(); group += 2) {
                    step(d[0], now, ahead);
                    if (group + 1 < groups()) step(d[1], now, ahead);
                }
            store_sums(d);
            meet_eight_warps();
            finish(pass, old);
            meet_eight_warps();  // the next pass stores its sums in the same place
        }
        await_copies_but<0>();
    }
};

// A block has eight warps.
template <int K, bool NORM, int OUT, int TILES, int STAGES, int SLICES, int RUNS, bool TERMS = false>
DEVICE void product_many(const Product &a) {
    extern __shared__ __align__(128) char shared[];
    ManyTokens<K, NORM, OUT, TILES, STAGES, SLICES, RUNS, TERMS>(a, shared).run();
}
