// Generated from notebooks/09_paged_kv_cache.ipynb; edit there, then run: python tools/nb.py export

// kv_gather for head sizes that are a multiple of four: a thread moves 16 bytes.
//
// storage float [num_blocks, block_size, K, d], block_tables int [B, width], seq_lens int [B], out float [B, K, S, d].
// d must be a multiple of 4, storage and out aligned to 16 bytes. Positions past a sequence's end become 0.
// Launch: one thread for four output elements, any block size; the grid covers B * K * S * d / 4.
// Faster than kv_gather, which takes its index apart with eight / and % for every 4 bytes: here it is a quarter of
// them, and a quarter of the loads and stores.
// Limit: memory bandwidth; 32 bytes for four elements, and the whole cache of the batch is copied in every step.
extern "C" __global__ void kv_gather4(const float* storage, const int* block_tables, const int* seq_lens, float* out,
                                      int B, int S, int K, int d, int block_size, int width) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    int quads = d / 4;
    if (i >= B * K * S * quads) return;
    int e = i % quads, s = i / quads % S, h = i / (quads * S) % K, b = i / (quads * S * K);
    float4 value = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    if (s < seq_lens[b]) {
        long long block = block_tables[(long long)b * width + s / block_size];
        value = ((const float4*)storage)[((block * block_size + s % block_size) * K + h) * quads + e];
    }
    ((float4*)out)[i] = value;
}
