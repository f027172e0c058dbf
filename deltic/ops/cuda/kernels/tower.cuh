// Kernels between the products of a vision tower's block.

struct Turn {
    u16 *qkv;                // [T, 3 heads * D]: queries, keys, values
    const float *cos, *sin;  // [T, D / 2]
    i64 count;               // number of groups of four pairs: T * 2 heads * D / 8
    int heads;
};
// Rotates queries and keys in place. One thread per four pairs; the two numbers of a pair are half a head apart.
template <int D> DEVICE void turn(const Turn &a) {
    launch_dependents();
    wait();
    const i64 place = blockIdx.x * i64(blockDim.x) + threadIdx.x;
    if (place >= a.count) return;
    constexpr int GROUPS = D / 8;
    const int group = place % GROUPS;
    const i64 head = place / GROUPS, token = head / (2 * a.heads);
    u16 *left = a.qkv + (head + token * a.heads) * D + group * 4, *right = left + D / 2;
    const uint2 x = __ldcg((const uint2 *)left), y = __ldcg((const uint2 *)right);
    const float4 cos = __ldg((const float4 *)(a.cos + token * (D / 2)) + group);
    const float4 sin = __ldg((const float4 *)(a.sin + token * (D / 2)) + group);
    *(uint2 *)left = make_uint2(
        narrow2(low(x.x) * cos.x - low(y.x) * sin.x, high(x.x) * cos.y - high(y.x) * sin.y),
        narrow2(low(x.y) * cos.z - low(y.y) * sin.z, high(x.y) * cos.w - high(y.y) * sin.w));
    *(uint2 *)right = make_uint2(
        narrow2(low(y.x) * cos.x + low(x.x) * sin.x, high(y.x) * cos.y + high(x.x) * sin.y),
        narrow2(low(y.y) * cos.z + low(x.y) * sin.z, high(y.y) * cos.w + high(x.y) * sin.w));
}

struct TowerNorm {
    u16 *x;                     // [T, H]: the residual stream
    const u16 *delta;           // [T, H]; null: nothing to add
    const float *scale, *shift; // [H]
    u16 *y;                     // [T, H]: norm of x
    float eps;
    int tokens;
};
// Adds delta to x, then writes the layer norm of x. One warp per token.
template <int H> DEVICE void tower_norm(const TowerNorm &a) {
    launch_dependents();
    wait();
    constexpr int UNITS = H / 8, MINE = (UNITS + 31) / 32;
    const int lane = threadIdx.x & 31;
    const i64 token = blockIdx.x * i64(blockDim.x >> 5) + (threadIdx.x >> 5);
    if (token >= a.tokens) return;
    float value[MINE][8], sum = 0;
#pragma unroll
    for (int i = 0; i < MINE; ++i) {
        const int unit = lane + 32 * i;
        const bool real = unit < UNITS;
        const i64 place = token * H + unit * 8;
        uint4 x = make_uint4(0, 0, 0, 0);
        if (real) x = load8(a.x + place);
        u32 *words = (u32 *)&x;
        if (real && a.delta) {
            const uint4 added = load8(a.delta + place);
            const u32 *more = (const u32 *)&added;
#pragma unroll
            for (int w = 0; w < 4; ++w)
                words[w] = narrow2(low(words[w]) + low(more[w]), high(words[w]) + high(more[w]));
            *(uint4 *)(a.x + place) = x;
        }
#pragma unroll
        for (int w = 0; w < 4; ++w) {
            value[i][2 * w] = low(words[w]);
            value[i][2 * w + 1] = high(words[w]);
            sum += value[i][2 * w] + value[i][2 * w + 1];
        }
    }
    const float mean = warp_sum(sum) / H;
    float square = 0;
#pragma unroll
    for (int i = 0; i < MINE; ++i)
        if (lane + 32 * i < UNITS)
#pragma unroll
            for (int w = 0; w < 8; ++w) square += (value[i][w] - mean) * (value[i][w] - mean);
    const float factor = rsqrtf(warp_sum(square) / H + a.eps);
#pragma unroll
    for (int i = 0; i < MINE; ++i) {
        const int unit = lane + 32 * i;
        if (unit >= UNITS) continue;
        const float4 *scale = (const float4 *)a.scale + 2 * unit, *shift = (const float4 *)a.shift + 2 * unit;
        u32 out[4];
#pragma unroll
        for (int w = 0; w < 2; ++w) {
            const float4 s = __ldg(scale + w), b = __ldg(shift + w);
            const float *v = value[i] + 4 * w;
            out[2 * w] = narrow2((v[0] - mean) * factor * s.x + b.x, (v[1] - mean) * factor * s.y + b.y);
            out[2 * w + 1] = narrow2((v[2] - mean) * factor * s.z + b.z, (v[3] - mean) * factor * s.w + b.w);
        }
        *(uint4 *)(a.y + token * H + unit * 8) = make_uint4(out[0], out[1], out[2], out[3]);
    }
}
