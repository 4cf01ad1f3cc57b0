// Generated from notebooks/17_paged_attention.ipynb; edit there, then run: python tools/nb.py export

// Attention of single tokens over the block table, for decode. A token at p attends to the pages of its positions
// 0 to p - 1 and to itself, whose query, key and value it takes from qkv.
//
// qkv QKV_TYPE [N][(GROUP + 2) * KV_HEADS * HEAD_DIM], halfs as a float view; pages half [num_blocks][2][KV_HEADS]
// [16 * HEAD_DIM]; rows int [bucket], the tokens to do, num_rows int, how many; positions, owners int [N]; computed int
// [B], tokens cached before this step; block_tables int [B][max_blocks]; out, parts [bucket][KV_HEADS][splits]: see
// attention_store.cuh. parts is left alone if there is one split.   rope: see attention_own.cuh; with RAW_QKV only.
// Launch: grid (bucket, KV_HEADS, splits), block 32 * WARPS, a multiple of HEAD_DIM. BLOCKS_PER_SM limits registers.
// Fast: the GROUP heads share each page that is read, in tensor cores; a warp has PREFETCH pages under way, the first
// from before the kernel that makes qkv has ended; warps meet at one barrier.
// Limit: latency for few tokens, memory bandwidth for many: 4 * HEAD_DIM bytes for a cached token and KV head.
#include "attention_combine.cuh"
#include "attention_own.cuh"
#include "attention_ring.cuh"
#include "dependent.cuh"

extern "C" __global__ void __launch_bounds__(32 * WARPS, BLOCKS_PER_SM)
    paged_attention(const float* qkv, half* pages, const int* rows, const int* num_rows, const int* positions,
                    const int* owners, const int* computed, const int* block_tables, int max_blocks, const float* rope,
                    half* out, float* parts) {
    __shared__ Parts shared;
    let_next_kernel_start();
    // Lookups depend on each other: what can be asked for at once is. A block past the end looks at the last row.
    int last = num_rows[0] - 1, token = EVERY_TOKEN ? blockIdx.x : last < 0 ? 0 : rows[min((int)blockIdx.x, last)];
    int position = positions[token], owner = owners[token];
    int first = threadIdx.x / 32 * gridDim.z + blockIdx.z, stride = WARPS * gridDim.z, kv_head = blockIdx.y;
    PageRing ring = {{}, {}, pages, block_tables + (long long)owner * max_blocks, kv_head, first, stride};
    ring.look_up(max_blocks);
    if (blockIdx.x >= num_rows[0]) {
        wait_for_previous_kernel();  // a kernel of idle blocks must not end before the kernel that it follows
        return;
    }
    // Early: pages of which this token needs only what older steps wrote. The last one may hold a cell that is just
    // being written: it is left out, and halfs that are half old, half new do not exist.
    int num_pages = (position + PAGE - 1) / PAGE;
    int old_pages = position <= computed[owner] ? num_pages : computed[owner] / PAGE;
    ring.fill(0, old_pages);
    Angles angles;
    if (RAW_QKV) load_angles(angles, rope, position);
    wait_for_previous_kernel();
    ring.fill(old_pages, num_pages);

    const QKV_TYPE* row = (const QKV_TYPE*)qkv + (long long)token * (GROUP + 2) * KV_HEADS * HEAD_DIM;
    const QKV_TYPE* heads = row + kv_head * GROUP * HEAD_DIM;
    const QKV_TYPE* key = row + HEADS_WIDTH + kv_head * HEAD_DIM;
    const float scale = 1.44269504f / sqrtf(HEAD_DIM);  // log2(e) / sqrt(HEAD_DIM): powers of two from here on
    Query query;
    Softmax softmax;
    OwnKey own_key;
    const bool is_last_warp = threadIdx.x / 32 == WARPS - 1;  // it has the fewest pages
    if (is_last_warp) own_key.load(key);
    float own_value = load_fresh(key + KV_HEADS * HEAD_DIM + threadIdx.x % HEAD_DIM);
    load_query(query, heads, angles);
    if (is_last_warp) own_key.score(query, angles, scale, shared.largest[WARPS]);
    if (threadIdx.x < GROUP) shared.sum[WARPS][threadIdx.x] = blockIdx.z == 0;  // the first split counts the token
    start_softmax(softmax);
    ring.attend(query, position, scale, softmax);
    share_softmax(softmax, shared);
    __syncthreads();
    Place place = place_of(token, positions, owners, block_tables, max_blocks);
    if (RAW_QKV && blockIdx.z == 0) store_own(key, rope, place, kv_head, pages);

    float* part = parts + ((long long)(blockIdx.x * KV_HEADS + kv_head) * gridDim.z + blockIdx.z) * PART_FLOATS;
    finish(shared, own_value, out, token, kv_head, part);
}
