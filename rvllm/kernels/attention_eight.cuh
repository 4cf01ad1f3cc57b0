// Generated from notebooks/17_paged_attention.ipynb; edit there, then run: python tools/nb.py export

// Eight neighbouring dimensions of a query or key, as a lane takes them: 32j + 8q and the seven behind, q = lane % 4.
//
// Any lane of a block may load eight. Where qkv is as the product left it (RAW_QKV), a lane also turns them by RoPE.
#pragma once
#include "memory.cuh"

static_assert(HEAD_DIM > 0 && HEAD_DIM % 32 == 0, "HEAD_DIM must be a multiple of 32: four lanes take eight each");

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

struct Angles {  // of one position: the cosine and sine of four pairs, for each eight of a lane
    float4 of_pairs[HEAD_DIM / 32][2];
};

// rope: float [positions][HEAD_DIM / 2][2]
__device__ inline void load_angles(Angles& angles, const float* rope, int position) {
    const float4* row = (const float4*)(rope + (long long)position * HEAD_DIM) + threadIdx.x % 4 * 2;
#pragma unroll
    for (int j = 0; j < HEAD_DIM / 32; j++)
        for (int i = 0; i < 2; i++) angles.of_pairs[j][i] = row[8 * j + i];
}

__device__ inline float2 turn(float2 pair, float cos, float sin) {
    return make_float2(pair.x * cos - pair.y * sin, pair.x * sin + pair.y * cos);
}

__device__ inline void turn_eight(float* eight, const float4* angles) {
#pragma unroll
    for (int i = 0; i < 4; i++) {
        float4 two = angles[i / 2];
        float2 pair = make_float2(eight[2 * i], eight[2 * i + 1]);
        pair = i % 2 ? turn(pair, two.z, two.w) : turn(pair, two.x, two.y);
        eight[2 * i] = pair.x, eight[2 * i + 1] = pair.y;
    }
}
