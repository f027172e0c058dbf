// Products with weights that stay quantized. See product.cuh: the same blocks of one warp that copies and eight that
// multiply, but a weight is tiles of 8 rows and 256 columns, one behind the other (deltic/ops/cuda/tiles.py has their
// layout). A warp has every 8th tile of a block, or every 8th pair of tiles one below the other. Its codes become bfloat16 numbers without rounding, those of four
// bits with an offset that is taken off the tile's sum; a group's sum, float32, is multiplied with its scale.
// So weights are what the file says, and a row's sum has one order: tiles from left to right, groups from left to right.

enum { kQ8_0, kQ4_K, kQ6_K, kQ5_K, kBF16 };
#define EACH_KIND(f) f(kQ8_0) f(kQ4_K) f(kQ6_K) f(kQ5_K) f(kBF16)

struct Shared {
    u32 at;
    DEVICE uint4 four(int i) const { return load_shared(at + i); }
    DEVICE uint2 two(int i) const { return load_shared2(at + i); }
    DEVICE u32 one(int i) const { return load_shared1(at + i); }
    DEVICE u32 half(int i) const { return load_shared_half(at + i); }
};
struct Global {
    const char *at;
    DEVICE uint4 four(int i) const { return __ldg((const uint4 *)(at + i)); }
    DEVICE uint2 two(int i) const { return __ldg((const uint2 *)(at + i)); }
    DEVICE u32 one(int i) const { return __ldg((const u32 *)(at + i)); }
    DEVICE u32 half(int i) const { return __ldg((const u16 *)(at + i)); }
};
DEVICE u32 word(const uint4 &v, int i) { return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w; }
template <int N> DEVICE u32 word_of(const uint4 (&v)[N], int i) { return word(v[i / 4], i % 4); }
// A byte, and a byte less 128, as a number.
DEVICE float byte_of(u32 w, int i) { return __uint_as_float(__byte_perm(w, 0x4b000000u, 0x7440 + i)) - 8388608.f; }
DEVICE float signed_byte_of(u32 w, int i) { return __uint_as_float(__byte_perm(w, 0x4b000000u, 0x7440 + i)) - 8388736.f; }

// What a lane has of a tile: row lane / 4; of each 16 columns four, from lane % 4 * 4 on.
// load: its codes and scales. codes: of 32 columns as bfloat16 plus OFFSET, columns 0, 1; 2, 3; 16, 17; 18, 19 from its first one on.
// scale: of 16 columns, in its unit. GROUP: columns of one scale. AFFINE: there are minima.
template <int KIND> struct Tile;

template <> struct Tile<kQ8_0> {  // codes [4, lane, 16], scales fp16 [8, 8]
    static constexpr int BYTES = 2048 + 128, GROUP = 32, OFFSET = 0;
    static constexpr bool AFFINE = false;
    uint4 w[4], d;
    template <class L> DEVICE void load(const L &from, int lane) {
#pragma unroll
        for (int i = 0; i < 4; ++i) w[i] = from.four(i * 512 + lane * 16);
        d = from.four(2048 + (lane >> 2) * 16);
    }
    // The low seven bits of a byte over 128, less 128 or, for negative numbers, 256.
    static DEVICE u32 two(u32 w) { return add_pairs(select(w, 0x007f007fu, 0x43004300u), select(w, 0x00800080u, 0xc300c300u)); }
    DEVICE void codes(int g, u32 (&a)[4]) const {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const u32 x = word_of(w, 2 * g + h);
            a[2 * h] = two(x), a[2 * h + 1] = two(x >> 8);
        }
    }
    DEVICE float scale(int i) const { return half_of(word(d, i / 4) >> i / 2 % 2 * 16); }
    DEVICE float unit() const { return 1.f; }
};

