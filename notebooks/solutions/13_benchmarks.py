"""Solutions to the exercises of notebook 13."""

import math


def implied_total(batch: int, generated_tokens: int, first_token_ms: float, decode_ms_per_step: float) -> float:
    """Tokens per second of all sequences together."""
    total_ms = first_token_ms + (generated_tokens - 1) * decode_ms_per_step
    return batch * generated_tokens / total_ms * 1e3


def crossover(weights: float, kv: float, flops: float, rate: float, peak: float) -> float:
    """Batch size (a float) at which reading and computing take equally long."""
    growth = flops / peak - kv / rate  # how much more a sequence adds to computing than to reading
    return weights / rate / growth if growth > 0 else math.inf


def goodput(requests: list[tuple[float, list[float]]], first_limit: float, gap_limit: float) -> float:
    """Share of requests within both limits."""
    good = [first <= first_limit and all(gap <= gap_limit for gap in gaps) for first, gaps in requests]
    return sum(good) / len(good)
