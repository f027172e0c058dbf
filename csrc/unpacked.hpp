// Quantized weights times many tokens. 256 columns of a panel are unpacked once, to byte codes and float scales, and
// then multiplied with all tiles. The order of sums is that of `times_int8`, so the bits are the same.
//
// linear.cpp includes this file after the code that it shares with tiles of few tokens.

// Up to 8 groups of 32 columns.
struct alignas(64) Unpacked {
    NativeWords codes[8][8];  // with an offset of 128 if the type has an offset
    Native scales[16];
    Native addends[8];
    NativeInts minima[8];
    Native dmin, unit;
};

// Unpacked weights as a format (formats.hpp). Types with the same kind of scales share one.
template <int Weights, int Group, Low Lows, bool Unit> struct Ready : Without {
    static constexpr int kWeights = Weights, kGroup = Group, kBits = 8;
    static constexpr int kOffset = Lows == kPlain ? 0 : kNone;
    static constexpr Low kLow = Lows;
    static constexpr bool kUnit = Unit;
    static DELTIC_INLINE const Unpacked &of(const Block &block) { return *(const Unpacked *)block.data; }
    static DELTIC_INLINE NativeWords code(const Block &block, int g, int i) { return of(block).codes[g][i]; }
    static DELTIC_INLINE Native scale(const Block &block, int g) { return of(block).scales[g]; }
    static DELTIC_INLINE Native addend(const Block &block, int g) { return of(block).addends[g]; }
    static DELTIC_INLINE NativeInts minima(const Block &block, int i) { return of(block).minima[i]; }
    static DELTIC_INLINE Native dmin(const Block &block) { return of(block).dmin; }
    static DELTIC_INLINE Native unit(const Block &block) { return of(block).unit; }
};
template <class Format> using ReadyOf = Ready<Format::kWeights, Format::kGroup, Format::kLow, Format::kUnit>;

// Unpacks `groups` groups of 32 columns: all from one block if it has so many, otherwise from consecutive blocks.
template <class Format> DELTIC_INLINE void unpack(const uint8_t *data, int groups, int64_t ahead, Unpacked &to) {
    constexpr int kGroups = Format::kWeights / 32, kEach = kHalves<Format>;
    constexpr int kMore = Format::kOffset == kNone ? 0 : 128 - (128 >> (Format::kOffset & 31));
    for (int g = 0; g < groups; ++g) {
        Block block{data + g / kGroups * Format::kBytes, 0};
        fetch<Format::kBytes / kGroups>(block.data + g % kGroups * (Format::kBytes / kGroups) + ahead);
#pragma GCC unroll 8
        for (int i = 0; i < 8; ++i) {
            NativeBytes codes = (NativeBytes)Format::code(block, g % kGroups, i);
            to.codes[g][i] = (NativeWords)(codes + uint8_t(kMore));  // raises the type's offset to that of `Ready`
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
    if constexpr (Format::kUnit) to.unit = Format::unit({data, 0});
}

// Adds `groups` groups to the totals of the tile's tokens. group: index of the first one in the tile.
template <class Format, int T>
void add_unpacked(const Unpacked &weights, const Int8Tile &tile, int64_t group, int groups, Native *total) {
    using Plain = ReadyOf<Format>;
    constexpr int kGroups = Format::kWeights / 32;
    Block block{(const uint8_t *)&weights, 0};
    for (int first = 0; first < groups; first += kGroups) {
        Native sum[T] = {};
        int64_t b = (group + first) / kGroups;
        for (int g = first; g < first + kGroups; ++g) add_group<Plain, T>(block, tile, g, group + g, sum);
        if constexpr (Format::kLow == kMinima16 || Format::kLow == kMinima32)
            take_minima<Plain, T>(block, tile, b, sum);
#pragma GCC unroll 12
        for (int t = 0; t < T; ++t)
            total[t] = fma(scale_of_block<Plain>(block, tile.scales[b * T + t]), sum[t], total[t]);
    }
}
