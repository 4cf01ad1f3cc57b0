// Generated from notebooks/17_paged_attention.ipynb; edit there, then run: python tools/nb.py export

// Turn queries and keys by the angle of their position, in place, and put keys and values into the cache pages.
//
// qkv float [N, QUERY_ROWS + 2 * KV_HEADS * HEAD_DIM]: queries, keys, values; rope float [positions, HEAD_DIM / 2, 2]:
// cos, sin; pages half: see kv_place.cuh. positions, owners int [N]; block_tables int [B, max_blocks];
// counts int [2] = {N, B}, read on the device.
// Launch: one thread for a pair of neighbours, any block size; the grid may be larger.
// Three kernels and two copies of the angles in one: a pair is loaded once, turned, and stored where it is needed.
// Limit: latency for few tokens; for many memory bandwidth, and there the transposed values, 2 bytes to a sector.
#include "dependent.cuh"
#include "kv_place.cuh"

static_assert(QUERY_ROWS % HEAD_DIM == 0, "QUERY_ROWS must be a multiple of HEAD_DIM: whole heads");
const int KEYS_END = QUERY_ROWS + KV_HEADS * HEAD_DIM;  // columns of a row before this one are turned
const int ROW_PAIRS = (KEYS_END + KV_HEADS * HEAD_DIM) / 2;

extern "C" __global__ void rope_and_write(float* qkv, const float* rope, half* pages, const int* positions,
                                          const int* owners, const int* block_tables, const int* counts,
                                          int max_blocks) {
    let_next_kernel_start();
    wait_for_previous_kernel();
    int i = blockIdx.x * blockDim.x + threadIdx.x, token = i / ROW_PAIRS, column = i % ROW_PAIRS * 2;
    if (token >= counts[0]) return;
    Place place = place_of(token, positions, owners, block_tables, max_blocks);
    float2 pair = ((const float2*)qkv)[i];
    if (column < KEYS_END) {
        float2 angle = ((const float2*)rope)[(long long)place.position * (HEAD_DIM / 2) + column % HEAD_DIM / 2];
        pair = make_float2(pair.x * angle.x - pair.y * angle.y, pair.y * angle.x + pair.x * angle.y);
        ((float2*)qkv)[i] = pair;
    }
    if (column >= QUERY_ROWS) store_pair(pages, place, column - QUERY_ROWS, pair.x, pair.y);
}
