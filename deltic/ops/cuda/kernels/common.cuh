// What all kernels share. No headers, so that NVRTC compiles this without a toolkit.
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;
#define DEVICE __device__ __forceinline__
#define PAGE 16

// The next kernel of the stream may start: it waits itself, with `wait`, before it touches what this one writes.
DEVICE void launch_dependents() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
// Until all that came before in the stream is done and visible. Before it only what no kernel of a step writes may be
// read: weights, the step's integers, and what the layer itself wrote in the step before.
DEVICE void wait() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
DEVICE float low(u32 x) { return __uint_as_float(x << 16); }
DEVICE float high(u32 x) { return __uint_as_float(x & 0xffff0000u); }
DEVICE float wide(u16 x) { return __uint_as_float(u32(x) << 16); }
DEVICE u16 narrow(float x) {
    u16 r;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(r) : "f"(x));
    return r;
}
DEVICE u32 narrow2(float lo, float hi) {
    u32 r;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(hi), "f"(lo));
    return r;
}
DEVICE float warp_sum(float v) {
#pragma unroll
    for (int i = 16; i; i >>= 1) v += __shfl_xor_sync(~0u, v, i);
    return v;
}
DEVICE float sigmoid(float x) { return __fdividef(1.f, 1.f + __expf(-x)); }
DEVICE float silu(float x) { return __fdividef(x, 1.f + __expf(-x)); }
// Activations: written by kernels that may still be running when this one starts, so never from the first-level cache.
DEVICE float load(const float *p) { return __ldcg(p); }
DEVICE float load(const u16 *p) { return wide(__ldcg(p)); }
DEVICE float4 load4(const float *p) { return __ldcg((const float4 *)p); }
DEVICE uint4 load8(const u16 *p) { return __ldcg((const uint4 *)p); }
// Weights: read once a step, so they had better not push anything else out of the caches.
DEVICE u64 read_once() {
    u64 policy;
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}
DEVICE uint4 load_weight(const void *p, u64 policy) {
    uint4 v;
    asm volatile("ld.global.nc.L1::no_allocate.L2::cache_hint.v4.u32 {%0,%1,%2,%3}, [%4], %5;"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p), "l"(policy));
    return v;
}
DEVICE void multiply(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
// Which row of the batch a token belongs to: starts [rows + 1].
DEVICE int row_of(const i64 *starts, int token) {
    if (starts[token] == token) return token;
    int row = 0;
    while (starts[row + 1] <= token) ++row;
    return row;
}
