// runtime.h - what the parts of the emulator share: the launch in progress, the scheduler, reports, the
// checker.
#pragma once
#include <atomic>
#include <cstddef>
#include <cstdint>
#include "emulator.h"
#include "fiber.h"

#define EMU_API extern "C" __attribute__((visibility("default")))

namespace emu {

// ---- the launch in progress -----------------------------------------------------------------------------
struct Array {  // an array argument
  char *begin, *end;
  int argument;
  bool writable;
  struct Word* history;  // check mode: who touched it; null if it is not watched for races
  struct Mark* marks;    // check mode: which launches of a chain touched it; null outside chains
};

struct Launch {
  void (*kernel)(void**);
  void** values;
  unsigned threads, blocks;  // threads of a block, blocks of the grid
  unsigned* order;           // the order in which a block's threads start
  Block* block_table;        // one Block, used again and again; all of them in a cooperative launch
  unsigned resident_blocks;  // the length of block_table
  size_t dynamic_bytes;
  bool cooperative, reverse, races, counting;
  // In a chain (chain.cpp): the number of this launch, and of the last that has ended for sure when this one starts.
  unsigned number, settled;
  bool dependent;     // it may start before the launch before it has ended
  bool early, waits;  // some thread has let the next kernel start before it waited; some thread has waited
  Array* arrays;
  int array_count;
  // Blocks count their barriers from first_barrier on, which is beyond all counts of earlier launches: so the
  // checker sees by an access's count whether it belongs to this launch.
  unsigned first_barrier, last_barrier;
};
extern Launch launch;

// Shared memory: the module's thread-local segment, and a buffer for the dynamic part. Both belong to one
// block at a time: in a cooperative launch they are swapped whenever a thread of another block gets its turn.
constexpr size_t MAX_DYNAMIC_BYTES = 227 << 10;
extern char* static_shared;
extern size_t static_bytes;
constexpr size_t DYNAMIC_MARGIN = 64 << 10;  // kept free before and after: an access there is a bug
extern char dynamic_region[DYNAMIC_MARGIN + MAX_DYNAMIC_BYTES + DYNAMIC_MARGIN];
constexpr char* dynamic_buffer = dynamic_region + DYNAMIC_MARGIN;
extern char *image_begin, *image_end;  // the module as it is mapped: code, constants, device variables

// ---- reports ----------------------------------------------------------------------------------------------
struct Where {  // in the kernel: known as a place, or as an address of code that has yet to be looked up
  Place place = {nullptr, 0};
  const void* pc = nullptr;
  const char* stack_pointer = nullptr;  // with it, the callers can be looked up if pc is not in the kernel
  uintptr_t other_pc_offset = 0;  // of the other access of a race
  Where(Place place) : place(place) {}
  Where(const void* pc) : pc(pc) {}
};
// Ends the launch with a report about the running thread. Every fiber is abandoned where it stands.
[[noreturn]] void fail(const char* kind, Where where, const char* format, ...);
const char* describe_address(const void* p);  // ", 4 bytes past the end of argument 2 (256 bytes)"
extern bool failed;

// ---- scheduler ----------------------------------------------------------------------------------
extern Fiber caller_fiber;              // the stack that emu_launch was called on
void run_all_blocks();
void wait();                            // the running thread cannot go on: others run until it is woken
void wake(Thread* t);
void give_way();                        // the running thread could go on, but lets all others run first

// While the emulator itself is at work, no other thread may run and memory accesses are not the kernel's. A
// timer tick that comes in between is kept until the work is done.
extern volatile bool at_work, tick_pending;
void on_tick(Where where);
// The fences keep the compiler from moving that work out of the marked stretch, where a signal could see half
// of it.
inline void begin_work() {
  at_work = true;
  std::atomic_signal_fence(std::memory_order_seq_cst);
}
inline void end_work(Where where) {
  std::atomic_signal_fence(std::memory_order_seq_cst);
  at_work = false;
  if (__builtin_expect(tick_pending, 0)) on_tick(where);
}
class Work {
 public:
  explicit Work(Where where) : where(where) { begin_work(); }
  ~Work() { end_work(where); }

 private:
  Where where;
};

// ---- signals ------------------------------------------------------------------------------------
void catch_signals(double cpu_seconds);
void release_signals();

// ---- checker and counters: present in check mode only -------------------------------------------
struct Counters {
  uint64_t global_reads, global_read_bytes, global_writes, global_write_bytes, global_requests, sectors;
  uint64_t shared_reads, shared_read_bytes, shared_writes, shared_write_bytes;
  uint64_t shared_requests, bank_conflicts;
  uint64_t atomics, barriers, warp_collectives, ungrouped;
};
extern Counters counters;

#if EMU_CHECK
void checker_begin_launch();
void checker_end_launch();
void checker_begin_block(Block* b);
void check_atomic(void* p, size_t size, const void* pc);
void check_unsettled(void* value, const void* p, size_t size, const void* pc);
void count_access(size_t offset, size_t size, bool shared, bool write, const void* pc);
void meet(Thread* t);         // the thread has come to a point where all lanes of its warp meet
void counters_begin_launch();
void counters_end_launch();
#else
inline void checker_begin_launch() {}
inline void checker_end_launch() {}
inline void checker_begin_block(Block*) {}
inline void check_atomic(void*, size_t, const void*) {}
inline void check_unsettled(void*, const void*, size_t, const void*) {}
inline void meet(Thread*) {}
#endif

}  // namespace emu
