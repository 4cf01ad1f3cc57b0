"""Solutions to the exercises of notebook 07."""

# Between writing the tile and reading another thread's part of it, everybody must have written.
SHIFT = r"""
extern "C" __global__ void shift(const float* x, float* out) {
    __shared__ float tile[128];
    tile[threadIdx.x] = x[threadIdx.x];
    __syncthreads();
    out[threadIdx.x] = tile[(threadIdx.x + 1) % 128];
}
"""

# Threads without an element start from minus infinity; of equal values the lower index wins.
ARGMAX = r"""
extern "C" __global__ void argmax(const float* x, int* out, int cols) {
    __shared__ float best[64];
    __shared__ int where[64];
    const float* row = x + blockIdx.x * cols;
    float value = __int_as_float(0xff800000);
    int index = cols;
    for (int i = threadIdx.x; i < cols; i += 64)
        if (row[i] > value) value = row[i], index = i;
    best[threadIdx.x] = value;
    where[threadIdx.x] = index;
    __syncthreads();
    for (int width = 32; width > 0; width /= 2) {
        int other = threadIdx.x + width;
        if (threadIdx.x < width) {
            bool larger = best[other] > best[threadIdx.x];
            bool earlier = best[other] == best[threadIdx.x] && where[other] < where[threadIdx.x];
            if (larger || earlier) best[threadIdx.x] = best[other], where[threadIdx.x] = where[other];
        }
        __syncthreads();
    }
    if (threadIdx.x == 0) out[blockIdx.x] = where[0];
}
"""

# The barrier stood under an `if` that not all threads take. All threads go the same way now; those without an element
# contribute 0, and a loop covers rows of any length.
ROW_SUM = r"""
extern "C" __global__ void row_sum(const float* x, float* out, int cols) {
    __shared__ float total[32];
    float sum = 0.0f;
    for (int i = threadIdx.x; i < cols; i += 32) sum += x[blockIdx.x * cols + i];
    total[threadIdx.x] = sum;
    __syncthreads();
    for (int width = 16; width > 0; width /= 2) {
        if (threadIdx.x < width) total[threadIdx.x] += total[threadIdx.x + width];
        __syncthreads();
    }
    if (threadIdx.x == 0) out[blockIdx.x] = total[0];
}
"""
