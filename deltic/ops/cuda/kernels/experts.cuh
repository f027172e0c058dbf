// MoE layers for up to 16 tokens: routing, and the products of the selected experts.
//
// Each selected expert's weights are read once a step, for all its tokens. Other experts are not read. Every block computes the
// routing itself from the router's logits, which is faster than reading the result of another kernel. The tensor cores have 16
// rows for tokens anyway, so an expert's products cover all tokens. For a token that did not select the expert, the input is
// zero or the result is not used.
//
// A token's sum has the order of deltic/ops/slices.py. It depends neither on other tokens nor on the number of devices. Part s
// of 8 is the sum of the token's experts of group s, in ascending order, plus slice s of the shared expert. The parts are added
// in pairs. On a device that has some of the parts, the others are zero, so that its sum is the root of its subtree. An expert
// may be in any memory: the kernels use its pointer.

constexpr int PARTS = 8;  // groups of neighbouring experts, and slices of the shared expert

struct ExpertsGate {
    const float *x, *scale;  // [T, H] residual; [H] scale of the norm
    const float *logits;     // [T, E] of the router; with a shared expert [T, E + 1], the logit of its gate last
    const u64 *weights;      // [E] or [E + 1]: addresses of gate_up [2 I, H], the shared expert's last; null: see `Passed`
    u64 *wanted;             // [E]: launches in which a token selected the expert; null: not counted
    u16 *y;                  // [T * (BEST + SHARED), I]: silu(gate) * up * share of each pair, in the order of `Passed`
    const i64 *count, *starts;  // [1]: rows that are not padding; [rows + 1]: their first tokens; count null: no padding
    float eps;
    int tokens, first, group, slots;  // first: token index in the step; group: units between two reductions; slots: of the ring
    int shared;                       // gate rows of the shared expert on this device
};

struct ExpertsDown {
    const u16 *x;          // y of `ExpertsGate`
    const float *logits;   // as in `ExpertsGate`
    const u64 *weights;    // addresses of down [H, I]
    float *y;              // [T, H], added to
    const i64 *count, *starts;
    int tokens, first, slots;
    int group;             // parts that are reduced over the warps at once, a power of two
    int shared, part;      // columns of the shared expert on this device; the part of the first of them
    int adds;              // 0: y is overwritten
};

// Number of tokens from `first` on that are not padding of a bucket. Padding tokens select no experts.
DEVICE int real_tokens(const i64 *count, const i64 *starts, int tokens, int first = 0) {
    return count ? max(0, min(int(starts[*count]) - first, tokens)) : tokens;
}

DEVICE u32 warp_most(u32 v) {
    u32 r;
    asm volatile("redux.sync.max.u32 %0, %1, 0xffffffff;" : "=r"(r) : "r"(v));
    return r;
}
DEVICE u32 warp_least(u32 v) {
    u32 r;
    asm volatile("redux.sync.min.u32 %0, %1, 0xffffffff;" : "=r"(r) : "r"(v));
    return r;
}
// Maps floats to integers of the same order. No float maps to 0.
DEVICE u32 ordered(float x) {
    const u32 b = __float_as_uint(x);
    return max(b ^ (u32(int(b) >> 31) | 0x80000000u), 1u);
}
DEVICE float of_ordered(u32 v) { return __uint_as_float(v & 0x80000000u ? v ^ 0x80000000u : ~v); }

// Selects a token's experts, best first, of equal experts the lower number first. The shares (routing weights) are a softmax
// over all experts or, if NORMALISED, over the selected experts. Called by a whole warp.
template <int E, int BEST, bool NORMALISED> DEVICE void choose_experts(const float *logits, int *expert, float *share) {
    constexpr int EACH = (E + 31) / 32;
    const int lane = threadIdx.x & 31;
    u32 key[EACH], top = 0;
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
        key[i] = lane + 32 * i < E ? ordered(load(logits + lane + 32 * i)) : 0;
        top = max(top, key[i]);
    }
    const float most = of_ordered(warp_most(top));
    float total = 0;
    if constexpr (!NORMALISED) {
#pragma unroll
        for (int i = 0; i < EACH; ++i)
            if (key[i]) total += exponential(of_ordered(key[i]) - most);
        total = warp_sum(total);
    }
