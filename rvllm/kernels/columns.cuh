// Generated from notebooks/18_fused_kernels.ipynb; edit there, then run: python tools/nb.py export

// How activations get into the fragments of a warp, and its sums out of them; each warp of a block for its k-blocks.
//
// An activation column is a row of halfs in global memory, K_BLOCKS * 32 long. With HI_LO a token has two of them: the
// value rounded to half, and what the rounding lost. Their sums are added on the way out.
#pragma once
#include "memory.cuh"
#include "mma.cuh"

// Fragments of one k-block: lane (g, q) takes the halfs 8q .. 8q + 7 of column 8t + g. Columns past the last repeat it,
// since nobody reads their sums. k-blocks past the last count as zeros; EVEN says that there are none.
template <int ColumnTiles, int KBlocks, bool EVEN>
__device__ inline void load_columns(uint4* columns, const half* activations, int k_block, int num_columns) {
    const int g = threadIdx.x % 32 / 4, q = threadIdx.x % 4;
    const int k = (EVEN ? k_block : min(k_block, KBlocks - 1)) * 32 + q * 8;
#pragma unroll
    for (int t = 0; t < ColumnTiles; t++) {
        const size_t column = min(t * 8 + g, num_columns - 1);
        columns[t] = load_fresh((const uint4*)(activations + column * KBlocks * 32 + k));
        if (!EVEN && k_block >= KBlocks) columns[t] = make_uint4(0, 0, 0, 0);
    }
}

// The sums of a row tile (mma.cuh: C) to shared memory, partial[token * stride + row].
template <int ColumnTiles, bool HiLo>
__device__ inline void store_sums(float* partial, int stride, const float* sums) {
    const int g = threadIdx.x % 32 / 4, q = threadIdx.x % 4;
#pragma unroll
    for (int t = 0; t < ColumnTiles; t++) {
        const float* c = sums + 4 * t;
        if (HiLo) {
            partial[(t * 4 + q) * stride + g] = c[0] + c[1];
            partial[(t * 4 + q) * stride + g + 8] = c[2] + c[3];
        } else {
            partial[(t * 8 + 2 * q) * stride + g] = c[0];
            partial[(t * 8 + 2 * q + 1) * stride + g] = c[1];
            partial[(t * 8 + 2 * q) * stride + g + 8] = c[2];
            partial[(t * 8 + 2 * q + 1) * stride + g + 8] = c[3];
        }
    }
}

// Write one activation: a half, or with HI_LO a half and the half that is missing from it.
template <bool HiLo>
__device__ inline void store_activation(half* activations, int token, int width, int k, float value) {
    const half high = __float2half_rn(value);
    if (!HiLo) {
        activations[(size_t)token * width + k] = high;
        return;
    }
    activations[(size_t)(2 * token) * width + k] = high;
    activations[(size_t)(2 * token + 1) * width + k] = __float2half_rn(value - __half2float(high));
}
