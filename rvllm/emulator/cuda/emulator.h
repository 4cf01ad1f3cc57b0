// emulator.h - what kernel code sees of the emulator: the running thread, and the operations that need
// others.
#pragma once
#include <cstddef>
#include <cstdint>
#include "cuda_vectors.h"

// Code of the emulator that is compiled together with a kernel must not be reported to the checker as the
// kernel's.
#define EMU_UNCHECKED __attribute__((no_sanitize("thread")))

namespace emu {

// A place in the kernel source. here() as a default argument is the place of the call that leaves it out.
struct Place {
  const char* file;
  int line;
};
constexpr Place here(const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
  return {file, line};
}

struct Fiber;
struct Block;
struct Warp;
using Serve = void (*)(unsigned mask, void* const* operands);

struct Thread {
  uint3 index;      // threadIdx
  unsigned rank;    // number within the block; x runs fastest
  unsigned lane;    // rank % 32
  Block* block;
  Warp* warp;
  Fiber* fiber;     // the stack it runs on, once it has started
  Thread* next;     // in the queue it stands in
  bool waited;      // for the kernel before, or it has met a thread of its block that has

  // What the thread has brought to the warp collective that it waits in.
  Serve serve;
  void* operand;
  unsigned mask;
  Place place;
};

struct Warp {
  struct WarpTable* table;  // check mode, while counting: the lanes' accesses since they last met
  unsigned lanes;    // bit set: the lanes that exist
  unsigned waiting;  // those that wait in a collective
  unsigned exited;   // those that have returned from the kernel
  unsigned syncs;    // __syncwarp completed so far: orders memory within the warp
};

struct Block {
  uint3 index;         // blockIdx
  unsigned id;         // the same as one number
  unsigned arrived;    // threads that wait at the barrier
  unsigned exited;     // threads that have returned
  unsigned barriers;   // barriers completed so far: orders memory within the block
  bool waited;         // some thread has waited for the kernel before
  Place barrier;       // where the waiting threads wait
  int vote, result;    // __syncthreads_count/and/or: gathering, and as returned
  Thread* threads;
  Warp* warps;
  char* saved_shared;  // cooperative launches: shared memory while another block runs
  char* written;       // check mode: one flag per byte of shared memory, set by the first write
};

extern Thread* running;  // the thread whose code runs now
extern uint3 block_dim, grid_dim;

enum class Vote { COUNT, AND, OR };
int block_barrier(int predicate, Vote vote, Place place);

// A warp collective: every lane in `mask` must come here, at the same line, with the same mask and the same
// `serve`. The last lane to come runs serve(mask, operands) once for all; operands[lane] is what that lane
// passed, for each lane in the mask. serve() reads and writes the operands, and then all lanes go on.
// Operands may lie on the lanes' stacks, which stay in place while the lanes wait. This is the one door for
// all warp-wide instructions, also for those of later headers (ldmatrix, mma): write a struct for the operand
// and a function to serve it.
void warp_collective(unsigned mask, void* operand, Serve serve, Place place);
// For use in serve(): refuses an operation (a shuffle from a lane that takes no part, say).
[[noreturn]] void refuse(unsigned lane, const char* format, ...);

// The emulator's own collectives. A shuffle carries up to 8 bytes.
uint64_t shuffle(unsigned mask, uint64_t value, unsigned source_lane, Place place);
unsigned ballot(unsigned mask, bool predicate, Place place);
enum class Reduce { ADD, MIN, MAX, AND, OR, XOR };
int64_t reduce(unsigned mask, int64_t value, Reduce how, Place place);
void warp_sync(unsigned mask, Place place);

// Kernels that start behind one another early (chain.cpp): all before this one have ended; the next one may start.
void wait_for_previous_kernel();
void let_next_kernel_start();

// Cooperative launches: a thread that may be spinning gives way to other blocks. `pc`: a return address in
// the kernel, by default that of this call.
void let_others_run(const void* pc = nullptr);
void* dynamic_shared();                 // what `extern __shared__` names
void note_atomic(void* p, size_t size, const void* pc);  // tells the checker about an atomic update
void note_unsettled(void* value, const void* p, size_t size, const void* pc);
[[noreturn]] void kernel_stopped(const char* kind, const char* text, Place place);  // assert, __trap

// Calls in check mode, so that reading an index is not itself a checked memory access.
EMU_UNCHECKED inline uint3 thread_index() { return running->index; }
EMU_UNCHECKED inline uint3 block_index() { return running->block->index; }
EMU_UNCHECKED inline uint3 dimensions(const uint3& d) { return d; }
EMU_UNCHECKED inline unsigned lane() { return running->lane; }
EMU_UNCHECKED inline unsigned existing_lanes() { return running->warp->lanes; }

}  // namespace emu
