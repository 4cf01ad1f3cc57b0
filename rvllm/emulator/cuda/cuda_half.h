// cuda_half.h - half and bfloat16: sixteen bits in memory, each operation done in float and rounded once.
//
// The types are our own because g++ knows _Float16 in C++ only from version 13 on (12 on some targets). One
// float operation followed by one rounding gives the correctly rounded half for + - * / and sqrt: float has
// 24 bits of precision, at least twice half's 11 plus 2, and then the two roundings cannot disagree with a
// single one.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include "cuda_vectors.h"

namespace emu {

template <class To, class From>
inline To bit_cast(From from) {
  static_assert(sizeof(To) == sizeof(From), "a bit cast keeps the size");
  To to;
  memcpy(&to, &from, sizeof to);
  return to;
}

#if defined(__F16C__)
// The instructions' builtins instead of <immintrin.h>, which would take most of the time to compile a kernel.
typedef float Floats __attribute__((vector_size(16)));
typedef short Halves __attribute__((vector_size(16)));
constexpr int TO_NEAREST_EVEN = 0;
inline uint16_t half_bits(float f) { return __builtin_ia32_vcvtps2ph(Floats{f}, TO_NEAREST_EVEN)[0]; }
inline float half_value(uint16_t bits) { return __builtin_ia32_vcvtph2ps(Halves{(short)bits})[0]; }
#else
// Round to nearest even in integers. Float arithmetic is used once, for results below the smallest normal
// half: adding 0.5 makes the adder itself shift the value to multiples of 2^-24 and round it to nearest even.
inline uint16_t half_bits(float f) {
  const uint32_t bits = bit_cast<uint32_t>(f), sign = bits >> 16 & 0x8000, magnitude = bits & 0x7fffffff;
  if (magnitude > 0x7f800000) return sign | 0x7e00 | (magnitude >> 13 & 0x3ff);  // NaN, made quiet
  if (magnitude >= 0x47800000) return sign | 0x7c00;                             // 65536 and above: infinity
  if (magnitude < 0x38800000)                                                    // below 2^-14
    return sign | (bit_cast<uint32_t>(bit_cast<float>(magnitude) + 0.5f) - 0x3f000000);
  const uint32_t rebased = magnitude - (112u << 23);  // exponent bias 127 becomes 15
  return sign | (rebased + 0xfff + (rebased >> 13 & 1)) >> 13;  // a carry into infinity is right
}
inline float half_value(uint16_t bits) {
  const uint32_t sign = (bits & 0x8000u) << 16, exponent = bits >> 10 & 31, fraction = bits & 0x3ff;
  if (exponent == 31) return bit_cast<float>(sign | 0x7f800000 | fraction << 13 | (fraction ? 0x400000 : 0));
  if (exponent == 0) return bit_cast<float>(sign | bit_cast<uint32_t>(fraction * 0x1p-24f));
  return bit_cast<float>(sign | (exponent + 112) << 23 | fraction << 13);
}
#endif

// Narrows to float rounding to odd: an inexact result gets its last bit set, so that a second rounding to
// fewer bits sees that it was inexact and never takes it for a tie.
inline float round_to_odd(double d) {
  const float f = (float)d;
  if ((double)f == d || f != f || std::isinf(d)) return f;
  uint32_t bits = bit_cast<uint32_t>(f);
  if (std::fabs((double)f) > std::fabs(d)) bits--;  // back to the neighbour towards zero
  return bit_cast<float>(bits | 1);
}

inline uint16_t bfloat_bits(float f) {
  if (f != f) return 0x7fff;
  const uint32_t bits = bit_cast<uint32_t>(f);
  return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
inline float bfloat_value(uint16_t bits) { return bit_cast<float>((uint32_t)bits << 16); }

}  // namespace emu

struct __half {
  uint16_t bits;
  __half() = default;
  __half(float f) : bits(emu::half_bits(f)) {}
  __half(double d) : bits(emu::half_bits(emu::round_to_odd(d))) {}
  template <class Int, class = std::enable_if_t<std::is_integral_v<Int>>> __half(Int i) : __half((double)i) {}
  operator float() const { return emu::half_value(bits); }
};
struct __nv_bfloat16 {
  uint16_t bits;
  __nv_bfloat16() = default;
  __nv_bfloat16(float f) : bits(emu::bfloat_bits(f)) {}
  __nv_bfloat16(double d) : bits(emu::bfloat_bits(emu::round_to_odd(d))) {}
  template <class Int, class = std::enable_if_t<std::is_integral_v<Int>>> __nv_bfloat16(Int i)
      : __nv_bfloat16((double)i) {}
  operator float() const { return emu::bfloat_value(bits); }
};
struct alignas(4) __half2 { __half x, y; };
struct alignas(4) __nv_bfloat162 { __nv_bfloat16 x, y; };
typedef __half half;
typedef __half2 half2;
typedef __nv_bfloat16 nv_bfloat16;
typedef __nv_bfloat162 nv_bfloat162;

// What half and bfloat16 have in common, once for each.
#define EMU_SMALL_FLOAT(H, H2)                                                                       \
  inline H operator+(H a, H b) { return (float)a + (float)b; }                                       \
  inline H operator-(H a, H b) { return (float)a - (float)b; }                                       \
  inline H operator*(H a, H b) { return (float)a * (float)b; }                                       \
  inline H operator/(H a, H b) { return (float)a / (float)b; }                                       \
  inline H operator-(H a) { a.bits ^= 0x8000; return a; }                                            \
  inline H& operator+=(H& a, H b) { return a = a + b; }                                              \
  inline H& operator-=(H& a, H b) { return a = a - b; }                                              \
  inline H& operator*=(H& a, H b) { return a = a * b; }                                              \
  inline H& operator/=(H& a, H b) { return a = a / b; }                                              \
  inline H2 operator+(H2 a, H2 b) { return {a.x + b.x, a.y + b.y}; }                                 \
  inline H2 operator-(H2 a, H2 b) { return {a.x - b.x, a.y - b.y}; }                                 \
  inline H2 operator*(H2 a, H2 b) { return {a.x * b.x, a.y * b.y}; }                                 \
  inline H2 operator/(H2 a, H2 b) { return {a.x / b.x, a.y / b.y}; }                                 \
  inline H __hadd(H a, H b) { return a + b; }                                                        \
  inline H __hsub(H a, H b) { return a - b; }                                                        \
  inline H __hmul(H a, H b) { return a * b; }                                                        \
  inline H __hdiv(H a, H b) { return a / b; }                                                        \
  inline H __hneg(H a) { return -a; }                                                                \
  inline H __habs(H a) { a.bits &= 0x7fff; return a; }                                               \
  inline H __hmax(H a, H b) { return fmaxf(a, b); }                                                  \
  inline H __hmin(H a, H b) { return fminf(a, b); }                                                  \
  inline H __hfma(H a, H b, H c) { return std::fma((double)(float)a, (double)(float)b, (double)(float)c); } \
  inline bool __heq(H a, H b) { return (float)a == (float)b; }                                       \
  inline bool __hne(H a, H b) { return (float)a != (float)b; }                                       \
  inline bool __hlt(H a, H b) { return (float)a < (float)b; }                                        \
  inline bool __hle(H a, H b) { return (float)a <= (float)b; }                                       \
  inline bool __hgt(H a, H b) { return (float)a > (float)b; }                                        \
  inline bool __hge(H a, H b) { return (float)a >= (float)b; }                                       \
  inline bool __hisnan(H a) { return std::isnan((float)a); }                                         \
  inline H hexp(H a) { return expf(a); }                                                             \
  inline H hlog(H a) { return logf(a); }                                                             \
  inline H hsqrt(H a) { return sqrtf(a); }                                                           \
  inline H hrsqrt(H a) { return 1.0 / std::sqrt((double)(float)a); }                                 \
  inline H2 __hadd2(H2 a, H2 b) { return a + b; }                                                    \
  inline H2 __hsub2(H2 a, H2 b) { return a - b; }                                                    \
  inline H2 __hmul2(H2 a, H2 b) { return a * b; }                                                    \
  inline H2 __hmax2(H2 a, H2 b) { return {__hmax(a.x, b.x), __hmax(a.y, b.y)}; }                     \
  inline H2 __hmin2(H2 a, H2 b) { return {__hmin(a.x, b.x), __hmin(a.y, b.y)}; }                     \
  inline H2 __hfma2(H2 a, H2 b, H2 c) { return {__hfma(a.x, b.x, c.x), __hfma(a.y, b.y, c.y)}; }
EMU_SMALL_FLOAT(__half, __half2)
EMU_SMALL_FLOAT(__nv_bfloat16, __nv_bfloat162)
#undef EMU_SMALL_FLOAT

inline float __half2float(__half h) { return h; }
inline __half __float2half(float f) { return f; }
inline __half __float2half_rn(float f) { return f; }
inline __half __double2half(double d) { return d; }
inline __half __int2half_rn(int i) { return i; }
inline __half __uint2half_rn(unsigned i) { return i; }
inline int __half2int_rn(__half h) { return (int)rintf(h); }
inline int __half2int_rz(__half h) { return (int)(float)h; }
inline unsigned short __half_as_ushort(__half h) { return h.bits; }
inline short __half_as_short(__half h) { return (short)h.bits; }
inline __half __ushort_as_half(unsigned short u) { return emu::bit_cast<__half>(u); }
inline __half __short_as_half(short s) { return emu::bit_cast<__half>(s); }
inline __half2 make_half2(__half x, __half y) { return {x, y}; }
inline __half2 __halves2half2(__half x, __half y) { return {x, y}; }
inline __half2 __half2half2(__half h) { return {h, h}; }
inline __half2 __float2half2_rn(float f) { return {f, f}; }
inline __half2 __floats2half2_rn(float x, float y) { return {x, y}; }
inline __half2 __float22half2_rn(float2 f) { return {f.x, f.y}; }
inline float2 __half22float2(__half2 h) { return {h.x, h.y}; }
inline __half __low2half(__half2 h) { return h.x; }
inline __half __high2half(__half2 h) { return h.y; }
inline float __low2float(__half2 h) { return h.x; }
inline float __high2float(__half2 h) { return h.y; }

inline float __bfloat162float(__nv_bfloat16 h) { return h; }
inline __nv_bfloat16 __float2bfloat16(float f) { return f; }
inline __nv_bfloat16 __float2bfloat16_rn(float f) { return f; }
inline unsigned short __bfloat16_as_ushort(__nv_bfloat16 h) { return h.bits; }
inline __nv_bfloat16 __ushort_as_bfloat16(unsigned short u) { return emu::bit_cast<__nv_bfloat16>(u); }
inline __nv_bfloat162 make_bfloat162(__nv_bfloat16 x, __nv_bfloat16 y) { return {x, y}; }
inline __nv_bfloat162 __halves2bfloat162(__nv_bfloat16 x, __nv_bfloat16 y) { return {x, y}; }
inline __nv_bfloat162 __floats2bfloat162_rn(float x, float y) { return {x, y}; }
inline float2 __bfloat1622float2(__nv_bfloat162 h) { return {h.x, h.y}; }
