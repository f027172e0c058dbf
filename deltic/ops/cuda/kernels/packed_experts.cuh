// MoE layers with quantized experts, for up to 16 tokens. The kernels work as in experts.cuh, on tiles as in packed.cuh. An
// expert's tiles are read once a step and multiplied with its tokens one after the other. So a token's sums do not depend on
// other tokens. Most experts have one or two tokens, and cost no more than these. Two tiles of eight rows are multiplied at
// once: a tile of an expert's gate and one of its up, or two tiles of its down, one below the other.

struct PackedGate {
    const float *x, *scale;  // as in `ExpertsGate`
    const float *logits;
    const u64 *gate, *up;    // [E] or [E + 1]: addresses of the tiles [I, H], the shared expert's last
    u64 *wanted;             // as in `ExpertsGate`
    u16 *y;
    const i64 *count, *starts;
    float eps;
    int tokens, first, group, slots, slot;  // slot: bytes of a ring slot
    int wide, shared_wide;                  // gate tiles in a ring slot, and as many up tiles; at most eight
    int gate_kind, up_kind, shared_gate_kind, shared_up_kind;
};

struct PackedDown {
    const u16 *x;         // as in `ExpertsDown`
    const float *logits;
    const u64 *down;      // addresses of the tiles [H, I]
    float *y;
    const i64 *count, *starts;
    int tokens, first, slots, slot;
    int kind, shared_kind;
};

struct UnpackExperts {
    const u64 *data;     // [experts]: addresses of their tiles
    u16 *y;              // [rows, columns] of the first expert
    const int *counts;   // [experts]: tokens of each; an expert without tokens is not unpacked; null: all are unpacked
    i64 stride;          // from expert to expert in y
    int rows, columns;
};

// A lane's shared-memory addresses of one token's columns of a tile.
struct TokenColumns {
    u32 numbers, sums;  // integers, as the lane's mma operand for one token (packed.cuh); sums of the lane's groups
    u32 plain;          // bfloat16: the lane's columns of the first 32
    int step;           // bytes from `plain` to the next 32 columns
};

// Multiplies tiles, one below the other, with one token. A lane gets the sums of row lane / 4 of each tile.
template <int KIND, int HIGH> DEVICE void multiply_token(const Tile<KIND> (&w)[HIGH], const TokenColumns &x, float (&sum)[HIGH]) {
    if constexpr (is_plain(KIND)) {
        float d[2][4] = {};
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const int g = Tile<KIND>::order(i);
            const uint4 v = load_shared(x.plain + g * x.step), o = w[0].eight(g), u = HIGH > 1 ? w[HIGH - 1].eight(g) : o;
            multiply(d[i % 2], o.x, u.x, o.y, u.y, v.x, v.y);
            multiply(d[i % 2], o.z, u.z, o.w, u.w, v.z, v.w);
        }
#pragma unroll
        for (int h = 0; h < HIGH; ++h) sum[h] = w[h].joined(d[0][2 * h], d[1][2 * h]);
    } else {
        int d[Tile<KIND>::SUMS][4];
        multiply_groups<KIND, HIGH>(w, d, [&](int n) { return load_shared(x.numbers + n * 16); });
        add_groups<KIND, HIGH>(w, d, load_shared(x.sums), sum);
    }
}
// Stores these sums to 16 floats. The upper eight are those of the second tile.
template <int HIGH> DEVICE void put_sums(float *to, const float (&sum)[HIGH], int lane) {
    const int mine = lane & 3;
    if (mine < HIGH) to[mine * 8 + (lane >> 2)] = mine ? sum[HIGH - 1] : sum[0];
}
// Makes the compiler decode the tiles again for each token. This costs less than keeping what it would decode once.
template <int KIND, int HIGH> DEVICE void forget(Tile<KIND> (&w)[HIGH]) {
#pragma unroll
    for (int h = 0; h < HIGH; ++h)
#pragma unroll
        for (uint4 &four : w[h].w) forget(four);
}
// Clears four words of 16 bytes. Lanes that have none of a token's integers (packed.cuh) read these zeros.
DEVICE void clear_zeros(char *shared) {
    if (threadIdx.x < 16) ((u32 *)(shared + 448))[threadIdx.x] = 0;
}
DEVICE bool has_numbers(int lane) { return (lane & 3) == lane >> 3; }

