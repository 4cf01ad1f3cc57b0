// fiber.h - stacks that take turns on one OS thread.
//
// A CUDA thread needs a stack of its own only while it waits. A switch costs a few nanoseconds: no system
// call.
#pragma once
#include <csetjmp>
#include <cstddef>
#include <ucontext.h>

namespace emu {

struct Fiber {
  char* stack;         // lowest address: a guard page, then the stack; null for the fiber of the caller
  Fiber* next;         // in a list of idle fibers
  Fiber* next_of_all;
  void* stack_pointer; // asm switch: where the saved registers lie
  jmp_buf registers;   // portable switch
  ucontext_t context;  // portable switch: used once, to enter the new stack
};

constexpr size_t STACK_BYTES = 64 << 10, GUARD_BYTES = 4096;

// A new fiber that will run entry() at its first turn; entry never returns. Null when memory is exhausted.
Fiber* new_fiber(void (*entry)());
void switch_fiber(Fiber* from, Fiber* to);
void free_all_fibers();
int num_fibers();
inline bool on_stack_of(const Fiber* f, const void* p) {
  return (char*)p >= f->stack && (char*)p < f->stack + STACK_BYTES;
}

}  // namespace emu
