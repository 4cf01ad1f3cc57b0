// Generated from notebooks/17_paged_attention.ipynb; edit there, then run: python tools/nb.py export

// A page of the cache in the registers of a warp, as tensor cores take it. The warps of a block load different pages.
//
// A page is 16 tokens of one KV head: keys half [16][HEAD_DIM] and, transposed, values half [HEAD_DIM][16].
// Lane 4g + q holds
//   keys[t][j]   of token 4 * (g / 2) + 2t + g % 2, the eight dimensions from 32j + 8q on
//   values[i]    of dimension 8i + g, the four tokens from 4q on
// Both orders are free choices. A score adds up products over the dimensions, so the mma may take them in any order
// that query and key share: here the one that makes a lane load 16 bytes at once. And tokens are dealt to the columns
// so that the scores a lane gets (columns 2q and 2q + 1 of two products t) are those of tokens 4q to 4q + 3: the ones
// whose values it holds. Nothing moves between lanes from the scores to the weighted sum.
#pragma once
#include "kv_place.cuh"
#include "memory.cuh"
#include "mma.cuh"

struct Page {
    uint4 keys[2][HEAD_DIM / 32];
    uint2 values[HEAD_DIM / 8];
};

// stored: the keys of a KV head in a block of the cache; the block has the keys of all its heads, then the values.
__device__ inline void load_page(Page& page, const half* stored) {
    int lane = threadIdx.x % 32, g = lane / 4, q = lane % 4;
#pragma unroll
    for (int t = 0; t < 2; t++) {
        const half* key = stored + (4 * (g / 2) + 2 * t + g % 2) * HEAD_DIM + 8 * q;
#pragma unroll
        for (int j = 0; j < HEAD_DIM / 32; j++) page.keys[t][j] = load_unsettled((const uint4*)(key + 32 * j));
    }
    const half* value = stored + (KV_HEADS * HEAD_DIM + g) * PAGE + 4 * q;
#pragma unroll
    for (int i = 0; i < HEAD_DIM / 8; i++) page.values[i] = load_unsettled((const uint2*)(value + 8 * i * PAGE));
}

// Only the first `tokens` of the page stay. The other cells hold what a sequence left there, NaN perhaps, and a weight
// of 0 does not silence that: 0 * NaN is NaN. Keys need nothing, since scores of such cells are not used.
__device__ inline void clear_unused(Page& page, int tokens) {
    int mine = tokens - threadIdx.x % 4 * 4;
#pragma unroll
    for (int i = 0; i < HEAD_DIM / 8; i++) {
        page.values[i].x &= first_halfs(mine);
        page.values[i].y &= first_halfs(mine - 2);
    }
}
