"""Solutions to the exercises of notebook 19."""


# A bucket is the next power of two.
def idle(n: int) -> float:
    parts = [1 - count / (1 << (count - 1).bit_length()) for count in range(1, n + 1)]
    return sum(parts) / n


def may_start_early(names: list[str], own: set[str]) -> list[bool]:
    behind = [None, *names[:-1]]
    return [name in own and before in own for name, before in zip(names, behind[: len(names)], strict=True)]
