// Lets the processor run kernels of deltic/ops/cuda/kernels, one block after the other. A fiber stands for each thread of a
// block. Warps take turns in a random order, and some of them rest, so that they meet in many ways. What common.cuh has for a
// GPU is here for a processor, as far as these kernels need it.
#pragma once
#ifndef PER_DEVICE
#define PER_DEVICE  // thread_local: each thread of the processor is a device
#endif
#include <ucontext.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <chrono>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <mutex>
#include <random>
#include <thread>
#include <utility>
#include <vector>

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;
#define DEVICE inline
#define __device__
#define __align__(bytes) __attribute__((aligned(bytes)))

struct uint2 { u32 x, y; };
struct float2 { float x, y; };
struct uint4 { u32 x, y, z, w; };
struct float4 { float x, y, z, w; };
struct Index { int x, y, z; };
static PER_DEVICE Index threadIdx, blockIdx, blockDim, gridDim;
using std::max, std::min;

// Fibers. A fiber that waits lets the others go on, and looks again in its next turn.
struct Fiber {
    ucontext_t context;
    std::vector<char> stack;
    bool ended = false;
};
static PER_DEVICE std::vector<Fiber> fibers;
static PER_DEVICE ucontext_t scheduler;
static PER_DEVICE std::function<void()> kernel_of_block;
static PER_DEVICE std::minstd_rand draw;
static PER_DEVICE bool moved, looked;  // in this round something has happened; a fiber has looked at what others write
static void run_fiber() {
    kernel_of_block();
    fibers[threadIdx.x].ended = moved = true;
}
template <class F> DEVICE void wait_until(F condition) {
    while (!condition()) swapcontext(&fibers[threadIdx.x].context, &scheduler);
}
struct Meeting {
    int count = 0, arrived = 0, turn = 0;
    void arrive_and_wait() {
        const int own = turn;
        if (++arrived == count) arrived = 0, ++turn, moved = true;
        wait_until([&] { return turn != own; });
    }
};

struct Warp {
    Meeting meeting{32};
    u64 values[32];
    u32 left[32][4], right[32][2];  // of the matrices that it multiplies
};
static PER_DEVICE std::vector<Warp> warps;
static PER_DEVICE Meeting block, eight_warps, other_warps;

