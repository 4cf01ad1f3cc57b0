// Generated from notebooks/20_prefill_and_the_loop.ipynb; edit there, then run: python tools/nb.py export

// Keys and values of a stage of tokens, on their way from the cache pages through registers into shared memory.
//
// All 128 threads of a block call fetch (memory to registers) and later store (registers to shared memory). What is
// computed between the two hides the time that the loads take. Everything moves in chunks of 16 bytes, 8 halfs.
// In shared memory: keys [STAGE][HEAD_DIM], values transposed [HEAD_DIM][STAGE]. From one row to the next it is an odd
// multiple of 64 bytes, with padding where needed: the 8 threads whose 16 bytes move at a time read 2 neighbouring
// rows times 4 chunks, and so never meet in a bank.
#pragma once
#include "memory.cuh"
#include "mma.cuh"

constexpr int THREADS = 128;
constexpr int PAGE = 16;                          // tokens of a cache page
constexpr int STAGE = 4096 / HEAD_DIM;            // of tokens: 64, or 32 with large heads, which saves registers
constexpr int STEP = 32;                          // tokens of it that a warp attends to at a time
constexpr int STAGE_PAGES = STAGE / PAGE;
constexpr int KEY_CHUNKS = HEAD_DIM / 8;          // of a row of keys: a token
constexpr int KEY_STRIDE = KEY_CHUNKS | 4;        // from one row to the next, in shared memory
constexpr int VALUE_STRIDE = STAGE / 8 | 4;       // the same for a row of values: a feature
constexpr int PAGE_CHUNKS = PAGE * HEAD_DIM / 8;  // of the keys of a page, and of its values
constexpr int OF_THREAD = PAGE_CHUNKS / THREADS;  // how many of those a thread carries
static_assert(PAGE_CHUNKS % THREADS == 0, "HEAD_DIM must be a multiple of 64: threads share a page evenly");

struct Stage {
    uint4 keys[STAGE_PAGES][OF_THREAD];
    uint4 values[STAGE_PAGES][OF_THREAD];

    // table: the blocks of the sequence. Pages past last_page repeat it: their tokens lie after every query.
    __device__ void fetch(const half* pages, const int* table, int first_page, int last_page, int kv_head) {
#pragma unroll
        for (int p = 0; p < STAGE_PAGES; p++) {
            long long block = table[min(first_page + p, last_page)];
            const uint4* from = (const uint4*)pages + (block * 2 * KV_HEADS + kv_head) * PAGE_CHUNKS + threadIdx.x;
#pragma unroll
            for (int n = 0; n < OF_THREAD; n++) {
                keys[p][n] = load_fresh(from + n * THREADS);
                values[p][n] = load_fresh(from + KV_HEADS * PAGE_CHUNKS + n * THREADS);
            }
        }
    }

    // Values of the first `tokens` stay, the others become 0: cells that no token of the sequence has written hold what
    // another left there, NaN perhaps, and 0 * NaN is NaN. Keys need nothing: the scores of such cells are replaced.
    __device__ void clear_unused(int tokens) {
#pragma unroll
        for (int p = 0; p < STAGE_PAGES; p++) {
            int mine = tokens - PAGE * p - threadIdx.x % 2 * 8;  // of the eight tokens in a chunk of this thread
#pragma unroll
            for (int n = 0; n < OF_THREAD; n++) {
                uint4& chunk = values[p][n];
                chunk.x &= first_halfs(mine), chunk.y &= first_halfs(mine - 2);
                chunk.z &= first_halfs(mine - 4), chunk.w &= first_halfs(mine - 6);
            }
        }
    }

    __device__ void store(uint4* shared_keys, uint4* shared_values) const {
#pragma unroll
        for (int p = 0; p < STAGE_PAGES; p++) {
#pragma unroll
            for (int n = 0; n < OF_THREAD; n++) {
                int i = threadIdx.x + n * THREADS;
                int token = PAGE * p + i / KEY_CHUNKS, feature = i / 2;  // in a page a feature has 2 chunks of tokens
                shared_keys[token * KEY_STRIDE + i % KEY_CHUNKS] = keys[p][n];
                shared_values[feature * VALUE_STRIDE + 2 * p + i % 2] = values[p][n];
            }
        }
    }
};
