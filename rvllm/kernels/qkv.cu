// Generated from notebooks/18_fused_kernels.ipynb; edit there, then run: python tools/nb.py export

// Queries, keys and values of all tokens: norm, product, RoPE and the write to the cache, in one kernel.
//
// hidden half [N or 2N][WIDTH] (norm.cuh) -> out float [N][H d + 2 K d], q and k turned; k and v also go to the pages.
// rms_now[N] is what the next norm calls rms_before.   rope: float [positions][d / 2][2], cosine and sine.
// Launch: grid (ceil(row tiles / ROW_TILES), ceil(N / TOKENS)), 32 WARPS threads.
// Instead of rmsnorm, three products, two ropes and two cache writes: what they passed on through memory stays in
// registers, and the weights are on their way before the kernel before this one has ended.
// Limit: instruction latency. A warp runs some 260 instructions at batch 1, and there are few warps to hide them.
#include "dependent.cuh"
#include "norm.cuh"
#include "product.cuh"
#include "qkv_rows.cuh"

static_assert(WIDTH > 0 && WIDTH % 32 == 0, "WIDTH must be a multiple of 32: whole k-blocks");
typedef Product<TILE, COLUMN_TILES, HI_LO, ROW_TILES, WARPS, BLOCKS_PER_WARP, WIDTH / 32> Projection;
typedef Norm<Projection::TOKENS, WARPS, WIDTH / 16> InputNorm;
const int TOKENS = Projection::TOKENS, THREADS = Projection::THREADS, COLUMNS = Projection::ROWS_PER_TOKEN;
const int ROUNDS = (TOKENS * 8 + THREADS - 1) / THREADS;  // a thread finishes pairs of rows, 8 pairs of a token's tile

extern "C" __global__ void __launch_bounds__(32 * WARPS, 1)
qkv(const unsigned char* weights, const half* hidden, const float* squares, int capacity, float eps,
    const float* rms_before, float* rms_now, const float* rope, const int* counts, const int* positions,
    const int* owners, const int* block_tables, int max_blocks, float* out, half* pages) {
    __shared__ float partial[Projection::SHARED], norms[InputNorm::SHARED];
    Projection product;
    InputNorm norm;
    Finish finish[ROUNDS];
    if (EARLY) let_next_kernel_start();
    product.load(weights, blockIdx.x * ROW_TILES, ROWS / 16);
    const int first = blockIdx.y * TOKENS, count = min(counts[0] - first, TOKENS), pair = threadIdx.x % 8 * 2;
    for (int i = 0; i < ROUNDS; i++) {
        const int token = first + min((int)(threadIdx.x + i * THREADS) / 8, TOKENS - 1);
        finish[i].place = place_of(token, positions, owners, block_tables, max_blocks);
        finish[i].look_up(rope, pair);
    }
    if (count <= 0) return;  // never the first group: some block always waits for the kernel before
    wait_for_previous_kernel();
    if (!EARLY) let_next_kernel_start();
    norm.load(squares, capacity, first);
    product.multiply(hidden + (size_t)first * COLUMNS * WIDTH, count * COLUMNS);
    for (int i = 0; i < ROUNDS; i++) finish[i].factor = load_fresh(rms_before + finish[i].place.token);
    norm.share(norms);
#pragma unroll
    for (int r = 0; r < ROW_TILES; r++) {
        if (r) __syncthreads();
        product.share(partial, r);
        __syncthreads();
        const int row = (blockIdx.x * ROW_TILES + r) * 16 + pair;
        for (int i = 0; i < ROUNDS; i++) {
            const int token = (threadIdx.x + i * THREADS) / 8;
            if (token >= count || row >= ROWS) continue;
            if (r == 0) {
                const float rms = InputNorm::inverse_rms(norms, token, eps);
                finish[i].factor = __fdividef(rms, finish[i].factor);
                if (row == 0) rms_now[first + token] = rms;
            }
            const float low = Projection::total(partial, token, pair);
            finish[i].store(low, Projection::total(partial, token, pair + 1), row, finish[i].turns[r], out, pages);
        }
    }
}
