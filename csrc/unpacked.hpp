// Quantized weights times many tokens: 256 columns of a panel are unpacked once, to bytes and scales as numbers, and then
// multiplied with all tiles. The sums have the order of `times_int8` and `times_fine`, so that the bits are the same.
//
// Included by linear.cpp, after what it shares with the tiles of few tokens.

// 8 groups of 32 columns.
struct alignas(64) Unpacked {
    NativeWords codes[8][8];  // plus 128, or, for tiles of AMX, as they are
    Native scales[16];
    Native addends[8];
    NativeInts minima[8];
    Native dmin;
};

// Unpacked weights as a format of which all with the same kind of scales are.
template <int Weights, int Group, Low Lows> struct Ready : Without {
    static constexpr int kWeights = Weights, kGroup = Group, kBits = 8;
    static constexpr int kOffset = Lows == kPlain ? 0 : kNone;
    static constexpr Low kLow = Lows;
    static DELTIC_INLINE const Unpacked &of(const Block &block) { return *(const Unpacked *)block.data; }
    static DELTIC_INLINE NativeWords code(const Block &block, int g, int i) { return of(block).codes[g][i]; }
    static DELTIC_INLINE Native scale(const Block &block, int g) { return of(block).scales[g]; }
    static DELTIC_INLINE Native addend(const Block &block, int g) { return of(block).addends[g]; }
    static DELTIC_INLINE Native number(const Block &block, int g, int column) {
        NativeWords four = of(block).codes[g][column / 4];
        return to_floats(kAmx ? (NativeInts)(four << (24 - 8 * (column % 4))) >> 24
                              : (NativeInts)(four >> 8 * (column % 4) & 255) - 128);
    }
    static DELTIC_INLINE NativeInts minima(const Block &block, int i) { return of(block).minima[i]; }
    static DELTIC_INLINE Native dmin(const Block &block) { return of(block).dmin; }
};
template <class Format> using ReadyOf = Ready<Format::kWeights, Format::kGroup, Format::kLow>;

// `groups` groups of 32 columns, all in one block if it has so many.
template <class Format> DELTIC_INLINE void unpack(const uint8_t *data, int groups, int64_t ahead, Unpacked &to) {
    constexpr int kGroups = Format::kWeights / 32, kEach = kHalves<Format>;
    constexpr int kShift = Format::kOffset == kNone ? 0 : (128 >> (Format::kOffset & 31)) - (kAmx ? 0 : 128);
    for (int g = 0; g < groups; ++g) {
        Block block{data + g / kGroups * Format::kBytes, 0};
        fetch<Format::kBytes / kGroups>(block.data + g % kGroups * (Format::kBytes / kGroups) + ahead);
#pragma GCC unroll 8
        for (int i = 0; i < 8; ++i) {
            NativeBytes codes = (NativeBytes)Format::code(block, g % kGroups, i);
            // the same in every byte: less the offset, or more, so that all types have that of `Ready`
            to.codes[g][i] = (NativeWords)(kShift ? codes - uint8_t(kShift) : codes);
        }
#pragma GCC unroll 2
        for (int half = 0; half < kEach; ++half)
            to.scales[kEach * g + half] = Format::scale(block, kEach * (g % kGroups) + half);
        if constexpr (Format::kLow == kAddend) to.addends[g] = Format::addend(block, g % kGroups);
    }
    if constexpr (Format::kLow == kMinima16 || Format::kLow == kMinima32) {
        Block block{data, 0};
        for (int i = 0; i < (Format::kLow == kMinima16 ? 8 : 4); ++i) to.minima[i] = Format::minima(block, i);
        to.dmin = Format::dmin(block);
    }
}

// Up to 8 groups of a panel, and the tokens that they are multiplied with. group: the first one's in the tile.
struct Work {
    const Unpacked *weights;
    const int32_t *memory;  // of the tile
    int64_t columns, group;
    int groups;
    Native *total;
};