// Scales and minima of 32 columns, six bits each, in units of 256: scales [8, 8], minima [8, 8], units fp16 [8, 2].
struct Affine {
    static constexpr int GROUP = 32, SCALES = 64 + 64 + 32;
    static constexpr bool AFFINE = true;
    uint2 s;
    u32 two, m, d;  // of the lane's two groups: scales, minima
    template <class L> DEVICE void load_scales(const L &from, int lane, int at) {
        s = from.two(at + (lane >> 2) * 8);
        two = from.half(at + lane * 2);
        m = from.half(at + 64 + lane * 2);
        d = from.one(at + 128 + (lane >> 2) * 4);
    }
    DEVICE float scale(int i) const { return byte_of(i < 8 ? s.x : s.y, i / 2 % 4); }
    DEVICE float unit() const { return half_of(d); }
    DEVICE float unit_of_minima() const { return half_of(d >> 16); }
    static DEVICE u32 pair(u32 bytes) { return add_pairs(__byte_perm(bytes, 0x43434343u, 0x4140), 0xc300c300u); }
    DEVICE u32 scales() const { return pair(two); }
    DEVICE u32 minima() const { return pair(m); }
};
template <> struct Tile<kQ4_K> : Affine {  // codes [2, lane, 16]: 8 of four bits a word, turned left by three
    static constexpr int BYTES = 1024 + SCALES, OFFSET = 16;
    uint4 w[2];
    template <class L> DEVICE void load(const L &from, int lane) {
        w[0] = from.four(lane * 16), w[1] = from.four(512 + lane * 16);
        load_scales(from, lane, 1024);
    }
    DEVICE void codes(int g, u32 (&a)[4]) const {
        const u32 x = word_of(w, g);
#pragma unroll
        for (int i = 0; i < 4; ++i) a[i] = select(__funnelshift_r(x, x, 4 * i), 0x00780078u, 0x41804180u);
    }
};

// Codes of six bits [3, lane, 16]: 16 of them in three words. In a half of a word two and four bits more, which are the low
// ones of the last four and, in the third word, their high ones.
// START: of a code 0.
template <int START, int N> DEVICE void six_bits(const uint4 (&w)[N], int g, u32 (&a)[4]) {
    const int first = g / 2 * 3;
    const u32 x = word_of(w, first), y = word_of(w, first + 1), z = word_of(w, first + 2);
    const u32 mask = 0x003f003fu, over = 0x43004300u, less = START == 32 ? 0xc320c320u : 0xc300c300u;
    if (g % 2 == 0) a[0] = select(x, mask, over), a[1] = select(x >> 6, mask, over);
    if (g % 2 == 0) a[2] = select(y, mask, over), a[3] = select(y >> 6, mask, over);
    if (g % 2) a[0] = select(z, mask, over), a[1] = select(z >> 6, mask, over);
    if (g % 2) a[2] = select(z >> 8, 0x00300030u, select(x >> 12, 0x000f000fu, over));
    if (g % 2) a[3] = select(z >> 10, 0x00300030u, select(y >> 12, 0x000f000fu, over));
#pragma unroll
    for (int i = 0; i < 4; ++i) a[i] = add_pairs(a[i], less);
}
template <> struct Tile<kQ6_K> {  // scales of 16 columns plus 128 [8, 16], in units fp16 [8]
    static constexpr int BYTES = 1536 + 128 + 16, GROUP = 16, OFFSET = 0;
    static constexpr bool AFFINE = false;
    uint4 w[3], s;
    u32 d;
    template <class L> DEVICE void load(const L &from, int lane) {
#pragma unroll
        for (int i = 0; i < 3; ++i) w[i] = from.four(i * 512 + lane * 16);
        s = from.four(1536 + (lane >> 2) * 16);
        d = from.half(1664 + (lane >> 2) * 2);
    }
    DEVICE void codes(int g, u32 (&a)[4]) const { six_bits<32>(w, g, a); }
    DEVICE float scale(int i) const { return signed_byte_of(word(s, i / 4), i % 4); }
    DEVICE float unit() const { return half_of(d); }
};
template <> struct Tile<kQ5_K> : Affine {
    static constexpr int BYTES = 1536 + SCALES, OFFSET = 0;
    uint4 w[3];
    template <class L> DEVICE void load(const L &from, int lane) {
#pragma unroll
        for (int i = 0; i < 3; ++i) w[i] = from.four(i * 512 + lane * 16);
        load_scales(from, lane, 1536);
    }
    DEVICE void codes(int g, u32 (&a)[4]) const { six_bits<0>(w, g, a); }
};
template <> struct Tile<kBF16> {  // the numbers themselves
    static constexpr int BYTES = 4096, GROUP = 256, OFFSET = 0;
    static constexpr bool AFFINE = false;
    uint4 w[8];
    template <class L> DEVICE void load(const L &from, int lane) {
#pragma unroll
        for (int i = 0; i < 8; ++i) w[i] = from.four(i * 512 + lane * 16);
    }
    DEVICE void codes(int g, u32 (&a)[4]) const { a[0] = w[g].x, a[1] = w[g].y, a[2] = w[g].z, a[3] = w[g].w; }
    DEVICE float scale(int) const { return 1.f; }
    DEVICE float unit() const { return 1.f; }
};
DEVICE int bytes_of(int kind) {
#define BYTES_OF(k) if (kind == k) return Tile<k>::BYTES;
    EACH_KIND(BYTES_OF)
#undef BYTES_OF
    return 0;
}

