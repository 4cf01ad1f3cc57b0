// faults.cpp - reports, and the signals that lead to them: bad addresses, division by zero, endless loops.
#include <csignal>
#include <cstdarg>
#include <cstdio>
#include <cstring>
#include <pthread.h>
#include <sys/time.h>
#include <ucontext.h>
#include "runtime.h"

namespace emu {

// Read by Python, see report.py; keep the two alike.
struct Report {
  char kind[32], text[512], file[256];
  int line;                     // 0: look pc_offsets up in the debug information
  int has_thread;
  unsigned block[3], thread[3];
  size_t pc_count;              // return addresses within the module, the innermost call first
  uintptr_t pc_offsets[16], other_pc_offset;
};
constexpr size_t MAX_PCS = sizeof(Report::pc_offsets) / sizeof(uintptr_t);
static Report last_report;
bool failed;

EMU_API const void* emu_report() { return &last_report; }

static uintptr_t offset_in_module(const void* pc) {
  const char* p = (const char*)pc;
  return p > image_begin && p < image_end ? p - image_begin : 0;
}

static void add_pc(const void* pc) {
  const uintptr_t offset = offset_in_module(pc);
  if (offset && last_report.pc_count < MAX_PCS) last_report.pc_offsets[last_report.pc_count++] = offset;
}

// A signal may come in code that is not the kernel's: the math library, the emulator. Whatever on the stack
// looks like a return address into the module is noted; the first that belongs to a line of the kernel is
// where it was.
static void add_callers(const char* stack_pointer) {
  if (!running || !on_stack_of(running->fiber, stack_pointer)) return;
  const char* top = running->fiber->stack + STACK_BYTES;
  const char* bottom = running->fiber->stack + GUARD_BYTES;  // below it, reading would be the next fault
  const char* p = stack_pointer > bottom ? stack_pointer : bottom;
  for (; p < top && last_report.pc_count < MAX_PCS; p += sizeof(void*)) add_pc(*(const void* const*)p);
}

static void copy(unsigned (&to)[3], const uint3& from) { to[0] = from.x, to[1] = from.y, to[2] = from.z; }

void fail(const char* kind, Where where, const char* format, ...) {
  begin_work();
  last_report = {};
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(last_report.text, sizeof last_report.text, format, arguments);
  va_end(arguments);
  snprintf(last_report.kind, sizeof last_report.kind, "%s", kind);
  if (where.place.file) snprintf(last_report.file, sizeof last_report.file, "%s", where.place.file);
  last_report.line = where.place.line;
  add_pc(where.pc);
  if (where.stack_pointer) add_callers(where.stack_pointer);
  last_report.other_pc_offset = where.other_pc_offset;
  if (running) {
    last_report.has_thread = 1;
    copy(last_report.block, running->block->index);
    copy(last_report.thread, running->index);
  }
  failed = true;
  static Fiber abandoned;
  switch_fiber(&abandoned, &caller_fiber);
  __builtin_unreachable();
}

void kernel_stopped(const char* kind, const char* text, Place place) { fail(kind, place, "%s", text); }

// What lies nearest to an address that is in no array: an argument, or static shared memory (number -1).
const char* describe_address(const void* address) {
  static char text[160];
  const char* p = (const char*)address;
  long nearest = 1 << 20;
  snprintf(text, sizeof text, ", near none of the arguments");
  for (int i = -1; i < launch.array_count; i++) {
    const char* begin = i < 0 ? static_shared : launch.arrays[i].begin;
    const char* end = i < 0 ? static_shared + static_bytes : launch.arrays[i].end;
    const long distance = p >= end ? p - end : begin - p;
    if (distance < 0 || distance >= nearest) continue;
    nearest = distance;
    char name[40] = "static shared memory";
    if (i >= 0) snprintf(name, sizeof name, "argument %d", launch.arrays[i].argument);
    snprintf(text, sizeof text, ", %ld bytes %s %s (%ld bytes)", distance,
             p >= end ? "past the end of" : "before", name, long(end - begin));
  }
  return text;
}

// ---- signals ------------------------------------------------------------------------------------
static const int CAUGHT[] = {SIGSEGV, SIGBUS, SIGFPE, SIGVTALRM};
static const int CAUGHT_COUNT = sizeof CAUGHT / sizeof *CAUGHT;
static struct sigaction previous_actions[CAUGHT_COUNT];
static stack_t previous_stack;
static pthread_t launching_thread;
static unsigned long ticks, last_tick;
static double cpu_limit;

// Where the signal interrupted the thread. Lookups expect a return address, which is beyond the instruction.
static Where at_fault(const void* context) {
  const ucontext_t* c = (const ucontext_t*)context;
#if defined(__x86_64__)
  Where where = (const void*)(c->uc_mcontext.gregs[REG_RIP] + 1);
  where.stack_pointer = (const char*)c->uc_mcontext.gregs[REG_RSP];
#elif defined(__aarch64__)
  Where where = (const void*)(c->uc_mcontext.pc + 1);
  where.stack_pointer = (const char*)c->uc_mcontext.sp;
#else
  Where where = (const void*)nullptr;
  (void)c;
#endif
  return where;
}

[[noreturn]] static void report_bad_address(const void* address, Where where) {
  const char* p = (const char*)address;
  if (running && p < running->fiber->stack + GUARD_BYTES && p > running->fiber->stack - (1 << 20))
    fail("stack overflow", where, "local arrays need more than the %zu KiB of stack that a thread has",
         (STACK_BYTES - GUARD_BYTES) >> 10);
  if (p < (const char*)65536)
    fail("null pointer", where, "access to address %#zx: a null pointer, or a vector that is not aligned",
         (size_t)address);
  fail("invalid address", where, "access to address %p%s", address, describe_address(address));
}

void on_tick(Where where) {
  tick_pending = false;
  if (++ticks > last_tick)
    fail("timeout", where, "the kernel has run for %.3g s of CPU time: an endless loop?", cpu_limit);
  if (!launch.cooperative) return;
  begin_work();
  give_way();  // a plain spin loop would never let the blocks run that it waits for
  at_work = false;
}

static void on_signal(int signal_number, siginfo_t* info, void* context) {
  if (!pthread_equal(pthread_self(), launching_thread)) {
    // The timer's signal goes to any OS thread (of a BLAS pool, say): pass it on. A fault there is not ours.
    if (signal_number == SIGVTALRM) pthread_kill(launching_thread, SIGVTALRM);
    else signal(signal_number, SIG_DFL);
    return;
  }
  if (signal_number == SIGVTALRM) {
    if (at_work) tick_pending = true;
    else on_tick(at_fault(context));
    return;
  }
  if (signal_number == SIGFPE)
    fail("division by zero", at_fault(context), "integer division or remainder by zero");
  report_bad_address(info->si_addr, at_fault(context));
}

void catch_signals(double cpu_seconds) {
  launching_thread = pthread_self();
  // The timer counts CPU time (SIGVTALRM; SIGALRM is test runners' own). A cooperative launch needs its ticks
  // to take turns; else they only serve the limit.
  const int tick_microseconds = launch.cooperative ? 1000 : 10000;
  ticks = 0;
  cpu_limit = cpu_seconds;
  last_tick = (unsigned long)(cpu_seconds * 1e6 / tick_microseconds);
  static char signal_stack[65536];  // a stack overflow leaves no other to run the handler on
  stack_t stack = {};
  stack.ss_sp = signal_stack;
  stack.ss_size = sizeof signal_stack;
  sigaltstack(&stack, &previous_stack);
  for (int i = 0; i < CAUGHT_COUNT; i++) {
    struct sigaction action = {};
    action.sa_sigaction = on_signal;
    // The handler may leave by switching fibers, so the signal must not stay blocked. Ticks are handled on
    // the fiber's own stack, because a thread that is preempted there stays in the handler until its next
    // turn.
    action.sa_flags = SA_SIGINFO | SA_NODEFER | SA_RESTART | (CAUGHT[i] == SIGVTALRM ? 0 : SA_ONSTACK);
    sigaction(CAUGHT[i], &action, &previous_actions[i]);
  }
  const itimerval every = {{0, tick_microseconds}, {0, tick_microseconds}};
  setitimer(ITIMER_VIRTUAL, &every, nullptr);
}

void release_signals() {
  const itimerval off = {};
  setitimer(ITIMER_VIRTUAL, &off, nullptr);
  for (int i = 0; i < CAUGHT_COUNT; i++) {
    struct sigaction previous = previous_actions[i];
    // A tick that another OS thread passed on may still be under way, and by default it would end the process.
    if (CAUGHT[i] == SIGVTALRM && !(previous.sa_flags & SA_SIGINFO) && previous.sa_handler == SIG_DFL)
      previous.sa_handler = SIG_IGN;
    sigaction(CAUGHT[i], &previous, nullptr);
  }
  sigaltstack(&previous_stack, nullptr);
}

}  // namespace emu