#pragma unroll 1
    for (int j = 0; j < BEST; ++j) {
        u32 mine = 0, where = ~0u;
#pragma unroll
        for (int i = 0; i < EACH; ++i) mine = max(mine, key[i]);
        const u32 best = warp_most(mine);
#pragma unroll
        for (int i = EACH - 1; i >= 0; --i)
            if (key[i] == best) where = lane + 32 * i;
        where = warp_least(where);
#pragma unroll
        for (int i = 0; i < EACH; ++i)
            if (where == lane + 32 * i) key[i] = 0;
        const float weight = exponential(of_ordered(best) - most);
        if constexpr (NORMALISED) total += weight;
        if (lane == 0) expert[j] = where, share[j] = weight;
    }
    __syncwarp();
    for (int j = lane; j < BEST; j += 32) share[j] /= total;
    __syncwarp();
}

// The routing of all tokens, in shared memory. A slot is an expert that some token selects: the shared expert first, then the
// others in ascending order. A pair is a slot and one of its tokens. Pairs are ordered by slot, then by token. HOST: experts
// with a null pointer, which the host (beside.cuh) or another device computes, have no slot; `passes` keeps their tokens.
template <int E, int BEST, bool SHARED, bool NORMALISED, bool HOST = false> struct alignas(16) Passed {
    static constexpr int TOKENS = 16, WARPS = 9, MOST = (E < TOKENS * BEST ? E : TOKENS * BEST) + SHARED, ALL = E + SHARED;
    u64 weights[ALL];
    const char *from[MOST];           // by slot: the expert's matrix
    float share[TOKENS * (BEST + SHARED)];  // by pair
    float chosen_share[TOKENS][BEST];
    int chosen[TOKENS][BEST], passes[E];  // passes: bit mask of tokens; after `list` the slot
    int first[MOST];                  // by slot: the first pair
    u16 mask[MOST], expert[MOST];     // by slot; mask: its tokens
    int count;                        // number of slots

    // Called by all warps, before the input is ready.
    DEVICE void clear(const u64 *table) {
        for (int i = threadIdx.x; i < E; i += WARPS * 32) passes[i] = 0;
        for (int i = threadIdx.x; i < ALL; i += WARPS * 32) weights[i] = __ldg(table + i);
    }
    // Called by all warps.
    DEVICE void choose(const float *logits, int tokens) {
        const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
        for (int token = warp; token < tokens; token += WARPS) {
            const float *own = logits + token * ALL;
            const float gate = SHARED && lane == 0 ? load(own + E) : 0.f;
            choose_experts<E, BEST, NORMALISED>(own, chosen[token], chosen_share[token]);
            for (int j = lane; j < BEST; j += 32) atomicOr(passes + chosen[token][j], 1 << token);
            if (SHARED && lane == 0) share[token] = sigmoid(gate);
        }
        __syncthreads();
    }
    // Sorts each token's experts by part; within a part, the best expert stays first. `chosen_share` keeps the old order.
    // Called by all warps.
    DEVICE void order_parts(int tokens) {
        constexpr int EACH = (BEST + 31) / 32;
        const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
        for (int token = warp; token < tokens; token += WARPS) {
            int own[EACH], place[EACH];
#pragma unroll
            for (int i = 0; i < EACH; ++i) {
                const int j = lane + 32 * i;
                own[i] = j < BEST ? chosen[token][j] : E, place[i] = 0;
                const int part = part_of(own[i]);
                for (int other = 0; other < BEST; ++other) {
                    const int of = part_of(chosen[token][other]);
                    place[i] += of < part || (of == part && other < j);
                }
            }
            __syncwarp();
#pragma unroll
            for (int i = 0; i < EACH; ++i) {
                if (lane + 32 * i < BEST) chosen[token][place[i]] = own[i];
            }
        }
    }
    static DEVICE int part_of(int expert) {
        int part = 0;
#pragma unroll
        for (int i = 0; i < PARTS - 1; ++i) part += expert >= slice_end(E, PARTS, i);
        return part;
    }
    // Called by one warp.
    DEVICE void list(int tokens) {
        const int lane = threadIdx.x & 31;
        int slots = SHARED, pairs = SHARED ? tokens : 0;
        if (SHARED && lane == 0) mask[0] = u16((1 << tokens) - 1), first[0] = 0, expert[0] = E, from[0] = (const char *)weights[E];
#pragma unroll 4
        for (int i = lane; i < (E + 31) / 32 * 32; i += 32) {
            const int tokens_of = i < E && (!HOST || weights[i]) ? passes[i] : 0;
            const u32 any = __ballot_sync(~0u, tokens_of != 0);
            const int slot = slots + __popc(any & ((1u << lane) - 1));
            int before = slot - slots, all = __popc(any);
            if (tokens > 1) {
                const int own = __popc(tokens_of);
                int sum = own;
#pragma unroll
                for (int d = 1; d < 32; d *= 2) {
                    const int other = __shfl_up_sync(~0u, sum, d);
                    if (lane >= d) sum += other;
                }
                before = sum - own, all = __shfl_sync(~0u, sum, 31);
            }
            if (tokens_of) {
                mask[slot] = u16(tokens_of), first[slot] = pairs + before, expert[slot] = u16(i), passes[i] = slot;
                from[slot] = (const char *)weights[i];
            }
            slots += __popc(any), pairs += all;
        }
        if (lane == 0) count = slots;
        __syncwarp();
    }
    // Called after `list`, by all threads of `warps` warps.
    DEVICE void weigh(int tokens, int warps) {
        for (int i = threadIdx.x; i < tokens * BEST; i += warps * 32) {
            const int token = i / BEST, slot = passes[chosen[token][i - token * BEST]];
            if (HOST && !weights[chosen[token][i - token * BEST]]) continue;
            share[pair(slot, token)] = chosen_share[token][i - token * BEST];
        }
    }
    DEVICE bool has(int slot, int token) const { return mask[slot] >> token & 1; }
    DEVICE int pair(int slot, int token) const { return first[slot] + __popc(mask[slot] & ((1u << token) - 1)); }
};

