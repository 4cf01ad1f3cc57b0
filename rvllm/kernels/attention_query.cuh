// Generated from notebooks/17_paged_attention.ipynb; edit there, then run: python tools/nb.py export

// The query heads of one KV head as the left operand of an mma. Every warp of a block holds the same query.
//
// The GROUP heads that share a KV head share the rows of a product, which a single token would leave empty: row g is
// head g, row g + 8 is what head g lost by rounding to halfs (hi/lo).
#pragma once
#include "attention_eight.cuh"
#include "mma.cuh"

static_assert(GROUP >= 1 && GROUP <= 8, "GROUP must be 1 to 8: the rows of an mma");

struct Query {
    unsigned a[HEAD_DIM / 16][4];  // what each mma takes as A; the dimensions in the order of attention_page.cuh
};

// heads: QKV_TYPE [GROUP][HEAD_DIM]. Rows of heads that do not exist become 0.
__device__ inline void load_query(Query& query, const QKV_TYPE* heads, const Angles& angles) {
    int lane = threadIdx.x % 32, g = lane / 4, q = lane % 4;
    const QKV_TYPE* head = heads + min(g, GROUP - 1) * HEAD_DIM + 8 * q;  // without a branch: some head in any case
    float exists = g < GROUP ? 1.0f : 0.0f;
    float eight[HEAD_DIM / 32][8];
#pragma unroll
    for (int j = 0; j < HEAD_DIM / 32; j++) load_eight(head + 32 * j, eight[j]);
#pragma unroll
    for (int j = 0; j < HEAD_DIM / 32; j++) {
        if (RAW_QKV) turn_eight(eight[j], angles.of_pairs[j]);
#pragma unroll
        for (int i = 0; i < 4; i++) {  // a pair of dimensions; two pairs make the A of an mma
            unsigned* a = query.a[2 * j + i / 2] + i % 2 * 2;
            split(eight[j][2 * i] * exists, eight[j][2 * i + 1] * exists, a[0], a[1]);
        }
    }
}
