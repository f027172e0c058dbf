// The core of a Gated DeltaNet layer for decode rows: convolution, gates, delta rule, gated norm. Four warps have one slice of
// a value head, BV columns, and keep its state in registers. Two kernels round alike:
// - gdn_spread, for few heads: a block has one or two slices. The output projection computes the norm, because blocks that
//   wait for each other could not all start while the blocks of products are resident.
// - gdn_stream, for many heads: a block has all slices and loops over heads. As soon as a state is in registers, the next one
//   is copied to shared memory. A head's inputs are prefetched too, because a blocking load is served after all copies.

// The source begins with the type State, a state's element in its slot: float, or unsigned short for bfloat16. In registers
// it is a float. A state is rounded once, when it is written.

// Capacity of a state delta log, in entries (`verify.cuh`).
#define RING 16

struct Gdn {
    const void *proj;    // [T, stride]: q, k, v (the convolved channels), z, b, a
    const u16 *conv;     // [C, 4]
    const float *decay, *dt_bias, *norm;
    State *state;        // [slots, Hv, DK, DV]
    u16 *ring;           // [slots, 4, C]: convolution inputs, position p at p mod 4
    void *y;             // [T, Hv * DV] bf16; gdn_spread: [T, heads_stride] float, not normed yet, then slices' squares
    const i64 *count, *starts, *done, *source, *target;
    float eps;
    int key_heads, value_heads, stride, tiled, heads;  // heads: of all rows, padding included
};

// A value head of a row, its key head `from`, and the row's tokens and state slots. leads: the head is the first one of its
// key head.
struct Place {
    int row, head, from, leads, start, tokens, done, source, target;
    static DEVICE Place of(const Gdn &a, int item) {
        const int row = item / a.value_heads, head = item - row * a.value_heads, share = a.value_heads / a.key_heads;
        const int start = int(a.starts[row]), from = a.tiled ? head % a.key_heads : head / share;
        return {row, head, from, a.tiled ? head < a.key_heads : head == from * share, start, int(a.starts[row + 1]) - start,
                int(a.done[row]), int(a.source[row]), int(a.target[row])};
    }
};

// A token's gates for one head before their nonlinearities (beta: b, steep: a, gate: z of the thread's column), and the
// parameters applied to them (rate: decay, bias: dt_bias, scale: norm weight of the column).
struct Gates {
    float beta, steep, gate, rate, bias, scale;
};

// query, key: factors that normalise a token's query (1 / sqrt(DK) included) and key. dot: product of both, normalised.
// keep: decay of the state. beta: factor of the update.
struct Factors {
    float query, key, dot;
};
struct Rates {
    float keep, beta;
};

// A token's update of four columns in a row of the state: keep * s + k * u.
DEVICE float4 follow(float4 s, float k, const float (&u)[4], float keep) {
    return make_float4(__fmaf_rn(k, u[0], __fmul_rn(keep, s.x)), __fmaf_rn(k, u[1], __fmul_rn(keep, s.y)),
                       __fmaf_rn(k, u[2], __fmul_rn(keep, s.z)), __fmaf_rn(k, u[3], __fmul_rn(keep, s.w)));
}

