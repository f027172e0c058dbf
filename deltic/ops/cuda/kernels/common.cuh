// Helpers of all kernels. They include no headers, so that NVRTC compiles them without a CUDA toolkit.
typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;
#define DEVICE __device__ __forceinline__
#define PAGE 16

// In a step of few rows, every product has one block per multiprocessor. A block takes less than half of the registers and
// more than a third of the shared memory, and waits even if it has no work. So the blocks of the next product, which start
// early, are placed one per multiprocessor next to the current ones, and the small blocks of the kernels in between still fit.
// Otherwise two blocks of a product would share a multiprocessor and take twice as long.

// Lets the next kernel of the stream start. That kernel calls `wait` before it accesses what this one writes.
DEVICE void launch_dependents() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
// Waits until all earlier kernels of the stream have ended and their writes are visible. Before this call, a kernel may only
// read data that no earlier kernel of the step writes: weights, the step's integers, what the layer wrote in the last step.
DEVICE void wait() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
DEVICE float low(u32 x) { return __uint_as_float(x << 16); }
DEVICE float high(u32 x) { return __uint_as_float(x & 0xffff0000u); }
DEVICE float wide(u16 x) { return __uint_as_float(u32(x) << 16); }
DEVICE float wide(float x) { return x; }
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
constexpr int least(int a, int b) { return a < b ? a : b; }
DEVICE float warp_sum(float v) {
#pragma unroll
    for (int i = 16; i; i >>= 1) v += __shfl_xor_sync(~0u, v, i);
    return v;
}
// Computes COUNT warp sums with the bits of `warp_sum`. There, both lanes of a pair compute the same sums. Here, each lane of a
// pair computes one half of them, until it has a single sum.
template <int COUNT> DEVICE void warp_sums(float (&sums)[COUNT]) {
    constexpr int EACH = COUNT % 16 == 0 ? 16 : COUNT % 8 == 0 ? 8 : COUNT % 4 == 0 ? 4 : 2;
    static_assert(COUNT % 2 == 0);
    const int lane = threadIdx.x & 31;
#pragma unroll
    for (int first = 0; first < COUNT; first += EACH) {
        float v[EACH];
        int apart = 16;
#pragma unroll
        for (int i = 0; i < EACH; ++i) v[i] = sums[first + i];
#pragma unroll
        for (int half = EACH / 2; half; half /= 2, apart /= 2)
#pragma unroll
            for (int i = 0; i < half; ++i) {
                const bool upper = lane & apart;
                v[i] = (upper ? v[i + half] : v[i]) + __shfl_xor_sync(~0u, upper ? v[i] : v[i + half], apart);
            }
#pragma unroll
        for (; apart; apart /= 2) v[0] += __shfl_xor_sync(~0u, v[0], apart);
#pragma unroll
        for (int i = 0; i < EACH; ++i) sums[first + i] = __shfl_sync(~0u, v[0], i * (32 / EACH));
    }
}
DEVICE u32 warp_max(u32 v) {
    u32 r;
    asm volatile("redux.sync.max.u32 %0, %1, 0xffffffff;" : "=r"(r) : "r"(v));
    return r;
}
// Flushes denormal numbers to zero, which saves instructions and does no harm.
DEVICE float exponential(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x * 1.44269504f));
    return y;
}
DEVICE float reciprocal(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
DEVICE float sigmoid(float x) { return reciprocal(1.f + exponential(-x)); }
DEVICE float silu(float x) { return x * sigmoid(x); }
// Loads activations. They bypass L1, because the kernel that writes them may still run when this one starts.
DEVICE float load(const float *p) { return __ldcg(p); }
DEVICE float load(const u16 *p) { return wide(__ldcg(p)); }
DEVICE float4 load4(const float *p) { return __ldcg((const float4 *)p); }
// Stores 16 bytes by one instruction; the compiler alone makes four. policy: from `read_once`.
DEVICE void store4_once(float *p, float4 v, u64 policy) {
    asm volatile("st.global.L2::cache_hint.v4.f32 [%0], {%1,%2,%3,%4}, %5;"
                 :: "l"(p), "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w), "l"(policy) : "memory");
}
DEVICE void store4(float *p, float4 v) {
    asm volatile("st.global.v4.f32 [%0], {%1,%2,%3,%4};" :: "l"(p), "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w) : "memory");
}
// Counts a block and returns how many counted before it. One thread of a block calls it, between two block barriers. The last
// block sees what the others wrote before they counted.
DEVICE int count_up(int *p) {
    int before;
    asm volatile("atom.acq_rel.gpu.global.add.s32 %0, [%1], 1;" : "=r"(before) : "l"(p) : "memory");
    return before;
}
// Accesses to memory that other devices or the host read and write at any time. One instruction stores 16 bytes.
DEVICE void store_volatile(uint4 *p, u32 x, u32 y, u32 z, u32 w) {
    asm volatile("st.volatile.global.v4.u32 [%0], {%1,%2,%3,%4};" :: "l"(p), "r"(x), "r"(y), "r"(z), "r"(w) : "memory");
}
DEVICE void store_volatile(u32 *p, u32 v) { asm volatile("st.volatile.global.u32 [%0], %1;" :: "l"(p), "r"(v) : "memory"); }
DEVICE uint4 load_volatile(const uint4 *p) {
    uint4 v;
    asm volatile("ld.volatile.global.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p) : "memory");
    return v;
}
DEVICE u32 load_volatile(const u32 *p) {
    u32 v;
    asm volatile("ld.volatile.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
    return v;
}
DEVICE u64 nanoseconds() {
    u64 v;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(v) :: "memory");
    return v;
}
// L2 policy (evict first) for data that is not read again soon, so that it does not evict other data from L2.
DEVICE u64 read_once() {
    u64 policy;
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}
// Loads without evicting other data from L1 and L2. policy: from `read_once`.
DEVICE float4 load4_once(const float *p, u64 policy) {
    float4 v;
    asm volatile("ld.global.L1::no_allocate.L2::cache_hint.v4.f32 {%0,%1,%2,%3}, [%4], %5;"
                 : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "l"(p), "l"(policy));
    return v;
}
// The same for four bfloat16 numbers. States may be rounded to bfloat16 when they are written.
DEVICE float4 wide4(uint2 v) { return make_float4(low(v.x), high(v.x), low(v.y), high(v.y)); }
DEVICE void store4_once(u16 *p, float4 v, u64 policy) {
    asm volatile("st.global.L2::cache_hint.v2.b32 [%0], {%1,%2}, %3;"
                 :: "l"(p), "r"(narrow2(v.x, v.y)), "r"(narrow2(v.z, v.w)), "l"(policy) : "memory");
}
DEVICE float4 load4_once(const u16 *p, u64 policy) {
    uint2 v;
    asm volatile("ld.global.L1::no_allocate.L2::cache_hint.v2.b32 {%0,%1}, [%2], %3;"
                 : "=r"(v.x), "=r"(v.y) : "l"(p), "l"(policy));
    return wide4(v);
}
// Stores one number of a state.
DEVICE void put(float *p, float v) { *p = v; }
DEVICE void put(u16 *p, float v) { *p = narrow(v); }
DEVICE uint4 load8(const u16 *p) { return __ldcg((const uint4 *)p); }
DEVICE u32 shared_address(const void *p) { return (u32)__cvta_generic_to_shared(p); }
DEVICE uint4 load_shared(u32 p) {
    uint4 v;
    asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(p) : "memory");
    return v;
}
DEVICE uint2 load_shared2(u32 p) {
    uint2 v;
    asm volatile("ld.shared.v2.u32 {%0,%1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(p) : "memory");
    return v;
}
// Loads four numbers of a state that was copied to shared memory.
DEVICE float4 take4(const float *p) { return *(const float4 *)p; }
DEVICE float4 take4(const u16 *p) { return wide4(*(const uint2 *)p); }
DEVICE u32 load_shared1(u32 p) {
    u32 v;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(p) : "memory");
    return v;
}
DEVICE u32 load_shared_half(u32 p) {
    u16 v;
    asm volatile("ld.shared.u16 %0, [%1];" : "=h"(v) : "r"(p) : "memory");
    return v;
}
// Hides the value from the compiler, so that it does not keep results that it derived from the value.
DEVICE void forget(u32 &v) { asm volatile("" : "+r"(v)); }
DEVICE void forget(uint4 &v) { asm volatile("" : "+r"(v.x), "+r"(v.y), "+r"(v.z), "+r"(v.w)); }
// Floats from token to token in outputs of split heads before their norm: `columns` numbers, then each slice's sum of squares.
constexpr __device__ int heads_stride(int columns, int slice) { return (columns + columns / slice + 3) / 4 * 4; }
// Barrier of the eight multiplying warps.
DEVICE void meet_eight_warps() { asm volatile("bar.sync 1, 256;" ::: "memory"); }
// Barrier of the copying warps.
template <int WARPS> DEVICE void meet_copying_warps() {
    if constexpr (WARPS > 1) asm volatile("bar.sync 2, %0;" :: "n"(WARPS * 32) : "memory");
    __syncwarp();
}
// Starts an asynchronous copy to shared memory. `await_copies` waits for it.
template <int BYTES> DEVICE void copy_async(u32 to, const void *from) {
    if constexpr (BYTES == 16)  // bypasses L1
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" :: "r"(to), "l"(from) : "memory");
    else
        asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" :: "r"(to), "l"(from), "n"(BYTES) : "memory");
}
DEVICE void await_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }
// Copies 16 bytes or, without `has`, writes zeros. `from` is an address that may be read in any case.
DEVICE void copy_async_or_zero(u32 to, const void *from, bool has) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" :: "r"(to), "l"(from), "r"(has ? 16 : 0) : "memory");
}
// Ends a group of a thread's copies.
DEVICE void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits for all groups of the thread's copies but the last LEFT.
template <int LEFT> DEVICE void await_copies_but() { asm volatile("cp.async.wait_group %0;" :: "n"(LEFT) : "memory"); }
// Returns the row of a token; at least `rows` for tokens that pad a bucket. A whole warp calls it.
DEVICE int row_of(const i64 *starts, int rows, int token) {
    int row = 0, before = 32;
    for (int i = threadIdx.x & 31; before == 32; i += 32)
        row += before = __popc(__ballot_sync(~0u, i < rows && int(starts[i + 1]) <= token));
    return row;
}
DEVICE void prefetch(const void *p) { asm volatile("prefetch.global.L2 [%0];" :: "l"(p)); }
// Barriers (mbarrier) in shared memory, at which copies signal their completion.
#if __CUDA_ARCH__ >= 900
DEVICE void init_barrier(u32 barrier, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" :: "r"(barrier), "r"(arrivals) : "memory");
}
DEVICE void publish_barriers() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
DEVICE void expect_bytes(u32 barrier, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" :: "r"(barrier), "r"(bytes) : "memory");
}
DEVICE void arrive_barrier(u32 barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" :: "r"(barrier) : "memory");
}
// Orders plain reads of shared memory before later bulk copies to it. Bulk copies use another proxy, so that a barrier alone
// does not order them after reads (PTX ISA, proxies): without this fence, reads in flight returned what was copied.
DEVICE void end_reads() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
DEVICE void await_barrier(u32 barrier, u32 parity) {
    u32 done;
    do asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
                    : "=r"(done) : "r"(barrier), "r"(parity) : "memory");
    while (!done);
}
DEVICE void bulk_copy(u32 to, const void *from, int bytes, u32 barrier, u64 policy) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;"
                 :: "r"(to), "l"(from), "r"(bytes), "r"(barrier), "l"(policy) : "memory");
}
// Without an L2 policy: for data that other blocks read, too, or that is written soon.
DEVICE void bulk_copy_kept(u32 to, const void *from, int bytes, u32 barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                 :: "r"(to), "l"(from), "r"(bytes), "r"(barrier) : "memory");
}
#else  // cp.async: a whole warp copies. Reads need no fence, because these copies use the same proxy
DEVICE void init_barrier(u32 barrier, int arrivals) {
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" :: "r"(barrier), "r"(arrivals) : "memory");
}
DEVICE void publish_barriers() {}
DEVICE void expect_bytes(u32, int) {}
DEVICE void arrive_barrier(u32 barrier) {
    asm volatile("{ .reg .b64 s; mbarrier.arrive.shared.b64 s, [%0]; }" :: "r"(barrier) : "memory");
}
DEVICE void end_reads() {}
DEVICE void await_barrier(u32 barrier, u32 parity) {
    u32 done;
    do asm volatile("{ .reg .pred p; mbarrier.test_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
                    : "=r"(done) : "r"(barrier), "r"(parity) : "memory");
    while (!done);
}
// A whole warp calls it. Each lane copies 16 bytes at a time.
DEVICE void bulk_copy_kept(u32 to, const void *from, int bytes, u32) {
#pragma unroll 4
    for (int at = (threadIdx.x & 31) * 16; at < bytes; at += 512) copy_async<16>(to + at, (const char *)from + at);
}
// Ignores the policy: ptxas makes illegal instructions from cp.async with one (triton-lang/triton, pull request 11660).
DEVICE void bulk_copy(u32 to, const void *from, int bytes, u32 barrier, u64) { bulk_copy_kept(to, from, bytes, barrier); }
#endif
// A warp calls it after it has read its slot. The copying warp waits for the barrier before it writes to the slot again.
DEVICE void release_slot(u32 barrier) {
    end_reads();
    __syncwarp();
    if ((threadIdx.x & 31) == 0) arrive_barrier(barrier);
}
// Copiers are the threads that call `bulk_copy`: only the thread `first` on a card with bulk copies, otherwise its whole warp,
// 16 bytes a lane. The barrier of a slot expects COPIERS arrivals.
constexpr __device__ bool BULK_COPIES = __CUDA_ARCH__ >= 900;
constexpr __device__ int COPIERS = BULK_COPIES ? 1 : 32;
DEVICE bool is_copier(int first) { return BULK_COPIES ? threadIdx.x == first : threadIdx.x >> 5 == first >> 5; }
DEVICE void meet_copiers() {
    if constexpr (!BULK_COPIES) __syncwarp();
}
// All copiers call it after the last copy that a barrier waits for. With cp.async, they arrive when their copies are complete.
DEVICE void end_copies(u32 barrier) {
    if constexpr (!BULK_COPIES) asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" :: "r"(barrier) : "memory");
}
// A copier calls it before it ends.
DEVICE void await_own_copies() {
    if constexpr (!BULK_COPIES) await_copies();
}
// A whole warp calls these. Each lane with `has` has one copy.
#if __CUDA_ARCH__ >= 900
#define COPY_EACH(has, to, from, bytes, barrier, policy) \
    if (has) bulk_copy(to, from, bytes, barrier, policy)
