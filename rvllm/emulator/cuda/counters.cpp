// counters.cpp - counts what a warp's memory accesses cost. In check builds, on request.
//
// Lanes run one after another here, on a GPU together: there the n-th execution of one instruction by the
// lanes of a warp is one request. So accesses are gathered by instruction (its address in the code), n, and
// lane, and a warp's table is evaluated and emptied when its last lane reaches a point where all lanes meet:
// a block barrier, a collective of the full warp, or the end. Memory is bounded: at most MAX_REQUESTS
// requests are held for a warp at a time; accesses beyond that are counted, but only as `ungrouped`, not as
// requests, sectors and conflicts.
//
// Global memory is moved in sectors of 32 bytes, counted from the start of the array (a GPU's allocations
// start at multiples of 256 bytes). Shared memory has 32 banks, each 4 bytes wide; one wavefront serves one
// word of each bank to any number of lanes. Lanes are served 32, 16 or 8 at a time for accesses of up to 4, 8
// or 16 bytes.
#include <algorithm>
#include <unordered_map>
#include <vector>
#include "runtime.h"

namespace emu {

constexpr size_t MAX_REQUESTS = 1 << 15;
constexpr unsigned SECTOR = 32, BANKS = 32, NONE = ~0u;

struct WarpRequest {         // one execution of an instruction by the lanes of a warp
  unsigned lanes;            // bit set: who took part
  unsigned sizes[32];
  size_t offsets[32];        // in the array, or in shared memory
};
struct Instruction {
  bool shared;
  unsigned executions[32];   // so far, by each lane
  std::vector<unsigned> requests;
};
struct WarpTable {
  unsigned met;              // lanes that have come to the next meeting point
  size_t used;
  std::vector<WarpRequest> requests;
  std::unordered_map<uintptr_t, Instruction> instructions;
  uintptr_t last_key;        // most accesses repeat the instruction of the one before
  Instruction* last;
};

static Instruction& find_instruction(WarpTable& table, const void* pc, bool shared) {
  // One instruction may touch both global and shared memory, through a pointer that is now this, now that.
  const uintptr_t key = (uintptr_t)pc * 2 + shared;
  if (table.last && table.last_key == key) return *table.last;
  Instruction& found = table.instructions[key];
  found.shared = shared;
  table.last_key = key;
  table.last = &found;  // elements of an unordered_map stay where they are
  return found;
}

static WarpRequest* find_request(WarpTable& table, Instruction& instruction, unsigned lane) {
  const unsigned n = instruction.executions[lane]++;
  if (n >= instruction.requests.size()) instruction.requests.resize(n + 1, NONE);
  unsigned& index = instruction.requests[n];
  if (index == NONE) {
    if (table.used == MAX_REQUESTS) return nullptr;
    if (table.used == table.requests.size()) table.requests.emplace_back();
    index = table.used++;
    table.requests[index].lanes = 0;
  }
  return &table.requests[index];
}

static void sort_unique(std::vector<size_t>& values) {
  std::sort(values.begin(), values.end());
  values.erase(std::unique(values.begin(), values.end()), values.end());
}

static void count_sectors(const WarpRequest& r) {
  static std::vector<size_t> sectors;
  sectors.clear();
  for (unsigned rest = r.lanes; rest; rest &= rest - 1) {
    const int lane = __builtin_ctz(rest);
    const size_t first = r.offsets[lane] / SECTOR, last = (r.offsets[lane] + r.sizes[lane] - 1) / SECTOR;
    for (size_t s = first; s <= last; s++)
      if (sectors.empty() || sectors.back() != s) sectors.push_back(s);
  }
  if (!std::is_sorted(sectors.begin(), sectors.end())) sort_unique(sectors);
  counters.sectors += sectors.size();
  counters.global_requests++;
}

// The wavefronts that some lanes need together: as many as the busiest bank has different words to give.
static unsigned wavefronts(const WarpRequest& r, unsigned lanes) {
  static std::vector<size_t> words;
  words.clear();
  for (unsigned rest = lanes; rest; rest &= rest - 1) {
    const int lane = __builtin_ctz(rest);
    const size_t end = r.offsets[lane] + r.sizes[lane];
    for (size_t word = r.offsets[lane] / 4; word * 4 < end; word++) words.push_back(word);
  }
  sort_unique(words);
  unsigned load[BANKS] = {}, most = 0;
  for (size_t word : words) most = std::max(most, ++load[word % BANKS]);
  return most;
}

static void count_bank_conflicts(const WarpRequest& r) {
  unsigned size = 0;
  for (unsigned rest = r.lanes; rest; rest &= rest - 1) size = std::max(size, r.sizes[__builtin_ctz(rest)]);
  const unsigned together = size <= 4 ? 32 : size <= 8 ? 16 : 8;
  for (unsigned first = 0; first < 32; first += together) {
    const unsigned lanes = (unsigned)((r.lanes >> first & ((1ull << together) - 1)) << first);
    if (lanes) counters.bank_conflicts += wavefronts(r, lanes) - 1;
  }
  counters.shared_requests++;
}

static void evaluate(WarpTable& table) {
  for (auto& [key, instruction] : table.instructions) {
    for (unsigned index : instruction.requests) {
      if (index == NONE) continue;
      if (instruction.shared) count_bank_conflicts(table.requests[index]);
      else count_sectors(table.requests[index]);
    }
  }
  table.instructions.clear();
  table.last = nullptr;
  table.used = 0;
}
void count_access(size_t offset, size_t size, bool shared, bool write, const void* pc) {
  if (shared) {
    (write ? counters.shared_writes : counters.shared_reads)++;
    (write ? counters.shared_write_bytes : counters.shared_read_bytes) += size;
  } else {
    (write ? counters.global_writes : counters.global_reads)++;
    (write ? counters.global_write_bytes : counters.global_read_bytes) += size;
  }
  const unsigned lane = running->lane;
  WarpTable& table = *running->warp->table;
  WarpRequest* r = find_request(table, find_instruction(table, pc, shared), lane);
  if (!r) {
    counters.ungrouped++;
    return;
  }
  r->lanes |= 1u << lane;
  r->offsets[lane] = offset;
  r->sizes[lane] = (unsigned)size;
}

void meet(Thread* t) {
  if (!launch.counting) return;
  WarpTable& table = *t->warp->table;
  table.met |= 1u << t->lane;
  if ((table.met | t->warp->exited) != t->warp->lanes) return;
  evaluate(table);
  table.met = 0;
}

template <class Do>
static void for_each_warp(Do what) {
  for (unsigned b = 0; b < launch.resident_blocks; b++)
    for (unsigned w = 0; w < (launch.threads + 31) / 32; w++) what(launch.block_table[b].warps[w]);
}
void counters_begin_launch() {
  for_each_warp([](Warp& warp) { warp.table = new WarpTable{}; });
}
void counters_end_launch() {
  for_each_warp([](Warp& warp) { delete warp.table; });
}

}  // namespace emu
