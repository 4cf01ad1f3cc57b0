// Generated from notebooks/06_elementwise_kernels.ipynb; edit there, then run: python tools/nb.py export

// Causal mask: add minus infinity to the scores of keys that lie after their query.
//
// scores float [B, H, T, S], in place; positions int [B, T], the position of each query. Key s has position s.
// Launch: one thread for a score, any block size; the grid covers B * H * T * S.
// NVRTC knows no INFINITY: it comes from its bit pattern. A thread whose score stays as it is writes nothing.
// Limit: memory bandwidth; at most 8 bytes a score.
extern "C" __global__ void mask_add(float* scores, const int* positions, int B, int H, int T, int S) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= B * H * T * S) return;
    int s = i % S, t = i / S % T, b = i / (S * T * H);
    if (s > positions[b * T + t]) scores[i] += __int_as_float(0xff800000);
}