#define COPY_EACH_KEPT(has, to, from, bytes, barrier) \
    if (has) bulk_copy_kept(to, from, bytes, barrier)
#else
struct Copy {
    u32 to;
    const void *from;
    int bytes;
};
template <class F> DEVICE void copy_in_turn(bool has, const Copy &own, F copy) {
    for (u32 left = __ballot_sync(~0u, has); left; left &= left - 1) {
        const int lane = __ffs(left) - 1;
        copy(__shfl_sync(~0u, own.to, lane), (const void *)__shfl_sync(~0u, u64(own.from), lane), __shfl_sync(~0u, own.bytes, lane));
    }
}
#define COPY_EACH(has, to, from, bytes, barrier, policy) \
    copy_in_turn(has, has ? Copy{to, from, bytes} : Copy{}, [=](u32 t, const void *f, int n) { bulk_copy(t, f, n, 0, policy); })
#define COPY_EACH_KEPT(has, to, from, bytes, barrier) \
    copy_in_turn(has, has ? Copy{to, from, bytes} : Copy{}, [=](u32 t, const void *f, int n) { bulk_copy_kept(t, f, n, 0); })
#endif
DEVICE void multiply(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
constexpr int BYTES_BIAS = 0x4b400000;
// Multiplies 8-bit integers. Those of the first matrix are signed or unsigned (SIGNED). With `fresh`, sums start at BYTES_BIAS,
// the bits of the float 12,582,912: read as a float, a sum s is 12,582,912 + s.
template <bool SIGNED> DEVICE void multiply_bytes(int (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1, bool fresh) {
    const int c0 = fresh ? BYTES_BIAS : d[0], c1 = fresh ? BYTES_BIAS : d[1], c2 = fresh ? BYTES_BIAS : d[2], c3 = fresh ? BYTES_BIAS : d[3];
    if constexpr (SIGNED)
        asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%11,%12,%13};"
            : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
            : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1), "r"(c0), "r"(c1), "r"(c2), "r"(c3));
    else
        asm("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%11,%12,%13};"
            : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3])
            : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1), "r"(c0), "r"(c1), "r"(c2), "r"(c3));
}
// The same for half as many columns, always with fresh sums.
template <bool SIGNED> DEVICE void multiply_half(int (&d)[4], u32 a0, u32 a1, u32 b) {
    if constexpr (SIGNED)
        asm("mma.sync.aligned.m16n8k16.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%7,%7,%7,%7};"
            : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3]) : "r"(a0), "r"(a1), "r"(b), "r"(BYTES_BIAS));
    else
        asm("mma.sync.aligned.m16n8k16.row.col.s32.u8.s8.s32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%7,%7,%7,%7};"
            : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3]) : "r"(a0), "r"(a1), "r"(b), "r"(BYTES_BIAS));
}
// Adds four products of such integers to a sum. Those in `a` are signed or unsigned (SIGNED).
template <bool SIGNED> DEVICE int multiply_four(u32 a, u32 b, int sum) {
    if constexpr (SIGNED) asm("dp4a.s32.s32 %0, %1, %2, %0;" : "+r"(sum) : "r"(a), "r"(b));
    else asm("dp4a.u32.s32 %0, %1, %2, %0;" : "+r"(sum) : "r"(a), "r"(b));
    return sum;
}
// Returns x & mask | bits by one instruction.
DEVICE u32 select(u32 x, u32 mask, u32 bits) {
    u32 r;
    asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(r) : "r"(x), "r"(mask), "r"(bits));
    return r;
}
DEVICE float half_of(u32 x) {
    float r;
    asm("cvt.f32.f16 %0, %1;" : "=f"(r) : "h"(u16(x)));
    return r;
}
// Loads N consecutive numbers by vector loads: N is 2, 4 or 8.
template <int N> DEVICE void load_all(float (&v)[N], const float *p) {
    if constexpr (N == 2) {
        const float2 x = __ldcg((const float2 *)p);
        v[0] = x.x, v[1] = x.y;
    } else {
#pragma unroll
        for (int i = 0; i < N; i += 4) {
            const float4 x = load4(p + i);
            v[i] = x.x, v[i + 1] = x.y, v[i + 2] = x.z, v[i + 3] = x.w;
        }
    }
}
template <int N> DEVICE void load_words(u32 (&w)[N / 2], const u16 *p) {
    if constexpr (N == 2) w[0] = __ldcg((const u32 *)p);
    if constexpr (N == 4) {
        const uint2 x = __ldcg((const uint2 *)p);
        w[0] = x.x, w[1] = x.y;
    }
    if constexpr (N == 8) {
        const uint4 x = load8(p);
        w[0] = x.x, w[1] = x.y, w[2] = x.z, w[3] = x.w;
    }
}
template <int N> DEVICE void load_all(float (&v)[N], const u16 *p) {
    u32 w[N / 2];
    load_words<N>(w, p);
#pragma unroll
    for (int i = 0; i < N; ++i) v[i] = i & 1 ? high(w[i / 2]) : low(w[i / 2]);
}
template <int N> DEVICE void store_all(u16 *p, const float (&v)[N]) {
#pragma unroll
    for (int i = 0; i < N; i += 2) {
        const u32 w = narrow2(v[i], v[i + 1]);
        asm volatile("st.global.u32 [%0], %1;" :: "l"(p + i), "r"(w) : "memory");
    }
}
