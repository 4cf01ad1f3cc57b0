// Generated from notebooks/16_quantised_weights.ipynb; edit there, then run: python tools/nb.py export

// Q4_0 and Q4_1 in tiles of 16 x 32 (tile.cuh): 288 and 320 bytes, as in the file. Held by the lanes of a warp of any
// block.
//
//   bytes 0..255     nibbles.cuh
//   bytes 256..287   for g = 0..7 two halfs: scale of row g, scale of row g + 8
//   bytes 288..319   minima likewise, Q4_1 only
#pragma once
#include "nibbles.cuh"

template <bool WITH_MIN> struct TileQ4 {
    static const int BYTES = WITH_MIN ? 320 : 288;
    static const bool HAS_SCALE = true, HAS_MIN = WITH_MIN;
    static const int ZERO = WITH_MIN ? 0 : 8;  // the quant that means 0; one in a half pair is 0x00010001
    Nibbles nibbles;
    unsigned scales, minima;  // low half: row g;  high half: row g + 8

    __device__ void load(const unsigned char* tile) {
        nibbles.load(tile);
        const unsigned* of_rows = (const unsigned*)(tile + 256) + threadIdx.x % 32 / 4;
        scales = load_once(of_rows);
        minima = WITH_MIN ? load_once(of_rows + 8) : 0;
    }

    __device__ void fragments(unsigned (&a)[8]) const { nibbles.fragments(a, 0x64006400 + ZERO * 0x00010001); }

    __device__ void folded(unsigned (&a)[8]) const {
        fragments(a);
        for (int i = 0; i < 8; i += 2) {
            a[i] = multiply_add(a[i], low_twice(scales), low_twice(minima));
            a[i + 1] = multiply_add(a[i + 1], high_twice(scales), high_twice(minima));
        }
    }

    __device__ float2 scale() const { return __half22float2(as_halfs(scales)); }
    __device__ float2 minimum() const { return __half22float2(as_halfs(minima)); }

    static __device__ float value(const unsigned char* tile, int row, int k) {
        const half* of_row = (const half*)(tile + 256) + 2 * (row % 8) + row / 8;
        float minimum = WITH_MIN ? __half2float(of_row[16]) : 0.0f;
        return (Nibbles::quant(tile, row, k) - ZERO) * __half2float(*of_row) + minimum;
    }
};
typedef TileQ4<false> TileQ4_0;
typedef TileQ4<true> TileQ4_1;
