// Generated from notebooks/18_fused_kernels.ipynb; edit there, then run: python tools/nb.py export

// The share of one block in a product on weight tiles: ROW_TILES tiles of 16 rows, COLUMN_TILES groups of 8 columns.
//
// The warps split the k-blocks (32 columns of the matrix), BLOCKS_PER_WARP each, and add up in shared memory, in fixed
// order. A column is a token's activations, or with HI_LO half of them: columns 2n and 2n + 1 are token n.
//   load      the weights of this warp, which no kernel of the step writes: before wait_for_previous_kernel
//   multiply  activations go from the second cache straight into fragments
//   share     leave the sums of one row tile; after __syncthreads, total() gives a finished element
// From 32 columns on, scales are folded into the weights (one more rounding), and the sums stay in the tensor cores.
// EVEN: every warp has all its k-blocks, so nothing is clamped. From 32 columns on the clamped code is faster (measured).
#pragma once
#include "columns.cuh"
#include "tile.cuh"
#include "tile_product.cuh"

template <class Tile, int ColumnTiles, bool HiLo, int RowTiles, int Warps, int BlocksPerWarp, int KBlocks>
struct Product {
    static const int ROWS_PER_TOKEN = HiLo ? 2 : 1, TOKENS = 8 * ColumnTiles / ROWS_PER_TOKEN, THREADS = 32 * Warps;
    static const int STRIDE = 20, SHARED = Warps * TOKENS * STRIDE;  // floats; 16 rows, and 4 against bank conflicts
    static const int AT_ONCE = ColumnTiles * BlocksPerWarp <= 16 ? BlocksPerWarp : 16 / ColumnTiles;
    static const bool FOLDED = ColumnTiles >= 4 && !HiLo, EVEN = ColumnTiles < 4 && Warps * BlocksPerWarp == KBlocks;
    static_assert(ColumnTiles >= 1 && ColumnTiles <= 16, "COLUMN_TILES must be 1 to 16: all in registers");
    static_assert(RowTiles >= 1, "ROW_TILES must be at least 1");
    static_assert(Warps >= 1 && Warps <= 32, "WARPS must be 1 to 32: a block has at most 1,024 threads");
    static_assert(Warps * BlocksPerWarp >= KBlocks, "WARPS * BLOCKS_PER_WARP must cover all k-blocks");
    Tile tiles[RowTiles][BlocksPerWarp];
    float sums[RowTiles][ColumnTiles * 4];

    __device__ void load(const unsigned char* matrix, int first_row_tile, int num_row_tiles) {
        const int k_block = threadIdx.x / 32 * BlocksPerWarp;
#pragma unroll
        for (int r = 0; r < RowTiles; r++) {
            const size_t row_tile = min(first_row_tile + r, num_row_tiles - 1);
#pragma unroll
            for (int i = 0; i < BlocksPerWarp; i++) {
                const int k = EVEN ? k_block + i : min(k_block + i, KBlocks - 1);
                tiles[r][i].load(matrix + (row_tile * KBlocks + k) * Tile::BYTES);
            }
#pragma unroll
            for (int i = 0; i < ColumnTiles * 4; i++) sums[r][i] = 0;
        }
    }

    __device__ void multiply(const half* activations, int num_columns) {
        const int k_block = threadIdx.x / 32 * BlocksPerWarp;
#pragma unroll
        for (int i0 = 0; i0 < BlocksPerWarp; i0 += AT_ONCE) {
            uint4 columns[AT_ONCE][ColumnTiles];
#pragma unroll
            for (int i = i0; i < i0 + AT_ONCE && i < BlocksPerWarp; i++)
                load_columns<ColumnTiles, KBlocks, EVEN>(columns[i - i0], activations, k_block + i, num_columns);
            __syncwarp();  // keeps the compiler from moving these loads between the products
#pragma unroll
            for (int i = i0; i < i0 + AT_ONCE && i < BlocksPerWarp; i++)
#pragma unroll
                for (int r = 0; r < RowTiles; r++)
                    add_tile<Tile, ColumnTiles, FOLDED>(tiles[r][i], columns[i - i0], sums[r]);
        }
    }

    __device__ void share(float* partial, int r) const {
        store_sums<ColumnTiles, HiLo>(partial + threadIdx.x / 32 * TOKENS * STRIDE, STRIDE, sums[r]);
    }

    static __device__ float total(const float* partial, int token, int row) {
        float sum = 0;
#pragma unroll
        for (int w = 0; w < Warps; w++) sum += partial[(w * TOKENS + token) * STRIDE + row];
        return sum;
    }
};
