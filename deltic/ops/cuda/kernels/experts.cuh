// Mixtures of experts for up to 16 tokens: which experts a token passes, and the products of all that are passed by one.
//
// The weights of an expert are read once a step, whoever passes it, and nothing of the others is. Every block works out by
// itself who passes whom, from the router's products, which is faster than to be told. The tensor cores have 16 rows for
// tokens anyway, so that an expert's products are made of all of them; a token that does not pass it is a row of zeros, or
// is not looked at. A token's sum has the order of deltic/ops/slices.py, whoever else is there and however many devices
// have parts of the experts: part s of 8 is the sum of its experts of group s, in their order, plus slice s of the shared
// expert, and the parts are added in pairs. On a device that has some of the parts the others are zero, so that the sum is
// the root of its subtree. An expert lies wherever its pointer says.

constexpr int PARTS = 8;  // groups of experts by number, and slices of the shared expert

struct ExpertsGate {
    const float *x, *scale;  // [T, H] residual; [H] of the norm
    const float *logits;     // [T, E]; with a shared expert [T, E + 1], the last one of its gate
    const u64 *weights;      // [E] or [E + 1]: where the matrices [2 I, H] lie, the shared one's last; 0: see beside.cuh
    u64 *wanted;             // [E]: of each the launches that wanted it; null: not counted
    u16 *y;                  // [T * each, I]: SiLU of the gate times the other half times the share; `Passed` has the order
    const i64 *count, *starts;  // of the step's rows that are real, and where rows begin; count null: all tokens are real
    float eps;
    int tokens, first, group, slots;  // first: of the step's; group: units between two sums; slots: of the ring
    int shared;                       // rows that the device has of the shared expert's gate
};

struct ExpertsDown {
    const u16 *x;          // [T * each, I]
    const float *logits;   // as above
    const u64 *weights;    // where the matrices [H, I] lie
    float *y;              // [T, H], added to
    const i64 *count, *starts;
    int tokens, first, slots;
    int group;             // parts whose sums over the warps are made at once, a power of two
    int shared, part;      // columns that the device has of the shared expert; the part that the first ones belong to
    int adds;              // 0: y is written to instead
};

// Of the tokens from `first` on those that do not only fill a bucket up: these choose no experts.
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
// Numbers in the order of these integers; none is 0.
DEVICE u32 ordered(float x) {
    const u32 b = __float_as_uint(x);
    return max(b ^ (u32(int(b) >> 31) | 0x80000000u), 1u);
}
DEVICE float of_ordered(u32 v) { return __uint_as_float(v & 0x80000000u ? v ^ 0x80000000u : ~v); }

// The experts of a token and their shares, best first, of equals the lower one, by a whole warp.
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

// Who passes whom, in shared memory. Slots are the experts that some token passes: the shared one, then the others in their
// order. Pairs are the tokens of all slots, one slot behind the other, a slot's in their order. HOST: experts that lie
// nowhere, which the host or another device computes, have no slot; `passes` keeps their tokens.
template <int E, int BEST, bool SHARED, bool NORMALISED, bool HOST = false> struct alignas(16) Passed {
    static constexpr int TOKENS = 16, WARPS = 9, MOST = (E < TOKENS * BEST ? E : TOKENS * BEST) + SHARED, ALL = E + SHARED;
    u64 weights[ALL];
    const char *from[MOST];           // of slots: the expert's matrix
    float share[TOKENS * (BEST + SHARED)];  // of pairs
    float chosen_share[TOKENS][BEST];
    int chosen[TOKENS][BEST], passes[E];  // passes: tokens, a bit each; then the slot
    int first[MOST];                  // of slots: the first pair
    u16 mask[MOST], expert[MOST];
    int count;                        // slots

    // Before the input is there; by all warps.
    DEVICE void clear(const u64 *table) {
        for (int i = threadIdx.x; i < E; i += WARPS * 32) passes[i] = 0;
        for (int i = threadIdx.x; i < ALL; i += WARPS * 32) weights[i] = __ldg(table + i);
    }
    // By all warps.
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
    // By all warps: a token's experts by their part, of one part still the best first. They no longer fit `chosen_share`.
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
    // By one warp.
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
    // After the list, by the threads of so many warps.
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

// A ring of slots that one warp fills and eight empty.
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

// Two fragments of 16 bytes, 64 bytes apart, of a lane; odd rows are read the other way round, so that no two are in the
// same banks.
DEVICE void load_both(uint4 (&v)[2], u32 at, bool odd) {
    const uint4 one = load_shared(at + (odd ? 64 : 0)), two = load_shared(at + (odd ? 0 : 64));
    v[0] = odd ? two : one, v[1] = odd ? one : two;
}

// SiLU of the gate times the other half of all pairs, from the residual. A unit: four rows of an expert's gate and those of
// its other half, a slot of the ring. OFFSET: where the ring begins. H a multiple of 64, I of 8.
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
    // The slot of an item, and its unit: those of the shared expert come first.
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
    // What the shared expert's weights are is known before anything else; -> the first item that is left.
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

// Blocks of 8 warps that multiply and one that copies. The next kernel reads the logits before it waits, so that it may
// start only when they are there.
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

// What all experts of a token give, added to its residual. A unit: 16 rows of all slots; their weights, with the inputs of
// those who pass the expert, are a slot of the ring. H a multiple of 16.
template <int H, int I, int E, int BEST, bool SHARED, bool NORMALISED, bool MANY, int OFFSET, bool HOST> struct DownUnits {
    using Who = Passed<E, BEST, SHARED, NORMALISED, HOST>;
    static constexpr int WARPS = 8, UNITS = H / 16, LINE = I * 2, MATRIX = 16 * LINE, HALVES = MANY ? 2 : 1;
    static constexpr int STRIDE = (LINE + 127) / 128 * 128 + 64;  // of the inputs' rows
    static_assert(1024 + sizeof(Who) <= OFFSET && OFFSET % 128 == 0 && H % 16 == 0 && I % 8 == 0);
    const ExpertsDown &a;
    const int tid, warp, lane, slot_bytes;
    Who &who;
    Ring ring;
    u32 slots_at;
    float *shared_parts;  // [2, PARTS, T, 16]: of the shared expert
    float *partial;       // [2, group, WARPS, T, 16]
    PairedSum paired;

    DEVICE DownUnits(const ExpertsDown &args, char *shared)
        : a(args), tid(threadIdx.x), warp(threadIdx.x >> 5), lane(threadIdx.x & 31),
          slot_bytes((MATRIX + args.tokens * STRIDE + 127) / 128 * 128), who(*(Who *)(shared + 1024)), ring(shared, args.slots),
          slots_at(shared_address(shared + OFFSET)), shared_parts((float *)(shared + OFFSET + args.slots * slot_bytes)),
          partial(shared_parts + (SHARED ? 2 * PARTS * 16 * args.tokens : 0)) {}
    // Bytes of a row of a slot's expert.
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
    // A lane's eight columns of a token's input; zeros where it does not pass the expert.
    DEVICE uint4 input(u32 at, bool there) const { return there ? load_shared(at) : make_uint4(0, 0, 0, 0); }
    // Where a lane finds the weights of a slot, its first columns of the rows lane / 4, and those of tokens that pass it.
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
            // whole pieces, but for the last one
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
    // The shared expert: a warp has one of its slices, if the device has it.
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
    // A warp's sums of a part, [T, 16].
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
    // A thread's part of those that are summed at once, token and row.
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
