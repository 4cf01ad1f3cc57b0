// Generated from notebooks/07_reductions.ipynb; edit there, then run: python tools/nb.py export

// Sums and maxima over the threads of a block, by warp shuffles.
//
// A warp of 32 threads adds its values in five steps without shared memory or barriers; then one value for each warp
// goes through shared memory, and every thread adds those up itself: two barriers, whatever the block size.
// Every thread of the block must call these. blockDim.x must be a multiple of 32, up to 1,024.
#pragma once

__device__ inline float warp_sum(float v) {
    for (int distance = 16; distance > 0; distance /= 2) v += __shfl_xor_sync(0xffffffff, v, distance);
    return v;
}

__device__ inline float warp_max(float v) {
    for (int distance = 16; distance > 0; distance /= 2) v = fmaxf(v, __shfl_xor_sync(0xffffffff, v, distance));
    return v;
}

__device__ inline float block_sum(float v) {
    __shared__ float of_warp[32];
    v = warp_sum(v);
    __syncthreads();  // the values of an earlier call have been read
    if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = v;
    __syncthreads();
    float total = 0.0f;
    for (int w = 0; w < blockDim.x / 32; w++) total += of_warp[w];
    return total;
}

__device__ inline float block_max(float v) {
    __shared__ float of_warp[32];
    v = warp_max(v);
    __syncthreads();
    if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = v;
    __syncthreads();
    float largest = of_warp[0];
    for (int w = 1; w < blockDim.x / 32; w++) largest = fmaxf(largest, of_warp[w]);
    return largest;
}
