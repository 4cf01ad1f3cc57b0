// Generated from notebooks/17_paged_attention.ipynb; edit there, then run: python tools/nb.py export

// The softmaxes of the warps of a block as parts in shared memory, and their sum in a fixed order.
//
// Part WARPS is the token itself: its score, its weight 1 (0 where another block counts it), its value as the vector.
#pragma once
#include "attention_softmax.cuh"
#include "attention_store.cuh"

static_assert(WARPS >= 1 && WARPS <= 32, "WARPS must be 1 to 32: a block has at most 1,024 threads");

struct alignas(8) Parts {
    float vector[WARPS][GROUP][HEAD_DIM + 8];  // with 8 more, heads that are written together fall into other banks
    float largest[WARPS + 1][GROUP], sum[WARPS + 1][GROUP];
};

struct Weighted {  // a sum of values, not yet divided by the sum of their weights
    float largest, sum, value;
};

__device__ inline void share_softmax(const Softmax& softmax, Parts& parts) {
    int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, q = threadIdx.x % 4;
    if (g >= GROUP) return;
    float* vector = parts.vector[warp][g] + 2 * q;
#pragma unroll
    for (int i = 0; i < HEAD_DIM / 8; i++)
        *(float2*)(vector + 8 * i) = make_float2(softmax.vector[i][0], softmax.vector[i][1]);
    if (q == 0) parts.largest[warp][g] = softmax.largest, parts.sum[warp][g] = softmax.sum;
}

// One dimension of one head. A warp that had no page has the largest score NO_SCORE, sum 0 and vector 0: it adds 0.
__device__ inline Weighted combine(const Parts& parts, int head, int dimension, float own_value) {
    float largest = parts.largest[WARPS][head];
#pragma unroll
    for (int w = 0; w < WARPS; w++) largest = fmaxf(largest, parts.largest[w][head]);
    float own = exp2f(parts.largest[WARPS][head] - largest) * parts.sum[WARPS][head];
    Weighted all = {largest, own, own * own_value};
#pragma unroll
    for (int w = 0; w < WARPS; w++) {
        float factor = exp2f(parts.largest[w][head] - largest);
        all.sum += factor * parts.sum[w][head];
        all.value += factor * parts.vector[w][head][dimension];
    }
    return all;
}

static_assert(32 * WARPS % HEAD_DIM == 0, "32 * WARPS must be a multiple of HEAD_DIM: a thread keeps its dimension");
// All elements of the group, to `out`, or where the context is split to `part`. own_value: at threadIdx.x % HEAD_DIM.
__device__ inline void finish(const Parts& parts, float own_value, half* out, int token, int kv_head, float* part) {
    for (int i = threadIdx.x; i < GROUP * HEAD_DIM; i += 32 * WARPS) {
        Weighted all = combine(parts, i / HEAD_DIM, i % HEAD_DIM, own_value);
        if (gridDim.z == 1) store_output(out, token, kv_head * GROUP * HEAD_DIM + i, __fdividef(all.value, all.sum));
        else store_part(part, i, all.largest, all.sum, all.value);
    }
}