struct Packed {
    const char *data[4];  // of each part of the weight, whose rows follow one another
    const void *x;        // this and the next ones as of `Product`
    const float *scale;
    const float *gate;
    void *y;              // kStore: float [T, total]; kAdd: float [T, total], added to; kGate: bf16 [T, total]
    float eps;
    int tokens, total, stride;
    int inverse;             // 65536 / tokens + 1, to divide by
    int slots, slot;         // of the ring, at least 2; bytes of one: of HIGH tiles for each warp
    int parts, rounds;       // rounds: sums over a block's tiles
    int round, sums;         // units of 8 rows of each part in a round; floats of all their tiles
    int kind[4], row[4], rows[4];     // row: a part's first one in y
    int whole[4], rest[4], shift[4];  // units of every block; so many have one more, from block `shift` on
};

// TOKENS: up to 1, 8 or 16. KINDS: bits of the kinds that the parts may have. HIGH: units that are multiplied at once, 1 or 2:
// the tensor cores have 16 rows.
template <int K, bool NORM, int OUT, int TOKENS, int KINDS, int HIGH, int HEAD, int SLICE>
struct PackedMultiplier : Input<Packed, K, NORM, HEAD, SLICE, true> {
    using Base = Input<Packed, K, NORM, HEAD, SLICE, true>;
    using Base::a, Base::tid, Base::warp, Base::lane, Base::WARPS;
    static constexpr int TILES = K / 256, HALVES = TOKENS > 8 ? 2 : 1, COLUMNS = TOKENS == 1 ? 1 : 2;
    static constexpr bool HELD = WARPS % TILES == 0 && HALVES == 1 && HIGH == 1;  // a warp's tiles are all of the same columns of x
    int lap = 0, place = 0;
    u32 barrier, ring, at;     // of the current slot
    u32 x[HALVES], totals[HALVES];  // of the lane's token: its first columns; its first sums
    float *partial;               // [rounds, tiles of one, T, 8]: two at most
    float old = 0;
    uint4 held[HELD ? 8 : 1];

