// Generated from notebooks/06_elementwise_kernels.ipynb; edit there, then run: python tools/nb.py export

// Swap the middle axes: out[b, h, t, i] = x[b, t, h, i].
//
// x float [B, T, H, d], out float [B, H, T, d].
// Launch: one thread for an output element, any block size; the grid covers B * T * H * d.
// Rows of d stay whole, so reads and writes of a warp are both contiguous: no staging in shared memory is needed,
// as it is in a transpose that swaps the last axis.
// Limit: memory bandwidth; 8 bytes an element.
extern "C" __global__ void transpose_axes12(const float* x, float* out, int B, int T, int H, int d) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= B * T * H * d) return;
    int e = i % d, t = i / d % T, h = i / (d * T) % H, b = i / (d * T * H);
    out[i] = x[((b * T + t) * H + h) * d + e];
}
