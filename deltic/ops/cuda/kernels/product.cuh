// y[t, n] = sum of x[t, k] * weight[n, k] for up to 16 tokens: a linear layer of a decode step, near the memory's speed.
//
// A block of 16 warps works on units of 8 rows of the weight. Each warp has every 16th piece of 32 columns: it loads its
// share of a unit straight into registers as fragments of tensor-core products (x is the matrix of 16 rows, tokens that do
// not exist are zeros), and the first loads are on their way before the kernel waits for its input. The sum over the warps
// is made in their order. So a token's sums have one order, whatever the batch.

struct Product {
    const u16 *weight;   // [rows, K]
    const void *x;       // residual [T, K] float, to be normalised; or [T, K] bf16
    const float *scale;  // [K] of the norm
    const i64 *places;   // row of x that token t is; null: t
    void *y;             // kStore: float [T, rows]; kAdd: float [T, rows], added to; kGate: bf16 [T, rows / 2]
    float eps;
    int tokens, rows, group;  // group: units between two sums over the warps, a multiple of UNITS
};
enum { kStore, kAdd, kGate };

template <int K, bool NORM, int OUT, bool MANY, int UNITS, bool DIRECT> struct Multiplier {
    static constexpr int WARPS = 16, PIECES = K / 32, L = (PIECES + WARPS - 1) / WARPS;
    const Product &a;
    int warp, lane, tid, first, count;
    uint4 *xs;
    float *squares, *partial;
    const char *base;
    u64 policy;
    uint4 w[UNITS][L];

    DEVICE Multiplier(const Product &args, char *shared) : a(args) {
        tid = threadIdx.x, warp = tid >> 5, lane = tid & 31;
        int units = OUT == kGate ? a.rows / 8 : (a.rows + 7) / 8;
        first = blockIdx.x;
        count = first < units ? (units - first + gridDim.x - 1) / gridDim.x : 0;
        squares = (float *)shared;                                   // [WARPS, 16], then the factors [16]
        xs = (uint4 *)(shared + 1280);                               // [PIECES, T, 4]
        partial = (float *)(xs + (DIRECT ? 0 : PIECES * a.tokens * 4));
        base = (const char *)a.weight + (lane & 3) * 16 + warp * 64;
        policy = read_once();
    }
    // Of a lane's weight row in unit i of this block.
    DEVICE const char *row(int i) const {
        int unit = first + i * gridDim.x, n = lane >> 2;
        int r = OUT == kGate ? (n < 4 ? unit * 4 + n : a.rows / 2 + unit * 4 + n - 4) : min(unit * 8 + n, a.rows - 1);
        return base + i64(r) * (K * 2);
    }
    static DEVICE bool exists(int j, int warp) { return PIECES % WARPS == 0 || j * WARPS + warp < PIECES; }
    DEVICE void load_first() {
#pragma unroll
        for (int b = 0; b < UNITS; ++b) {
            const char *p = row(b < count ? b : 0);
#pragma unroll
            for (int j = 0; j < L; ++j)
                w[b][j] = b < count && exists(j, warp) ? load_weight(p + j * (WARPS * 64), policy) : make_uint4(0, 0, 0, 0);
        }
    }
    DEVICE uint4 *place(int j, int token) { return xs + ((j * WARPS + warp) * a.tokens + token) * 4 + (lane & 3); }
    DEVICE const u16 *input(int j, int token) const {
        i64 from = a.places ? a.places[token] : token;
        return (const u16 *)a.x + from * K + (j * WARPS + warp) * 32 + (lane & 3) * 8;
    }
    // The thread's own fragments of x, into shared memory that only it reads; with a norm, times its scale: what is the
    // same for a whole token is multiplied at the end.
    DEVICE void load_x() {
#pragma unroll
        for (int half = 0; half < (MANY ? 2 : 1); ++half) {
            int token = (lane >> 2) + 8 * half;
            float sum = 0;
            if (token < a.tokens) {
                i64 from = a.places ? a.places[token] : token;
#pragma unroll
                for (int j = 0; j < L; ++j) {
                    if (!exists(j, warp)) continue;
                    if constexpr (!NORM) {
                        *place(j, token) = load8(input(j, token));
                    } else {
                        int k = (j * WARPS + warp) * 32 + (lane & 3) * 8;
                        const float *p = (const float *)a.x + from * K + k;
                        float4 u = load4(p), v = load4(p + 4);
                        float4 s = __ldg((const float4 *)(a.scale + k)), t = __ldg((const float4 *)(a.scale + k + 4));
                        sum += u.x * u.x + u.y * u.y + u.z * u.z + u.w * u.w + v.x * v.x + v.y * v.y + v.z * v.z + v.w * v.w;
                        *place(j, token) = make_uint4(narrow2(u.x * s.x, u.y * s.y), narrow2(u.z * s.z, u.w * s.w),
                                                      narrow2(v.x * t.x, v.y * t.y), narrow2(v.z * t.z, v.w * t.w));
                    }
                }
            }
            if constexpr (NORM) {
                sum += __shfl_xor_sync(~0u, sum, 1);
                sum += __shfl_xor_sync(~0u, sum, 2);
                if ((lane & 3) == 0) squares[warp * 16 + token] = sum;
            }
        }
    }
    DEVICE uint4 fragment(int j, int token) {
        if (token >= a.tokens) return make_uint4(0, 0, 0, 0);
        if constexpr (DIRECT) return load8(input(j, token));
        return *place(j, token);
    }
    // Products of unit i, which lies in w[b]; its place is taken by unit i + UNITS.
    DEVICE void unit(int i, int b, float *to) {
        float d[2][4] = {{0, 0, 0, 0}, {0, 0, 0, 0}};
        bool more = i + UNITS < count;
        const char *next = row(more ? i + UNITS : i);
#pragma unroll
        for (int j = 0; j < L; ++j) {
            if (!exists(j, warp)) continue;
            uint4 x = fragment(j, lane >> 2), y = MANY ? fragment(j, (lane >> 2) + 8) : make_uint4(0, 0, 0, 0), v = w[b][j];
            multiply(d[0], x.x, y.x, x.y, y.y, v.x, v.y);
            multiply(d[1], x.z, y.z, x.w, y.w, v.z, v.w);
            if (more) w[b][j] = load_weight(next + j * (WARPS * 64), policy);
        }
#pragma unroll
        for (int half = 0; half < (MANY ? 2 : 1); ++half) {
            int token = (lane >> 2) + 8 * half;
            if (token < a.tokens)
                *(float2 *)(to + (warp * a.tokens + token) * 8 + (lane & 3) * 2) =
                    make_float2(d[0][2 * half] + d[1][2 * half], d[0][2 * half + 1] + d[1][2 * half + 1]);
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
    // The sums of units i .. i + units - 1 of this block, to where they belong.
    DEVICE void finish(int i, int units, const float *from) {
        constexpr int WIDTH = OUT == kGate ? 4 : 8;
        for (int o = tid; o < units * a.tokens * WIDTH; o += WARPS * 32) {
            int n = o % WIDTH, token = o / WIDTH % a.tokens, slot = o / WIDTH / a.tokens, unit = first + (i + slot) * gridDim.x;
            const float *part = from + slot * (WARPS * 8) * a.tokens;
            int column = unit * WIDTH + n;
            float old = 0;
            if (OUT == kAdd && column < a.rows) old = load((const float *)a.y + i64(token) * a.rows + column);
            float f = NORM ? factor(token) : 1.f, v = sum(part, token, n) * f;
            if constexpr (OUT == kGate)
                ((u16 *)a.y)[i64(token) * (a.rows / 2) + column] = narrow(silu(v) * (sum(part, token, n + 4) * f));
            else if (column < a.rows)
                ((float *)a.y)[i64(token) * a.rows + column] = OUT == kAdd ? old + v : v;
        }
    }
    DEVICE void run() {
        int size = a.group * (WARPS * 8) * a.tokens;
        for (int i = 0, turn = 0; i < count; i += a.group, turn ^= 1) {
            int units = min(a.group, count - i);
            float *to = partial + turn * size;
            for (int u = 0; u < units; u += UNITS)
#pragma unroll
                for (int b = 0; b < UNITS; ++b)
                    if (u + b < units) unit(i + u + b, b, to + (u + b) * (WARPS * 8) * a.tokens);
            __syncthreads();
            finish(i, units, to);
        }
    }
};

template <int K, bool NORM, int OUT, bool MANY, int UNITS, bool DIRECT> DEVICE void product(const Product &a) {
    extern __shared__ __align__(16) char shared[];
    launch_dependents();
    Multiplier<K, NORM, OUT, MANY, UNITS, DIRECT> m(a, shared);
    m.load_first();
    wait();
    if constexpr (!DIRECT) m.load_x();
    m.run();
}
