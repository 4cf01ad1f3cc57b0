// Generated from notebooks/18_fused_kernels.ipynb; edit there, then run: python tools/nb.py export

// The likeliest token of each sequence, from what every block of lm_head found; and one position further.
//
// best_value float, best_index int [num_parts][stride] -> chosen int [B], and delivered (deliver.cuh); positions and
// computed int [B] grow by one: the next step of the same sequences needs nothing from the host. -1 where a logit was
// not a finite number.   counts int [3] = {N, B, turn}.
// Launch: grid B, 128 threads: a block per sequence.
// Among equals the lowest id wins: a rank (rank.cuh) holds both. Limit: latency, once a step.
#include "deliver.cuh"
#include "dependent.cuh"
#include "memory.cuh"
#include "rank.cuh"

const int THREADS = 128;

extern "C" __global__ void __launch_bounds__(THREADS)
choose(const float* best_value, const int* best_index, int num_parts, int stride, const int* counts, int* chosen,
       int* positions, int* computed, int* delivered) {
    let_next_kernel_start();
    wait_for_previous_kernel();
    const int sequence = blockIdx.x;
    if (sequence >= counts[1]) return;
    Rank first = LAST_RANK;
    for (int part = threadIdx.x; part < num_parts; part += THREADS) {
        const float value = load_fresh(best_value + part * stride + sequence);
        first = min(first, rank_of(value, load_fresh(best_index + part * stride + sequence) & LAST_ID));
    }
    first = first_of_block(first);
    if (threadIdx.x) return;
    const int token_id = is_finite(logit_of(first)) ? id_of(first) : -1;
    chosen[sequence] = token_id;
    deliver(delivered, stride, counts[2], sequence, token_id);
    positions[sequence] += 1;
    computed[sequence] += 1;
}
