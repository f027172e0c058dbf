// The core of a Gated DeltaNet layer for rows that decode: convolution, gates, delta rule, gated norm. A block has BV
// columns of one value head of one row, its part of the state [DK, BV] in registers, loaded before the kernel waits for the
// projections. The blocks of a head are a cluster: they tell each other what the norm needs to know.

struct Gdn {
    const void *proj;    // [T, stride]: q, k, v (the convolved channels), z, b, a
    const u16 *conv;     // [C, 4]
    const float *decay, *dt_bias, *norm;
    float *state;        // [slots, Hv, DK, DV]
    u16 *ring;           // [slots, 4, C]
    u16 *y;              // [T, Hv * DV]
    const i64 *count, *starts, *done, *source, *target;
    float eps;
    int key_heads, value_heads, stride, tiled;
};

// Grid [DV / BV * value heads * rows], clusters of DV / BV blocks of 128 threads.
template <int DK, int DV, int BV, class In> struct GatedDelta {
    static constexpr int THREADS = 128, WARPS = 4, SLICES = DV / BV, COLUMNS = BV / 4, GROUPS = THREADS / COLUMNS,
                         ROWS = DK / GROUPS, CHANNELS = 2 * DK + BV, EACH = (CHANNELS + THREADS - 1) / THREADS;
    static_assert(DK % GROUPS == 0 && DK % 32 == 0 && BV <= 32 && COLUMNS <= 32, "the block does not fit the head");
    struct Shared {
        float parts[WARPS][2][BV], mixed[CHANNELS], red[2 * DK / 32 + EACH * WARPS], squares[2][SLICES];
    };
    const Gdn &a;
    Shared &m;
    int tid, warp, lane, slice, head, row, from, keys, channels, start, tokens, done;
    bool leads;
    float4 s[ROWS];
    float history[EACH][3];
    uint2 taps[EACH];

    DEVICE GatedDelta(const Gdn &args, Shared &shared) : a(args), m(shared) {
        tid = threadIdx.x, warp = tid >> 5, lane = tid & 31;
        const int item = blockIdx.x / SLICES, share = a.value_heads / a.key_heads;
        slice = blockIdx.x % SLICES, row = item / a.value_heads, head = item - row * a.value_heads;
        from = a.tiled ? head % a.key_heads : head / share;
        leads = slice == 0 && (a.tiled ? head < a.key_heads : head % share == 0);
        keys = a.key_heads * DK, channels = 2 * keys + a.value_heads * DV;
        start = int(a.starts[row]), tokens = int(a.starts[row + 1]) - start, done = int(a.done[row]);
    }
    // A thread's i-th convolved channel, as a place in `mixed` and as a channel.
    DEVICE int local(int i) const { return tid + i * THREADS; }
    DEVICE int channel(int i) const {
        const int c = local(i);
        return c < DK ? from * DK + c : c < 2 * DK ? keys + from * DK + c - DK
                                                   : 2 * keys + head * DV + slice * BV + c - 2 * DK;
    }
    DEVICE bool mixes(int i) const { return local(i) < CHANNELS; }
    DEVICE bool writes(int i) const { return mixes(i) && (leads || local(i) >= 2 * DK); }
    DEVICE float *state(i64 slot) const {
        return a.state + ((slot * a.value_heads + head) * DK + tid / COLUMNS) * DV + slice * BV + tid % COLUMNS * 4;
    }
    DEVICE void load_old(i64 source) {
        const float *old = state(source);
        const u64 policy = read_once();
#pragma unroll
        for (int i = 0; i < ROWS; ++i)
            s[i] = done ? load4_once(old + i * GROUPS * DV, policy) : make_float4(0, 0, 0, 0);
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
                x = silu(low(taps[i].x) * history[i][0] + high(taps[i].x) * history[i][1] +
                         low(taps[i].y) * history[i][2] + high(taps[i].y) * wide(raw));
                history[i][0] = history[i][1], history[i][1] = history[i][2], history[i][2] = wide(raw);
                if (ring && writes(i)) ring[(position & 3) * channels + channel(i)] = raw;
                m.mixed[local(i)] = x;
            }
            const float square = warp_sum(x * x);
            if (lane == 0) m.red[i * WARPS + warp] = square;
        }
        __syncthreads();
    }
    // One token, whose inputs are convolved. last: the state is to be stored.
    DEVICE void advance(int token, float raw_beta, float raw_decay, float rate, float gate, float scale, float *last) {
        const float *query = m.mixed, *key = m.mixed + DK, *value = m.mixed + 2 * DK;
        const int column = tid % COLUMNS, group = tid / COLUMNS;
        float query_square = 0, key_square = 0, dot = 0;
#pragma unroll
        for (int i = 0; i < DK / 32; ++i) {
            query_square += m.red[i], key_square += m.red[DK / 32 + i];
            dot += query[lane + 32 * i] * key[lane + 32 * i];
        }
        const float query_factor = rsqrtf(query_square + 1e-6f) * rsqrtf(float(DK)), key_factor = rsqrtf(key_square + 1e-6f);
        dot = warp_sum(dot) * query_factor * key_factor;
        float k4[4] = {}, q4[4] = {};
#pragma unroll
        for (int i = 0; i < ROWS; ++i) {
            const float k = key[group + i * GROUPS] * key_factor, q = query[group + i * GROUPS] * query_factor;
            k4[0] += k * s[i].x, k4[1] += k * s[i].y, k4[2] += k * s[i].z, k4[3] += k * s[i].w;
            q4[0] += q * s[i].x, q4[1] += q * s[i].y, q4[2] += q * s[i].z, q4[3] += q * s[i].w;
        }
#pragma unroll
        for (int c = 0; c < 4; ++c)
#pragma unroll
            for (int other = COLUMNS; other < 32; other <<= 1) {
                k4[c] += __shfl_xor_sync(~0u, k4[c], other);
                q4[c] += __shfl_xor_sync(~0u, q4[c], other);
            }
        if (lane < COLUMNS) {
            *(float4 *)&m.parts[warp][0][lane * 4] = make_float4(k4[0], k4[1], k4[2], k4[3]);
            *(float4 *)&m.parts[warp][1][lane * 4] = make_float4(q4[0], q4[1], q4[2], q4[3]);
        }
        __syncthreads();
        const float steep = raw_decay, soft = steep > 20.f ? steep : log1pf(__expf(steep));
        const float keep = __expf(rate * soft), beta = sigmoid(raw_beta);
        float output = 0;
        if (tid < BV) {
            float from_key = 0, from_query = 0;
#pragma unroll
            for (int w = 0; w < WARPS; ++w) from_key += m.parts[w][0][tid], from_query += m.parts[w][1][tid];
            output = keep * from_query + dot * (beta * (value[tid] - keep * from_key));
        }
        if (warp == 0) {
            const float square = warp_sum(output * output);
            if (SLICES == 1) m.squares[token & 1][0] = square;
            else if (lane < SLICES) store_peer(&m.squares[token & 1][slice], lane, square);
        }
        if (SLICES > 1) arrive_cluster();
        float4 sum = make_float4(0, 0, 0, 0);
#pragma unroll
        for (int w = 0; w < WARPS; ++w) {
            const float4 part = *(const float4 *)&m.parts[w][0][column * 4];
            sum.x += part.x, sum.y += part.y, sum.z += part.z, sum.w += part.w;
        }
        const float4 v = *(const float4 *)&value[column * 4];
        const float4 u = make_float4(beta * (v.x - keep * sum.x), beta * (v.y - keep * sum.y), beta * (v.z - keep * sum.z),
                                     beta * (v.w - keep * sum.w));
#pragma unroll
        for (int i = 0; i < ROWS; ++i) {
            const float k = key[group + i * GROUPS] * key_factor;
            s[i] = make_float4(__fmaf_rn(k, u.x, keep * s[i].x), __fmaf_rn(k, u.y, keep * s[i].y),
                               __fmaf_rn(k, u.z, keep * s[i].z), __fmaf_rn(k, u.w, keep * s[i].w));
            if (last) store4(last + i * GROUPS * DV, s[i]);
        }
        if (SLICES > 1) await_cluster();
        else __syncthreads();
        if (tid < BV) {
            float mean = 0;
#pragma unroll
            for (int i = 0; i < SLICES; ++i) mean += m.squares[token & 1][i];
            a.y[i64(start + token) * (a.value_heads * DV) + head * DV + slice * BV + tid] =
                narrow(output * rsqrtf(mean / DV + a.eps) * scale * silu(gate));
        }
    }
    DEVICE void run() {
        if (row >= *a.count) return wait();
        const i64 source = a.source[row], target = a.target[row];
        load_old(source);
        const float rate = __ldg(a.decay + head), bias = __ldg(a.dt_bias + head);
        const float scale = tid < BV ? __ldg(a.norm + slice * BV + tid) : 0.f;
        u16 *ring = a.ring + target * 4 * channels;
        wait();
        for (int token = 0; token < tokens; ++token) {
            const In *proj = (const In *)a.proj + i64(start + token) * a.stride, *gates = proj + channels + a.value_heads * DV;
            const float raw_beta = load(gates + head), raw_decay = load(gates + a.value_heads + head) + bias;
            const float gate = tid < BV ? load(proj + channels + head * DV + slice * BV + tid) : 0.f;
            convolve(proj, source == target && token + 4 >= tokens ? ring : nullptr, done + token);
            advance(token, raw_beta, raw_decay, rate, gate, scale, token + 1 == tokens ? state(target) : nullptr);
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

template <int DK, int DV, int BV, class In> DEVICE void gdn(const Gdn &a) {
    using Block = GatedDelta<DK, DV, BV, In>;
    __shared__ __align__(16) typename Block::Shared shared;
    launch_dependents();
    Block(a, shared).run();
}
