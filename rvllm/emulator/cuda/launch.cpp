// launch.cpp - what Python calls: prepares a launch, runs it, cleans up.
#include <cstdlib>
#include <cstring>
#include <link.h>
#include "runtime.h"

namespace emu {

uint3 block_dim, grid_dim;
Counters counters;
char *static_shared, *image_begin, *image_end;
size_t static_bytes;
alignas(4096) char dynamic_region[DYNAMIC_MARGIN + MAX_DYNAMIC_BYTES + DYNAMIC_MARGIN];
// Lies in the module's thread-local segment. It has a value, so it comes before the kernels' __shared__ variables; its
// size leaves their alignment as it is.
alignas(64) static thread_local char segment_mark[64] = {1};

void* dynamic_shared() { return dynamic_buffer; }
void note_atomic(void* p, size_t size, const void* pc) { check_atomic(p, size, pc); }
void note_unsettled(void* value, const void* p, size_t size, const void* pc) { check_unsettled(value, p, size, pc); }

void wait_for_previous_kernel() { running->waited = running->block->waited = launch.waits = true; }
void let_next_kernel_start() {
  if (!running->waited) launch.early = true;
}

// dl_iterate_phdr: finds this module, its thread-local segment and its mapped image. Returning 1 ends the
// search.
static int find_module(dl_phdr_info* info, size_t, void*) {
  char* segment = (char*)info->dlpi_tls_data;
  bool found = false;
  for (int i = 0; i < info->dlpi_phnum; i++) {
    const auto& header = info->dlpi_phdr[i];
    if (header.p_type != PT_TLS || !segment) continue;
    if (segment_mark < segment || segment_mark >= segment + header.p_memsz) continue;
    static_shared = segment;
    static_bytes = header.p_memsz;
    found = true;
  }
  if (!found) return 0;
  image_begin = (char*)info->dlpi_addr;
  for (int i = 0; i < info->dlpi_phnum; i++) {
    const auto& header = info->dlpi_phdr[i];
    if (header.p_type != PT_LOAD) continue;
    image_end = image_begin + header.p_vaddr + header.p_memsz;  // the last of them ends highest
  }
  return 1;
}

template <class T>
static T* zeroed(size_t count) {
  return (T*)calloc(count ? count : 1, sizeof(T));
}

static void make_block(Block* b) {
  const unsigned warps = (launch.threads + 31) / 32;
  b->threads = zeroed<Thread>(launch.threads);
  b->warps = zeroed<Warp>(warps);
  if (launch.cooperative) b->saved_shared = zeroed<char>(static_bytes + launch.dynamic_bytes);
  for (unsigned rank = 0; rank < launch.threads; rank++) {
    Thread& t = b->threads[rank];
    t.index = {rank % block_dim.x, rank / block_dim.x % block_dim.y, rank / block_dim.x / block_dim.y};
    t.rank = rank;
    t.lane = rank % 32;
    t.block = b;
    t.warp = &b->warps[rank / 32];
    t.warp->lanes |= 1u << t.lane;
  }
}

static void make_blocks() {
  launch.resident_blocks = launch.cooperative ? launch.blocks : 1;
  launch.block_table = zeroed<Block>(launch.resident_blocks);
  for (unsigned i = 0; i < launch.resident_blocks; i++) make_block(&launch.block_table[i]);
  launch.order = zeroed<unsigned>(launch.threads);
  for (unsigned i = 0; i < launch.threads; i++) launch.order[i] = launch.reverse ? launch.threads - 1 - i : i;
}

static void free_blocks() {
  for (unsigned i = 0; i < launch.resident_blocks; i++) {
    Block& b = launch.block_table[i];
    free(b.threads);
    free(b.warps);
    free(b.saved_shared);
  }
  free(launch.block_table);
  free(launch.order);
}

// Read from Python, see launch.py beside this folder; keep the two alike.
struct LaunchRequest {
  void (*kernel)(void**);
  void** values;
  unsigned grid[3], block[3];
  size_t dynamic_bytes;
  double cpu_seconds;
  int cooperative, reverse, races, counting;
  int array_count;
  char** array_begins;
  size_t* array_sizes;
  int* array_arguments;
  int* array_writable;
  Mark** array_marks;
  unsigned number, settled;
  int dependent;
  int early, waits;  // answers
};

static void begin(const LaunchRequest& r) {
  segment_mark[0] = 1;  // the segment of this OS thread exists from its first use on
  dl_iterate_phdr(find_module, nullptr);
  grid_dim = {r.grid[0], r.grid[1], r.grid[2]};
  block_dim = {r.block[0], r.block[1], r.block[2]};
  const unsigned previous_last_barrier = launch.last_barrier;
  launch = {};
  launch.kernel = r.kernel;
  launch.values = r.values;
  launch.threads = r.block[0] * r.block[1] * r.block[2];
  launch.blocks = r.grid[0] * r.grid[1] * r.grid[2];
  launch.dynamic_bytes = r.dynamic_bytes;
  launch.cooperative = r.cooperative;
  launch.reverse = r.reverse;
  launch.races = r.races;
  launch.counting = r.counting;
  launch.number = r.number;
  launch.settled = r.settled;
  launch.dependent = r.dependent;
  launch.array_count = r.array_count;
  launch.arrays = zeroed<Array>(r.array_count);
  for (int i = 0; i < r.array_count; i++) {
    char* start = r.array_begins[i];
    launch.arrays[i] = {start, start + r.array_sizes[i], r.array_arguments[i], r.array_writable[i] != 0, {}, {}};
    if (r.number) launch.arrays[i].marks = r.array_marks[i];
  }
  launch.first_barrier = launch.last_barrier = previous_last_barrier + 1;
  counters = {};
  failed = false;
  make_blocks();
}

// Returns 0, or -1 if the run ended with a report (emu_report).
EMU_API int emu_launch(LaunchRequest* request) {
  begin(*request);
  checker_begin_launch();
  catch_signals(request->cpu_seconds);
  run_all_blocks();
  release_signals();
  checker_end_launch();
  free_blocks();
  free(launch.arrays);
  request->early = launch.early;
  request->waits = launch.waits;
  return failed ? -1 : 0;
}

// Bytes of the __shared__ variables that the module declares.
EMU_API size_t emu_static_shared() {
  segment_mark[0] = 1;
  dl_iterate_phdr(find_module, nullptr);
  return static_bytes - sizeof segment_mark;
}

EMU_API const void* emu_counters() { return &counters; }

}  // namespace emu
