// The kernel between the products of an encoder layer.

struct ResidualNorm {
    const u16 *x, *delta;      // [T, H]: the residual stream, and what is added to it
    const u16 *scale, *shift;  // [H]
    u16 *y;                    // [T, H]; may alias x or delta
    float eps;
    int tokens;
};
// Writes the layer norm of x + delta. One warp per token. Sums are float32; their order does not depend on the batch.
template <int HIDDEN> DEVICE void residual_norm(const ResidualNorm &a) {
    constexpr int kParts = (HIDDEN + 255) / 256;  // of 256 columns, 8 per lane
    launch_dependents();
    const int token = (blockIdx.x * blockDim.x + threadIdx.x) / 32, lane = threadIdx.x & 31;
    if (token >= a.tokens) return;
    const i64 row = i64(token) * HIDDEN;
    wait();
    float v[kParts][8], sum = 0, squares = 0;
#pragma unroll
    for (int i = 0; i < kParts; ++i) {
        const int at = (i * 32 + lane) * 8;
        const bool mine = HIDDEN % 256 == 0 || at < HIDDEN;
        const uint4 none = make_uint4(0, 0, 0, 0);
        const uint4 x = mine ? load8(a.x + row + at) : none, d = mine ? load8(a.delta + row + at) : none;
        const u32 left[4] = {x.x, x.y, x.z, x.w}, right[4] = {d.x, d.y, d.z, d.w};
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            v[i][2 * j] = low(left[j]) + low(right[j]);
            v[i][2 * j + 1] = high(left[j]) + high(right[j]);
            sum += v[i][2 * j] + v[i][2 * j + 1];
        }
    }
    const float mean = warp_sum(sum) / HIDDEN;
#pragma unroll
    for (int i = 0; i < kParts; ++i)
        if (HIDDEN % 256 == 0 || (i * 32 + lane) * 8 < HIDDEN) {
#pragma unroll
            for (int j = 0; j < 8; ++j) {
                v[i][j] -= mean;
                squares += v[i][j] * v[i][j];
            }
        }
    const float factor = rsqrtf(warp_sum(squares) / HIDDEN + a.eps);
#pragma unroll
    for (int i = 0; i < kParts; ++i) {
        const int at = (i * 32 + lane) * 8;
        if (HIDDEN % 256 && at >= HIDDEN) continue;
        const uint4 scale = __ldg((const uint4 *)(a.scale + at)), shift = __ldg((const uint4 *)(a.shift + at));
        const u32 s[4] = {scale.x, scale.y, scale.z, scale.w}, b[4] = {shift.x, shift.y, shift.z, shift.w};
        u32 y[4];
#pragma unroll
        for (int j = 0; j < 4; ++j)
            y[j] = narrow2(v[i][2 * j] * factor * low(s[j]) + low(b[j]), v[i][2 * j + 1] * factor * high(s[j]) + high(b[j]));
        *(uint4 *)(a.y + row + at) = make_uint4(y[0], y[1], y[2], y[3]);
    }
}
