// Generated from notebooks/20_prefill_and_the_loop.ipynb; edit there, then run: python tools/nb.py export

// Attention of sixteen queries that never holds more than 32 scores of each: softmax while the tokens come by.
//
// One warp of a block calls these together. For each row are kept the largest score so far, the sum of exp2(score -
// largest) and the sum of such weights times values. When a larger score comes, both sums are multiplied by
// exp2(old largest - new largest), as if it had been known from the start. The first step holds token 0, which every
// query sees; so from then on the largest is a real score, and the weight of a hidden one is exactly 0.
#pragma once
#include "prefill_rows.cuh"

__device__ inline float largest_of_row(float v) {  // the four lanes of a row; the result is the same in each
    v = fmaxf(v, __shfl_xor_sync(0xffffffff, v, 1));
    return fmaxf(v, __shfl_xor_sync(0xffffffff, v, 2));
}

__device__ inline float sum_of_row(float v) {
    v += __shfl_xor_sync(0xffffffff, v, 1);
    return v + __shfl_xor_sync(0xffffffff, v, 2);
}

struct Softmax {
    float largest[2] = {-1e30f, -1e30f};  // of rows g and g + 8, in powers of two
    float total[2] = {0.0f, 0.0f};        // of the tokens of this lane only; the lanes are added at the end
    float sums[HEAD_DIM / 8][4] = {};

    // Scores to weights, as the A operand of the second product; what was summed before is rescaled.
    __device__ void weigh(const float (&scores)[STEP / 8][4], unsigned (&weights)[STEP / 16][4]) {
        float scale = rsqrtf(HEAD_DIM) * 1.44269504f;  // log2(e): exp(x) = exp2(x * log2(e))
#pragma unroll
        for (int r = 0; r < 2; r++) {
            float high = scores[0][2 * r];
#pragma unroll
            for (int t = 0; t < STEP / 8; t++) high = fmaxf(high, fmaxf(scores[t][2 * r], scores[t][2 * r + 1]));
            high = fmaxf(largest[r], largest_of_row(high) * scale);
            float correction = exp2f(largest[r] - high);
            largest[r] = high;
            total[r] *= correction;
#pragma unroll
            for (int t = 0; t < HEAD_DIM / 8; t++) {
                sums[t][2 * r] *= correction;
                sums[t][2 * r + 1] *= correction;
            }
#pragma unroll
            for (int t = 0; t < STEP / 8; t++) {
                float even = exp2f(fmaf(scores[t][2 * r], scale, -high));
                float odd = exp2f(fmaf(scores[t][2 * r + 1], scale, -high));
                total[r] += even + odd;
                weights[t / 2][t % 2 * 2 + r] = pack(even, odd);
            }
        }
    }

    __device__ void attend(const unsigned (&queries)[HEAD_DIM / 16][4], const uint4* keys, const uint4* values,
                           int first_token, int position) {
        float scores[STEP / 8][4];
        unsigned weights[STEP / 16][4];
        multiply_keys(queries, keys, scores);
        if (first_token + STEP - 1 > position) hide_later_tokens(scores, first_token, position);
        weigh(scores, weights);
        add_values(weights, values, sums);
    }
};
