// The core of a Gated DeltaNet layer (`gdn.cuh`) for many rows of one token, bound by the reads and writes of states. One
// block on each multiprocessor loops over heads. Whole states are copied to shared memory, the next ones while one is
// processed, and are stored from registers. Eight warps process the state. Four helper warps convolve the next head, and
// norm and gate the previous one, so that the block waits for states only.
//
// With state delta logs (`verify.cuh`) a state is read for every token but written only now and then. The log's entries
// since the last write are replayed on it with the same operations, hence the same bits. A row that appends adds its token
// to the log and does not write its state.

struct OverRings : Gdn {
    const i64 *base, *unit, *append;  // rows that append have fewer than RING entries in their log; null: none appends
    u16 *inputs;                      // [units, RING, C]
    float *keys;                      // [units, RING, Hk, D]
    float *updates;                   // [units, RING, Hv, D]
    float *decays;                    // [units, RING, Hv]
};
// base: tokens that a row's stored state covers. unit: the row's delta log, with the tokens from `base` on.
struct Since {
    int base, append;
    i64 unit;
    static DEVICE Since of(const Gdn &, const Place &p) { return {p.done, 0, 0}; }
    static DEVICE Since of(const OverRings &a, const Place &p) {
        return {int(a.base[p.row]), a.append && a.append[p.row], a.unit[p.row]};
    }
    DEVICE i64 entry(int position) const { return unit * RING + (position & (RING - 1)); }
};
struct NoEntries {};
// A head's log entries in shared memory, at most MOST: keys, updates, decays. Further entries are read from global memory.
template <int D> struct alignas(16) Entries {
    static constexpr int MOST = 5;
    float keys[MOST][D], updates[MOST][D], keeps[MOST + 1];
};
template <bool RINGS, int D> struct EntriesOf { using Type = NoEntries; using Arguments = Gdn; };
template <int D> struct EntriesOf<true, D> { using Type = Entries<D>; using Arguments = OverRings; };

