// checker.h - what the parts of the checker share: checker.cpp (bounds, alignment, unset memory),
// races.cpp and chain.cpp.
#pragma once
#include "runtime.h"

namespace emu {

struct MemoryAccess {  // by the running thread, now
  const char* p;
  size_t size;
  bool write, atomic;
  const void* pc;
  char* unsettled = nullptr;  // load_unsettled: the value read, whose bytes that nobody may count on become 0xff

  const char* verb() const { return atomic ? "atomic update" : write ? "write" : "read"; }
};

void races_begin_launch();
void races_end_launch();
// Reports a race, if the access is part of one, and remembers it. `offset` is that in the array or shared
// memory.
void check_global_races(const Array& array, size_t offset, const MemoryAccess& now);
void check_shared_races(bool dynamic, size_t offset, const MemoryAccess& now);
// Reports an access that comes too early for a kernel of a chain, and remembers it.
void check_chain(const Array& array, size_t offset, const MemoryAccess& now);

}  // namespace emu
