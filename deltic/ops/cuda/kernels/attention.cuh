// Gated attention over paged K/V for rows that decode. Page p of a row belongs to part p mod parts, whatever the row's
// length, and the block that is the last to end a row's parts joins them in their order: a token's sums have one order.

struct Attention {
    const void *proj;    // [T, stride]: per head query and gate, then keys, then values
    const float *query_norm, *key_norm;
    const float *turns;  // [T, rotary]: cosines, then sines, of half the rotary dimensions each
    u16 *keys, *values;  // [pages, PAGE, kv_heads, D]
    float *mixed;        // [T, heads, parts, D]: not divided by the part's mass
    float *mass;         // [T, heads, parts, 2]: the part's highest score, its mass
    u16 *y;              // [T, heads * D]
    int *ended;          // [rows, kv_heads]: parts that have ended; zero before and after
    const i64 *count, *starts, *done, *pages;
    float eps;
    int heads, kv_heads, stride, rotary, width, parts, items;  // width: pages of a row in the table; parts: a power of 2
};

// A head's vector, normalised and rotated: lane has elements lane * D / 32 ... buffer: D floats of the warp's own. The
// lane's elements lie all in one half of the rotated ones, or behind.
template <int D, class In> DEVICE void turn(float (&v)[D / 32], const In *from, const float *norm, const float *turns,
                                            int rotary, float eps, float *buffer) {
    constexpr int N = D / 32;
    const int first = (threadIdx.x & 31) * N, half = rotary / 2;
    float scale[N], sum = 0;
    load_all<N>(v, from + first);
    load_all<N>(scale, norm + first);
#pragma unroll
    for (int i = 0; i < N; ++i) sum += v[i] * v[i];
    const float factor = rsqrtf(warp_sum(sum) / D + eps);
#pragma unroll
    for (int i = 0; i < N; ++i) v[i] *= factor * scale[i], buffer[first + i] = v[i];
    __syncwarp();
    if (first < rotary) {
        const bool second = first >= half;
        float cosine[N], sine[N];
        load_all<N>(cosine, turns + first - (second ? half : 0));
        load_all<N>(sine, turns + first + (second ? 0 : half));
#pragma unroll
        for (int i = 0; i < N; ++i) {
            const float other = buffer[second ? first + i - half : first + i + half];
            v[i] = v[i] * cosine[i] + (second ? other : -other) * sine[i];
        }
    }
    __syncwarp();
}

template <int N> struct Vector {
    u32 w[N / 2];
    DEVICE void read(const u16 *p) { load_words<N>(w, p); }
    DEVICE float at(int i) const { return i & 1 ? high(w[i / 2]) : low(w[i / 2]); }
};

