// Experts that the host computes for up to 16 tokens. The step itself sends the request and receives the answer. The
// feed-forward of a dense layer is a single expert (E = 1) that all tokens use.
//
// Request and answer are in pinned host memory. `ask_host` writes the request, then its number. `add_host`, after the
// products, waits until the host has written the same number beside its sums. So one request is in flight at a time, and the
// GPU reads its experts while the host computes others. A null pointer marks an expert of the host: the other kernels skip
// it. If the host is late, its tokens become NaN, and it gets no further request before it has caught up.

// State in GPU memory, u32 each: number of the last request; arrived blocks; 1 if the host is late; one of the values below;
// from kMine on, for each token, the count of its experts that the host has.
enum { kNumber, kArrived, kLate, kAsked, kMine };
enum { kNobody, kHost, kLateHost };  // no host experts in this layer; a request was sent; none was sent to a late host

struct AskHost {
    const float *x, *scale;     // [T, H] residual; [H] scale of the norm
    const float *logits;        // as in `ExpertsGate`; null if E is 1
    const u64 *weights;         // [E]: addresses of experts; 0: the host has the expert; null if E is 1
    const i64 *count, *starts;  // as in `ExpertsGate`
    u32 *state;                 // [kMine + 16]
    u32 *request;               // [3]: number, layer, tokens; this and the next fields up to `input`: host memory
    const u32 *answer;          // [1]: number of the last completed request
    int *counts, *experts;      // [16]; [16, BEST]: each token's experts of the host, best first
    float *shares, *factors;    // [16, BEST]; [16]: factor of the norm, for products with the input
    u16 *input;                 // [16, H]: in the form of `GateUnits`
    float eps;
    int tokens, first, layer;   // first: token index in the step
};

struct AddHost {
    u32 *state;         // as in `AskHost`
    const u32 *answer;  // in host memory
    const float *sums;  // [16, H] in host memory
    float *y;           // [T, H], added to
    i64 limit;          // longest wait for the host, in nanoseconds
    int hidden;
};

// Accesses to host memory that bypass all caches.
DEVICE u32 load_host(const u32 *p) {
    u32 v;
    asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
    return v;
}
DEVICE float4 load_host4(const float *p) {
    float4 v;
    asm volatile("ld.volatile.global.v4.f32 {%0,%1,%2,%3}, [%4];" : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "l"(p) : "memory");
    return v;
}
DEVICE void store_host(u32 *p, u32 v) { asm volatile("st.release.sys.global.u32 [%0], %1;" :: "l"(p), "r"(v) : "memory"); }
DEVICE u32 load_state(const u32 *p) { return __ldcg(p); }

// One block of nine warps per token. Eight warps convert the token's input to the form that the products use. The last warp
// selects its experts.
template <int H, int E, int BEST, bool SHARED, bool NORMALISED> DEVICE void ask_host(const AskHost &a) {
    struct One {
        const float *x, *scale;
        float eps;
        int tokens;
    };
    __shared__ __align__(16) char line[H * 2];
    __shared__ float squares[8 * 16], share[BEST];
    __shared__ int expert[BEST], mine;
    const int token = blockIdx.x, warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    const One one{a.x + i64(token) * H, a.scale, a.eps, 1};
    Input<One, H, true, 0, 0, kPlain> input(one, squares);
    input.xs = line;
    launch_dependents();
    wait();
    const bool real = token < real_tokens(a.count, a.starts, a.tokens, a.first);
    const bool late = load_state(a.state + kLate);
    if (warp < input.WARPS) {
        if (real) input.stage();
    } else {
        int found = 0;
        if (real) {
            if constexpr (E > 1) choose_experts<E, BEST, NORMALISED>(a.logits + i64(token) * (E + SHARED), expert, share);
            else expert[0] = 0, share[0] = 1;
            __syncwarp();
            for (int j = lane; j < (BEST + 31) / 32 * 32; j += 32) {
                const bool own = j < BEST && (E == 1 || !__ldg(a.weights + expert[j < BEST ? j : 0]));
                const u32 any = __ballot_sync(~0u, own);
                if (own && !late) {
                    const int at = token * BEST + found + __popc(any & ((1u << lane) - 1));
                    a.experts[at] = expert[j], a.shares[at] = share[j];
                }
                found += __popc(any);
            }
        }
        if (lane == 0) {
            mine = found, a.state[kMine + token] = found;
            if (!late) a.counts[token] = found;
        }
    }
    __syncthreads();
    if (mine && !late) {
        for (int i = threadIdx.x; i < H / 8; i += blockDim.x)
            ((uint4 *)(a.input + i64(token) * H))[i] = ((const uint4 *)line)[i];
        if (threadIdx.x == 0) a.factors[token] = input.factor(0);
    }
    __syncthreads();
    if (threadIdx.x) return;
    if (gridDim.x > 1) __threadfence_system();  // for a single block, the release store of the number suffices
    // the lower half counts blocks; the upper half counts blocks whose token has experts of the host
    const u32 before = atomicAdd(a.state + kArrived, mine ? 0x10001 : 1);
    if ((before & 0xffff) != gridDim.x - 1) return;
    __threadfence();
    u32 number = load_state(a.state + kNumber);
    a.state[kArrived] = 0;
    a.state[kAsked] = !(before >> 16 || mine) ? kNobody : late ? kLateHost : kHost;
    if (late && load_host(a.answer) == number) a.state[kLate] = 0;
    if (late || !(before >> 16 || mine)) return;
    a.state[kNumber] = ++number;
    a.request[1] = a.layer, a.request[2] = a.tokens;
    store_host(a.request, number);
}

// One block of 256 threads per token.
DEVICE void add_host(const AddHost &a) {
    __shared__ bool there;
    const int token = blockIdx.x;
    launch_dependents();
    wait();
    if (!load_state(a.state + kMine + token)) return;
    if (threadIdx.x == 0) {
        const u32 number = load_state(a.state + kNumber);
        const bool asked = load_state(a.state + kAsked) == kHost;
        const u64 began = nanoseconds();
        bool came = false;
        while (asked && !(came = load_host(a.answer) == number) && i64(nanoseconds() - began) < a.limit) __nanosleep(100);
        if (asked && !came) a.state[kLate] = 1;
        there = came;
    }
    __syncthreads();
    const float none = __uint_as_float(0x7fffffff);
    for (int i = threadIdx.x * 4; i < a.hidden; i += blockDim.x * 4) {
        const float4 v = there ? load_host4(a.sums + i64(token) * a.hidden + i) : make_float4(none, none, none, none);
        float4 *const y = (float4 *)(a.y + i64(token) * a.hidden + i);
        const float4 old = __ldcg(y);
        *y = make_float4(old.x + v.x, old.y + v.y, old.z + v.z, old.w + v.w);
    }
}
