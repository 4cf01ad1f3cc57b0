// Generated from notebooks/20_prefill_and_the_loop.ipynb; edit there, then run: python tools/nb.py export

// One row of logits as a distribution in integers, and running sums of it over the threads of a block.
//
// mass: exp((logit - largest) / temperature) in units of 2^-44: 2^44 for the likeliest token. Integers add up
// to the same sum in any order, so every pass over the row, and every run, agrees to the last bit. Sums of 2^19 tokens
// fit into 63 bits; a token less likely than 2^-44 times the likeliest has no mass and is never drawn.
// Every thread of the block calls running_sum. blockDim.x must be a multiple of 32, up to 1,024.
#pragma once
#include "rank.cuh"

typedef unsigned long long Mass;

struct Row {
    const float* logits;
    int vocab;
    float largest, temperature;

    __device__ Rank rank(int id) const { return rank_of(logits[id], id); }

    __device__ Mass mass(int id) const { return (Mass)(expf((logits[id] - largest) / temperature) * 0x1p44f); }

    // The mass of a token that the filters keep, 0 for the others.
    __device__ Mass kept(int id, Rank limit) const { return rank(id) <= limit ? mass(id) : 0; }
};

// The sum over this thread and all before it.
__device__ inline Mass running_sum(Mass v) {
    __shared__ Mass of_warp[32];
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    for (int distance = 1; distance < 32; distance *= 2) {
        Mass below = __shfl_up_sync(0xffffffff, v, distance);
        if (lane >= distance) v += below;
    }
    __syncthreads();  // the sums of an earlier call have been read
    if (lane == 31) of_warp[warp] = v;
    __syncthreads();
    for (int w = 0; w < warp; w++) v += of_warp[w];
    return v;
}
