// Generated from notebooks/17_paged_attention.ipynb; edit there, then run: python tools/nb.py export

// Where attention leaves its results. Every thread of a block writes elements of its own.
//
// out: half [N][HEADS_WIDTH], or with HI_LO [2N][HEADS_WIDTH], where rows 2n and 2n + 1 of token n add up to the value.
// A split, one of several blocks for a token and KV head, leaves PART_FLOATS floats for attention_merge instead:
// vectors [GROUP][HEAD_DIM], not yet divided by the sum of the weights, then (largest score, sum) [GROUP].
#pragma once
#include <cuda_fp16.h>

static_assert(HI_LO == 0 || HI_LO == 1, "HI_LO must be 0 or 1: rows of a token beyond the first");

#define HEADS_WIDTH (KV_HEADS * GROUP * HEAD_DIM)
#define PART_FLOATS (GROUP * (HEAD_DIM + 2))

__device__ inline void store_output(half* out, int token, int column, float value) {
    half rounded = __float2half(value);
    half* cell = out + (long long)token * (1 + HI_LO) * HEADS_WIDTH + column;
    cell[0] = rounded;
    if (HI_LO) cell[HEADS_WIDTH] = __float2half(value - __half2float(rounded));
}

__device__ inline void store_part(float* part, int element, float largest, float sum, float value) {
    int head = element / HEAD_DIM;
    part[element] = value;
    if (element % HEAD_DIM == 0) {
        part[GROUP * HEAD_DIM + 2 * head] = largest;
        part[GROUP * HEAD_DIM + 2 * head + 1] = sum;
    }
}