    DEVICE PackedMultiplier(const Packed &args, char *shared) : Base(args, (float *)(shared + 512)) {
        char *next = shared + 1024 + a.slots * a.slot;
        this->xs = next, next += K * 2 * a.tokens;
        Base::sums = next, next += K / 8 * a.tokens;
        partial = (float *)next;
        barrier = shared_address(shared), ring = at = shared_address(shared + 1024);
#pragma unroll
        for (int half = 0; half < HALVES; ++half) {  // tokens that do not exist are the last one
            const int token = TOKENS == 1 ? 0 : min(8 * half + (lane >> 2), a.tokens - 1);
            x[half] = shared_address(this->xs) + token * 64 + (lane & 3) * 16;
            totals[half] = shared_address(Base::sums) + token * 32 + (lane & 3) * 8;
        }
    }
    DEVICE int tokens() const { return TOKENS == 1 ? 1 : a.tokens; }
    DEVICE void next() {
        at += a.slot, barrier += 8;
        if (++place == a.slots) place = 0, lap ^= 1, at = ring, barrier -= a.slots * 8;
    }
    // A part's units of this block in a round: how many, and the first.
    DEVICE int units(int p, int round, int &first) const {
        int block = int(blockIdx.x) - a.shift[p];
        if (block < 0) block += gridDim.x;
        first = block * a.whole[p] + min(block, a.rest[p]) + round * a.round;
        return max(0, min(a.whole[p] + (block < a.rest[p]) - round * a.round, a.round));
    }
    // Tiles t ... t + 7 of each row of units, of `count` units. A lane copies what lies in one unit.
    DEVICE void copy_slot(const char *from, int t, int count, int each, u64 policy) {
        const int row = t / TILES + lane / HIGH, unit = row * HIGH + lane % HIGH;
        const int begin = max(row * TILES, t), end = min(row * TILES + TILES, t + WARPS);
        int tiles = 0;
#pragma unroll
        for (int n = 0; n < HIGH; ++n) tiles += max(0, min(WARPS, (count + n) / HIGH * TILES - t));
        if (lane == 0) expect_bytes(barrier, tiles * each);
        __syncwarp();
        if (unit < count && begin < end)
            bulk_copy(at + (lane % HIGH * WARPS + begin - t) * each, from + (i64(unit) * TILES + begin - row * TILES) * each,
                      (end - begin) * each, barrier, policy);
    }
    // The copying warp: all tiles in the order in which they are multiplied; the first ones need no room to be made.
    DEVICE void copy_all() {
        const u64 policy = read_once();
        const u32 empty = 8 * a.slots;
        if (lane < a.slots) init_barrier(barrier + 8 * lane, 1), init_barrier(barrier + empty + 8 * lane, WARPS);
        publish_barriers();
        __syncwarp();
        int copied = 0;
        for (int round = 0; round < a.rounds; ++round)
            for (int p = 0; p < a.parts; ++p) {
                int first;
                const int count = units(p, round, first), each = bytes_of(a.kind[p]);
                const char *from = a.data[p] + i64(first) * (TILES * each);
                for (int t = 0; t < (count + HIGH - 1) / HIGH * TILES; t += WARPS, ++copied) {
                    if (copied == a.slots) __syncthreads();  // the barriers are there
                    if (copied >= a.slots) await_barrier(barrier + empty, lap ^ 1);
                    copy_slot(from, t, count, each, policy);
                    next();
                }
            }
        if (copied <= a.slots) __syncthreads();
    }
    DEVICE void multiply_rows(float (&d)[4], const u32 (&c)[HIGH][4], int first, u32 x, u32 y, bool fresh) {
        if constexpr (HIGH == 2) {
            if (fresh) multiply_first(d, c[0][first], c[1][first], c[0][first + 1], c[1][first + 1], x, y);
            else multiply(d, c[0][first], c[1][first], c[0][first + 1], c[1][first + 1], x, y);
        } else {
            if (fresh) multiply_first(d, c[0][first], c[0][first + 1], x, y);
            else multiply_eight(d, c[0][first], c[0][first + 1], x, y);
        }
    }
    // A tile's products with all tokens, [T, 8], and those of the tile below it, `below` further on.
    template <int KIND> DEVICE void multiply_tile(const Tile<KIND> (&w)[HIGH], int tile, float *to, int below) {
        constexpr int GROUP = Tile<KIND>::GROUP;
        const int step = 64 * tokens(), begin = tile * 8 * step;
        float sum[HALVES][HIGH][COLUMNS] = {}, all[HALVES][2][4] = {};
#pragma unroll
        for (int g = 0; g < 8; ++g) {
            u32 c[HIGH][4];
#pragma unroll
            for (int n = 0; n < HIGH; ++n) w[n].codes(g, c[n]);
#pragma unroll
            for (int half = 0; half < HALVES; ++half) {
                const uint4 v = HELD ? held[HELD ? g : 0] : load_shared(x[half] + begin + g * step);
                float d[4], e[4];
                if constexpr (GROUP == 256) {
                    multiply_rows(all[half][g % 2], c, 0, v.x, v.y, false);
                    multiply_rows(all[half][g % 2], c, 2, v.z, v.w, false);
                    continue;
                }
                multiply_rows(d, c, 0, v.x, v.y, true);
                if constexpr (GROUP == 32) multiply_rows(d, c, 2, v.z, v.w, false);
                else multiply_rows(e, c, 2, v.z, v.w, true);
#pragma unroll
                for (int n = 0; n < HIGH; ++n)
#pragma unroll
                    for (int i = 0; i < COLUMNS; ++i) {
                        float &s = sum[half][n][i];
                        s = __fmaf_rn(w[n].scale(2 * g), d[2 * n + i], s);
                        if constexpr (GROUP == 16) s = __fmaf_rn(w[n].scale(2 * g + 1), e[2 * n + i], s);
                    }
            }
        }
#pragma unroll
        for (int half = 0; half < HALVES; ++half) {
            float offset[4], low[4];
            if constexpr (Tile<KIND>::AFFINE) {
                const uint2 v = load_shared2(totals[half] + tile * 32 * tokens());
                u32 s[HIGH][4], m[HIGH][4];
#pragma unroll
                for (int n = 0; n < HIGH; ++n) s[n][0] = s[n][1] = w[n].scales(), m[n][0] = m[n][1] = w[n].minima();
                if constexpr (Tile<KIND>::OFFSET > 0) multiply_rows(offset, s, 0, v.x, v.y, true);
                multiply_rows(low, m, 0, v.x, v.y, true);
            }
#pragma unroll
            for (int n = 0; n < HIGH; ++n)
#pragma unroll
                for (int i = 0; i < COLUMNS; ++i) {
                    const int o = 2 * n + i, token = 8 * half + (lane & 3) * 2 + i;
                    float v = GROUP == 256 ? all[half][0][o] + all[half][1][o] : sum[half][n][i];
                    if constexpr (Tile<KIND>::OFFSET > 0) v = __fmaf_rn(-float(Tile<KIND>::OFFSET), offset[o], v);
                    if constexpr (GROUP < 256) v = w[n].unit() * v;
                    if constexpr (Tile<KIND>::AFFINE) v = __fmaf_rn(-w[n].unit_of_minima(), low[o], v);
                    if (token < tokens() && (n == 0 || below)) to[n * below + token * 8 + (lane >> 2)] = v;
                }
        }
    }
    template <int KIND> DEVICE void multiply_tiles(int count, float *to) {
        constexpr int EACH = Tile<KIND>::BYTES;
        const int rows = (count + HIGH - 1) / HIGH;
        int row = warp / TILES, tile = warp % TILES;
#pragma unroll 1
        for (int t = 0; t < rows * TILES; t += WARPS) {
            await_barrier(barrier, lap);
            __syncwarp();
            if (row < rows) {
                Tile<KIND> w[HIGH];
#pragma unroll
                for (int n = 0; n < HIGH; ++n) w[n].load(Shared{at + (n * WARPS + warp) * EACH}, lane);
                multiply_tile<KIND>(w, tile, to + (row * HIGH * TILES + tile) * 8 * tokens(),
                                    row * HIGH + 1 < count ? TILES * 8 * tokens() : 0);
            }
            __syncwarp();
            if (lane == 0) arrive_barrier(barrier + 8 * a.slots);
            next();
            row += WARPS / TILES, tile += WARPS % TILES;
            if (WARPS % TILES && tile >= TILES) tile -= TILES, ++row;
        }
    }
    template <int KIND> DEVICE void multiply_kind(int kind, int count, float *to) {
        if constexpr ((KINDS >> KIND) & 1)
            if (kind == KIND || KINDS == 1 << KIND) multiply_tiles<KIND>(count, to);
    }
    DEVICE float sum(const float *from, int token, int n) const {
        float v[2] = {};
#pragma unroll 8
        for (int tile = 0; tile < TILES; ++tile) v[tile & 1] += from[(tile * a.tokens + token) * 8 + n];
        return v[0] + v[1];
    }
    // What a thread's first sum is added to.
    DEVICE void load_old() {
        int first;
        const int slot = (tid / 8 * a.inverse) >> 16, token = tid / 8 - slot * a.tokens, count = units(0, 0, first);
        const int column = (first + slot) * 8 + tid % 8;
        if (slot < count && column < a.rows[0]) old = load((const float *)a.y + i64(token) * a.total + column);
    }
    // The sums of a round, to where they belong.
    DEVICE void finish(int round, const float *from) {
        for (int p = 0; p < (OUT == kGate ? 1 : a.parts); ++p) {
            int first;
            const int count = units(p, round, first), each = TILES * 8 * a.tokens;
            for (int o = tid; o < count * a.tokens * 8; o += WARPS * 32) {
                const int n = o % 8, slot = (o / 8 * a.inverse) >> 16, token = o / 8 - slot * a.tokens;
                const int row = (first + slot) * 8 + n;
                if (row >= a.rows[p]) continue;
                const i64 to = i64(token) * a.total + a.row[p] + row;
                if (OUT == kAdd && (round || o != tid)) old = load((const float *)a.y + to);
                const float f = NORM ? this->factor(token) : 1.f, v = sum(from + slot * each, token, n) * f;
                if constexpr (OUT == kGate)
                    ((u16 *)a.y)[to] = narrow(silu(v) * (sum(from + (count + slot) * each, token, n) * f));
                else ((float *)a.y)[to] = OUT == kAdd ? old + v : v;
            }
            from += count * each;
        }
    }
    DEVICE void run() {
        if constexpr (HELD) {
#pragma unroll
            for (int g = 0; g < 8; ++g) held[g] = load_shared(x[0] + (warp % TILES * 8 + g) * 64 * tokens());
        }
        for (int round = 0; round < a.rounds; ++round) {
            float *begin = partial + (round & 1) * a.sums, *to = begin;
            for (int p = 0; p < a.parts; ++p) {
                int first;
                const int count = units(p, round, first), kind = a.kind[p];
#define MULTIPLY(k) multiply_kind<k>(kind, count, to);
                EACH_KIND(MULTIPLY)
#undef MULTIPLY
                to += count * TILES * 8 * a.tokens;
            }
            this->meet();
            finish(round, begin);
        }
    }
};