// V slices of a head, 128 threads each. A thread has four columns of rows tid / COLUMNS + i * GROUPS. NORMS: the block has
// all slices of the head and computes the norm.
template <int DK, int DV, int BV, int V, bool NORMS, class In> struct GatedDelta {
    static constexpr int THREADS = 128 * V, WARPS = 4, SLICES = DV / BV, COLUMNS = BV / 4,
                         GROUPS = 128 / COLUMNS, ROWS = DK / GROUPS, CHANNELS = 2 * DK + V * BV,
                         EACH = (CHANNELS + THREADS - 1) / THREADS;
    static_assert(DK % GROUPS == 0 && DK % 32 == 0 && BV <= 32 && (!NORMS || V == SLICES), "blocks do not fit the head");
    struct alignas(16) Shared {
        float parts[V][WARPS][2][BV], mixed[CHANNELS], red[2 * DK / 32 + EACH * WARPS * V], squares[2][SLICES];
        Rates rates;
    };
    const Gdn &a;
    Shared &m;
    int tid, lane, part, warp, slice, head, from, keys, channels, start, tokens, done, source, target;  // part: slice in block
    bool leads;
    float4 s[ROWS];
    float history[EACH][3];
    uint2 taps[EACH];

    DEVICE GatedDelta(const Gdn &args, Shared &shared, int first, const Place &place) : a(args), m(shared) {
        part = threadIdx.x / 128, tid = threadIdx.x % 128, warp = tid >> 5, lane = tid & 31;
        slice = first + part, head = place.head, from = place.from, leads = place.leads && first == 0;
        keys = a.key_heads * DK, channels = 2 * keys + a.value_heads * DV;
        start = place.start, tokens = place.tokens, done = place.done, source = place.source, target = place.target;
    }
    DEVICE bool has_gates() const { return NORMS || threadIdx.x / 32 == WARPS - 1; }
    // The thread's i-th convolved channel: `local` is its index in `mixed`, `channel` its index in the projection.
    DEVICE int local(int i) const { return threadIdx.x + i * THREADS; }
    DEVICE int channel_of(int c) const {
        return c < DK ? from * DK + c : c < 2 * DK ? keys + from * DK + c - DK
                                                   : 2 * keys + head * DV + (slice - part) * BV + c - 2 * DK;
    }
    DEVICE int channel(int i) const { return channel_of(local(i)); }
    DEVICE bool mixes(int i) const { return local(i) < CHANNELS; }
    DEVICE bool writes(int i) const { return mixes(i) && (leads || local(i) >= 2 * DK); }
    // Offset of s[0] in a head's state [DK, DV].
    DEVICE int place() const { return tid / COLUMNS * DV + slice * BV + tid % COLUMNS * 4; }
    DEVICE State *state(i64 slot) const { return a.state + (slot * a.value_heads + head) * (DK * DV); }
    DEVICE void load_history() {
        const u16 *ring = a.ring + i64(source) * 4 * channels;
#pragma unroll
        for (int i = 0; i < EACH; ++i) {
            taps[i] = mixes(i) ? __ldg((const uint2 *)a.conv + channel(i)) : make_uint2(0, 0);
#pragma unroll
            for (int p = 0; p < 3; ++p)
                history[i][p] = mixes(i) && done - 3 + p >= 0 ? load(ring + ((done - 3 + p) & 3) * channels + channel(i)) : 0.f;
        }
    }
    // The thread's i-th channel after convolution and SiLU.
    DEVICE float mix(int i, u16 raw) const {
        return silu(__fmaf_rn(low(taps[i].x), history[i][0], __fmaf_rn(high(taps[i].x), history[i][1],
                    __fmaf_rn(low(taps[i].y), history[i][2], __fmul_rn(high(taps[i].y), wide(raw))))));
    }
    DEVICE void shift(int i, u16 raw) { history[i][0] = history[i][1], history[i][1] = history[i][2], history[i][2] = wide(raw); }
    // Convolves one token: inputs to `raws`, results to `mixed`, sums of squares of each 32 channels to `red`. In a block of
    // one or two slices one warp computes the gates: the gates of all heads lie in the same few places of L2, which is slow
    // if every warp reads them.
    template <class Input> DEVICE void convolve(Input input, float (&raws)[EACH], const Gates &of) {
#pragma unroll
        for (int i = 0; i < EACH; ++i) raws[i] = mixes(i) ? input(i) : 0.f;  // all loads are in flight before the first use
        float squares[EACH + EACH % 2] = {};
#pragma unroll
        for (int i = 0; i < EACH; ++i) {
            if (!mixes(i)) continue;
            const float x = mix(i, narrow(raws[i]));
            m.mixed[local(i)] = x, squares[i] = __fmul_rn(x, x);
        }
        warp_sums(squares);
#pragma unroll
        for (int i = 0; i < EACH; ++i)
            if (lane == 0) m.red[local(i) / 32] = squares[i];
        if (!NORMS && has_gates()) {
            const Rates r = rates(of);
            if (lane == 0) m.rates = r;
        }
        __syncthreads();
    }
    // Copies the three inputs before a row's only token to the ring of another slot.
    DEVICE void keep_older() const {
#pragma unroll
        for (int i = 0; i < EACH; ++i) {
#pragma unroll
            for (int p = 0; p < 3; ++p)
                if (writes(i)) ring()[((done + 1 + p) & 3) * channels + channel(i)] = narrow(history[i][p]);
        }
    }
    // Shifts the history by a token, after the state update and off the critical path. ring: receives the token's inputs, or
    // null; older: with the three before them.
    DEVICE void keep_inputs(const float (&raws)[EACH], u16 *ring, bool older, int position) {
#pragma unroll
        for (int i = 0; i < EACH; ++i) {
            if (!mixes(i)) continue;
            const u16 raw = narrow(raws[i]);
            if (ring && writes(i)) {
                u16 *const to = ring + channel(i);
                to[(position & 3) * channels] = raw;
#pragma unroll
                for (int p = 0; p < 3; ++p)
                    if (older) to[((position + 1 + p) & 3) * channels] = narrow(history[i][p]);
            }
            shift(i, raw);
        }
    }
    // mixed, red: of the token, as `convolve` writes them.
    DEVICE Factors factors(const float *mixed, const float *red) const {
        float query_square = 0, key_square = 0, dot = 0;
#pragma unroll
        for (int i = 0; i < DK / 32; ++i) {
            query_square += red[i], key_square += red[DK / 32 + i];
            dot = __fmaf_rn(mixed[lane + 32 * i], mixed[DK + lane + 32 * i], dot);
        }
        const float query = rsqrtf(query_square + 1e-6f) * rsqrtf(float(DK)), key = rsqrtf(key_square + 1e-6f);
        return {query, key, warp_sum(dot) * query * key};
    }
    static DEVICE Rates rates(const Gates &of) {
        const float steep = of.steep + of.bias, soft = steep > 20.f ? steep : log1pf(__expf(steep));
        return {__expf(of.rate * soft), sigmoid(of.beta)};
    }
    // Multiplies the warp's rows of the state with a token's key (parts[warp][0]) and query (parts[warp][1]).
    DEVICE void project(const float *mixed, const Factors &f, float (&parts)[WARPS][2][BV]) const {
        const int group = tid / COLUMNS;
        float k4[4] = {}, q4[4] = {};
#pragma unroll
        for (int i = 0; i < ROWS; ++i) {
            const float k = mixed[DK + group + i * GROUPS] * f.key, q = mixed[group + i * GROUPS] * f.query;
            const float row[4] = {s[i].x, s[i].y, s[i].z, s[i].w};
#pragma unroll
            for (int c = 0; c < 4; ++c) k4[c] = __fmaf_rn(k, row[c], k4[c]), q4[c] = __fmaf_rn(q, row[c], q4[c]);
        }
#pragma unroll
        for (int c = 0; c < 4; ++c)
#pragma unroll
            for (int other = COLUMNS; other < 32; other <<= 1) {
                k4[c] += __shfl_xor_sync(~0u, k4[c], other);
                q4[c] += __shfl_xor_sync(~0u, q4[c], other);
            }
        if (lane < COLUMNS) {
            *(float4 *)&parts[warp][0][lane * 4] = make_float4(k4[0], k4[1], k4[2], k4[3]);
            *(float4 *)&parts[warp][1][lane * 4] = make_float4(q4[0], q4[1], q4[2], q4[3]);
        }
    }
    // Returns the output of column tid, for the first BV threads of a slice. update: receives the column's u.
    DEVICE float output(const float *value, const Factors &f, const Rates &r, const float (&parts)[WARPS][2][BV], float &update) const {
        float from_key = 0, from_query = 0;
#pragma unroll
        for (int w = 0; w < WARPS; ++w) from_key += parts[w][0][tid], from_query += parts[w][1][tid];
        update = r.beta * __fmaf_rn(-r.keep, from_key, value[tid]);
        return __fmaf_rn(f.dot, update, __fmul_rn(r.keep, from_query));
    }
    // Updates the state with a token. last: where to store the new state; null: registers only.
    DEVICE void update(const float *mixed, const float *value, const Factors &f, const Rates &r,
                       const float (&parts)[WARPS][2][BV], State *last) {
        const u64 policy = read_once();
        const int column = tid % COLUMNS, group = tid / COLUMNS;
        float sum[4] = {}, u[4];
#pragma unroll
        for (int w = 0; w < WARPS; ++w)
#pragma unroll
            for (int c = 0; c < 4; ++c) sum[c] += parts[w][0][column * 4 + c];
#pragma unroll
        for (int c = 0; c < 4; ++c) u[c] = r.beta * __fmaf_rn(-r.keep, sum[c], value[column * 4 + c]);
#pragma unroll
        for (int i = 0; i < ROWS; ++i) {
            s[i] = follow(s[i], mixed[DK + group + i * GROUPS] * f.key, u, r.keep);
            if (last) store4_once(last + place() + i * GROUPS * DV, s[i], policy);
        }
    }
    DEVICE i64 output_place(int token) const {
        return i64(start + token) * (a.value_heads * DV) + head * DV + slice * BV + tid;
    }
    // Processes a token that is already convolved. last: as in `update`.
    DEVICE void advance(int token, const Gates &of, State *last) {
        const float *value = m.mixed + 2 * DK + part * BV;
        const Rates r = NORMS ? rates(of) : m.rates;
        const float gate = __fmul_rn(of.scale, silu(of.gate));
        const Factors f = factors(m.mixed, m.red);
        project(m.mixed, f, m.parts[part]);
        __syncthreads();
        float u, found = tid < BV ? output(value, f, r, m.parts[part], u) : 0.f;
        const float gated = __fmul_rn(found, gate);
        float *const row = (float *)a.y + i64(start + token) * heads_stride(a.value_heads * DV, BV);
        if (!NORMS && tid < BV) row[head * DV + slice * BV + tid] = gated;
        if (warp == 0) {
            const float square = warp_sum(__fmul_rn(found, found));
            if (lane == 0) (NORMS ? m.squares[token & 1][slice] : row[a.value_heads * DV + head * SLICES + slice]) = square;
        }
        update(m.mixed, value, f, r, m.parts[part], last);
        __syncthreads();
        if (NORMS && tid < BV) {
            float mean = 0;
#pragma unroll
            for (int i = 0; i < SLICES; ++i) mean += m.squares[token & 1][i];
            ((u16 *)a.y)[output_place(token)] = narrow(__fmul_rn(gated, rsqrtf(mean / DV + a.eps)));
        }
    }
    DEVICE const In *inputs(int token) const { return (const In *)a.proj + i64(start + token) * a.stride; }
    DEVICE const In *gates(int token) const { return inputs(token) + channels + a.value_heads * DV; }
    // True if a row's only token gives all four places of another slot's ring an input. They are then written along with the
    // convolution.
    DEVICE bool older() const { return source != target && tokens == 1 && done >= 3; }
    DEVICE u16 *ring() const { return a.ring + i64(target) * 4 * channels; }
    // Convolves and processes a token. following: called after its inputs were used, before the state is.
    template <class Input, class Following> DEVICE void advance(int token, const Gates &of, Input input, State *last,
                                                                Following following) {
        const bool kept = older() || (source == target && token + 4 >= tokens);
        float raws[EACH];
        convolve(input, raws, of);
        following();
        advance(token, of, token + 1 == tokens ? last : nullptr);
        keep_inputs(raws, kept ? ring() : nullptr, NORMS && older(), done + token);
    }
    // Processes tokens from the n-th on, then fills the ring's places without a new input.
    DEVICE void rest(int n, Gates of, State *last) {
#pragma unroll 1
        for (; n < tokens; ++n) {
            if (has_gates()) of.beta = load(gates(n) + head), of.steep = load(gates(n) + a.value_heads + head);
            if (tid < BV) of.gate = load(inputs(n) + channels + head * DV + slice * BV + tid);
            advance(n, of, [&](int i) { return load(inputs(n) + channel(i)); }, last, [] {});
        }
        if (older() || (source == target && done)) return;
        const u16 *const old = a.ring + i64(source) * 4 * channels;
#pragma unroll 1
        for (int i = 0; i < EACH; ++i) {
#pragma unroll 1
            for (int place = 0; place < 4 && writes(i); ++place) {
                const int last = done + tokens - 1, position = last - ((last - place) & 3), at = place * channels + channel(i);
                if (position < done) ring()[at] = done ? __ldcg(old + at) : u16(0);
                else if (source != target) ring()[at] = narrow(load(inputs(position - done) + channel(i)));
            }
        }
    }
};

