// Generated from notebooks/15_device_resident_step.ipynb; edit there, then run: python tools/nb.py export

// What the kernels over the paged cache want to know of each token, worked out on the device, once a step.
//
// token_ids int [N]: an id, or ~i for chosen[i], the token that the step before chose for its row i. positions, owners
// int [N]; block_tables int [B, max_blocks]; rope float [all positions, pairs, 2]: cos, sin.
// counts int [3] = {N, B, turn}: the turn grows by one, since this is the first kernel of a step (deliver.cuh).
// Of each token: ids, slot_mapping (where its key and value go), seq_lens (keys that it sees, its own among them)
// int [bucket]; tables int [bucket, max_blocks], those of its sequence; cos, sin float [bucket, pairs].
// Tokens from counts[0] on are idle: id 0, slot -1, no key, angle 0, so that whatever is computed of them is finite.
// Launch: a block for a token of the bucket, any block size.
// Fast, because nothing has to come from the host: of all inputs only what the host alone knows is ever sent.
// Limit: latency, once a step.
#include "dependent.cuh"

extern "C" __global__ void prepare_step(const int* token_ids, const int* chosen, const int* positions,
                                        const int* owners, const int* block_tables, const float* rope, int* counts,
                                        int max_blocks, int block_size, int pairs, int* ids,
                                        int* slot_mapping, int* seq_lens, int* tables, float* cos, float* sin) {
    let_next_kernel_start();
    wait_for_previous_kernel();
    int token = blockIdx.x;
    if (token + threadIdx.x == 0) counts[2] += 1;
    bool idle = token >= counts[0];
    int position = idle ? -1 : positions[token];
    const int* table = block_tables + (idle ? 0 : (long long)owners[token] * max_blocks);
    if (threadIdx.x == 0) {
        int known = idle ? 0 : token_ids[token];
        ids[token] = known >= 0 ? known : chosen[~known];
        slot_mapping[token] = idle ? -1 : table[position / block_size] * block_size + position % block_size;
        seq_lens[token] = position + 1;
    }
    for (int i = threadIdx.x; i < pairs; i += blockDim.x) {
        float2 angle = idle ? make_float2(1.0f, 0.0f) : ((const float2*)rope)[(long long)position * pairs + i];
        cos[token * pairs + i] = angle.x;
        sin[token * pairs + i] = angle.y;
    }
    if (idle) return;
    for (int i = threadIdx.x; i < max_blocks; i += blockDim.x) tables[(long long)token * max_blocks + i] = table[i];
}
