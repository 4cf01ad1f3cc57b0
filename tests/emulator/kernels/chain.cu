// Links of a chain of kernels that start behind one another early. `n` elements, a thread for each. One BUG in each
// kernel that is said to have one, if the launch is a dependent one.
__device__ inline void wait() { emu::wait_for_previous_kernel(); }
__device__ inline void let_next() { emu::let_next_kernel_start(); }
__device__ inline int me() { return blockIdx.x * blockDim.x + threadIdx.x; }

extern "C" __global__ void early_link(const float* x, float* out) {  // lets the next one start before it waits
    let_next();
    wait();
    out[me()] = x[me()] + 1;
}

extern "C" __global__ void late_link(const float* x, float* out) {  // the other way round
    wait();
    let_next();
    out[me()] = x[me()] + 1;
}

extern "C" __global__ void silent_link(const float* x, float* out) {  // its end lets the next one start
    wait();
    out[me()] = x[me()] + 1;
}

extern "C" __global__ void reads_early(const float* x, float* out) {
    float value = x[me()];  // BUG
    wait();
    out[me()] = value + 1;
}

extern "C" __global__ void writes_early(const float* x, float* out) {
    out[me()] = 7;  // BUG
    wait();
    out[me()] += x[me()];
}

extern "C" __global__ void adds_early(const float* x, float* out) {
    atomicAdd(out + me(), 1.0f);  // BUG
    wait();
    if (x[me()] < 0) out[me()] = 0;
}

extern "C" __global__ void never_waits(const float* x, float* out) { let_next(); }

extern "C" __global__ void idle_block_returns(const float* x, float* out) {
    if (blockIdx.x) return;
    wait();
    out[me()] = x[me()] + 1;
}

extern "C" __global__ void one_waits_for_all(const float* x, float* out) {  // and then meets the others
    if (threadIdx.x == 0) wait();
    __syncthreads();
    out[me()] = x[me()] + 1;
}

extern "C" __global__ void one_waits_for_a_warp(const float* x, float* out) {
    if (threadIdx.x % 32 == 0) wait();
    __syncwarp();
    out[me()] = x[me()] + 1;
}

extern "C" __global__ void one_waits_alone(const float* x, float* out) {
    if (threadIdx.x == 0) wait();
    out[me()] = x[me()] + 1;  // BUG
}

extern "C" __global__ void unsettled(const float* x, float* out) {
    float value = load_unsettled(x + me());
    wait();
    out[me()] = value;
}

extern "C" __global__ void half_words(const __half* x, __half* out) {  // neighbours, two bytes each
    __half value = x[2 * me() + 1];
    wait();
    out[2 * me()] = value;
}
