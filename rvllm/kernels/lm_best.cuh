// Generated from notebooks/18_fused_kernels.ipynb; edit there, then run: python tools/nb.py export

// The best token so far of each sequence that a lane sees, and how the lanes and warps of a block agree on it.
//
// In the sums of a warp (mma.cuh) a lane sees rows g and g + 8 of 2 columns a group: SEEN tokens in all. With HI_LO two
// columns are one token. Among equals the lower index wins, so the order of comparing does not matter.
#pragma once
#include "mma.cuh"

const int SEEN = HI_LO ? COLUMN_TILES : 2 * COLUMN_TILES, TOKENS = 4 * SEEN;
static_assert(TOKENS <= 32 * WARPS && WARPS <= 32, "WARPS must be TOKENS / 32 to 32: a thread finishes a token");

__device__ inline int seen_token(int i) {
    const int q = threadIdx.x % 4;
    return HI_LO ? i * 4 + q : i / 2 * 8 + q * 2 + i % 2;
}

// Row g (upper = 0) or g + 8 (1) of the i-th token that this lane sees.
__device__ inline float seen_sum(const float* sums, int i, int upper) {
    if (HI_LO) return sums[4 * i + 2 * upper] + sums[4 * i + 2 * upper + 1];
    return sums[i / 2 * 4 + 2 * upper + i % 2];
}

struct Best {
    float value[SEEN], finite[SEEN];  // finite: 0, or NaN once a logit was not a finite number
    int index[SEEN];

    __device__ void clear() {
#pragma unroll
        for (int i = 0; i < SEEN; i++) value[i] = -3.4e38f, finite[i] = 0, index[i] = 0x7fffffff;
    }

    __device__ void take(int i, float v, int at) {
        finite[i] = fmaf(v, 0.0f, finite[i]);
        if (v > value[i] || (v == value[i] && at < index[i])) value[i] = v, index[i] = at;
    }

    // Over the lanes that see the same tokens, those of equal q.
    __device__ void agree() {
#pragma unroll
        for (int i = 0; i < SEEN; i++)
#pragma unroll
            for (int offset = 4; offset < 32; offset *= 2) {
                const float v = __shfl_xor_sync(0xffffffff, value[i], offset);
                const int at = __shfl_xor_sync(0xffffffff, index[i], offset);
                finite[i] += __shfl_xor_sync(0xffffffff, finite[i], offset);
                if (v > value[i] || (v == value[i] && at < index[i])) value[i] = v, index[i] = at;
            }
    }

    __device__ void share(float (*values)[TOKENS], int (*indices)[TOKENS]) const {
        if (threadIdx.x % 32 >= 4) return;
        for (int i = 0; i < SEEN; i++) {
            values[threadIdx.x / 32][seen_token(i)] = value[i] + finite[i];
            indices[threadIdx.x / 32][seen_token(i)] = index[i];
        }
    }
};

// Thread t does it for token t. NaN stays NaN.
__device__ inline void best_of_warps(float (*values)[TOKENS], int (*indices)[TOKENS], float* best_value,
                                     int* best_index) {
    float value = values[0][threadIdx.x];
    int index = indices[0][threadIdx.x];
    for (int w = 1; w < WARPS; w++) {
        const float v = values[w][threadIdx.x];
        const int at = indices[w][threadIdx.x];
        if (v != v || v > value || (v == value && at < index)) value = v, index = at;
    }
    *best_value = value;
    *best_index = index;
}
