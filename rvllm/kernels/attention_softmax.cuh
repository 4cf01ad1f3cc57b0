// Generated from notebooks/17_paged_attention.ipynb; edit there, then run: python tools/nb.py export

// Online softmax of one warp: it attends to page after page, in registers. The warps of a block do so side by side.
//
// Lane 4g + q keeps, of head g: the largest score so far, the sum of 2^(score - largest), and the values weighted by
// that, dimensions 8i + 2q and 8i + 2q + 1. The four lanes of a head hold the same `largest` and `sum`.
#pragma once
#include "attention_page.cuh"
#include "attention_query.cuh"

#define NO_SCORE -1e30f  // below every score, yet finite: NO_SCORE - NO_SCORE is 0, and 2^(NO_SCORE - score) is 0

struct Softmax {
    float largest, sum;
    float vector[HEAD_DIM / 8][2];
};

__device__ inline void start_softmax(Softmax& softmax) {
    softmax.largest = NO_SCORE;
    softmax.sum = 0.0f;
#pragma unroll
    for (int i = 0; i < HEAD_DIM / 8; i++) softmax.vector[i][0] = softmax.vector[i][1] = 0.0f;
}

// scores[2t + e]: scaled query . key of token 4q + 2t + e of the page. Only the first `tokens` of the page count.
__device__ inline void page_scores(const Page& page, const Query& query, int tokens, float scale, float* scores) {
    int q = threadIdx.x % 4;
#pragma unroll
    for (int t = 0; t < 2; t++) {
        float c[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
        for (int j = 0; j < HEAD_DIM / 32; j++) {
            unsigned first[2] = {page.keys[t][j].x, page.keys[t][j].y};
            unsigned second[2] = {page.keys[t][j].z, page.keys[t][j].w};
            mma(c, query.a[2 * j], first);
            mma(c, query.a[2 * j + 1], second);
        }
#pragma unroll
        for (int e = 0; e < 2; e++)  // hi and lo part of the query, rows g and g + 8, are added here
            scores[2 * t + e] = 4 * q + 2 * t + e < tokens ? (c[e] + c[e + 2]) * scale : NO_SCORE;
    }
}

__device__ inline void attend_page(Page& page, const Query& query, int tokens, float scale, Softmax& softmax) {
    float p[4];
    page_scores(page, query, tokens, scale, p);
    float largest = fmaxf(softmax.largest, fmaxf(fmaxf(p[0], p[1]), fmaxf(p[2], p[3])));
    largest = fmaxf(largest, __shfl_xor_sync(0xffffffff, largest, 1));
    largest = fmaxf(largest, __shfl_xor_sync(0xffffffff, largest, 2));
    float shrink = exp2f(softmax.largest - largest);
#pragma unroll
    for (int i = 0; i < 4; i++) p[i] = exp2f(p[i] - largest);
    float sum = p[0] + p[1] + (p[2] + p[3]);
    sum += __shfl_xor_sync(0xffffffff, sum, 1);
    softmax.sum = softmax.sum * shrink + sum + __shfl_xor_sync(0xffffffff, sum, 2);
    softmax.largest = largest;
    unsigned weights[4];  // hi in row g, lo in row g + 8
    split(p[0], p[1], weights[0], weights[1]);
    split(p[2], p[3], weights[2], weights[3]);
    if (tokens < PAGE) clear_unused(page, tokens);  // not before the scores: keys come first, nobody waits for values
#pragma unroll
    for (int i = 0; i < HEAD_DIM / 8; i++) {
        float c[4] = {0.0f, 0.0f, 0.0f, 0.0f};
        unsigned values[2] = {page.values[i].x, page.values[i].y};
        mma(c, weights, values);
        softmax.vector[i][0] = softmax.vector[i][0] * shrink + c[0] + c[2];
        softmax.vector[i][1] = softmax.vector[i][1] * shrink + c[1] + c[3];
    }
}
