// Generated from notebooks/20_prefill_and_the_loop.ipynb; edit there, then run: python tools/nb.py export

// Draw a token for each row of logits: temperature, then top-k, top-p and min-p, then one random number.
//
// logits float [rows, vocab]; num_rows int [1]: rows beyond it are left alone, and so are those of temperature 0, which
// are for argmax. temperature, top_k (0 = off), top_p (1 = off), min_p (0 = off) [rows]; seeds unsigned [rows, 2];
// counters int [rows], which draw of its seed a row takes; sampled int [rows]: the token, or -1 where the largest logit
// is not finite. vocab up to 300,000.
// Launch: a block for a row; blockDim.x a power of two from 32 to 1,024.
// Nothing is sorted. Every filter keeps the likeliest tokens, so it is a limit on the rank: top-k and top-p find theirs
// by radix selection, min-p from the largest logit. Masses are integers: atomics may add them in any order.
// Limit: latency of one block a row: it reads the row twice, and three to six times more for each of top-k and top-p,
// from the second cache; the card is full from as many rows as it has multiprocessors.
#include "dependent.cuh"
#include "draw.cuh"
#include "philox.cuh"
#include "select.cuh"

// The part of top_p at which it counts as reached: rounding must not ask for one token more. As in rvllm.sampling.
const double REACHED = 1 - 0x1p-20;

// The last rank that all three filters keep.
__device__ inline Rank filter(const Row& row, int top_k, float top_p, float min_p) {
    Rank limit = LAST_RANK;
    if (0 < top_k && top_k < row.vocab) limit = select_rank(row, limit, false, top_k);
    if (top_p < 1.0f) {  // of the mass that top-k left
        Mass target = (Mass)ceil((double)top_p * REACHED * (double)kept_mass(row, limit));
        limit = select_rank(row, limit, true, max(target, 1ull));
    }
    if (min_p == 0.0f) return limit;
    // exp((logit - largest) / temperature) >= min_p; 1 gives the largest logit exactly. In double, so that the last
    // digit of a logarithm decides nothing.
    float lowest = (float)((double)row.largest + (double)row.temperature * log((double)min_p));
    return min(limit, rank_of(lowest, LAST_ID));
}

extern "C" __global__ void __launch_bounds__(1024)
    sample(const float* logits, int vocab, const int* num_rows, const float* temperature, const int* top_k,
           const float* top_p, const float* min_p, const unsigned* seeds, const int* counters, int* sampled) {
    let_next_kernel_start();
    wait_for_previous_kernel();
    int r = blockIdx.x;
    if (r >= *num_rows || temperature[r] == 0.0f) return;
    Row row = {logits + (long long)r * vocab, vocab, 0.0f, temperature[r]};
    row.largest = logit_of(first_rank(row.logits, vocab));
    if (!is_finite(row.largest)) {
        if (threadIdx.x == 0) sampled[r] = -1;
        return;
    }
    Rank limit = filter(row, top_k[r], top_p[r], min_p[r]);
    draw(row, limit, uniform(seeds + 2 * r, counters[r]), sampled + r);
}