// A ring of slots that one warp fills and eight warps read.
struct Ring {
    u32 barrier;
    int slots, slot = 0, lap = 0;

    DEVICE Ring(void *barriers, int slots) : barrier(shared_address(barriers)), slots(slots) {}
    DEVICE void init(int lane) {
        if (lane == 0) {
            for (int i = 0; i < slots; ++i) init_barrier(barrier + 8 * i, COPIERS), init_barrier(barrier + 8 * (slots + i), 8);
            publish_barriers();
        }
        __syncwarp();
    }
    DEVICE void next() {
        if (++slot == slots) slot = 0, lap ^= 1;
    }
    DEVICE u32 filled() const { return barrier + 8 * slot; }
    DEVICE void await_filled() const {
        await_barrier(filled(), lap);
        __syncwarp();
    }
    DEVICE void await_emptied() const { await_barrier(filled() + 8 * slots, lap ^ 1); }
    DEVICE void release() {
        release_slot(filled() + 8 * slots);
        next();
    }
};

// Loads two 16-byte fragments of a lane, 64 bytes apart. Odd rows load them in the other order, to avoid bank conflicts with
// even rows.
DEVICE void load_both(uint4 (&v)[2], u32 at, bool odd) {
    const uint4 one = load_shared(at + (odd ? 64 : 0)), two = load_shared(at + (odd ? 0 : 64));
    v[0] = odd ? two : one, v[1] = odd ? one : two;
}

// Computes silu(gate) * up * share of all pairs, from the residual. A unit is four rows of an expert's gate and of its up, in
// one ring slot. OFFSET: bytes of shared memory before the ring. H is a multiple of 64, I of 8.
template <int H, int I, int E, int BEST, bool SHARED, bool NORMALISED, bool MANY, int OFFSET, bool HOST>
struct GateUnits : Input<ExpertsGate, H, true, 0, 0, false> {
    using Base = Input<ExpertsGate, H, true, 0, 0, false>;
    using Base::a, Base::tid, Base::warp, Base::lane, Base::xs, Base::WARPS;
    using Who = Passed<E, BEST, SHARED, NORMALISED, HOST>;
    static constexpr int UNITS = I / 4, LINE = H * 2, SLOT = 8 * LINE, HALVES = MANY ? 2 : 1, PIECES = H / 64;
    static_assert(1024 + sizeof(Who) <= OFFSET && OFFSET % 128 == 0);
    Who &who;
    Ring ring;
    u32 slots_at;
    float *partial;  // [2, group, WARPS, T, 8]

