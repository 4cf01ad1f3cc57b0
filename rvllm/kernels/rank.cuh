// Generated from notebooks/15_device_resident_step.ipynb; edit there, then run: python tools/nb.py export

// The order in which the filters keep tokens, as one integer: likelier first; among equal logits the lower id first.
//
// A rank has 55 bits: 32 of the logit, turned so that larger logits give smaller numbers, then 23 of the id. No two
// tokens of a row share a rank, so "the n likeliest" is always "every rank up to some limit": there are no ties left.
// first_rank, first_of_block: every thread of the block calls them. blockDim.x a multiple of 32, up to 1,024.
#pragma once

typedef unsigned long long Rank;

const int ID_BITS = 23;
const int RANK_BITS = 32 + ID_BITS;
const int LAST_ID = (1 << ID_BITS) - 1;
const Rank LAST_RANK = (1ull << RANK_BITS) - 1;

__device__ inline Rank rank_of(float logit, int id) {
    if (logit != logit) return 0;                   // NaN comes before everything: it is found whenever there is one
    unsigned bits = __float_as_uint(logit + 0.0f);  // minus zero becomes zero: the two are equal
    // As integers, negative floats already fall while they rise; the others have to be turned and put before them.
    unsigned falling = bits >> 31 ? bits : bits ^ 0x7fffffffu;
    return (Rank)falling << ID_BITS | id;
}

__device__ inline float logit_of(Rank rank) {  // rank 0 gives NaN
    unsigned falling = (unsigned)(rank >> ID_BITS);
    return __uint_as_float(falling >> 31 ? falling : falling ^ 0x7fffffffu);
}

__device__ inline int id_of(Rank rank) { return (int)(rank & LAST_ID); }

__device__ inline bool is_finite(float x) { return (__float_as_uint(x) & 0x7f800000u) != 0x7f800000u; }

// The first of the threads' ranks, for all of them.
__device__ inline Rank first_of_block(Rank first) {
    __shared__ Rank of_warp[32];
    for (int distance = 16; distance > 0; distance /= 2) {
        first = min(first, __shfl_xor_sync(0xffffffff, first, distance));
    }
    __syncthreads();  // the ranks of an earlier call have been read
    if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = first;
    __syncthreads();
    for (int warp = 0; warp < blockDim.x / 32; warp++) first = min(first, of_warp[warp]);
    return first;
}

// The largest logit that a thread has seen, in order of ids. A rank is made of it once, at the end.
struct Largest {
    float logit = __uint_as_float(0xff800000u);  // minus infinity
    int id = LAST_ID;
    bool saw_nan = false;

    __device__ void take(float other, int other_id) {
        saw_nan |= other != other;
        if (other > logit) logit = other, id = other_id;
    }
};

// The first rank of a row: that of its largest logit, of the lowest id that has it; 0 if a NaN is among them.
// Four logits are one load where rows begin at multiples of 16 bytes.
__device__ inline Rank first_rank(const float* logits, int vocab) {
    Largest largest;
    int quads = vocab % 4 == 0 ? vocab / 4 : 0;
#pragma unroll 4
    for (int i = threadIdx.x; i < quads; i += blockDim.x) {
        float4 four = ((const float4*)logits)[i];
        for (int k = 0; k < 4; k++) largest.take(((const float*)&four)[k], 4 * i + k);
    }
    for (int id = 4 * quads + threadIdx.x; id < vocab; id += blockDim.x) largest.take(logits[id], id);
    return first_of_block(largest.saw_nan ? 0 : rank_of(largest.logit, largest.id));
}
