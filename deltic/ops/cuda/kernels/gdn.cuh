// The core of a Gated DeltaNet layer for rows that decode: convolution, gates, delta rule, gated norm. Four warps have BV
// columns of a value head of a row, their slice of its state in registers. Of few heads each slice is a block, and the
// blocks of a head are a cluster: they tell each other what the norm needs to know. Of many heads a block has all slices,
// and goes from head to head; as soon as a state is in registers, the next one is on its way to shared memory. Both round
// alike.

struct Gdn {
    const void *proj;    // [T, stride]: q, k, v (the convolved channels), z, b, a
    const u16 *conv;     // [C, 4]
    const float *decay, *dt_bias, *norm;
    float *state;        // [slots, Hv, DK, DV]
    u16 *ring;           // [slots, 4, C]
    u16 *y;              // [T, Hv * DV]
    const i64 *count, *starts, *done, *source, *target;
    float eps;
    int key_heads, value_heads, stride, tiled, heads;  // heads: of all rows
};

// V slices of a head, by 128 V threads.
template <int DK, int DV, int BV, int V, class In> struct GatedDelta {
    static constexpr int THREADS = 128 * V, WARPS = 4, SLICES = DV / BV, BLOCKS = SLICES / V, COLUMNS = BV / 4,
                         GROUPS = 128 / COLUMNS, ROWS = DK / GROUPS, CHANNELS = 2 * DK + V * BV,
                         EACH = (CHANNELS + THREADS - 1) / THREADS;
    static_assert(DK % GROUPS == 0 && DK % 32 == 0 && BV <= 32 && (V == 1 || BLOCKS == 1), "blocks do not fit the head");
    struct alignas(16) Shared {
        float parts[V][WARPS][2][BV], mixed[CHANNELS], red[2 * DK / 32 + EACH * WARPS * V], squares[2][SLICES];
    };
    const Gdn &a;
    Shared &m;
    int tid, lane, part, warp, slice, head, row, from, keys, channels, start, tokens, done;  // part: of the block's slices
    i64 source, target;
    bool leads;
    float4 s[ROWS];
    float history[EACH][3];
    uint2 taps[EACH];

    DEVICE GatedDelta(const Gdn &args, Shared &shared, int item, int first) : a(args), m(shared) {
        part = threadIdx.x / 128, tid = threadIdx.x % 128, warp = tid >> 5, lane = tid & 31;
        const int share = a.value_heads / a.key_heads;
        slice = first + part, row = item / a.value_heads, head = item - row * a.value_heads;
        from = a.tiled ? head % a.key_heads : head / share;
        leads = first == 0 && (a.tiled ? head < a.key_heads : head % share == 0);
        keys = a.key_heads * DK, channels = 2 * keys + a.value_heads * DV;
        start = int(a.starts[row]), tokens = int(a.starts[row + 1]) - start, done = int(a.done[row]);
        source = a.source[row], target = a.target[row];
    }
    // A thread's i-th convolved channel, as a place in `mixed` and as a channel.
    DEVICE int local(int i) const { return threadIdx.x + i * THREADS; }
    DEVICE int channel(int i) const {
        const int c = local(i);
        return c < DK ? from * DK + c : c < 2 * DK ? keys + from * DK + c - DK
                                                   : 2 * keys + head * DV + (slice - part) * BV + c - 2 * DK;
    }
    DEVICE bool mixes(int i) const { return local(i) < CHANNELS; }
    DEVICE bool writes(int i) const { return mixes(i) && (leads || local(i) >= 2 * DK); }
    // Of a thread's part of a head's state.
    DEVICE int place() const { return tid / COLUMNS * DV + slice * BV + tid % COLUMNS * 4; }
    DEVICE float *state(i64 slot) const { return a.state + (slot * a.value_heads + head) * (DK * DV); }
    DEVICE void load_history() {
        const u16 *ring = a.ring + source * 4 * channels;
#pragma unroll
        for (int i = 0; i < EACH; ++i) {
            taps[i] = mixes(i) ? __ldg((const uint2 *)a.conv + channel(i)) : make_uint2(0, 0);
#pragma unroll
            for (int p = 0; p < 3; ++p)
                history[i][p] = mixes(i) && done - 3 + p >= 0 ? load(ring + ((done - 3 + p) & 3) * channels + channel(i)) : 0.f;
        }
    }
    // The convolution of one token, into `mixed`; sums of squares of each 32 channels into `red`.
    DEVICE void convolve(const In *proj, u16 *ring, int position) {
#pragma unroll
        for (int i = 0; i < EACH; ++i) {
            float x = 0;
            if (mixes(i)) {
                const u16 raw = narrow(load(proj + channel(i)));
                x = silu(__fmaf_rn(low(taps[i].x), history[i][0], __fmaf_rn(high(taps[i].x), history[i][1],
                         __fmaf_rn(low(taps[i].y), history[i][2], __fmul_rn(high(taps[i].y), wide(raw))))));
                history[i][0] = history[i][1], history[i][1] = history[i][2], history[i][2] = wide(raw);
                if (ring && writes(i)) ring[(position & 3) * channels + channel(i)] = raw;
                m.mixed[local(i)] = x;
            }
            const float square = warp_sum(__fmul_rn(x, x));
            if (lane == 0) m.red[local(i) / 32] = square;
        }
        __syncthreads();
    }
    // One token, whose inputs are convolved. last: where the state is to be stored.
    DEVICE void advance(int token, float raw_beta, float steep, float rate, float gate, float scale, float *last) {
        const float *query = m.mixed, *key = m.mixed + DK, *value = m.mixed + 2 * DK + part * BV;
        const int column = tid % COLUMNS, group = tid / COLUMNS;
        float query_square = 0, key_square = 0, dot = 0;
#pragma unroll
        for (int i = 0; i < DK / 32; ++i) {
            query_square += m.red[i], key_square += m.red[DK / 32 + i];
            dot = __fmaf_rn(query[lane + 32 * i], key[lane + 32 * i], dot);
        }
        const float query_factor = rsqrtf(query_square + 1e-6f) * rsqrtf(float(DK)), key_factor = rsqrtf(key_square + 1e-6f);
        dot = warp_sum(dot) * query_factor * key_factor;
        float k4[4] = {}, q4[4] = {};
#pragma unroll
        for (int i = 0; i < ROWS; ++i) {
            const float k = key[group + i * GROUPS] * key_factor, q = query[group + i * GROUPS] * query_factor;
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
            *(float4 *)&m.parts[part][warp][0][lane * 4] = make_float4(k4[0], k4[1], k4[2], k4[3]);
            *(float4 *)&m.parts[part][warp][1][lane * 4] = make_float4(q4[0], q4[1], q4[2], q4[3]);
        }
        __syncthreads();
        const float soft = steep > 20.f ? steep : log1pf(__expf(steep));
        const float keep = __expf(rate * soft), beta = sigmoid(raw_beta);
        float output = 0;
        if (tid < BV) {
            float from_key = 0, from_query = 0;
#pragma unroll
            for (int w = 0; w < WARPS; ++w) from_key += m.parts[part][w][0][tid], from_query += m.parts[part][w][1][tid];
            const float u = beta * __fmaf_rn(-keep, from_key, value[tid]);
            output = __fmaf_rn(dot, u, keep * from_query);
        }
        if (warp == 0) {
            const float square = warp_sum(__fmul_rn(output, output));
            if constexpr (BLOCKS == 1) {
                if (lane == 0) m.squares[token & 1][slice] = square;
            } else if (lane < BLOCKS) {
                store_peer(&m.squares[token & 1][slice], lane, square);
            }
        }
        if constexpr (BLOCKS > 1) arrive_cluster();
        float sum[4] = {};
#pragma unroll
        for (int w = 0; w < WARPS; ++w)
#pragma unroll
            for (int c = 0; c < 4; ++c) sum[c] += m.parts[part][w][0][column * 4 + c];
        float u[4];
#pragma unroll
        for (int c = 0; c < 4; ++c) u[c] = beta * __fmaf_rn(-keep, sum[c], value[column * 4 + c]);
#pragma unroll
        for (int i = 0; i < ROWS; ++i) {
            const float k = key[group + i * GROUPS] * key_factor;
            s[i] = make_float4(__fmaf_rn(k, u[0], keep * s[i].x), __fmaf_rn(k, u[1], keep * s[i].y),
                               __fmaf_rn(k, u[2], keep * s[i].z), __fmaf_rn(k, u[3], keep * s[i].w));
            if (last) store4(last + place() + i * GROUPS * DV, s[i]);
        }
        if constexpr (BLOCKS > 1) await_cluster();
        else __syncthreads();
        if (tid < BV) {
            float mean = 0;
#pragma unroll
            for (int i = 0; i < SLICES; ++i) mean += m.squares[token & 1][i];
            a.y[i64(start + token) * (a.value_heads * DV) + head * DV + slice * BV + tid] =
                narrow(output * rsqrtf(mean / DV + a.eps) * scale * silu(gate));
        }
    }
    // All tokens of the row; arrive: makes the state be there. first: nothing was waited for yet.
    template <class Arrive> DEVICE void run(bool first, float *last, Arrive arrive) {
        load_history();
        const float rate = __ldg(a.decay + head), bias = __ldg(a.dt_bias + head);
        const float scale = tid < BV ? __ldg(a.norm + slice * BV + tid) : 0.f;
        u16 *ring = a.ring + target * 4 * channels;
        if (first) wait();
        for (int token = 0; token < tokens; ++token) {
            const In *proj = (const In *)a.proj + i64(start + token) * a.stride, *gates = proj + channels + a.value_heads * DV;
            const float raw_beta = load(gates + head), steep = load(gates + a.value_heads + head) + bias;
            const float gate = tid < BV ? load(proj + channels + head * DV + slice * BV + tid) : 0.f;
            convolve(proj, source == target && token + 4 >= tokens ? ring : nullptr, done + token);
            if (token == 0) arrive();
            advance(token, raw_beta, steep, rate, gate, scale, token + 1 == tokens ? last : nullptr);
        }
        if (source == target && done) return;
        const u16 *const old = a.ring + source * 4 * channels;
#pragma unroll
        for (int i = 0; i < EACH; ++i)  // the places that no new input went to
            for (int place = 0; place < 4 && writes(i); ++place) {
                const int last = done + tokens - 1, position = last - ((last - place) & 3), at = place * channels + channel(i);
                if (position < done) ring[at] = done ? __ldcg(old + at) : u16(0);
                else if (source != target)
                    ring[at] = narrow(load((const In *)a.proj + i64(start + position - done) * a.stride + channel(i)));
            }
    }
};

