// Generated from notebooks/20_prefill_and_the_loop.ipynb; edit there, then run: python tools/nb.py export

// Radix selection: at which rank a running amount reaches a target, without sorting.
//
// Taken in order of rank every token adds an amount: 1, or its mass. A histogram over the first 11 bits of the ranks
// says in which bin the sum reaches the target; the next one counts the tokens of that bin alone, by their next 11
// bits; after five, or once a bin holds a single token, the rank is known. The first 11 bits are sign, exponent and two
// more: fewer would send most logits of a row to a handful of bins, where atomics wait for each other.
// Every thread of the block calls select_rank. blockDim.x must be a power of two from 32 to 1,024.
#pragma once
#include "row.cuh"

const int DIGIT_BITS = 11, BINS = 1 << DIGIT_BITS;
static_assert(RANK_BITS % DIGIT_BITS == 0, "digits must make up a rank: five of 11 bits");

struct Histogram {
    Mass masses[BINS];  // stay 0 where tokens are counted
    unsigned members[BINS];
    int found;  // the bin in which the sum reaches the target, its members, and the amount in all bins before it
    unsigned found_members;
    Mass found_before;

    __device__ Mass amount(int bin, bool by_mass) const { return by_mass ? masses[bin] : members[bin]; }
};

// Count the tokens up to `limit` whose earlier digits are `prefix`. A token without mass adds nothing to either sum.
__device__ inline void fill(Histogram& histogram, const Row& row, Rank limit, bool by_mass, Rank prefix, int shift) {
    for (int bin = threadIdx.x; bin < BINS; bin += blockDim.x) histogram.masses[bin] = histogram.members[bin] = 0;
    __syncthreads();
    for (int id = threadIdx.x; id < row.vocab; id += blockDim.x) {
        Rank rank = row.rank(id);
        if (rank > limit || rank >> (shift + DIGIT_BITS) != prefix) continue;
        Mass mass = by_mass ? row.mass(id) : 0;
        if (by_mass && mass == 0) continue;
        int bin = (int)(rank >> shift) & (BINS - 1);
        atomicAdd(&histogram.members[bin], 1u);
        if (by_mass) atomicAdd(&histogram.masses[bin], mass);
    }
    __syncthreads();
}

// One thread finds the bin: each has some neighbouring ones, and knows by the running sum what lies before them.
__device__ inline void find(Histogram& histogram, bool by_mass, Mass target) {
    int width = BINS / blockDim.x, first = threadIdx.x * width;
    Mass sum = 0;
    for (int bin = first; bin < first + width; bin++) sum += histogram.amount(bin, by_mass);
    Mass before = running_sum(sum) - sum;
    for (int bin = first; bin < first + width; bin++) {
        Mass after = before + histogram.amount(bin, by_mass);
        if (before < target && target <= after) {
            histogram.found = bin;
            histogram.found_members = histogram.members[bin];
            histogram.found_before = before;
        }
        before = after;
    }
    __syncthreads();
}

// The last rank to keep: the first at which the amount of the tokens up to `limit` reaches `target`, 1 to their sum.
__device__ inline Rank select_rank(const Row& row, Rank limit, bool by_mass, Mass target) {
    __shared__ Histogram histogram;
    Rank prefix = 0;
    for (int shift = RANK_BITS - DIGIT_BITS;; shift -= DIGIT_BITS) {
        fill(histogram, row, limit, by_mass, prefix, shift);
        find(histogram, by_mass, target);
        prefix = prefix << DIGIT_BITS | histogram.found;
        target -= histogram.found_before;
        // The end of the bin: one token lies in it, and perhaps others beyond the limit, or without mass.
        if (shift == 0 || histogram.found_members == 1) return min(limit, ((prefix + 1) << shift) - 1);
    }
}
