// Generated from notebooks/18_fused_kernels.ipynb; edit there, then run: python tools/nb.py export

// Logits of the last token of each sequence, and the best of them: final norm, product, and the first half of arg-max.
//
// hidden half (norm.cuh) of the tokens rows[B] -> logits float [B][VOCAB]; best_value float, best_index int
// [gridDim.x][stride]: the best of each block, for choose.cu; the value is NaN where a logit was not a finite number.
// Launch: grid (one block an SM, ceil(B / TOKENS)), 32 WARPS threads; shared: the activations.
// Each warp walks over row tiles with whole rows of its own: nothing is added across warps, and the next chunk of
// weights is on its way while this one is multiplied.
// Limit: memory at small batches (50 MB of Q8_0 in 14.5 us of an H200 where launches overlap, 3.4 TB/s), from batch 64
// on the products.
#include "columns.cuh"
#include "dependent.cuh"
#include "lm_best.cuh"
#include "lm_rows.cuh"
#include "norm.cuh"

static_assert(ROW_TILES >= 1, "ROW_TILES must be at least 1");
static_assert(VOCAB >= 1 && VOCAB < 1 << 23, "VOCAB must be 1 to 2^23 - 1: choose.cu packs an id into 23 bits");

extern "C" __global__ void __launch_bounds__(32 * WARPS, 1)
lm_head(const unsigned char* weights, const half* hidden, const float* squares, int capacity, float eps,
        const float* rms_before, const int* counts, const int* rows, float* logits, float* best_value, int* best_index,
        int stride) {
    extern __shared__ uint4 columns[];  // [8 COLUMN_TILES][ROW_BYTES / 16]
    __shared__ float norms[FinalNorm::SHARED], factors[TOKENS], values[WARPS][TOKENS];
    __shared__ int indices[WARPS][TOKENS];
    const int warp = blockIdx.x * WARPS + threadIdx.x / 32, num_warps = gridDim.x * WARPS;
    FinalNorm norm;
    Best best;
    Chunk chunks[2];
    let_next_kernel_start();
    chunks[0].load(weights, warp * ROW_TILES, 0);
    const int first = blockIdx.y * TOKENS, count = min(counts[1] - first, TOKENS);
    if (count <= 0) return;  // never the first group: some block always waits for the kernel before
    wait_for_previous_kernel();
    norm.load(squares, capacity, first, rows, count);
    stage_columns(columns, hidden, rows + first, count);
    norm.share(norms);
    __syncthreads();
    if (threadIdx.x < count) {
        const float before = load_fresh(rms_before + rows[first + threadIdx.x]);
        factors[threadIdx.x] = __fdividef(FinalNorm::inverse_rms(norms, threadIdx.x, eps), before);
    }
    __syncthreads();
    float* first_logits = logits + (size_t)first * VOCAB;
    best.clear();
    for (int tile = warp * ROW_TILES; tile < VOCAB_TILES; tile += num_warps * ROW_TILES) {
        float sums[ROW_TILES][4 * COLUMN_TILES] = {};
        multiply_tiles(sums, chunks, weights, tile, tile + num_warps * ROW_TILES, columns);
#pragma unroll
        for (int i = 0; i < ROW_TILES * SEEN; i++)
            finish_rows(sums[i / SEEN], i % SEEN, tile + i / SEEN, count, factors, first_logits, best);
    }
    best.agree();
    best.share(values, indices);
    __syncthreads();
    if (threadIdx.x >= count) return;
    const size_t slot = blockIdx.x * stride + first + threadIdx.x;
    best_of_warps(values, indices, best_value + slot, best_index + slot);
}
