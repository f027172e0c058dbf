// Attention over paged K/V for decode rows, with split contexts. Page p of a row belongs to part p mod parts, whatever the
// length of the row. A block computes one part for a token and K/V head. The last block to end merges the parts in their order,
// so that a token's sums have one order. In a row of several tokens, each token has its own blocks, which compute the new keys
// and values before it themselves.

enum { kGated = 1, kNormed = 2, kBiased = 4 };  // features of attention layers; FORM combines them

struct Attention {
    const void *proj;    // [T, stride]: per head query and, if kGated, gate; then keys, then values
    const float *query_norm, *key_norm;  // [D]; null unless kNormed
    const float *bias;   // [stride], added to the projections; null unless kBiased
    const float *turns;  // [T, rotary]: rotary / 2 cosines, then rotary / 2 sines
    u16 *keys, *values;  // [pages, PAGE, kv_heads, D] of type KV
    float *mixed;        // [T, heads, parts, D]: each part's output, not divided by its mass
    float *mass;         // [T, heads, parts, 2]: each part's highest score and its mass (softmax denominator)
    u16 *y;              // [T, heads * D]
    int *ended;          // [T, kv_heads]: parts that have ended; zero before and after the kernel
    const i64 *count, *starts, *done, *pages;
    float eps;
    int heads, kv_heads, stride, rotary, width, parts;  // width: pages per row of the table. parts: a power
                                                         // of 2, at most 64; not 1 if rows have several tokens (at most 16)
};

