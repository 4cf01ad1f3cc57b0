// Generated from notebooks/16_quantised_weights.ipynb; edit there, then run: python tools/nb.py export

// Activations as the tensor cores take them: halfs, as one row or as two whose sum is almost exact.
//
// x float [N][columns] -> HI_LO 0: out half [N][columns];   HI_LO 1: out half [2N][columns]: row 2n is the rounded
// value of token n, row 2n + 1 what the rounding lost. Everything is multiplied by `factor` first, a power of two that
// keeps it below 65,504, the largest half: the product divides its sums by it again. counts[0] = N; columns in fours.
// Launch: one thread for four values, any block size; the grid may be larger.
// Loads of 16 bytes and stores of 8, neighbours side by side.
// Limit: memory bandwidth; 8 bytes a value with HI_LO, 6 without.
#include "dependent.cuh"
#include "memory.cuh"
#include "mma.cuh"

static_assert(HI_LO == 0 || HI_LO == 1, "HI_LO must be 0 or 1: rows of a token beyond the first");

extern "C" __global__ void activations(const float* x, half* out, const int* counts, int columns, float factor) {
    let_next_kernel_start();
    int fours = columns / 4, i = blockIdx.x * blockDim.x + threadIdx.x, token = i / fours;
    wait_for_previous_kernel();
    if (token >= counts[0]) return;
    float4 v = load_fresh((const float4*)x + i);
    uint2 high, low;
    split(v.x * factor, v.y * factor, high.x, low.x);
    split(v.z * factor, v.w * factor, high.y, low.y);
    uint2* row = (uint2*)out + (size_t)token * fours * (HI_LO + 1) + i % fours;
    row[0] = high;
    if (HI_LO) row[fours] = low;
}
