"""Solutions to the exercises of notebook 19."""


# A bucket is the next power of two.
def idle(n: int) -> float:
    parts = [1 - count / (1 << (count - 1).bit_length()) for count in range(1, n + 1)]
    return sum(parts) / n


def may_start_early(names: list[str], own: set[str]) -> list[bool]:
    behind = [None, *names[:-1]]
    return [name in own and before in own for name, before in zip(names, behind[: len(names)], strict=True)]


# Not only the kernel just before: until this one has waited, any kernel of the step may still be at work.
def early_reads(step: list[tuple[list[str], set[str]]]) -> list[int]:
    written: set[str] = set()
    found = []
    for reads, writes in step:
        found.append(next((i for i, name in enumerate(reads) if name in written), len(reads)))
        written |= writes
    return found