// Loads a lane's elements of a head vector. bias: of these elements, added if kBiased.
template <int FORM, int N, class In> DEVICE void load_head(float (&v)[N], const In *from, const float *bias) {
    load_all<N>(v, from);
    if constexpr (FORM & kBiased) {
        float b[N];
        load_all<N>(b, bias);
#pragma unroll
        for (int i = 0; i < N; ++i) v[i] += b[i];
    }
}
// Loads a head vector, norms it if kNormed, and applies the rotary embedding. A lane has elements lane * D / 32 ...; they all
// lie in one half of the rotary dimensions, or behind them. buffer: D floats, the warp's own.
template <int D, int FORM, class In>
DEVICE void turn(float (&v)[D / 32], const In *from, const float *bias, const float *norm, const float *turns, int rotary,
                 float eps, float *buffer) {
    constexpr int N = D / 32;
    const int first = (threadIdx.x & 31) * N, half = rotary / 2;
    load_head<FORM>(v, from + first, bias + first);
    if constexpr (FORM & kNormed) {
        float scale[N], sum = 0;
        load_all<N>(scale, norm + first);
#pragma unroll
        for (int i = 0; i < N; ++i) sum += v[i] * v[i];
        const float factor = rsqrtf(warp_sum(sum) / D + eps);
#pragma unroll
        for (int i = 0; i < N; ++i) v[i] *= factor * scale[i];
    }
#pragma unroll
    for (int i = 0; i < N; ++i) buffer[first + i] = v[i];
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

// SHARE: queries per K/V head. In: type of the projections. KV: type of keys and values in the pages, as in kv.cuh. WIDTH:
// columns of a query and its gate. TURN: numbers that a block processes at once, four per thread.
template <int D, int SHARE, class In, class KV, int FORM> struct Attend {
    static constexpr int WARPS = 8, N = D / 32, WIDTH = FORM & kGated ? 2 * D : D, TURN = WARPS * 128;
    static constexpr bool INT4 = IS_INT4<KV>;
    typedef typename Stored<D, KV>::Key Key;
    typedef typename Stored<D, KV>::Value Value;
    struct alignas(16) Shared {
        float query[SHARE][D], buffers[WARPS][SHARE < 3 ? 3 : SHARE][D], top[WARPS][SHARE], weight[WARPS][SHARE];
        float share[SHARE][64];
        int last;
    };
    const Attention &a;
    Shared &m;
    int part, kv, token, start, done, position, all, tid, warp, lane;  // all: number of the token's parts
    bool active;
    const i64 *table;

    DEVICE Attend(const Attention &args, Shared &shared, int item) : a(args), m(shared) {
        tid = threadIdx.x, warp = tid >> 5, lane = tid & 31;
        part = item & (a.parts - 1);
        const int rest = item / a.parts, rows = int(*a.count);
        token = rest / a.kv_heads, kv = rest - token * a.kv_heads;
        const int found = row_of(a.starts, rows, token), row = min(found, rows - 1);
        start = int(a.starts[row]), done = int(a.done[row]), position = done + token - start;
        table = a.pages + i64(row) * a.width;
        active = found < rows && part * PAGE <= position;
        all = min(a.parts, position / PAGE + 1);
    }
    DEVICE i64 page_of(int page) const { return page * PAGE <= position ? table[page] : 0; }
    DEVICE i64 place(i64 page, int position) const {
        return ((page * PAGE + position % PAGE) * a.kv_heads + kv) * D + lane * N;
    }
    // Index of the lane's element i of a query in shared memory. 16 bytes of all lanes lie side by side: no bank conflicts.
    DEVICE int own_query(int i) const { return N <= 4 ? lane * N + i : i / 4 * 128 + lane * 4 + i % 4; }
    DEVICE KV *keys() const { return (KV *)a.keys; }
    DEVICE KV *values() const { return (KV *)a.values; }
    DEVICE const In *input(int token) const { return (const In *)a.proj + i64(token) * a.stride; }
    // The token's last page in this part; the first of the warp's two positions in a page.
    DEVICE int last_page() const { return position / PAGE - ((position / PAGE - part) & (a.parts - 1)); }
    DEVICE int first_of(int page) const { return page * PAGE + warp * 2; }
    DEVICE bool is_new(int p) const { return p >= done && p <= position; }
    // The warp's own buffer for two new keys and values. Its accumulators overwrite it later.
    DEVICE u32 *fresh(int h, int value) const {
        return (u32 *)m.buffers[warp][1] + ((h * 2 + value) * 32 + lane) * Key::WORDS;
    }
    // Rounds a new key or value and keeps it in `fresh`. page: stores it there, too, unless negative.
    template <class Kept> DEVICE void keep(int h, int value, float (&v)[N], i64 page, int p) {
        u32 *const to = fresh(h, value);
        Kept kept;
        if constexpr (INT4) rotate<D>(v, lane);
        kept.round(v);
#pragma unroll
        for (int i = 0; i < Kept::WORDS; ++i) to[i] = kept.w[i];
        if (page < 0) return;
        if constexpr (INT4) kept.write((u8 *)(value ? a.values : a.keys), page * PAGE + p % PAGE, kv, a.kv_heads);
        else store_all<N>((value ? values() : keys()) + place(page, p), v);
    }
    // Prepares the token's queries, one per warp, and the new keys and values of this part, two per warp. Only the token's own
    // key and value are stored to the page.
    DEVICE void prepare() {
        const int own = position % PAGE / 2;
        for (int job = (warp - own - 1) & (WARPS - 1); job < SHARE; job += WARPS) {
            float v[N];
            const int column = (kv * SHARE + job) * WIDTH;
            turn<D, FORM>(v, input(token) + column, a.bias + column, a.query_norm, a.turns + token * a.rotary, a.rotary,
                          a.eps, m.buffers[warp][0]);
            if constexpr (INT4) rotate<D>(v, lane);
#pragma unroll
            for (int i = 0; i < N; ++i) m.query[job][own_query(i)] = v[i] * rsqrtf(float(D));
        }
#pragma unroll 1
        for (int h = 0; h < 2; ++h) {
            const int p = first_of(last_page()) + h, other = start + p - done;
            if (!is_new(p)) continue;
            const int column = a.heads * WIDTH + kv * D, value = column + a.kv_heads * D + lane * N;
            const i64 page = p == position ? page_of(p / PAGE) : -1;
            float v[N];
            turn<D, FORM>(v, input(other) + column, a.bias + column, a.key_norm, a.turns + other * a.rotary, a.rotary,
                          a.eps, m.buffers[warp][0]);
            keep<Key>(h, 0, v, page, p);
            load_head<FORM>(v, input(other) + value, a.bias + value);
            keep<Value>(h, 1, v, page, p);
        }
    }
    // Loads the warp's two keys and values of a page; zeros unless earlier steps stored them. where: the page in the pool.
    DEVICE void fetch(int page, i64 where, Key (&key)[2], Value (&value)[2]) {
        const int first = first_of(page);
        if constexpr (INT4) {
            const i64 token = first < done ? where * PAGE + first % PAGE : 0;
#pragma unroll
            for (int h = 0; h < 2; ++h)
                if (first + h < done) {
                    key[h].read((const u8 *)a.keys, token + h, kv, a.kv_heads);
                    value[h].read((const u8 *)a.values, token + h, kv, a.kv_heads);
                } else {
                    key[h].clear(), value[h].clear();
                }
        } else fetch_plain(first, where, key, value);
    }
    DEVICE void fetch_plain(int first, i64 where, Key (&key)[2], Value (&value)[2]) {
        const i64 at = first < done ? place(where, first) : 0;
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const i64 own = at + h * a.kv_heads * D;
            if (first + h < done) key[h].read(keys() + own), value[h].read(values() + own);
            else key[h].clear(), value[h].clear();
        }
    }
    DEVICE void fetch_new(int page, Key (&key)[2], Value (&value)[2]) {
#pragma unroll
        for (int h = 0; h < 2; ++h)
            if (is_new(first_of(page) + h)) key[h].take(fresh(h, 0)), value[h].take(fresh(h, 1));
    }
    // Computes this part of the token's attention.
    DEVICE void attend(Key (&key)[2], Value (&value)[2]) {
        float acc[SHARE][N], best[SHARE], mass[SHARE];
#pragma unroll
        for (int g = 0; g < SHARE; ++g) {
            best[g] = -1e30f, mass[g] = 0;
#pragma unroll
            for (int i = 0; i < N; ++i) acc[g][i] = 0;
        }
        i64 next = page_of(part + a.parts);
        for (int page = part; page * PAGE <= position; page += a.parts) {
            const int first = first_of(page);
            Key next_key[2];
            Value next_value[2];
            fetch(page + a.parts, next, next_key, next_value);
            next = page_of(page + 2 * a.parts);
            if (page + a.parts > position / PAGE) fetch_new(page, key, value);
            if (first <= position) {
                float scores[2 * SHARE];  // of both keys, per query
#pragma unroll
                for (int g = 0; g < SHARE; ++g) {
                    float one = 0, two = 0;
#pragma unroll
                    for (int i = 0; i < N; ++i) {
                        const float q = m.query[g][own_query(i)];
                        one += q * key[0].at(i), two += q * key[1].at(i);
                    }
                    if constexpr (INT4) one *= key[0].scale(), two *= key[1].scale();
                    scores[2 * g] = one, scores[2 * g + 1] = two;
                }
                warp_sums(scores);
#pragma unroll
                for (int g = 0; g < SHARE; ++g) {
                    float one = scores[2 * g], two = first == position ? -1e30f : scores[2 * g + 1];
                    const float top = fmaxf(best[g], fmaxf(one, two)), old = __expf(best[g] - top);
                    one = __expf(one - top), two = __expf(two - top);
                    best[g] = top, mass[g] = mass[g] * old + one + two;
                    if constexpr (INT4) one *= value[0].scale(), two *= value[1].scale();
#pragma unroll
                    for (int i = 0; i < N; ++i) acc[g][i] = acc[g][i] * old + one * value[0].at(i) + two * value[1].at(i);
                }
            }
#pragma unroll
            for (int h = 0; h < 2; ++h) key[h] = next_key[h], value[h] = next_value[h];
        }
#pragma unroll
        for (int g = 0; g < SHARE; ++g) {
            if (lane == 0) m.top[warp][g] = best[g], m.weight[warp][g] = mass[g];
#pragma unroll
            for (int i = 0; i < N; ++i) m.buffers[warp][g][lane * N + i] = acc[g][i];
        }
        __syncthreads();
        for (int o = tid * 4; o < SHARE * D; o += TURN) {
            const int g = o / D, d = o % D;
            float high = m.top[0][g], sum[4] = {}, total = 0;
#pragma unroll
            for (int w = 1; w < WARPS; ++w) high = fmaxf(high, m.top[w][g]);
#pragma unroll
            for (int w = 0; w < WARPS; ++w) {
                const float share = __expf(m.top[w][g] - high);
                add(sum, share, *(const float4 *)&m.buffers[w][g][d]), total += share * m.weight[w][g];
            }
            if (all == 1) {
                float gate[4] = {};
                load_gate(gate, g, d);
#pragma unroll
                for (int i = 0; i < 4; ++i) sum[i] *= 1.f / total;
                settle(g, d, sum, gate);
                continue;
            }
            const i64 at = (i64(token) * a.heads + kv * SHARE + g) * a.parts + part;
            store4(a.mixed + at * D + d, make_float4(sum[0], sum[1], sum[2], sum[3]));
            if (d == 0) a.mass[at * 2] = high, a.mass[at * 2 + 1] = total;
        }
        if (all == 1) finish_rotated();
    }
    static DEVICE void add(float (&sum)[4], float share, float4 v) {
        sum[0] += share * v.x, sum[1] += share * v.y, sum[2] += share * v.z, sum[3] += share * v.w;
    }
    DEVICE void load_gate(float (&gate)[4], int g, int d) const {
        const int column = (kv * SHARE + g) * WIDTH + D + d;
        if constexpr (FORM & kGated) load_head<FORM>(gate, input(token) + column, a.bias + column);
    }
    // Gates and writes four columns of a query's output.
    DEVICE void finish(int g, int d, const float (&sum)[4], const float (&gate)[4]) {
        float v[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) v[i] = FORM & kGated ? sum[i] * sigmoid(gate[i]) : sum[i];
        store_all<4>(a.y + i64(token) * (a.heads * D) + (kv * SHARE + g) * D + d, v);
    }
    // Four columns of a query's output over all parts. Int4: they replace the query until `finish_rotated`.
    DEVICE void settle(int g, int d, const float (&sum)[4], const float (&gate)[4]) {
        if constexpr (INT4) *(float4 *)&m.query[g][d] = make_float4(sum[0], sum[1], sum[2], sum[3]);
        else finish(g, d, sum, gate);
    }
    // Rotates the outputs back and writes them, one warp per query.
    DEVICE void finish_rotated() {
        if constexpr (INT4) {
            __syncthreads();
            for (int g = warp; g < SHARE; g += WARPS) {
                const int head = kv * SHARE + g;
                float v[N], gate[N];
                const int column = head * WIDTH + D + lane * N;
                if constexpr (FORM & kGated) load_head<FORM>(gate, input(token) + column, a.bias + column);
#pragma unroll
                for (int i = 0; i < N; ++i) v[i] = m.query[g][lane * N + i];
                rotate_back<D>(v, lane);
#pragma unroll
                for (int i = 0; i < N; ++i) v[i] = FORM & kGated ? v[i] * sigmoid(gate[i]) : v[i];
                store_all<N>(a.y + i64(token) * (a.heads * D) + head * D + lane * N, v);
            }
        }
    }
    // The block that ends last for a token and K/V head merges all parts.
    DEVICE void join() {
        const int own = tid * 4;
        float gate[4] = {};
        if (own < SHARE * D) load_gate(gate, own / D, own % D);
        __syncthreads();
        int *const ended = a.ended + token * a.kv_heads + kv;
        if (tid == 0) m.last = count_up(ended) == all - 1;
        __syncthreads();
        if (!m.last) return;
        if (tid == 0) *ended = 0;
        const i64 at = (i64(token) * a.heads + kv * SHARE) * a.parts;
        constexpr int AHEAD = 16;
        float4 found[AHEAD];
        const auto read = [&](int o, int from) {  // loads AHEAD parts
            const float *const first = a.mixed + (at + o / D * a.parts + from) * D + o % D;
#pragma unroll
            for (int p = 0; p < AHEAD; ++p)
                found[p] = o < SHARE * D && from + p < all ? load4(first + p * D) : make_float4(0, 0, 0, 0);
        };
        read(own, 0);
#pragma unroll 1
        for (int g = warp; g < SHARE; g += WARPS) {  // weights of the parts
            const float *mass = a.mass + (at + g * a.parts) * 2;
            float top[2], own[2], high = -1e30f;
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const int p = lane + 32 * i;
                const float2 m = p < all ? __ldcg((const float2 *)mass + p) : make_float2(-1e30f, 0);
                top[i] = m.x, own[i] = m.y, high = fmaxf(high, m.x);
            }
#pragma unroll
            for (int i = 16; i; i >>= 1) high = fmaxf(high, __shfl_xor_sync(~0u, high, i));
#pragma unroll
            for (int i = 0; i < 2; ++i) top[i] = __expf(top[i] - high);
            const float whole = 1.f / warp_sum(top[0] * own[0] + top[1] * own[1]);
#pragma unroll
            for (int i = 0; i < 2; ++i) m.share[g][lane + 32 * i] = top[i] * whole;
        }
        __syncthreads();
        for (int o = own; o < SHARE * D; o += TURN) {
            const int g = o / D, d = o % D;
            float sum[4] = {};
            if (o >= TURN) load_gate(gate, g, d);
#pragma unroll 1
            for (int from = 0; from < all; from += AHEAD) {
                if (from || o >= TURN) read(o, from);
#pragma unroll
                for (int p = 0; p < AHEAD; ++p) add(sum, m.share[g][from + p], found[p]);
            }
            settle(g, d, sum, gate);
        }
        finish_rotated();
    }
    DEVICE void run() {
        Key key[2];
        Value value[2];
        if (active) fetch(part, page_of(part), key, value);  // K/V of earlier steps may be read before `wait`
        if (FORM & kNormed && tid * 32 < D) prefetch(a.query_norm + tid * 32), prefetch(a.key_norm + tid * 32);
        wait();
        if (!active) return;
        prepare();
        __syncthreads();
        attend(key, value);
        if (all > 1) join();
    }
};

// Grid [parts * kv_heads * T or more], 256 threads.
template <int D, int SHARE, class In, class KV, int FORM> DEVICE void attention(const Attention &a) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    __shared__ typename Attend<D, SHARE, In, KV, FORM>::Shared shared;
#else  // static shared memory is limited to 48 KB; more is dynamic, set at launch (kernel_config.py)
    extern __shared__ __align__(16) char room[];
    auto &shared = *(typename Attend<D, SHARE, In, KV, FORM>::Shared *)room;
#endif
    launch_dependents();
    Attend<D, SHARE, In, KV, FORM>(a, shared, blockIdx.x).run();
}
