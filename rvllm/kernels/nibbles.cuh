// Generated from notebooks/16_quantised_weights.ipynb; edit there, then run: python tools/nb.py export

// The 4-bit quants of a tile of 16 x 32 (tile.cuh): its first 256 bytes. Held by the lanes of a warp of any block.
//
//   8 bytes for each lane: an unsigned for row g, one for row g + 8. In it, lowest four bits first:
//
//     nibble    0       1       2       3       4       5       6       7
//     column   8q    8q + 2  8q + 4  8q + 6  8q + 1  8q + 3  8q + 5  8q + 7
//
//   so that a shift by 4p and one mask leave columns 8q + 2p and 8q + 2p + 1 in the two halves of an unsigned. Over the
//   bits 0x6400, the half 1024, such a quant is the half 1024 + quant.
#pragma once
#include "half_pairs.cuh"
#include "memory.cuh"

struct Nibbles {
    uint2 quants;  // x: row g;  y: row g + 8

    __device__ void load(const unsigned char* tile) { quants = load_once((const uint2*)tile + threadIdx.x % 32); }

    // Halfs of quant - zero; `zero_pair` is twice the half 1024 + zero.
    __device__ void fragments(unsigned (&a)[8], unsigned zero_pair) const {
        for (int p = 0; p < 4; p++) {
            a[2 * p] = subtract((quants.x >> 4 * p) & 0x000f000f | 0x64006400, zero_pair);
            a[2 * p + 1] = subtract((quants.y >> 4 * p) & 0x000f000f | 0x64006400, zero_pair);
        }
    }

    static __device__ int quant(const unsigned char* tile, int row, int k) {
        int lane = 4 * (row % 8) + k / 8, nibble = k % 8 / 2 + 4 * (k % 2);
        unsigned eight = ((const unsigned*)tile)[2 * lane + row / 8];
        return eight >> 4 * nibble & 15;
    }
};
