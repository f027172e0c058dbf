
// All-reduce over the devices of one process: adds the sum of all devices' parts to the residual of each device. All devices
// get the same bits.
//
// `all_reduce` serves few tokens, and adds in the order of deltic/ops/slices.py. Every device stores its part into the box of
// each peer device, waits until the parts of all peers are in its own box, and adds them in pairs. A cell of a box holds two
// numbers, each followed by the number of the sum (epoch). One store writes the cell, so no fence is needed.
//
// `all_reduce_norm` serves many tokens; see there.
//
// A box has room for two sums, used alternately. A device that begins sum n + 2 has received sum n + 1 from all peers, which
// have then read sum n. Boxes may lie in host memory.

enum { kEpoch, kDone, kFailed };  // u32 each: number of the last sum; of ended blocks; 1 after a timeout

struct AllReduce {
    const void *x;     // this device's part: [2 cells] float32; of many tokens [T, H] bfloat16
    float *y;          // residual of the same shape; the sum is added to it
    u32 *state;        // [3]
    u32 *report;       // [1], host memory: 1 + the rank that timed out
    uint4 *boxes[8];   // each device's box, [2, N, room] cells; of many tokens [2, 2 N, room]
    i64 limit;         // nanoseconds to wait for a device
    int cells, room, rank;
    int fences;        // boxes lie in host memory
};

// Waits until `there` holds for a cell, which means that all data from device `from` has arrived, and returns the cell. After
// `limit` nanoseconds it reports the device and returns NaN; from then on, no thread waits for any cell.
template <class There>
DEVICE uint4 receive(const AllReduce &a, const uint4 *cell, int from, i64 limit, bool failed, There there) {
    u64 began = 0;
    for (int tries = 0;; ++tries) {
        const uint4 v = load_volatile(cell);
        if (there(v)) return v;
        if (failed) break;
        if (tries % 1024 < 1023) continue;
        const u64 time = nanoseconds();
        if (!began) began = time;
        failed = load_volatile(a.state + kFailed);
        if (!failed && i64(time - began) > limit) {
            store_volatile(a.state + kFailed, 1), store_volatile(a.report, 1 + from);
            failed = true;
        }
    }
    const u32 none = 0x7fffffff;
    return make_uint4(none, none, none, none);
}
DEVICE u32 begin_sum(const AllReduce &a) {
    const u32 epoch = load_volatile(a.state + kEpoch) + 1;
    return epoch ? epoch : 2;  // cells hold 0 at first
}
// All threads of all blocks call it.
DEVICE void end_sum(const AllReduce &a, u32 epoch) {
    __syncthreads();
    if (threadIdx.x || count_up((int *)a.state + kDone) != int(gridDim.x) - 1) return;
    store_volatile(a.state + kDone, 0), store_volatile(a.state + kEpoch, epoch);
}
// Returns a device's box. The list is a kernel parameter, which the compiler can only index with constants.
template <int N> DEVICE uint4 *box_of(const AllReduce &a, int device) {
    uint4 *box = a.boxes[0];
#pragma unroll
    for (int p = 1; p < N; ++p) {
        if (p == device) box = a.boxes[p];
    }
    return box;
}
// N: number of devices, a power of two. Blocks of 512 threads, one thread per cell.
template <int N> DEVICE void all_reduce(const AllReduce &a) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    launch_dependents();
    wait();
    const u32 epoch = begin_sum(a);
    const bool failed = load_volatile(a.state + kFailed);
    if (i < a.cells) {
        float2 part[N];
        const float2 own = __ldcg((const float2 *)a.x + i), old = __ldcg((const float2 *)a.y + i);
        const i64 turn = i64(epoch & 1) * N;
#pragma unroll
        for (int p = 0; p < N; ++p) {
            if (p != a.rank)
                store_volatile(a.boxes[p] + (turn + a.rank) * a.room + i, __float_as_uint(own.x), epoch, __float_as_uint(own.y), epoch);
        }
        const uint4 *box = box_of<N>(a, a.rank);
#pragma unroll
        for (int p = 0; p < N; ++p) {
            part[p] = own;
            if (p == a.rank) continue;
            const uint4 v = receive(a, box + (turn + p) * a.room + i, p, a.limit, failed,
                                    [&](uint4 v) { return v.y == epoch && v.w == epoch; });
            part[p] = make_float2(__uint_as_float(v.x), __uint_as_float(v.z));
        }
#pragma unroll
        for (int apart = 1; apart < N; apart *= 2) {
#pragma unroll
            for (int p = 0; p < N; p += 2 * apart)
                part[p] = make_float2(part[p].x + part[p + apart].x, part[p].y + part[p + apart].y);
        }
        *((float2 *)a.y + i) = make_float2(old.x + part[0].x, old.y + part[0].y);
    }
    end_sum(a, epoch);
}

// Many tokens. A cell is eight bfloat16 numbers, without an epoch. A pair of numbers that has not arrived is kAbsent, a NaN
// that no sum gives. So these cells need no fence either. The reader sets a cell back to kAbsent.
constexpr u32 kAbsent = 0xffffffff;

struct AllReduceNorm : AllReduce {
    const float *scale;  // [H]
    u16 *normed;         // [T, H]
    float *wide;         // [T, H]: the same in float32; null: not wanted
    float eps;
};

