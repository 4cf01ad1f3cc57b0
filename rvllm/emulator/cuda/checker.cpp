// checker.cpp - looks at every memory access of a kernel. In check builds only.
//
// The kernel is compiled with -fsanitize=thread,bounds, which makes g++ call __tsan_read4(p) before a 4-byte
// load, and so on. No sanitizer library is linked: the functions are defined here. They ask, in this order:
// is the address aligned, is it one that the kernel may use, was it ever set (shared memory), and has another
// thread touched it with nothing in between that orders the two (races.cpp), or a kernel before that may still run
// (chain.cpp).
#include <cstdlib>
#include <cstring>
#include "checker.h"

namespace emu {

[[noreturn]] static void fail_access(const char* kind, const MemoryAccess& now, const char* more) {
  fail(kind, now.pc, "%zu-byte %s%s", now.size, now.verb(), more);
}

// ---- shared memory ------------------------------------------------------------------------------
static void check_set(char* written, const MemoryAccess& now) {
  if (now.write && !now.atomic) {
    memset(written, 1, now.size);
    return;
  }
  for (size_t i = 0; i < now.size; i++)
    if (!written[i]) fail_access("unset shared memory", now, ": no thread of this block has written it");
}

static void check_shared(size_t offset, bool dynamic, const MemoryAccess& now) {
  const Block* b = running->block;
  check_set(b->written + (dynamic ? static_bytes : 0) + offset, now);
  if (launch.counting) count_access(offset, now.size, true, now.write, now.pc);
  check_shared_races(dynamic, offset, now);
}

static void check_static_shared(const MemoryAccess& now) {
  const size_t offset = now.p - static_shared;
  if (offset + now.size > static_bytes) fail_access("out of bounds", now, ", past the end of shared memory");
  check_shared(offset, false, now);
}

static void check_dynamic_shared(const MemoryAccess& now) {
  const long offset = now.p - dynamic_buffer;
  if (offset < 0 || offset + now.size > launch.dynamic_bytes)
    fail("out of bounds", now.pc, "%zu-byte %s at offset %ld of %zu bytes of dynamic shared memory", now.size,
         now.verb(), offset, launch.dynamic_bytes);
  check_shared(offset, true, now);
}

// ---- global memory ------------------------------------------------------------------------------
static const Array* find_array(const MemoryAccess& now) {
  const Array* found = nullptr;
  for (int i = 0; i < launch.array_count; i++) {
    const Array& a = launch.arrays[i];
    if (now.p < a.begin || now.p + now.size > a.end) continue;
    if (!now.write || a.writable) return &a;
    found = &a;  // go on: another argument may be a writable view of the same memory
  }
  return found;
}

static void check_global(const MemoryAccess& now) {
  const Array* a = find_array(now);
  if (!a) {
    if (now.p >= image_begin && now.p < image_end) return;  // a __device__ or __constant__ variable
    if (now.p < (const char*)65536)
      fail("null pointer", now.pc, "%zu-byte %s at address %#zx", now.size, now.verb(), (size_t)now.p);
    fail_access("out of bounds", now, describe_address(now.p));
  }
  if (now.write && !a->writable) {
    char more[40];
    snprintf(more, sizeof more, " to argument %d", a->argument);
    fail_access("read-only array", now, more);
  }
  if (launch.counting) count_access(now.p - a->begin, now.size, false, now.write, now.pc);
  check_global_races(*a, now.p - a->begin, now);
  check_chain(*a, now.p - a->begin, now);
}

// ---- entry points -------------------------------------------------------------------------------
static bool is_in(const char* p, const char* begin, size_t size) { return p >= begin && p < begin + size; }

static void check(const MemoryAccess& now) {
  begin_work();
  if (is_in(now.p, static_shared, static_bytes)) check_static_shared(now);
  else if (is_in(now.p, dynamic_region, sizeof dynamic_region)) check_dynamic_shared(now);
  else check_global(now);
  end_work(now.pc);
}

// A stack is its thread's own, and code that the emulator runs (serving a collective) is not the kernel's.
static bool is_private(const void* p) { return at_work || on_stack_of(running->fiber, p); }

// `aligned`: the type promises that the address is a multiple of the size.
static inline void check_plain(const void* p, size_t size, bool write, bool aligned, const void* pc,
                               char* unsettled = nullptr) {
  if (is_private(p)) return;
  const MemoryAccess now = {(const char*)p, size, write, false, pc, unsettled};
  if (aligned && (uintptr_t)p % size) {
    begin_work();
    fail_access("misaligned access", now, ": the address is not a multiple of the size");
  }
  check(now);
}

void check_atomic(void* p, size_t size, const void* pc) {
  if (is_private(p)) return;
  if (launch.counting) counters.atomics++;
  const MemoryAccess now = {(const char*)p, size, true, true, pc};
  check(now);
}

void check_unsettled(void* value, const void* p, size_t size, const void* pc) {
  check_plain(p, size, false, true, pc, (char*)value);
}

// ---- per launch and per block ---------------------------------------------------------------------------
void checker_begin_launch() {
  for (unsigned i = 0; i < launch.resident_blocks; i++)
    launch.block_table[i].written = (char*)malloc(static_bytes + launch.dynamic_bytes + 1);
  races_begin_launch();
  if (launch.counting) counters_begin_launch();
}

void checker_begin_block(Block* b) { memset(b->written, 0, static_bytes + launch.dynamic_bytes); }

void checker_end_launch() {
  if (launch.counting) counters_end_launch();
  races_end_launch();
  for (unsigned i = 0; i < launch.resident_blocks; i++) free(launch.block_table[i].written);
}

}  // namespace emu

// What the compiler calls. The return address lies in the kernel.
#define EMU_PC __builtin_return_address(0)
#define EMU_ACCESS(N)                                                                              \
  extern "C" void __tsan_read##N(void* p) { emu::check_plain(p, N, false, true, EMU_PC); }       \
  extern "C" void __tsan_write##N(void* p) { emu::check_plain(p, N, true, true, EMU_PC); }
EMU_ACCESS(1)
EMU_ACCESS(2)
EMU_ACCESS(4)
EMU_ACCESS(8)
EMU_ACCESS(16)
extern "C" {
void __tsan_read_range(void* p, size_t n) { emu::check_plain(p, n, false, false, EMU_PC); }
void __tsan_write_range(void* p, size_t n) { emu::check_plain(p, n, true, false, EMU_PC); }
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
void __tsan_init() {}

// -fsanitize=bounds: an index beyond an array of known size. g++ passes where in the source.
struct OutOfBounds {
  const char* file;
  unsigned line, column;
};
void __ubsan_handle_out_of_bounds(const OutOfBounds* at, uintptr_t index) {
  emu::begin_work();
  emu::fail("out of bounds", emu::Place{at->file, (int)at->line}, "index %ld of an array of fixed size",
            (long)index);
}
}
