// checker.h - what the parts of the checker share: checker.cpp (bounds, alignment, unset memory) and
// races.cpp.
#pragma once
#include "runtime.h"

namespace emu {

struct MemoryAccess {  // by the running thread, now
  const char* p;
  size_t size;
  bool write, atomic;
  const void* pc;

  const char* verb() const { return atomic ? "atomic update" : write ? "write" : "read"; }
};

void races_begin_launch();
void races_end_launch();
// Reports a race, if the access is part of one, and remembers it. `offset` is that in the array or shared
// memory.
void check_global_races(const Array& array, size_t offset, const MemoryAccess& now);
void check_shared_races(bool dynamic, size_t offset, const MemoryAccess& now);

}  // namespace emu