DEVICE u32 present(u32 pair) { return pair == kAbsent ? 0x7fff7fff : pair; }
// Receives a cell from device `from` and frees it for another sum.
DEVICE uint4 take_pairs(const AllReduce &a, uint4 *cell, int from, i64 limit, bool failed) {
    const uint4 v = receive(a, cell, from, limit, failed, [](uint4 v) {
        return v.x != kAbsent && v.y != kAbsent && v.z != kAbsent && v.w != kAbsent;
    });
    store_volatile(cell, kAbsent, kAbsent, kAbsent, kAbsent);
    return v;
}
DEVICE void add_pairs(float (&sum)[8], uint4 v) {
    sum[0] += low(v.x), sum[1] += high(v.x), sum[2] += low(v.y), sum[3] += high(v.y);
    sum[4] += low(v.z), sum[5] += high(v.z), sum[6] += low(v.w), sum[7] += high(v.w);
}
DEVICE uint4 round_to_pairs(const float (&v)[8]) {
    return make_uint4(narrow2(v[0], v[1]), narrow2(v[2], v[3]), narrow2(v[4], v[5]), narrow2(v[6], v[7]));
}
DEVICE void store8(float *p, const float (&v)[8]) {
    store4(p, make_float4(v[0], v[1], v[2], v[3])), store4(p + 4, make_float4(v[4], v[5], v[6], v[7]));
}
// Adds the sum to the residual, then norms the residual. Each row has an owner: the peers send it their parts; it adds them and
// sends the sum back in bfloat16. Two devices both own all rows and send each other all parts: sums would be as many bytes and
// arrive later. Every device then has the whole residual. One block of 256 threads per row (`cells` rows). A block waits only
// for the same block of other devices.
template <int N, int H> DEVICE void all_reduce_norm(const AllReduceNorm &a) {
    constexpr int CELLS = H / 8, EACH = (CELLS + 255) / 256;
    static_assert(H % 8 == 0);
    __shared__ float squares[8];
    const int row = blockIdx.x, owner = N == 2 ? a.rank : row % N;
    launch_dependents();
    wait();
    const u32 epoch = begin_sum(a);
    const bool failed = load_volatile(a.state + kFailed);
    const uint4 *x = (const uint4 *)a.x + i64(row) * CELLS;
    const i64 turn = i64(epoch & 1) * 2 * N, place = i64(N == 2 ? row : row / N) * CELLS;
    const auto parts = [&](uint4 *box, int from) { return box + (turn + from) * a.room + place; };
    const auto sums = [&](uint4 *box, int from) { return parts(box, N + from); };
    float v[EACH][8] = {}, total = 0;
#pragma unroll
    for (int k = 0; k < EACH; ++k) {
        const int i = threadIdx.x + k * 256;
        if (i >= CELLS || (N > 2 && owner == a.rank)) continue;
        const uint4 own = __ldcg(x + i);
        store_volatile(parts(box_of<N>(a, N == 2 ? 1 - a.rank : owner), a.rank) + i, present(own.x), present(own.y),
                    present(own.z), present(own.w));
    }
    uint4 *box = box_of<N>(a, a.rank);
#pragma unroll
    for (int k = 0; k < EACH; ++k) {
        const int i = threadIdx.x + k * 256;
        if (i >= CELLS) continue;
        float *y = a.y + (i64(row) * CELLS + i) * 8, sum[8] = {};
        const float4 first = load4(y), second = load4(y + 4);
        if (owner == a.rank) {
            const uint4 own = __ldcg(x + i);
#pragma unroll
            for (int p = 0; p < N; ++p)
                add_pairs(sum, p == a.rank ? own : take_pairs(a, parts(box, p) + i, p, a.limit, failed));
            if constexpr (N > 2) {
                const uint4 rounded = round_to_pairs(sum);
#pragma unroll
                for (int p = 0; p < N; ++p) {
                    if (p != a.rank)
                        store_volatile(sums(a.boxes[p], a.rank) + i, rounded.x, rounded.y, rounded.z, rounded.w);
                }
#pragma unroll
                for (int j = 0; j < 8; ++j) sum[j] = 0;
                add_pairs(sum, rounded);
            }
        } else {
            // twice the limit: the owner may wait for a third device, and must report that one first
            add_pairs(sum, take_pairs(a, sums(box, owner) + i, owner, 2 * a.limit, failed));
        }
        const float old[8] = {first.x, first.y, first.z, first.w, second.x, second.y, second.z, second.w};
#pragma unroll
        for (int j = 0; j < 8; ++j) v[k][j] = old[j] + sum[j], total += v[k][j] * v[k][j];
        store8(y, v[k]);
    }
    total = warp_sum(total);
    if ((threadIdx.x & 31) == 0) squares[threadIdx.x >> 5] = total;
    __syncthreads();
    total = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) total += squares[i];
    const float factor = rsqrtf(total / H + a.eps);
#pragma unroll
    for (int k = 0; k < EACH; ++k) {
        const int i = threadIdx.x + k * 256;
        if (i >= CELLS) continue;
        const i64 at = i64(row) * CELLS + i;
        const float4 first = __ldg((const float4 *)a.scale + i * 2), second = __ldg((const float4 *)a.scale + i * 2 + 1);
        const float scale[8] = {first.x, first.y, first.z, first.w, second.x, second.y, second.z, second.w};
#pragma unroll
        for (int j = 0; j < 8; ++j) v[k][j] *= factor * scale[j];
        *((uint4 *)a.normed + at) = round_to_pairs(v[k]);
        if (a.wide) store8(a.wide + at * 8, v[k]);
    }
    if (a.fences) __threadfence_system();
    end_sum(a, epoch);
}
