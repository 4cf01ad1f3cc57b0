// Generated from notebooks/15_device_resident_step.ipynb; edit there, then run: python tools/nb.py export

// The token with the largest logit of each row; the lowest id wins a tie.
//
// logits float [rows, vocab]; num_rows int [1]: rows beyond it are left alone; sampled int [rows]: the id, or -1 where
// the largest logit is not finite: NaN if there is any, infinity, or minus infinity alone.
// Launch: a block for a row; blockDim.x a multiple of 32, up to 1,024.
// A rank holds logit and id in one integer, so the minimum of the ranks is the answer: shuffles, and two barriers.
// Limit: memory bandwidth of one multiprocessor a row, 4 bytes a logit, mostly from the second cache.
#include "dependent.cuh"
#include "rank.cuh"

extern "C" __global__ void __launch_bounds__(1024)
    argmax(const float* logits, int vocab, const int* num_rows, int* sampled) {
    let_next_kernel_start();
    wait_for_previous_kernel();
    int r = blockIdx.x;
    if (r >= *num_rows) return;
    Rank first = first_rank(logits + (long long)r * vocab, vocab);
    if (threadIdx.x == 0) sampled[r] = is_finite(logit_of(first)) ? id_of(first) : -1;
}
