// Generated from notebooks/20_prefill_and_the_loop.ipynb; edit there, then run: python tools/nb.py export

// Causal attention of the tokens of prompts over the cache pages (flash attention): scores never leave the registers.
//
// qkv half [N, (H + 2 KV_HEADS) * HEAD_DIM], of which the queries are read; H = GROUP * KV_HEADS. Keys and values, the
// new ones too, come from pages half [num_blocks][2][KV_HEADS][16 * HEAD_DIM]. out half [N, H * HEAD_DIM].
// tiles int [.., 2] = {first token, number of tokens, 1 to 64, of one sequence, consecutive}; num_tiles int [1].
// positions, owners int [N]; block_tables int [B, max_blocks]. Macros: HEAD_DIM 64 or 128, GROUP, KV_HEADS.
// Launch: 128 threads; x = H, y = a bucket of tiles. Late tiles, which have the most keys, start first.
// A key or value is read from memory once for 64 queries, not once for each; four warps share it in shared memory,
// 16 rows of queries a warp; the next stage of tokens is on its way in registers while this one is multiplied.
// Limit: tensor cores and exp2f for long contexts, latency of the loads for short ones.
#include "dependent.cuh"
#include "prefill_tile.cuh"

static_assert(STAGE >= STEP && STAGE % STEP == 0, "HEAD_DIM must make a stage whole steps of 32 tokens: 64 or 128");

extern "C" __global__ void __launch_bounds__(THREADS, 3)
prefill_attention(const half* qkv, const half* pages, const int* tiles, const int* num_tiles, const int* positions,
                  const int* owners, const int* block_tables, half* out, int max_blocks) {
    __shared__ uint4 keys[STAGE * KEY_STRIDE], values[HEAD_DIM * VALUE_STRIDE];
    let_next_kernel_start();
    wait_for_previous_kernel();
    int tile = num_tiles[0] - 1 - (int)blockIdx.y, head = blockIdx.x;
    if (tile < 0) return;
    int first = tiles[2 * tile], count = tiles[2 * tile + 1];
    int position = positions[first], context = position + count, last_page = (context - 1) / PAGE;
    int warp_row = threadIdx.x / 32 * 16, row = warp_row + threadIdx.x % 32 / 4;  // of the tile
    const int* table = block_tables + (long long)owners[first] * max_blocks;

    Stage stage;
    stage.fetch(pages, table, 0, last_page, head / GROUP);
    unsigned queries[HEAD_DIM / 16][4];
    load_queries(qkv + (long long)first * QKV_WIDTH + head * HEAD_DIM, count, row, queries);
    Softmax softmax;
    for (int token = 0; token < context; token += STAGE) {
        if (context - token < STAGE) stage.clear_unused(context - token);
        __syncthreads();  // the stage before has been read
        stage.store(keys, values);
        __syncthreads();
        int next = token + STAGE;
        if (next < context) stage.fetch(pages, table, next / PAGE, last_page, head / GROUP);
        if (warp_row >= count) continue;  // a warp without rows only helps to stage
#pragma unroll 1
        for (int part = 0; part < STAGE / STEP; part++) {
            int from = token + part * STEP;
            if (from > position + warp_row + 15) break;  // no row of this warp sees these tokens
            softmax.attend(queries, keys + part * STEP * KEY_STRIDE, values + part * STEP / 8, from, position + row);
        }
    }
    if (warp_row < count) store_rows(softmax, out + ((long long)first * HEADS + head) * HEAD_DIM, count, row);
}
