// y[t, n] = sum of x[t, k] * weight[n, k] for up to 16 tokens: a linear layer of a decode step, near the memory's speed.
//
// A block of 8 warps works on units of 8 rows of the weight. Each warp has every 8th piece of 64 columns, a line of the
// caches in each row. Every thread copies the fragments that it multiplies itself into a ring in shared memory that only it
// reads (loads into as many registers would wait for each other), and the first copies are on their way before the kernel
// waits for its input. x is the tensor cores' matrix of 16 rows; tokens that do not exist are zeros. The sum over the warps
// is made in their order. So a token's sums have one order, whatever the batch.

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
};
enum { kStore, kAdd, kGate };

// UNITS: multiplied at the same time. DEPTH: places of the ring.
template <int K, bool NORM, int OUT, bool MANY, int UNITS, int DEPTH, bool DIRECT> struct Multiplier {
    static constexpr int WARPS = 8, PIECES = K / 64, L = 2 * ((PIECES + WARPS - 1) / WARPS), HALVES = MANY ? 2 : 1;
    static constexpr int CHAINS = UNITS >= 4 ? 1 : 2;
    static constexpr bool HELD = L * HALVES <= 10 && !DIRECT;  // x stays in registers
    static constexpr int ALL = UNITS * L, PLACE = WARPS * 512;
    const Product &a;
    int warp, lane, tid, count, now = 0, before = (DEPTH - 1) * PLACE;  // now, before: places in the ring
    char *xs;                 // [K / 32, T, 64 bytes], then 64 bytes of zeros
    char *ring;               // [DEPTH, threads, 16 bytes]: the thread's
    float *squares, *partial; // [WARPS, 16]; [2, group, WARPS, T, 8]
    const char *base, *limit; // a lane's row of the block's first unit, of the weight's last row
    i64 stride;
    float old = 0;
    uint4 x[HELD ? L : 1][HALVES];

    DEVICE Multiplier(const Product &args, char *shared) : a(args) {
        tid = threadIdx.x, warp = tid >> 5, lane = tid & 31;
        count = a.whole + (blockIdx.x < a.rest);
        squares = (float *)shared;
        ring = shared + 512 + tid * 16;
        xs = shared + 512 + DEPTH * PLACE;
        partial = (float *)(xs + (HELD || DIRECT ? 0 : PIECES * a.tokens * 128 + 64));
        const int n = lane >> 2, unit = blockIdx.x;
        const i64 row = OUT == kGate ? (n < 4 ? unit * 4 + n : a.rows / 2 + unit * 4 + n - 4) : unit * 8 + n;
        base = (const char *)a.weight + row * (K * 2) + (lane & 3) * 16 + warp * 128;
        limit = (const char *)a.weight + i64(a.rows - 1) * (K * 2) + (lane & 3) * 16 + warp * 128;
        stride = i64(gridDim.x) * ((OUT == kGate ? 4 : 8) * K * 2);
    }
    DEVICE const char *row(int i) const {
        const char *p = base + i * stride;
        return p < limit ? p : limit;
    }
    // A lane's loads of a unit, j = 0 ... L - 1: bytes from its row's start, beside those of the warp's first piece.
    static DEVICE constexpr int offset(int j) { return j / 2 * (WARPS * 128) + j % 2 * 64; }
    static DEVICE bool exists(int j, int warp) { return PIECES % WARPS == 0 || j / 2 * WARPS + warp < PIECES; }
    // Copy fragment e of those from unit i on, which come one load of UNITS units after the other.
    DEVICE void copy(int i, int e, int to) {
        const int j = e % ALL / UNITS, b = i + e / ALL * UNITS + e % UNITS;
        if (b < count && exists(j, warp))
            copy_weight((u32)__cvta_generic_to_shared(ring + to), row(b) + offset(j));
        end_copy();
    }
    DEVICE void copy_first() {
#pragma unroll
        for (int e = 0; e < DEPTH - 1; ++e) copy(0, e, e * PLACE);
    }
    DEVICE const u16 *input(int j, int token) const {
        return (const u16 *)a.x + i64(token) * K + warp * 64 + offset(j) / 2 + (lane & 3) * 8;
    }
    DEVICE char *place(int token) const { return xs + (warp * 2 * a.tokens + token) * 64 + (lane & 3) * 16; }
    // Of load j beside `place`, whose pieces are [WARPS, 2] for each two loads.
    DEVICE int beside(int j) const { return (j / 2 * (WARPS * 2) + j % 2) * 64 * a.tokens; }
    // The thread's own fragments of x, into registers or into shared memory that only it reads; with a norm, times its
    // scale: what is the same for a whole token is multiplied at the end.
    DEVICE void load_x() {
#pragma unroll
        for (int half = 0; half < HALVES; ++half) {
            const int token = (lane >> 2) + 8 * half;
            const bool real = token < a.tokens;
            float sum = 0;
#pragma unroll
            for (int j = 0; j < L; ++j) {
                uint4 v = make_uint4(0, 0, 0, 0);
                if (real && exists(j, warp)) {
                    if constexpr (!NORM) {
                        v = load8(input(j, token));
                    } else {
                        const int k = warp * 64 + offset(j) / 2 + (lane & 3) * 8;
                        const float *p = (const float *)a.x + i64(token) * K + k;
                        const float4 f = load4(p), g = load4(p + 4);
                        const float4 s = __ldg((const float4 *)(a.scale + k)), t = __ldg((const float4 *)(a.scale + k + 4));
                        sum += f.x * f.x + f.y * f.y + f.z * f.z + f.w * f.w + g.x * g.x + g.y * g.y + g.z * g.z + g.w * g.w;
                        v = make_uint4(narrow2(f.x * s.x, f.y * s.y), narrow2(f.z * s.z, f.w * s.w),
                                       narrow2(g.x * t.x, g.y * t.y), narrow2(g.z * t.z, g.w * t.w));
                    }
                }
                if constexpr (HELD) x[j][half] = v;
                else if (real && exists(j, warp)) *(uint4 *)(place(token) + beside(j)) = v;
            }
            if constexpr (NORM) {
                sum += __shfl_xor_sync(~0u, sum, 1);
                sum += __shfl_xor_sync(~0u, sum, 2);
                if ((lane & 3) == 0) squares[warp * 16 + token] = sum;
            }
        }
        if (!HELD && tid < 4) *(uint4 *)(xs + PIECES * a.tokens * 128 + tid * 16) = make_uint4(0, 0, 0, 0);
        if (!HELD) __syncthreads();
    }
    DEVICE uint4 fragment(int j, int half) const {
        const int token = (lane >> 2) + 8 * half;
        const bool real = token < a.tokens;
        if constexpr (HELD) return x[j][half];
        if constexpr (DIRECT) return real ? load8(input(j, token)) : make_uint4(0, 0, 0, 0);
        const char *p = real ? place(token) : xs + PIECES * a.tokens * 128 + (lane & 3) * 16;
        return *(const uint4 *)(p + (real ? beside(j) : 0));
    }
    // Products of units i ... i + UNITS - 1, whatever exists of them. The place of a fragment is taken by another one a
    // step after it was read.
    DEVICE void multiply_units(int i, int units, float *to) {
        float d[UNITS][CHAINS][4];
#pragma unroll
        for (int b = 0; b < UNITS; ++b)
#pragma unroll
            for (int c = 0; c < CHAINS * 4; ++c) d[b][c / 4][c % 4] = 0;
#pragma unroll
        for (int j = 0; j < L; ++j) {
            const bool real = exists(j, warp);
            const uint4 none = make_uint4(0, 0, 0, 0), f = real ? fragment(j, 0) : none;
            const uint4 g = MANY && real ? fragment(j, HALVES - 1) : none;
#pragma unroll
            for (int b = 0; b < UNITS; ++b) {
                await_copies<DEPTH - 2>();
                const uint4 v = *(const uint4 *)(ring + now);
                if (real) {
                    multiply(d[b][0], f.x, g.x, f.y, g.y, v.x, v.y);
                    multiply(d[b][CHAINS - 1], f.z, g.z, f.w, g.w, v.z, v.w);
                }
                copy(i, j * UNITS + b + DEPTH - 1, before);
                before = now;
                now = now == (DEPTH - 1) * PLACE ? 0 : now + PLACE;
            }
        }
#pragma unroll
        for (int b = 0; b < UNITS; ++b)
#pragma unroll
            for (int half = 0; half < HALVES; ++half) {
                const int token = (lane >> 2) + 8 * half;
                float2 v = make_float2(d[b][0][2 * half], d[b][0][2 * half + 1]);
                if (CHAINS > 1) v.x += d[b][CHAINS - 1][2 * half], v.y += d[b][CHAINS - 1][2 * half + 1];
                if (b < units && token < a.tokens)
                    *(float2 *)(to + ((b * WARPS + warp) * a.tokens + token) * 8 + (lane & 3) * 2) = v;
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
        const int slot = (tid / 8 * a.inverse) >> 16, token = tid / 8 - slot * a.tokens;
        const int column = (blockIdx.x + slot * gridDim.x) * 8 + tid % 8;
        if (slot < count && column < a.rows) old = load((const float *)a.y + i64(token) * a.rows + column);
    }
    // The sums of units i ... of this block, to where they belong.
    DEVICE void finish(int i, int units, const float *from) {
        constexpr int WIDTH = OUT == kGate ? 4 : 8;
        for (int o = tid; o < units * a.tokens * WIDTH; o += WARPS * 32) {
            const int n = o % WIDTH, slot = (o / WIDTH * a.inverse) >> 16, token = o / WIDTH - slot * a.tokens;
            const int column = (blockIdx.x + (i + slot) * gridDim.x) * WIDTH + n;
            const float *part = from + slot * (WARPS * 8) * a.tokens;
            if (OUT == kAdd && (i || o != tid) && column < a.rows)
                old = load((const float *)a.y + i64(token) * a.rows + column);
            float f = NORM ? factor(token) : 1.f, v = sum(part, token, n) * f;
            if constexpr (OUT == kGate)
                ((u16 *)a.y)[i64(token) * (a.rows / 2) + column] = narrow(silu(v) * (sum(part, token, n + 4) * f));
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
            for (int u = 0; u < units; u += UNITS) multiply_units(i + u, units - u, to + u * each);
            __syncthreads();
            finish(i, units, to);
        }
    }
};

template <int K, bool NORM, int OUT, bool MANY, int UNITS, int DEPTH, bool DIRECT> DEVICE void product(const Product &a) {
    extern __shared__ __align__(16) char shared[];
    Multiplier<K, NORM, OUT, MANY, UNITS, DEPTH, DIRECT> m(a, shared);
    m.copy_first();
    launch_dependents();
    wait();
    if (!m.count) return;
    if constexpr (OUT == kAdd) m.load_old();
    if constexpr (!DIRECT) m.load_x();
    m.run();
}
