// Generated from notebooks/05_first_kernels.ipynb; edit there, then run: python tools/nb.py export

// Add in place: x[i] += y[i].
//
// x, y float [n].
// Launch: one thread for an element, any block size; the grid covers n.
// Limit: memory bandwidth; 12 bytes an element.
extern "C" __global__ void residual_add(float* x, const float* y, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) x[i] += y[i];
}
