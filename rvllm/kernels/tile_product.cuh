// Generated from notebooks/16_quantised_weights.ipynb; edit there, then run: python tools/nb.py export

// One weight tile (16 rows x 32 columns) times up to 8 COLUMN_TILES activation columns, by one warp of a block.
//
// columns[t]: lane (g, q) holds the halfs 8q .. 8q + 7 of column 8t + g, 16 contiguous bytes. Weight fragments are laid
// out by the same rule (tile.cuh), so two products run over all 32 of them, in an order that both sides share.
// Exact: the quants are whole numbers, the products of a k-block are added in float, then scaled. A minimum m adds
// m * (sum of the column), and the sum comes from a product with ones. Folded: scale and minimum go into the weights.
#pragma once
#include "mma.cuh"

__device__ inline void multiply_pair(float* sums, const unsigned* a, uint4 column) {
    const unsigned first[2] = {column.x, column.y}, second[2] = {column.z, column.w};
    mma(sums, a, first);
    mma(sums, a + 4, second);
}

template <class Tile, int ColumnTiles>
__device__ inline void add_exact(const Tile& tile, const uint4* columns, float* sums) {
    unsigned a[8];
    tile.fragments(a);
    const float2 scale = tile.scale();
    float2 minimum = make_float2(0, 0);
    if (Tile::HAS_MIN) minimum = tile.minimum();
#pragma unroll
    for (int t = 0; t < ColumnTiles; t++) {
        float c[4] = {0, 0, 0, 0}, total[4] = {0, 0, 0, 0};
        multiply_pair(c, a, columns[t]);
        if (Tile::HAS_MIN) {
            const unsigned one = 0x3c003c00, ones[8] = {one, one, one, one, one, one, one, one};
            multiply_pair(total, ones, columns[t]);
        }
#pragma unroll
        for (int i = 0; i < 4; i++) {
            float& sum = sums[4 * t + i];
            sum = fmaf(i < 2 ? scale.x : scale.y, c[i], sum);
            if (Tile::HAS_MIN) sum = fmaf(i < 2 ? minimum.x : minimum.y, total[i], sum);
        }
    }
}

template <class Tile, int ColumnTiles>
__device__ inline void add_folded(const Tile& tile, const uint4* columns, float* sums) {
    unsigned a[8];
    tile.folded(a);
#pragma unroll
    for (int t = 0; t < ColumnTiles; t++) {
        const unsigned b[2] = {columns[t].x, columns[t].y};
        mma(sums + 4 * t, a, b);
    }
#pragma unroll
    for (int t = 0; t < ColumnTiles; t++) {
        const unsigned b[2] = {columns[t].z, columns[t].w};
        mma(sums + 4 * t, a + 4, b);
    }
}

template <class Tile, int ColumnTiles, bool Folded>
__device__ inline void add_tile(const Tile& tile, const uint4* columns, float* sums) {
    if (Folded) add_folded<Tile, ColumnTiles>(tile, columns, sums);
    else add_exact<Tile, ColumnTiles>(tile, columns, sums);
}
