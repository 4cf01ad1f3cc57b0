"""CUDA C on the CPU: compile kernels with g++, run them on NumPy arrays, be told what they do wrong.

    module = Module(source, "scale.cu")                       # the text of a .cu file
    module.launch("scale", grid, block, [x, 2.0, x.size])     # x: a NumPy array, used in place
    module.launch(..., count=True); module.counters           # what the memory accesses would cost on a GPU

How it works, one idea a paragraph; the C++ files in `cuda/` go into detail.

**A kernel is C++.** `cuda/cuda_shim.h` defines the words that CUDA adds to C++ (`__global__`, `threadIdx`,
`__shared__`, half, intrinsics), and g++ or clang++ compiles the rest as it stands. Only `extern __shared__`
is rewritten. The result is cached by the hash of all that goes into it, so a kernel is compiled once for a
machine.

**A thread is a call.** One OS thread calls the kernel for each CUDA thread in turn. A thread that has to
wait, at a barrier or for its warp, keeps its stack (a fiber) while others run; a kernel that never waits
needs one stack and no switch. Everything happens in one fixed order, or backwards with `reverse=True`: a
correct kernel gives the same result in both.

**Shared memory is thread-local memory.** The compiler puts all `__shared__` variables of a module side by
side; the emulator finds that stretch, fills it with NaNs at the start of every block, and swaps it when
blocks take turns.

**Warps meet.** Shuffles, votes and `__syncwarp` go through one function, `emu::warp_collective`: the last
lane to come serves all. Other masks, other lines, or lanes that have returned are errors. Headers can add
collectives by it.

**Check mode sees every memory access.** g++ is told to call a function before each load and store (it does
that for a race detector, whose library is left out), and the functions here look at the address: is it in an
argument or in shared memory, aligned, set before it is read, and has another thread touched it with no
barrier in between? A report (`EmulatorError`) names the line of the kernel, block and thread. Fast mode finds
only what stops the run by itself: divergence, endless loops, null pointers, division by zero, stack overflow.

**Counters.** With `count=True` the n-th execution of an instruction by the lanes of a warp is taken as one
request, and its 32-byte sectors or bank conflicts are counted. It takes up to twice the time, so it is off by
default.

**Chains.** Kernels that start before the one before them has ended (programmatic dependent launch) run one after
the other here. But launches that share a `Chain` remember who read and wrote what, so a kernel is reported that,
before it has waited, reads what a kernel before it writes, or writes what that one still reads; and one that never
waits. `cuda/chain.cpp` says which kernels may still run.

Limits. Approximate functions (`__expf`, `rsqrtf`) are exact here and products are not fused into sums, so
results differ from a GPU's in the last digits. A check is as good as the run: code that is not reached is not
checked. An access beyond one array that lands inside another argument goes unseen; races are remembered for
the last four accesses to a word, in arrays of up to 4 MiB, and not between the blocks of a cooperative
launch. A thread that spins until another has done something needs a cooperative launch. Returning before a
barrier that others wait at is an error here, though some GPUs let it pass. Not emulated: inline PTX, `mma.h`,
`cooperative_groups.h`, `cp.async`, textures, dynamic parallelism. Kernels must be written as `extern "C"
__global__ void name(...)`, and not bear the name of a C library function (`index`, `select`). A stack has 60
KiB. Linux only; check mode needs g++ 11 or newer; CPUs other than x86-64 take a portable switch.
"""

from rvllm.emulator.chain import Chain
from rvllm.emulator.compiler import available
from rvllm.emulator.counters import Counters
from rvllm.emulator.errors import (
    CompileError,
    CompilerMissingError,
    EmulatorError,
    HostBufferError,
    KernelArgumentError,
    LaunchConfigError,
)
from rvllm.emulator.module import Module
from rvllm.emulator.queue import LaunchQueue, QueueEvent

__all__ = [
    "Chain",
    "CompileError",
    "CompilerMissingError",
    "Counters",
    "EmulatorError",
    "HostBufferError",
    "KernelArgumentError",
    "LaunchConfigError",
    "LaunchQueue",
    "Module",
    "QueueEvent",
    "available",
]
