// AMX tiles: eight registers of up to 16 rows of up to 64 bytes, and the products of two of them.
//
// Uses assembly because register numbers are template arguments here, and because g++ 12 may move memory accesses
// across its tile intrinsics.
#pragma once
#include "simd.hpp"

namespace deltic::DELTIC_LEVEL {
namespace {

// The shapes of all registers. A product adds A [rows][bytes] times B [bytes / 4][16][4 bytes] to C [rows][16].
struct alignas(64) TileShapes {
    uint8_t palette = 1, start = 0, reserved[14] = {};
    uint16_t bytes[16] = {};
    uint8_t rows[16] = {};

    DELTIC_INLINE void set(int tile, int count, int width) {
        rows[tile] = uint8_t(count);
        bytes[tile] = uint16_t(width);
    }
};

// Configures the tiles and releases them at the end of its lifetime. Context switches are faster
// without tile state.
struct Tiles {
    DELTIC_INLINE explicit Tiles(const TileShapes &shapes) { asm volatile("ldtilecfg %0" ::"m"(shapes)); }
    DELTIC_INLINE ~Tiles() { asm volatile("tilerelease"); }
    Tiles(const Tiles &) = delete;
};

// Tells the compiler which memory a tile load or store accesses.
struct Memory {
    char bytes[1 << 20];
};
// stride: bytes between the starts of two rows.
template <int Tile> DELTIC_INLINE void load_tile(const void *from, int64_t stride) {
    asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(stride), "i"(Tile), "m"(*(const Memory *)from));
}
template <int Tile> DELTIC_INLINE void store_tile(void *to, int64_t stride) {
    asm volatile("tilestored %%tmm%c3, (%1,%2,1)" : "=m"(*(Memory *)to) : "r"(to), "r"(stride), "i"(Tile));
}
// Products of bfloat16 pairs. Sums the first and the second numbers of the pairs separately, adds both sums, then adds
// the result to C. Treats subnormals as 0.
template <int C, int A, int B> DELTIC_INLINE void tile_dot2_bf16() {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B));
}

}  // namespace
}  // namespace deltic::DELTIC_LEVEL
