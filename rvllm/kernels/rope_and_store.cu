// Generated from notebooks/20_prefill_and_the_loop.ipynb; edit there, then run: python tools/nb.py export

// Turn queries and keys by the angle of their position, in place, and put keys and values into the cache pages.
//
// qkv half [N, (H + 2 KV_HEADS) * HEAD_DIM], H = GROUP * KV_HEADS; rope float [positions, HEAD_DIM / 2, 2]: cos, sin.
// pages half [num_blocks][2][KV_HEADS][16 * HEAD_DIM]: keys as [16][HEAD_DIM], values transposed as [HEAD_DIM][16].
// positions, owners int [N]; block_tables int [B, max_blocks]; counts int [2] = {N, B}, read on the device.
// Launch: y: 16 tokens a block; x * (blockDim.x / 16) octets of columns, the grid covers a row; blockDim.x % 32 = 0.
// A thread owns 8 columns (16 bytes) of a token, a warp 16 tokens times 2 neighbouring octets. So a row is touched in
// whole 32-byte sectors, and the 16 tokens write a feature of the transposed values together: one sector, not 16.
// Limit: memory bandwidth; 4 bytes for a number of q, 6 for one of k, 4 for one of v.
#include "dependent.cuh"
#include "mma.cuh"

constexpr int PAGE = 16;
static_assert(HEAD_DIM > 0 && HEAD_DIM % 8 == 0, "HEAD_DIM must be a multiple of 8: a thread has eight columns");
static_assert(GROUP >= 1 && KV_HEADS >= 1, "GROUP and KV_HEADS must be at least 1");
constexpr int HEAD_OCTETS = HEAD_DIM / 8;
constexpr int HEADS = GROUP * KV_HEADS;
constexpr int ROW_OCTETS = (HEADS + 2 * KV_HEADS) * HEAD_OCTETS;

__device__ inline unsigned turned(unsigned pair, float cos, float sin) {
    float2 p = __half22float2(*(__half2*)&pair);
    return pack(p.x * cos - p.y * sin, p.y * cos + p.x * sin);
}

__device__ inline uint4 turned(uint4 v, const float4* angles) {  // an angle of a pair is 8 bytes: cos, sin
    float4 first = angles[0], second = angles[1];
    return make_uint4(turned(v.x, first.x, first.y), turned(v.y, first.z, first.w), turned(v.z, second.x, second.y),
                      turned(v.w, second.z, second.w));
}

extern "C" __global__ void rope_and_store(half* qkv, const float* rope, half* pages, const int* positions,
                                          const int* owners, const int* block_tables, const int* counts,
                                          int max_blocks) {
    let_next_kernel_start();
    wait_for_previous_kernel();
    int lane = threadIdx.x % 32;
    int token = blockIdx.y * 16 + lane % 16;
    int octet = (blockIdx.x * blockDim.x + threadIdx.x) / 32 * 2 + lane / 16;
    if (token >= counts[0] || octet >= ROW_OCTETS) return;
    int position = positions[token], head = octet / HEAD_OCTETS, in_head = octet % HEAD_OCTETS;
    uint4* place = (uint4*)qkv + (long long)token * ROW_OCTETS + octet;
    uint4 v = *place;
    if (head < HEADS + KV_HEADS) {  // a query or a key
        v = turned(v, (const float4*)rope + ((long long)position * HEAD_OCTETS + in_head) * 2);
        *place = v;
    }
    if (head < HEADS) return;
    int block = block_tables[(long long)owners[token] * max_blocks + position / PAGE], slot = position % PAGE;
    half* page = pages + ((long long)block * 2 * KV_HEADS + head - HEADS) * PAGE * HEAD_DIM;  // values follow all keys
    if (head < HEADS + KV_HEADS) {
        ((uint4*)page)[slot * HEAD_OCTETS + in_head] = v;
        return;
    }
    for (int i = 0; i < 8; i++) page[(in_head * 8 + i) * PAGE + slot] = ((half*)&v)[i];
}
