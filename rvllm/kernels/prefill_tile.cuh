// Generated from notebooks/20_prefill_and_the_loop.ipynb; edit there, then run: python tools/nb.py export

// Between memory and the registers of a warp: sixteen rows of queries in, sixteen rows of results out.
//
// One warp of a block calls these together. tile: the head in the first token of the tile; count: tokens of the tile,
// at least 1; row: which of them is row g = lane / 4 of the warp, row + 8 is the other one of the lane.
// A lane moves chunks of 16 bytes, the four lanes of a row 64 neighbouring bytes (prefill_rows.cuh says why that fits).
#pragma once
#include "prefill_softmax.cuh"

static_assert(GROUP >= 1 && KV_HEADS >= 1, "GROUP and KV_HEADS must be at least 1");
constexpr int HEADS = GROUP * KV_HEADS;
constexpr int QKV_WIDTH = (HEADS + 2 * KV_HEADS) * HEAD_DIM;

// Rows g and g + 8 as A operands. A row past the tile repeats its last token; nobody stores its result.
__device__ inline void load_queries(const half* tile, int count, int row, unsigned (&queries)[HEAD_DIM / 16][4]) {
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const half* from = tile + (long long)min(row + 8 * r, count - 1) * QKV_WIDTH + threadIdx.x % 4 * 8;
#pragma unroll
        for (int part = 0; part < HEAD_DIM / 32; part++) {
            uint4 chunk = load_fresh((const uint4*)(from + 32 * part));
            queries[2 * part][r] = chunk.x;
            queries[2 * part][r + 2] = chunk.y;
            queries[2 * part + 1][r] = chunk.z;
            queries[2 * part + 1][r + 2] = chunk.w;
        }
    }
}

__device__ inline void store_rows(const Softmax& softmax, half* tile, int count, int row) {
#pragma unroll
    for (int r = 0; r < 2; r++) {
        float factor = 1.0f / sum_of_row(softmax.total[r]);
        uint4* to = (uint4*)(tile + (long long)(row + 8 * r) * HEADS * HEAD_DIM) + threadIdx.x % 4;
#pragma unroll
        for (int part = 0; part < HEAD_DIM / 32; part++) {
            unsigned pairs[4];
            for (int t = 0; t < 4; t++) {
                const float* pair = softmax.sums[4 * part + t] + 2 * r;
                pairs[t] = pack(pair[0] * factor, pair[1] * factor);
            }
            if (row + 8 * r < count) to[4 * part] = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
        }
    }
}
