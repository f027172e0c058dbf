// Small kernels between the large ones.

struct Enter {
    const i64 *ids, *positions;  // [T], [3, T]
    const u16 *embedding;        // [V, H]
    const float *frequencies;    // [rotary / 2], radians per position
    const i64 *axes;             // [rotary / 2]: position (0 to 2) of each frequency
    float *residual, *turns;     // [T, H], [T, rotary]
    float factor;                // scales cosines and sines
    int hidden, rotary, tokens;
};
// Writes a token's rotary table.
DEVICE void turn(const Enter &a, int token) {
    const int half = a.rotary / 2;
    for (int i = threadIdx.x; i < half; i += blockDim.x) {
        const float angle = float(a.positions[a.axes[i] * a.tokens + token]) * a.frequencies[i];
        a.turns[token * a.rotary + i] = cosf(angle) * a.factor;
        a.turns[token * a.rotary + half + i] = sinf(angle) * a.factor;
    }
}
// Writes embeddings and rotary tables.
DEVICE void enter(const Enter &a) {
    launch_dependents();
    wait();
    for (int token = blockIdx.x; token < a.tokens; token += gridDim.x) {
        const u16 *from = a.embedding + a.ids[token] * a.hidden;
        for (int i = threadIdx.x; i < a.hidden; i += blockDim.x)
            a.residual[i64(token) * a.hidden + i] = wide(__ldg(from + i));
        turn(a, token);
    }
}

struct AddNorm {
    float *residual;     // [T, H]; delta is added to it
    const u16 *delta;    // [T, H]; null: nothing to add
    const float *scale;  // [H]
    u16 *y;              // [T, H]; null: not wanted
    float *wide;         // [T, H]: the same in float32; null: not wanted
    float eps;
    int hidden;
};
// Adds delta and norms the residual. One block of 256 threads per token.
DEVICE void add_norm(const AddNorm &a) {
    __shared__ float red[8];
    launch_dependents();
    wait();
    float *row = a.residual + i64(blockIdx.x) * a.hidden, sum = 0;
    for (int i = threadIdx.x * 4; i < a.hidden; i += 1024) {
        float4 v = load4(row + i);
        if (a.delta) {
            const uint2 d = __ldcg((const uint2 *)(a.delta + i64(blockIdx.x) * a.hidden + i));
            v.x += low(d.x), v.y += high(d.x), v.z += low(d.y), v.w += high(d.y);
            *(float4 *)(row + i) = v;
        }
        sum += v.x * v.x + v.y * v.y + v.z * v.z + v.w * v.w;
    }
    sum = warp_sum(sum);
    if ((threadIdx.x & 31) == 0) red[threadIdx.x >> 5] = sum;
    __syncthreads();
    sum = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) sum += red[i];
    const float factor = rsqrtf(sum / a.hidden + a.eps);
    for (int i = threadIdx.x * 4; i < a.hidden; i += 1024) {
        const float4 v = load4(row + i), s = __ldg((const float4 *)(a.scale + i));
        const float4 x = make_float4(v.x * factor * s.x, v.y * factor * s.y, v.z * factor * s.z, v.w * factor * s.w);
        const i64 at = i64(blockIdx.x) * a.hidden + i;
        if (a.y) *(uint2 *)(a.y + at) = make_uint2(narrow2(x.x, x.y), narrow2(x.z, x.w));
        if (a.wide) *(float4 *)(a.wide + at) = x;
    }
}

struct Gate {
    const u16 *x;  // [T, 2 F]: gate, then up
    u16 *y;        // [T, F]
    int width;     // F
};
// One thread per 8 numbers.
DEVICE void gate(const Gate &a) {
    launch_dependents();
    wait();
    const int i = (blockIdx.x * blockDim.x + threadIdx.x) * 8;
    if (i >= a.width) return;
    const u16 *row = a.x + i64(blockIdx.y) * 2 * a.width + i;
    const uint4 g = load8(row), u = load8(row + a.width);
    *(uint4 *)(a.y + i64(blockIdx.y) * a.width + i) = make_uint4(
        narrow2(silu(low(g.x)) * low(u.x), silu(high(g.x)) * high(u.x)),
        narrow2(silu(low(g.y)) * low(u.y), silu(high(g.y)) * high(u.y)),
        narrow2(silu(low(g.z)) * low(u.z), silu(high(g.z)) * high(u.z)),
        narrow2(silu(low(g.w)) * low(u.w), silu(high(g.w)) * high(u.w)));
}
