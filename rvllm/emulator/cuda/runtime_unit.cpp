// runtime_unit.cpp - the whole runtime as one unit: it compiles faster, and the compiler sees through the
// calls.
#include "fiber.cpp"
#include "scheduler.cpp"
#include "collectives.cpp"
#include "faults.cpp"
#include "launch.cpp"
#if EMU_CHECK
#include "checker.cpp"
#include "races.cpp"
#include "chain.cpp"
#include "counters.cpp"
#endif
