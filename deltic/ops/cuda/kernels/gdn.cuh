// The core of a Gated DeltaNet layer for rows that decode: convolution, gates, delta rule, gated norm. A block has one
// value head of one row, its state [DK, DV] in registers, loaded before the kernel waits for the projections.

struct Gdn {
    const void *proj;    // [T, stride]: q, k, v (the convolved channels), z, b, a
    const u16 *conv;     // [C, 4]
    const float *decay, *dt_bias, *norm;
    float *state;        // [slots, Hv, DK, DV]
    u16 *ring;           // [slots, 4, C]
    u16 *y;              // [T, Hv * DV]
    const i64 *count, *starts, *done, *source, *target;
    float eps;
    int key_heads, value_heads, stride, tiled, items;
};

template <int DK, int DV> struct GdnShape {
    static constexpr int COLUMNS = DV / 4, THREADS = DK * DV >= 16384 ? 512 : 128, GROUPS = THREADS / COLUMNS,
                         ROWS = DK / GROUPS, WARPS = THREADS / 32;
    static_assert(DK % GROUPS == 0 && 2 * DK + DV <= THREADS && 2 * DV <= THREADS, "the block does not fit the head");
};

// One value head of one row. first: nothing was waited for yet.
template <int DK, int DV, class In> DEVICE void gdn_head(const Gdn &a, int head, int row, bool first) {
    using Shape = GdnShape<DK, DV>;
    __shared__ float query[DK], key[DK], value[DV], parts[2][Shape::GROUPS][DV], sums[2][DV], red[Shape::WARPS];
    const int tid = threadIdx.x, warp = tid >> 5, lane = tid & 31;
    const i64 count = *a.count, source = a.source[row], target = a.target[row];
    const int start = int(a.starts[row]), tokens = int(a.starts[row + 1]) - start, done = int(a.done[row]);
    if (row >= count) {
        if (first) wait();
        return;
    }
    const int share = a.value_heads / a.key_heads, from = a.tiled ? head % a.key_heads : head / share;
    const bool leads = a.tiled ? head < a.key_heads : head % share == 0;
    const int keys = a.key_heads * DK, channels = 2 * keys + a.value_heads * DV;
    u16 *const old_ring = a.ring + source * 4 * channels, *const ring = a.ring + target * 4 * channels;

    const int column = tid % Shape::COLUMNS, group = tid / Shape::COLUMNS;
    float4 s[Shape::ROWS];
    const float *old = a.state + ((source * a.value_heads + head) * DK) * DV + column * 4;
#pragma unroll
    for (int i = 0; i < Shape::ROWS; ++i)
        s[i] = done ? load4(old + (group + i * Shape::GROUPS) * DV) : make_float4(0, 0, 0, 0);
    const bool mixes = tid < 2 * DK + DV, writes = mixes && (tid >= 2 * DK || leads);
    const int channel = tid < DK ? from * DK + tid : tid < 2 * DK ? keys + from * DK + tid - DK
                                                                  : 2 * keys + head * DV + tid - 2 * DK;
    float history[3] = {0, 0, 0};
    uint2 taps = make_uint2(0, 0);
    if (mixes) {
        taps = __ldg((const uint2 *)a.conv + channel);
#pragma unroll
        for (int i = 0; i < 3; ++i)
            if (done - 3 + i >= 0)
                history[i] = load(old_ring + ((done - 3 + i) & 3) * channels + channel);
    }
    const float rate = __ldg(a.decay + head), bias = __ldg(a.dt_bias + head);
    const float scale = tid < DV ? __ldg(a.norm + tid) : 0.f;
    if (first) wait();
    for (int token = 0; token < tokens; ++token) {
        const In *proj = (const In *)a.proj + i64(start + token) * a.stride;
        float x = 0, gate = 0;
        const float b = load(proj + channels + a.value_heads * DV + head);
        const float raw_decay = load(proj + channels + a.value_heads * DV + a.value_heads + head);
        if (tid < DV) gate = load(proj + channels + head * DV + tid);
        if (mixes) {
            const u16 raw = narrow(load(proj + channel));
            x = silu(low(taps.x) * history[0] + high(taps.x) * history[1] + low(taps.y) * history[2] +
                     high(taps.y) * wide(raw));
            history[0] = history[1], history[1] = history[2], history[2] = wide(raw);
            if (writes && source == target && token + 4 >= tokens)
                ring[((done + token) & 3) * channels + channel] = raw;
            (tid < DK ? query[tid] : tid < 2 * DK ? key[tid - DK] : value[tid - 2 * DK]) = x;
        }
        const float square = warp_sum(x * x);
        if (lane == 0) red[warp] = square;
        __syncthreads();
        float query_square = 0, key_square = 0, dot = 0;
#pragma unroll
        for (int i = 0; i < DK / 32; ++i) {
            query_square += red[i], key_square += red[DK / 32 + i];
            dot += query[lane + 32 * i] * key[lane + 32 * i];
        }
        const float query_factor = rsqrtf(query_square + 1e-6f) * rsqrtf(float(DK)), key_factor = rsqrtf(key_square + 1e-6f);
        dot = warp_sum(dot) * query_factor * key_factor;
        float4 k4 = make_float4(0, 0, 0, 0), q4 = k4;
#pragma unroll
        for (int i = 0; i < Shape::ROWS; ++i) {
            const float k = key[group + i * Shape::GROUPS] * key_factor, q = query[group + i * Shape::GROUPS] * query_factor;
            k4.x += k * s[i].x, k4.y += k * s[i].y, k4.z += k * s[i].z, k4.w += k * s[i].w;
            q4.x += q * s[i].x, q4.y += q * s[i].y, q4.z += q * s[i].z, q4.w += q * s[i].w;
        }
        *(float4 *)&parts[0][group][column * 4] = k4;
        *(float4 *)&parts[1][group][column * 4] = q4;
        __syncthreads();
        if (tid < 2 * DV) {
            float sum = 0;
#pragma unroll
            for (int i = 0; i < Shape::GROUPS; ++i) sum += parts[tid / DV][i][tid % DV];
            sums[tid / DV][tid % DV] = sum;
        }
        __syncthreads();
        const float steep = raw_decay + bias, soft = steep > 20.f ? steep : log1pf(__expf(steep));
        const float keep = __expf(rate * soft), beta = sigmoid(b);
        float output = 0;
        if (tid < DV) output = keep * sums[1][tid] + dot * (beta * (value[tid] - keep * sums[0][tid]));
        const float output_square = warp_sum(output * output);
        if (lane == 0) red[warp] = output_square;
        const float4 v4 = *(const float4 *)&value[column * 4], from_key = *(const float4 *)&sums[0][column * 4];
        const float4 u = make_float4(beta * (v4.x - keep * from_key.x), beta * (v4.y - keep * from_key.y),
                                     beta * (v4.z - keep * from_key.z), beta * (v4.w - keep * from_key.w));
#pragma unroll
        for (int i = 0; i < Shape::ROWS; ++i) {
            const float k = key[group + i * Shape::GROUPS] * key_factor;
            s[i] = make_float4(__fmaf_rn(k, u.x, keep * s[i].x), __fmaf_rn(k, u.y, keep * s[i].y),
                               __fmaf_rn(k, u.z, keep * s[i].z), __fmaf_rn(k, u.w, keep * s[i].w));
        }
        __syncthreads();
        if (tid < DV) {
            float mean = 0;
#pragma unroll
            for (int i = 0; i < DV / 32; ++i) mean += red[i];
            a.y[i64(start + token) * (a.value_heads * DV) + head * DV + tid] =
                narrow(output * rsqrtf(mean / DV + a.eps) * scale * silu(gate));
        }
        if (token + 1 < tokens) __syncthreads();
    }
    float *now = a.state + ((target * a.value_heads + head) * DK) * DV + column * 4;
#pragma unroll
    for (int i = 0; i < Shape::ROWS; ++i) store4(now + (group + i * Shape::GROUPS) * DV, s[i]);
    if (writes && (source != target || !done)) {  // the places that no new input went to
        for (int place = 0; place < 4; ++place) {
            const int position = done + tokens - 1 - ((done + tokens - 1 - place) & 3), at = place * channels + channel;
            if (position < done) ring[at] = done ? __ldcg(old_ring + at) : u16(0);
            else if (source != target)
                ring[at] = narrow(load((const In *)a.proj + i64(start + position - done) * a.stride + channel));
        }
    }
}

// Heads of rows, `items` in all, dealt to the blocks.
template <int DK, int DV, class In> DEVICE void gdn(const Gdn &a) {
    launch_dependents();
    if (blockIdx.x >= a.items) wait();
    for (int item = blockIdx.x; item < a.items; item += gridDim.x) {
        if (item != blockIdx.x) __syncthreads();
        const int row = item / a.value_heads;
        gdn_head<DK, DV, In>(a, item - row * a.value_heads, row, item == blockIdx.x);
    }
}
