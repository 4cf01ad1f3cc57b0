// Generated from notebooks/15_device_resident_step.ipynb; edit there, then run: python tools/nb.py export

// Send the chosen tokens to the host once more: after sample has replaced some of them.
//
// chosen int [B]; counts int [3] = {N, B, turn}; delivered: see deliver.cuh.
// Launch: one thread for a sequence, any block size.
// Limit: the launch; steps in which every sequence takes its likeliest token do without.
#include "deliver.cuh"
#include "dependent.cuh"

extern "C" __global__ void redeliver(const int* chosen, const int* counts, int* delivered, int stride) {
    wait_for_previous_kernel();
    const int sequence = blockIdx.x * blockDim.x + threadIdx.x;
    if (sequence < counts[1]) deliver(delivered, stride, counts[2], sequence, chosen[sequence]);
}