    DEVICE GateUnits(const ExpertsGate &args, char *shared)
        : Base(args, (float *)(shared + 512)), who(*(Who *)(shared + 1024)), ring(shared, args.slots),
          slots_at(shared_address(shared + OFFSET)) {
        xs = shared + OFFSET + a.slots * SLOT;
        partial = (float *)(xs + H * 2 * a.tokens);
    }
    // Returns the expert slot of an item, and its unit. Units of the shared expert come first.
    DEVICE int slot_of(int item, int &unit) const {
        const int rest = item - own_units();
        unit = rest < 0 ? item : rest % UNITS;
        return rest < 0 ? 0 : rest / UNITS + SHARED;
    }
    DEVICE int own_units() const { return SHARED ? a.shared / 4 : 0; }
    DEVICE int items() const { return own_units() + (who.count - SHARED) * UNITS; }
    DEVICE void copy(int unit, int rows, const char *from, u64 policy) {
        if (lane == 0) expect_bytes(ring.filled(), SLOT);
        __syncwarp();
        const int row = unit * 4 + (lane & 3) + (lane >> 2) * rows;
        COPY_EACH(lane < 8, slots_at + ring.slot * SLOT + lane * LINE, from + i64(row) * LINE, LINE, ring.filled(), policy);
        end_copies(ring.filled());
        ring.next();
    }
    // Fills the ring with weights of the shared expert, which need no routing. Returns the first item that is left.
    DEVICE int copy_early(u64 policy) {
        int item = blockIdx.x;
        if constexpr (SHARED)
            for (int i = 0; i < a.slots && item < own_units(); ++i, item += gridDim.x)
                copy(item, a.shared, (const char *)__ldg(a.weights + E), policy);
        return item;
    }
    DEVICE void copy_rest(int item, u64 policy) {
        for (int done = (item - int(blockIdx.x)) / int(gridDim.x); item < items(); item += gridDim.x, ++done) {
            if (done >= a.slots) ring.await_emptied();
            int unit;
            const int slot = slot_of(item, unit);
            copy(unit, SHARED && slot == 0 ? a.shared : I, who.from[slot], policy);
        }
        await_own_copies();
    }
    DEVICE void multiply_unit(float *to) {
        float d[2][4] = {};
        const int row = lane >> 2;
        const bool odd = row & 1;
        const u32 at = slots_at + ring.slot * SLOT + row * LINE + (lane & 3) * 16;
        const u32 input = shared_address(xs) + row * 64 + (lane & 3) * 16;
        ring.await_filled();
#pragma unroll
        for (int i = 0; i < (PIECES + WARPS - 1) / WARPS; ++i) {
            const int piece = i * WARPS + warp;
            if (PIECES % WARPS && piece >= PIECES) break;
            uint4 v[2], x[2][2] = {};
            load_both(v, at + piece * 128, odd);
#pragma unroll
            for (int j = 0; j < 2; ++j)
#pragma unroll
                for (int half = 0; half < HALVES; ++half)
                    if (row + 8 * half < a.tokens)
                        x[j][half] = load_shared(input + (piece * 2 + j) * a.tokens * 64 + half * 512);
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                multiply(d[0], x[j][0].x, x[j][1].x, x[j][0].y, x[j][1].y, v[j].x, v[j].y);
                multiply(d[1], x[j][0].z, x[j][1].z, x[j][0].w, x[j][1].w, v[j].z, v[j].w);
            }
        }
        ring.release();
        to += (warp * a.tokens + row) * 8 + (lane & 3) * 2;
#pragma unroll
        for (int half = 0; half < HALVES; ++half)
            if (row + 8 * half < a.tokens)
                *(float2 *)(to + half * 64) = make_float2(d[0][2 * half] + d[1][2 * half], d[0][2 * half + 1] + d[1][2 * half + 1]);
    }
    DEVICE float sum(const float *from, int token, int n) const {
        float v = 0;
#pragma unroll
        for (int i = 0; i < WARPS; ++i) v += from[(i * a.tokens + token) * 8 + n];
        return v;
    }
    DEVICE void finish(int item, int units, const float *from) {
        for (int o = tid; o < units * a.tokens * 4; o += WARPS * 32) {
            const int n = o & 3, u = (o >> 2) / a.tokens, token = (o >> 2) - u * a.tokens;
            int unit;
            const int slot = slot_of(item + u * gridDim.x, unit);
            if (!who.has(slot, token)) continue;
            const int pair = who.pair(slot, token);
            const float *part = from + u * WARPS * 8 * a.tokens, f = this->factor(token);
            const float gate = sum(part, token, n) * f, other = sum(part, token, n + 4) * f;
            a.y[i64(pair) * I + unit * 4 + n] = narrow(silu(gate) * other * who.share[pair]);
        }
    }
    DEVICE void run() {
        const int each = WARPS * 8 * a.tokens;
        const int mine = (items() - int(blockIdx.x) + int(gridDim.x) - 1) / int(gridDim.x);
        for (int i = 0, turn = 0; i < mine; i += a.group, turn ^= 1) {
            const int units = min(a.group, mine - i);
            float *to = partial + turn * a.group * each;
            for (int u = 0; u < units; ++u) multiply_unit(to + u * each);
            this->meet();
            finish(blockIdx.x + i * gridDim.x, units, to);
        }
    }
};