// Grid [DV / BV * heads], clusters of DV / BV blocks of 128 threads.
template <int DK, int DV, int BV, class In> DEVICE void gdn_spread(const Gdn &a) {
    using Slice = GatedDelta<DK, DV, BV, 1, In>;
    __shared__ typename Slice::Shared shared;
    launch_dependents();
    Slice g(a, shared, blockIdx.x / Slice::SLICES, blockIdx.x % Slice::SLICES);
    if (g.row >= *a.count) return wait();
    const float *old = g.state(g.source) + g.place();
    const u64 policy = read_once();
#pragma unroll
    for (int i = 0; i < Slice::ROWS; ++i)
        g.s[i] = g.done ? load4_once(old + i * Slice::GROUPS * DV, policy) : make_float4(0, 0, 0, 0);
    g.run(true, g.state(g.target), [] {});
}

// Blocks of DV / BV * 128 threads, no more than there are heads.
template <int DK, int DV, int BV, class In> DEVICE void gdn_stream(const Gdn &a) {
    using Head = GatedDelta<DK, DV, BV, DV / BV, In>;
    constexpr int SIZE = DK * DV * 4, CHUNK = SIZE > 16384 ? 16384 : SIZE;
    extern __shared__ __align__(128) float stage[];
    __shared__ typename Head::Shared shared;
    __shared__ u64 barrier;
    const u32 full = shared_address(&barrier);
    const int items = min(a.heads, int(*a.count) * a.value_heads);
    const u64 policy = read_once();
    const auto old = [&](int item) {  // null: there is nothing yet
        const int row = item / a.value_heads;
        return item < items && a.done[row] ? a.state + (a.source[row] * a.value_heads + item - row * a.value_heads) * (DK * DV)
                                           : nullptr;
    };
    const auto fetch = [&](const float *from) {  // by one thread
        expect_bytes(full, from ? SIZE : 0);
        for (int at = 0; from && at < SIZE; at += CHUNK)
            bulk_copy(shared_address(stage) + at, (const char *)from + at, CHUNK, full, policy);
    };
    if (threadIdx.x == 0) {
        init_barrier(full, 1);
        publish_barriers();
        fetch(old(blockIdx.x));
    }
    launch_dependents();
    __syncthreads();
    if (blockIdx.x >= items) return wait();
    for (int n = 0, item = blockIdx.x; item < items; ++n, item += gridDim.x) {
        Head g(a, shared, item, 0);
        const float *following = threadIdx.x == 0 ? old(item + gridDim.x) : nullptr;
        g.run(n == 0, g.state(g.target), [&] {
            await_barrier(full, n & 1);
#pragma unroll
            for (int i = 0; i < Head::ROWS; ++i)
                g.s[i] = g.done ? *(const float4 *)(stage + g.place() + i * Head::GROUPS * DV) : make_float4(0, 0, 0, 0);
            __syncthreads();
            if (threadIdx.x == 0 && item + gridDim.x < items) fetch(following);
        });
        __syncthreads();
    }
}
