// fiber.cpp - making fibers and switching between them.
#include "fiber.h"
#include <cstdint>
#include <sys/mman.h>

namespace emu {

static Fiber* all_fibers;
static int living;

#if defined(__x86_64__) && !defined(EMU_PORTABLE)
// By the calling convention a function call may destroy every register but these six and the stack pointer.
// So it is enough to push them, exchange the stack pointers, and pop what the other fiber pushed when it
// left.
extern "C" __attribute__((visibility("hidden"))) void emu_switch_stacks(void** save, void* load);
asm(R"(
  .text
  .hidden emu_switch_stacks
  .globl emu_switch_stacks
  .type emu_switch_stacks, @function
emu_switch_stacks:
  pushq %rbp; pushq %rbx; pushq %r12; pushq %r13; pushq %r14; pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15; popq %r14; popq %r13; popq %r12; popq %rbx; popq %rbp
  ret
)");

void switch_fiber(Fiber* from, Fiber* to) { emu_switch_stacks(&from->stack_pointer, to->stack_pointer); }

static void prepare(Fiber* f, void (*entry)(), char* top) {
  void** sp = (void**)((uintptr_t)top & ~(uintptr_t)15);
  *--sp = nullptr;       // entry's return address: it does not return. Also aligns its stack as after a call.
  *--sp = (void*)entry;  // what `ret` jumps to
  f->stack_pointer = sp - 6;
}
#else
// Portable: makecontext enters the new stack once, by system calls; from then on setjmp and longjmp switch
// without. The new fiber's first act is to note its registers and go back to its maker.
static ucontext_t maker;
static Fiber* newborn;
static void (*newborn_entry)();

void switch_fiber(Fiber* from, Fiber* to) {
  if (!_setjmp(from->registers)) _longjmp(to->registers, 1);
}

static void first_entry() {
  Fiber* self = newborn;
  void (*entry)() = newborn_entry;
  if (!_setjmp(self->registers)) swapcontext(&self->context, &maker);
  entry();
}

static void prepare(Fiber* f, void (*entry)(), char* top) {
  getcontext(&f->context);
  f->context.uc_stack.ss_sp = f->stack + GUARD_BYTES;
  f->context.uc_stack.ss_size = top - f->stack - GUARD_BYTES;
  newborn = f;
  newborn_entry = entry;
  makecontext(&f->context, first_entry, 0);
  swapcontext(&maker, &f->context);
}
#endif

Fiber* new_fiber(void (*entry)()) {
  char* stack = (char*)mmap(nullptr, STACK_BYTES, PROT_READ | PROT_WRITE,
                            MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (stack == MAP_FAILED) return nullptr;
  mprotect(stack, GUARD_BYTES, PROT_NONE);  // a stack that grows too far faults here
  Fiber* f = new Fiber{};
  f->stack = stack;
  f->next_of_all = all_fibers;
  all_fibers = f;
  living++;
  // Were all tops equal modulo the page size, they would compete for the same few sets of the CPU's cache.
  static unsigned count;
  prepare(f, entry, stack + STACK_BYTES - count++ % 60 * 64);
  return f;
}

void free_all_fibers() {
  while (Fiber* f = all_fibers) {
    all_fibers = f->next_of_all;
    munmap(f->stack, STACK_BYTES);
    delete f;
  }
  living = 0;
}

int num_fibers() { return living; }

}  // namespace emu