DEVICE uint2 make_uint2(u32 x, u32 y) { return {x, y}; }
DEVICE uint4 make_uint4(u32 x, u32 y, u32 z, u32 w) { return {x, y, z, w}; }
DEVICE float2 make_float2(float x, float y) { return {x, y}; }
DEVICE float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
template <class T> DEVICE T __ldcg(const T *p) { return *p; }
template <class T> DEVICE T __ldg(const T *p) { return *p; }
DEVICE float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
DEVICE float __fmul_rn(float a, float b) { return a * b; }
DEVICE float __fadd_rn(float a, float b) { return a + b; }
DEVICE float rsqrtf(float x) { return 1 / std::sqrt(x); }
DEVICE u32 __float_as_uint(float x) { return std::bit_cast<u32>(x); }
DEVICE float __uint_as_float(u32 x) { return std::bit_cast<float>(x); }
DEVICE int __popc(u32 x) { return std::popcount(x); }
DEVICE u32 __byte_perm(u32 a, u32 b, u32 which) {
    u32 found = 0;
    for (int i = 0; i < 4; ++i) found |= u32((u64(b) << 32 | a) >> 8 * (which >> 4 * i & 7) & 0xff) << 8 * i;
    return found;
}
DEVICE void __syncthreads() { block.arrive_and_wait(); }
DEVICE Warp &own_warp() { return warps[threadIdx.x / 32]; }
DEVICE void __syncwarp() { own_warp().meeting.arrive_and_wait(); }
template <class T> DEVICE T exchange(T own, int from) {
    Warp &warp = own_warp();
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
template <class T> DEVICE T __shfl_xor_sync(u32, T own, int apart) { return exchange(own, (threadIdx.x % 32) ^ apart); }
template <class T> DEVICE T __shfl_up_sync(u32, T own, int apart) {
    const int lane = threadIdx.x % 32;
    return exchange(own, lane < apart ? lane : lane - apart);
}
DEVICE u32 __ballot_sync(u32, bool own) {
    u32 found = 0;
    Warp &warp = own_warp();
    warp.values[threadIdx.x % 32] = own;
    warp.meeting.arrive_and_wait();
    for (int lane = 0; lane < 32; ++lane) found |= u32(warp.values[lane]) << lane;
    warp.meeting.arrive_and_wait();
    return found;
}

// As in common.cuh.
static PER_DEVICE int waits;
DEVICE void launch_dependents() {}
DEVICE void wait() {
    if (threadIdx.x == 0) ++waits;
}
DEVICE void prefetch(const void *p) { (void)*(const volatile u16 *)p; }
DEVICE u64 read_once() { return 0; }
constexpr int least(int a, int b) { return a < b ? a : b; }
constexpr int heads_stride(int columns, int slice) { return (columns + columns / slice + 3) / 4 * 4; }
DEVICE float low(u32 x) { return std::bit_cast<float>(x << 16); }
DEVICE float high(u32 x) { return std::bit_cast<float>(x & 0xffff0000u); }
DEVICE u16 narrow(float x) {
    const u32 bits = std::bit_cast<u32>(x);
    return x == x ? (bits + 0x7fff + (bits >> 16 & 1)) >> 16 : 0x7fff;
}
DEVICE u32 narrow2(float lo, float hi) { return narrow(lo) | u32(narrow(hi)) << 16; }
DEVICE float reciprocal(float x) { return 1 / x; }
DEVICE float silu(float x) { return x / (1 + std::exp(-x)); }
DEVICE float warp_sum(float v) {
    for (int apart = 16; apart; apart /= 2) v += exchange(v, (threadIdx.x % 32) ^ apart);
    return v;
}
DEVICE u32 warp_max(u32 v) {
    for (int apart = 16; apart; apart /= 2) v = max(v, exchange(v, (threadIdx.x % 32) ^ apart));
    return v;
}
DEVICE float load(const float *p) { return *p; }
DEVICE float4 load4(const float *p) { return *(const float4 *)p; }
DEVICE void store4(float *p, float4 v) { *(float4 *)p = v; }
DEVICE uint4 load8(const u16 *p) { return *(const uint4 *)p; }
template <int N> DEVICE void load_all(float (&v)[N], const float *p) {
    for (int i = 0; i < N; ++i) v[i] = p[i];
}
template <int N> DEVICE void load_all(float (&v)[N], const u16 *p) {
    for (int i = 0; i < N; ++i) v[i] = low(p[i]);
}
DEVICE void meet_eight_warps() { eight_warps.arrive_and_wait(); }
template <int WARPS> DEVICE void meet_copying_warps() {
    if (WARPS > 1) other_warps.arrive_and_wait();
    __syncwarp();
}
// As mma.sync.aligned.m16n8k16 of bfloat16.
DEVICE void multiply(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    Warp &warp = own_warp();
    const int lane = threadIdx.x % 32;
    const u32 left[4] = {a0, a1, a2, a3}, right[2] = {b0, b1};
    memcpy(warp.left[lane], left, sizeof left), memcpy(warp.right[lane], right, sizeof right);
    warp.meeting.arrive_and_wait();
    for (int e = 0; e < 4; ++e) {
        const int row = lane / 4 + e / 2 * 8, column = lane % 4 * 2 + e % 2;
        for (int k = 0; k < 16; k += 2) {
            const u32 a = warp.left[row % 8 * 4 + k % 8 / 2][row / 8 + k / 8 * 2], b = warp.right[column * 4 + k % 8 / 2][k / 8];
            d[e] += low(a) * low(b) + high(a) * high(b);
        }
    }
    warp.meeting.arrive_and_wait();
}

// Memory that other devices write to at any time: two numbers come at once. Who looks there lets the others go on first.
DEVICE void store_volatile(uint4 *p, u32 x, u32 y, u32 z, u32 w) {
    const auto to = (volatile u64 *)p;
    to[0] = x | u64(y) << 32, to[1] = z | u64(w) << 32;
}
DEVICE void store_volatile(u32 *p, u32 v) { *(volatile u32 *)p = v; }
DEVICE uint4 load_volatile(const uint4 *p) {
    looked = true;
    swapcontext(&fibers[threadIdx.x].context, &scheduler);
    const auto from = (const volatile u64 *)p;
    const u64 first = from[0], second = from[1];
    return {u32(first), u32(first >> 32), u32(second), u32(second >> 32)};
}
DEVICE u32 load_volatile(const u32 *p) { return *(const volatile u32 *)p; }
// A clock that goes on, by a tenth of a second, when no device has had anything to do for 50 rounds.
static PER_DEVICE int device;
constexpr int ENDED = 1 << 30;
static std::atomic<int> idle_rounds[8];
static std::atomic<u64> clock_now;
DEVICE u64 nanoseconds() { return clock_now; }
DEVICE void end_round() {
    static std::mutex one_at_a_time;
    const std::lock_guard lock(one_at_a_time);
    idle_rounds[device] = moved ? 0 : idle_rounds[device] + 1;
    for (const auto &rounds : idle_rounds)
        if (rounds < 50) return;
    clock_now += 100'000'000;
    for (auto &rounds : idle_rounds)
        if (rounds < ENDED) rounds = 0;
}
DEVICE void __threadfence_system() {}
DEVICE int count_up(int *p) { return (*p)++; }

// Shared memory whose size a launch gives. Addresses in it begin with 0.
alignas(128) PER_DEVICE char shared[256 << 10];
DEVICE u32 shared_address(const void *p) { return u32((const char *)p - shared); }
template <class T> DEVICE T read_shared(u32 at) {
    T found;
    memcpy(&found, shared + at, sizeof found);
    return found;
}
DEVICE uint4 load_shared(u32 at) { return read_shared<uint4>(at); }
DEVICE uint2 load_shared2(u32 at) { return read_shared<uint2>(at); }

// Barriers of eight bytes from the beginning of shared memory, and copies that report to them, some of them late.
struct Barrier {
    int arrivals = 0, pending = 0, bytes = 0;
    u32 phase = 0;
    void settle() {
        moved = true;
        if (pending == 0 && bytes == 0) ++phase, pending = arrivals;
    }
};
struct Copy {
    u32 to, barrier;
    const void *from;
    int bytes, rounds;  // until it is there
};
static PER_DEVICE Barrier barriers[64];
static PER_DEVICE std::vector<Copy> on_their_way;
static PER_DEVICE int copies;
DEVICE void init_barrier(u32 at, int arrivals) { barriers[at / 8] = {arrivals, arrivals}; }
DEVICE void publish_barriers() {}
DEVICE void arrive_barrier(u32 at) { --barriers[at / 8].pending, barriers[at / 8].settle(); }
DEVICE void expect_bytes(u32 at, int bytes) { barriers[at / 8].bytes += bytes, arrive_barrier(at); }
DEVICE void await_barrier(u32 at, u32 parity) {
    wait_until([=] { return (barriers[at / 8].phase & 1) != parity; });
}
DEVICE void bulk_copy(u32 to, const void *from, int bytes, u32 barrier, u64) {
    on_their_way.push_back({to, barrier, from, bytes, int(draw() % 20)}), ++copies;
}
DEVICE void end_due_copies() {
    std::erase_if(on_their_way, [](Copy &copy) {
        if (copy.rounds-- > 0) return false;
        memcpy(shared + copy.to, copy.from, copy.bytes);
        barriers[copy.barrier / 8].bytes -= copy.bytes, barriers[copy.barrier / 8].settle();
        return true;
    });
}
constexpr bool BULK_COPIES = true;
constexpr int COPIERS = 1;
DEVICE void end_copies(u32) {}
DEVICE void await_own_copies() {}
// Copies that a thread itself waits for. They come as late as possible: all at once when it waits.
struct OwnCopy {
    u32 to;
    const void *from;
    int group;
    bool has;
};
static PER_DEVICE std::vector<OwnCopy> own_copies[1024];
static PER_DEVICE int own_groups[1024];
DEVICE void copy_async_or_zero(u32 to, const void *from, bool has) {
    own_copies[threadIdx.x].push_back({to, from, own_groups[threadIdx.x], has}), ++copies;
}
DEVICE void commit_copies() { ++own_groups[threadIdx.x]; }
template <int LEFT> DEVICE void await_copies_but() {
    const int due = own_groups[threadIdx.x] - LEFT;
    std::erase_if(own_copies[threadIdx.x], [=](const OwnCopy &copy) {
        if (copy.group >= due) return false;
        if (copy.has) memcpy(shared + copy.to, copy.from, 16);
        else memset(shared + copy.to, 0, 16);
        return true;
    });
}
#define COPY_EACH(has, to, from, bytes, barrier, policy) \
    if (has) bulk_copy(to, from, bytes, barrier, policy)

// Runs a block; false: all wait for something that does not come.
static bool run_block(int threads) {
    constexpr int STACK = 64 << 10, PATIENCE = 1000;
    std::vector<int> order(threads / 32);
    for (int i = 0; i < int(order.size()); ++i) order[i] = i;
    fibers = std::vector<Fiber>(threads);
    for (Fiber &fiber : fibers) {
        fiber.stack.resize(STACK);
        getcontext(&fiber.context);
        fiber.context.uc_stack.ss_sp = fiber.stack.data(), fiber.context.uc_stack.ss_size = STACK;
        fiber.context.uc_link = &scheduler;
        makecontext(&fiber.context, run_fiber, 0);
    }
    for (int idle = 0; idle < PATIENCE; idle = moved || looked ? 0 : idle + 1) {
        if (looked && !moved) std::this_thread::sleep_for(std::chrono::microseconds(50));
        end_round();
        moved = looked = false;
        end_due_copies();
        std::shuffle(order.begin(), order.end(), draw);
        for (const int warp : order) {
            if (draw() % 4 == 0) continue;
            for (threadIdx.x = warp * 32; threadIdx.x < warp * 32 + 32; ++threadIdx.x)
                if (!fibers[threadIdx.x].ended) swapcontext(&scheduler, &fibers[threadIdx.x].context);
        }
        if (std::all_of(fibers.begin(), fibers.end(), [](const Fiber &fiber) { return fiber.ended; })) return on_their_way.empty();
    }
    return false;
}
// Returns how many blocks have waited for what came before; -1 if one of them does not end.
template <class F> static int launch(int grid, int threads, F kernel) {
    gridDim.x = grid, blockDim.x = threads, waits = 0, copies = 0, kernel_of_block = kernel;
    for (blockIdx.x = 0; blockIdx.x < grid; ++blockIdx.x) {
        memset(shared, 0xff, sizeof shared);
        warps = std::vector<Warp>(threads / 32), on_their_way.clear();
        block = {threads}, eight_warps = {256}, other_warps = {threads - 256};
        if (!run_block(threads)) return -1;
    }
    return waits;
}
