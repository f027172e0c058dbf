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

// Adds `groups` groups, the first of which is `group` of the tile's, to the totals of its tokens.
template <class Format, int T, bool Fine>
void add_unpacked(const Unpacked &weights, const Int8Tile &tile, int64_t group, int groups, Native *total) {
    constexpr int kGroups = Format::kWeights / 32;
    Block block{(const uint8_t *)&weights, 0};
    Native sum[T];
    auto begin = [&]() DELTIC_INLINE_LAMBDA {
#pragma GCC unroll 16
        for (int t = 0; t < T; ++t) sum[t] = Fine ? total[t] : Native{};
    };
    auto end = [&](int64_t b) DELTIC_INLINE_LAMBDA {
        if constexpr (Format::kLow == kMinima16 || Format::kLow == kMinima32)
            take_minima<Format, T>(block, tile, b, sum);
#pragma GCC unroll 16
        for (int t = 0; t < T; ++t)
            total[t] = Fine ? sum[t] : fma(splat<Native>(tile.scales[b * T + t]), sum[t], total[t]);
    };
#if defined(__AMX_INT8__)
    // Products are kept one unit of work after they were begun, and added up another one later: a product takes a while.
    constexpr int kEach = kHalves<Format>, kUnits = 8 * kEach, kBytes = 32 / kEach;
    alignas(64) NativeInts dots[4][T];
    begin();
    unrolled<kUnits + 2>([&](auto step) DELTIC_INLINE_LAMBDA {
        constexpr int at = decltype(step)::value;
        if constexpr (at < kUnits) {
            int64_t g = at / kEach, from = group + least(g, groups - 1);
            load_tile<6>((const uint8_t *)(tile.codes + from * 8 * T) + at % kEach * kBytes, 32);
            load_tile<7>(&weights.codes[g][at % kEach * (8 / kEach)], 64);
            clear_tile<at % 4>();
            tile_dot4<at % 4, 6, 7>();
        }
        if constexpr (at >= 1 && at <= kUnits) store_tile<(at - 1) % 4>(dots[(at - 1) % 4], 64);
        if constexpr (at >= 2) {
            constexpr int unit = at - 2, g = unit / kEach;
            if (kGroups == 8 || g < groups) {
                if (kGroups == 1 && !Fine && g) begin();
                add_dots<Format, T, Fine>(block, tile, dots[unit % 4], unit, group + g, sum);
                if ((kGroups == 1 || g == 7) && unit % kEach == kEach - 1 && !Fine) end((group + g) / kGroups);
            }
        }
    });
    if constexpr (Fine) end(0);
#else
    for (int g = 0; g < groups; ++g) {
        if (g % kGroups == 0) begin();
        add_group<Format, T>(block, tile, g, group + g, sum);
        if (g % kGroups == kGroups - 1) end((group + g) / kGroups);
    }
#endif
}
