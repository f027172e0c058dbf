// Tiles of AMX: eight registers of up to 16 rows of up to 64 bytes, and the products of two of them.
//
// Written as assembly because the registers' numbers are template arguments here, and because g++ 12 may move memory
// accesses across its own functions for tiles.
#pragma once
#include "simd.hpp"

namespace deltic::DELTIC_LEVEL {
namespace {

// The shapes of all registers. A product adds to C [rows][16] what A [rows][bytes] and B [bytes / 4][16][4 bytes] make.
struct alignas(64) TileShapes {
    uint8_t palette = 1, start = 0, reserved[14] = {};
    uint16_t bytes[16] = {};
    uint8_t rows[16] = {};

    DELTIC_INLINE void set(int tile, int count, int width) {
        rows[tile] = uint8_t(count);
        bytes[tile] = uint16_t(width);
    }
};

// Tiles are in use for as long as this exists: a thread without any switches faster.
struct Tiles {
    DELTIC_INLINE explicit Tiles(const TileShapes &shapes) { asm volatile("ldtilecfg %0" ::"m"(shapes)); }
    DELTIC_INLINE ~Tiles() { asm volatile("tilerelease"); }
    Tiles(const Tiles &) = delete;
};

// What a tile is loaded from or stored to, for the compiler.
struct Memory {
    char bytes[1 << 20];
};
// stride: bytes from a row to the next one.
template <int Tile> DELTIC_INLINE void load_tile(const void *from, int64_t stride) {
    asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(stride), "i"(Tile), "m"(*(const Memory *)from));
}
template <int Tile> DELTIC_INLINE void store_tile(void *to, int64_t stride) {
    asm volatile("tilestored %%tmm%c3, (%1,%2,1)" : "=m"(*(Memory *)to) : "r"(to), "r"(stride), "i"(Tile));
}
// Pairs of bfloat16: first numbers and second ones are added up apart, then to each other, then to C. Subnormals are 0.
template <int C, int A, int B> DELTIC_INLINE void tile_dot2_bf16() {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B));
}

}  // namespace
}  // namespace deltic::DELTIC_LEVEL
