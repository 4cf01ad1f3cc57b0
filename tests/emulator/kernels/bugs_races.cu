// Kernels with one race each. The line marked BUG is that of the later of the two accesses, in the order in which the
// emulator runs the threads: ascending from the start, but at a barrier the last to arrive goes on first.

// A barrier is missing between writing s and reading the neighbour's element.
extern "C" __global__ void no_barrier(const float* x, float* y, int n) {
    __shared__ float s[64];
    s[threadIdx.x] = 0.0f;
    __syncthreads();
    s[threadIdx.x] = x[threadIdx.x];  // BUG
    y[threadIdx.x] = s[63 - threadIdx.x];
}
// The barrier inside the tree is missing.
extern "C" __global__ void tree_without_barrier(const float* x, float* y, int n) {
    __shared__ float s[64];
    s[threadIdx.x] = x[threadIdx.x];
    __syncthreads();
    for (int step = 32; step > 0; step >>= 1)
        if (threadIdx.x < step)
            s[threadIdx.x] += s[threadIdx.x + step];  // BUG
    if (threadIdx.x == 0) y[0] = s[0];
}
// Warp reduction as written before Volta: it counts on lanes that move in step.
extern "C" __global__ void no_syncwarp(const float* x, float* y, int n) {
    __shared__ float s[64];
    volatile float* v = s;
    int t = threadIdx.x;
    s[t] = x[t];
    __syncthreads();
    if (t < 32) {
        v[t] += v[t + 32];  // BUG
        v[t] += v[t + 16];
    }
    if (t == 0) y[0] = s[0];
}
extern "C" __global__ void between_blocks(const float* x, float* y, int n) {
    y[threadIdx.x] += x[threadIdx.x];  // BUG
}
extern "C" __global__ void within_block(const float* x, float* y, int n) {
    y[threadIdx.x / 2] = x[threadIdx.x];  // BUG
}
// The counter is atomic, but each thread reads it as if nobody else were there.
extern "C" __global__ void plain_read_of_atomic(const float* x, float* y, int n) {
    atomicAdd(&y[0], 1.0f);  // BUG
    y[1 + threadIdx.x] = y[0];
}
// Written as bytes: the second byte of a word is not the first, but two threads meet in it.
extern "C" __global__ void bytes(const float* x, float* y, int n) {
    __shared__ unsigned char s[64];
    s[threadIdx.x] = 1;  // BUG
    s[threadIdx.x ^ 1] = 2;
    __syncthreads();
    y[threadIdx.x] = s[threadIdx.x];
}
