// y[t, n] = sum of x[t, k] * weight[n, k] for up to 16 tokens: a linear layer of a decode step, near the memory's speed.
//
// A block works on units of ROWS rows of the weight, cut into segments of 1,024 columns. One warp copies segments into a
// ring of slots in shared memory, the first ones before the kernel waits for its input; the copies are asynchronous and
// leave other data in the second-level cache. Eight warps multiply: each has every 8th piece of 64 columns. x is the
// tensor cores' matrix of 16 rows; tokens that do not exist are zeros. The sum over the warps is made in their order. So a
// token's sums have one order, whatever the batch.

struct Product {
    const u16 *weight;   // [rows, K]
    const void *x;       // residual [T, K] float, to be normalised; or [T, K] bf16
    const float *scale;  // [K] of the norm
    void *y;             // kStore: float [T, rows]; kAdd: float [T, rows], added to; kGate: bf16 [T, rows / 2]
    float eps;
    int tokens, rows;
    int whole, rest;   // units of every block; so many blocks have one more
    int group;         // units between two sums over the warps, a multiple of UNITS
    int inverse;       // 65536 / tokens + 1, to divide by
    int slots;         // of the ring, at least UNITS
};
enum { kStore, kAdd, kGate };

template <int K, bool NORM, int OUT, bool MANY, int ROWS, bool DIRECT> struct Multiplier {
    static constexpr int WARPS = 8, UNITS = 2, HALVES = MANY ? 2 : 1, PIECES = K / 64;
    static constexpr int SEGMENT = K < 1024 ? K : 1024, SEGMENTS = (K + 1023) / 1024, LOADS = SEGMENT > 512 ? 4 : 2;
    // rows are 64 bytes further apart than long, so that the four banks' quarters of two rows do not meet
    static constexpr int LINE = SEGMENT * 2 + 64, SLOT = ROWS * LINE, WIDTH = OUT == kGate ? ROWS / 2 : ROWS;
    const Product &a;
    int warp, lane, tid, count, slot = 0, lap = 0;
    u32 full, empty;          // barriers, [slots] each
    char *ring, *xs;          // [slots, ROWS, LINE]; [K / 32, T, 64 bytes]
    float *squares, *partial; // [WARPS, 16]; [2, group, WARPS, T, 8]
    float old = 0;

    DEVICE Multiplier(const Product &args, char *shared) : a(args) {
        tid = threadIdx.x, warp = tid >> 5, lane = tid & 31;
        count = a.whole + (blockIdx.x < a.rest);
        full = (u32)__cvta_generic_to_shared(shared), empty = full + 8 * a.slots;
        squares = (float *)(shared + 512);
        ring = shared + 1024;
        xs = ring + a.slots * SLOT;
        partial = (float *)(xs + (DIRECT ? 0 : K * 2 * a.tokens));
    }
    DEVICE void next() {
        if (++slot == a.slots) slot = 0, lap ^= 1;
    }
    // The copying warp: all segments in the order in which they are multiplied; the first ones need no room to be made.
    DEVICE void copy_all() {
        const u64 policy = read_once();
        const int n = lane, first = min(a.slots, count * SEGMENTS);
        if (lane == 0) {
            for (int i = 0; i < a.slots; ++i) init_barrier(full + 8 * i, 1), init_barrier(empty + 8 * i, WARPS);
            publish_barriers();
        }
        __syncwarp();
        int unit = 0, segment = 0, b = 0;
        for (int e = 0; e < count * SEGMENTS; ++e) {
            if (e == first) begin();
            if (e >= a.slots) await_barrier(empty + 8 * slot, lap ^ 1);
            const int bytes = min(SEGMENT, K - segment * SEGMENT) * 2, at = blockIdx.x + (unit + b) * gridDim.x;
            if (lane == 0) expect_bytes(full + 8 * slot, ROWS * bytes);
            __syncwarp();
            if (n < ROWS) {
                const int row = OUT == kGate ? (n < WIDTH ? at * WIDTH + n : a.rows / 2 + at * WIDTH + n - WIDTH)
                                             : at * ROWS + n;
                bulk_copy((u32)__cvta_generic_to_shared(ring + slot * SLOT + n * LINE),
                          a.weight + i64(min(row, a.rows - 1)) * K + segment * SEGMENT, bytes, full + 8 * slot, policy);
            }
            next();
            if (++b == min(UNITS, count - unit)) {
                b = 0;
                if (++segment == SEGMENTS) segment = 0, unit += UNITS;
            }
        }
        if (first == count * SEGMENTS) begin();
    }
    // All threads: the barriers are there, the first copies are on their way.
    static DEVICE void begin() {
        __syncthreads();
        launch_dependents();
    }
    static DEVICE void meet() { asm volatile("bar.sync 1, 256;" ::: "memory"); }
    DEVICE char *place(int column, int token) const {
        return xs + (column / 32 * a.tokens + token) * 64 + column % 32 * 2;
    }
    // x into shared memory; with a norm, times its scale: what is the same for a whole token is multiplied at the end.
    template <int N> DEVICE void stage_normalised(int token) {
        constexpr int PASSES = (K + 1023) / 1024;
        float4 v[PASSES][N];
#pragma unroll
        for (int p = 0; p < PASSES; ++p)
#pragma unroll
            for (int n = 0; n < N; ++n) {
                const int k = p * 1024 + tid * 4;
                v[p][n] = k < K && token + n < a.tokens ? load4((const float *)a.x + i64(token + n) * K + k)
                                                        : make_float4(0, 0, 0, 0);
            }
        float sum[N];
#pragma unroll
        for (int p = 0; p < PASSES; ++p) {
            const int k = p * 1024 + tid * 4;
            const float4 s = k < K ? __ldg((const float4 *)(a.scale + k)) : make_float4(0, 0, 0, 0);
#pragma unroll
            for (int n = 0; n < N; ++n) {
                const float4 f = v[p][n];
                sum[n] = __fmaf_rn(f.x, f.x, __fmaf_rn(f.y, f.y, __fmaf_rn(f.z, f.z, __fmaf_rn(f.w, f.w, p ? sum[n] : 0.f))));
                if (k < K && token + n < a.tokens)
                    *(uint2 *)place(k, token + n) = make_uint2(narrow2(f.x * s.x, f.y * s.y), narrow2(f.z * s.z, f.w * s.w));
            }
        }
#pragma unroll
        for (int n = 0; n < N; ++n) {
            const float all = warp_sum(sum[n]);
            if (lane == 0 && token + n < a.tokens) squares[warp * 16 + token + n] = all;
        }
    }
    DEVICE void stage() {
        if constexpr (NORM) {
            constexpr int N = K > 2048 ? 2 : 4;
            if (a.tokens == 1) stage_normalised<1>(0);
            else
                for (int token = 0; token < a.tokens; token += N) stage_normalised<N>(token);
        } else {
#pragma unroll 4
            for (int e = tid; e < a.tokens * (K / 8); e += 256) {
                const int token = e / (K / 8);
                *(uint4 *)place((e - token * (K / 8)) * 8, token) = load8((const u16 *)a.x + i64(e) * 8);
            }
        }
        meet();
    }
    // A lane's load j of a segment: 8 columns from here on.
    DEVICE int column(int segment, int j) const {
        return segment * 1024 + j / 2 * (WARPS * 64) + warp * 64 + j % 2 * 32 + (lane & 3) * 8;
    }
    DEVICE bool exists(int segment, int j) const {
        return K % 1024 == 0 || segment * 16 + j / 2 * WARPS + warp < PIECES;
    }
    DEVICE uint4 fragment(int column, int half) const {
        const int token = (lane >> 2) + 8 * half;
        if (token >= a.tokens) return make_uint4(0, 0, 0, 0);
        if constexpr (DIRECT) return load8((const u16 *)a.x + i64(token) * K + column);
        return *(const uint4 *)place(column, token);
    }
    // Products of so many units.
    DEVICE void multiply_units(int units, float *to) {
        float d[UNITS][2][4] = {};
#pragma unroll 1
        for (int segment = 0; segment < SEGMENTS; ++segment) {
            uint4 f[LOADS][HALVES], v[UNITS][LOADS];
#pragma unroll
            for (int j = 0; j < LOADS; ++j)
#pragma unroll
                for (int half = 0; half < HALVES; ++half)
                    if (exists(segment, j)) f[j][half] = fragment(column(segment, j), half);
#pragma unroll
            for (int b = 0; b < UNITS; ++b) {
                if (b >= units) break;
                await_barrier(full + 8 * slot, lap);
                const char *p = ring + slot * SLOT + (lane >> 2) % ROWS * LINE + (column(segment, 0) - segment * 1024) * 2;
#pragma unroll
                for (int j = 0; j < LOADS; ++j)
                    if (exists(segment, j)) v[b][j] = *(const uint4 *)(p + j / 2 * (WARPS * 128) + j % 2 * 64);
                __syncwarp();
                if (lane == 0) arrive_barrier(empty + 8 * slot);
                next();
            }
#pragma unroll
            for (int j = 0; j < LOADS; ++j) {
                if (!exists(segment, j)) continue;
                const uint4 x = f[j][0], z = MANY ? f[j][HALVES - 1] : make_uint4(0, 0, 0, 0);
#pragma unroll
                for (int b = 0; b < UNITS; ++b) {
                    if (b >= units) break;
                    multiply(d[b][0], x.x, z.x, x.y, z.y, v[b][j].x, v[b][j].y);
                    multiply(d[b][1], x.z, z.z, x.w, z.w, v[b][j].z, v[b][j].w);
                }
            }
        }
#pragma unroll
        for (int b = 0; b < UNITS; ++b)
#pragma unroll
            for (int half = 0; half < HALVES; ++half) {
                const int token = (lane >> 2) + 8 * half;
                if (b < units && token < a.tokens)
                    *(float2 *)(to + ((b * WARPS + warp) * a.tokens + token) * 8 + (lane & 3) * 2) =
                        make_float2(d[b][0][2 * half] + d[b][1][2 * half], d[b][0][2 * half + 1] + d[b][1][2 * half + 1]);
            }
    }
    DEVICE float factor(int token) const {
        float sum = 0;
#pragma unroll
        for (int i = 0; i < WARPS; ++i) sum += squares[i * 16 + token];
        return rsqrtf(sum / K + a.eps);
    }
    DEVICE float sum(const float *from, int token, int n) const {
        float v = 0;
#pragma unroll
        for (int i = 0; i < WARPS; ++i) v += from[(i * a.tokens + token) * 8 + n];
        return v;
    }
    // What a thread's first sum is added to.
    DEVICE void load_old() {
        const int slot = (tid / WIDTH * a.inverse) >> 16, token = tid / WIDTH - slot * a.tokens;
        const int column = (blockIdx.x + slot * gridDim.x) * WIDTH + tid % WIDTH;
        if (slot < count && column < a.rows) old = load((const float *)a.y + i64(token) * a.rows + column);
    }
    // The sums of units i ... of this block, to where they belong.
    DEVICE void finish(int i, int units, const float *from) {
        for (int o = tid; o < units * a.tokens * WIDTH; o += WARPS * 32) {
            const int n = o % WIDTH, slot = (o / WIDTH * a.inverse) >> 16, token = o / WIDTH - slot * a.tokens;
            const int column = (blockIdx.x + (i + slot) * gridDim.x) * WIDTH + n;
            const float *part = from + slot * (WARPS * 8) * a.tokens;
            if (OUT == kAdd && (i || o != tid) && column < a.rows)
                old = load((const float *)a.y + i64(token) * a.rows + column);
            const float f = NORM ? factor(token) : 1.f, v = sum(part, token, n) * f;
            if constexpr (OUT == kGate)
                ((u16 *)a.y)[i64(token) * (a.rows / 2) + column] = narrow(silu(v) * (sum(part, token, n + WIDTH) * f));
            else if (column < a.rows)
                ((float *)a.y)[i64(token) * a.rows + column] = OUT == kAdd ? old + v : v;
        }
    }
    DEVICE void run() {
        const int each = (WARPS * 8) * a.tokens;
        for (int i = 0, turn = 0; i < count; i += a.group, turn ^= 1) {
            const int units = min(a.group, count - i);
            float *to = partial + turn * a.group * each;
#pragma unroll 1
            for (int u = 0; u < units; u += UNITS) multiply_units(min(UNITS, units - u), to + u * each);
            meet();
            finish(i, units, to);
        }
    }
};

// Blocks of 8 warps that multiply and one that copies.
template <int K, bool NORM, int OUT, bool MANY, int ROWS, bool DIRECT> DEVICE void product(const Product &a) {
    extern __shared__ __align__(128) char shared[];
    Multiplier<K, NORM, OUT, MANY, ROWS, DIRECT> m(a, shared);
    if (m.warp == m.WARPS) return m.copy_all();
    if (NORM && m.tid * 32 < K) prefetch(a.scale + m.tid * 32);
    m.begin();
    wait();
    if (!m.count) return;
    if constexpr (OUT == kAdd) m.load_old();
    if constexpr (!DIRECT) m.stage();
    m.run();
}
