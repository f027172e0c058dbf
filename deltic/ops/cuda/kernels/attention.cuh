// Gated attention over paged K/V for rows that decode, in two kernels: parts of the context, then their join. Page p of a
// row belongs to part p mod parts, whatever the row's length, so a token's sums have one order.

struct Attention {
    const void *proj;    // [T, stride]: per head query and gate, then keys, then values
    const float *query_norm, *key_norm;
    const float *turns;  // [T, rotary]: cosines, then sines, of half the rotary dimensions each
    u16 *keys, *values;  // [pages, PAGE, kv_heads, D]
    float *mixed;        // [T, heads, parts, D]: not divided by the part's mass
    float *mass;         // [T, heads, parts, 2]: the part's highest score, its mass
    u16 *y;              // [T, heads * D]
    const i64 *count, *starts, *done, *pages;
    float eps;
    int heads, kv_heads, stride, rotary, width, parts;  // width: pages of a row in the table
};

// A head's vector, normalised and rotated: lane has elements lane * D / 32 ... buffer: D floats of the warp's own.
template <int D, class In> DEVICE void turn(float (&v)[D / 32], const In *from, const float *norm, const float *turns,
                                            int rotary, float eps, float *buffer) {
    constexpr int N = D / 32;
    const int lane = threadIdx.x & 31, half = rotary / 2;
    float sum = 0;
#pragma unroll
    for (int i = 0; i < N; ++i) v[i] = load(from + lane * N + i), sum += v[i] * v[i];
    const float factor = rsqrtf(warp_sum(sum) / D + eps);
#pragma unroll
    for (int i = 0; i < N; ++i) v[i] *= factor * __ldg(norm + lane * N + i), buffer[lane * N + i] = v[i];
    __syncwarp();
#pragma unroll
    for (int i = 0; i < N; ++i) {
        const int e = lane * N + i;
        if (e < half) v[i] = v[i] * load(turns + e) - buffer[e + half] * load(turns + half + e);
        else if (e < rotary) v[i] = v[i] * load(turns + e - half) + buffer[e - half] * load(turns + e);
    }
    __syncwarp();
}

template <int N> struct Vector;
template <> struct Vector<8> {
    uint4 v;
    DEVICE void read(const u16 *p) { v = __ldcg((const uint4 *)p); }
    DEVICE float at(int i) const { u32 w = i < 2 ? v.x : i < 4 ? v.y : i < 6 ? v.z : v.w; return i & 1 ? high(w) : low(w); }
};
template <> struct Vector<4> {
    uint2 v;
    DEVICE void read(const u16 *p) { v = __ldcg((const uint2 *)p); }
    DEVICE float at(int i) const { u32 w = i < 2 ? v.x : v.y; return i & 1 ? high(w) : low(w); }
};
template <> struct Vector<2> {
    u32 v;
    DEVICE void read(const u16 *p) { v = __ldcg((const u32 *)p); }
    DEVICE float at(int i) const { return i & 1 ? high(v) : low(v); }
};

