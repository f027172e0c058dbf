// Products with weights that stay quantized. As in product.cuh, a block has one copying warp and eight multiplying warps. A
// weight is a sequence of tiles of 8 rows and 256 columns (layout: deltic/ops/cuda/quantized.py). A warp has every 8th tile of
// a block, or every 8th pair of tiles one below the other.
//
// Codes are multiplied as integers. Activations are 16-bit integers (input.cuh), multiplied in two halves of eight bits. One
// token uses plain cores (dp4a), where a lane multiplies its own groups. More tokens use tensor cores, which need a group's
// columns in four lanes, so these lanes exchange their codes first. A group's integer sum is exact, and thus the same either
// way. It is then multiplied with the group's scale. So weights are exactly those of the file, and activations are rounded to
// 2^-16 of the largest of 256.
//
// A row's sum has one order. In a tile, groups j and j + 4 are added first, then these sums in pairs. Tiles are added from left
// to right, even and odd ones separately. Where devices may have parts of the columns (kAdd, kPart), the tiles of a slice are
// added from left to right, and the slices in pairs (sliced.cuh). Plain kinds, bfloat16 and float8, are multiplied as bfloat16.

enum { kQ8_0, kQ4_K, kQ6_K, kQ5_K, kBF16, kFP8, kMXFP4, kNVFP4, kINT4_128, kINT4_64, kINT4_32 };
#define EACH_KIND(f) f(kQ8_0) f(kQ4_K) f(kQ6_K) f(kQ5_K) f(kBF16) f(kFP8) f(kMXFP4) f(kNVFP4) f(kINT4_128) f(kINT4_64) f(kINT4_32)
constexpr int PLAIN_KINDS = 1 << kBF16 | 1 << kFP8;
DEVICE constexpr bool is_plain(int kind) { return PLAIN_KINDS >> kind & 1; }
// The form of the input of products with tiles of these kinds (a bit each).
DEVICE constexpr int form_of(int kinds) { return !(kinds & PLAIN_KINDS) ? kFixed : kinds & ~PLAIN_KINDS ? kBoth : kPlain; }

struct Shared {
    u32 at;
    DEVICE uint4 four(int i) const { return load_shared(at + i); }
    DEVICE u32 one(int i) const { return load_shared1(at + i); }
    DEVICE u32 half(int i) const { return load_shared_half(at + i); }
};
struct Global {
    const char *at;
    DEVICE uint4 four(int i) const { return __ldg((const uint4 *)(at + i)); }
    DEVICE u32 one(int i) const { return __ldg((const u32 *)(at + i)); }
    DEVICE u32 half(int i) const { return __ldg((const u16 *)(at + i)); }
};
DEVICE u32 word(const uint4 &v, int i) { return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w; }
template <int N> DEVICE u32 word_of(const uint4 (&v)[N], int i) { return word(v[i / 4], i % 4); }
// Byte i of w as float: as it is; minus 128; divided by 16.
DEVICE float byte_of(u32 w, int i) { return __uint_as_float(__byte_perm(w, 0x4b000000u, 0x7440 + i)) - 8388608.f; }
DEVICE float signed_byte_of(u32 w, int i) { return __uint_as_float(__byte_perm(w, 0x4b000000u, 0x7440 + i)) - 8388736.f; }
DEVICE float small_byte_of(u32 w, int i) { return __uint_as_float(__byte_perm(w, 0x49000000u, 0x7440 + i)) - 524288.f; }

// A lane's part of a tile: in row lane / 4 two groups of 32 columns, set 0 (group j = lane % 4) and set 1 (group j + 4).
// load: loads the lane's codes and scales.
// codes: the eight codes of a set from column 8 i on, one integer per byte. SIGNED: the integers are signed.
// QUADS: number of quads of words that hold the codes. packed: word i of these. quad: the quad with the n-th 16 columns of a
// set. codes_of: the codes of a set in a word.
// SUMS: number of the lane's integer sums, each over 32 or 16 columns in their order. s, d: the lane's scales.
// row_scales: the scales of a row, stored at SCALES. scale, unit: s and d of the row's lane j.
// part: the scaled total of the sums. line: the last 16 bytes of the lane's line (input.cuh). MINIMA: part needs its sums of x.
// factor, less: a weight is factor * code - less.
template <int KIND> struct Tile;
// Base of the integer kinds. Unless overridden, a word of `packed` has codes of one set, ready to be multiplied.
struct Whole {
    static constexpr int QUADS = 4;
    static constexpr bool MINIMA = false;
    static DEVICE int quad(int set, int n) { return set * 2 + n; }
    static DEVICE u32 codes_of(u32 word, int) { return word; }
    using Scales = uint4;
    static DEVICE Scales row_scales(const Shared &from, int row) { return from.four(row * 16); }
    static DEVICE u32 scale(const Scales &s, int j) { return word(s, j); }
    static DEVICE u32 unit(const Scales &, u32 own, int) { return own; }
};

template <> struct Tile<kQ8_0> : Whole {  // codes [4, lane, 16]; scales fp16 [lane, 2]
    static constexpr int BYTES = 2048 + 128, SCALES = 2048, SUMS = 2;
    static constexpr bool SIGNED = true;
    uint4 w[4];
    u32 s, d;
    template <class L> DEVICE void load(const L &from, int lane) {
#pragma unroll
        for (int i = 0; i < 4; ++i) w[i] = from.four(i * 512 + lane * 16);
        s = from.one(SCALES + lane * 4), d = 0;
    }
    DEVICE void codes(int set, int i, u32 (&a)[2]) const { a[0] = packed(set * 8 + i * 2), a[1] = packed(set * 8 + i * 2 + 1); }
    DEVICE u32 packed(int i) const { return word_of(w, i); }
    static DEVICE float part(u32 s, u32, const float (&sum)[2], const uint4 &line) {
        return __fmul_rn(__uint_as_float(line.z), __fmaf_rn(half_of(s >> 16), sum[1], __fmul_rn(half_of(s), sum[0])));
    }
    DEVICE float factor(int set, int) const { return half_of(s >> 16 * set); }
    DEVICE float less(int) const { return 0; }
};

// Scales and minima of six bits: bytes [lane, 4], two of each; their units: fp16 [8, 2].
struct Affine : Whole {
    static constexpr int SUMS = 2;
    static constexpr bool MINIMA = true;
    u32 s, d;
    template <class L> DEVICE void load_scales(const L &from, int lane, int at) {
        s = from.one(at + lane * 4), d = from.one(at + 128 + (lane >> 2) * 4);
    }
    // unit: of the scales. first, second: the two scales as floats.
    static DEVICE float part(u32 s, u32 d, float unit, float first, float second, const float (&sum)[2], const uint4 &line) {
        const float v = __fmaf_rn(second, sum[1], __fmul_rn(first, sum[0]));
        const float low = __fmaf_rn(byte_of(s, 3), __uint_as_float(line.y), __fmul_rn(byte_of(s, 2), __uint_as_float(line.x)));
        return __fmul_rn(__uint_as_float(line.z), __fmaf_rn(unit, v, -__fmul_rn(half_of(d >> 16), low)));
    }
    DEVICE float less(int set) const { return half_of(d >> 16) * byte_of(s, 2 + set); }
};
template <> struct Tile<kQ4_K> : Affine {  // codes [2, lane, 16]: low bits of a byte: set 0; high bits: set 1, times 16
    static constexpr int BYTES = 1024 + 128 + 32, SCALES = 1024, QUADS = 2;  // each with both sets
    static constexpr bool SIGNED = false;
    uint4 w[2];
    template <class L> DEVICE void load(const L &from, int lane) {
        w[0] = from.four(lane * 16), w[1] = from.four(512 + lane * 16);
        load_scales(from, lane, SCALES);
    }
    DEVICE void codes(int set, int i, u32 (&a)[2]) const {
#pragma unroll
        for (int n = 0; n < 2; ++n) a[n] = codes_of(packed(i * 2 + n), set);
    }
    DEVICE u32 packed(int i) const { return word_of(w, i); }
    static DEVICE int quad(int, int n) { return n; }
    static DEVICE u32 codes_of(u32 word, int set) { return word & (set ? 0xf0f0f0f0u : 0x0f0f0f0fu); }
    static DEVICE float part(u32 s, u32 d, const float (&sum)[2], const uint4 &line) {
        return Affine::part(s, d, half_of(d), byte_of(s, 0), small_byte_of(s, 1), sum, line);
    }
    DEVICE float factor(int set, int) const { return half_of(d) * (set ? small_byte_of(s, 1) : byte_of(s, 0)); }
};

