// cuda_shim.h - included before a kernel file: makes g++ or clang++ read CUDA C as C++.
#pragma once
#include <cstdio>
#include <cstring>
#include <type_traits>
#include <utility>
#include "cuda_vectors.h"
#include "cuda_half.h"
#include "cuda_math.h"
#include "cuda_sync.h"
#include "emulator.h"

// The macros come after the system headers: some of these use __noinline__ as an attribute's name.
#define CUDA_EMULATOR 1
#define __global__ __attribute__((noinline))  // a kernel keeps its own lines when its only caller is below
#define __device__
#define __host__
#define __constant__ static
#define __managed__
#define __forceinline__ inline __attribute__((always_inline))
#define __noinline__ __attribute__((noinline))
#define __align__(n) __attribute__((aligned(n)))
#define __launch_bounds__(...)
#define __grid_constant__
#define __trap() emu::kernel_stopped("trap", "the kernel called __trap()", emu::here())
#undef assert
#define assert(x) ((x) ? (void)0 : emu::kernel_stopped("assertion", "assert(" #x ") failed", emu::here()))

// One OS thread runs all CUDA threads, so "per OS thread" is in effect "global", with one difference that
// matters: all such variables of a module lie side by side in its thread-local segment. That segment is the
// block's static shared memory; the emulator finds it, fills it at the start of each block, swaps it and
// checks it as a whole.
//
// g++ guards an array of a class type (half) by a run-time flag, as if its trivial constructor had to run
// once. The flag would lie in the same segment; __constinit says that there is nothing to run.
#if defined(__clang__)
#define __shared__ static thread_local
#else
#define __shared__ static __constinit thread_local
#endif

#define threadIdx (emu::thread_index())
#define blockIdx (emu::block_index())
#define blockDim (emu::dimensions(emu::block_dim))
#define gridDim (emu::dimensions(emu::grid_dim))

// Exports for a kernel: a caller that takes its arguments as cuLaunchKernel does (an array of pointers to
// values), the parameter types as text, and for each parameter its size and, if it is a pointer, the size it
// points to.
#define EMU_API extern "C" __attribute__((visibility("default")))
#define EMU_KERNEL(name)                                                                       \
  EMU_API EMU_UNCHECKED void emu_call_##name(void** values) { emu::call(name, values); }      \
  EMU_API const char* emu_types_##name() { return emu::parameter_types(name); }                \
  EMU_API const size_t* emu_sizes_##name() { return emu::parameter_sizes(name); }

namespace emu {
template <class... P, size_t... I>
EMU_UNCHECKED void call(void (*kernel)(P...), void** values, std::index_sequence<I...>) {
  kernel(*(std::remove_cv_t<P>*)values[I]...);
}
template <class... P>
EMU_UNCHECKED void call(void (*kernel)(P...), void** values) {
  call(kernel, values, std::index_sequence_for<P...>{});
}
template <class... P>
const char* parameter_types(void (*)(P...)) {
  return __PRETTY_FUNCTION__;  // "... [with P = {float*, int}]" (g++), "... [P = <float *, int>]" (clang++)
}
template <class T>
constexpr size_t size_of() {
  if constexpr (std::is_void_v<T>) return 0;
  else return sizeof(T);
}
template <class... P>
const size_t* parameter_sizes(void (*)(P...)) {
  static const size_t sizes[] = {sizeof(P)..., size_of<std::remove_pointer_t<P>>()..., 0};
  return sizes;
}
}  // namespace emu
