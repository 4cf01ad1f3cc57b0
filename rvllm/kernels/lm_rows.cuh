// Generated from notebooks/18_fused_kernels.ipynb; edit there, then run: python tools/nb.py export

// The parts of lm_head, by a warp of a block: chunks of weights, activations in shared memory, finished rows.
#pragma once
#include "lm_best.cuh"
#include "norm.cuh"
#include "tile.cuh"
#include "tile_product.cuh"
static_assert(WIDTH > 0 && WIDTH % 32 == 0, "WIDTH must be a multiple of 32: whole k-blocks");
const int THREADS = 32 * WARPS, K_BLOCKS = WIDTH / 32, CHUNKS = K_BLOCKS / CHUNK, VOCAB_TILES = (VOCAB + 15) / 16;
static_assert(CHUNK >= 1 && K_BLOCKS % CHUNK == 0, "CHUNK must divide the k-blocks");
const int ROW_BYTES = WIDTH * 2 + (WIDTH % 64 ? 0 : 64);  // 64 modulo 128: no bank conflicts
typedef Norm<TOKENS, WARPS, WIDTH / 16> FinalNorm;

struct Chunk {  // CHUNK k-blocks of ROW_TILES row tiles
    TILE tiles[ROW_TILES][CHUNK];

    __device__ void load(const unsigned char* weights, int row_tile, int chunk) {
#pragma unroll
        for (int r = 0; r < ROW_TILES; r++)
#pragma unroll
            for (int i = 0; i < CHUNK; i++) {
                const size_t tile = min(row_tile + r, VOCAB_TILES - 1);
                tiles[r][i].load(weights + (tile * K_BLOCKS + chunk * CHUNK + i) * TILE::BYTES);
            }
    }
};

// The activations of all columns, once for the block. Columns past the last repeat it.
__device__ inline void stage_columns(uint4* columns, const half* hidden, const int* rows, int count) {
    const int per_token = HI_LO ? 2 : 1;
    for (int i = threadIdx.x; i < COLUMN_TILES * 8 * (WIDTH / 8); i += THREADS) {
        const int column = min(i / (WIDTH / 8), count * per_token - 1), part = i % (WIDTH / 8);
        const size_t row = (size_t)rows[column / per_token] * per_token + column % per_token;
        columns[i / (WIDTH / 8) * (ROW_BYTES / 16) + part] = load_fresh((const uint4*)(hidden + row * WIDTH) + part);
    }
}

// sums += the row tiles at `tile`; while the last chunk is multiplied, the first of the tiles at `next` is fetched.
__device__ inline void multiply_tiles(float (*sums)[4 * COLUMN_TILES], Chunk* chunks, const unsigned char* weights,
                                      int tile, int next, const uint4* columns) {
    const int g = threadIdx.x % 32 / 4, q = threadIdx.x % 4;
#pragma unroll
    for (int c = 0; c < CHUNKS; c++) {
        if (c + 1 < CHUNKS) chunks[(c + 1) % 2].load(weights, tile, c + 1);
        else if (CHUNKS % 2 == 0) chunks[0].load(weights, next, 0);
#pragma unroll
        for (int i = 0; i < CHUNK; i++) {
            uint4 column[COLUMN_TILES];
#pragma unroll
            for (int t = 0; t < COLUMN_TILES; t++)
                column[t] = columns[(t * 8 + g) * (ROW_BYTES / 16) + (c * CHUNK + i) * 4 + q];
#pragma unroll
            for (int r = 0; r < ROW_TILES; r++)
                add_tile<TILE, COLUMN_TILES, COLUMN_TILES >= 4 && !HI_LO>(chunks[c % 2].tiles[r][i], column, sums[r]);
        }
    }
    if (CHUNKS % 2) chunks[0].load(weights, next, 0);
}

// Logits of rows g and g + 8 of one tile for the i-th token of this lane. `logits`: of the first token of the block.
__device__ inline void finish_rows(const float* sums, int i, int tile, int count, const float* factors, float* logits,
                                   Best& best) {
    const int token = seen_token(i);
    for (int upper = 0; upper < 2; upper++) {
        const int row = tile * 16 + threadIdx.x % 32 / 4 + 8 * upper;
        if (token >= count || row >= VOCAB) continue;
        const float value = seen_sum(sums, i, upper) * factors[token];
        logits[(size_t)token * VOCAB + row] = value;
        best.take(i, value, row);
    }
}