// Computes silu(gate) * up * share of all pairs, from the residual. An item is eight rows of an expert's gate and of its up, in
// one or several ring slots. A warp multiplies every eighth tile of a row, in whichever ring slot it is. KINDS: bit mask of all
// tile kinds of gate and up. MIXED: an expert's gate and up may have different kinds. OFFSET: bytes before the ring. H is a
// multiple of 256, I of 8.
template <int H, int I, int E, int BEST, bool SHARED, bool NORMALISED, int KINDS, bool MIXED, int OFFSET>
struct PackedGateItems : Input<PackedGate, H, true, 0, 0, form_of(KINDS)> {
    static constexpr bool PLAIN = KINDS & PLAIN_KINDS;
    using Base = Input<PackedGate, H, true, 0, 0, form_of(KINDS)>;
    using Base::a, Base::tid, Base::warp, Base::lane, Base::lines, Base::xs, Base::WARPS;
    using Who = Passed<E, BEST, SHARED, NORMALISED>;
    static constexpr int UNITS = I / 8, TILES = H / 256;
    static_assert(1024 + sizeof(Who) + 8 * Who::ALL <= OFFSET && OFFSET % 128 == 0 && H % 256 == 0 && I % 8 == 0);
    Who &who;
    u64 *ups;        // [ALL]: addresses of up tiles
    Ring ring;
    int copied = 0;  // ring slots
    u32 slots_at, numbers, sums, plain;  // last three: of the first tile and token, as in `TokenColumns`
    int between;     // bytes from token to token of the lane's integers; 0 if the lane reads zeros
    float *partial;  // [2, group, TILES, T, 16]

