// Runs kernels/lora.cuh on the processor: a thread for each thread of a block, one block after the other.
#include <barrier>
#include <bit>
#include <cmath>
#include <cstdint>
#include <memory>
#include <thread>
#include <vector>

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;
#define DEVICE static inline
#define __shared__ static
#define __align__(bytes) __attribute__((aligned(bytes)))

struct uint4 { u32 x, y, z, w; };
struct Index { int x; };
static thread_local Index threadIdx, blockIdx;
static Index gridDim;

struct Warp {
    std::barrier<> meeting{32};
    u64 values[32];
};
static std::vector<std::unique_ptr<Warp>> warps;
static std::unique_ptr<std::barrier<>> block;

DEVICE uint4 make_uint4(u32 x, u32 y, u32 z, u32 w) { return {x, y, z, w}; }
template <class T> DEVICE T __ldcg(const T *p) { return *p; }
DEVICE float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
DEVICE float __fmul_rn(float a, float b) { return a * b; }
DEVICE float rsqrtf(float x) { return 1 / std::sqrt(x); }
DEVICE int __popc(u32 x) { return std::popcount(x); }
DEVICE void __syncthreads() { block->arrive_and_wait(); }
template <class T> DEVICE T exchange(T own, int from) {
    Warp &warp = *warps[threadIdx.x / 32];
    u64 word = 0;
    __builtin_memcpy(&word, &own, sizeof(T));
    warp.values[threadIdx.x % 32] = word;
    warp.meeting.arrive_and_wait();
    T found;
    __builtin_memcpy(&found, &warp.values[from], sizeof(T));
    warp.meeting.arrive_and_wait();
    return found;
}
template <class T> DEVICE T __shfl_sync(u32, T own, int lane) { return exchange(own, lane); }
template <class T> DEVICE T __shfl_up_sync(u32, T own, int apart) {
    const int lane = threadIdx.x % 32;
    return exchange(own, lane < apart ? lane : lane - apart);
}
DEVICE u32 __ballot_sync(u32, bool own) {
    u32 found = 0;
    Warp &warp = *warps[threadIdx.x / 32];
    warp.values[threadIdx.x % 32] = own;
    warp.meeting.arrive_and_wait();
    for (int lane = 0; lane < 32; ++lane) found |= u32(warp.values[lane]) << lane;
    warp.meeting.arrive_and_wait();
    return found;
}

// As in common.cuh.
static int waits;
DEVICE void launch_dependents() {}
DEVICE void wait() {
    if (threadIdx.x == 0) ++waits;
}
DEVICE void prefetch(const void *p) { (void)*(const volatile u16 *)p; }
DEVICE float low(u32 x) { return std::bit_cast<float>(x << 16); }
DEVICE float high(u32 x) { return std::bit_cast<float>(x & 0xffff0000u); }
DEVICE u32 rounded(float x) {
    const u32 bits = std::bit_cast<u32>(x);
    return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
DEVICE u32 narrow2(float lo, float hi) { return rounded(lo) | rounded(hi) << 16; }
DEVICE float warp_sum(float v) {
    for (int apart = 16; apart; apart /= 2) v += exchange(v, (threadIdx.x % 32) ^ apart);
    return v;
}
template <int N> DEVICE void load_all(float (&v)[N], const float *p) {
    for (int i = 0; i < N; ++i) v[i] = p[i];
}
template <int N> DEVICE void load_all(float (&v)[N], const u16 *p) {
    for (int i = 0; i < N; ++i) v[i] = low(p[i]);
}

#include "lora.cuh"

// Returns how many blocks have waited for what came before.
template <class F> static int launch(int grid, int threads, F kernel) {
    gridDim.x = grid, waits = 0;
    for (int number = 0; number < grid; ++number) {
        warps.clear();
        for (int i = 0; i < threads / 32; ++i) warps.push_back(std::make_unique<Warp>());
        block = std::make_unique<std::barrier<>>(threads);
        std::vector<std::thread> running;
        for (int i = 0; i < threads; ++i)
            running.emplace_back([=] {
                threadIdx.x = i, blockIdx.x = number;
                kernel();
            });
        for (auto &each : running) each.join();
    }
    return waits;
}
extern "C" int run_shrink(const Shrink *a, int norm, int grid, int threads) {
    return launch(grid, threads, [=] { norm ? shrink<true>(*a) : shrink<false>(*a); });
}
extern "C" int run_expand(const Expand *a, int grid, int threads) {
    return launch(grid, threads, [=] { expand(*a); });
}
