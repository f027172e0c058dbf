
// The sum of what several devices of one process have, added to each one's residual, in the order of deltic/ops/slices.py.
//
// Every device stores its numbers into a box of each other one, waits for theirs in its own box, and adds them in pairs: so
// all get the same bits. A cell of a box has two numbers, and beside each of them the number of the sum (its epoch), which
// come in one store, so that no fence is needed. A box has room for two sums by turns: whoever begins the next but one has
// seen that all others have begun the next one, that is, have read this one. Boxes may lie in memory of the host.
//
// Each number is sent to all (one shot). From about 512 KB on it is less to send each device the cells that it adds, and to
// have it send their sums back (two shots): a second pair of boxes, and a loop over 1 / N of the cells here.

enum { kEpoch, kDone, kFailed };  // u32 each: of the last sum; blocks that are done; a device did not come

struct AllReduce {
    const float *x;    // [2 cells]: this device's numbers
    float *y;          // [2 cells]: added to
    u32 *state;        // [3]
    u32 *report;       // [1], in memory of the host: 1 + the device that did not come
    uint4 *boxes[8];   // of each device: [2, N, room]
    i64 limit;         // nanoseconds that a device is waited for
    int cells, room, rank;
};

DEVICE void store_cell(uint4 *p, float2 v, u32 epoch) {
    asm volatile("st.volatile.global.v4.u32 [%0], {%1,%2,%3,%4};"
                 :: "l"(p), "r"(__float_as_uint(v.x)), "r"(epoch), "r"(__float_as_uint(v.y)), "r"(epoch) : "memory");
}
DEVICE uint4 load_cell(const uint4 *p) {
    uint4 v;
    asm volatile("ld.volatile.global.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p) : "memory");
    return v;
}
DEVICE u32 load_word(const u32 *p) {
    u32 v;
    asm volatile("ld.volatile.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
    return v;
}
DEVICE void store_word(u32 *p, u32 v) { asm volatile("st.volatile.global.u32 [%0], %1;" :: "l"(p), "r"(v) : "memory"); }
DEVICE u64 now() {
    u64 v;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(v) :: "memory");
    return v;
}
// What device `from` has sent. If it does not come, NaN; then nothing is waited for any more.
DEVICE float2 receive(const AllReduce &a, const uint4 *cell, u32 epoch, int from, bool failed) {
    u64 began = 0;
    for (int tries = 0;; ++tries) {
        const uint4 v = load_cell(cell);
        if (v.y == epoch && v.w == epoch) return make_float2(__uint_as_float(v.x), __uint_as_float(v.z));
        if (failed) break;
        if (tries % 1024 < 1023) continue;
        const u64 time = now();
        if (!began) began = time;
        failed = load_word(a.state + kFailed);
        if (!failed && i64(time - began) > a.limit) {
            store_word(a.state + kFailed, 1), store_word(a.report, 1 + from);
            failed = true;
        }
    }
    const float none = __uint_as_float(0x7fffffff);
    return make_float2(none, none);
}
// N devices: a power of two. Blocks of 512 threads, one for each cell.
template <int N> DEVICE void all_reduce(const AllReduce &a) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    launch_dependents();
    wait();
    u32 epoch = load_word(a.state + kEpoch) + 1;
    if (epoch == 0) epoch = 2;  // boxes begin with 0
    const bool failed = load_word(a.state + kFailed);
    if (i < a.cells) {
        float2 part[N];
        const float2 own = __ldcg((const float2 *)a.x + i), old = __ldcg((const float2 *)a.y + i);
        const i64 turn = i64(epoch & 1) * N;
#pragma unroll
        for (int p = 0; p < N; ++p) {
            if (p != a.rank) store_cell(a.boxes[p] + (turn + a.rank) * a.room + i, own, epoch);
        }
        const uint4 *box = a.boxes[0];
#pragma unroll
        for (int p = 1; p < N; ++p) {
            if (p == a.rank) box = a.boxes[p];
        }
#pragma unroll
        for (int p = 0; p < N; ++p) {
            part[p] = own;
            if (p != a.rank) part[p] = receive(a, box + (turn + p) * a.room + i, epoch, p, failed);
        }
#pragma unroll
        for (int apart = 1; apart < N; apart *= 2) {
#pragma unroll
            for (int p = 0; p < N; p += 2 * apart)
                part[p] = make_float2(part[p].x + part[p + apart].x, part[p].y + part[p + apart].y);
        }
        *((float2 *)a.y + i) = make_float2(old.x + part[0].x, old.y + part[0].y);
    }
    __syncthreads();
    if (threadIdx.x || count_up((int *)a.state + kDone) != int(gridDim.x) - 1) return;
    store_word(a.state + kDone, 0), store_word(a.state + kEpoch, epoch);
}
