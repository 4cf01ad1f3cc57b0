// cuda_sync.h - barriers, votes, shuffles, atomics: the intrinsics by which threads meet.
//
// Each takes, as a last argument that nobody writes, the place of its call: reports name the line of the
// kernel.
#pragma once
#include <cstring>
#include <type_traits>
#include "cuda_math.h"
#include "emulator.h"

#define EMU_INLINE inline __attribute__((always_inline))
#define EMU_HERE emu::Place place = emu::here()
constexpr int warpSize = 32;

inline void __syncthreads(EMU_HERE) { emu::block_barrier(0, emu::Vote::COUNT, place); }
inline int __syncthreads_count(int p, EMU_HERE) {
  return emu::block_barrier(p != 0, emu::Vote::COUNT, place);
}
inline int __syncthreads_and(int p, EMU_HERE) { return emu::block_barrier(p != 0, emu::Vote::AND, place); }
inline int __syncthreads_or(int p, EMU_HERE) { return emu::block_barrier(p != 0, emu::Vote::OR, place); }

inline void __syncwarp(unsigned mask = ~0u, EMU_HERE) { emu::warp_sync(mask, place); }
inline unsigned __ballot_sync(unsigned mask, int p, EMU_HERE) { return emu::ballot(mask, p != 0, place); }
inline int __any_sync(unsigned mask, int p, EMU_HERE) { return emu::ballot(mask, p != 0, place) != 0; }
inline int __all_sync(unsigned mask, int p, EMU_HERE) { return emu::ballot(mask, p == 0, place) == 0; }
inline unsigned __activemask() { return emu::existing_lanes(); }

#define EMU_REDUCE(NAME, T, HOW)                                     \
  inline T NAME(unsigned mask, T value, EMU_HERE) {                  \
    return (T)emu::reduce(mask, value, emu::Reduce::HOW, place);     \
  }
EMU_REDUCE(__reduce_add_sync, int, ADD)
EMU_REDUCE(__reduce_add_sync, unsigned, ADD)
EMU_REDUCE(__reduce_min_sync, int, MIN)
EMU_REDUCE(__reduce_min_sync, unsigned, MIN)
EMU_REDUCE(__reduce_max_sync, int, MAX)
EMU_REDUCE(__reduce_max_sync, unsigned, MAX)
EMU_REDUCE(__reduce_and_sync, unsigned, AND)
EMU_REDUCE(__reduce_or_sync, unsigned, OR)
EMU_REDUCE(__reduce_xor_sync, unsigned, XOR)
#undef EMU_REDUCE

namespace emu {
template <class T>
EMU_UNCHECKED T shuffle_value(unsigned mask, T value, unsigned source_lane, Place place) {
  static_assert(sizeof(T) <= 8, "a shuffle moves at most 8 bytes");
  uint64_t bits = 0;
  memcpy(&bits, &value, sizeof value);
  bits = shuffle(mask, bits, source_lane, place);
  memcpy(&value, &bits, sizeof value);
  return value;
}
}  // namespace emu

// `width` cuts the warp into independent groups. A source outside the group means the lane's own value.
template <class T>
T __shfl_sync(unsigned mask, T value, int source, int width = 32, EMU_HERE) {
  const int first = emu::lane() & -width;
  return emu::shuffle_value(mask, value, first | (source & (width - 1)), place);
}
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int bits, int width = 32, EMU_HERE) {
  const int lane = emu::lane(), source = lane ^ bits, end = (lane & -width) + width;
  return emu::shuffle_value(mask, value, source < end ? source : lane, place);
}
template <class T>
T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = 32, EMU_HERE) {
  const unsigned lane = emu::lane(), source = lane + delta, end = (lane & -width) + width;
  return emu::shuffle_value(mask, value, source < end ? source : lane, place);
}
template <class T>
T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = 32, EMU_HERE) {
  const unsigned lane = emu::lane(), within = lane & (width - 1);
  return emu::shuffle_value(mask, value, within >= delta ? lane - delta : lane, place);
}

// A fence orders memory, which is always in order here. It is also a likely sign that the thread will soon
// wait for another block.
EMU_INLINE void __threadfence() { emu::let_others_run(); }
EMU_INLINE void __threadfence_system() { emu::let_others_run(); }
inline void __threadfence_block() {}
EMU_INLINE void __nanosleep(unsigned) { emu::let_others_run(); }

// Atomics are atomic because no other thread runs in between. The update is a call of unchecked code, and its
// return address, which lies in the kernel, tells the checker where it happened.
namespace emu {
template <class T, class Update>
EMU_UNCHECKED __attribute__((noinline)) T atomic_update(T* p, T operand, Update update) {
  const void* pc = __builtin_return_address(0);
  note_atomic(p, sizeof *p, pc);
  const T old = *p;
  *p = update(old, operand);
  let_others_run(pc);
  return old;
}
}  // namespace emu
#define EMU_ATOMIC(NAME, RESULT)                                                                          \
  template <class T> EMU_INLINE T NAME(T* p, std::common_type_t<T> v) {                                   \
    return emu::atomic_update(p, (T)v, [](T old, T v) EMU_UNCHECKED -> T { return RESULT; });             \
  }
EMU_ATOMIC(atomicAdd, old + v)
EMU_ATOMIC(atomicSub, old - v)
EMU_ATOMIC(atomicExch, v)
EMU_ATOMIC(atomicMax, old > v ? old : v)
EMU_ATOMIC(atomicMin, old < v ? old : v)
EMU_ATOMIC(atomicAnd, old & v)
EMU_ATOMIC(atomicOr, old | v)
EMU_ATOMIC(atomicXor, old ^ v)
EMU_ATOMIC(atomicInc, old >= v ? 0 : old + 1)
EMU_ATOMIC(atomicDec, old == 0 || old > v ? v : old - 1)
#undef EMU_ATOMIC
template <class T>
EMU_INLINE T atomicCAS(T* p, std::common_type_t<T> expected, std::common_type_t<T> desired) {
  const T wanted = expected;
  const auto update = [wanted](T old, T v) EMU_UNCHECKED -> T { return old == wanted ? v : old; };
  return emu::atomic_update(p, (T)desired, update);
}

// A load of bytes some of which the kernel before may just be writing, and which the caller then does not use. Before
// the thread has waited such bytes come as 0xff, NaN: in check mode the result shows who uses them after all.
template <class T>
EMU_UNCHECKED __attribute__((noinline)) T load_unsettled(const T* p) {
  const void* pc = __builtin_return_address(0);
  T value = *p;
  emu::note_unsettled(&value, p, sizeof value, pc);
  return value;
}

// Loads and stores with cache hints. Inlined, so that the checked access has an address in the kernel.
template <class T> EMU_INLINE T __ldg(const T* p) { return *p; }
template <class T> EMU_INLINE T __ldca(const T* p) { return *p; }
template <class T> EMU_INLINE T __ldcg(const T* p) { return *p; }
template <class T> EMU_INLINE T __ldcs(const T* p) { return *p; }
template <class T> EMU_INLINE T __ldcv(const T* p) { return *(const volatile T*)p; }
template <class T> EMU_INLINE void __stcg(T* p, std::common_type_t<T> v) { *p = v; }
template <class T> EMU_INLINE void __stcs(T* p, std::common_type_t<T> v) { *p = v; }
template <class T> EMU_INLINE void __stwt(T* p, std::common_type_t<T> v) { *p = v; }
