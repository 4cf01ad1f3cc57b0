// scheduler.cpp - runs a kernel's blocks on this OS thread.
//
// A CUDA thread is an ordinary call of the kernel, made on a fiber. When the call returns, the fiber goes on
// with the next thread; a second fiber is made only when a thread has to wait. So a kernel without barriers
// needs one fiber and no switch at all.
//
// Invariants:
//  - A thread that has started and not returned is running, or in one queue, or waits at a barrier or
//    collective.
//  - Blocks run one after another, or all at once in a cooperative launch. Threads start in the launch's
//    order, blocks by ascending (reverse: descending) number: equal input, equal order of all that happens.
//  - Threads that spin (that gave way, though they could go on) run only when all others are stuck and
//    everything that may start has started. Otherwise one could starve the thread that it waits for.
#include <cstdlib>
#include <cstring>
#include "runtime.h"

namespace emu {

Thread* running;
Launch launch;
Fiber caller_fiber;
volatile bool at_work, tick_pending;

struct Queue {
  Thread *head, *tail;
  void push(Thread* t) {
    t->next = nullptr;
    (head ? tail->next : head) = t;
    tail = t;
  }
  Thread* pop() {
    Thread* t = head;
    head = t->next;
    return t;
  }
};
static Queue ready, spinning;
static Fiber* idle_fibers;
static unsigned started_blocks, started_threads, live_blocks;  // started_threads: of the block started last
static Block* resident;                                        // the block whose shared memory is in place

static void make_resident(Block* b) {
  if (resident == b) return;
  if (launch.cooperative) {
    if (resident) {
      memcpy(resident->saved_shared, static_shared, static_bytes);
      memcpy(resident->saved_shared + static_bytes, dynamic_buffer, launch.dynamic_bytes);
    }
    memcpy(static_shared, b->saved_shared, static_bytes);
    memcpy(dynamic_buffer, b->saved_shared + static_bytes, launch.dynamic_bytes);
  }
  resident = b;
}

static bool can_resume_ready() { return ready.head; }
static bool can_start() {
  if (started_threads < launch.threads) return true;
  return started_blocks < launch.blocks && (launch.cooperative || live_blocks == 0);
}
static bool can_resume() { return can_resume_ready() || (spinning.head && !can_start()); }

static void start_block(Block* b) {
  const unsigned id = launch.reverse ? launch.blocks - 1 - started_blocks : started_blocks;
  b->id = id;
  b->index = {id % grid_dim.x, id / grid_dim.x % grid_dim.y, id / grid_dim.x / grid_dim.y};
  b->arrived = b->exited = 0;
  b->barriers = launch.first_barrier;
  b->waited = false;
  for (unsigned i = 0; i < launch.threads; i++) b->threads[i].waited = false;
  for (unsigned w = 0; w < (launch.threads + 31) / 32; w++)
    b->warps[w].waiting = b->warps[w].exited = b->warps[w].syncs = 0;
  started_blocks++;
  started_threads = 0;
  live_blocks++;
  make_resident(b);
  memset(static_shared, 0xff, static_bytes);  // shared memory that nobody has set reads as NaN
  memset(dynamic_buffer, 0xff, launch.dynamic_bytes);
  checker_begin_block(b);
}

static Block* newest_block() { return &launch.block_table[launch.cooperative ? started_blocks - 1 : 0]; }

static Thread* start_next_thread() {
  if (started_threads == launch.threads)
    start_block(&launch.block_table[launch.cooperative ? started_blocks : 0]);
  Block* b = newest_block();
  make_resident(b);
  return &b->threads[launch.order[started_threads++]];
}

static void resume_next(Fiber* from) {
  Thread* t = (can_resume_ready() ? ready : spinning).pop();
  make_resident(t->block);
  running = t;
  if (t->fiber != from) switch_fiber(from, t->fiber);
}

// Nothing can run. A barrier that waits for a returned thread was reported when that thread returned, so
// somebody must be waiting in a warp collective for lanes that are at a block barrier or in another
// collective.
[[noreturn]] static void report_deadlock() {
  for (unsigned b = 0; b < launch.resident_blocks; b++) {
    for (unsigned i = 0; i < launch.threads; i++) {
      Thread* t = running = &launch.block_table[b].threads[i];
      if (!(t->warp->waiting >> t->lane & 1)) continue;
      fail("warp divergence", t->place,
           "waits for lanes %08x, only %08x arrived; the others have returned or wait elsewhere", t->mask,
           t->warp->waiting);
    }
  }
  running = nullptr;
  fail("deadlock", Place{nullptr, 0}, "every thread waits");
}

static void returned(Thread* t) {
  Block* b = t->block;
  t->warp->exited |= 1u << t->lane;
  meet(t);
  if (b->arrived)
    fail("barrier divergence", b->barrier, "this thread returned while %u of %u threads wait at line %d",
         b->arrived, launch.threads, b->barrier.line);
  if (++b->exited == launch.threads) live_blocks--;
}

static Fiber* newest_fiber;

static void fiber_main() {
  Fiber* const self = newest_fiber;
  for (;;) {
    if (can_resume() || !(can_start() || live_blocks)) {
      self->next = idle_fibers;
      idle_fibers = self;
      if (can_resume()) resume_next(self);
      else switch_fiber(self, &caller_fiber);  // all blocks are done
    } else if (can_start()) {
      running = start_next_thread();
      running->fiber = self;
      end_work(Place{nullptr, 0});
      launch.kernel(launch.values);
      begin_work();
      returned(running);
    } else {
      report_deadlock();
    }
  }
}

static Fiber* take_fiber() {
  if (Fiber* f = idle_fibers) {
    idle_fibers = f->next;
    return f;
  }
  // new_fiber may enter fiber_main at once or only at the first switch; either way it reads newest_fiber
  // first when it is switched to, and take_fiber's caller does that next.
  newest_fiber = new_fiber(fiber_main);
  if (!newest_fiber) fail("out of memory", Place{nullptr, 0}, "no memory for one more stack");
  return newest_fiber;
}

void wait() {
  Fiber* self = running->fiber;
  if (can_resume()) resume_next(self);
  else if (can_start()) switch_fiber(self, take_fiber());
  else report_deadlock();
}

void wake(Thread* t) { ready.push(t); }

void give_way() {
  spinning.push(running);
  wait();
}

void let_others_run(const void* pc) {
  if (!launch.cooperative) return;
  Work work(pc ? pc : __builtin_return_address(0));
  give_way();
}

// Stacks stay for the next launch of this module; between two launches they may be given back.
EMU_API int emu_stacks() { return num_fibers(); }
EMU_API void emu_free_stacks() {
  free_all_fibers();
  idle_fibers = nullptr;
}

void run_all_blocks() {
  ready = spinning = {};
  resident = nullptr;
  running = nullptr;
  started_blocks = live_blocks = 0;
  started_threads = launch.threads;  // the next start is that of a new block
  tick_pending = false;
  begin_work();
  switch_fiber(&caller_fiber, take_fiber());
  if (failed) emu_free_stacks();  // the abandoned fibers hold half-run kernels
}

}  // namespace emu
