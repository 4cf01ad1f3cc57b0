// Generated from notebooks/16_quantised_weights.ipynb; edit there, then run: python tools/nb.py export

// y = W x for a group of tokens, W in tiles, on the tensor cores.
//
// tiles unsigned char [ceil(rows / 16)][K_BLOCKS][TILE::BYTES], TILE a struct of tile.cuh; x half [N][32 K_BLOCKS] or,
// with HI_LO, [2N] (activations.cu); y float [N][rows]; counts[0] = N. `factor` undoes the one of the activations.
// Launch: grid (row tiles, groups of 8 rows of x), 32 WARPS threads.
// As fast as matvec_v3 for one token: an mma has 8 columns, used or not. They are 8 tokens, or 4 in two parts each, or
// one token in two parts and six columns unused: that precision takes no instruction more as long as columns are left.
// Limit: memory bandwidth where there are many row tiles; with few, the time from the first load to the last sum.
#include "dependent.cuh"
#include "tile.cuh"
#include "tile_product.cuh"

static_assert(K_BLOCKS >= 1, "K_BLOCKS must be at least 1");
static_assert(WARPS >= 1 && WARPS <= 32, "WARPS must be 1 to 32: a block has at most 1,024 threads");
const int COLUMNS = HI_LO ? 2 : 1, TOKENS = 8 / COLUMNS;  // columns of a token, tokens of a group
const int SHARE = (K_BLOCKS + WARPS - 1) / WARPS;  // tiles of a warp
const int AT_ONCE = SHARE < 5 ? SHARE : 5;         // of them, on their way at once
const int STRIDE = 20;  // of a column in shared memory: 16 rows, and 4 so that a warp meets every bank once

// This warp's k-blocks: w, w + WARPS, ... . `sums` is C of mma.cuh; x begins at this lane's part of its column.
__device__ inline void add_k_blocks(const unsigned char* row_tile, const half* x, float (&sums)[4]) {
    for (int first = threadIdx.x / 32; first < K_BLOCKS; first += WARPS * AT_ONCE) {
        TILE weights[AT_ONCE];
        uint4 column[AT_ONCE];
        for (int i = 0; i < AT_ONCE; i++)
            weights[i].load(row_tile + (size_t)min(first + i * WARPS, K_BLOCKS - 1) * TILE::BYTES);
        wait_for_previous_kernel();  // the weights are on their way; x may not be there yet
        for (int i = 0; i < AT_ONCE; i++)
            column[i] = load_fresh((const uint4*)(x + 32 * min(first + i * WARPS, K_BLOCKS - 1)));
        __syncwarp();  // keeps the compiler from moving these loads between the products
        for (int i = 0; i < AT_ONCE; i++)
            if (first + i * WARPS < K_BLOCKS) add_exact<TILE, 1>(weights[i], &column[i], sums);
    }
}

extern "C" __global__ void __launch_bounds__(32 * WARPS, 1)
quantised_product(const unsigned char* tiles, const half* x, float* y, const int* counts, int rows, float factor) {
    __shared__ float partial[WARPS][8 * STRIDE];
    let_next_kernel_start();
    int first_column = 8 * blockIdx.y, columns = counts[0] * COLUMNS, warp = threadIdx.x / 32;
    int g = threadIdx.x % 32 / 4, q = threadIdx.x % 4;
    if (first_column >= columns) return;  // the whole block
    int column = min(first_column + g, columns - 1);  // a copy of the last stands in for those that do not exist
    float sums[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    add_k_blocks(tiles + (size_t)blockIdx.x * K_BLOCKS * TILE::BYTES, x + (size_t)column * 32 * K_BLOCKS + 8 * q, sums);
    for (int i = 0; i < 4; i++) partial[warp][(2 * q + i % 2) * STRIDE + g + i / 2 * 8] = sums[i];
    __syncthreads();
    for (int i = threadIdx.x; i < 16 * TOKENS; i += 32 * WARPS) {
        int token = first_column / COLUMNS + i / 16, row = 16 * blockIdx.x + i % 16;
        if (token >= counts[0] || row >= rows) continue;
        float total = 0.0f;
        for (int w = 0; w < WARPS; w++)
            for (int c = 0; c < COLUMNS; c++) total += partial[w][(i / 16 * COLUMNS + c) * STRIDE + i % 16];
        y[(size_t)token * rows + row] = total * factor;
    }
}
