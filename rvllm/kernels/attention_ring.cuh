// Generated from notebooks/17_paged_attention.ipynb; edit there, then run: python tools/nb.py export

// The pages that one warp of a block attends to: every `stride`th from `first` on, PREFETCH of them under way at once.
//
// A page takes longer to arrive than to be attended to. So slot i of the ring is loaded anew as soon as its page has
// been used, while the other slots are on their way or waiting. Where a page lies is looked up before it can be loaded:
// the wait for that entry of the table passes while the page before is attended to.
#pragma once
#include "attention_softmax.cuh"

static_assert(PREFETCH >= 1, "PREFETCH must be at least 1");

struct PageRing {
    Page slots[PREFETCH];
    int blocks[PREFETCH];  // where the first pages lie
    const half* pages;  // of this layer
    const int* table;   // blocks of this sequence
    int kv_head, first, stride;

    __device__ void look_up(int max_blocks) {
#pragma unroll
        for (int i = 0; i < PREFETCH; i++) blocks[i] = table[min(first + i * stride, max_blocks - 1)];
    }

    __device__ const half* in_block(long long block) {
        return pages + (block * 2 * KV_HEADS + kv_head) * PAGE * HEAD_DIM;
    }

    // Load those of the first PREFETCH pages whose numbers lie in from <= page < to.
    __device__ void fill(int from, int to) {
#pragma unroll
        for (int i = 0; i < PREFETCH; i++) {
            int page = first + i * stride;
            if (page >= from && page < to) load_page(slots[i], in_block(blocks[i]));
        }
    }

    // After both calls of fill: attend to the tokens before `position`.
    __device__ void attend(const Query& query, int position, float scale, Softmax& softmax) {
        for (int start = first; start * PAGE < position; start += PREFETCH * stride) {
#pragma unroll
            for (int i = 0; i < PREFETCH; i++) {
                int page = start + i * stride, next = page + PREFETCH * stride;
                const half* next_stored = next * PAGE < position ? in_block(table[next]) : nullptr;
                if (page * PAGE < position) attend_page(slots[i], query, position - page * PAGE, scale, softmax);
                if (next_stored) load_page(slots[i], next_stored);
            }
        }
    }
};
