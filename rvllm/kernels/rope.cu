// Generated from notebooks/06_elementwise_kernels.ipynb; edit there, then run: python tools/nb.py export

// Turn the pairs (2i, 2i + 1) of every head by the angle of the token's position, in place.
//
// x float [n_tokens, n_heads, 2 * half], cos and sin float [n_tokens, half].
// Launch: one thread for a pair, any block size; the grid covers n_tokens * n_heads * half.
// A pair is one 8-byte load and one 8-byte store (float2), so a warp moves 256 contiguous bytes each way.
// Limit: memory bandwidth; 16 bytes a pair, and the angles, which all heads of a token share, from the cache.
extern "C" __global__ void rope(float* x, const float* cos, const float* sin, int n_tokens, int n_heads, int half) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n_tokens * n_heads * half) return;
    int angle = i / (n_heads * half) * half + i % half;
    float c = cos[angle], s = sin[angle];
    float2* pairs = (float2*)x;
    float2 p = pairs[i];
    pairs[i] = make_float2(p.x * c - p.y * s, p.y * c + p.x * s);
}