template <int K, bool NORM, int OUT, int TOKENS, int KINDS, int HIGH, int HEAD, int SLICE>
DEVICE void packed(const Packed &a) {
    extern __shared__ __align__(128) char shared[];
    PackedMultiplier<K, NORM, OUT, TOKENS, KINDS, HIGH, HEAD, SLICE> m(a, shared);
    if (m.warp == m.WARPS) return m.copy_all();
    if ((NORM && m.tid * 32 < K) || m.tid * 32 < HEAD) prefetch(a.scale + m.tid * 32);
    __syncthreads();
    wait();
    launch_dependents();  // only now, so that what comes next finds the room that the kernel before has left
    if constexpr (OUT == kAdd) m.load_old();
    m.stage();
    m.run();
}

// What a lane has of a tile as numbers: f(column, four of them).
template <int KIND, class F> DEVICE void unpack_lane(const char *from, int lane, F f) {
    Tile<KIND> w;
    w.load(Global{from}, lane);
#pragma unroll
    for (int g = 0; g < 8; ++g) {
        u32 c[4];
        w.codes(g, c);
        float low_end = 0;
        if constexpr (Tile<KIND>::AFFINE)
            low_end = -w.unit_of_minima() * __ldg((const unsigned char *)from + Tile<KIND>::BYTES - 96 + (lane >> 2) * 8 + g);
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const float s = w.unit() * w.scale(2 * g + h), o = Tile<KIND>::OFFSET;
            const u32 x = c[2 * h], y = c[2 * h + 1];
            f(g * 32 + h * 16 + (lane & 3) * 4,
              make_float4(__fmaf_rn(s, low(x) - o, low_end), __fmaf_rn(s, high(x) - o, low_end),
                          __fmaf_rn(s, low(y) - o, low_end), __fmaf_rn(s, high(y) - o, low_end)));
        }
    }
}

