// Generated from notebooks/20_prefill_and_the_loop.ipynb; edit there, then run: python tools/nb.py export

// The middle of the feed-forward network: act = silu(gate) * up / 16, where silu(x) = x / (1 + exp(-x)).
//
// gate_up half [N, 2 * width], a row holds 8 gates, their 8 ups, the next 8 gates and so on, as the tiles of gate_up
// have it, each divided by 16; act half [N, width]; width a multiple of 8.
// counts int [2] = {N, B}, read on the device.
// Launch: one thread for 8 columns of a row, any block size; the grid covers the bucket of rows, the rest does nothing.
// Dividing by 16 keeps gate, up and act inside half, which ends at 65,504; the product before divides, the one after
// multiplies, which costs nothing. What gate_up.cu can compute of a short step, this can of a long one.
// A thread moves 16 bytes by one instruction: eight times fewer loads and index computations than one by one.
// Limit: memory bandwidth; 6 bytes an element of act.
#include "dependent.cuh"
#include "mma.cuh"

__device__ inline unsigned silu_mul_pair(unsigned gate, unsigned up) {
    float2 g = __half22float2(*(__half2*)&gate);
    float2 u = __half22float2(*(__half2*)&up);
    float low = 16.0f * g.x / (1.0f + __expf(-16.0f * g.x)) * u.x;
    float high = 16.0f * g.y / (1.0f + __expf(-16.0f * g.y)) * u.y;
    return pack(low, high);
}

extern "C" __global__ void silu_mul_half(const half* gate_up, half* act, const int* counts, int width) {
    let_next_kernel_start();
    wait_for_previous_kernel();
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    int octets = width / 8;
    int row = i / octets;
    if (row >= counts[0]) return;
    const uint4* gates = (const uint4*)gate_up + 2 * (long long)i;
    uint4 g = gates[0], u = gates[1];
    uint4 result;
    result.x = silu_mul_pair(g.x, u.x);
    result.y = silu_mul_pair(g.y, u.y);
    result.z = silu_mul_pair(g.z, u.z);
    result.w = silu_mul_pair(g.w, u.w);
    ((uint4*)act)[i] = result;
}