template <int D, int SHARE, class In> struct Attend {
    static constexpr int WARPS = 8, N = D / 32;
    struct Shared {
        float query[SHARE][D], buffers[WARPS][SHARE][D], top[WARPS][SHARE], weight[WARPS][SHARE];
        float share[SHARE][64];
        int last;
    };
    const Attention &a;
    Shared &m;
    int part, kv, row, start, tokens, done, tid, warp, lane;
    const i64 *table;

    DEVICE Attend(const Attention &args, Shared &shared, int item) : a(args), m(shared) {
        tid = threadIdx.x, warp = tid >> 5, lane = tid & 31;
        part = item & (a.parts - 1);
        const int rest = item / a.parts;
        row = rest / a.kv_heads, kv = rest - row * a.kv_heads;
        start = int(a.starts[row]), tokens = int(a.starts[row + 1]) - start, done = int(a.done[row]);
        table = a.pages + i64(row) * a.width;
        if (row >= *a.count || part * PAGE >= done + tokens) tokens = 0;
    }
    DEVICE i64 place(int position) const {
        return ((table[position / PAGE] * PAGE + position % PAGE) * a.kv_heads + kv) * D + lane * N;
    }
    // The queries of a token, and its key and value if this part has them: a warp for each.
    DEVICE void prepare(int token) {
        const int position = done + token;
        const bool mine = (position / PAGE & (a.parts - 1)) == part;
        const In *from = (const In *)a.proj + i64(start + token) * a.stride;
        const float *turns = a.turns + (start + token) * a.rotary;
        for (int job = warp; job < SHARE + (mine ? 2 : 0); job += WARPS) {
            float v[N];
            if (job < SHARE) {
                turn<D>(v, from + (kv * SHARE + job) * 2 * D, a.query_norm, turns, a.rotary, a.eps, m.buffers[warp][0]);
#pragma unroll
                for (int i = 0; i < N; ++i) m.query[job][lane * N + i] = v[i] * rsqrtf(float(D));
                continue;
            }
            const In *raw = from + a.heads * 2 * D + kv * D;
            u16 *to = (job == SHARE ? a.keys : a.values) + place(position);
            if (job == SHARE) turn<D>(v, raw, a.key_norm, turns, a.rotary, a.eps, m.buffers[warp][0]);
            else load_all<N>(v, raw + a.kv_heads * D + lane * N);
            store_all<N>(to, v);
        }
    }
    // This part's share of one token's attention.
    DEVICE void attend(int token, Vector<N> (&key)[2], Vector<N> (&value)[2]) {
        const int position = done + token;
        float acc[SHARE][N], best[SHARE], mass[SHARE];
#pragma unroll
        for (int g = 0; g < SHARE; ++g) {
            best[g] = -1e30f, mass[g] = 0;
#pragma unroll
            for (int i = 0; i < N; ++i) acc[g][i] = 0;
        }
        for (int page = part; page * PAGE <= position; page += a.parts) {
            const int first = page * PAGE + warp * 2;
            const i64 at = first <= position ? place(first) : 0;
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const bool known = token == 0 && page == part && first + h < done;
                if (first + h <= position && !known)
                    key[h].read(a.keys + at + h * a.kv_heads * D), value[h].read(a.values + at + h * a.kv_heads * D);
            }
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                if (first + h > position) break;
#pragma unroll
                for (int g = 0; g < SHARE; ++g) {
                    float score = 0;
#pragma unroll
                    for (int i = 0; i < N; ++i) score += m.query[g][lane * N + i] * key[h].at(i);
                    score = warp_sum(score);
                    const float top = fmaxf(best[g], score), old = __expf(best[g] - top), now = __expf(score - top);
                    best[g] = top, mass[g] = mass[g] * old + now;
#pragma unroll
                    for (int i = 0; i < N; ++i) acc[g][i] = acc[g][i] * old + now * value[h].at(i);
                }
            }
        }
