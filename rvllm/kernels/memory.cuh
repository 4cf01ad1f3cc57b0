// Generated from notebooks/16_quantised_weights.ipynb; edit there, then run: python tools/nb.py export

// Loads that say how often they are needed. A thread of any block may call them; addresses aligned to their size.
//
// load_once: weights and cache pages, read once: past the first cache. The asm is volatile and clobbers memory, or
//   ptxas sinks a load behind waits and barriers to its first use, and the latencies add up instead of overlapping.
// load_unsettled: the same, where the kernel before may just be writing some of the bytes and the caller does not use
//   those. The emulator has it ready: in check mode such bytes come as NaN.
// load_fresh: what another kernel wrote a moment ago: from the second cache, where all blocks see the same.
#pragma once

#ifdef CUDA_EMULATOR

// The emulator's own loads, by other names: its reports then show the line that loads, and not one of this file.
#define load_once __ldg
#define load_fresh __ldcg

#else

__device__ inline uint4 load_once(const uint4* p) {
    uint4 v;
    asm volatile("ld.global.L1::no_allocate.L2::128B.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p) : "memory");
    return v;
}

__device__ inline uint2 load_once(const uint2* p) {
    uint2 v;
    asm volatile("ld.global.L1::no_allocate.v2.u32 {%0,%1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(p) : "memory");
    return v;
}

__device__ inline unsigned load_once(const unsigned* p) {
    unsigned v;
    asm volatile("ld.global.L1::no_allocate.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
    return v;
}

__device__ inline uint4 load_fresh(const uint4* p) {
    uint4 v;
    asm volatile("ld.global.cg.v4.u32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p) : "memory");
    return v;
}

template <class T> __device__ inline T load_fresh(const T* p) { return __ldcg(p); }
template <class T> __device__ inline T load_unsettled(const T* p) { return load_once(p); }

#endif
