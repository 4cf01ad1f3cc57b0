"""Solutions to the exercises of notebook 14."""


def busy_and_idle(intervals: list[tuple[float, float]]) -> tuple[float, float]:
    busy, reached = 0.0, intervals[0][0]
    for start, end in intervals:
        busy += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return busy, reached - intervals[0][0] - busy


# The largest part has the largest gain whatever the factor: this is Amdahl's law.
def best_part(parts: dict[str, float], factor: float) -> tuple[str, float]:
    """(name, old time / new time); among equals the first."""
    name = max(parts, key=lambda part: parts[part])
    total = sum(parts.values())
    return name, total / (total - parts[name] + parts[name] / factor)


# Read where a position exists, written for all of the padded array; keys and values: twice.
def gather_bytes(lengths: list[int], layers: int, kv_heads: int, head_dim: int) -> int:
    positions = sum(lengths) + len(lengths) * max(lengths)
    return positions * kv_heads * head_dim * 4 * 2 * layers
