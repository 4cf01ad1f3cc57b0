// Kernels whose threads part ways, or never end. The line marked BUG is the one reported.

extern "C" __global__ void return_before_barrier(const float* x, float* y, int n) {
    __shared__ float s[64];
    if (threadIdx.x >= n) return;
    s[threadIdx.x] = x[threadIdx.x];
    __syncthreads();  // BUG
    y[threadIdx.x] = s[0];
}
extern "C" __global__ void barrier_after_return(const float* x, float* y, int n) {
    if (threadIdx.x < n) return;
    __syncthreads();  // BUG
    y[threadIdx.x] = x[0];
}
extern "C" __global__ void two_barriers(const float* x, float* y, int n) {
    if (threadIdx.x < n)
        __syncthreads();
    else
        __syncthreads();  // BUG
    y[threadIdx.x] = x[threadIdx.x];
}
extern "C" __global__ void divergent_shuffle(const float* x, float* y, int n) {
    float v = x[threadIdx.x];
    if (threadIdx.x < n) v += __shfl_xor_sync(0xffffffffu, v, 1);  // BUG
    y[threadIdx.x] = v;
}
extern "C" __global__ void shuffle_of_partial_warp(const float* x, float* y, int n) {  // launched with 48 threads
    float v = x[threadIdx.x];
    for (int o = 16; o; o >>= 1) v += __shfl_down_sync(0xffffffffu, v, o);  // BUG
    y[threadIdx.x] = v;
}
extern "C" __global__ void different_masks(const float* x, float* y, int n) {
    unsigned mask = threadIdx.x < 16 ? 0xffffffffu : 0xffff0000u | 1;
    y[threadIdx.x] = __ballot_sync(mask, 1);  // BUG
}
extern "C" __global__ void not_in_own_mask(const float* x, float* y, int n) {
    y[threadIdx.x] = __ballot_sync(0x0000ffffu, 1);  // BUG
}
extern "C" __global__ void endless(const float* x, float* y, int n) {
    while (*(volatile const float*)x < 100.0f) {  // BUG
    }
}
extern "C" __global__ void endless_spin(const float* x, float* y, int n) {
    while (atomicAdd(&y[0], 0.0f) < 1.0f) {  // BUG
    }
}
struct Large { volatile float a[40000]; };
extern "C" __global__ void stack_overflow(const float* x, float* y, int n) {  // BUG
    Large large;
    for (int i = n; i-- > 0;) large.a[i] = x[0];
    y[0] = large.a[n - 1];
}
extern "C" __global__ void division_by_zero(const float* x, float* y, int n) {
    y[threadIdx.x] = 10 / n;  // BUG
}
extern "C" __global__ void assertion(const float* x, float* y, int n) {
    assert(threadIdx.x < 7);  // BUG
    y[threadIdx.x] = 0.0f;
}
extern "C" __global__ void trap(const float* x, float* y, int n) {
    if (threadIdx.y == 2) __trap();  // BUG
}
