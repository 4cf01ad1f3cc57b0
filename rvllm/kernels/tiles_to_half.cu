// Generated from notebooks/20_prefill_and_the_loop.ipynb; edit there, then run: python tools/nb.py export

// Weight tiles back to a plain matrix of halfs, for products of many tokens. Once, at load.
//
// tiles: rows of 16 x 32 tiles (tile.cuh) -> out half [16 * row tiles][32 * k_blocks], row-major.
// Launch: one thread for an element, any block size; the grid covers all of them.
// A product of hundreds of tokens reads each weight once and uses it hundreds of times: its bytes no longer bind, the
// tensor cores do, and they want halfs. One rounding: a scale times a quant has more digits than a half.
// Limit: memory bandwidth, once.
#include "tile.cuh"

extern "C" __global__ void tiles_to_half(const unsigned char* tiles, half* out, int row_tiles, int k_blocks) {
    long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    const int columns = 32 * k_blocks, column = i % columns;
    const long long row = i / columns;
    if (row >= 16 * row_tiles) return;
    const unsigned char* tile = tiles + (row / 16 * k_blocks + column / 32) * TILE::BYTES;
    out[i] = __float2half_rn(TILE::value(tile, row % 16, column % 32));
}
