// Generated from notebooks/18_fused_kernels.ipynb; edit there, then run: python tools/nb.py export

// RMSNorm inside the kernel that needs it: it commutes with the product, so the product does not wait for it.
//
// A residual row x is normalised as gain * x * r, with r = 1 / sqrt(mean(x * x) + eps). The kernel that writes x leaves
// hidden = gain * x * r_before, where r_before belongs to the norm before this one and only keeps the halfs in range,
// and the sum of squares of its 16 rows: squares[row tile][token]. The consumer adds those up, has r, and scales its
// sums by r / r_before. Within a block the lanes are tokens and the warps share the row tiles; fixed order.
#pragma once
#include "memory.cuh"

template <int Tokens, int Warps, int RowTiles> struct Norm {
    static const int LANES = Tokens < 32 ? Tokens : 32, OF_LANE = Tokens / LANES, SHARED = Warps * Tokens;
    static_assert(32 % LANES == 0 && Tokens % LANES == 0, "TOKENS must divide 32, or be a multiple of it");
    float sums[OF_LANE];

    // The token of this lane is `first` + lane % LANES, or that of the `count` entries of `rows` from there on; past
    // them, where `rows` may have ended, the last again.   stride: of a row of `squares`.
    __device__ void load(const float* squares, int stride, int first, const int* rows = nullptr, int count = 0) {
        const int lane = threadIdx.x % 32, groups = 32 / LANES;
#pragma unroll
        for (int i = 0; i < OF_LANE; i++) {
            const int number = lane % LANES + i * 32;
            const int token = rows ? rows[first + min(number, count - 1)] : first + number;
            sums[i] = 0;
#pragma unroll
            for (int start = 0; start < RowTiles; start += Warps * groups) {
                const int tile = start + threadIdx.x / 32 * groups + lane / LANES;
                if (tile < RowTiles) sums[i] += load_fresh(squares + tile * stride + token);
            }
        }
    }

    __device__ void share(float* partial) {
        const int lane = threadIdx.x % 32;
#pragma unroll
        for (int i = 0; i < OF_LANE; i++) {
#pragma unroll
            for (int offset = LANES; offset < 32; offset *= 2) sums[i] += __shfl_xor_sync(0xffffffff, sums[i], offset);
            if (lane < LANES) partial[threadIdx.x / 32 * Tokens + i * 32 + lane] = sums[i];
        }
    }

    // After __syncthreads: r of one token.
    static __device__ float inverse_rms(const float* partial, int token, float eps) {
        float total = 0;
#pragma unroll
        for (int w = 0; w < Warps; w++) total += partial[w * Tokens + token];
        return rsqrtf(total * (1.0f / (RowTiles * 16)) + eps);
    }
};
