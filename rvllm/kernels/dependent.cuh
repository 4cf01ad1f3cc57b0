// Generated from notebooks/15_device_resident_step.ipynb; edit there, then run: python tools/nb.py export

// Programmatic dependent launch (sm_90): a kernel starts while the one before it, in the same stream, still runs.
//
// let_next_kernel_start: every thread of a block calls it, once the next kernel may have its place on the card.
// wait_for_previous_kernel: returns when the kernel before has ended and its writes can be seen. Every kernel of a
//   chain calls it, so that "the one before has ended" holds for all before that one too. What a kernel reads before
//   it must be older than the chain. Both do nothing on older cards and where the launch did not ask for it.
#pragma once

__device__ inline void wait_for_previous_kernel() {
#ifdef CUDA_EMULATOR
    emu::wait_for_previous_kernel();  // in check mode: from here on this thread may touch all that kernels before left
#elif __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

__device__ inline void let_next_kernel_start() {
#ifdef CUDA_EMULATOR
    emu::let_next_kernel_start();
#elif __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
