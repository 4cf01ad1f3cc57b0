// Generated from notebooks/16_quantised_weights.ipynb; edit there, then run: python tools/nb.py export

// Q4_K in tiles of 16 x 32 (tile.cuh): 384 bytes. Held by the lanes of a warp of any block.
//
//   bytes 0..255     nibbles.cuh
//   bytes 256..383   for g = 0..7 four floats: scales of rows g and g + 8, minima of both
//
// In the file a scale is a half times six bits, which no half can hold; so is a minimum, there without its sign.
#pragma once
#include "nibbles.cuh"

struct TileQ4_K {
    static const int BYTES = 384;
    static const bool HAS_SCALE = true, HAS_MIN = true;
    Nibbles nibbles;
    uint4 factors;  // the four floats

    __device__ void load(const unsigned char* tile) {
        nibbles.load(tile);
        factors = load_once((const uint4*)(tile + 256) + threadIdx.x % 32 / 4);
    }

    __device__ void fragments(unsigned (&a)[8]) const { nibbles.fragments(a, 0x64006400); }

    __device__ void folded(unsigned (&a)[8]) const {
        fragments(a);
        for (int i = 0; i < 8; i += 2) {
            a[i] = multiply_add(a[i], twice(scale().x), twice(minimum().x));
            a[i + 1] = multiply_add(a[i + 1], twice(scale().y), twice(minimum().y));
        }
    }

    __device__ float2 scale() const { return make_float2(__uint_as_float(factors.x), __uint_as_float(factors.y)); }
    __device__ float2 minimum() const { return make_float2(__uint_as_float(factors.z), __uint_as_float(factors.w)); }

    static __device__ float value(const unsigned char* tile, int row, int k) {
        const float* of_rows = (const float*)(tile + 256) + 4 * (row % 8) + row / 8;
        return Nibbles::quant(tile, row, k) * of_rows[0] + of_rows[2];
    }
};
