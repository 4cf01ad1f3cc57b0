// Generated from notebooks/17_paged_attention.ipynb; edit there, then run: python tools/nb.py export

// Add up the splits of paged_attention, in their order.
//
// parts float [bucket][KV_HEADS][SPLITS][PART_FLOATS], out half [N or 2N][HEADS_WIDTH]: see attention_store.cuh;
// rows int [bucket], the tokens that parts belong to, num_rows int, how many.
// Launch: grid (bucket, KV_HEADS), block GROUP * HEAD_DIM, a thread for an output element.
// A kernel of its own, rather than work for the last block to arrive: without counters and fences nothing depends on
// the order of blocks, and it runs only where contexts are long enough for splits. SPLITS is known to the compiler,
// so all loads of a thread are under way together.
// Limit: latency; a few kilobytes from the second cache.
#include "attention_store.cuh"
#include "dependent.cuh"
#include "memory.cuh"

static_assert(SPLITS >= 1, "SPLITS must be at least 1");
static_assert(GROUP >= 1 && KV_HEADS >= 1, "GROUP and KV_HEADS must be at least 1");
static_assert(HEAD_DIM > 0 && HEAD_DIM % 2 == 0, "HEAD_DIM must be even: the sums of a part are loaded in pairs");
static_assert(GROUP * HEAD_DIM <= 1024, "GROUP * HEAD_DIM must be at most 1,024: a thread for each element");

extern "C" __global__ void attention_merge(const float* parts, const int* rows, const int* num_rows, half* out) {
    let_next_kernel_start();
    wait_for_previous_kernel();
    if (blockIdx.x >= num_rows[0]) return;
    int element = threadIdx.x, head = element / HEAD_DIM, kv_head = blockIdx.y;
    const float* part = parts + (long long)(blockIdx.x * KV_HEADS + kv_head) * SPLITS * PART_FLOATS;
    float2 maximum_and_sum[SPLITS];
    float values[SPLITS];
#pragma unroll
    for (int s = 0; s < SPLITS; s++) {
        maximum_and_sum[s] = load_fresh((const float2*)(part + s * PART_FLOATS + GROUP * HEAD_DIM) + head);
        values[s] = load_fresh(part + s * PART_FLOATS + element);
    }
    float largest = maximum_and_sum[0].x;
#pragma unroll
    for (int s = 1; s < SPLITS; s++) largest = fmaxf(largest, maximum_and_sum[s].x);
    float sum = 0.0f, value = 0.0f;
#pragma unroll
    for (int s = 0; s < SPLITS; s++) {  // the first split has the token itself: the sum is not 0
        float factor = exp2f(maximum_and_sum[s].x - largest);
        sum += factor * maximum_and_sum[s].y;
        value += factor * values[s];
    }
    store_output(out, rows[blockIdx.x], kv_head * GROUP * HEAD_DIM + element, __fdividef(value, sum));
}