// Grid [DV / BV / V * heads or more], blocks of 128 V threads. Surplus blocks only wait.
template <int DK, int DV, int BV, class In, int V> DEVICE void gdn_spread(const Gdn &a) {
    using Slice = GatedDelta<DK, DV, BV, V, false, In>;
    const int first = blockIdx.x * V;  // index among the slices of all heads
    __shared__ typename Slice::Shared shared;
    launch_dependents();
    if (first >= a.heads * Slice::SLICES) return wait();
    const Place place = Place::of(a, first / Slice::SLICES);
    Slice g(a, shared, first % Slice::SLICES, place);
    if (place.row >= *a.count) return wait();
    const State *old = g.state(g.source) + g.place();
    const u64 policy = read_once();
#pragma unroll
    for (int i = 0; i < Slice::ROWS; ++i)
        g.s[i] = g.done ? load4_once(old + i * Slice::GROUPS * DV, policy) : make_float4(0, 0, 0, 0);
    g.load_history();
    const float scale = g.tid < BV ? __ldg(a.norm + g.slice * BV + g.tid) : 0.f;
    const Gates of{0, 0, 0, __ldg(a.decay + g.head), __ldg(a.dt_bias + g.head), scale};
    if (g.older()) g.keep_older();  // before wait(): no other kernel of this step accesses that ring
    wait();
    g.rest(0, of, g.state(g.target));
}