    DEVICE PackedGateItems(const PackedGate &args, char *shared)
        : Base(args, (float *)(shared + 512)), who(*(Who *)(shared + 1024)), ups((u64 *)(shared + 1024 + sizeof(Who))),
          ring(shared, args.slots), slots_at(shared_address(shared + OFFSET)) {
        char *next = shared + OFFSET + a.slots * a.slot;
        lines = next, next += TILES * LINES_BYTES * a.tokens;
        if constexpr (PLAIN) xs = next, next += H * 2 * a.tokens;
        partial = (float *)next;
        const u32 line = shared_address(lines) + (lane & 3) * LINE_BYTES;
        numbers = has_numbers(lane) ? line + (lane >> 2 & 1) * 64 : shared_address(shared + 448);
        between = has_numbers(lane) ? LINES_BYTES : 0, sums = line + 128;
        if constexpr (PLAIN) plain = shared_address(xs) + (lane & 3) * 16;
    }
    DEVICE int gate_kind(int slot) const { return SHARED && slot == 0 ? a.shared_gate_kind : a.gate_kind; }
    DEVICE int up_kind(int slot) const { return SHARED && slot == 0 ? a.shared_up_kind : a.up_kind; }
    DEVICE int wide(int slot) const { return SHARED && slot == 0 ? a.shared_wide : a.wide; }
    DEVICE void clear() {
        who.clear(a.gate);
        for (int i = threadIdx.x; i < Who::ALL; i += Who::WARPS * 32) ups[i] = __ldg(a.up + i);
    }
    DEVICE void copy(int slot, int unit, u64 gate, u64 up, u64 policy) {
        const int each[2] = {bytes_of(gate_kind(slot)), bytes_of(up_kind(slot))};
        for (int tile = 0, most = wide(slot); tile < TILES; tile += most, ++copied, ring.next()) {
            const int n = min(most, TILES - tile);
            if (copied >= a.slots) ring.await_emptied();
            if (lane == 0) expect_bytes(ring.filled(), n * (each[0] + each[1]));
            __syncwarp();
            const int own = lane ? each[1] : each[0];
            COPY_EACH(lane < 2, slots_at + ring.slot * a.slot + lane * n * each[0],
                      (const char *)(lane ? up : gate) + i64(unit * TILES + tile) * own, n * own, ring.filled(), policy);
            end_copies(ring.filled());
        }
    }
    // Fills the ring with weights of the shared expert, which need no routing. Returns the first item that is left.
    DEVICE int copy_early(u64 policy) {
        int item = blockIdx.x;
        if constexpr (SHARED)
            for (; copied + (TILES - 1) / a.shared_wide < a.slots && item < UNITS; item += gridDim.x)
                copy(0, item, __ldg(a.gate + E), __ldg(a.up + E), policy);
        return item;
    }
    DEVICE void copy_rest(int item, u64 policy) {
        for (; item < who.count * UNITS; item += gridDim.x) {
            const int slot = item / UNITS;
            copy(slot, item - slot * UNITS, u64(who.from[slot]), ups[who.expert[slot]], policy);
        }
        await_own_copies();
    }
    // Multiplies HIGH tiles, `below` bytes apart, with the tokens of `mask`. to: [TILES, T, 16].
    template <int KIND, int HIGH> DEVICE void multiply_tiles(u32 from, int below, u32 mask, int tile, float *to) {
        Tile<KIND> w[HIGH];
#pragma unroll
        for (int h = 0; h < HIGH; ++h) w[h].load(Shared{from + h * below}, lane);
#pragma unroll 1
        for (; mask; mask &= mask - 1) {
            const int token = __ffs(mask) - 1, place = tile * a.tokens + token;
            float sum[HIGH];
            forget<KIND, HIGH>(w);
            multiply_token<KIND, HIGH>(w, {numbers + place * between, sums + place * LINES_BYTES,
                                           PLAIN ? plain + (tile * 8 * a.tokens + token) * 64 : 0, 64 * a.tokens}, sum);
            put_sums<HIGH>(to + place * 16, sum, lane);
        }
    }
    // Multiplies a gate tile and an up tile, as far as they have this kind. A ring slot holds n gate tiles, then n up tiles.
    // place: index of both tiles among the n.
    template <int KIND> DEVICE void multiply_kind(int slot, u32 at, int n, int place, int tile, float *to) {
        if constexpr ((KINDS >> KIND) & 1) {
            constexpr int EACH = Tile<KIND>::BYTES;
            const int gate = gate_kind(slot), up = up_kind(slot);
            const u32 mask = who.mask[slot], from = at + place * EACH;
            if (gate == KIND && (!MIXED || up == KIND)) multiply_tiles<KIND, 2>(from, n * EACH, mask, tile, to);
            if constexpr (MIXED) {
                if (gate == KIND && up != KIND) multiply_tiles<KIND, 1>(from, 0, mask, tile, to);
                if (gate != KIND && up == KIND) multiply_tiles<KIND, 1>(from + n * bytes_of(gate), 0, mask, tile, to + 8);
            }
        }
    }
    DEVICE void multiply_item(int slot, float *to) {
#pragma unroll 1
        for (int first = 0, most = wide(slot); first < TILES; first += most) {
            const int n = min(most, TILES - first), place = (warp - first) & (WARPS - 1);
            const u32 at = slots_at + ring.slot * a.slot;
            ring.await_filled();
            if (place < n) {
#define MULTIPLY(k) multiply_kind<k>(slot, at, n, place, first + place, to);
                EACH_KIND(MULTIPLY)
#undef MULTIPLY
            }
            ring.release();
        }
    }
    DEVICE float sum(const float *from) const {
        float v[2] = {};
#pragma unroll 8
        for (int tile = 0; tile < TILES; ++tile) v[tile & 1] += from[tile * a.tokens * 16];
        return v[0] + v[1];
    }
    DEVICE void finish(int item, int items, const float *from) {
        for (int o = tid; o < items * a.tokens * 8; o += WARPS * 32) {
            const int n = o & 7, i = (o >> 3) / a.tokens, token = (o >> 3) - i * a.tokens;
            const int place = item + i * gridDim.x, slot = place / UNITS, unit = place - slot * UNITS;
            if (!who.has(slot, token)) continue;
            const int pair = who.pair(slot, token);
            const float *part = from + (i * TILES * a.tokens + token) * 16 + n, f = this->factor(token);
            a.y[i64(pair) * I + unit * 8 + n] = narrow(silu(sum(part) * f) * (sum(part + 8) * f) * who.share[pair]);
        }
    }
    DEVICE void run() {
        const int each = TILES * a.tokens * 16, items = who.count * UNITS;
        const int mine = (items - int(blockIdx.x) + int(gridDim.x) - 1) / int(gridDim.x);
        for (int i = 0, turn = 0; i < mine; i += a.group, turn ^= 1) {
            const int some = min(a.group, mine - i), item = blockIdx.x + i * gridDim.x;
            float *to = partial + turn * a.group * each;
            for (int u = 0; u < some; ++u) multiply_item((item + u * int(gridDim.x)) / UNITS, to + u * each);
            this->meet();
            finish(item, some, to);
        }
    }
};

