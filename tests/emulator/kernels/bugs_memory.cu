// Kernels with one memory bug each, on the line marked BUG. x and y hold 64 floats.

extern "C" __global__ void read_past_end(const float* x, float* y, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    y[i < n ? i : 0] = x[i];  // BUG
}
extern "C" __global__ void write_past_end(const float* x, float* y, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i <= n)
        y[i] = 1.0f;  // BUG
}
extern "C" __global__ void read_before_start(const float* x, float* y, int n) {
    int i = threadIdx.x;
    y[i] = x[i] - x[i - 1];  // BUG
}
extern "C" __global__ void atomic_past_end(const float* x, float* y, int n) {
    if (threadIdx.x == 5)
        atomicAdd(&y[n], 1.0f);  // BUG
}
extern "C" __global__ void static_shared_index(const float* x, float* y, int n) {
    __shared__ float a[32];
    __shared__ float b[32];
    if (threadIdx.x < 32) b[threadIdx.x] = 0.0f;
    a[threadIdx.x] = x[threadIdx.x];  // BUG
    y[threadIdx.x] = a[threadIdx.x];
}
extern "C" __global__ void static_shared_pointer(const float* x, float* y, int n) {
    __shared__ float a[32];
    float* p = a + n;
    p[threadIdx.x * 4096] = x[0];  // BUG
    y[threadIdx.x] = a[0];
}
extern "C" __global__ void dynamic_shared_index(const float* x, float* y, int n) {
    extern __shared__ __align__(16) float s[];
    s[threadIdx.x] = x[threadIdx.x];  // BUG
    y[threadIdx.x] = s[threadIdx.x];
}
extern "C" __global__ void dynamic_shared_before(const float* x, float* y, int n) {
    extern __shared__ float s[];
    s[threadIdx.x] = x[threadIdx.x];
    y[threadIdx.x] = (s - n)[threadIdx.x];  // BUG
}
extern "C" __global__ void misaligned_vector(const float* x, float* y, int n) {
    float4 v = *reinterpret_cast<const float4*>(x + threadIdx.x);  // BUG
    y[threadIdx.x] = v.x + v.w;
}
extern "C" __global__ void unset_shared(const float* x, float* y, int n) {
    __shared__ float s[64];
    if (threadIdx.x < 32) s[threadIdx.x] = x[threadIdx.x];
    __syncthreads();
    y[threadIdx.x] = s[threadIdx.x];  // BUG
}
extern "C" __global__ void null_pointer(const float* x, float* y, int n) {
    y[threadIdx.x] = x[threadIdx.x];  // BUG
}
extern "C" __global__ void wild_pointer(const float* x, float* y, int n) {
    y[threadIdx.x] = x[1ll << 40];  // BUG
}
extern "C" __global__ void read_only(const float* x, float* y, int n) {
    const_cast<float*>(x)[threadIdx.x] = 0;  // BUG
}
extern "C" __global__ void through_ldg(const float* x, float* y, int n) {
    float value = 0.0f;
    value += __ldg(&x[threadIdx.x + n]);  // BUG
    y[threadIdx.x] = value;
}
__device__ __forceinline__ float helper(const float* p, int i) {
    return p[i];  // BUG in_helper
}
extern "C" __global__ void in_helper(const float* x, float* y, int n) {
    y[threadIdx.x] = helper(x, threadIdx.x + n);
}
