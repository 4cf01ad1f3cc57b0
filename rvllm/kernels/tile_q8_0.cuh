// Generated from notebooks/16_quantised_weights.ipynb; edit there, then run: python tools/nb.py export

// Q8_0 in tiles of 16 x 32 (tile.cuh): 544 bytes, as in the file. Held by the lanes of a warp of any block.
//
//   bytes 0..511     16 for each lane: 8 quants of row g, 8 of row g + 8
//   bytes 512..543   for g = 0..7 two halfs: scale of row g, scale of row g + 8
#pragma once
#include "half_pairs.cuh"
#include "memory.cuh"

struct TileQ8_0 {
    static const int BYTES = 544;
    static const bool HAS_SCALE = true, HAS_MIN = false;
    uint4 quants;     // x, y: row g;  z, w: row g + 8
    unsigned scales;  // low half: row g;  high half: row g + 8

    __device__ void load(const unsigned char* tile) {
        int lane = threadIdx.x % 32;
        quants = load_once((const uint4*)tile + lane);
        scales = load_once((const unsigned*)(tile + 512) + lane / 4);
    }

    // Four bytes to four halfs. A byte 128 + quant under the byte 0x64 is the half 1024 + 128 + quant; 0x6480 is 1152.
    static __device__ void to_halfs(unsigned four, unsigned& first, unsigned& second) {
        unsigned shifted = four ^ 0x80808080;
        first = subtract(__byte_perm(shifted, 0x64646464, 0x4140), 0x64806480);
        second = subtract(__byte_perm(shifted, 0x64646464, 0x4342), 0x64806480);
    }

    __device__ void fragments(unsigned (&a)[8]) const {
        to_halfs(quants.x, a[0], a[2]);
        to_halfs(quants.z, a[1], a[3]);
        to_halfs(quants.y, a[4], a[6]);
        to_halfs(quants.w, a[5], a[7]);
    }

    __device__ void folded(unsigned (&a)[8]) const {
        fragments(a);
        for (int i = 0; i < 8; i += 2) {
            a[i] = multiply(a[i], low_twice(scales));
            a[i + 1] = multiply(a[i + 1], high_twice(scales));
        }
    }

    __device__ float2 scale() const { return __half22float2(as_halfs(scales)); }
    __device__ float2 minimum() const { return make_float2(0.0f, 0.0f); }

    static __device__ float value(const unsigned char* tile, int row, int k) {
        int g = row % 8, lower = row / 8, lane = 4 * g + k / 8;
        float quant = (signed char)tile[16 * lane + 8 * lower + k % 8];
        return quant * __half2float(((const half*)(tile + 512))[2 * g + lower]);
    }
};
