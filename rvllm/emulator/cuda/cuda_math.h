// cuda_math.h - device math and bit intrinsics on the host's own. Functions that a GPU only approximates
// (__expf, rsqrtf, ...) are exact here: compare results with a tolerance.
#pragma once
#include <cfloat>
#include <climits>
#include <cmath>
#include <cstdint>
#include <type_traits>
#include "cuda_half.h"

inline int __float_as_int(float f) { return emu::bit_cast<int>(f); }
inline unsigned __float_as_uint(float f) { return emu::bit_cast<unsigned>(f); }
inline float __int_as_float(int i) { return emu::bit_cast<float>(i); }
inline float __uint_as_float(unsigned i) { return emu::bit_cast<float>(i); }
inline long long __double_as_longlong(double d) { return emu::bit_cast<long long>(d); }
inline double __longlong_as_double(long long i) { return emu::bit_cast<double>(i); }

// Newer C libraries declare functions of these names themselves; a macro cannot clash with a declaration.
namespace emu {
inline float reciprocal_sqrt(float x) { return 1.0f / sqrtf(x); }
inline double reciprocal_sqrt(double x) { return 1.0 / sqrt(x); }
inline float sin_pi(float x) { return (float)sin(M_PI * std::remainder(x, 2.0f)); }
inline float cos_pi(float x) { return (float)cos(M_PI * std::remainder(x, 2.0f)); }
}  // namespace emu
#define rsqrtf(x) emu::reciprocal_sqrt((float)(x))
#define rsqrt(x) emu::reciprocal_sqrt((double)(x))
#define sinpif(x) emu::sin_pi(x)
#define cospif(x) emu::cos_pi(x)

inline float __frsqrt_rn(float x) { return 1.0f / sqrtf(x); }
inline float __fsqrt_rn(float x) { return sqrtf(x); }
inline float __frcp_rn(float x) { return 1.0f / x; }
inline float __expf(float x) { return expf(x); }
inline float __exp10f(float x) { return powf(10.0f, x); }
inline float __logf(float x) { return logf(x); }
inline float __log2f(float x) { return log2f(x); }
inline float __log10f(float x) { return log10f(x); }
inline float __sinf(float x) { return sinf(x); }
inline float __cosf(float x) { return cosf(x); }
inline float __tanf(float x) { return tanf(x); }
inline void __sincosf(float x, float* s, float* c) { *s = sinf(x); *c = cosf(x); }
inline float __powf(float x, float y) { return powf(x, y); }
inline float __fdividef(float x, float y) { return x / y; }
inline float __fdiv_rn(float x, float y) { return x / y; }
inline float __fadd_rn(float x, float y) { return x + y; }
inline float __fsub_rn(float x, float y) { return x - y; }
inline float __fmul_rn(float x, float y) { return x * y; }
inline float __fmaf_rn(float x, float y, float z) { return fmaf(x, y, z); }
inline float __saturatef(float x) { return fminf(fmaxf(x, 0.0f), 1.0f); }
inline int __float2int_rn(float x) { return (int)rintf(x); }
inline int __float2int_rz(float x) { return (int)x; }
inline int __float2int_rd(float x) { return (int)floorf(x); }
inline int __float2int_ru(float x) { return (int)ceilf(x); }
inline unsigned __float2uint_rn(float x) { return (unsigned)rintf(x); }
inline float __int2float_rn(int x) { return (float)x; }
inline float __uint2float_rn(unsigned x) { return (float)x; }

inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
inline int __clz(int x) { return x ? __builtin_clz(x) : 32; }
inline int __clzll(long long x) { return x ? __builtin_clzll(x) : 64; }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __ffsll(long long x) { return __builtin_ffsll(x); }
inline int __mulhi(int a, int b) { return (int)((long long)a * b >> 32); }
inline unsigned __umulhi(unsigned a, unsigned b) { return (unsigned)((unsigned long long)a * b >> 32); }
inline unsigned __brev(unsigned x) {
  unsigned reversed = 0;
  for (int i = 0; i < 32; i++) reversed |= (x >> i & 1) << (31 - i);
  return reversed;
}
inline unsigned __funnelshift_l(unsigned low, unsigned high, unsigned shift) {
  return (unsigned)((((unsigned long long)high << 32 | low) << (shift & 31)) >> 32);
}
inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned shift) {
  return (unsigned)(((unsigned long long)high << 32 | low) >> (shift & 31));
}

// Four bytes chosen from the eight of b:a. Bit 3 of a selector asks for the byte's sign instead of the byte.
inline unsigned __byte_perm(unsigned a, unsigned b, unsigned selectors) {
  const unsigned long long bytes = (unsigned long long)b << 32 | a;
  unsigned result = 0;
  for (int i = 0; i < 4; i++) {
    const unsigned selector = selectors >> 4 * i & 15;
    unsigned byte = bytes >> (selector & 7) * 8 & 255;
    if (selector & 8) byte = byte & 128 ? 255 : 0;
    result |= byte << 8 * i;
  }
  return result;
}
inline int __dp4a(int a, int b, int sum) {
  for (int i = 0; i < 4; i++) sum += (int8_t)(a >> 8 * i) * (int8_t)(b >> 8 * i);
  return sum;
}
inline unsigned __dp4a(unsigned a, unsigned b, unsigned sum) {
  for (int i = 0; i < 4; i++) sum += (uint8_t)(a >> 8 * i) * (uint8_t)(b >> 8 * i);
  return sum;
}

// By value, not by reference as std::max: taking a reference would force a local into (checked) memory.
template <class A, class B>
inline std::common_type_t<A, B> max(A a, B b) {
  typedef std::common_type_t<A, B> C;
  if constexpr (std::is_floating_point_v<C>) return std::fmax((C)a, (C)b);  // a NaN loses, as on the GPU
  else return (C)a > (C)b ? (C)a : (C)b;
}
template <class A, class B>
inline std::common_type_t<A, B> min(A a, B b) {
  typedef std::common_type_t<A, B> C;
  if constexpr (std::is_floating_point_v<C>) return std::fmin((C)a, (C)b);
  else return (C)a < (C)b ? (C)a : (C)b;
}
