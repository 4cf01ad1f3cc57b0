// Generated from notebooks/18_fused_kernels.ipynb; edit there, then run: python tools/nb.py export

// The first values of the residual stream: rows of the embedding table, with all that the first norm needs.
//
// token_ids int [N]: an id, or ~i for the token that the step before chose for its sequence i, chosen[i]: the host need
// not know it yet. The table is the tiles of the embedding matrix. -> x float [N][WIDTH], and for the norm (norm.cuh):
// hidden, squares (all of a row's sum in its first tile), rms_now.
// Launch: grid N, 256 threads: a block per token.
// Limit: two passes of latency, once a step. An id out of range reads row 0; chosen may be -1.
#include "columns.cuh"
#include "dependent.cuh"
#include "tile.cuh"
#include "warp.cuh"

static_assert(WIDTH > 0 && WIDTH % 32 == 0, "WIDTH must be a multiple of 32: whole k-blocks");
static_assert(VOCAB >= 1, "VOCAB must be at least 1: row 0 stands in");
const int PER_THREAD = (WIDTH + 255) / 256;

extern "C" __global__ void __launch_bounds__(256)
embed_tokens(const unsigned char* table, const int* token_ids, const int* chosen, const float* gain, float eps,
             int* counts, int capacity, float* x, half* hidden, float* squares, float* rms_now) {
    let_next_kernel_start();
    wait_for_previous_kernel();
    const int token = blockIdx.x, known = token_ids[token];
    if (token + threadIdx.x == 0) counts[2] += 1;  // the turn of this step (deliver.cuh)
    if (token >= counts[0]) return;
    int id = known >= 0 ? known : load_fresh(chosen + ~known);
    if (id < 0 || id >= VOCAB) id = 0;
    const unsigned char* tiles = table + (size_t)(id / 16) * (WIDTH / 32) * TILE::BYTES;
    float values[PER_THREAD], sum = 0;
    for (int i = 0; i < PER_THREAD; i++) {
        const int k = threadIdx.x + i * 256;
        values[i] = k < WIDTH ? TILE::value(tiles + k / 32 * TILE::BYTES, id % 16, k % 32) : 0.0f;
        sum += values[i] * values[i];
    }
    sum = block_sum(sum);
    const float rms = rsqrtf(sum * (1.0f / WIDTH) + eps);
    if (threadIdx.x == 0) rms_now[token] = rms;
    for (int tile = threadIdx.x; tile < WIDTH / 16; tile += 256) squares[tile * capacity + token] = tile ? 0.0f : sum;
    for (int i = 0; i < PER_THREAD; i++) {
        const int k = threadIdx.x + i * 256;
        if (k >= WIDTH) continue;
        x[(size_t)token * WIDTH + k] = values[i];
        store_activation<HI_LO>(hidden, token, WIDTH, k, values[i] * gain[k] * rms);
    }
}