// Codes of six bits [3, lane, 16], 16 columns in three words. The upper six bits of the bytes are the first twelve codes. The
// lower two bits are those of the last four codes, highest bits in the first word. Codes are multiplied as 4 times their value.
template <int N> DEVICE void six_bits(const uint4 (&w)[N], int set, int i, u32 (&a)[2]) {
    const int first = (set * 2 + i / 2) * 3;
    const u32 mask = 0xfcfcfcfcu, x = word_of(w, first), y = word_of(w, first + 1), z = word_of(w, first + 2);
    if (i % 2 == 0) a[0] = x & mask, a[1] = y & mask;
    else a[0] = z & mask, a[1] = select(z << 2, 0x0c0c0c0cu, select(y << 4, 0x30303030u, x << 6 & 0xc0c0c0c0u));
}
template <int N> DEVICE u32 six_bits_of(const uint4 (&w)[N], int i) {
    u32 a[2];
    six_bits(w, i / 8, i % 8 / 2, a);
    return a[i % 2];
}
template <> struct Tile<kQ6_K> : Whole {  // scales of 16 columns, plus 128: bytes [lane, 4]; units: fp16 [8]
    static constexpr int BYTES = 1536 + 128 + 16, SCALES = 1536, SUMS = 4;
    static constexpr bool SIGNED = true;
    uint4 w[3];
    u32 s, d;
    template <class L> DEVICE void load(const L &from, int lane) {
#pragma unroll
        for (int i = 0; i < 3; ++i) w[i] = from.four(i * 512 + lane * 16);
        s = from.one(SCALES + lane * 4), d = from.half(SCALES + 128 + (lane >> 2) * 2);
    }
    DEVICE void codes(int set, int i, u32 (&a)[2]) const { six_bits(w, set, i, a); }
    DEVICE u32 packed(int i) const { return six_bits_of(w, i); }
    static DEVICE float part(u32 s, u32 d, const float (&sum)[4], const uint4 &line) {
        float v = __fmul_rn(signed_byte_of(s, 0), sum[0]);
#pragma unroll
        for (int i = 1; i < 4; ++i) v = __fmaf_rn(signed_byte_of(s, i), sum[i], v);
        return __fmul_rn(__uint_as_float(line.z), __fmul_rn(half_of(d) * .25f, v));
    }
    DEVICE float factor(int set, int i) const { return half_of(d) * .25f * signed_byte_of(s, set * 2 + i / 2); }
    DEVICE float less(int) const { return 0; }
};
template <> struct Tile<kQ5_K> : Affine {  // codes as in kQ6_K
    static constexpr int BYTES = 1536 + 128 + 32, SCALES = 1536;
    static constexpr bool SIGNED = true;
    uint4 w[3];
    template <class L> DEVICE void load(const L &from, int lane) {
#pragma unroll
        for (int i = 0; i < 3; ++i) w[i] = from.four(i * 512 + lane * 16);
        load_scales(from, lane, SCALES);
    }
    DEVICE void codes(int set, int i, u32 (&a)[2]) const { six_bits(w, set, i, a); }
    DEVICE u32 packed(int i) const { return six_bits_of(w, i); }
    static DEVICE float part(u32 s, u32 d, const float (&sum)[2], const uint4 &line) {
        return Affine::part(s, d, half_of(d) * .25f, byte_of(s, 0), byte_of(s, 1), sum, line);
    }
    DEVICE float factor(int set, int) const { return half_of(d) * .25f * byte_of(s, set); }
};
// Codes of e2m1 numbers [2, lane, 16]: four of set 0 in the lower half of a word, four of set 1 in the upper half. They are
// multiplied as twice their value.
struct Floats4 : Whole {
    static constexpr int QUADS = 2;
    static constexpr bool SIGNED = true;
    uint4 w[2];
    u32 s, d;
    template <class L> DEVICE void load_codes(const L &from, int lane) { w[0] = from.four(lane * 16), w[1] = from.four(512 + lane * 16); }
    DEVICE void codes(int set, int i, u32 (&a)[2]) const {
#pragma unroll
        for (int n = 0; n < 2; ++n) a[n] = codes_of(packed(i * 2 + n), set);
    }
    DEVICE u32 packed(int i) const { return word_of(w, i); }
    static DEVICE int quad(int, int n) { return n; }
    static DEVICE u32 codes_of(u32 word, int set) {
        const u32 four = set ? word >> 16 : word;
        return sizes(four) | ((0x80808080u - sizes(four ^ 0x8888u)) ^ 0x80808080u);  // codes without a sign | codes with one
    }
    // Twice the lowest four codes, one per byte; 0 for negative codes: prmt then replicates a byte's sign bit, and all are 0.
    static DEVICE u32 sizes(u32 codes) {
        u32 r;
        asm("prmt.b32 %0, %1, %2, %3;" : "=r"(r) : "r"(0x03020100u), "r"(0x0c080604u), "r"(codes));
        return r;
    }
    DEVICE float less(int) const { return 0; }
};
template <> struct Tile<kMXFP4> : Floats4 {  // exponents of two, plus 127: bytes [lane, 2]
    static constexpr int BYTES = 1024 + 64, SCALES = 1024, SUMS = 2;
    template <class L> DEVICE void load(const L &from, int lane) { load_codes(from, lane), s = from.half(SCALES + lane * 2), d = 0; }
    static DEVICE Scales row_scales(const Shared &from, int row) {
        const u32 x = from.one(row * 8), y = from.one(row * 8 + 4);
        return make_uint4(x & 0xffff, x >> 16, y & 0xffff, y >> 16);
    }
    // Half of the power of two, because codes are doubled.
    static DEVICE float power(u32 s, int set) {
        const u32 e = s >> 8 * set & 255;
        return __uint_as_float(e < 2 ? 0x00200000u << e : (e - 1) << 23);
    }
    static DEVICE float part(u32 s, u32, const float (&sum)[2], const uint4 &line) {
        return __fmul_rn(__uint_as_float(line.z), __fmaf_rn(power(s, 1), sum[1], __fmul_rn(power(s, 0), sum[0])));
    }
    DEVICE float factor(int set, int) const { return power(s, set); }
};
template <> struct Tile<kNVFP4> : Floats4 {  // e4m3 scales of 16 columns: bytes [lane, 4]; 128 times their factors: float [8]
    static constexpr int BYTES = 1024 + 128 + 32, SCALES = 1024, SUMS = 4;
    template <class L> DEVICE void load(const L &from, int lane) {
        load_codes(from, lane), s = from.one(SCALES + lane * 4), d = from.one(SCALES + 128 + (lane >> 2) * 4);
    }
    // 2^-8 times scale i: its bits, taken as those of an fp16.
    static DEVICE float e4m3(u32 s, int i) { return half_of((i ? s >> (8 * i - 7) : s << 7) & 0x3f80u); }
    static DEVICE float part(u32 s, u32 d, const float (&sum)[4], const uint4 &line) {
        float v = __fmul_rn(e4m3(s, 0), sum[0]);
#pragma unroll
        for (int i = 1; i < 4; ++i) v = __fmaf_rn(e4m3(s, i), sum[i], v);
        return __fmul_rn(__uint_as_float(line.z), __fmul_rn(__uint_as_float(d), v));
    }
    DEVICE float factor(int set, int i) const { return __uint_as_float(d) * e4m3(s, set * 2 + i / 2); }
};
template <int GROUPS> struct RowScales {
    using Type = uint4;
};
struct EightScales {
    uint4 first, second;
};
template <> struct RowScales<8> {
    using Type = EightScales;
};
DEVICE void forget(EightScales &v) { forget(v.first), forget(v.second); }
// Codes as in kQ4_K; scales: words [8, GROUPS], each a float with a zero point in its low byte.
template <int GROUPS> struct Integers4 : Whole {
    static constexpr int BYTES = 1024 + 32 * GROUPS, SCALES = 1024, SUMS = 2, QUADS = 2;
    static constexpr bool SIGNED = false, MINIMA = true;
    using Scales = typename RowScales<GROUPS>::Type;
    uint4 w[2];
    u32 s, d;
    template <class L> DEVICE void load(const L &from, int lane) {
        w[0] = from.four(lane * 16), w[1] = from.four(512 + lane * 16);
        const int own = SCALES + (lane >> 2) * 4 * GROUPS + (lane & 3) * GROUPS / 8 * 4;
        s = from.one(own), d = from.one(own + 2 * GROUPS);
    }
    DEVICE void codes(int set, int i, u32 (&a)[2]) const {
#pragma unroll
        for (int n = 0; n < 2; ++n) a[n] = codes_of(packed(i * 2 + n), set);
    }
    DEVICE u32 packed(int i) const { return word_of(w, i); }
    static DEVICE int quad(int, int n) { return n; }
    static DEVICE u32 codes_of(u32 word, int set) { return word & (set ? 0xf0f0f0f0u : 0x0f0f0f0fu); }
    static DEVICE Scales row_scales(const Shared &from, int row) {
        if constexpr (GROUPS == 8) return {from.four(row * 32), from.four(row * 32 + 16)};
        else if constexpr (GROUPS == 4) return from.four(row * 16);
        else return make_uint4(from.one(row * 8), from.one(row * 8 + 4), 0, 0);
    }
    static DEVICE u32 scale(const Scales &s, int j) {
        if constexpr (GROUPS == 8) return word(s.first, j);
        else return word(s, j * GROUPS / 8);
    }
    static DEVICE u32 unit(const Scales &s, u32, int j) {
        if constexpr (GROUPS == 8) return word(s.second, j);
        else return word(s, GROUPS / 2 + j * GROUPS / 8);
    }
    static DEVICE float number(u32 word) { return __uint_as_float(word & ~255u); }
    // Sums minus zero points are integers of few enough bits for a float. Those of set 1 are 16 times as large.
    static DEVICE float part(u32 s, u32 d, const float (&sum)[2], const uint4 &line) {
        const float first = __fmaf_rn(-byte_of(s, 0), __uint_as_float(line.x), sum[0]);
        const float second = __fmaf_rn(-16.f * byte_of(d, 0), __uint_as_float(line.y), sum[1]);
        return __fmul_rn(__uint_as_float(line.z), __fmaf_rn(number(d) * .0625f, second, __fmul_rn(number(s), first)));
    }
    DEVICE float factor(int set, int) const { return set ? number(d) * .0625f : number(s); }
    DEVICE float less(int set) const { return number(set ? d : s) * byte_of(set ? d : s, 0); }
};
template <> struct Tile<kINT4_128> : Integers4<2> {};
template <> struct Tile<kINT4_64> : Integers4<4> {};
template <> struct Tile<kINT4_32> : Integers4<8> {};
// Plain kinds: of each group of 32 columns a lane has the eight from lane % 4 * 8 on. order: the i-th group to multiply; even
// and odd i go to two accumulators. eight: the lane's columns of a group as bfloat16. joined: the total of both accumulators.
// factor: the scale of a group, which `eight` does not include.
template <> struct Tile<kBF16> {  // bfloat16 [8 groups, lane, 8]
    static constexpr int BYTES = 4096;
    uint4 w[8];
    template <class L> DEVICE void load(const L &from, int lane) {
#pragma unroll
        for (int i = 0; i < 8; ++i) w[i] = from.four(i * 512 + lane * 16);
    }
    static DEVICE int order(int i) { return i; }
    DEVICE uint4 eight(int group) const { return w[group]; }
    DEVICE float joined(float one, float other) const { return one + other; }
    DEVICE float factor(int) const { return 1; }
};
// The bits of a float8 number at the place of those of a bfloat16 are the number times 2^-120, also for subnormals. The fma
// multiplies it with 2^120.
DEVICE u32 widened(u32 value, u32 sign) {
    u32 v = (value & 0x07f007f0u) | (sign & 0x80008000u);
    asm("fma.rn.bf16x2 %0, %0, %1, %2;" : "+r"(v) : "r"(0x7b807b80u), "r"(0x80008000u));
    return v;
}
template <> struct Tile<kFP8> {  // codes [4, lane, 16]: groups j and j + 4; scales of 128 columns: float [8, 2]
    static constexpr int BYTES = 2048 + 64;
    uint4 w[4];
    float scale[2];
    template <class L> DEVICE void load(const L &from, int lane) {
#pragma unroll
        for (int i = 0; i < 4; ++i) w[i] = from.four(i * 512 + lane * 16);
#pragma unroll
        for (int i = 0; i < 2; ++i) scale[i] = __uint_as_float(from.one(2048 + (lane >> 2) * 8 + i * 4));
    }
    static DEVICE int order(int i) { return i % 2 * 4 + i / 2; }
    DEVICE uint4 eight(int group) const {
        const uint4 &v = w[group % 4];
        const u32 a = group < 4 ? v.x : v.z, b = group < 4 ? v.y : v.w;
        return make_uint4(widened(a >> 4, a), widened(a << 4, a << 8), widened(b >> 4, b), widened(b << 4, b << 8));
    }
    DEVICE float joined(float one, float other) const { return __fmaf_rn(scale[1], other, __fmul_rn(scale[0], one)); }
    DEVICE float factor(int group) const { return scale[group / 4]; }
};
DEVICE int bytes_of(int kind) {
#define BYTES_OF(k) if (kind == k) return Tile<k>::BYTES;
    EACH_KIND(BYTES_OF)
#undef BYTES_OF
    return 0;
}

