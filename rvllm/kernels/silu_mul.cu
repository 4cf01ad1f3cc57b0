// Generated from notebooks/06_elementwise_kernels.ipynb; edit there, then run: python tools/nb.py export

// The gate of SwiGLU: out[i] = silu(gate[i]) * up[i], with silu(z) = z / (1 + exp(-z)).
//
// gate, up, out float [n].
// Launch: one thread for an element, any block size; the grid covers n.
// For very negative z, exp(-z) is infinity and z / infinity is the right answer, 0: no branch is needed.
// Limit: memory bandwidth; 12 bytes an element.
extern "C" __global__ void silu_mul(const float* gate, const float* up, float* out, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    float z = gate[i];
    out[i] = z / (1.0f + expf(-z)) * up[i];
}