// A block has 8 multiplying warps and one copying warp. The next kernel reads the logits before its `wait`. It may therefore
// start only when the logits are ready.
template <int H, int I, int E, int BEST, bool SHARED, bool NORMALISED, bool MANY, int OFFSET, bool HOST = false>
DEVICE void experts_gate(const ExpertsGate &a) {
    extern __shared__ __align__(128) char shared[];
    GateUnits<H, I, E, BEST, SHARED, NORMALISED, MANY, OFFSET, HOST> g(a, shared);
    const bool copies = g.warp == g.WARPS;
    const u64 policy = read_once();
    const int real = real_tokens(a.count, a.starts, a.tokens, a.first);
    int item = blockIdx.x;
    g.who.clear(a.weights);
    if (copies) {
        g.ring.init(g.lane);
        item = g.copy_early(policy);
    } else if (g.tid * 32 < H) prefetch(a.scale + g.tid * 32);
    __syncthreads();
    wait();
    launch_dependents();
    g.who.choose(a.logits, real);
    if (copies) g.who.list(real);
    __syncthreads();
    if (copies && a.wanted && blockIdx.x == 0)
        for (int i = g.lane + SHARED; i < g.who.count; i += 32) a.wanted[g.who.expert[i]] += 1;
    if constexpr (HOST)
        if (copies && a.wanted && blockIdx.x == 0)
            for (int i = g.lane; i < E; i += 32)
                if (!g.who.weights[i] && g.who.passes[i]) a.wanted[i] += 1;
    if (copies) return g.copy_rest(item, policy);
    g.who.weigh(real, g.WARPS);
    g.stage();
    g.run();
}

