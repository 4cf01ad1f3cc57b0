// Generated from notebooks/17_paged_attention.ipynb; edit there, then run: python tools/nb.py export

// The token that a block attends for: the score of its own key, and with RAW_QKV its cell in the cache.
#pragma once
#include "attention_query.cuh"
#include "kv_place.cuh"

// Its key as the right operand of an mma: column 0 the halfs, column 1 what they lost; the others do not matter.
struct OwnKey {
    float eight[HEAD_DIM / 32][8];

    // By one warp, right before it loads the query: so the key's latency is not one more to wait for.
    __device__ void load(const QKV_TYPE* key) {
#pragma unroll
        for (int j = 0; j < HEAD_DIM / 32; j++) load_eight(key + 32 * j + threadIdx.x % 4 * 8, eight[j]);
    }

    // scores[head] = scaled query . key, by the same warp.
    __device__ void score(const Query& query, const Angles& angles, float scale, float* scores) {
        int lane = threadIdx.x % 32;
        float c[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
        for (int j = 0; j < HEAD_DIM / 32; j++) {
            if (RAW_QKV) turn_eight(eight[j], angles.of_pairs[j]);
            unsigned part[4];
#pragma unroll
            for (int i = 0; i < 4; i++) {
                unsigned high, low;
                split(eight[j][2 * i], eight[j][2 * i + 1], high, low);
                part[i] = lane / 4 == 1 ? low : high;
            }
            mma(c, query.a[2 * j], part);
            mma(c, query.a[2 * j + 1], part + 2);
        }
        if (lane % 4 == 0 && lane / 4 < GROUP) scores[lane / 4] = (c[0] + c[1] + c[2]) * scale;
    }
};

// Key and value into the cache; threads 0 to HEAD_DIM - 1 take a pair of dimensions each. Only in steps in which every
// sequence has one token: then nobody else reads what is stored here.
// key: QKV_TYPE [KV_HEADS * HEAD_DIM], keys from this head on, then as many of values; rope: as for load_angles.
__device__ inline void store_own(const QKV_TYPE* key, const float* rope, const Place& place, int head, half* pages) {
    int is_value = threadIdx.x / (HEAD_DIM / 2), d = threadIdx.x % (HEAD_DIM / 2) * 2;
    if (is_value > 1) return;
    const QKV_TYPE* from = key + is_value * KV_HEADS * HEAD_DIM + d;
    float2 pair = make_float2((float)load_fresh(from), (float)load_fresh(from + 1));
    const float* angle = rope + (long long)place.position * HEAD_DIM + d;
    if (!is_value) pair = turn(pair, angle[0], angle[1]);
    store_pair(pages, place, (is_value * KV_HEADS + head) * HEAD_DIM + d, pair.x, pair.y);
}