// The sum of a row from its two biased integer sums, those of the upper and lower bytes.
DEVICE float whole(int upper, int lower) {
    constexpr float BIAS = 12582912.f;  // as in multiply_bytes
    return __fmaf_rn(__int_as_float(upper) - BIAS, 256.f, __int_as_float(lower) - BIAS);
}
// Multiplies the lane's own row and groups of HIGH tiles with one token, on plain cores: dependent instructions wait for a
// shorter time than on tensor cores. d: sums of upper and lower bytes of each tile. x: the lane's line.
template <int KIND, int HIGH>
DEVICE void multiply_words(const Tile<KIND> (&w)[HIGH], int (&d)[Tile<KIND>::SUMS][4], u32 x) {
    constexpr int RUN = 8 / Tile<KIND>::SUMS;
#pragma unroll
    for (int n = 0; n < 2; ++n) {
        uint4 upper[2], lower[2];
#pragma unroll
        for (int k = 0; k < 2; ++k) upper[k] = load_shared(x + n * 32 + k * 16), lower[k] = load_shared(x + 64 + n * 32 + k * 16);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int at = i * 2 + n;
#pragma unroll
            for (int h = 0; h < HIGH; ++h) {
                int &up = d[at / RUN][2 * h], &low = d[at / RUN][2 * h + 1];
                if (at % RUN == 0) up = low = BYTES_BIAS;
                u32 c[2];
                w[h].codes(at / 4, at % 4, c);
#pragma unroll
                for (int k = 0; k < 2; ++k) {
                    up = multiply_four<Tile<KIND>::SIGNED>(c[k], word(upper[k], i), up);
                    low = multiply_four<Tile<KIND>::SIGNED>(c[k], word(lower[k], i), low);
                }
            }
        }
    }
}
// As `multiply_words`, on tensor cores. These sum over four lanes, so each lane's groups have their own two columns of the mma,
// with zeros for the other lanes. numbers(n): the n-th 16 bytes of the lane's half of a line, or zeros.
template <int KIND, int HIGH, class F>
DEVICE void multiply_groups(const Tile<KIND> (&w)[HIGH], int (&d)[Tile<KIND>::SUMS][4], F numbers) {
    constexpr int RUN = 8 / Tile<KIND>::SUMS;
#pragma unroll
    for (int n = 0; n < 2; ++n) {
        const uint4 v[2] = {numbers(n * 2), numbers(n * 2 + 1)};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int at = i * 2 + n;
            u32 c[HIGH][2];
#pragma unroll
            for (int h = 0; h < HIGH; ++h) w[h].codes(at / 4, at % 4, c[h]);
            multiply_bytes<Tile<KIND>::SIGNED>(d[at / RUN], c[0][0], c[HIGH - 1][0], c[0][1], c[HIGH - 1][1], word(v[0], i),
                                               word(v[1], i), at % RUN == 0);
        }
    }
}
// Transposes over four neighbouring lanes: each gives its word i to lane i.
DEVICE void exchange_words(u32 (&v)[4], int lane) {
#pragma unroll
    for (int apart = 1; apart < 4; apart *= 2)
#pragma unroll
        for (int n = 0; n < 2; ++n) {
            const int i = apart == 1 ? 2 * n : n;
            const u32 came = __shfl_xor_sync(~0u, lane & apart ? v[i] : v[i + apart], apart);
            if (lane & apart) v[i] = came;
            else v[i + apart] = came;
        }
}
// The scaled sum of the lane's groups in tile h. s, unit: the lane's scales. line: the last 16 bytes of its line of x.
template <int KIND> DEVICE float sum_of_groups(u32 s, u32 unit, const int (&d)[Tile<KIND>::SUMS][4], int h, const uint4 &line) {
    constexpr int SUMS = Tile<KIND>::SUMS;
    float sums[SUMS];
#pragma unroll
    for (int i = 0; i < SUMS; ++i) sums[i] = whole(d[i][2 * h], d[i][2 * h + 1]);
    return Tile<KIND>::part(s, unit, sums, line);
}
// The sum over all groups of row lane / 4, for each tile.
template <int KIND, int HIGH>
DEVICE void add_groups(const Tile<KIND> (&w)[HIGH], const int (&d)[Tile<KIND>::SUMS][4], const uint4 &line, float (&sum)[HIGH]) {
#pragma unroll
    for (int h = 0; h < HIGH; ++h) {
        sum[h] = sum_of_groups<KIND>(w[h].s, w[h].d, d, h, line);
#pragma unroll
        for (int other = 1; other < 4; other *= 2) sum[h] += __shfl_xor_sync(~0u, sum[h], other);
    }
}

