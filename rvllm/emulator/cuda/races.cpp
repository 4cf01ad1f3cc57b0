// races.cpp - finds two accesses to the same memory that nothing orders. In check builds only.
//
// A race is two accesses by different threads, at least one of them a write and not both atomic, with no
// barrier between them. Here threads run in one order, but in which they run must not matter; so the question
// is not what happened first, but whether it had to.
//
// Each 4-byte word of memory remembers its last few accesses. That history is short, so a race can go unseen
// when many threads touch one word; but what is reported is a race whatever the order of execution.
#include <sys/mman.h>
#include "checker.h"

namespace emu {

struct Access {
  unsigned block;      // number of the block
  unsigned barriers;   // of the block, at that time; below the launch's first: the entry is empty
  unsigned pc_offset;  // in the module
  unsigned rank : 10;  // of the thread in the block
  unsigned syncs : 16; // of the warp, at that time
  unsigned bytes : 4;  // of the word: bit set
  unsigned write : 1;
  unsigned atomic : 1;
};
constexpr int HISTORY = 4;
struct Word { Access last[HISTORY]; };  // one cache line

static Word* shared_history;  // static part, then dynamic part; in a cooperative launch for each block
static size_t static_words, dynamic_words;

// ---- who came before whom ------------------------------------------------------------------------------
static bool same_thread(const Access& a, const Access& b) { return a.block == b.block && a.rank == b.rank; }

// Is the earlier access sure to come before the present one, in whatever order the threads run? Blocks of a
// grid are never ordered, but each has its own shared memory, and cooperative ones may have met at a barrier
// of their own making, which cannot be seen from here.
static bool is_ordered(const Access& earlier, const Access& now, bool shared) {
  if (earlier.block != now.block) return shared || launch.cooperative;
  if (earlier.rank == now.rank || earlier.barriers != now.barriers) return true;
  return earlier.rank / 32 == now.rank / 32 && earlier.syncs != now.syncs;
}

static bool is_empty(const Access& a) { return a.barriers < launch.first_barrier; }

static bool is_conflict(const Access& a, const Access& b) {
  return !is_empty(a) && (a.bytes & b.bytes) && (a.write || b.write) && !(a.atomic && b.atomic);
}

[[noreturn]] static void report_race(const Access& other, const MemoryAccess& now, bool shared) {
  const uint3 t = running->block->threads[other.rank].index;
  Where where = now.pc;
  where.other_pc_offset = other.pc_offset;
  const char* verb = other.atomic ? "atomic update" : other.write ? "write" : "read";
  fail(shared ? "shared memory race" : "global memory race", where,
       "%zu-byte %s conflicts with the %s at {other} by block %u thread (%u,%u,%u): nothing orders the two",
       now.size, now.verb(), verb, other.block, t.x, t.y, t.z);
}

// ---- history ------------------------------------------------------------------------------------
// Which remembered access to forget. Best is one that no later access can race with: of this thread, covered
// by the new one; or, in shared memory, one from before the block's last barrier. Then reads, which conflict
// less.
static Access* choose_victim(Word& word, const Access& now, bool shared) {
  Access* read = nullptr;
  for (Access& a : word.last) {
    if (is_empty(a) || (shared && (a.block != now.block || a.barriers != now.barriers))) return &a;
    const bool same_time = a.barriers == now.barriers && a.syncs == now.syncs;
    const bool covered = !(a.bytes & ~now.bytes) && a.write == now.write && a.atomic == now.atomic;
    if (covered && same_time && same_thread(a, now)) return &a;
    if (!a.write) read = &a;
  }
  return read ? read : &word.last[now.rank % HISTORY];
}

static Access describe(const MemoryAccess& now) {
  Access access = {};
  access.block = running->block->id;
  access.barriers = running->block->barriers;
  access.pc_offset = (unsigned)((const char*)now.pc - image_begin);
  access.rank = running->rank;
  access.syncs = running->warp->syncs & 0xffff;
  access.write = now.write;
  access.atomic = now.atomic;
  return access;
}

static void check_words(Word* words, size_t offset, const MemoryAccess& now, bool shared) {
  Access access = describe(now);
  const size_t end = offset + now.size;
  for (size_t word = offset / 4; word * 4 < end; word++) {
    const size_t first = word * 4 > offset ? 0 : offset % 4, last = end - word * 4 < 4 ? end - word * 4 : 4;
    access.bytes = (1u << last) - (1u << first);
    for (const Access& earlier : words[word].last)
      if (is_conflict(earlier, access) && !is_ordered(earlier, access, shared))
        report_race(earlier, now, shared);
    *choose_victim(words[word], access, shared) = access;
  }
}

void check_global_races(const Array& array, size_t offset, const MemoryAccess& now) {
  if (array.history) check_words(array.history, offset, now, false);
}

void check_shared_races(bool dynamic, size_t offset, const MemoryAccess& now) {
  if (!launch.races) return;
  const size_t of_block = launch.cooperative ? running->block->id * (static_words + dynamic_words) : 0;
  check_words(shared_history + of_block + (dynamic ? static_words : 0), offset, now, true);
}

// ---- memory of the histories ---------------------------------------------------------------------------
// All lie in one mapping, which is kept for the next launch: entries that earlier launches have left count as
// empty, and clearing it or mapping it anew would take longer than most launches.
constexpr long WATCHED_BYTES = 4 << 20;  // larger arrays are not watched: a history is 16 times as large
constexpr size_t KEPT_BYTES = 16 << 20;
static Word* histories;
static size_t histories_bytes;

static size_t history_words(const Array& a) {
  const long size = a.end - a.begin;
  return size <= WATCHED_BYTES ? (size + 3) / 4 : 0;
}

static void unmap_histories() {
  if (histories) munmap(histories, histories_bytes);
  histories = nullptr;
  histories_bytes = 0;
}

static bool map_histories(size_t bytes) {
  if (bytes <= histories_bytes) return true;
  unmap_histories();
  const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
  void* map = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, flags, -1, 0);
  if (map == MAP_FAILED) return false;
  histories = (Word*)map;
  histories_bytes = bytes;
  return true;
}

void races_begin_launch() {
  if (!launch.races) return;
  static_words = (static_bytes + 3) / 4;
  dynamic_words = (launch.dynamic_bytes + 3) / 4;
  const size_t shared_words = launch.resident_blocks * (static_words + dynamic_words);
  size_t words = shared_words;
  for (int i = 0; i < launch.array_count; i++) words += history_words(launch.arrays[i]);
  if (!map_histories((words + 1) * sizeof(Word))) {
    launch.races = false;  // no address space: this launch goes unwatched
    return;
  }
  shared_history = histories;
  Word* next = histories + shared_words;
  for (int i = 0; i < launch.array_count; i++) {
    const size_t words_of_array = history_words(launch.arrays[i]);
    if (words_of_array) launch.arrays[i].history = next;
    next += words_of_array;
  }
}

void races_end_launch() {
  // Counts of barriers have 32 bits. Long before they run out, forget everything and count from the start.
  const bool nearly_full = launch.last_barrier > 1u << 31;
  if (histories_bytes > KEPT_BYTES || nearly_full) unmap_histories();
  if (nearly_full) launch.last_barrier = 0;
}

}  // namespace emu
