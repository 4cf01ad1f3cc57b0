"""Solutions to the exercises of notebook 05."""

AXPY = r"""
extern "C" __global__ void axpy(float alpha, const float* x, const float* y, float* out, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) out[i] = alpha * x[i] + y[i];
}
"""

# The last element of x is x[n - 1]: thread 0 read x[n].
REVERSE = r"""
extern "C" __global__ void reverse(const float* x, float* out, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) out[i] = x[n - 1 - i];
}
"""

# Neighbouring threads read a whole row apart, so nearly every lane needs a sector of its own.
ROW_SUMS = r"""
extern "C" __global__ void column_sums(const float* x, float* out, int rows, int cols) {
    int c = blockIdx.x * blockDim.x + threadIdx.x;
    if (c >= cols) return;
    float sum = 0.0f;
    for (int r = 0; r < rows; r++) sum += x[r * cols + c];
    out[c] = sum;
}
extern "C" __global__ void row_sums(const float* x, float* out, int rows, int cols) {
    int r = blockIdx.x * blockDim.x + threadIdx.x;
    if (r >= rows) return;
    float sum = 0.0f;
    for (int c = 0; c < cols; c++) sum += x[r * cols + c];
    out[r] = sum;
}
"""
