// Generated from notebooks/09_paged_kv_cache.ipynb; edit there, then run: python tools/nb.py export

// Collect the keys (or the values) of whole sequences from their cache blocks, head by head.
//
// storage float [num_blocks, block_size, K, d], block_tables int [B, width], seq_lens int [B], out float [B, K, S, d].
// Positions past a sequence's end become 0: the cache there may hold anything, NaN included.
// Launch: one thread for an output element, any block size; the grid covers B * K * S * d.
// Rows of d stay whole, so a warp reads and writes contiguous bytes; only the block's number is looked up.
// Limit: memory bandwidth; 8 bytes an element, and the whole cache of the batch is copied in every step.
extern "C" __global__ void kv_gather(const float* storage, const int* block_tables, const int* seq_lens, float* out,
                                     int B, int S, int K, int d, int block_size, int width) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= B * K * S * d) return;
    int e = i % d, s = i / d % S, h = i / (d * S) % K, b = i / (d * S * K);
    float value = 0.0f;
    if (s < seq_lens[b]) {
        long long block = block_tables[(long long)b * width + s / block_size];
        value = storage[((block * block_size + s % block_size) * K + h) * d + e];
    }
    out[i] = value;
}
