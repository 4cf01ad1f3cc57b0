// Generated from notebooks/07_reductions.ipynb; edit there, then run: python tools/nb.py export

// Normalise rows: out[r, i] = x[r, i] / sqrt(mean of x[r]^2 + eps) * weight[i].
//
// x, out float [rows, dim], weight float [dim].
// Launch: a block for a row, blockDim.x a multiple of 32.
// Faster than the shared-memory tree: a warp sums by shuffles, so a row needs two barriers and not nine.
// Limit: memory bandwidth; 8 bytes an element (the second reading of x comes from the cache).
#include "warp.cuh"

extern "C" __global__ void rmsnorm(const float* x, const float* weight, float* out, int dim, float eps) {
    const float* row = x + (long long)blockIdx.x * dim;
    float sum = 0.0f;
    for (int i = threadIdx.x; i < dim; i += blockDim.x) sum += row[i] * row[i];
    float scale = rsqrtf(block_sum(sum) / dim + eps);
    for (int i = threadIdx.x; i < dim; i += blockDim.x) out[(long long)blockIdx.x * dim + i] = row[i] * scale * weight[i];
}
