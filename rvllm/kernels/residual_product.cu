// Generated from notebooks/18_fused_kernels.ipynb; edit there, then run: python tools/nb.py export

// x += W activations: the output projection and the down projection, with all that the next norm needs.
//
// activations half [N or 2N][IN_WIDTH], their values divided by `factor` -> x float [N][WIDTH], in place.
// Also for the norm that follows (norm.cuh): hidden = gain * x * rms_before, and squares[row tile][token].
// Launch: grid (WIDTH / 16, ceil(N / TOKENS)), 32 WARPS threads. A block owns 16 rows of x for its tokens, so nothing
// has to be added across blocks, and the residual is read and written once.
// Limit: latency again at small batches; from 64 tokens on the products.
#include "dependent.cuh"
#include "norm.cuh"
#include "product.cuh"

static_assert(WIDTH > 0 && WIDTH % 16 == 0, "WIDTH must be a multiple of 16: whole row tiles");
static_assert(IN_WIDTH > 0 && IN_WIDTH % 32 == 0, "IN_WIDTH must be a multiple of 32: whole k-blocks");
static_assert(ROW_TILES == 1, "ROW_TILES must be 1: a block owns 16 rows");
typedef Product<TILE, COLUMN_TILES, HI_LO, 1, WARPS, BLOCKS_PER_WARP, IN_WIDTH / 32> Projection;
const int TOKENS = Projection::TOKENS, THREADS = Projection::THREADS, COLUMNS = Projection::ROWS_PER_TOKEN;
const int ROUNDS = (TOKENS * 16 + THREADS - 1) / THREADS;  // a thread finishes a row, 16 lanes a token

__device__ inline float sum_of_16_lanes(float value) {
    for (int offset = 8; offset; offset /= 2) value += __shfl_xor_sync(0xffffffff, value, offset);
    return value;
}

extern "C" __global__ void __launch_bounds__(32 * WARPS, 1)
residual_product(const unsigned char* weights, const half* activations, float factor, const float* gain,
                 const float* rms_before, const int* counts, int capacity, float* x, half* hidden, float* squares) {
    __shared__ float partial[Projection::SHARED];
    Projection product;
    float residual[ROUNDS], before[ROUNDS];
    if (EARLY) let_next_kernel_start();
    product.load(weights, blockIdx.x, WIDTH / 16);
    const int first = blockIdx.y * TOKENS, count = min(counts[0] - first, TOKENS);
    if (count <= 0) return;  // never the first group: some block always waits for the kernel before
    const int tile_row = threadIdx.x % 16, row = blockIdx.x * 16 + tile_row;
    const float weight = gain[row];
    wait_for_previous_kernel();
    if (!EARLY) let_next_kernel_start();
    for (int i = 0; i < ROUNDS; i++) {
        const int token = first + min((int)(threadIdx.x + i * THREADS) / 16, TOKENS - 1);
        residual[i] = load_fresh(x + (size_t)token * WIDTH + row);
        before[i] = load_fresh(rms_before + token);
    }
    product.multiply(activations + (size_t)first * COLUMNS * IN_WIDTH, count * COLUMNS);
    product.share(partial, 0);
    __syncthreads();
    for (int i = 0; i < ROUNDS; i++) {
        const int token = (threadIdx.x + i * THREADS) / 16;
        const bool real = token < count;
        const float value = real ? residual[i] + Projection::total(partial, token, tile_row) * factor : 0.0f;
        const float sum = sum_of_16_lanes(value * value);
        if (!real) continue;
        x[(size_t)(first + token) * WIDTH + row] = value;
        store_activation<HI_LO>(hidden, first + token, WIDTH, row, value * weight * before[i]);
        if (tile_row == 0) squares[blockIdx.x * capacity + first + token] = sum;
    }
}