// Like `experts_gate`.
template <int H, int I, int E, int BEST, bool SHARED, bool NORMALISED, int KINDS, bool MIXED, int OFFSET>
DEVICE void packed_gate(const PackedGate &a) {
    extern __shared__ __align__(128) char shared[];
    PackedGateItems<H, I, E, BEST, SHARED, NORMALISED, KINDS, MIXED, OFFSET> g(a, shared);
    const bool copies = g.warp == g.WARPS;
    const u64 policy = read_once();
    const int real = real_tokens(a.count, a.starts, a.tokens, a.first);
    int item = blockIdx.x;
    clear_zeros(shared);
    g.clear();
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
    if (copies) return g.copy_rest(item, policy);
    g.who.weigh(real, g.WARPS);
    g.stage();
    g.run();
}

// Adds the outputs of a token's experts to its residual. A unit is 16 rows of all experts in use. A ring slot holds these rows
// of PER experts. A warp multiplies one tile of the upper eight rows and the tile below it. It converts the columns of each
// token to the form of input.cuh itself. A part of a token's sum (experts.cuh) adds the experts first, best first, then the
// slice of the shared expert, tile by tile.
template <int H, int I, int E, int BEST, bool SHARED, bool NORMALISED, int KINDS, int OFFSET> struct PackedDownUnits {
    using Who = Passed<E, BEST, SHARED, NORMALISED>;
    struct Alone {
        static constexpr int tokens = 1;
    };
    static constexpr bool PLAIN = KINDS & PLAIN_KINDS;
    using Columns = Input<Alone, 256, false, 0, 0, form_of(KINDS)>;
    static constexpr int WARPS = 8, UNITS = H / 16, TILES = I / 256, PER = WARPS / TILES, OWN = LINES_BYTES + (PLAIN ? 512 : 0);
    static_assert(1024 + sizeof(Who) <= OFFSET && OFFSET % 128 == 0 && H % 16 == 0 && I % 256 == 0 && TILES <= WARPS);
    const PackedDown &a;
    const int tid, warp, lane, tile;
    Who &who;
    Ring ring;
    u32 slots_at;
    Alone alone;
    Columns columns;  // of this warp: one token's columns of a tile
    TokenColumns x;
    float *partial;   // [2, pairs, TILES, 16]

    DEVICE PackedDownUnits(const PackedDown &args, char *shared)
        : a(args), tid(threadIdx.x), warp(threadIdx.x >> 5), lane(threadIdx.x & 31), tile(warp % TILES),
          who(*(Who *)(shared + 1024)), ring(shared, args.slots), slots_at(shared_address(shared + OFFSET)), alone{},
          columns(alone, nullptr) {
        char *own = shared + OFFSET + a.slots * a.slot;
        partial = (float *)(own + WARPS * OWN);
        own += warp * OWN;  // the copying warp has no such buffer, and does not use the address
        columns.lines = own, columns.xs = own + LINES_BYTES;
        const u32 line = shared_address(own) + (lane & 3) * LINE_BYTES;
        x.numbers = has_numbers(lane) ? line + (lane >> 2 & 1) * 64 : shared_address(shared + 448);
        x.sums = line + 128, x.plain = shared_address(own) + LINES_BYTES + (lane & 3) * 16, x.step = 64;
    }
    DEVICE int kind(int slot) const { return SHARED && slot == 0 ? a.shared_kind : a.kind; }
    // bytes: of a unit of an expert slot. begin: offset of expert slot first + place in a ring slot that begins with `first`.
    DEVICE int bytes(int slot) const { return 2 * TILES * bytes_of(kind(slot)); }
    DEVICE int begin(int first, int place) const { return place ? bytes(first) + (place - 1) * bytes(first + 1) : 0; }
    DEVICE void copy_all(u64 policy) {
        int copied = 0;
        for (int unit = blockIdx.x; unit < UNITS; unit += gridDim.x)
            for (int first = 0; first < who.count; first += PER, ++copied, ring.next()) {
                const int n = min(PER, who.count - first);
                if (copied >= a.slots) ring.await_emptied();
                if (lane == 0) expect_bytes(ring.filled(), begin(first, n));
                __syncwarp();
                COPY_EACH(lane < n, slots_at + ring.slot * a.slot + begin(first, lane),
                          who.from[first + lane] + i64(unit) * bytes(first + lane), bytes(first + lane), ring.filled(), policy);
                end_copies(ring.filled());
            }
        await_own_copies();
    }
    DEVICE uint4 input(int pair) const { return load8(a.x + i64(pair) * I + tile * 256 + lane * 8); }
    // Multiplies a unit of an expert slot with all tokens of the expert. next: input of its first pair; on return, input of the
    // first pair of slot `after`.
    template <int KIND> DEVICE void multiply_kind(int slot, int after, u32 from, float *to, uint4 &next) {
        Tile<KIND> w[2];
        w[0].load(Shared{from + tile * Tile<KIND>::BYTES}, lane), w[1].load(Shared{from + (TILES + tile) * Tile<KIND>::BYTES}, lane);
        const int first = who.first[slot], end = first + __popc(who.mask[slot]);
#pragma unroll 1
        for (int pair = first; pair < end; ++pair) {
            const uint4 now = next;
            float sum[2];
            const float v[8] = {low(now.x), high(now.x), low(now.y), high(now.y), low(now.z), high(now.z), low(now.w), high(now.w)};
            next = input(pair + 1 < end ? pair + 1 : who.first[after]);
            __syncwarp();  // all lanes have read the previous token
            columns.put8(lane * 8, 0, v);
            __syncwarp();
            forget<KIND, 2>(w);
            multiply_token<KIND, 2>(w, x, sum);
            put_sums<2>(to + (pair * TILES + tile) * 16, sum, lane);
        }
    }
    DEVICE void multiply_unit(float *to, uint4 &next) {
        const int place = warp / TILES;
#pragma unroll 1
        for (int first = 0; first < who.count; first += PER) {
            const int slot = first + place;
            ring.await_filled();
            if (place < PER && slot < who.count) {
                const u32 from = slots_at + ring.slot * a.slot + begin(first, place);
                const int after = slot + PER < who.count ? slot + PER : place, own = kind(slot);
#define MULTIPLY(k) if constexpr ((KINDS >> k) & 1) { if (own == k) multiply_kind<k>(slot, after, from, to, next); }
                EACH_KIND(MULTIPLY)
#undef MULTIPLY
            }
            ring.release();
        }
    }
    DEVICE float sum(const float *from, int pair) const {
        float v = 0;
#pragma unroll
        for (int i = 0; i < TILES; ++i) v += from[(pair * TILES + i) * 16];
        return v;
    }
    // Adds the parts of a token's sum in pairs.
    DEVICE float sum_of_parts(const float *from, int token) const {
        float v = 0, kept[3];
        int i = 0;
#pragma unroll 1
        for (int part = 0; part < PARTS; ++part) {
            const int end = slice_end(E, PARTS, part);
            v = 0;
            for (; i < BEST && who.chosen[token][i] < end; ++i) v += sum(from, who.pair(who.passes[who.chosen[token][i]], token));
            if constexpr (SHARED) {
                const float *const own = from + who.pair(0, token) * TILES * 16;
                float slice = 0;
                for (int t = slice_begin(TILES, PARTS, part); t < slice_end(TILES, PARTS, part); ++t) slice += own[t * 16];
                v += slice;
            }
            bool pairs = true;
#pragma unroll
            for (int level = 0; level < 3; ++level) {
                if (pairs && part >> level & 1) v = kept[level] + v;
                else if (pairs) kept[level] = v, pairs = false;
            }
        }
        return v;
    }
    DEVICE void run(int real) {
        const int token = tid >> 4, n = tid & 15, pairs = a.tokens * (BEST + SHARED);
        uint4 next = make_uint4(0, 0, 0, 0);
        if (real && warp / TILES < min(PER, who.count)) next = input(who.first[warp / TILES]);
        for (int unit = blockIdx.x, turn = 0; unit < UNITS; unit += gridDim.x, turn ^= 1) {
            float *const y = a.y + i64(token) * H + unit * 16 + n, *to = partial + turn * pairs * TILES * 16;
            const float old = token < real ? load(y) : 0.f;
            multiply_unit(to, next);
            meet_eight_warps();
            if (token < real) *y = old + sum_of_parts(to + n, token);
        }
    }
};

