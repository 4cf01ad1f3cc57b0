// Generated from notebooks/18_fused_kernels.ipynb; edit there, then run: python tools/nb.py export

// The likeliest token of each sequence, from what every block of lm_head found; and one position further.
//
// best_value float, best_index int [num_parts][stride] -> chosen int [B], and delivered (deliver.cuh); positions and
// computed int [B] grow by one: the next step of the same sequences needs nothing from the host. -1 where a logit was
// not a finite number.   counts int [3] = {N, B, turn}.
// Launch: grid B, 128 threads: a block per sequence.
// Among equals the lowest id wins. Limit: latency, once a step.
#include "deliver.cuh"
#include "dependent.cuh"
#include "memory.cuh"

const int THREADS = 128;

__device__ inline bool better(float value, int index, float than, int other) {
    return value > than || (value == than && index < other);
}

extern "C" __global__ void __launch_bounds__(THREADS)
choose(const float* best_value, const int* best_index, int num_parts, int stride, const int* counts, int* chosen,
       int* positions, int* computed, int* delivered) {
    __shared__ float values[THREADS];
    __shared__ int indices[THREADS];
    let_next_kernel_start();
    wait_for_previous_kernel();
    const int sequence = blockIdx.x, t = threadIdx.x;
    if (sequence >= counts[1]) return;
    float value = -3.4e38f;
    int index = 0x7fffffff;
    bool finite = true;
    for (int part = t; part < num_parts; part += THREADS) {
        const float v = load_fresh(best_value + part * stride + sequence);
        const int i = load_fresh(best_index + part * stride + sequence);
        finite = finite && v == v;
        if (better(v, i, value, index)) value = v, index = i;
    }
    values[t] = value;
    indices[t] = index;
    finite = __syncthreads_and(finite);
    for (int half = THREADS / 2; half; half /= 2) {
        if (t < half && better(values[t + half], indices[t + half], values[t], indices[t])) {
            values[t] = values[t + half];
            indices[t] = indices[t + half];
        }
        __syncthreads();
    }
    if (t) return;
    const int token_id = finite ? indices[0] : -1;
    chosen[sequence] = token_id;
    deliver(delivered, stride, counts[2], sequence, token_id);
    positions[sequence] += 1;
    computed[sequence] += 1;
}