// D: rows and columns of a state. STAGES: states in shared memory. RINGS: with state delta logs.
template <int D, int STAGES, bool RINGS> struct ManyHeads {
    static constexpr int WARPS = 8, HELPERS = D, ROWS = D / WARPS, NUMBER = sizeof(State), SIZE = D * D * NUMBER,
                         CHUNK = 16384, KNOWN = 64;
    static_assert(D == 128, "a warp has rows of 128 columns");
    using Arguments = typename EntriesOf<RINGS, D>::Arguments;
    struct alignas(16) Shared {
        float mixed[2][3][D], rates[2][4], found[2][D], parts[WARPS][2][D], sums[3][4], squares[4];
        typename EntriesOf<RINGS, D>::Type entries[3];
        Place places[KNOWN];
        Since since[KNOWN];
        u64 full[STAGES];
    };
    const Arguments &a;
    Shared &m;
    const u32 stage;
    const int items, keys, channels;

    DEVICE ManyHeads(const Arguments &args, Shared &shared, u32 stage)
        : a(args), m(shared), stage(stage), items(min(args.heads, int(*args.count) * args.value_heads)),
          keys(args.key_heads * D), channels(2 * args.key_heads * D + args.value_heads * D) {}
    DEVICE bool exists(int n) const { return int(blockIdx.x + n * gridDim.x) < items; }
    DEVICE Place find(int n) const { return Place::of(a, blockIdx.x + n * gridDim.x); }
    DEVICE const Place &place(int n) const { return m.places[n % KNOWN]; }
    DEVICE const Since &since(int n) const { return m.since[n % KNOWN]; }
    DEVICE void know(int n) const {
        const Place p = find(n);
        m.places[n % KNOWN] = p, m.since[n % KNOWN] = Since::of(a, p);
    }
    DEVICE char *state(i64 slot, int head) const { return (char *)(a.state + (slot * a.value_heads + head) * (D * D)); }
    DEVICE u32 full(int n) const { return shared_address(&m.full[n % STAGES]); }
    // Called by copiers: starts the copy of the state of the block's n-th head.
    DEVICE void fetch(int n, const Place &p, const Since &since) const {
        expect_bytes(full(n), since.base ? SIZE : 0);
        for (int at = 0; since.base && at < SIZE; at += CHUNK)
            bulk_copy_kept(stage + n % STAGES * SIZE + at, state(p.source, p.head) + at, CHUNK, full(n));
        end_copies(full(n));
    }
    // Updates a state with a token. A warp has ROWS rows, a lane four columns of them.
    DEVICE void advance(int n, u64 policy) {
        const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, side = n & 1;
        const u32 at = stage + n % STAGES * SIZE + warp * ROWS * D * NUMBER + lane * 4 * NUMBER;
        const Place &p = place(n);
        const Since &from = since(n);
        const bool there = from.base, stores = !RINGS || !from.append;
        State *to = (State *)state(p.target, p.head) + warp * ROWS * D + lane * 4;
        const float *query = m.mixed[side][0] + warp * ROWS, *key = m.mixed[side][1] + warp * ROWS;
        float4 s[ROWS];
        float k4[4] = {}, q4[4] = {};
        await_barrier(full(n), n / STAGES & 1);
        __syncwarp();
#pragma unroll
        for (int i = 0; i < ROWS; ++i) {
            if constexpr (NUMBER == 2) {
                s[i] = wide4(there ? load_shared2(at + i * D * NUMBER) : make_uint2(0, 0));
            } else {
                const uint4 v = there ? load_shared(at + i * D * 4) : make_uint4(0, 0, 0, 0);
                s[i] = make_float4(__uint_as_float(v.x), __uint_as_float(v.y), __uint_as_float(v.z), __uint_as_float(v.w));
            }
        }
        if constexpr (RINGS) replay(s, n, warp, lane);
#pragma unroll
        for (int i = 0; i < ROWS; ++i) {
            const float row[4] = {s[i].x, s[i].y, s[i].z, s[i].w}, k = key[i], q = query[i];
#pragma unroll
            for (int c = 0; c < 4; ++c) k4[c] = __fmaf_rn(k, row[c], k4[c]), q4[c] = __fmaf_rn(q, row[c], q4[c]);
        }
        *(float4 *)&m.parts[warp][0][lane * 4] = make_float4(k4[0], k4[1], k4[2], k4[3]);
        *(float4 *)&m.parts[warp][1][lane * 4] = make_float4(q4[0], q4[1], q4[2], q4[3]);
        end_reads();
        meet_eight_warps();  // all eight warps have read the state's slot, and their sums are in `parts`
        if (is_copier(224) && exists(n + STAGES)) fetch(n + STAGES, place(n + STAGES), since(n + STAGES));
        __syncwarp();
        const float keep = m.rates[side][0], beta = m.rates[side][1], dot = m.rates[side][2];
        float u[4];
#pragma unroll
        for (int c = 0; c < 4; ++c) {
            float from_key = 0;
#pragma unroll
            for (int w = 0; w < WARPS; ++w) from_key += m.parts[w][0][lane * 4 + c];
            u[c] = beta * __fmaf_rn(-keep, from_key, m.mixed[side][2][lane * 4 + c]);
        }
        if (warp == 0) {
#pragma unroll
            for (int c = 0; c < 4; ++c) {
                float from_query = 0;
#pragma unroll
                for (int w = 0; w < WARPS; ++w) from_query += m.parts[w][1][lane * 4 + c];
                m.found[side][lane * 4 + c] = __fmaf_rn(dot, u[c], __fmul_rn(keep, from_query));
            }
        }
        if constexpr (RINGS)
            if (!stores && warp == 0)
                *(float4 *)(a.updates + (from.entry(p.done) * a.value_heads + p.head) * D + lane * 4) = make_float4(u[0], u[1], u[2], u[3]);
        if (!stores) return;
#pragma unroll
        for (int i = 0; i < ROWS; ++i) {
            const float k = key[i];
            store4_once(to + i * D, make_float4(__fmaf_rn(k, u[0], __fmul_rn(keep, s[i].x)),
                                                __fmaf_rn(k, u[1], __fmul_rn(keep, s[i].y)),
                                                __fmaf_rn(k, u[2], __fmul_rn(keep, s[i].z)),
                                                __fmaf_rn(k, u[3], __fmul_rn(keep, s[i].w))), policy);
        }
    }

    // Applies a log entry to a warp's rows of a state.
    static DEVICE void follow(float4 (&s)[ROWS], const float *key, float4 u, float keep) {
#pragma unroll
        for (int i = 0; i < ROWS; i += 4) {
            const float4 k4 = *(const float4 *)(key + i);
            const float k[4] = {k4.x, k4.y, k4.z, k4.w};
#pragma unroll
            for (int r = 0; r < 4; ++r) {
                float4 &v = s[i + r];
                v = make_float4(__fmaf_rn(k[r], u.x, __fmul_rn(keep, v.x)), __fmaf_rn(k[r], u.y, __fmul_rn(keep, v.y)),
                                __fmaf_rn(k[r], u.z, __fmul_rn(keep, v.z)), __fmaf_rn(k[r], u.w, __fmul_rn(keep, v.w)));
            }
        }
    }
    // Applies the head's log entries, oldest first.
    DEVICE void replay(float4 (&s)[ROWS], int n, int warp, int lane) const {
        const auto &entries = m.entries[n % 3];
        const Place &p = place(n);
        const Since &from = since(n);
        const int count = p.done - from.base, here = min(count, int(entries.MOST));
#pragma unroll 1
        for (int j = 0; j < here; ++j)
            follow(s, entries.keys[j] + warp * ROWS, *(const float4 *)&entries.updates[j][lane * 4], entries.keeps[j]);
#pragma unroll 1
        for (int j = here; j < count; ++j) {
            const i64 entry = from.entry(from.base + j);
            follow(s, a.keys + (entry * a.key_heads + p.from) * D + warp * ROWS,
                   load4(a.updates + (entry * a.value_heads + p.head) * D + lane * 4), __ldcg(a.decays + entry * a.value_heads + p.head));
        }
    }
    // Called by helpers: starts the copies of a head's log entries to shared memory.
    DEVICE void load_entries(int n, int t) const {
        if constexpr (RINGS) {
            if (exists(n)) {
                constexpr int UNITS = D / 4;  // of 16 bytes in a vector
                auto &to = m.entries[n % 3];
                const Place &p = place(n);
                const Since &from = since(n);
                const int count = min(p.done - from.base, int(to.MOST));
                for (int i = t; i < count * 2 * UNITS; i += HELPERS) {
                    const int j = i / (2 * UNITS), unit = i % UNITS * 4;
                    const i64 entry = from.entry(from.base + j);
                    if (i / UNITS % 2) copy_async<16>(shared_address(&to.updates[j][unit]), a.updates + (entry * a.value_heads + p.head) * D + unit);
                    else copy_async<16>(shared_address(&to.keys[j][unit]), a.keys + (entry * a.key_heads + p.from) * D + unit);
                }
                if (t < count) copy_async<4>(shared_address(&to.keeps[t]), a.decays + from.entry(from.base + t) * a.value_heads + p.head);
            }
            commit_copies();
        }
    }
    // Waits for all entries but those of the latest `load_entries`.
    static DEVICE void await_entries() {
        if constexpr (RINGS) await_copies_but<1>();
    }

    // A helper thread's data of a head: one channel each of query, key and value.
    struct Inputs {
        uint2 taps[3];
        u16 raw[3], old[3][3], gate, beta, steep;
        float rate, bias;
    };
    DEVICE int channel(const Place &p, int i, int t) const {
        return i < 2 ? i * keys + p.from * D + t : 2 * keys + p.head * D + t;
    }
    DEVICE void load_inputs(int n, int t, Inputs &v) const {
        const Place &p = place(n);
        const Since &from = since(n);
        const u16 *own = (const u16 *)a.proj + i64(p.start) * a.stride, *ring = a.ring + i64(p.source) * 4 * channels;
#pragma unroll
        for (int i = 0; i < 3; ++i) {
            const int c = channel(p, i, t);
            v.taps[i] = __ldg((const uint2 *)a.conv + c), v.raw[i] = __ldcg(own + c);
#pragma unroll
            for (int j = 0; j < 3; ++j) {
                const int position = p.done - 3 + j;
                const u16 *at = ring + (position & 3) * channels;
                if constexpr (RINGS)
                    if (position >= from.base) at = a.inputs + from.entry(position) * channels;
                v.old[i][j] = __ldcg(at + c);
            }
        }
        own += channels;
        v.gate = __ldcg(own + p.head * D + t), own += a.value_heads * D;
        v.beta = __ldcg(own + p.head), v.steep = __ldcg(own + a.value_heads + p.head);
        v.rate = __ldg(a.decay + p.head), v.bias = __ldg(a.dt_bias + p.head);
    }
    static DEVICE void meet_helpers() { asm volatile("bar.sync 2, 128;" ::: "memory"); }
    // Convolves a head, normalises its query and key, and computes its rates. Stores its raw inputs in the convolution ring,
    // or its log entry except the update.
    DEVICE void mix(int n, int t, const Inputs &v) {
        const Place &p = place(n);
        const Since &from = since(n);
        const int side = n & 1;
        const bool appends = RINGS && from.append, all = p.source != p.target || !p.done || (RINGS && from.base < p.done);
        float x[3];
#pragma unroll
        for (int i = 0; i < 3; ++i) {
            float old[3];
#pragma unroll
            for (int j = 0; j < 3; ++j) old[j] = p.done - 3 + j >= 0 ? wide(v.old[i][j]) : 0.f;
            x[i] = silu(__fmaf_rn(low(v.taps[i].x), old[0], __fmaf_rn(high(v.taps[i].x), old[1],
                        __fmaf_rn(low(v.taps[i].y), old[2], __fmul_rn(high(v.taps[i].y), wide(v.raw[i]))))));
            if (i < 2 && !p.leads) continue;
            if constexpr (RINGS)
                if (appends) a.inputs[from.entry(p.done) * channels + channel(p, i, t)] = v.raw[i];
            if (appends) continue;
            u16 *const to = a.ring + i64(p.target) * 4 * channels + channel(p, i, t);
            to[(p.done & 3) * channels] = v.raw[i];
            if (!all) continue;
#pragma unroll
            for (int j = 0; j < 3; ++j) to[((p.done + 1 + j) & 3) * channels] = p.done ? v.old[i][j] : u16(0);
        }
        const float sums[3] = {warp_sum(x[0] * x[0]), warp_sum(x[1] * x[1]), warp_sum(x[0] * x[1])};
        if ((t & 31) == 0) {
#pragma unroll
            for (int i = 0; i < 3; ++i) m.sums[i][t >> 5] = sums[i];
        }
        meet_helpers();
        float lengths[3];
#pragma unroll
        for (int i = 0; i < 3; ++i) lengths[i] = (m.sums[i][0] + m.sums[i][1]) + (m.sums[i][2] + m.sums[i][3]);
        const float query = rsqrtf(lengths[0] + 1e-6f) * rsqrtf(float(D)), key = rsqrtf(lengths[1] + 1e-6f);
        m.mixed[side][0][t] = x[0] * query, m.mixed[side][1][t] = x[1] * key, m.mixed[side][2][t] = x[2];
        if (t == 0) {
            const float steep = wide(v.steep) + v.bias, soft = steep > 20.f ? steep : log1pf(__expf(steep));
            m.rates[side][0] = __expf(v.rate * soft), m.rates[side][1] = sigmoid(wide(v.beta)), m.rates[side][2] = lengths[2] * query * key;
            if constexpr (RINGS)
                if (appends) a.decays[from.entry(p.done) * a.value_heads + p.head] = m.rates[side][0];
        }
        if constexpr (RINGS)
            if (appends && p.leads) a.keys[(from.entry(p.done) * a.key_heads + p.from) * D + t] = x[1] * key;
    }
    // Norms and gates a head's output.
    DEVICE void finish(int n, int t, float gate, float scale) {
        const Place &p = place(n);
        const float found = m.found[n & 1][t], square = warp_sum(__fmul_rn(found, found));
        if ((t & 31) == 0) m.squares[t >> 5] = square;
        meet_helpers();
        const float mean = (m.squares[0] + m.squares[1]) + (m.squares[2] + m.squares[3]);
        ((u16 *)a.y)[i64(p.start) * (a.value_heads * D) + p.head * D + t] =
            narrow(found * rsqrtf(mean / D + a.eps) * scale * silu(gate));
    }
    DEVICE void run_states() {
        const u64 policy = read_once();
        for (int n = 0; exists(n); ++n) {
            advance(n, policy);
            __syncthreads();
        }
    }
    // The helpers' work while the state of head n is processed. inputs: of head n + 1 at entry, of head n + 3 at return.
    DEVICE void help(int n, int t, Inputs &inputs, float &last, float &gate, float scale) {
        load_entries(n + 2, t);
        if (n) finish(n - 1, t, last, scale);
        last = gate;
        if (exists(n + 1)) {
            mix(n + 1, t, inputs);
            gate = wide(inputs.gate);
            const int later = n - 1 + KNOWN / 2 + t;
            if (n % (KNOWN / 2) == 1 && n > 1 && t < KNOWN / 2 && exists(later)) know(later);
            if (exists(n + 3)) load_inputs(n + 3, t, inputs);
        }
        await_entries();
        __syncthreads();
        if (!exists(n + 1)) finish(n, t, last, scale);
    }
    // Helpers load a head's inputs two heads ahead: memory delivers that many states before it serves the load.
    DEVICE void run_helpers(int t, float scale) {
        Inputs odd, even;
        load_inputs(0, t, even);
        if (exists(1)) load_inputs(1, t, odd);
        mix(0, t, even);
        float gate = wide(even.gate), last = 0;
        if (exists(2)) load_inputs(2, t, even);
        await_entries();
        __syncthreads();
        for (int n = 0; exists(n); n += 2) {
            help(n, t, odd, last, gate, scale);
            if (exists(n + 1)) help(n + 1, t, even, last, gate, scale);
        }
    }
};

// 384 threads: 256 process states, 128 are helpers.
template <int D, int STAGES, bool RINGS> DEVICE void gdn_many(const typename EntriesOf<RINGS, D>::Arguments &a) {
    using Heads = ManyHeads<D, STAGES, RINGS>;
    extern __shared__ __align__(128) char shared_states[];
    __shared__ typename Heads::Shared shared;
    Heads g(a, shared, shared_address(shared_states));
    const int t = threadIdx.x - 256;
    if (is_copier(0)) {
        if (threadIdx.x == 0) {
            for (int i = 0; i < STAGES; ++i) init_barrier(g.full(i), COPIERS);
            publish_barriers();
        }
        meet_copiers();
        for (int n = 0; n < STAGES && g.exists(n); ++n) {
            const Place p = g.find(n);
            g.fetch(n, p, Since::of(a, p));
        }
    }
    launch_dependents();
    if (!g.exists(0)) return wait();
    if (t >= 0 && t < Heads::KNOWN && g.exists(t)) g.know(t);
    __syncthreads();
    if (t >= 0) g.load_entries(0, t), g.load_entries(1, t);
    wait();
    if (t < 0) {
        __syncthreads();
        return g.run_states();
    }
    g.run_helpers(t, __ldg(a.norm + t));
}
