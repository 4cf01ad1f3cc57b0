// collectives.cpp - the block barrier, and the operations that the lanes of a warp perform together.
#include <cstdarg>
#include <cstdio>
#include "runtime.h"

namespace emu {

// ---- block barrier ------------------------------------------------------------------------------
// Every thread of the block must come, at the same line, and none may have returned. (A GPU lets some of
// these cases pass; they are undefined, and break on the next one.)
static void check_barrier(const Block* b, Place place) {
  if (b->exited)
    fail("barrier divergence", place, "%u of %u threads have returned and will never arrive", b->exited,
         launch.threads);
  if (b->arrived && b->barrier.line != place.line)
    fail("barrier divergence", place, "this thread waits here, %u others wait at line %d", b->arrived,
         b->barrier.line);
}

static int combine(int sum, int predicate, Vote vote) {
  switch (vote) {
    case Vote::COUNT: return sum + predicate;
    case Vote::AND: return sum && predicate;
    default: return sum || predicate;
  }
}

int block_barrier(int predicate, Vote vote, Place place) {
  Work work(place);
  Block* b = running->block;
  check_barrier(b, place);
  meet(running);
  b->barrier = place;
  b->vote = b->arrived ? combine(b->vote, predicate, vote) : predicate;
  if (++b->arrived < launch.threads) {
    wait();
    return b->result;
  }
  b->arrived = 0;
  if (++b->barriers > launch.last_barrier) launch.last_barrier = b->barriers;
  counters.barriers++;
  b->result = b->vote;  // stays until all have read it: the next barrier needs them all
  for (unsigned i = 0; i < launch.threads; i++) {
    Thread* t = &b->threads[launch.order[i]];
    t->waited |= b->waited;  // who has met one that has waited comes after what that one waited for
    if (t != running) wake(t);
  }
  return b->result;
}

// ---- warp collectives ---------------------------------------------------------------------------
static void check_lane(const Thread* t, const Thread* last) {
  if (t->mask != last->mask || t->serve != last->serve || t->place.line != last->place.line)
    fail("warp divergence", last->place,
         "lane %u waits at line %d (mask %08x), lane %u at line %d (mask %08x)", t->lane, t->place.line,
         t->mask, last->lane, last->place.line, last->mask);
}

// The last lane of the mask has come: serve all, and let them go on.
static void complete(Thread* last) {
  const unsigned mask = last->mask;
  Warp* warp = last->warp;
  Thread* lanes = last - last->lane;
  void* operands[32] = {};
  for (unsigned rest = mask; rest; rest &= rest - 1) {
    const int lane = __builtin_ctz(rest);
    check_lane(&lanes[lane], last);
    operands[lane] = lanes[lane].operand;
  }
  last->serve(mask, operands);
  warp->waiting &= ~mask;
  counters.warp_collectives++;
  for (unsigned rest = mask; rest; rest &= rest - 1) {
    Thread* t = &lanes[__builtin_ctz(rest)];
    if (t != last) wake(t);
  }
}

void warp_collective(unsigned mask, void* operand, Serve serve, Place place) {
  Work work(place);
  Thread* self = running;
  Warp* warp = self->warp;
  mask &= warp->lanes;
  if (!(mask >> self->lane & 1))
    fail("warp divergence", place, "lane %u is not in its own mask %08x", self->lane, mask);
  if (mask & warp->exited)
    fail("warp divergence", place, "waits for lanes %08x, but lanes %08x have returned", mask,
         mask & warp->exited);
  self->mask = mask;
  self->operand = operand;
  self->serve = serve;
  self->place = place;
  warp->waiting |= 1u << self->lane;
  if (mask == warp->lanes) meet(self);
  if (mask & ~warp->waiting) wait();
  else complete(self);
}

void refuse(unsigned lane, const char* format, ...) {
  char text[200];
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(text, sizeof text, format, arguments);
  va_end(arguments);
  const Place place = running->place;
  running = running - running->lane + lane;
  fail("warp divergence", place, "%s", text);
}

// ---- shuffles, votes, sums ----------------------------------------------------------------------
namespace {
struct Shuffle {
  uint64_t value, result;
  unsigned source;
};

void serve_shuffle(unsigned mask, void* const* operands) {
  for (unsigned rest = mask; rest; rest &= rest - 1) {
    const int lane = __builtin_ctz(rest);
    Shuffle* mine = (Shuffle*)operands[lane];
    if (!(mask >> mine->source & 1))
      refuse(lane, "lane %d reads from lane %u, which takes no part (mask %08x)", lane, mine->source, mask);
    mine->result = ((Shuffle*)operands[mine->source])->value;
  }
}

struct Reduction {
  int64_t value;
  Reduce how;
};

int64_t reduced(int64_t a, int64_t b, Reduce how) {
  switch (how) {
    case Reduce::ADD: return a + b;
    case Reduce::MIN: return a < b ? a : b;
    case Reduce::MAX: return a > b ? a : b;
    case Reduce::AND: return a & b;
    case Reduce::OR: return a | b;
    default: return a ^ b;
  }
}

void serve_reduction(unsigned mask, void* const* operands) {
  const Reduction* first = (Reduction*)operands[__builtin_ctz(mask)];
  int64_t total = first->value;
  for (unsigned rest = mask & (mask - 1); rest; rest &= rest - 1)
    total = reduced(total, ((Reduction*)operands[__builtin_ctz(rest)])->value, first->how);
  for (unsigned rest = mask; rest; rest &= rest - 1)
    ((Reduction*)operands[__builtin_ctz(rest)])->value = total;
}

void serve_ballot(unsigned mask, void* const* operands) {
  unsigned votes = 0;
  for (unsigned rest = mask; rest; rest &= rest - 1) {
    const int lane = __builtin_ctz(rest);
    votes |= *(unsigned*)operands[lane] << lane;
  }
  for (unsigned rest = mask; rest; rest &= rest - 1) *(unsigned*)operands[__builtin_ctz(rest)] = votes;
}

void serve_sync(unsigned mask, void* const*) {
  running->warp->syncs++;
  Thread* lanes = running - running->lane;
  bool waited = false;
  for (unsigned rest = mask; rest; rest &= rest - 1) waited |= lanes[__builtin_ctz(rest)].waited;
  for (unsigned rest = mask; rest; rest &= rest - 1) lanes[__builtin_ctz(rest)].waited = waited;
}
}  // namespace

uint64_t shuffle(unsigned mask, uint64_t value, unsigned source_lane, Place place) {
  Shuffle operand = {value, 0, source_lane};
  warp_collective(mask, &operand, serve_shuffle, place);
  return operand.result;
}

int64_t reduce(unsigned mask, int64_t value, Reduce how, Place place) {
  Reduction operand = {value, how};
  warp_collective(mask, &operand, serve_reduction, place);
  return operand.value;
}

unsigned ballot(unsigned mask, bool predicate, Place place) {
  unsigned operand = predicate;
  warp_collective(mask, &operand, serve_ballot, place);
  return operand;
}

void warp_sync(unsigned mask, Place place) {
  // Of all warp collectives only this one orders the lanes' memory accesses, by CUDA's definition.
  warp_collective(mask, nullptr, serve_sync, place);
}

}  // namespace emu
