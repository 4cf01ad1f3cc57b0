// Correct kernels that a careless checker would report. All take (x, y, n) as the kernels with bugs do.
#include <cuda_fp16.h>

extern "C" __global__ void tree(const float* x, float* y, int n) {
    __shared__ float s[64];
    s[threadIdx.x] = x[threadIdx.x];
    __syncthreads();
    for (int step = 32; step > 0; step >>= 1) {
        if (threadIdx.x < step) s[threadIdx.x] += s[threadIdx.x + step];
        __syncthreads();
    }
    if (threadIdx.x == 0) y[0] = s[0];
}
extern "C" __global__ void warp_tree(const float* x, float* y, int n) {
    __shared__ float s[64];
    int t = threadIdx.x;
    s[t] = x[t];
    __syncthreads();
    if (t < 32) {
        for (int step = 32; step > 0; step >>= 1) {
            float v = s[t] + s[t + step];
            __syncwarp();
            s[t] = v;
            __syncwarp();
        }
    }
    if (t == 0) y[0] = s[0];
}
extern "C" __global__ void shuffle_tree(const float* x, float* y, int n) {
    float v = x[threadIdx.x % 32] + x[threadIdx.x % 32 + 32];
    for (int o = 16; o; o >>= 1) v += __shfl_xor_sync(0xffffffffu, v, o);
    if (threadIdx.x == 0) y[0] = v;
}
// Shared memory is used again, for something else, in the next round.
extern "C" __global__ void reused_shared(const float* x, float* y, int n) {
    __shared__ float s[64];
    float sum = 0.0f;
    for (int round = 0; round < 3; round++) {
        s[threadIdx.x] = x[threadIdx.x] * round;
        __syncthreads();
        sum += s[63 - threadIdx.x];
        __syncthreads();
    }
    y[threadIdx.x] = sum;
}
// Neighbours write halves of one word; then each reads them as one vector.
extern "C" __global__ void halves(const float* x, float* y, int n) {
    __shared__ __align__(16) half s[64];
    s[threadIdx.x] = __float2half(x[threadIdx.x]);
    __syncthreads();
    half2 pair = reinterpret_cast<half2*>(s)[threadIdx.x / 2];
    y[threadIdx.x] = __low2float(pair) + __high2float(pair);
}
// The reverse: written as vectors, read as bytes.
extern "C" __global__ void bytes_of_vectors(const float* x, float* y, int n) {
    extern __shared__ __align__(16) unsigned char raw[];
    if (threadIdx.x < 4) reinterpret_cast<int4*>(raw)[threadIdx.x] = make_int4(1, 2, 3, 4);
    __syncthreads();
    y[threadIdx.x] = raw[threadIdx.x];
}
struct Pair { float a, b, c, d; };  // 16 bytes, but aligned to 4 only
extern "C" __global__ void unaligned_struct(const float* x, float* y, int n) {
    Pair* to = reinterpret_cast<Pair*>(y + 1);
    const Pair* from = reinterpret_cast<const Pair*>(x + 3);
    if (threadIdx.x == 0) *to = *from;
}
extern "C" __global__ void warps_leave_early(const float* x, float* y, int n) {
    if (threadIdx.x >= 32) return;
    y[threadIdx.x] = __shfl_sync(0xffffffffu, x[threadIdx.x], 3);
}
// Blocks read what no block writes, and write what no other block touches.
extern "C" __global__ void independent_blocks(const float* x, float* y, int n) {
    if (threadIdx.x == 0) y[blockIdx.x] = x[0] + x[63];
}
extern "C" __global__ void atomic_sum(const float* x, float* y, int n) {
    __shared__ int total;
    if (threadIdx.x == 0) total = 0;
    __syncthreads();
    atomicAdd(&total, (int)x[threadIdx.x]);
    __syncthreads();
    if (threadIdx.x == 0) atomicAdd(&y[0], (float)total);
}
// The last block to finish adds up what all have left in y. Right, but only the atomic counter says so.
extern "C" __global__ void last_block(const float* x, float* y, int n) {
    __shared__ bool last;
    if (threadIdx.x == 0) {
        y[blockIdx.x] = x[blockIdx.x];
        __threadfence();
        last = atomicAdd(&y[63], 1.0f) == gridDim.x - 1;
    }
    __syncthreads();
    if (last && threadIdx.x == 0) {
        float sum = 0.0f;
        for (int i = 0; i < gridDim.x; i++) sum += y[i];
        y[62] = sum;
    }
}
// A local array lives on the thread's stack, which nobody else may touch, and a barrier in between.
extern "C" __global__ void local_array(const float* x, float* y, int n) {
    float mine[16];
    for (int i = 0; i < 16; i++) mine[i] = x[(threadIdx.x + i) % 64];
    __syncthreads();
    float sum = 0.0f;
    for (int i = 0; i < 16; i++) sum += mine[(i * 5 + n) % 16];
    y[threadIdx.x] = sum;
}
