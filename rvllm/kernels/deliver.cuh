// Generated from notebooks/15_device_resident_step.ipynb; edit there, then run: python tools/nb.py export

// How a chosen token gets to the host: a write into its memory, which the card can reach. Any thread of a block.
//
// delivered int [TURNS][stride], in pinned host memory: a step uses row turn % TURNS, so that the host may read the
// tokens of one step while the next one writes its own. turn, counts[2], grows by one at the beginning of each step.
#pragma once

const int TURNS = 4;  // as in transfers.py

__device__ inline void deliver(int* delivered, int stride, int turn, int sequence, int token_id) {
    delivered[turn % TURNS * stride + sequence] = token_id;
}
