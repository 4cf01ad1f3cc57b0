// Generated from notebooks/16_quantised_weights.ipynb; edit there, then run: python tools/nb.py export

// Look up rows of a table in tiles: out[t, i] = table[id of t, i].
//
// tiles unsigned char [ceil(vocab / 16)][dim / 32][TILE::BYTES], TILE a struct of tile.cuh; token_ids int [N]: an id,
// or ~i for chosen[i], the token that the step before chose for its row i; counts int [3] = {N, B, turn}; out float
// [N, dim]. With FIRST this is the first kernel of a step, which begins its turn (deliver.cuh).
// Launch: one thread for an output element, any block size; the grid may be larger.
// A thread unpacks its weight by itself: a row is no tile, so there is nothing for tensor cores to do.
// Limit: latency, once a step; a row takes a few sectors of each of its dim / 32 tiles.
#include "dependent.cuh"
#include "tile.cuh"

extern "C" __global__ void embedding_tiles(const unsigned char* tiles, const int* token_ids, const int* chosen,
                                           int* counts, float* out, int dim, int vocab) {
    let_next_kernel_start();
    wait_for_previous_kernel();
    int i = blockIdx.x * blockDim.x + threadIdx.x, token = i / dim, column = i % dim;
    if (FIRST && i == 0) counts[2] += 1;
    if (token >= counts[0]) return;
    int known = token_ids[token], id = known >= 0 ? known : chosen[~known];
    // chosen is -1 where logits were not numbers; an id out of range would read foreign memory, so it reads row 0.
    if (id < 0 || id >= vocab) id = 0;
    const unsigned char* tile = tiles + ((size_t)(id / 16) * (dim / 32) + column / 32) * TILE::BYTES;
    out[i] = TILE::value(tile, id % 16, column % 32);
}