// A head's prefetched data in shared memory, except its state: taps, three earlier inputs and the new input of its channels,
// and its gates. A thread copies a pair of channels.
template <class Head, class In> struct Arriving {
    static constexpr int PAIRS = Head::CHANNELS / 2, GATES = Head::SLICES * Head::COLUMNS * 4 / 2, WORD = sizeof(In) * 2;
    static_assert(PAIRS + GATES + 4 <= Head::THREADS, "too few threads to copy");
    uint4 taps[PAIRS];
    In input[2 * PAIRS], gates[2 * GATES], beta[2], steep[2];
    float rate, bias;
    u16 history[3][2 * PAIRS];

    // Prefetches what is available before `wait`: weights and earlier inputs.
    DEVICE void fetch_own(const Head &g) {
        const int t = threadIdx.x, o = t - PAIRS - GATES;
        if (o == 2) copy_async<4>(shared_address(&rate), g.a.decay + g.head);
        if (o == 3) copy_async<4>(shared_address(&bias), g.a.dt_bias + g.head);
        if (t >= PAIRS) return;
        const int channel = g.channel_of(2 * t);
        copy_async<16>(shared_address(&taps[t]), g.a.conv + channel * 4);
        const u16 *ring = g.a.ring + i64(g.source) * 4 * g.channels + channel;
#pragma unroll
        for (int p = 0; p < 3; ++p) {
            const int position = g.done - 3 + p;
            if (position >= 0) copy_async<4>(shared_address(&history[p][2 * t]), ring + (position & 3) * g.channels);
            else *(u32 *)&history[p][2 * t] = 0;
        }
    }
    // Prefetches the projections of the row's first token. A copy has at least 4 bytes: bf16 gates come in pairs.
    DEVICE void fetch_inputs(const Head &g) {
        const int t = threadIdx.x, o = t - PAIRS, gate = o - GATES;
        const In *from = g.inputs(0);
        if (t < PAIRS) copy_async<WORD>(shared_address(&input[2 * t]), from + g.channel_of(2 * t));
        else if (o < GATES) copy_async<WORD>(shared_address(&gates[2 * o]), from + g.channels + g.head * (2 * GATES) + 2 * o);
        else if (gate < 2) {
            const int at = gate * g.a.value_heads + g.head;
            copy_async<4>(shared_address(gate ? steep : beta), g.gates(0) + (sizeof(In) == 2 ? at & ~1 : at));
        }
    }
    DEVICE Gates take(Head &g, float scale) const {
#pragma unroll
        for (int i = 0; i < Head::EACH; ++i) {
            const int c = g.local(i);
            if (!g.mixes(i)) continue;
            g.taps[i] = *((const uint2 *)taps + c);
#pragma unroll
            for (int p = 0; p < 3; ++p) g.history[i][p] = wide(history[p][c]);
        }
        const bool half = sizeof(In) == 2;
        return {number(beta[half & g.head]), number(steep[half & (g.a.value_heads + g.head)]),
                g.tid < 2 * GATES / Head::SLICES ? number(gates[g.part * (2 * GATES / Head::SLICES) + g.tid]) : 0.f,
                rate, bias, scale};
    }
    static DEVICE float number(float v) { return v; }
    static DEVICE float number(u16 v) { return wide(v); }
};

