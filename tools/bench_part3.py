"""Part III in numbers: python tools/bench_part3.py [--model MODEL] [--device cpu|cuda] [--json FILE]

What the engine itself costs: scheduling, sampling hand-over and output handling of a decode step, with a model that
computes nothing. What a prefix hit saves, and what running requests together gains: with the real model.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np

from rvllm import LLM, SamplingParams, hub
from rvllm.bench import about, subject_of, write_record
from rvllm.block_pool import BlockPool
from rvllm.device import processor_name
from rvllm.engine import Engine
from rvllm.prefix_cache import PrefixCache
from rvllm.scheduler import Scheduler
from rvllm.step import Step
from rvllm.tokenizer import Tokenizer

PROMPT, STEPS, REPEATS, VOCABULARY = 400, 200, 5, 64
PARTS = ("schedule", "sample", "output")


class Silent:
    """Logits of a text that is known beforehand; a small vocabulary, so that searching it takes no time."""

    def __init__(self, token_ids: list[int]) -> None:
        self._ids, self._count = token_ids, 0

    def forward(self, step: Step, _cache: Any) -> np.ndarray:
        logits = np.zeros((step.num_seqs, VOCABULARY), np.float32)
        logits[:, self._ids[self._count % len(self._ids)]] = 1
        self._count += 1
        return logits


def decoding(tokenizer: Tokenizer, num_seqs: int) -> Engine:
    """An engine without a model whose next steps decode so many sequences, each 400 tokens long."""
    pool = BlockPool(num_seqs * 48, 16)
    scheduler = Scheduler(pool, num_seqs, 8192, PrefixCache(pool))
    letters = [i for i in range(VOCABULARY) if i not in tokenizer.eog_ids and i > 20]
    engine = Engine(Silent(letters), None, tokenizer, scheduler, 49152, 1024)
    rng = np.random.default_rng(0)
    for _ in range(num_seqs):
        prompt = rng.integers(0, 49152, PROMPT).tolist()
        engine.add_request(prompt, SamplingParams(max_tokens=STEPS + 100, ignore_eos=True))
    while scheduler.waiting or scheduler.running[-1].num_uncomputed_tokens > 1:
        engine.step()
    return engine


def host_step(tokenizer: Tokenizer, num_seqs: int) -> dict[str, Any]:
    """Median milliseconds of the host's parts of a decode step of so many sequences, 400 to 700 tokens long."""
    engine = decoding(tokenizer, num_seqs)
    samples = []
    for _ in range(STEPS):
        before = [getattr(engine.metrics, f"{part}_seconds") for part in PARTS]
        engine.step()
        samples.append([getattr(engine.metrics, f"{p}_seconds") - s for p, s in zip(PARTS, before, strict=True)])
    medians = np.median(samples, axis=0) * 1e3
    row = {f"{part}_ms": float(ms) for part, ms in zip(PARTS, medians, strict=True)}
    return {"num_seqs": num_seqs, **row, "host_ms": float(np.median(np.sum(samples, axis=1)) * 1e3)}


def prefix_hit(llm: LLM, num_shared: int) -> dict[str, Any]:
    """Shared tokens and 16 own, twice: tokens computed and milliseconds to the first token, median of several."""
    rng, rows = np.random.default_rng(0), []
    for _ in range(REPEATS):
        shared = rng.integers(1000, 40_000, num_shared).tolist()
        for turn in ("first", "second"):
            before = llm.engine.metrics.num_computed_tokens
            prompt = shared + rng.integers(1000, 40_000, 16).tolist()
            metrics = llm.generate(prompt, SamplingParams(max_tokens=1))[0].metrics
            computed = llm.engine.metrics.num_computed_tokens - before
            rows.append((turn, computed, (metrics.time_to_first_token or 0) * 1e3))
    return {"shared_tokens": num_shared, "own_tokens": 16} | {
        turn: {
            "computed_tokens": max(computed for name, computed, _ in rows if name == turn),
            "first_token_ms": statistics.median(ms for name, _, ms in rows if name == turn),
            "samples": [ms for name, _, ms in rows if name == turn],
        }
        for turn in ("first", "second")
    }


def together(llm: LLM, count: int) -> dict[str, Any]:
    """Requests with prompts and answers of 16 to 64 tokens: one after the other, in groups of 8, all at once."""
    rng = np.random.default_rng(1)
    prompts = [rng.integers(1000, 40_000, n).tolist() for n in rng.integers(16, 65, count)]
    params = [SamplingParams(max_tokens=int(n), ignore_eos=True) for n in rng.integers(16, 65, count)]
    tokens, rates = sum(p.max_tokens or 0 for p in params), {}
    for name, size in (("one after the other", 1), ("in groups of 8", 8), ("all at once", count)):
        start = time.perf_counter()
        for i in range(0, count, size):
            llm.generate(prompts[i : i + size], params[i : i + size])
        rates[name] = tokens / (time.perf_counter() - start)
    return {"requests": count, "output_tokens": tokens, "output_tok_s": rates}


def measure(model: str, device: str) -> dict[str, Any]:
    """Everything, as one record."""
    subject = subject_of(hub.resolve(model))
    with LLM(model, device=device) as llm:
        llm.generate(list(range(100, 628)), SamplingParams(max_tokens=4))  # warm up
        hits = [prefix_hit(llm, n) for n in ((512,) if device == "cpu" else (512, 4096))]
        host = [host_step(llm.tokenizer, n) for n in (1, 16, 64, 128, 256)]
    with LLM(model, device=device, enable_prefix_caching=False) as llm:
        llm.generate([[5] * 20] * 8, SamplingParams(max_tokens=4))
        batches = together(llm, 32)
    measured = {"processor": processor_name(), "host_step": host, "prefix_hit": hits, "together": batches}
    return about(subject, device) | measured


def main() -> None:
    """Measure and print, and write the record if asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    record = measure(arguments.model, arguments.device)
    print(json.dumps(record, indent=1))
    if arguments.json:
        write_record(record, arguments.json)


if __name__ == "__main__":
    main()
