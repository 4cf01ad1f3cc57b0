"""Part II in numbers, on a GPU: python tools/bench_part2.py MODEL.gguf [--json FILE]

Each kernel against the rate at which this card copies memory, and the first CUDA model: prefill, decode steps at
several batch sizes, steps. Kernel times are CUDA events around ten launches on large arrays; step times are wall clock,
logits downloaded.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from rvllm import ops
from rvllm.block_pool import BlockPool, grow_table
from rvllm.cuda_model import CudaModel
from rvllm.gguf import GGUFFile
from rvllm.kv_cache import DeviceKVCache
from rvllm.notebook import read_rate
from rvllm.runtime import Runtime
from rvllm.step import make_step

PROMPT, BLOCK_SIZE, REPEATS = 128, 16, 7


def kernel_cases(rt: Runtime) -> dict[str, tuple[float, Callable[[], object]]]:
    """Name -> (bytes moved, call) on arrays of 256 MB and more."""
    B, T, H, d, n = 256, 256, 16, 64, 1 << 26
    big, other = rt.zeros((B, T, H, d)), rt.zeros((B, T, H, d))
    rows, flat = big.reshape(-1, 1024), big.reshape(B * T, H, d)
    cos, sin, ids = rt.zeros((B * T, d // 2)), rt.zeros((B * T, d // 2)), rt.zeros(n // 1024, np.int32)
    positions, slots = rt.zeros((B, T), np.int32), rt.upload(np.arange(B * T, dtype=np.int32))
    storage = [rt.zeros((B * T // 16, 16, H, d)) for _ in range(2)]
    tables = rt.upload(np.arange(B * T // 16, dtype=np.int32).reshape(B, T // 16))
    lens, weight, size = rt.upload(np.full(B, T, np.int32)), rt.zeros(1024), big.nbytes
    return {
        "embedding": (2 * size, lambda: ops.embedding(rt, rows, ids)),
        "residual_add": (3 * size, lambda: ops.residual_add(rt, big, other)),
        "rope": (2 * size + 2 * cos.nbytes, lambda: ops.rope(rt, flat, cos, sin)),
        "silu_mul": (3 * size, lambda: ops.silu_mul(rt, big, other)),
        "mask_add": (2 * size, lambda: ops.mask_add(rt, big.reshape(B, 4, T, T), positions)),
        "transpose_axes12": (2 * size, lambda: ops.transpose_axes12(rt, big)),
        "rmsnorm": (2 * size, lambda: ops.rmsnorm(rt, rows, weight, 1e-5)),
        "softmax": (2 * size, lambda: ops.softmax(rt, rows)),
        "kv_write": (4 * size, lambda: ops.kv_write(rt, flat, flat, *storage, slots)),
        "kv_gather": (2 * size, lambda: ops.kv_gather(rt, storage[0], tables, lens, T)),
    }


def kernels(rt: Runtime) -> dict[str, dict[str, Any]]:
    """Milliseconds, GB/s and share of the copy rate of every kernel."""
    limit, results = read_rate(rt), {}
    for name, (n_bytes, call) in kernel_cases(rt).items():
        samples = [rt.milliseconds(call, 5) for _ in range(REPEATS)]
        ms = statistics.median(samples)
        rate = n_bytes / ms / 1e6
        results[name] = {"ms": ms, "samples": samples, "gb_s": rate, "share_of_copy": rate / limit}
    return {"copy": {"gb_s": limit}, **results}


def wall_ms(call: Callable[[], object]) -> list[float]:
    """Wall-clock milliseconds, after one call that does not count."""
    call()
    samples = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        call()
        samples.append((time.perf_counter() - start) * 1e3)
    return samples


def steps(rt: Runtime, model: CudaModel, batch: int) -> dict[str, Any]:
    """Prefill of `batch` prompts of 128 tokens in one step, and a decode step right after it."""
    blocks = -(-(PROMPT + 1) // BLOCK_SIZE)
    pool, tables = BlockPool(batch * blocks, BLOCK_SIZE), [[] for _ in range(batch)]
    for table in tables:
        grow_table(pool, table, PROMPT + 1)
    cache = DeviceKVCache(rt, model.config, pool.num_blocks, BLOCK_SIZE)
    prompts = np.random.default_rng(0).integers(100, 10_000, (batch, PROMPT)).tolist()
    prefill = make_step(prompts, [0] * batch, tables, BLOCK_SIZE)
    decode = make_step([[5]] * batch, [PROMPT] * batch, tables, BLOCK_SIZE)
    times = {
        "prefill": wall_ms(lambda: model.forward(prefill, cache)),
        "decode": wall_ms(lambda: model.forward(decode, cache)),
    }
    medians = {name: statistics.median(samples) for name, samples in times.items()}
    return {
        "batch": batch,
        "prefill_ms": medians["prefill"],
        "prefill_tok_s": batch * PROMPT / medians["prefill"] * 1e3,
        "decode_ms_per_step": medians["decode"],
        "decode_tok_s": batch / medians["decode"] * 1e3,
        "samples": times,
    }


def measure(path: Path) -> dict[str, Any]:
    """Everything, as one record."""
    rt = Runtime("cuda")
    cupy = rt._backend.xp
    model = CudaModel(GGUFFile(path), rt)
    return {
        "engine": "rvllm",
        "device": "cuda",
        "variant": "f32",
        "card": rt.name,
        "date": datetime.date.today().isoformat(),
        "versions": {
            "python": platform.python_version(),
            "numpy": np.__version__,
            "cupy": cupy.__version__,
            "cuda_runtime": cupy.cuda.runtime.runtimeGetVersion(),
            "driver_cuda": cupy.cuda.runtime.driverGetVersion(),
        },
        "model": {"name": "SmolLM2-135M-Instruct", "type": "Q4_1 as float32"},
        "prompt_tokens": PROMPT,
        "kernels": kernels(rt),
        "rows": [steps(rt, model, batch) for batch in (1, 4, 8, 32)],
    }


def main() -> None:
    """Measure, print, and keep the record where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    record = measure(arguments.model)
    text = json.dumps(record, indent=1)
    print(text)
    if arguments.json:
        arguments.json.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
