// Generated from notebooks/16_quantised_weights.ipynb; edit there, then run: python tools/nb.py export

// Arithmetic on pairs of halfs that lie in an unsigned, as mma.cuh takes them. Any thread of a block may call these.
//
// The half with the lower index is in the low 16 bits. Every result is rounded once.
#pragma once
#include <cuda_fp16.h>

__device__ inline half2 as_halfs(unsigned pair) { return *(half2*)&pair; }
__device__ inline unsigned as_bits(half2 pair) { return *(unsigned*)&pair; }

__device__ inline unsigned subtract(unsigned a, unsigned b) { return as_bits(__hsub2(as_halfs(a), as_halfs(b))); }
__device__ inline unsigned multiply(unsigned a, unsigned b) { return as_bits(__hmul2(as_halfs(a), as_halfs(b))); }
__device__ inline unsigned multiply_add(unsigned a, unsigned b, unsigned c) {
    return as_bits(__hfma2(as_halfs(a), as_halfs(b), as_halfs(c)));
}

// One half of a pair, twice.
__device__ inline unsigned low_twice(unsigned pair) { return __byte_perm(pair, 0, 0x1010); }
__device__ inline unsigned high_twice(unsigned pair) { return __byte_perm(pair, 0, 0x3232); }
__device__ inline unsigned twice(float value) { return as_bits(__float2half2_rn(value)); }