// A block's share of a part. units: of 8 rows. first: the first unit. row: the part's first row in y. rows: of the part.
struct alignas(16) Part {
    int units, first, kind, row, rows;
};

struct Packed {
    const char *data[4];  // tiles of each part of the weight; parts are consecutive rows
    const void *x;        // this and the next ones as in `Product`
    const float *scale;
    void *y;              // kStore, kPart: float [T, total]; kAdd: float [T, total], added to; kGate: bf16 [T, total]
    float eps;
    int tokens, total;
    int inverse;             // 65536 / tokens + 1, for divisions by `tokens`
    int slots, slot;         // slots of the ring, at least 2; bytes of a slot: HIGH tiles per warp
    int parts, rounds;       // rounds: number of reductions over tiles
    int round, sums;         // units of 8 rows of each part in a round; floats of all tile sums of a round
    int chunk;               // CHUNKED: tiles of a row for which x is staged at once, a multiple of 8
    int kind[4], row[4], rows[4];     // row: the part's first row in y
    int whole[4], rest[4], shift[4];  // units per block; `rest` blocks, from `shift` on, have one more
};

// Number of partial sums of an output that a chunk of columns leaves to the next one. With several runs: one for each slice.
// With one run: pending sums of 1, 2 and 4 slices, each waiting for as many more, and the sum of an unfinished slice.
DEVICE constexpr int kept_sums(int slices, int runs) {
    return runs > 1 ? slices : slices > 4 ? 4 : slices > 2 ? 3 : slices;
}
// As `AddedProduct`. terms: [T, total]; kGate: [T, 2 * total].
struct AddedPacked : Packed {
    const float *terms;
    const i64 *entries;
};
// An output plus its token's adapter term, if any. place: index in terms.
DEVICE float with_term(const AddedPacked &a, float v, int token, i64 place) {
    const float term = load(a.terms + place);
    return a.entries[token] < 0 ? v : __fadd_rn(v, term);
}
// TOKENS: largest number of tokens: 1, 4, 8 or 16. KINDS: a bit for each kind that a part may have. HIGH: units multiplied at
// once, 1 or 2, as tensor cores have 16 rows. CHUNKED: x does not fit as a whole and is staged in chunks of columns; the order
// of a token's sums is the same. SLICES, RUNS: as in sliced.cuh.
template <int K, bool NORM, int OUT, int TOKENS, int KINDS, int HIGH, int HEAD, int SLICE, bool CHUNKED, int SLICES, int RUNS,
          bool TERMS = false>
