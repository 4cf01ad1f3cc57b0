"""Counters of a decode step, by NVIDIA's ncu: python tools/profile_ncu.py --model 360M --json FILE

Runs itself under ncu, once for each batch size: a warm-up, then one profiled step of notebook 14's kind (160 tokens in
the cache of each sequence). Kernel times are with ncu's held clocks, caches flushed between kernels.
"""

from __future__ import annotations

import argparse
import csv
import io
import json
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np

from rvllm.bench import about, subject_of, write_record
from rvllm.block_pool import BlockPool, grow_table
from rvllm.cuda_model import CudaModel
from rvllm.gguf import GGUFFile
from rvllm.kv_cache import DeviceKVCache
from rvllm.random_weights import random_weights
from rvllm.runtime import Runtime
from rvllm.step import make_step

CONTEXT, BLOCK_SIZE = 160, 16
METRICS = {
    "gpu__time_duration.sum": "device_ns",
    "dram__bytes_read.sum": "dram_read_bytes",
    "dram__bytes_write.sum": "dram_write_bytes",
}


def profiled_step(model_path: Path, batch: int) -> None:
    """Run in the child: everything but the last step is outside the profiler's range."""
    import cupy

    rt = Runtime("cuda")
    model = CudaModel(GGUFFile(model_path), rt)
    pool, tables = BlockPool(batch * CONTEXT // BLOCK_SIZE, BLOCK_SIZE), [[] for _ in range(batch)]
    for table in tables:
        grow_table(pool, table, CONTEXT)
    cache = DeviceKVCache(rt, model.config, pool.num_blocks, BLOCK_SIZE)
    noise = np.random.default_rng(0).standard_normal(cache.keys[0].shape, dtype=np.float32)
    for layer in range(model.config.num_hidden_layers):
        cache.keys[layer], cache.values[layer] = rt.upload(noise), rt.upload(noise)
    step = make_step([[5]] * batch, [CONTEXT - 1] * batch, tables, BLOCK_SIZE)
    model.forward(step, cache)
    cupy.cuda.runtime.profilerStart()
    model.forward(step, cache)
    cupy.cuda.runtime.profilerStop()


def counters(model_path: Path, batch: int) -> dict[str, Any]:
    """Kernels of one step, summed by name: count, microseconds, bytes from and to memory."""
    child = [sys.executable, __file__, "--child", str(model_path), "--batch", str(batch)]
    ncu = ["ncu", "--csv", "--page", "raw", "--print-units", "base", "--profile-from-start", "off"]
    done = subprocess.run([*ncu, "--metrics", ",".join(METRICS), *child], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"ncu ended with status {done.returncode}: {done.stdout[-2000:]} {done.stderr[-2000:]}")
    return {"batch": batch, "context": CONTEXT, "kernels": summed(done.stdout)}


def summed(output: str) -> list[dict[str, Any]]:
    """ncu's table, one line a kernel, as one entry for each name; the longest in all first."""
    lines = output.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith('"ID"'))
    sums: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for row in csv.DictReader(io.StringIO("\n".join(lines[start:]))):
        if not row["ID"]:  # the line of units
            continue
        own = sums[row["Kernel Name"].split("(")[0].split("<")[0].removeprefix("void ")]
        own["count"] += 1
        for metric, key in METRICS.items():
            own[key] += float(row[metric].replace(",", ""))
    entries = [{"name": name, **values} for name, values in sums.items()]
    for entry in entries:
        entry["device_us"] = entry.pop("device_ns") / 1e3
    return sorted(entries, key=lambda entry: -entry["device_us"])


def main() -> None:
    """Profile both batch sizes and write the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="360M", help="of random weights: 360M, 135M or tiny")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--batch", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        profiled_step(arguments.child, arguments.batch)
        return
    path, title = random_weights(arguments.model)
    version = subprocess.run(["ncu", "--version"], capture_output=True, text=True, check=True).stdout.split()[-2:]
    record = about(subject_of(path, title), "cuda") | {"ncu": " ".join(version)}
    record["profiles"] = [counters(path, batch) for batch in (1, 32)]
    print(json.dumps(record, indent=1))
    if arguments.json:
        write_record(record, arguments.json)


if __name__ == "__main__":
    main()
