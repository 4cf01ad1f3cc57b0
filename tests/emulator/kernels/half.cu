// Conversions and arithmetic of half and bfloat16, one element a thread.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#define INDEX (blockIdx.x * blockDim.x + threadIdx.x)

extern "C" __global__ void half_to_float(const half* x, float* y, int n) {
    if (INDEX < n) y[INDEX] = __half2float(x[INDEX]);
}
extern "C" __global__ void float_to_half(const float* x, half* y, int n) {
    if (INDEX < n) y[INDEX] = __float2half(x[INDEX]);
}
extern "C" __global__ void double_to_half(const double* x, half* y, int n) {
    if (INDEX < n) y[INDEX] = __double2half(x[INDEX]);
}
extern "C" __global__ void bfloat_to_float(const nv_bfloat16* x, float* y, int n) {
    if (INDEX < n) y[INDEX] = __bfloat162float(x[INDEX]);
}
extern "C" __global__ void float_to_bfloat(const float* x, nv_bfloat16* y, int n) {
    if (INDEX < n) y[INDEX] = __float2bfloat16(x[INDEX]);
}
// y[op][i] for the operations + - * / and fused multiply-add with c
extern "C" __global__ void arithmetic(const half* a, const half* b, const half* c, half* y, int n) {
    int i = INDEX;
    if (i >= n) return;
    y[i] = a[i] + b[i];
    y[n + i] = __hsub(a[i], b[i]);
    y[2 * n + i] = __hmul(a[i], b[i]);
    y[3 * n + i] = __hdiv(a[i], b[i]);
    y[4 * n + i] = __hfma(a[i], b[i], c[i]);
    y[5 * n + i] = -a[i];
    y[6 * n + i] = __hlt(a[i], b[i]) ? __hmax(a[i], b[i]) : __hmin(a[i], b[i]);
    half2 pair = __hmul2(__halves2half2(a[i], b[i]), __half2half2(c[i]));
    y[7 * n + i] = __hadd(__low2half(pair), __high2half(pair));
}
extern "C" __global__ void scalars(float* y, half h, nv_bfloat16 b, int n) {
    y[0] = h;
    y[1] = b;
    y[2] = half(n);
}
