// Generated from notebooks/16_quantised_weights.ipynb; edit there, then run: python tools/nb.py export

// Weight tiles: 16 rows x 32 columns of a matrix, as a warp feeds them to the tensor cores. The macro TILE picks one.
//
// A matrix [rows, k] is tiles[row / 16][k / 32]; inside one, with g = lane / 4 and q = lane % 4:
//
//              k 0..7   8..15  16..23  24..31
//     row 0    lane 0    1       2       3       A lane owns 8 weights of row g and the 8 under them in row g + 8.
//     row 1         4    5       6       7       They lie side by side, so that one load fetches them, and the
//     ...                                        loads of a warp are one contiguous piece of memory.
//     row 7        28   29      30      31
//     row 8    lane 0    1       2       3       The scales of the rows follow the quants: g, g + 8, next g.
//     ...
//
// A tile struct, held by each lane of a warp (a block has any number of warps):
//   load(tile)       fetch this lane's part of the BYTES bytes; nothing waits for it yet
//   fragments(a)     the quants as halfs, exactly: a[0..3] and a[4..7] are the A operands of two mma. The 32 columns
//                    are taken in an order of their own: the first mma has 8q..8q+3 of every q, the second 8q+4..8q+7.
//                    A sum does not mind, if the other operand does the same; there a lane then needs the contiguous
//                    columns 8q..8q+7 of its row of activations: 16 bytes, the first 8 for the first mma.
//   scale()          of rows g and g + 8 (HAS_SCALE), minimum() likewise (HAS_MIN): weight = scale * quant + minimum
//   folded(a)        the weights themselves as halfs: scale and minimum are in them, at the price of one more rounding
//                    (TileQ4_K: two more)
//   value(tile, row, k)   one weight as float, by one thread: for looking up an embedding
#pragma once
#include "tile_f16.cuh"
#include "tile_q4.cuh"
#include "tile_q4_k.cuh"
#include "tile_q8_0.cuh"