struct PackedMultiplier : Input<Packed, K, NORM, HEAD, SLICE, form_of(KINDS), TOKENS == 1> {
    using Base = Input<Packed, K, NORM, HEAD, SLICE, form_of(KINDS), TOKENS == 1>;
    using Base::tokens, Base::a, Base::tid, Base::warp, Base::lane, Base::lines, Base::WARPS, Base::FIXED;
    static constexpr bool PLAIN = form_of(KINDS) != kFixed;
    static constexpr int TILES = K / 256, HALVES = TOKENS > 8 ? 2 : 1, COLUMNS = TOKENS == 1 ? 1 : 2;
    static constexpr int EACH = TOKENS > 4 ? 2 : 1;  // tokens whose sums of quantized tiles a lane computes at once
    // HELD: all tiles of a warp have the same columns of x, which stay in registers if x is plain
    static constexpr bool HELD = WARPS % TILES == 0 && TOKENS == 1 && !FIXED && !CHUNKED;
    static_assert(!CHUNKED || (!NORM && HEAD == 0 && OUT != kGate), "inputs with a norm are staged as a whole");
    static constexpr bool SLICED = OUT == kAdd || OUT == kPart;
    static constexpr int RUN = TILES / RUNS, RANGE = slice_end(RUN, SLICES, 0);  // RANGE: tiles of a slice in a run, at most
    static constexpr int KEPT = SLICED ? kept_sums(SLICES, RUNS) : 2;  // partial sums that a chunk leaves to the next one
    static_assert(TILES % RUNS == 0 && (!SLICED || !NORM) && (!CHUNKED || RUNS > 1 || TILES >= SLICES));
    int lap = 0, place = 0, begin = 0, width = TILES;  // begin, width: tiles of the current chunk
    u32 barrier, ring, at;  // barrier, at: of the current slot
    u32 x[HALVES];          // plain x: the lane's first columns of its token
    u32 line;               // integer x: the lane's line of the first tile and token
    float *partial;         // [1 or 2 rounds, tiles of a round, T, 8]; CHUNKED: [tiles of a round and chunk, T, 8]
    float *kept;            // CHUNKED: for each part [KEPT, units of a round, T, 8]: sums over earlier chunks
    Part *parts;
    float old = 0, alone = 0;  // alone: norm factor of the token if there is only one
    int own;  // the warp's tile in a slot; with several tokens it rotates, so that all warps have equally many tiles
    uint4 held[HELD ? 8 : 1];

