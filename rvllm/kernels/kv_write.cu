// Generated from notebooks/09_paged_kv_cache.ipynb; edit there, then run: python tools/nb.py export

// Store new keys and values in their slots of the paged cache.
//
// k, v float [n_tokens, row], row = K * d; keys, values float [num_blocks * block_size, row]; slot_mapping int
// [n_tokens], -1 for a padded token, which is not stored.
// Launch: one thread for an element, any block size; the grid covers n_tokens * row.
// Limit: memory bandwidth; 16 bytes an element, keys and values together.
extern "C" __global__ void kv_write(const float* k, const float* v, float* keys, float* values,
                                    const int* slot_mapping, int n_tokens, int row) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n_tokens * row) return;
    int slot = slot_mapping[i / row];
    if (slot < 0) return;
    long long to = (long long)slot * row + i % row;
    keys[to] = k[i];
    values[to] = v[i];
}
