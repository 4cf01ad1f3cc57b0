// Generated from notebooks/18_fused_kernels.ipynb; edit there, then run: python tools/nb.py export

// activations = silu(gate) * up / 16: norm, both products of the FFN and SiLU, in one kernel.
//
// hidden half [N or 2N][WIDTH] (norm.cuh) -> out half [N or 2N][FFN_WIDTH]. The sixteenth keeps outliers inside half:
// thousands were seen in the 135M model; the down projection multiplies by 16.   rms_now[N]: for the next norm.
// Weight tiles hold 8 rows of the gate over the same 8 rows of up, so a block has both halves of each product.
// Launch: grid (ceil(FFN_WIDTH / 8 / ROW_TILES), ceil(N / TOKENS)), 32 WARPS threads.
// Limit: the largest matrix of a layer. At batch 32 issue slots bind: a warp runs 1,100 instructions, 10 warps an SM.
#include "dependent.cuh"
#include "norm.cuh"
#include "product.cuh"

static_assert(WIDTH > 0 && WIDTH % 32 == 0, "WIDTH must be a multiple of 32: whole k-blocks");
static_assert(FFN_WIDTH > 0 && FFN_WIDTH % 8 == 0, "FFN_WIDTH must be a multiple of 8: gates of a row tile");
typedef Product<TILE, COLUMN_TILES, HI_LO, ROW_TILES, WARPS, BLOCKS_PER_WARP, WIDTH / 32> Projection;
typedef Norm<Projection::TOKENS, WARPS, WIDTH / 16> InputNorm;
const int TOKENS = Projection::TOKENS, THREADS = Projection::THREADS, COLUMNS = Projection::ROWS_PER_TOKEN;
const int ROUNDS = (TOKENS * 8 + THREADS - 1) / THREADS;  // a thread finishes one unit of a token, 8 units to a tile

__device__ inline float silu(float x) { return __fdividef(x, 1.0f + __expf(-x)); }

// silu(gate) * up / 16, or NaN where a sixteenth of gate or up is beyond the halfs in which notebook 20 keeps them:
// so an error does not depend on how many tokens a step has.
__device__ inline float activate(float gate, float up) {
    const bool fits = fmaxf(fabsf(gate), fabsf(up)) < 16 * 65520.0f;
    return fits ? silu(gate) * up * 0.0625f : __int_as_float(0x7fffffff);
}

extern "C" __global__ void __launch_bounds__(32 * WARPS, 1)
gate_up(const unsigned char* weights, const half* hidden, const float* squares, int capacity, float eps,
        const float* rms_before, float* rms_now, const int* counts, half* out) {
    __shared__ float partial[Projection::SHARED], norms[InputNorm::SHARED];
    Projection product;
    InputNorm norm;
    float factors[ROUNDS];
    if (EARLY) let_next_kernel_start();
    product.load(weights, blockIdx.x * ROW_TILES, FFN_WIDTH / 8);
    const int first = blockIdx.y * TOKENS, count = min(counts[0] - first, TOKENS), unit = threadIdx.x % 8;
    if (count <= 0) return;  // never the first group: some block always waits for the kernel before
    wait_for_previous_kernel();
    if (!EARLY) let_next_kernel_start();
    norm.load(squares, capacity, first);
    product.multiply(hidden + (size_t)first * COLUMNS * WIDTH, count * COLUMNS);
    for (int i = 0; i < ROUNDS; i++)
        factors[i] = load_fresh(rms_before + first + min((int)(threadIdx.x + i * THREADS) / 8, TOKENS - 1));
    norm.share(norms);
#pragma unroll
    for (int r = 0; r < ROW_TILES; r++) {
        if (r) __syncthreads();
        product.share(partial, r);
        __syncthreads();
        const int tile = blockIdx.x * ROW_TILES + r;
        for (int i = 0; i < ROUNDS; i++) {
            const int token = (threadIdx.x + i * THREADS) / 8;
            if (token >= count || tile >= FFN_WIDTH / 8) continue;
            if (r == 0) {
                const float rms = InputNorm::inverse_rms(norms, token, eps);
                factors[i] = __fdividef(rms, factors[i]);
                if (tile + unit == 0) rms_now[first + token] = rms;
            }
            const float gate = Projection::total(partial, token, unit) * factors[i];
            const float up = Projection::total(partial, token, unit + 8) * factors[i];
            store_activation<HI_LO>(out, first + token, FFN_WIDTH, tile * 8 + unit, activate(gate, up));
        }
    }
}