    DEVICE PackedMultiplier(const Packed &args, char *shared) : Base(args, (float *)(shared + 512)) {
        char *next = shared + 1024 + a.slots * a.slot;
        const int most = CHUNKED ? a.chunk : TILES;
        if constexpr (FIXED) lines = next, next += most * LINES_BYTES * tokens();
        if constexpr (PLAIN) this->xs = next, next += most * 512 * tokens();
        partial = (float *)next;
        if constexpr (CHUNKED) kept = partial + a.sums;
        parts = (Part *)(shared + 256), own = warp;
        barrier = shared_address(shared), ring = at = shared_address(shared + 1024);
        if constexpr (FIXED) line = shared_address(lines) + (lane & 3) * LINE_BYTES;
        if constexpr (PLAIN) {
#pragma unroll
            for (int half = 0; half < HALVES; ++half) {  // missing tokens read the last one
                const int token = TOKENS == 1 ? 0 : min(8 * half + (lane >> 2), tokens() - 1);
                x[half] = shared_address(this->xs) + token * 64 + (lane & 3) * 16;
            }
        }
    }
    DEVICE void next() {
        at += a.slot, barrier += 8;
        if (++place == a.slots) place = 0, lap ^= 1, at = ring, barrier -= a.slots * 8;
    }
    // Tiles of a row in the current chunk.
    DEVICE int tiles() const { return CHUNKED ? width : TILES; }
    DEVICE bool enter_chunk(int first) {
        begin = first, width = min(a.chunk, TILES - first);
        return first < TILES;
    }
    // Allows the copying warp to overwrite the current slot.
    DEVICE void release() { release_slot(barrier + 8 * a.slots); }
    // This block's share of part p.
    DEVICE Part part(int p) const {
        int block = int(blockIdx.x) - a.shift[p];
        if (block < 0) block += gridDim.x;
        return {a.whole[p] + (block < a.rest[p]), block * a.whole[p] + min(block, a.rest[p]), a.kind[p], a.row[p], a.rows[p]};
    }
    // Number of the block's units of a part in a round. first: set to the first one.
    DEVICE int units(const Part &of, int round, int &first) const {
        first = of.first + round * a.round;
        return max(0, min(of.units - round * a.round, a.round));
    }
    // Copies the parts to shared memory, before the wait: indexed reads of kernel parameters are slow.
    DEVICE void keep_parts() {
        if (tid < a.parts) parts[tid] = part(tid);
    }
    // Fills the current slot, [HIGH, WARPS] tiles: tiles t ... t + 7, counted through rows of HIGH units one below the other.
    // count: units in all. each: bytes of a tile. A lane copies the tiles of one unit.
    DEVICE void copy_slot(const char *from, int t, int count, int each, u64 policy) {
        const int row = t / tiles() + lane / HIGH, unit = row * HIGH + lane % HIGH;
        const int first = max(row * tiles(), t), end = min(row * tiles() + tiles(), t + WARPS);
        int copied = 0;
#pragma unroll
        for (int n = 0; n < HIGH; ++n) copied += max(0, min(WARPS, (count + n) / HIGH * tiles() - t));
        if (lane == 0) expect_bytes(barrier, copied * each);
        __syncwarp();
        COPY_EACH((unit < count && first < end), at + (lane % HIGH * WARPS + first - t) * each,
                  from + (i64(unit) * TILES + first - row * tiles()) * each, (end - first) * each, barrier, policy);
        end_copies(barrier);
    }
    DEVICE void copy_chunk(int round, int &copied, u64 policy) {
        for (int p = 0; p < a.parts; ++p) {
            int first;
            const Part of = part(p);
            const int count = units(of, round, first), each = bytes_of(of.kind);
            const char *from = a.data[p] + (i64(first) * TILES + begin) * each;
            for (int t = 0; t < (count + HIGH - 1) / HIGH * tiles(); t += WARPS, ++copied) {
                if (copied == a.slots) __syncthreads();  // the barriers are initialised
                if (copied >= a.slots) await_barrier(barrier + 8 * a.slots, lap ^ 1);
                copy_slot(from, t, count, each, policy);
                next();
            }
        }
    }
    // The copying warp: copies all tiles in the order of multiplication. The first ones find empty slots and need no wait.
    DEVICE void copy_all() {
        const u64 policy = read_once();
        const u32 empty = 8 * a.slots;
        if (lane < a.slots) init_barrier(barrier + 8 * lane, COPIERS), init_barrier(barrier + empty + 8 * lane, WARPS);
        publish_barriers();
        __syncwarp();
        int copied = 0;
        for (int round = 0; round < a.rounds; ++round)
            for (int t = 0; CHUNKED ? enter_chunk(t) : t == 0; t += CHUNKED ? a.chunk : 1) copy_chunk(round, copied, policy);
        if (copied <= a.slots) __syncthreads();
        await_own_copies();
    }
    // Multiplies a tile and, if units > 1, the tile below it with one token. Sums of a tile: [8]. Releases the slot.
    template <int KIND> DEVICE void multiply_one(int tile, float *to, int units) {
        Tile<KIND> w[HIGH];
        int d[Tile<KIND>::SUMS][4];
        load_tiles<KIND>(w);
        const u32 own = line + tile * LINES_BYTES;
        multiply_words<KIND, HIGH>(w, d, own);
        release();
        const uint4 sums = load_shared(own + 128);
        float sum[HIGH];
#pragma unroll
        for (int h = 0; h < HIGH; ++h) sum[h] = sum_of_groups<KIND>(w[h].s, w[h].d, d, h, sums);
        put_sums(sum, to, units);
    }
    // Adds the sums of a row's four lanes, (0 + 1) + (2 + 3). A lane adds those of one tile and stores them if its unit exists.
    DEVICE void put_sums(const float (&sum)[HIGH], float *to, int units) const {
        const int own = HIGH > 1 ? lane & 1 : 0;
        float v = (own ? sum[HIGH - 1] : sum[0]) + __shfl_xor_sync(~0u, own ? sum[0] : sum[HIGH - 1], 1);
        v += __shfl_xor_sync(~0u, v, 2);
        if ((lane & 3) < HIGH && own < units) to[own * (tiles() * 8) + (lane >> 2)] = v;
    }
    // As `multiply_one`, for all tokens on tensor cores. A tile's sums: [T, 8]. An instruction multiplies a group of both tiles
    // with eight columns: one half of eight tokens or, up to 4 tokens, both halves of four. scales: of the lane's row. below:
    // distance in floats to the sums of the tile below; 0: there is none.
    template <int KIND>
    DEVICE void multiply_many(const Tile<KIND> (&w)[HIGH], typename Tile<KIND>::Scales (&scales)[HIGH], int tile, float *to,
                              int below) {
        using Kind = Tile<KIND>;
        u32 q[HIGH][Kind::QUADS][4];  // [tile, quad, j]: the lane's four of 16 columns
#pragma unroll
        for (int h = 0; h < HIGH; ++h)
#pragma unroll
            for (int n = 0; n < Kind::QUADS; ++n) {
#pragma unroll
                for (int j = 0; j < 4; ++j) q[h][n][j] = w[h].packed(n * 4 + j);
                exchange_words(q[h][n], lane);
            }
        release();
#pragma unroll 1
        for (int first = 0; TOKENS > 8 ? first < tokens() : first == 0; first += 4 * EACH) {  // missing tokens: the last one
            const int column = min(first + (lane >> 2) * EACH / 2, tokens() - 1);
            const u32 numbers = shared_address(lines) + (tile * tokens() + column) * LINES_BYTES,
                      from = numbers + (lane & 3) * 16 + (EACH == 1 ? (lane >> 2 & 1) * 64 : 0);
            const uint4 tail = load_shared(numbers + (lane & 3) * LINE_BYTES + 128);
            float pair[HIGH][EACH], sum[HIGH][EACH];
            uint4 sums[EACH];
            // the lane that has the tail of group j for token i of those whose sums this lane computes
            const auto place = [&](int i, int j) { return ((lane & 3) * EACH + i) * (8 / EACH) + j; };
#pragma unroll
            for (int i = 0; i < EACH; ++i) sums[i].z = __shfl_sync(~0u, tail.z, place(i, 0));
#pragma unroll
            for (int h = 0; h < HIGH; ++h) {  // else loop invariants are hoisted, for which registers do not suffice
                forget(scales[h]);
#pragma unroll
                for (int n = 0; n < Kind::QUADS; ++n)
#pragma unroll
                    for (int j = 0; j < 4; ++j) forget(q[h][n][j]);
            }
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const uint4 upper = load_shared(from + j * LINE_BYTES),
                            lower = EACH == 1 ? upper : load_shared(from + j * LINE_BYTES + 64);
                float s[HIGH][EACH][Kind::SUMS];
#pragma unroll
                for (int n = 0; n < Kind::SUMS; ++n) {
                    int up[4], low[4];
                    multiply_group<KIND>(up, q, n, j, upper);
                    if constexpr (EACH == 2) multiply_group<KIND>(low, q, n, j, lower);
#pragma unroll
                    for (int h = 0; h < HIGH; ++h)
#pragma unroll
                        for (int i = 0; i < EACH; ++i)
                            s[h][i][n] = whole(up[2 * h + i], EACH == 1 ? up[2 * h + 1] : low[2 * h + i]);
                }
#pragma unroll
                for (int i = 0; i < EACH; ++i) {
                    if constexpr (Kind::MINIMA)
                        sums[i].x = __shfl_sync(~0u, tail.x, place(i, j)), sums[i].y = __shfl_sync(~0u, tail.y, place(i, j));
#pragma unroll
                    for (int h = 0; h < HIGH; ++h) {
                        const float part = Kind::part(Kind::scale(scales[h], j), Kind::unit(scales[h], w[h].d, j), s[h][i], sums[i]);
                        pair[h][i] = j % 2 ? pair[h][i] + part : part;
                        if (j % 2) sum[h][i] = j == 1 ? pair[h][i] : sum[h][i] + pair[h][i];
                    }
                }
            }
#pragma unroll
            for (int i = 0; i < EACH; ++i) {
                const int token = first + (lane & 3) * EACH + i;
                if (token >= tokens()) continue;
#pragma unroll
                for (int h = 0; h < HIGH; ++h)
                    if (h == 0 || below) to[h * below + token * 8 + (lane >> 2)] = sum[h][i];
            }
        }
    }
    // Multiplies the n-th 32 columns of groups j and j + 4 or, with four SUMS, the n-th 16.
    template <int KIND>
    static DEVICE void multiply_group(int (&d)[4], const u32 (&q)[HIGH][Tile<KIND>::QUADS][4], int n, int j, const uint4 &x) {
        using Kind = Tile<KIND>;
        const auto codes = [&](int h, int set, int half) { return Kind::codes_of(q[h][Kind::quad(set, half)][j], set); };
        if constexpr (Kind::SUMS == 2)
            multiply_bytes<Kind::SIGNED>(d, codes(0, n, 0), codes(HIGH - 1, n, 0), codes(0, n, 1), codes(HIGH - 1, n, 1),
                                         word(x, n * 2), word(x, n * 2 + 1), true);
        else multiply_half<Kind::SIGNED>(d, codes(0, n / 2, n % 2), codes(HIGH - 1, n / 2, n % 2), word(x, n));
    }
    // As `multiply_many`, for tiles of plain kinds.
    template <int KIND> DEVICE void multiply_plain(const Tile<KIND> (&w)[HIGH], int tile, float *to, int below) {
        const int step = 64 * tokens(), begin = tile * 8 * step;
        float d[HALVES][2][4] = {};
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const int g = Tile<KIND>::order(i);
            const uint4 o = w[0].eight(g), u = HIGH > 1 ? w[HIGH - 1].eight(g) : o;
#pragma unroll
            for (int half = 0; half < HALVES; ++half) {
                const uint4 v = HELD ? held[HELD ? g : 0] : load_shared(x[half] + begin + g * step);
                multiply(d[half][i % 2], o.x, u.x, o.y, u.y, v.x, v.y);
                multiply(d[half][i % 2], o.z, u.z, o.w, u.w, v.z, v.w);
            }
        }
#pragma unroll
        for (int half = 0; half < HALVES; ++half)
#pragma unroll
            for (int h = 0; h < HIGH; ++h)
