// One parameter of every kind.
#include "pair.cuh"

extern "C" __global__ void every_type(bool b, signed char c, unsigned char uc, short s, unsigned short us, int i,
                                      unsigned u, long long ll, unsigned long long ull, float f, double d,
                                      Pair pair, double* out) {
    double values[] = {(double)b, (double)c, (double)uc, (double)s, (double)us, (double)i, (double)u, (double)ll,
                       (double)ull, f, d, sum(pair)};
    for (int k = 0; k < 12; k++) out[k] = values[k];
}
extern "C" __global__ void copy(const float* __restrict__ x, float* y, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] = x[i];
}
extern "C" __global__ void pairs(const Pair* x, float4* y, const void* anything) { y[0].x = sum(x[0]); }
extern "C" __global__ void nothing() {}
/* extern "C" __global__ void commented_out() {} */
