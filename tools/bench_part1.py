"""Part I in numbers: python tools/bench_part1.py [--json FILE]

A decode step against its matrices alone in every layout, prefill, start-up, memory, and dequantisation against the
gguf package. Everything that is compared is measured in turns in one process: on shared machines only ratios last.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGML_QUANT_SIZES
from gguf.quants import dequantize as gguf_dequantize

from rvllm import hub
from rvllm.cpu_model import CpuModel, DenseKVCache, linear
from rvllm.device import describe_device
from rvllm.gguf import GGUFFile
from rvllm.quants import DECODERS, dequantize
from rvllm.step import make_step

POSITION = 64  # where in the text the decode step is timed
# Run in a process of its own: seconds and peak anonymous memory from an empty interpreter to the first token.
FIRST_TOKEN = """
import threading, time
peak, done = 0, False
def watch():
    global peak
    while not done:
        with open("/proc/self/status") as status:
            peak = max(peak, next(int(line.split()[1]) for line in status if line.startswith("RssAnon")))
        time.sleep(0.005)
thread = threading.Thread(target=watch)
thread.start()
start = time.perf_counter()
from rvllm import LLM
next(LLM("smollm2-135m", device="cpu").stream("The capital of France is"))
seconds = time.perf_counter() - start
done = True
thread.join()
print(seconds, peak * 1024)
"""


def in_turns(calls: Mapping[str, Callable[[], object]], repeats: int) -> dict[str, list[float]]:
    """Milliseconds of each call, round after round, so that a slow moment of the machine hits all alike."""
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for round_ in range(repeats + 1):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            if round_:
                samples[name].append((time.perf_counter() - start) * 1e3)
    return samples


def medians(samples: Mapping[str, list[float]]) -> dict[str, float]:
    """Median of each series."""
    return {name: statistics.median(values) for name, values in samples.items()}


def separate_matrices(model: CpuModel) -> list[np.ndarray]:
    """The 211 matrices of the file, stored by rows, filled with a constant: what a plain loader would keep."""
    c, matrices = model.config, []
    D, F, kv = c.hidden_size, c.intermediate_size, c.num_key_value_heads * c.head_dim
    block = [(c.num_attention_heads * c.head_dim, D), (kv, D), (kv, D), (D, D), (F, D), (F, D), (D, F)]
    for shape in [*block * c.num_hidden_layers, (c.vocab_size, D)]:
        matrices.append(np.full(shape, 0.01, np.float32))
    return matrices


def decode_step(model: CpuModel, repeats: int = 25) -> dict[str, list[float]]:
    """Milliseconds of a decode step and of its matrices alone: W @ x, x @ Wᵀ, stacked, stacked by columns (ours)."""
    ours = [w for layer in model.layers for w in (layer.qkv, layer.attn_output, layer.gate_up, layer.ffn_down)]
    ours.append(model.output)
    stacked = [np.full(w.shape, 0.01, np.float32) for w in ours]
    separate = separate_matrices(model)
    rows = {w.shape[1]: np.ones((1, w.shape[1]), np.float32) for w in ours}
    vectors = {size: row[0] for size, row in rows.items()}
    cache = DenseKVCache(model.config, 1, 2 * POSITION)
    model.forward(make_step([list(range(100, 100 + POSITION))], [0], [[0]], cache.block_size), cache)
    step = make_step([[1]], [POSITION], [[0]], cache.block_size)
    return in_turns(
        {
            "step": lambda: model.forward(step, cache),
            "W @ x": lambda: [w @ vectors[w.shape[1]] for w in separate],
            "x @ W.T": lambda: [linear(rows[w.shape[1]], w) for w in separate],
            "stacked x @ W.T": lambda: [linear(rows[w.shape[1]], w) for w in stacked],
            "stacked by columns x @ W.T": lambda: [linear(rows[w.shape[1]], w) for w in ours],
        },
        repeats,
    )


def decode_ratio(samples: Mapping[str, list[float]]) -> float:
    """Step over the fastest layout; quartiles, since a slow moment can only lengthen a sample."""
    quick = {name: float(np.percentile(values, 25)) for name, values in samples.items()}
    return quick["step"] / min(ms for name, ms in quick.items() if name != "step")


def read_bandwidth(n_bytes: int) -> float:
    """GB/s of one matrix-vector product with a matrix as large as all weights: the yardstick of notebook 03."""
    matrix, vector = np.ones((n_bytes // 4 // 4096, 4096), np.float32), np.ones(4096, np.float32)
    return matrix.nbytes / medians(in_turns({"product": lambda: matrix @ vector}, 9))["product"] / 1e6


def prefill(model: CpuModel, lengths: tuple[int, ...] = (1, 8, 32, 128)) -> dict[str, float]:
    """Milliseconds of one pass over a prompt of so many tokens."""
    calls = {}
    for length in lengths:
        cache = DenseKVCache(model.config, 1, length)
        step = make_step([list(range(100, 100 + length))], [0], [[0]], cache.block_size)
        calls[str(length)] = lambda step=step, cache=cache: model.forward(step, cache)
    return medians(in_turns(calls, 5))


def first_token() -> tuple[float, int]:
    """Seconds from the import to the first token, and peak anonymous bytes, in a fresh process."""
    done = subprocess.run([sys.executable, "-c", FIRST_TOKEN], capture_output=True, text=True, check=True)
    seconds, peak = done.stdout.split()
    return float(seconds), int(peak)


def quants(repeats: int = 7) -> dict[str, dict[str, float]]:
    """Milliseconds to decode 2,048 rows of 1,536 random weights, by type, ours and the gguf package's."""
    rng, results = np.random.default_rng(0), {}
    for kind in DECODERS:
        block, block_bytes = GGML_QUANT_SIZES[kind]
        raw = rng.integers(0, 256, (2048, 1536 // block * block_bytes), dtype=np.uint8)
        calls = {"rvllm": partial(dequantize, raw, kind), "gguf": partial(gguf_dequantize, raw, kind)}
        with np.errstate(all="ignore"):
            samples = in_turns(calls, repeats)
        results[kind.name] = medians(samples)
    return results


def measure() -> dict[str, Any]:
    """Everything, as one record."""
    path = hub.resolve("smollm2-135m")
    opened = in_turns({"open": lambda: GGUFFile(path)}, 5)["open"]
    model = CpuModel(GGUFFile(path))
    samples = decode_step(model)
    n_bytes = 4 * sum(int(np.prod(t.shape)) for t in GGUFFile(path).tensors.values())
    bandwidth, step_ms = read_bandwidth(n_bytes), statistics.median(samples["step"])
    seconds, peak = first_token()
    versions = {name: importlib.metadata.version(name) for name in ("numpy", "gguf", "tokenizers")}
    return {
        "engine": "rvllm",
        "device": "cpu",
        "card": describe_device(),
        "date": datetime.date.today().isoformat(),
        "versions": {"python": platform.python_version(), **versions},
        "model": {"name": "SmolLM2-135M-Instruct", "type": "Q4_1 as float32", "sha256": hub.SMOLLM2_135M.sha256},
        "decode_ms": medians(samples),
        "decode_samples_ms": samples,
        "decode_ratio": decode_ratio(samples),
        "bytes_per_step": n_bytes,
        "read_gb_s": bandwidth,
        "bandwidth_share": n_bytes / step_ms / 1e6 / bandwidth,
        "prefill_ms": prefill(model),
        "open_ms": statistics.median(opened),
        "first_token_s": seconds,
        "peak_anonymous_bytes": peak,
        "dequantize_ms": quants(),
    }


def main() -> None:
    """Measure, print, and keep the record where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    record = measure()
    shown = {key: value for key, value in record.items() if key != "decode_samples_ms"}
    print(json.dumps(shown, indent=1))
    if arguments.json:
        arguments.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
