// Generated from notebooks/20_prefill_and_the_loop.ipynb; edit there, then run: python tools/nb.py export

// Random numbers without a state: Philox 4x32-10 (Salmon, Moraes, Dror, Shaw 2011) turns (seed, counter) into bits.
//
// Ten rounds of two multiplications scramble a counter of 128 bits under a key of 64. Equal seed and counter give equal
// numbers in every block, on every device, in every order; neighbouring counters give independent ones.
#pragma once

__device__ inline uint4 philox(uint4 counter, uint2 key) {
    for (int round = 0; round < 10; round++) {
        uint4 next;
        next.x = __umulhi(0xcd9e8d57u, counter.z) ^ counter.y ^ key.x;
        next.y = 0xcd9e8d57u * counter.z;
        next.z = __umulhi(0xd2511f53u, counter.x) ^ counter.w ^ key.y;
        next.w = 0xd2511f53u * counter.x;
        counter = next;
        key.x += 0x9e3779b9u;  // the golden ratio and the root of 3, so that no two rounds have the same key
        key.y += 0xbb67ae85u;
    }
    return counter;
}

// A number of [0, 1), a multiple of 2^-53: all that a double can hold evenly. seed: two words.
__device__ inline double uniform(const unsigned* seed, unsigned counter) {
    uint4 bits = philox(make_uint4(counter, 0, 0, 0), make_uint2(seed[0], seed[1]));
    unsigned long long whole = (unsigned long long)bits.x << 32 | bits.y;
    return (double)(whole >> 11) * 0x1p-53;
}
