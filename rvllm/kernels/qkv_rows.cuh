// Generated from notebooks/18_fused_kernels.ipynb; edit there, then run: python tools/nb.py export

// What a thread of a block does with a pair of rows of Q, K or V of a token: turn it, write it, store it in the cache.
//
// Rows of the matrix, and columns of its output: queries, then keys, then values. RoPE turns neighbouring pairs.
#pragma once
#include "kv_place.cuh"

const int KEYS = QUERY_ROWS, VALUES = KEYS + KV_HEADS * HEAD_DIM, ROWS = VALUES + KV_HEADS * HEAD_DIM;
static_assert(QUERY_ROWS % HEAD_DIM == 0, "QUERY_ROWS must be a multiple of HEAD_DIM: whole heads");
static_assert(ROWS % 16 == 0, "the rows of Q, K and V must be a multiple of 16: whole row tiles");

struct Finish {  // looked up before the product
    Place place;
    float2 turns[ROW_TILES];  // cosine and sine of the pair that begins at row `pair` of each tile
    float factor;             // first the one that is already in the activations, then what the sums still lack

    __device__ void look_up(const float* rope, int pair) {
        for (int r = 0; r < ROW_TILES; r++) {
            const int row = (blockIdx.x * ROW_TILES + r) * 16 + pair;
            turns[r] = ((const float2*)rope)[(long long)place.position * (HEAD_DIM / 2) + row % HEAD_DIM / 2];
        }
    }

    __device__ void store(float a, float b, int row, float2 turn, float* out, half* pages) const {
        float2 y = make_float2(a * factor, b * factor);
        if (row < VALUES) y = make_float2(y.x * turn.x - y.y * turn.y, y.x * turn.y + y.y * turn.x);
        *(float2*)(out + (size_t)place.token * ROWS + row) = y;
        if (row >= KEYS) store_pair(pages, place, row - KEYS, y.x, y.y);
    }
};
