// Access patterns whose cost is known. 32 threads, one warp, unless said otherwise.

extern "C" __global__ void read_stride(const float* x, float* y, int stride) {
    y[threadIdx.x] = x[threadIdx.x * stride];
}
extern "C" __global__ void read_vector(const float4* x, float* y, int stride) {
    float4 v = x[threadIdx.x * stride];
    y[threadIdx.x] = v.x;
}
extern "C" __global__ void read_loop(const float* x, float* y, int n) {
    float sum = 0.0f;
    for (int i = threadIdx.x; i < n; i += blockDim.x) sum += x[i];
    y[blockIdx.x * blockDim.x + threadIdx.x] = sum;
}
// Half the lanes read nothing.
extern "C" __global__ void read_half_warp(const float* x, float* y, int n) {
    if (threadIdx.x % 32 < 16) y[threadIdx.x] = x[threadIdx.x];
}
extern "C" __global__ void shared_stride(float* y, int stride) {
    __shared__ float s[1024];
    for (int i = threadIdx.x; i < 1024; i += 32) s[i] = 1.0f;
    __syncthreads();
    y[threadIdx.x] = s[threadIdx.x * stride];
}
extern "C" __global__ void shared_vector(float4* y) {
    __shared__ float4 s[32];
    s[threadIdx.x] = make_float4(1, 2, 3, 4);
    __syncthreads();
    y[threadIdx.x] = s[31 - threadIdx.x];
}
// A column of a 32 x 32 tile with or without one float of padding.
template <int WIDTH> __device__ void transpose(const float* x, float* y) {
    __shared__ float tile[32][WIDTH];
    for (int r = 0; r < 32; r++) tile[r][threadIdx.x] = x[r * 32 + threadIdx.x];
    __syncthreads();
    for (int r = 0; r < 32; r++) y[r * 32 + threadIdx.x] = tile[threadIdx.x][r];
}
extern "C" __global__ void transpose_plain(const float* x, float* y) { transpose<32>(x, y); }
extern "C" __global__ void transpose_padded(const float* x, float* y) { transpose<33>(x, y); }
extern "C" __global__ void meet(float* y) {
    float v = __shfl_xor_sync(0xffffffffu, 1.0f, 1);
    __syncthreads();
    v += __any_sync(0xffffffffu, threadIdx.x == 0);
    __syncwarp();
    atomicAdd(y, v);
}
// More reads between two meeting points than a warp's table holds.
extern "C" __global__ void long_loop(const float* x, float* y, int n) {
    float sum = 0.0f;
    for (int i = 0; i < n; i++) sum += *(volatile const float*)&x[threadIdx.x];
    y[threadIdx.x] = sum;
}
