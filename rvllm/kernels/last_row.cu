// Generated from notebooks/06_elementwise_kernels.ipynb; edit there, then run: python tools/nb.py export

// One row of each sequence: out[b, i] = x[b, last[b], i].
//
// x float [B, T, D], last int [B], out float [B, D].
// Launch: one thread for an output element, any block size; the grid covers B * D.
// Limit: memory bandwidth; the point is not to compute logits for tokens whose logits nobody needs.
extern "C" __global__ void last_row(const float* x, const int* last, float* out, int B, int T, int D) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= B * D) return;
    int b = i / D;
    long long row = (long long)b * T + last[b];  // x may have more elements than an int can count, out has not
    out[i] = x[row * D + i % D];
}
