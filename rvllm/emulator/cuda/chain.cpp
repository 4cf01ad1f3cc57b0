// chain.cpp - finds kernels that started early and touch what those before them have not settled. In check builds only.
//
// A kernel that is launched with programmatic dependence may start while others still run: the one before it, and, if
// that one let it start before it had itself waited, also the one before that. Here it starts when all of them have
// ended, so nothing would go wrong; instead every two bytes of global memory remember which launches touched them last.
// Until a thread has waited (wait_for_previous_kernel), it must not read what a launch beyond the settled ones wrote, nor
// write what such a launch wrote or read.
#include <cstring>
#include "checker.h"

namespace emu {

// What each array remembers of two of its bytes: numbers of launches, 0 for none. Python holds them (chain.py), so that
// they outlive a launch. `before`: the last launch but the present one, whose own marks must not hide it.
struct Mark {
  unsigned writer, writer_before, reader, reader_before;
};
constexpr size_t GRAIN = 2;

static unsigned unsettled(unsigned last, unsigned before) {
  const unsigned number = last == launch.number ? before : last;
  return number > launch.settled ? number : 0;
}

static void leave(unsigned& last, unsigned& before) {
  if (last == launch.number) return;
  before = last;
  last = launch.number;
}

[[noreturn]] static void report_early(const MemoryAccess& now, const Array& a, size_t offset, unsigned number,
                                      bool written) {
  fail(now.write ? "early write" : "early read", now.pc,
       "%zu-byte %s, %zu bytes into argument %d, before wait_for_previous_kernel(): {launch %u} comes before and %s "
       "there%s", now.size, now.verb(), offset, a.argument, number, written ? "writes" : "reads",
       number + 1 == launch.number ? "" : "; {previous} lets this kernel start before it has waited itself");
}

void check_chain(const Array& a, size_t offset, const MemoryAccess& now) {
  if (!a.marks) return;
  const bool is_early = launch.dependent && !running->waited;
  for (size_t grain = offset / GRAIN; grain * GRAIN < offset + now.size; grain++) {
    Mark& m = a.marks[grain];
    if (is_early) {
      const unsigned writer = unsettled(m.writer, m.writer_before);
      const unsigned reader = now.write ? unsettled(m.reader, m.reader_before) : 0;
      if (writer && now.unsettled) memset(now.unsettled + (grain * GRAIN - offset), 0xff, GRAIN);
      else if (writer || reader) report_early(now, a, offset, writer ? writer : reader, writer);
    }
    if (now.write) leave(m.writer, m.writer_before);
    if (!now.write || now.atomic) leave(m.reader, m.reader_before);
  }
}

}  // namespace emu
