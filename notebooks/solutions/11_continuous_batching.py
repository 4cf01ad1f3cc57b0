"""Solutions to the exercises of notebook 11."""

from collections import Counter


def steps_in_groups(lengths: list[int], seats: int) -> int:
    return sum(max(lengths[i : i + seats]) for i in range(0, len(lengths), seats))


def steps_continuously(lengths: list[int], seats: int) -> int:
    ends = [0] * seats  # when each seat becomes free
    for length in lengths:
        ends[ends.index(min(ends))] += length
    return max(ends)


# Each group waits for one long answer; continuously the two long ones overlap.
def unlucky_lengths() -> list[int]:
    """Four lengths, each from 1 to 100."""
    return [100, 1, 100, 1]


def waits_and_waste(steps) -> tuple[dict[str, int], dict[str, int]]:
    """({label: steps waited before its first one}, {label: tokens computed again}); 0 for labels without any."""
    reached: Counter[str] = Counter()  # positions that were computed at least once
    waits: Counter[str] = Counter()
    waste: Counter[str] = Counter()
    for record in steps:
        for label, (first, count) in record.computed.items():
            again = max(0, min(reached[label], first + count) - first)
            waste[label] += again
            reached[label] = max(reached[label], first + count)
        waits.update(label for label in record.waiting if not reached[label])
    return {label: waits[label] for label in reached}, {label: waste[label] for label in reached}
