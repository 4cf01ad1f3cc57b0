// Generated from notebooks/07_reductions.ipynb; edit there, then run: python tools/nb.py export

// Softmax of rows, in place: x[r, i] = exp(x[r, i] - max) / sum of exp(x[r, j] - max).
//
// x float [rows, cols]; every row has at least one value above minus infinity.
// Launch: a block for a row, blockDim.x a multiple of 32.
// Three passes: maximum, exponentials and their sum, division. Threads without an element start from minus infinity,
// which NVRTC has no name for: it comes from its bit pattern.
// Faster than the shared-memory tree: two reductions by shuffles, with two barriers each.
// Limit: memory bandwidth, if rows are long; three readings and two writings, all but the first from the cache.
#include "warp.cuh"

extern "C" __global__ void softmax(float* x, int cols) {
    float* row = x + (long long)blockIdx.x * cols;
    float largest = __int_as_float(0xff800000);
    for (int i = threadIdx.x; i < cols; i += blockDim.x) largest = fmaxf(largest, row[i]);
    largest = block_max(largest);
    float sum = 0.0f;
    for (int i = threadIdx.x; i < cols; i += blockDim.x) {
        row[i] = expf(row[i] - largest);
        sum += row[i];
    }
    float inverse = 1.0f / block_sum(sum);
    for (int i = threadIdx.x; i < cols; i += blockDim.x) row[i] *= inverse;
}