// Like `experts_down`.
template <int H, int I, int E, int BEST, bool SHARED, bool NORMALISED, int KINDS, int OFFSET>
DEVICE void packed_down(const PackedDown &a) {
    extern __shared__ __align__(128) char shared[];
    PackedDownUnits<H, I, E, BEST, SHARED, NORMALISED, KINDS, OFFSET> g(a, shared);
    const bool copies = g.warp == g.WARPS;
    const int real = real_tokens(a.count, a.starts, a.tokens, a.first);
    launch_dependents();
    clear_zeros(shared);
    g.who.clear(a.down);
    if (copies) g.ring.init(g.lane);
    __syncthreads();
    g.who.choose(a.logits, real);
    g.who.order_parts(real);
    if (copies) g.who.list(real);
    __syncthreads();
    if (copies) return g.copy_all(read_once());
    wait();
    g.run(real);
}

// Dequantizes experts. Grid [tiles of an expert / 8, experts], 256 threads: one warp per tile.
template <int KIND> DEVICE void unpack_experts(const UnpackExperts &a) {
    launch_dependents();
    wait();
    if (a.counts && __ldcg(a.counts + blockIdx.y) == 0) return;
    const int tile = blockIdx.x * 8 + (threadIdx.x >> 5), lane = threadIdx.x & 31, tiles = a.columns / 256;
    const int first = tile / tiles * 8, row = first + (lane >> 2);
    if (first >= a.rows) return;
    u16 *const to = a.y + i64(blockIdx.y) * a.stride + i64(row) * a.columns + tile % tiles * 256;
    unpack_tile<KIND>((const char *)__ldg(a.data + blockIdx.y) + i64(tile) * Tile<KIND>::BYTES, lane, row < a.rows ? to : nullptr);
}
