// cuda_vectors.h - CUDA's small vector types: same members, same size, same alignment.
#pragma once
#include <cstdint>

// The alignment matters: a float4 must be loaded from a multiple of 16 bytes, and the checker enforces it.
#define EMU_VECTOR(NAME, T)                                                    \
  struct NAME##1 { T x; };                                                     \
  struct alignas(2 * sizeof(T)) NAME##2 { T x, y; };                           \
  struct NAME##3 { T x, y, z; };                                               \
  struct alignas(sizeof(T) == 8 ? 16 : 4 * sizeof(T)) NAME##4 { T x, y, z, w; }; \
  inline NAME##1 make_##NAME##1(T x) { return {x}; }                           \
  inline NAME##2 make_##NAME##2(T x, T y) { return {x, y}; }                   \
  inline NAME##3 make_##NAME##3(T x, T y, T z) { return {x, y, z}; }           \
  inline NAME##4 make_##NAME##4(T x, T y, T z, T w) { return {x, y, z, w}; }

EMU_VECTOR(char, signed char)
EMU_VECTOR(uchar, unsigned char)
EMU_VECTOR(short, short)
EMU_VECTOR(ushort, unsigned short)
EMU_VECTOR(int, int)
EMU_VECTOR(uint, unsigned int)
EMU_VECTOR(long, long)
EMU_VECTOR(ulong, unsigned long)
EMU_VECTOR(longlong, long long)
EMU_VECTOR(ulonglong, unsigned long long)
EMU_VECTOR(float, float)
EMU_VECTOR(double, double)
#undef EMU_VECTOR

struct dim3 {
  unsigned x, y, z;
  dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};
