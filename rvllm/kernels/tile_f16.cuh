// Generated from notebooks/16_quantised_weights.ipynb; edit there, then run: python tools/nb.py export

// Halfs in tiles of 16 x 32 (tile.cuh): 1,024 bytes. Held by the lanes of a warp of any block.
//
//   bytes 0..511      16 for each lane: 8 weights of row g
//   bytes 512..1023   the same of row g + 8
#pragma once
#include "half_pairs.cuh"
#include "memory.cuh"

struct TileF16 {
    static const int BYTES = 1024;
    static const bool HAS_SCALE = false, HAS_MIN = false;
    uint4 upper, lower;  // row g, row g + 8

    __device__ void load(const unsigned char* tile) {
        const uint4* mine = (const uint4*)tile + threadIdx.x % 32;
        upper = load_once(mine);
        lower = load_once(mine + 32);
    }

    __device__ void fragments(unsigned (&a)[8]) const {
        a[0] = upper.x, a[2] = upper.y, a[4] = upper.z, a[6] = upper.w;
        a[1] = lower.x, a[3] = lower.y, a[5] = lower.z, a[7] = lower.w;
    }

    __device__ void folded(unsigned (&a)[8]) const { fragments(a); }

    __device__ float2 scale() const { return make_float2(1.0f, 1.0f); }
    __device__ float2 minimum() const { return make_float2(0.0f, 0.0f); }

    static __device__ float value(const unsigned char* tile, int row, int k) {
        int lane = 4 * (row % 8) + k / 8;
        return __half2float(((const half*)tile)[256 * (row / 8) + 8 * lane + k % 8]);
    }
};
