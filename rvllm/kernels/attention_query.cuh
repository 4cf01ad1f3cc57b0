// Generated from notebooks/17_paged_attention.ipynb; edit there, then run: python tools/nb.py export

// The query heads of one KV head as the left operand of an mma, and their scores with the key of their own token.
//
// The GROUP heads that share a KV head share the rows of a product, which a single token would leave empty: row g is
// head g, row g + 8 is what head g lost by rounding to halfs (hi/lo). Every warp of a block holds the same query.
#pragma once
#include "memory.cuh"
#include "mma.cuh"
#include "warp.cuh"

__device__ inline void load_eight(const float* from, float* to) {
    float4 first = load_fresh((const float4*)from), second = load_fresh((const float4*)from + 1);
    to[0] = first.x, to[1] = first.y, to[2] = first.z, to[3] = first.w;
    to[4] = second.x, to[5] = second.y, to[6] = second.z, to[7] = second.w;
}

__device__ inline void load_eight(const half* from, float* to) {
    uint4 eight = load_fresh((const uint4*)from);
#pragma unroll
    for (int i = 0; i < 4; i++) {
        float2 pair = __half22float2(((const __half2*)&eight)[i]);
        to[2 * i] = pair.x, to[2 * i + 1] = pair.y;
    }
}

struct Query {
    unsigned a[HEAD_DIM / 16][4];  // what each mma takes as A; the dimensions in the order of attention_page.cuh
};

// heads: QKV_TYPE [GROUP][HEAD_DIM]. Rows of heads that do not exist become 0.
__device__ inline void load_query(Query& query, const QKV_TYPE* heads) {
    int lane = threadIdx.x % 32, g = lane / 4, q = lane % 4;
    const QKV_TYPE* head = heads + min(g, GROUP - 1) * HEAD_DIM + 8 * q;  // without a branch: some head in any case
    float exists = g < GROUP ? 1.0f : 0.0f;
    float eight[HEAD_DIM / 32][8];
#pragma unroll
    for (int j = 0; j < HEAD_DIM / 32; j++) load_eight(head + 32 * j, eight[j]);
#pragma unroll
    for (int j = 0; j < HEAD_DIM / 32; j++)
#pragma unroll
        for (int i = 0; i < 4; i++) {  // a pair of dimensions; two pairs make the A of an mma
            unsigned* a = query.a[2 * j + i / 2] + i % 2 * 2;
            split(eight[j][2 * i] * exists, eight[j][2 * i + 1] * exists, a[0], a[1]);
        }
}

// scores[head] = scaled query . key of the GROUP heads. A warp takes a head; the last warp, which has the fewest pages,
// takes the first.
__device__ inline void own_scores(const QKV_TYPE* heads, const QKV_TYPE* key, float scale, float* scores) {
    int lane = threadIdx.x % 32;
    for (int head = WARPS - 1 - threadIdx.x / 32; head < GROUP; head += WARPS) {
        float products = 0.0f;
#pragma unroll
        for (int i = 0; i < HEAD_DIM; i += 32) {
            float query = load_fresh(heads + head * HEAD_DIM + i + lane);
            products += query * (float)load_fresh(key + i + lane);
        }
        products = warp_sum(products);
        if (lane == 0) scores[head] = products * scale;
    }
}
