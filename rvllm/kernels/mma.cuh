// Generated from notebooks/16_quantised_weights.ipynb; edit there, then run: python tools/nb.py export

// A warp's tensor-core product, mma.sync m16n8k16: C[16 x 8] += A[16 x 16] B[16 x 8], halfs in, float sums.
//
// One warp of a block calls it together; which element lies in which lane, with g = lane / 4 and q = lane % 4:
//   A  a[0] row g, a[1] row g + 8, columns 2q and 2q + 1;  a[2], a[3] the same rows, columns 2q + 8 and 2q + 9
//   B  b[0] rows 2q and 2q + 1, b[1] rows 2q + 8 and 2q + 9, of column g
//   C  c[0], c[1] row g, columns 2q and 2q + 1;  c[2], c[3] row g + 8
// An unsigned holds two halfs, the one with the lower index in the low bits. sm_75 takes the 16 columns in two steps.
#pragma once
#include <cuda_fp16.h>

#ifdef CUDA_EMULATOR

__device__ inline float dot2(unsigned x, unsigned y) {
    float2 a = __half22float2(*(__half2*)&x), b = __half22float2(*(__half2*)&y);
    return a.x * b.x + a.y * b.y;
}

// The same product by shuffles: lanes 4g + t hold columns 2t, 2t + 1, 2t + 8 and 2t + 9 of row g.
__device__ inline void mma(float* c, const unsigned* a, const unsigned* b) {
    int g = threadIdx.x % 32 / 4, q = threadIdx.x % 4;
    for (int t = 0; t < 4; t++) {
        unsigned row[4];
        for (int i = 0; i < 4; i++) row[i] = __shfl_sync(0xffffffff, a[i], 4 * g + t);
        for (int n = 0; n < 2; n++) {
            unsigned low = __shfl_sync(0xffffffff, b[0], 4 * (2 * q + n) + t);
            unsigned high = __shfl_sync(0xffffffff, b[1], 4 * (2 * q + n) + t);
            c[n] += dot2(row[0], low) + dot2(row[2], high);
            c[n + 2] += dot2(row[1], low) + dot2(row[3], high);
        }
    }
}

#else

__device__ inline void mma(float* c, const unsigned* a, const unsigned* b) {
#if __CUDA_ARCH__ >= 800
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#else
    for (int k = 0; k < 2; k++)
        asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};"
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a[2 * k]), "r"(a[2 * k + 1]), "r"(b[k]));
#endif
}

#endif

__device__ inline unsigned pack(float low, float high) {  // two floats, rounded to halfs
    __half2 pair = __floats2half2_rn(low, high);
    return *(unsigned*)&pair;
}

// The bits of the first `count` halfs of a pair, as a mask; none where count is negative.
__device__ inline unsigned first_halfs(int count) { return count >= 2 ? 0xffffffff : count == 1 ? 0xffff : 0; }

// hi/lo: what rounding to halfs loses goes into a second pair; hi + lo is exact to about 2^-22.
__device__ inline void split(float low, float high, unsigned& hi, unsigned& lo) {
    hi = pack(low, high);
    float2 rounded = __half22float2(*(__half2*)&hi);
    lo = pack(low - rounded.x, high - rounded.y);
}
