// Generated from notebooks/15_device_resident_step.ipynb; edit there, then run: python tools/nb.py export

// Take a step's inputs out of the host's memory, which the card can read, and put each where the kernels look for it.
//
// letter int, in pinned host memory: {n, B, turn, changes}, then token_ids, positions, owners [n], rows, computed [B],
// and `changes` pairs {index in block_tables, block}: of the tables only what differs is sent.
// Launch: any grid and block: the threads share the letter out.
// One launch instead of a copy for each array, and as many bytes as the step has, not as many as would fit.
// Limit: the way over PCIe, a few microseconds, and only for steps that differ from what the device expects.
__device__ inline void copy(int* to, const int* from, int n) {
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) to[i] = from[i];
}

extern "C" __global__ void receive(const int* letter, int* counts, int* token_ids, int* positions, int* owners,
                                   int* rows, int* computed, int* block_tables) {
    const int n = letter[0], B = letter[1], changes = letter[3];
    const int* part = letter + 4;
    copy(counts, letter, 3);
    copy(token_ids, part, n);
    copy(positions, part + n, n);
    copy(owners, part + 2 * n, n);
    copy(rows, part + 3 * n, B);
    copy(computed, part + 3 * n + B, B);
    part += 3 * n + 2 * B;
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < changes; i += gridDim.x * blockDim.x)
        block_tables[part[2 * i]] = part[2 * i + 1];
}
