// Generated from notebooks/20_prefill_and_the_loop.ipynb; edit there, then run: python tools/nb.py export

// Walking the running mass of a row in order of ids, in two steps: by warps to a section, then to the token.
//
// A warp adds up one section of the row, its lanes side by side, so that reads are whole sectors. Then the whole block
// shares the one section in which the level lies: a thread takes a few neighbouring ids. No thread walks a long way.
// Every thread of the block calls these. blockDim.x must be a multiple of 32, up to 1,024.
#pragma once
#include "row.cuh"

__device__ inline int divide_up(int n, int parts) { return (n + parts - 1) / parts; }

// The kept mass of the section of each warp into shared memory; returns the sum of all.
__device__ inline Mass add_sections(const Row& row, Rank limit, Mass* sections) {
    int warp = threadIdx.x / 32, warps = blockDim.x / 32, length = divide_up(row.vocab, warps);
    int end = min((warp + 1) * length, row.vocab);
    Mass sum = 0;
    for (int id = warp * length + threadIdx.x % 32; id < end; id += 32) sum += row.kept(id, limit);
    for (int distance = 16; distance > 0; distance /= 2) sum += __shfl_xor_sync(0xffffffff, sum, distance);
    __syncthreads();  // the sections of an earlier call have been read
    if (threadIdx.x % 32 == 0) sections[warp] = sum;
    __syncthreads();
    Mass total = 0;
    for (int w = 0; w < warps; w++) total += sections[w];
    return total;
}

// The mass of all tokens that are kept.
__device__ inline Mass kept_mass(const Row& row, Rank limit) {
    __shared__ Mass sections[32];
    return add_sections(row, limit, sections);
}

// The first id whose running mass passes `share` of the whole, a number of [0, 1); one thread writes it.
__device__ inline void draw(const Row& row, Rank limit, double share, int* sampled) {
    __shared__ Mass sections[32];
    Mass total = add_sections(row, limit, sections);
    Mass level = min((Mass)(share * (double)total), total - 1);  // rounding must not carry it to the very end
    int section = 0;
    while (level >= sections[section]) level -= sections[section++];
    int length = divide_up(row.vocab, blockDim.x / 32), width = divide_up(length, blockDim.x);
    int end = min((section + 1) * length, row.vocab);
    int first = min(section * length + (int)threadIdx.x * width, end), last = min(first + width, end);
    Mass sum = 0;
    for (int id = first; id < last; id++) sum += row.kept(id, limit);
    Mass after = running_sum(sum), running = after - sum;
    if (level < running || level >= after) return;
    int id = first;
    while (level >= (running += row.kept(id, limit))) id++;
    *sampled = id;
}