template <int D, int SHARE, class In> DEVICE void attention_parts(const Attention &a) {
    constexpr int WARPS = 8, N = D / 32;
    __shared__ float query[SHARE][D], buffers[WARPS][SHARE][D], top[WARPS][SHARE], weight[WARPS][SHARE];
    launch_dependents();
    const int part = blockIdx.x, kv = blockIdx.y, row = blockIdx.z, tid = threadIdx.x, warp = tid >> 5, lane = tid & 31;
    if (row >= *a.count) return;
    const int start = int(a.starts[row]), tokens = int(a.starts[row + 1]) - start, done = int(a.done[row]);
    if (part * PAGE >= done + tokens) return;
    const i64 *table = a.pages + i64(row) * a.width;
    const i64 step = i64(a.kv_heads) * D;
    wait();
    for (int token = warp; token < tokens; token += WARPS) {  // the new keys and values of this part's pages
        const int position = done + token;
        if (position / PAGE % a.parts != part) continue;
        const In *from = (const In *)a.proj + i64(start + token) * a.stride + i64(a.heads) * 2 * D + kv * D;
        const i64 to = (table[position / PAGE] * PAGE + position % PAGE) * step + kv * D + lane * N;
        float v[N];
        turn<D>(v, from, a.key_norm, a.turns + (start + token) * a.rotary, a.rotary, a.eps, buffers[warp][0]);
#pragma unroll
        for (int i = 0; i < N; ++i) {
            a.keys[to + i] = narrow(v[i]);
            a.values[to + i] = narrow(load(from + a.kv_heads * D + lane * N + i));
        }
    }
    for (int token = 0; token < tokens; ++token) {
        const int position = done + token;
        if (part * PAGE > position) continue;
        __syncthreads();
        for (int g = warp; g < SHARE; g += WARPS) {
            const In *from = (const In *)a.proj + i64(start + token) * a.stride + (kv * SHARE + g) * 2 * D;
            float v[N];
            turn<D>(v, from, a.query_norm, a.turns + (start + token) * a.rotary, a.rotary, a.eps, buffers[warp][0]);
#pragma unroll
            for (int i = 0; i < N; ++i) query[g][lane * N + i] = v[i] * rsqrtf(float(D));
        }
        __syncthreads();
        float q[SHARE][N], acc[SHARE][N], best[SHARE], mass[SHARE];
#pragma unroll
        for (int g = 0; g < SHARE; ++g) {
            best[g] = -1e30f, mass[g] = 0;
#pragma unroll
            for (int i = 0; i < N; ++i) q[g][i] = query[g][lane * N + i], acc[g][i] = 0;
        }
        for (int page = part; page * PAGE <= position; page += a.parts) {
            const i64 first = table[page] * PAGE;
            Vector<N> key[2], value[2];
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const i64 at = (first + warp * 2 + h) * step + kv * D + lane * N;
                if (page * PAGE + warp * 2 + h <= position) key[h].read(a.keys + at), value[h].read(a.values + at);
            }
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                if (page * PAGE + warp * 2 + h > position) break;
#pragma unroll
                for (int g = 0; g < SHARE; ++g) {
                    float score = 0;
#pragma unroll
                    for (int i = 0; i < N; ++i) score += q[g][i] * key[h].at(i);
                    score = warp_sum(score);
                    const float high = fmaxf(best[g], score), old = __expf(best[g] - high), now = __expf(score - high);
                    best[g] = high, mass[g] = mass[g] * old + now;
#pragma unroll
                    for (int i = 0; i < N; ++i) acc[g][i] = acc[g][i] * old + now * value[h].at(i);
                }
            }
        }
#pragma unroll
        for (int g = 0; g < SHARE; ++g) {
            if (lane == 0) top[warp][g] = best[g], weight[warp][g] = mass[g];
#pragma unroll
            for (int i = 0; i < N; ++i) buffers[warp][g][lane * N + i] = acc[g][i];
        }
        __syncthreads();
        for (int o = tid; o < SHARE * D; o += WARPS * 32) {
            const int g = o / D, d = o % D;
            float high = top[0][g], sum = 0, total = 0;
#pragma unroll
            for (int w = 1; w < WARPS; ++w) high = fmaxf(high, top[w][g]);
#pragma unroll
            for (int w = 0; w < WARPS; ++w) {
                const float share = __expf(top[w][g] - high);
                sum += share * buffers[w][g][d], total += share * weight[w][g];
            }
            const i64 at = (i64(start + token) * a.heads + kv * SHARE + g) * a.parts + part;
            a.mixed[at * D + d] = sum;
            if (d == 0) a.mass[at * 2] = high, a.mass[at * 2 + 1] = total;
        }
    }
}

// One block of D threads for each head of a token.
template <int D, class In> DEVICE void attention_join(const Attention &a) {
    launch_dependents();
    const int head = blockIdx.x, token = blockIdx.y, d = threadIdx.x;
    const int row = row_of(a.starts, token);
    if (row >= *a.count) return;
    const int parts = min(a.parts, int(a.done[row] + token - a.starts[row]) / PAGE + 1);
    wait();
    const i64 at = (i64(token) * a.heads + head) * a.parts;
    const float gate = load((const In *)a.proj + i64(token) * a.stride + head * 2 * D + D + d);
    float high = -1e30f, sum = 0, total = 0;
#pragma unroll 8
    for (int p = 0; p < parts; ++p) high = fmaxf(high, load(a.mass + (at + p) * 2));
#pragma unroll 8
    for (int p = 0; p < parts; ++p) {
        const float share = __expf(load(a.mass + (at + p) * 2) - high);
        sum += share * load(a.mixed + (at + p) * D + d), total += share * load(a.mass + (at + p) * 2 + 1);
    }
    a.y[i64(token) * (a.heads * D) + head * D + d] = narrow(sum / total * sigmoid(gate));
}