#pragma unroll
                for (int i = 0; i < COLUMNS; ++i) {
                    const int token = 8 * half + (lane & 3) * 2 + i;
                    if (token < tokens() && (h == 0 || below))
                        to[h * below + token * 8 + (lane >> 2)] = w[h].joined(d[half][0][2 * h + i], d[half][1][2 * h + i]);
                }
        release();
    }
    // Loads the warp's tiles from the current slot, which must be filled.
    template <int KIND> DEVICE void load_tiles(Tile<KIND> (&w)[HIGH]) const {
#pragma unroll
        for (int n = 0; n < HIGH; ++n) w[n].load(Shared{at + (n * WARPS + own) * Tile<KIND>::BYTES}, lane);
    }
    template <int KIND> DEVICE void multiply_tiles(int count, float *to) {
        const int rows = (count + HIGH - 1) / HIGH;
        int row = own / tiles(), tile = own % tiles();
#pragma unroll 1
        for (int t = 0; t < rows * tiles(); t += WARPS) {
            await_barrier(barrier, lap);
            __syncwarp();
            if (row < rows) multiply_slot<KIND>(tile, to + (row * HIGH * tiles() + tile) * 8 * tokens(), count - row * HIGH);
            else release();
            next();
            row += WARPS / tiles(), tile += WARPS % tiles();
            if ((CHUNKED || WARPS % TILES) && tile >= tiles()) tile -= tiles(), ++row;
        }
        if constexpr (TOKENS > 1) own = (own - rows * tiles()) & (WARPS - 1);
    }
    // Multiplies the warp's tiles of the current slot with all tokens. units: number of units from this row on.
    template <int KIND> DEVICE void multiply_slot(int tile, float *to, int units) {
        const int below = HIGH > 1 && units > 1 ? tiles() * 8 * tokens() : 0;
        if constexpr (is_plain(KIND)) {
            Tile<KIND> w[HIGH];
            load_tiles<KIND>(w);
            multiply_plain<KIND>(w, tile, to, below);
        } else if constexpr (TOKENS == 1) multiply_one<KIND>(tile, to, units);
        else {
            Tile<KIND> w[HIGH];
            load_tiles<KIND>(w);
            typename Tile<KIND>::Scales scales[HIGH];
#pragma unroll
            for (int n = 0; n < HIGH; ++n) {
                const u32 from = at + (n * WARPS + own) * Tile<KIND>::BYTES + Tile<KIND>::SCALES;
                scales[n] = Tile<KIND>::row_scales(Shared{from}, lane >> 2);
            }
            multiply_many<KIND>(w, scales, tile, to, below);
        }
    }
    template <int KIND> DEVICE void multiply_kind(int kind, int count, float *to) {
        if constexpr ((KINDS >> KIND) & 1)
            if (kind == KIND || KINDS == 1 << KIND) multiply_tiles<KIND>(count, to);
    }
    // The sum of an output over all chunks up to the current one. before: its KEPT partial sums, `apart` floats apart.
    DEVICE float sum(const float *from, float *before = nullptr, int apart = 0) const {
        if constexpr (SLICED && CHUNKED && RUNS == 1) return sum_of_some_slices(from, before, apart);
        else if constexpr (SLICED) return sum_of_slices(from, before, apart);
        float v[2] = {};
        if (CHUNKED && begin) v[0] = before[0], v[1] = before[apart];
#pragma unroll 8
        for (int tile = 0; tile < tiles(); ++tile) v[tile & 1] += from[tile * tokens() * 8];
        if (CHUNKED) before[0] = v[0], before[apart] = v[1];
        return v[0] + v[1];
    }
    // Adds the current chunk's tiles of a slice. The slice has tiles `first` to `end` of each run.
    DEVICE void add_slice(float &v, const float *from, int first, int end) const {
#pragma unroll
        for (int run = 0; run < RUNS; ++run)
#pragma unroll
            for (int i = 0; i < RANGE; ++i) {
                const int tile = run * RUN + first + i - begin;
                if (first + i < end && (!CHUNKED || u32(tile) < u32(width))) v += from[tile * tokens() * 8];
            }
    }
    DEVICE float sum_of_slices(const float *from, float *before, int apart) const {
        float v[SLICES];
#pragma unroll
        for (int i = 0; i < SLICES; ++i) {
            v[i] = CHUNKED && begin ? before[i * apart] : 0.f;
            add_slice(v[i], from, slice_begin(RUN, SLICES, i), slice_end(RUN, SLICES, i));
            if (CHUNKED) before[i * apart] = v[i];
        }
#pragma unroll
        for (int other = 1; other < SLICES; other *= 2)
#pragma unroll
            for (int i = 0; i < SLICES; i += 2 * other) v[i] += v[i + other];
        return v[0];
    }
    // As `sum_of_slices`, for one run: a chunk has consecutive slices. `before` keeps pending sums of 1, 2 and 4 slices, each
    // until the sum that it is paired with is there, and the sum of a slice that continues in the next chunk.
    DEVICE float sum_of_some_slices(const float *from, float *before, int apart) const {
        float v = 0, sums[KEPT] = {};
#pragma unroll
        for (int i = 0; i < KEPT; ++i)
            if (begin) sums[i] = before[i * apart];
#pragma unroll
        for (int i = 0; i < SLICES; ++i) {
            const int first = slice_begin(RUN, SLICES, i), end = slice_end(RUN, SLICES, i);
            if (end <= begin || first >= begin + width) continue;
            v = first < begin ? sums[KEPT - 1] : 0.f;
            add_slice(v, from, first, end);
            if (end > begin + width) {
                sums[KEPT - 1] = v;
                continue;
            }
            bool pairs = true;
#pragma unroll
            for (int level = 0; level < KEPT - 1; ++level) {
                if (pairs && i >> level & 1) v = sums[level] + v;
                else if (pairs) sums[level] = v, pairs = false;
            }
        }
#pragma unroll
        for (int i = 0; i < KEPT; ++i) before[i * apart] = sums[i];
        return v;
    }
    DEVICE int slot_of(int i) const { return TOKENS == 1 ? i : (i * a.inverse) >> 16; }
    // Loads the value of y to which the thread's first sum is added.
    DEVICE void load_old() {
        int first;
        const int slot = slot_of(tid / 8), token = tid / 8 - slot * tokens(), count = units(parts[0], 0, first);
        const int row = (first + slot) * 8 + tid % 8;
        if (slot < count && row < parts[0].rows) old = load((const float *)a.y + i64(token) * a.total + parts[0].row + row);
    }
    // Sums the tiles of a round. After the last chunk, writes the results to y.
    DEVICE void finish(int round, const float *from) {
        float *before = kept;
        const bool last = !CHUNKED || begin + width == TILES;
        for (int p = 0; p < (OUT == kGate ? 1 : a.parts); ++p) {
            int first;
            const Part of = parts[p];
            const int count = units(of, round, first), each = tiles() * 8 * tokens(), total = count * tokens() * 8;
            for (int o = tid; o < total; o += WARPS * 32) {
                const int n = o % 8, slot = slot_of(o / 8), token = o / 8 - slot * tokens();
                const int row = (first + slot) * 8 + n;
                if (row >= of.rows) continue;
                const i64 to = i64(token) * a.total + of.row + row;
                if (OUT == kAdd && last && (CHUNKED || round || p || o != tid)) old = load((const float *)a.y + to);
                const float f = !NORM ? 1.f : TOKENS == 1 ? alone : this->factor(token);
                const float *const own = from + slot * each + token * 8 + n;
                const float v = sum(own, before + o, total) * f;
                if (!last) continue;
                if constexpr (TERMS) {
                    const auto &added = static_cast<const AddedPacked &>(a);
                    const float sum_of_row = with_term(added, v, token, OUT == kGate ? to + i64(token) * a.total : to);
                    if constexpr (OUT == kGate) {
                        const float up = __fmul_rn(sum(own + count * each), f);
                        const i64 place = to + i64(token + 1) * a.total;
                        ((u16 *)a.y)[to] = narrow(silu(sum_of_row) * with_term(added, up, token, place));
                    } else ((float *)a.y)[to] = OUT == kAdd ? old + sum_of_row : sum_of_row;
                } else if constexpr (OUT == kGate) ((u16 *)a.y)[to] = narrow(silu(v) * (sum(own + count * each) * f));
                else ((float *)a.y)[to] = OUT == kAdd ? old + v : v;
            }
            from += count * each, before += KEPT * total;
        }
    }
    DEVICE void run() {
        if constexpr (HELD) {
#pragma unroll
            for (int g = 0; g < 8; ++g) held[g] = load_shared(x[0] + (warp % TILES * 8 + g) * 64);
        }
        if (NORM && TOKENS == 1) alone = this->factor(0);
        for (int round = 0; round < a.rounds; ++round)
            for (int t = 0; CHUNKED ? enter_chunk(t) : t == 0; t += CHUNKED ? a.chunk : 1) {
                if constexpr (CHUNKED) this->template stage_columns<false>(begin * 256, width * 256), this->meet();
                multiply_round(round, CHUNKED ? partial : partial + (round & 1) * a.sums);
            }
    }
    DEVICE void multiply_round(int round, float *sums) {
        float *to = sums;
        for (int p = 0; p < a.parts; ++p) {
            int first;
            const Part of = parts[p];
            const int count = units(of, round, first), kind = of.kind;
#define MULTIPLY(k) multiply_kind<k>(kind, count, to);
            EACH_KIND(MULTIPLY)
#undef MULTIPLY
            to += count * tiles() * 8 * tokens();
        }
        this->meet();
        finish(round, sums);
    }
};

