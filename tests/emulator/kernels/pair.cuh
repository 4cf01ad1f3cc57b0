#pragma once
struct Pair { float a; int b; };
__device__ inline float sum(Pair p) { return p.a + p.b; }
