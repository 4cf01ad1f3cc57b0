// Generated from notebooks/17_paged_attention.ipynb; edit there, then run: python tools/nb.py export

// Where a token's keys and values lie: which cache block, and which cell of it. Every thread of a block may ask.
//
// pages of a layer: half [num_blocks][2][KV_HEADS][16 * HEAD_DIM]: the keys of a block as [16 tokens][HEAD_DIM], the
// values transposed, [HEAD_DIM][16 tokens]: read 16 and 8 bytes a lane, straight into tensor-core fragments.
#pragma once
#include <cuda_fp16.h>

const int PAGE = 16;  // tokens of a cache block
static_assert(KV_HEADS >= 1, "KV_HEADS must be at least 1");
static_assert(HEAD_DIM > 0 && HEAD_DIM % 2 == 0, "HEAD_DIM must be a multiple of 2: a thread has a pair");

struct Place {
    int token, position, block;
};

__device__ inline Place place_of(int token, const int* positions, const int* owners, const int* block_tables,
                                 int max_blocks) {
    const int position = positions[token];  // of a token that is no longer there it may be one past the end
    return {token, position, block_tables[(size_t)owners[token] * max_blocks + min(position / PAGE, max_blocks - 1)]};
}

// The keys (values = 0) or values (1) of one head in one cache block.
template <class Half> __device__ inline Half* page(Half* pages, int block, int values, int head) {
    return pages + (((size_t)block * 2 + values) * KV_HEADS + head) * PAGE * HEAD_DIM;
}

// Store two neighbouring elements, `row` and row + 1 of a token's keys and values: all keys first, then all values.
__device__ inline void store_pair(half* pages, const Place& place, int row, float low, float high) {
    const int values = row >= KV_HEADS * HEAD_DIM, head = row / HEAD_DIM % KV_HEADS, d = row % HEAD_DIM;
    half* base = page(pages, place.block, values, head);
    const int offset = place.position % PAGE;
    if (values) {
        base[d * PAGE + offset] = __float2half_rn(low);
        base[(d + 1) * PAGE + offset] = __float2half_rn(high);
    } else {
        *(__half2*)(base + offset * HEAD_DIM + d) = __floats2half2_rn(low, high);
    }
}