#if defined(__AMX_INT8__)
// Multiplies on tiles of AMX. While the products of some work are made, the sums of the work before it are added to its
// totals, one token after another: tiles and vectors are busy together.
template <class Format, int T, bool Fine> struct Adder {
    static constexpr int kGroups = Format::kWeights / 32, kEach = kHalves<Format>, kUnits = 8 * kEach;
    Unpacked unpacked[2];
    NativeInts sums[2][kUnits][T];  // of one token after another
    Work last = {};
    int turn = 0;
    Tiles tiles;

    static TileShapes shapes() {
        TileShapes shapes;
        for (int i = 0; i < 4; ++i) shapes.set(i, T, 64);
        shapes.set(6, T, 32 / kEach);
        shapes.set(7, 8 / kEach, 64);
        return shapes;
    }
    DELTIC_INLINE Adder() : tiles(shapes()) {}
    DELTIC_INLINE Unpacked &next() { return unpacked[(last.weights == &unpacked[0])]; }
    DELTIC_INLINE void finish() { step<false>({}); }
    DELTIC_INLINE void add(const Work &work) { step<true>(work); }

    template <bool More> DELTIC_INLINE void step(const Work &work) {
        const NativeInts(*before)[T] = sums[turn];
        turn ^= 1;
        NativeInts(*kept)[T] = sums[turn];
        const Work done = last;
        unrolled<kUnits>([&](auto at) DELTIC_INLINE_LAMBDA {
            constexpr int unit = decltype(at)::value, g = unit / kEach, half = unit % kEach;
            if constexpr (More) {
                int64_t from = work.group + least(g, work.groups - 1);
                load_tile<6>((const uint8_t *)(work.memory + from * 8 * T) + half * (32 / kEach), 32);
                load_tile<7>(&work.weights->codes[g][half * (8 / kEach)], 64);
                clear_tile<unit % 4>();
                tile_dot4<unit % 4, 6, 7>();
                if constexpr (unit > 0) store_tile<(unit + 3) % 4>(kept[unit > 0 ? unit - 1 : 0], 64);
            }
            if (done.weights)
                for (int t = unit * T / kUnits; t < (unit + 1) * T / kUnits; ++t) add_token(done, before, t);
        });
        if constexpr (More) store_tile<(kUnits - 1) % 4>(kept[kUnits - 1], 64);
        last = work;
    }

    static DELTIC_INLINE void add_token(const Work &work, const NativeInts before[kUnits][T], int t) {
        const Unpacked &weights = *work.weights;
        Int8Tile tile(work.memory, work.columns, T);
        Native total = work.total[t], sum = {};
#pragma GCC unroll 16
        for (int unit = 0; unit < kUnits; ++unit) {
            if (kGroups == 1 && unit == work.groups) break;
            Native dot = to_floats(before[unit][t]), scale = weights.scales[unit];
            int64_t group = work.group + unit / kEach;
            if constexpr (Fine) {
                total = fma(dot * scale, splat<Native>(tile.scales[group * T + t]), total);
                for (int single = 0; single < tile.singles[group]; ++single) {
                    int64_t place = 32 * group + single;
                    Native weight = ReadyOf<Format>::number({(const uint8_t *)&weights, 0}, unit, tile.places[place]);
                    total = fma(weight * scale, splat<Native>(tile.values[place * T + t]), total);
                }
                continue;
            }
            sum = fma(dot, scale, sum);
            if constexpr (Format::kLow == kAddend)
                sum = fma(weights.addends[unit], splat<Native>(tile.sums32[group * T + t]), sum);
            if constexpr (kGroups == 1) {
                total = fma(splat<Native>(tile.scales[group * T + t]), sum, total);
                sum = Native{};
            }
        }
        if constexpr (kGroups == 8 && !Fine) {
            int64_t b = work.group / 8;
            if constexpr (Format::kLow == kMinima16 || Format::kLow == kMinima32) {
                constexpr int kPairs = Format::kLow == kMinima16 ? 8 : 4;
                const int32_t *pairs = (kPairs == 8 ? tile.pairs16 : tile.pairs32) + b * kPairs * T;
                NativeInts low = {};
#pragma GCC unroll 8
                for (int i = 0; i < kPairs; ++i) low = dot2(low, weights.minima[i], pairs[i * T + t]);
                sum = fma(-weights.dmin, to_floats(low), sum);
            }
            total = fma(splat<Native>(tile.scales[b * T + t]), sum, total);
        }
        work.total[t] = total;
    }
};
#else
template <class Format, int T, bool Fine> struct Adder {
    static constexpr int kGroups = Format::kWeights / 32;
    Unpacked unpacked;

    DELTIC_INLINE Unpacked &next() { return unpacked; }
    DELTIC_INLINE void finish() {}
    DELTIC_INLINE void add(const Work &work) {
        using Plain = ReadyOf<Format>;
        Int8Tile tile(work.memory, work.columns, T);
        Block block{(const uint8_t *)work.weights, 0};
        for (int first = 0; first < work.groups; first += kGroups) {
            Native sum[T] = {};
            int64_t b = (work.group + first) / kGroups;
            for (int g = first; g < first + kGroups; ++g) add_group<Plain, T>(block, tile, g, work.group + g, sum);
            if constexpr (Format::kLow == kMinima16 || Format::kLow == kMinima32)
                take_minima<Plain, T>(block, tile, b, sum);
#pragma GCC unroll 16
            for (int t = 0; t < T; ++t)
                work.total[t] = fma(splat<Native>(tile.scales[b * T + t]), sum[t], work.total[t]);
        }
    }
};
#endif
