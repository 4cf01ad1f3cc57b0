// Generated from notebooks/20_prefill_and_the_loop.ipynb; edit there, then run: python tools/nb.py export

// Sixteen rows of queries in the registers of a warp: products with staged keys and values.
//
// One warp of a block calls these together; rows g = lane / 4 and g + 8, columns by q = lane % 4, as in mma.cuh.
// An mma wants a lane to hold columns 2q, 2q + 1 of each tile of 8. Which real column a tile column stands for is our
// choice, if both operands agree. Column 2q + e of tile t (of 4) stands for real column 8q + 2t + e of 32, so that
// what a lane holds of 4 tiles is one chunk: 16 bytes, one load. It holds for head features of queries and keys, for
// tokens of scores and values, and for features of the output.
#pragma once
#include "mma.cuh"
#include "prefill_stage.cuh"

// The row of shared keys (or values) that this lane feeds into tile t as the B operand: real column of column g.
__device__ inline int fragment_row(int tile) {
    int g = threadIdx.x % 32 / 4;
    return tile / 4 * 32 + g / 2 * 8 + tile % 4 * 2 + g % 2;
}

// scores[t] = queries times the keys of tile t, 8 tokens
__device__ inline void multiply_keys(const unsigned (&queries)[HEAD_DIM / 16][4], const uint4* keys,
                                     float (&scores)[STEP / 8][4]) {
#pragma unroll
    for (int t = 0; t < STEP / 8; t++) {
#pragma unroll
        for (int i = 0; i < 4; i++) scores[t][i] = 0.0f;
#pragma unroll
        for (int part = 0; part < HEAD_DIM / 32; part++) {
            uint4 chunk = keys[fragment_row(t) * KEY_STRIDE + part * 4 + threadIdx.x % 4];
            const unsigned* pairs = (const unsigned*)&chunk;
            mma(scores[t], queries[2 * part], pairs);
            mma(scores[t], queries[2 * part + 1], pairs + 2);
        }
    }
}

// sums[t] += weights times the values of tile t, 8 features
__device__ inline void add_values(const unsigned (&weights)[STEP / 16][4], const uint4* values,
                                  float (&sums)[HEAD_DIM / 8][4]) {
#pragma unroll
    for (int t = 0; t < HEAD_DIM / 8; t++) {
        uint4 chunk = values[fragment_row(t) * VALUE_STRIDE + threadIdx.x % 4];
        const unsigned* pairs = (const unsigned*)&chunk;
        mma(sums[t], weights[0], pairs);
        mma(sums[t], weights[1], pairs + 2);
    }
}

// Scores of tokens after the query become so low that their weight is 0. position: of row g; row g + 8 is 8 later.
__device__ inline void hide_later_tokens(float (&scores)[STEP / 8][4], int first_token, int position) {
#pragma unroll
    for (int t = 0; t < STEP / 8; t++) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            int token = first_token + threadIdx.x % 4 * 8 + t * 2 + i % 2;
            if (token > position + i / 2 * 8) scores[t][i] = -1e30f;
        }
    }
}
