// Generated from notebooks/05_first_kernels.ipynb; edit there, then run: python tools/nb.py export

// Look up rows of a table: out[t, i] = table[token_ids[t], i].
//
// table float [vocab, dim], token_ids int [n_tokens], out float [n_tokens, dim].
// Launch: one thread for an output element, any block size; the grid covers n_tokens * dim.
// Neighbouring threads read neighbouring elements of a row, so a warp needs four sectors, and no thread waits.
// Limit: memory bandwidth; 8 bytes an element. Element counts up to 2^31 - 1.
extern "C" __global__ void embedding(const float* table, const int* token_ids, float* out, int n_tokens, int dim,
                                     int vocab) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n_tokens * dim) return;
    int id = token_ids[i / dim];
    // The host has checked ids; an id out of range would read foreign memory, so it reads row 0 instead.
    if (id < 0 || id >= vocab) id = 0;
    out[i] = table[(long long)id * dim + i % dim];
}
