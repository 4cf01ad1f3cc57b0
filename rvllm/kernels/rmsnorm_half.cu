// Generated from notebooks/20_prefill_and_the_loop.ipynb; edit there, then run: python tools/nb.py export

// Normalise float rows for the tensor cores: out[i] = half(x[r] / sqrt(mean of x[r]^2 + eps) * gain), r = rows[i].
//
// x float [.., WIDTH], gain float [WIDTH], rows int [..], out half [.., WIDTH]; num_rows int [1], read on the device.
// Macros: WIDTH, a multiple of 4; GATHER 1 takes row rows[i], GATHER 0 takes row i (rows is not read).
// Launch: a block of 128 threads for a row; the grid is a bucket, blocks from num_rows on do nothing.
// Faster than rmsnorm: 16-byte loads, and a row stays in registers between its sum and its product, so x is read once.
// Limit: memory bandwidth; 6 bytes an element.
#include "dependent.cuh"
#include "mma.cuh"
#include "warp.cuh"

static_assert(WIDTH > 0 && WIDTH % 4 == 0, "WIDTH must be a multiple of 4: loads of 16 bytes");
constexpr int THREADS = 128;
constexpr int QUADS = WIDTH / 4;                            // of four floats in a row
constexpr int OF_THREAD = (QUADS + THREADS - 1) / THREADS;  // how many of them a thread keeps, at most

extern "C" __global__ void __launch_bounds__(THREADS)
rmsnorm_half(const float* x, const float* gain, const int* rows, const int* num_rows, half* out, float eps) {
    let_next_kernel_start();
    wait_for_previous_kernel();
    if (blockIdx.x >= num_rows[0]) return;
    int row = GATHER ? rows[blockIdx.x] : blockIdx.x;
    const float4* from = (const float4*)(x + (long long)row * WIDTH);
    float4 kept[OF_THREAD];
    float sum = 0.0f;
#pragma unroll
    for (int n = 0; n < OF_THREAD; n++) {
        int i = threadIdx.x + n * THREADS;
        kept[n] = i < QUADS ? from[i] : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        sum += kept[n].x * kept[n].x + kept[n].y * kept[n].y + kept[n].z * kept[n].z + kept[n].w * kept[n].w;
    }
    float scale = rsqrtf(block_sum(sum) / WIDTH + eps);
    uint2* to = (uint2*)(out + (long long)blockIdx.x * WIDTH);
#pragma unroll
    for (int n = 0; n < OF_THREAD; n++) {
        int i = threadIdx.x + n * THREADS;
        if (i >= QUADS) break;
        float4 v = kept[n], g = ((const float4*)gain)[i];
        to[i] = make_uint2(pack(v.x * scale * g.x, v.y * scale * g.y), pack(v.z * scale * g.z, v.w * scale * g.w));
    }
}
