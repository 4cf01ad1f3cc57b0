"""Solutions to the exercises of notebook 15."""

import numpy as np


# Plain ids would be bad indices, so those are made harmless first; `chosen` may even be empty.
def resolve(token_ids: np.ndarray, chosen: np.ndarray) -> np.ndarray:
    """Negative ids replaced by what they stand for; the arguments are left as they are."""
    ids, unknown = token_ids.copy(), token_ids < 0
    ids[unknown] = chosen[~token_ids[unknown]]
    return ids


# In step n a sequence has length + n tokens in the cache: a multiple of the block size means that all blocks are full.
def letters(lengths: list[int], block_size: int, steps: int) -> int:
    return sum(n < 2 or any((length + n) % block_size == 0 for length in lengths) for n in range(steps))


# Adding zero turns minus zero into zero. Bits of negative floats fall already; those of the others are turned.
def ranks(logits: np.ndarray) -> np.ndarray:
    """float32 [V] -> uint64 [V]."""
    bits = (logits + np.float32(0)).view(np.uint32)
    falling = np.where(bits >> 31, bits, bits ^ np.uint32(0x7FFFFFFF)).astype(np.uint64)
    return falling << np.uint64(23) | np.arange(len(logits), dtype=np.uint64)