// Blocks of DV / BV * 128 threads, at most one for each head.
template <int DK, int DV, int BV, class In> DEVICE void gdn_stream(const Gdn &a) {
    using Head = GatedDelta<DK, DV, BV, DV / BV, true, In>;
    using Inputs = Arriving<Head, In>;
    constexpr int SIZE = DK * DV * sizeof(State), CHUNK = SIZE > 16384 ? 16384 : SIZE, KNOWN = 64;
    extern __shared__ __align__(128) State stage[];
    __shared__ typename Head::Shared shared;
    __shared__ __align__(16) Inputs arriving;
    __shared__ Place places[KNOWN];  // the block's next heads
    __shared__ u64 barrier;
    const u32 full = shared_address(&barrier);
    const int items = min(a.heads, int(*a.count) * a.value_heads);
    const u64 policy = read_once();
    const auto exists = [&](int n) { return blockIdx.x + n * gridDim.x < items; };
    const auto head = [&](int n) { return Head(a, shared, 0, places[n % KNOWN]); };
    const auto find = [&](int n) {  // fills `places` with the block's heads from the n-th on
        if (threadIdx.x < KNOWN && exists(n + threadIdx.x))
            places[threadIdx.x] = Place::of(a, blockIdx.x + (n + threadIdx.x) * gridDim.x);
    };
    const auto fetch = [&](const Head &g) {  // called by copiers
        const State *from = g.state(g.source);
        expect_bytes(full, g.done ? SIZE : 0);
        for (int at = 0; g.done && at < SIZE; at += CHUNK)
            bulk_copy(shared_address(stage) + at, (const char *)from + at, CHUNK, full, policy);
        end_copies(full);
    };
    const Head first(a, shared, 0, Place::of(a, blockIdx.x));
    if (is_copier(0)) {
        if (threadIdx.x == 0) {
            init_barrier(full, COPIERS);
            publish_barriers();
        }
        meet_copiers();
        if (exists(0)) fetch(first);
    }
    launch_dependents();
    if (!exists(0)) return wait();
    arriving.fetch_own(first);
    const float scale = threadIdx.x % 128 < BV ? __ldg(a.norm + threadIdx.x / 128 * BV + threadIdx.x % 128) : 0.f;
    find(0);
    wait();
    arriving.fetch_inputs(first);
    for (int n = 0; exists(n); ++n) {
        await_copies();
        __syncthreads();
        Head g = head(n);
        const Gates of = arriving.take(g, scale);
        g.advance(0, of, [&](int i) { return Inputs::number(arriving.input[g.local(i)]); }, g.state(g.target), [&] {
            if (n % KNOWN == KNOWN - 1) {
                find(n + 1);
                __syncthreads();
            }
            const Head following = head(n + 1);
            if (exists(n + 1)) arriving.fetch_own(following), arriving.fetch_inputs(following);
            await_barrier(full, n & 1);
#pragma unroll
            for (int i = 0; i < Head::ROWS; ++i)
                g.s[i] = g.done ? take4(stage + g.place() + i * Head::GROUPS * DV) : make_float4(0, 0, 0, 0);
            __syncthreads();
            if (is_copier(0) && exists(n + 1)) fetch(following);
        });
        g.rest(1, of, g.state(g.target));
    }
}