// Adds the outputs of a token's experts to its residual. A unit is 16 rows of all experts in use. A ring slot holds these rows
// of one expert, and the inputs of its tokens. H is a multiple of 16.
template <int H, int I, int E, int BEST, bool SHARED, bool NORMALISED, bool MANY, int OFFSET, bool HOST> struct DownUnits {
    using Who = Passed<E, BEST, SHARED, NORMALISED, HOST>;
    static constexpr int WARPS = 8, UNITS = H / 16, LINE = I * 2, MATRIX = 16 * LINE, HALVES = MANY ? 2 : 1;
    static constexpr int STRIDE = (LINE + 127) / 128 * 128 + 64;  // bytes between input rows in a ring slot
    static_assert(1024 + sizeof(Who) <= OFFSET && OFFSET % 128 == 0 && H % 16 == 0 && I % 8 == 0);
    const ExpertsDown &a;
    const int tid, warp, lane, slot_bytes;
    Who &who;
    Ring ring;
    u32 slots_at;
    float *shared_parts;  // [2, PARTS, T, 16]: slices of the shared expert
    float *partial;       // [2, group, WARPS, T, 16]
    PairedSum paired;

    DEVICE DownUnits(const ExpertsDown &args, char *shared)
        : a(args), tid(threadIdx.x), warp(threadIdx.x >> 5), lane(threadIdx.x & 31),
          slot_bytes((MATRIX + args.tokens * STRIDE + 127) / 128 * 128), who(*(Who *)(shared + 1024)), ring(shared, args.slots),
          slots_at(shared_address(shared + OFFSET)), shared_parts((float *)(shared + OFFSET + args.slots * slot_bytes)),
          partial(shared_parts + (SHARED ? 2 * PARTS * 16 * args.tokens : 0)) {}
    // Bytes of a matrix row of an expert slot.
    DEVICE int line(int slot) const { return SHARED && slot == 0 ? a.shared * 2 : LINE; }
    DEVICE void copy_matrix(int unit, int slot, u64 policy) {
        if (!BULK_COPIES || lane == 0) {
            const int bytes = 16 * line(slot);
            expect_bytes(ring.filled(), bytes + __popc(who.mask[slot]) * line(slot));
            bulk_copy(slots_at + ring.slot * slot_bytes, who.from[slot] + i64(unit) * bytes, bytes, ring.filled(), policy);
        }
        __syncwarp();
    }
    DEVICE void copy_input(int slot) {
        COPY_EACH_KEPT(lane < __popc(who.mask[slot]), slots_at + ring.slot * slot_bytes + MATRIX + lane * STRIDE,
                       a.x + i64(who.first[slot] + lane) * I, line(slot), ring.filled());
        end_copies(ring.filled());
    }
    DEVICE void copy_all(u64 policy) {
        const int mine = (UNITS - int(blockIdx.x) + int(gridDim.x) - 1) / int(gridDim.x), total = mine * who.count;
        const int early = BULK_COPIES ? min(total, a.slots) : 0;
        for (int i = 0; i < early; ++i, ring.next()) copy_matrix(blockIdx.x + i / who.count * gridDim.x, i % who.count, policy);
        wait();
        ring.slot = 0, ring.lap = 0;
        for (int i = 0; i < early; ++i, ring.next()) copy_input(i % who.count);
        for (int i = early; i < total; ++i, ring.next()) {
            if (BULK_COPIES || i >= a.slots) ring.await_emptied();
            copy_matrix(blockIdx.x + i / who.count * gridDim.x, i % who.count, policy);
            copy_input(i % who.count);
        }
        await_own_copies();
    }
    // Eight columns of a lane; zeros if the token did not select the expert, or beyond the last column.
    DEVICE uint4 input(u32 at, bool there) const { return there ? load_shared(at) : make_uint4(0, 0, 0, 0); }
    // A lane's first columns in the current ring slot. at: of weight row lane / 4. from: of the inputs of tokens lane / 4 and
    // lane / 4 + 8. there: these tokens selected the expert.
    struct Slot {
        u32 at, from[HALVES];
        bool there[HALVES];
    };
    DEVICE Slot current(int slot) const {
        const int row = lane >> 2, column = (lane & 3) * 8;
        const u32 mask = who.mask[slot], at = slots_at + ring.slot * slot_bytes;
        Slot s;
        s.at = at + row * line(slot) + column * 2;
#pragma unroll
        for (int half = 0; half < HALVES; ++half) {
            s.there[half] = mask >> (row + 8 * half) & 1;
            s.from[half] = at + MATRIX + __popc(mask & ((1u << (row + 8 * half)) - 1)) * STRIDE + column * 2;
        }
        return s;
    }
    static DEVICE void multiply_both(float (&d)[2][4], const uint4 (&x)[2], const uint4 &w) {
        multiply(d[0], x[0].x, x[1].x, x[0].y, x[1].y, w.x, w.y);
        multiply(d[1], x[0].z, x[1].z, x[0].w, x[1].w, w.z, w.w);
    }
    DEVICE void multiply_expert(float (&d)[2][2][4], int slot) {
        const int column = (lane & 3) * 8;
        const bool odd = lane >> 2 & 1;
        const Slot s = current(slot);
        ring.await_filled();
#pragma unroll
        for (int first = 0; first < I; first += 64 * WARPS) {
            const int piece = first + warp * 64;
            if (I % (64 * WARPS) && piece >= I) break;
            // only the last piece may be partial
            const bool whole = I % 64 == 0 || piece + 64 <= I;
            uint4 v[2][2], x[2][2] = {};
#pragma unroll
            for (int n = 0; n < 2; ++n) {
                const u32 w = s.at + n * 8 * LINE + piece * 2;
                if (whole) load_both(v[n], w, odd);
                else {
#pragma unroll
                    for (int j = 0; j < 2; ++j) v[n][j] = input(w + j * 64, piece + j * 32 + column < I);
                }
            }
#pragma unroll
            for (int j = 0; j < 2; ++j)
#pragma unroll
                for (int half = 0; half < HALVES; ++half)
                    x[j][half] = input(s.from[half] + (piece + j * 32) * 2, s.there[half] && (whole || piece + j * 32 + column < I));
#pragma unroll
            for (int j = 0; j < 2; ++j)
#pragma unroll
                for (int n = 0; n < 2; ++n) multiply_both(d[n], x[j], v[n][j]);
        }
        ring.release();
    }
    // The shared expert: each warp multiplies one slice of the columns, if this device has the slice.
    DEVICE void multiply_shared(float *to) {
        constexpr int ALL = (I + 15) / 16;
        const int before = slice_begin(ALL, PARTS, a.part) * 16, begin = slice_begin(ALL, PARTS, warp) * 16 - before;
        const int end = min(slice_end(ALL, PARTS, warp) * 16, I) - before;
        const Slot s = current(0);
        float d[2][2][4] = {};
        ring.await_filled();
        for (int first = begin; begin >= 0 && begin < a.shared && first < end; first += 32) {
            const bool in = first + (lane & 3) * 8 < end;
            uint4 x[2] = {};
#pragma unroll
            for (int half = 0; half < HALVES; ++half) x[half] = input(s.from[half] + first * 2, in && s.there[half]);
#pragma unroll
            for (int n = 0; n < 2; ++n) multiply_both(d[n], x, input(s.at + n * 8 * line(0) + first * 2, in));
        }
        ring.release();
        store_sums(d, to);
    }
    // Stores a warp's sums of a part. to: [WARPS, T, 16].
    DEVICE void store_sums(const float (&d)[2][2][4], float *to) const {
        const int row = lane >> 2;
        to += (warp * a.tokens + row) * 16 + (lane & 3) * 2;
#pragma unroll
        for (int half = 0; half < HALVES; ++half)
#pragma unroll
            for (int n = 0; n < 2; ++n)
                if (row + 8 * half < a.tokens)
                    *(float2 *)(to + half * 128 + n * 8) = make_float2(d[n][0][2 * half] + d[n][1][2 * half],
                                                                       d[n][0][2 * half + 1] + d[n][1][2 * half + 1]);
    }
    // The part (among the parts that are reduced at once), token and row of a thread.
    struct Place {
        int part, token, row;
    };
    DEVICE Place place() const {
        const int number = tid >> __popc(a.group - 1);
        return {tid & (a.group - 1), number >> 4, number & 15};
    }
    DEVICE void finish(int begin, const float *from, const float *shared_from, float *y, float old) {
        const Place p = place();
        float v = 0;
        if (p.token < a.tokens) {
            from += (p.part * WARPS * a.tokens + p.token) * 16 + p.row;
#pragma unroll
            for (int i = 0; i < WARPS; ++i) v += from[i * a.tokens * 16];
            if (SHARED) v += shared_from[((begin + p.part) * a.tokens + p.token) * 16 + p.row];
        }
        if (paired.add(v, begin, a.group, PARTS) && p.token < a.tokens && p.part == 0) *y = a.adds ? old + v : v;
    }
    DEVICE void run() {
        const Place p = place();
        const int each = WARPS * a.tokens * 16;
        for (int unit = blockIdx.x, turn = 0, other = 0; unit < UNITS; unit += gridDim.x, other ^= 1) {
            float *const y = a.y + i64(p.token) * H + unit * 16 + p.row;
            float *const shared_to = shared_parts + other * PARTS * a.tokens * 16;
            const float old = p.token < a.tokens && a.adds ? load(y) : 0.f;
            int slot = SHARED;
            if constexpr (SHARED) multiply_shared(shared_to);
            for (int begin = 0; begin < PARTS; begin += a.group, turn ^= 1) {
                float *const to = partial + turn * a.group * each;
                for (int part = 0; part < a.group; ++part) {
                    const int end = slice_end(E, PARTS, begin + part);
                    float d[2][2][4] = {};
                    for (; slot < who.count && who.expert[slot] < end; ++slot) multiply_expert(d, slot);
                    store_sums(d, to + part * each);
                }
                meet_eight_warps();
                finish(begin, to, shared_to, y, old);
            }
        }
    }
};

template <int H, int I, int E, int BEST, bool SHARED, bool NORMALISED, bool MANY, int OFFSET, bool HOST = false>
DEVICE void experts_down(const ExpertsDown &a) {
    extern __shared__ __align__(128) char shared[];
    DownUnits<H, I, E, BEST, SHARED, NORMALISED, MANY, OFFSET, HOST> g(a, shared);
    const bool copies = g.warp == g.WARPS;
    const int real = real_tokens(a.count, a.starts, a.tokens, a.first);
    launch_dependents();
    g.who.clear(a.weights);
    if (copies) g.ring.init(g.lane);
    __syncthreads();
    g.who.choose(a.logits, real);
    if (copies) g.who.list(real);
    __syncthreads();
    if (copies) return g.copy_all(read_once());
    wait();
    g.run();
}