#pragma unroll
        for (int g = 0; g < SHARE; ++g) {
            if (lane == 0) m.top[warp][g] = best[g], m.weight[warp][g] = mass[g];
#pragma unroll
            for (int i = 0; i < N; ++i) m.buffers[warp][g][lane * N + i] = acc[g][i];
        }
        __syncthreads();
        for (int o = tid; o < SHARE * D; o += WARPS * 32) {
            const int g = o / D, d = o % D;
            float high = m.top[0][g], sum = 0, total = 0;
#pragma unroll
            for (int w = 1; w < WARPS; ++w) high = fmaxf(high, m.top[w][g]);
#pragma unroll
            for (int w = 0; w < WARPS; ++w) {
                const float share = __expf(m.top[w][g] - high);
                sum += share * m.buffers[w][g][d], total += share * m.weight[w][g];
            }
            const i64 at = (i64(start + token) * a.heads + kv * SHARE + g) * a.parts + part;
            a.mixed[at * D + d] = sum;
            if (d == 0) a.mass[at * 2] = high, a.mass[at * 2 + 1] = total;
        }
    }
    // The last block of a row's K/V head joins what all have found.
    DEVICE void join() {
        const int all = min(a.parts, (done + tokens - 1) / PAGE + 1);
        __threadfence();
        __syncthreads();
        if (tid == 0) m.last = atomicAdd(a.ended + row * a.kv_heads + kv, 1) == all - 1;
        __syncthreads();
        if (!m.last) return;
        __threadfence();
        if (tid == 0) a.ended[row * a.kv_heads + kv] = 0;
        for (int token = start; token < start + tokens; ++token) {
            const int parts = min(a.parts, (done + token - start) / PAGE + 1);
            const i64 at = (i64(token) * a.heads + kv * SHARE) * a.parts;
            for (int g = warp; g < SHARE; g += WARPS) {  // what each part counts for
                const float *mass = a.mass + (at + g * a.parts) * 2;
                float top[2], own[2], high = -1e30f;
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    const int p = lane + 32 * i;
                    const float2 m = p < parts ? __ldcg((const float2 *)mass + p) : make_float2(-1e30f, 0);
                    top[i] = m.x, own[i] = m.y, high = fmaxf(high, m.x);
                }
#pragma unroll
                for (int i = 16; i; i >>= 1) high = fmaxf(high, __shfl_xor_sync(~0u, high, i));
#pragma unroll
                for (int i = 0; i < 2; ++i) top[i] = __expf(top[i] - high);
                const float total = warp_sum(top[0] * own[0] + top[1] * own[1]);
#pragma unroll
                for (int i = 0; i < 2; ++i) m.share[g][lane + 32 * i] = top[i] / total;
            }
            __syncthreads();
            constexpr int SPLIT = WARPS * 32 / D, EACH = (SHARE + SPLIT - 1) / SPLIT;
            const int d = tid % D, sub = tid / D;
            float sum[EACH];
#pragma unroll
            for (int k = 0; k < EACH; ++k) sum[k] = 0;
#pragma unroll 4
            for (int p = 0; p < parts; ++p)
#pragma unroll
                for (int k = 0; k < EACH; ++k)
                    if (const int g = sub + k * SPLIT; g < SHARE)
                        sum[k] += m.share[g][p] * load(a.mixed + (at + g * a.parts + p) * D + d);
#pragma unroll
            for (int k = 0; k < EACH; ++k)
                if (const int g = sub + k * SPLIT; g < SHARE) {
                    const int head = kv * SHARE + g;
                    const float gate = load((const In *)a.proj + i64(token) * a.stride + head * 2 * D + D + d);
                    a.y[i64(token) * (a.heads * D) + head * D + d] = narrow(sum[k] * sigmoid(gate));
                }
            __syncthreads();
        }
    }
    DEVICE void run(bool first) {
        Vector<N> key[2], value[2];
        if (tokens) {  // what earlier steps have stored can be read at once
            const int from = part * PAGE + warp * 2;
            const i64 at = from < done ? place(from) : 0;
#pragma unroll
            for (int h = 0; h < 2; ++h)
                if (from + h < done)
                    key[h].read(a.keys + at + h * a.kv_heads * D), value[h].read(a.values + at + h * a.kv_heads * D);
        }
        if (first) wait();
        for (int token = 0; token < tokens; ++token) {
            if (part * PAGE > done + token) continue;
            __syncthreads();
            prepare(token);
            __syncthreads();
            attend(token, key, value);
        }
        if (tokens) join();
    }
};

// Parts of K/V heads of rows, `items` in all, dealt to blocks of 256 threads.
template <int D, int SHARE, class In> DEVICE void attention(const Attention &a) {
    __shared__ typename Attend<D, SHARE, In>::Shared shared;
    launch_dependents();
    if (blockIdx.x >= a.items) wait();
    for (int item = blockIdx.x; item < a.items; item += gridDim.x)
        Attend<D, SHARE, In>(a, shared, item).run(item == blockIdx.x);
}
