// Generated from notebooks/15_device_resident_step.ipynb; edit there, then run: python tools/nb.py export

// The end of a step: its tokens go to the host, and every sequence is one position further.
//
// chosen int [B]; counts int [3] = {N, B, turn}; positions, computed int [.]: the first B of each grow by one, so the
// next step of the same sequences needs nothing from the host. delivered: see deliver.cuh.
// Launch: one thread for a sequence, any block size.
// Limit: the launch.
#include "deliver.cuh"
#include "dependent.cuh"

extern "C" __global__ void advance(const int* chosen, const int* counts, int* positions, int* computed,
                                   int* delivered, int stride) {
    let_next_kernel_start();
    wait_for_previous_kernel();
    const int sequence = blockIdx.x * blockDim.x + threadIdx.x;
    if (sequence >= counts[1]) return;
    deliver(delivered, stride, counts[2], sequence, chosen[sequence]);
    positions[sequence] += 1;
    computed[sequence] += 1;
}
