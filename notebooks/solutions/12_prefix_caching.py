"""Solutions to the exercises of notebook 12."""

import hashlib

from rvllm.prefix_cache import block_key


def computed_tokens(prompts: list[list[int]], block_size: int) -> list[int]:
    beginnings: set[tuple[int, ...]] = set()  # every beginning of whole blocks that was computed
    computed = []
    for prompt in prompts:
        found = 0
        while found + block_size < len(prompt) and tuple(prompt[: found + block_size]) in beginnings:
            found += block_size
        computed.append(len(prompt) - found)
        beginnings |= {tuple(prompt[:end]) for end in range(block_size, len(prompt) + 1, block_size)}
    return computed


# The third finds the first block of the one and the second block of the other.
def wrongly_shared() -> list[list[int]]:
    """Three prompts, in the order in which they are sent."""
    return [[0, 0, 0, 0, 1, 1, 1, 1, 9], [5, 5, 5, 5, 2, 2, 2, 2, 9], [0, 0, 0, 0, 2, 2, 2, 2, 9]]


# A digest as the first parent: of fixed length, so that no name runs into the tokens.
def salted_key(user: str, parent_key: bytes, token_ids: tuple[int, ...]) -> bytes:
    """The key of a block of this user; `parent_key` is b"" for the first block."""
    return block_key(parent_key or hashlib.sha256(user.encode()).digest(), token_ids)
