// One value per line of the feature list, so that the shim's coverage is itself tested.
#include <cuda_fp16.h>
__constant__ float table[4] = {1.0f, 2.0f, 4.0f, 8.0f};
__device__ int counter;
template <int N> __device__ inline float block_max(float v) {             // a template with its own static shared array
    __shared__ float s[N];
    s[threadIdx.x] = v;
    __syncthreads();
    float m = s[0];
    for (int i = 1; i < N; i++) m = fmaxf(m, s[i]);
    __syncthreads();
    return m;
}
inline __device__ float other_shared(float v) { __shared__ float s[64]; s[threadIdx.x] = v; __syncwarp(); return s[threadIdx.x ^ 1]; }
extern "C" __global__ void __launch_bounds__(64) intrinsics(float* out, int* iout, unsigned* hist) {
    extern __shared__ __align__(16) unsigned char raw[];
    float4* q = reinterpret_cast<float4*>(raw);
    int t = threadIdx.x, lane = t % warpSize;
    float* o = out + t * 16; int* n = iout + t * 16;
    q[t] = make_float4(t, t + 1, t + 2, t + 3);
    __syncthreads();
    o[0] = q[63 - t].w;
    o[1] = __shfl_sync(0xffffffffu, (float)t, 5);
    o[2] = __shfl_down_sync(0xffffffffu, (float)t, 3, 16);
    o[3] = __shfl_up_sync(0xffffffffu, (float)t, 1);
    o[4] = __shfl_xor_sync(0xffffffffu, (float)t, 8);
    if (lane < 16) o[5] = __shfl_xor_sync(0x0000ffffu, (float)t, 1); else o[5] = __shfl_xor_sync(0xffff0000u, (float)t, 2);
    o[6] = block_max<64>((t * 37) % 64);
    o[7] = other_shared(t);
    half2 h = __floats2half2_rn(t * 0.1f, 1.0f / 3.0f); h = __hadd2(h, h); float2 f = __half22float2(h);
    o[8] = f.x; o[9] = f.y;
    o[10] = __half2float(__float2half(65520.0f));                          // rounds to infinity
    o[11] = __int_as_float(0xff800000) < -3e38f ? table[t % 4] : 0.0f;
    o[12] = (float)__shfl_sync(0xffffffffu, (double)t * 1.5, 31);
    n[0] = __ballot_sync(0xffffffffu, t % 3 == 0);
    n[1] = __syncthreads_count(t % 5 == 0);
    n[2] = __dp4a(0x7f80ff01, 0x02fe0304, 7);
    n[3] = __any_sync(0xffffffffu, lane == 7) + 2 * __all_sync(0xffffffffu, lane < 31);
    n[4] = __reduce_add_sync(0xffffffffu, t);
    n[5] = atomicAdd(&counter, 1) >= 0;
    n[6] = __popc(t) + __clz(t | 1);
    int4 v = *reinterpret_cast<const int4*>(&q[t]); n[7] = v.y;
    n[8] = __syncthreads_or(t == 63) + 2 * __syncthreads_and(t >= 0);
    atomicAdd(&hist[t % 4], 2u); atomicMax(&iout[64 * 16], t); atomicMin(&iout[64 * 16 + 1], t - 5);
    n[9] = max(t, 10) + min(3u, 7u);
}
extern "C" __global__ void bits_and_math(float* out, unsigned* n) {
    const unsigned a = 0x11223344u, b = 0x8899aabbu;
    n[0] = __byte_perm(a, b, 0x0123);
    n[1] = __byte_perm(a, b, 0x4567);
    n[2] = __byte_perm(a, b, 0x23f8);            // bit 3 of a selector: the sign of the byte
    n[3] = __popc(0x8000000fu);
    n[4] = __clz(0);
    n[5] = __clzll(0);
    n[6] = __ffs(0);
    n[7] = __ffs(12);
    n[8] = __umulhi(0xffffffffu, 0xffffffffu);
    n[9] = __brev(0x00112334u);
    n[10] = __funnelshift_l(b, a, 4);
    n[11] = __funnelshift_r(a, b, 8);
    n[12] = __dp4a(0xffffffffu, 0xffffffffu, 0u);
    n[13] = __float_as_uint(1.0f);
    n[14] = __float2int_rn(2.5f) + __float2int_rz(1.9f);
    n[15] = __float2int_rn(1.5f);
    out[0] = rsqrtf(4.0f);
    out[1] = __expf(1.0f);
    out[2] = __saturatef(3.0f);
    sincosf(0.5f, &out[3], &out[4]);
    out[5] = fmaf(2.0f, 3.0f, -5.0f);
}
extern "C" __global__ void atomics(unsigned* n, float* total, unsigned long long* big) {
    unsigned id = blockIdx.x * blockDim.x + threadIdx.x;
    atomicAdd(&n[0], 1u);
    atomicMax(&n[1], id);
    atomicMin(&n[2], id);
    atomicOr(&n[3], id);
    atomicAnd(&n[4], ~id);
    atomicInc(&n[5], 6u);
    if (id == 0) atomicExch(&n[6], 1u);
    for (unsigned seen = n[9]; ;) {               // the usual loop around compare and swap
        unsigned old = atomicCAS(&n[7], seen, seen + 1);
        if (old == seen) break;
        seen = old;
    }
    atomicSub(&n[8], 1u);
    atomicAdd(total, 0.5f);
    atomicAdd(big, 1ull << 33);
}