struct Unpack {
    const char *data;
    u16 *y;       // [rows, columns]
    int rows, columns;
};
// A warp for each tile.
template <int KIND> DEVICE void unpack(const Unpack &a) {
    launch_dependents();
    wait();
    const int tile = blockIdx.x * 8 + (threadIdx.x >> 5), lane = threadIdx.x & 31, tiles = a.columns / 256;
    const int row = tile / tiles * 8 + (lane >> 2);
    if (row >= a.rows) return;
    u16 *to = a.y + i64(row) * a.columns + tile % tiles * 256;
    unpack_lane<KIND>(a.data + i64(tile) * Tile<KIND>::BYTES, lane, [to](int column, float4 v) {
        *(uint2 *)(to + column) = make_uint2(narrow2(v.x, v.y), narrow2(v.z, v.w));
    });
}

// `enter` with an embedding of tiles.
template <int KIND> DEVICE void enter_packed(const Enter &a) {
    launch_dependents();
    wait();
    const int tiles = a.hidden / 256;
    for (int token = blockIdx.x; token < a.tokens; token += gridDim.x) {
        const i64 row = a.ids[token];
        const char *from = (const char *)a.embedding + row / 8 * tiles * Tile<KIND>::BYTES;
        float *to = a.residual + i64(token) * a.hidden;
        for (int i = threadIdx.x; i < tiles * 4; i += blockDim.x)
            unpack_lane<KIND>(from + i64(i / 4) * Tile<KIND>::BYTES, int(row % 8) * 4 + i % 4, [=](int column, float4 v) {
                *(float4 *)(to + i / 4 * 256 + column) = v;
            });
        turn(a, token);
    }
}