template <int K, bool NORM, int OUT, int TOKENS, int KINDS, int HIGH, int HEAD, int SLICE, bool CHUNKED, int SLICES, int RUNS,
          bool TERMS = false>
DEVICE void packed(const Packed &a) {
    extern __shared__ __align__(128) char shared[];
    PackedMultiplier<K, NORM, OUT, TOKENS, KINDS, HIGH, HEAD, SLICE, CHUNKED, SLICES, RUNS, TERMS> m(a, shared);
    if (m.warp == m.WARPS) return m.copy_all();
    if (NORM && m.tid * 32 < K) prefetch(a.scale + m.tid * 32);
    m.keep_parts();
    __syncthreads();
    wait();
    launch_dependents();  // after the wait, so that the next kernel's blocks use the room that the previous kernel frees
    if constexpr (OUT == kAdd && !CHUNKED) m.load_old();
    if constexpr (!CHUNKED) m.stage();
    m.run();
}

// Dequantizes the lane's part of a tile, eight columns at a time: f(index of the eight, first column, their values).
template <int KIND, class F> DEVICE void unpack_lane(const char *from, int lane, F f) {
    Tile<KIND> w;
    w.load(Global{from}, lane);
#pragma unroll
    for (int at = 0; at < 8; ++at) {
        if constexpr (is_plain(KIND)) {
            const uint4 x = w.eight(at);
            float v[8] = {low(x.x), high(x.x), low(x.y), high(x.y), low(x.z), high(x.z), low(x.w), high(x.w)};
#pragma unroll
            for (float &one : v) one *= w.factor(at);
            f(at, at * 32 + (lane & 3) * 8, v);
        } else {
            const int set = at / 4, i = at % 4;
            const float factor = w.factor(set, i), less = w.less(set);
            u32 c[2];
            float v[8];
            w.codes(set, i, c);
#pragma unroll
            for (int b = 0; b < 8; ++b)
                v[b] = __fmaf_rn(factor, Tile<KIND>::SIGNED ? signed_byte_of(c[b / 4] ^ 0x80808080u, b % 4) : byte_of(c[b / 4], b % 4), -less);
            f(at, (set * 4 + (lane & 3)) * 32 + i * 8, v);
        }
    }
}
DEVICE uint4 exchange(const uint4 &v, int apart) {
    return make_uint4(__shfl_xor_sync(~0u, v.x, apart), __shfl_xor_sync(~0u, v.y, apart), __shfl_xor_sync(~0u, v.z, apart),
                      __shfl_xor_sync(~0u, v.w, apart));
}
// Transposes over four neighbouring lanes: each gives its v[i] to lane i.
DEVICE void exchange_four(uint4 (&v)[4], int lane) {
#pragma unroll
    for (int apart = 1; apart < 4; apart *= 2)
#pragma unroll
        for (int n = 0; n < 2; ++n) {
            const int i = apart == 1 ? 2 * n : n;
            const uint4 came = exchange(lane & apart ? v[i] : v[i + apart], apart);
            if (lane & apart) v[i] = came;
            else v[i + apart] = came;
        }
}
// Dequantizes a tile to bfloat16, by a whole warp. Four lanes write neighbouring columns. to: the first column of the lane's
// row; null: the row is not written.
template <int KIND> DEVICE void unpack_tile(const char *from, int lane, u16 *to) {
    uint4 own[4];
    unpack_lane<KIND>(from, lane, [&](int at, int, const float (&v)[8]) {
        own[at % 4] = make_uint4(narrow2(v[0], v[1]), narrow2(v[2], v[3]), narrow2(v[4], v[5]), narrow2(v[6], v[7]));
        if (at % 4 < 3) return;
        if constexpr (!is_plain(KIND)) exchange_four(own, lane);
#pragma unroll
        for (int i = 0; i < 4; ++i)
            if (to) *(uint4 *)(to + (at / 4 * 4 + i) * 32 + (lane & 3) * 8) = own[i];
    });
}

struct Unpack {
    const char *data;
    u16 *y;       // [rows, columns]
    int rows, columns;
};
// One warp per tile, 8 warps per block.
template <int KIND> DEVICE void unpack(const Unpack &a) {
    launch_dependents();
    wait();
    const int tile = blockIdx.x * 8 + (threadIdx.x >> 5), lane = threadIdx.x & 31, tiles = a.columns / 256;
    const int first = tile / tiles * 8, row = first + (lane >> 2);
    if (first >= a.rows) return;
    u16 *const to = a.y + i64(row) * a.columns + tile % tiles * 256;
    unpack_tile<KIND>(a.data + i64(tile) * Tile<KIND>::BYTES, lane, row < a.rows ? to : nullptr);
}

// `enter` (small.cuh) with an embedding in tiles.
template <int KIND> DEVICE void enter_packed(const Enter &a) {
    launch_dependents();
    wait();
    const int tiles = a.hidden / 256;
    for (int token = blockIdx.x; token < a.tokens; token += gridDim.x) {
        const i64 row = a.ids[token];
        const char *from = (const char *)a.embedding + row / 8 * tiles * Tile<KIND>::BYTES;
        float *to = a.residual + i64(token) * a.hidden;
        for (int i = threadIdx.x; i < tiles * 4; i += blockDim.x)
            unpack_lane<KIND>(from + i64(i / 4) * Tile<KIND>::BYTES, int(row % 8) * 4 + i % 4, [=](int, int column, const float (&v)[8]) {
                float4 *const own = (float4 *)(to + i / 4 * 256 + column);
                own[0] = make_float4(v[0], v[1], v[2], v[3]), own[1] = make_float4(v[4], v[5], v[6], v[7]);
            });
        turn(a, token);
    }
}
