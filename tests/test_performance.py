"""What parts I and III promise: counted where work is the promise, and read from the recorded runs where time is."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from rvllm import plots
from rvllm.cpu_model import CpuModel, DenseKVCache
from rvllm.gguf import GGUFFile
from rvllm.step import make_step
from rvllm.tokenizer import Tokenizer
from tools import bench_part1, bench_part3


@pytest.fixture(scope="module")
def model(model_path: Path) -> CpuModel:
    return CpuModel(GGUFFile(model_path))


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> list[np.ndarray]:
    """The matrices that the model multiplies with, in order."""
    matrices: list[np.ndarray] = []

    def counting(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
        matrices.append(weight)
        return x @ weight.T

    monkeypatch.setattr("rvllm.cpu_model.linear", counting)
    return matrices


@pytest.mark.real_model
@pytest.mark.parametrize("tokens", [1, 128], ids=["a decode step", "a prompt of 128 tokens"])
def test_a_step_is_one_pass_over_the_weights(model: CpuModel, products: list[np.ndarray], tokens: int) -> None:
    """One product with each matrix, whatever the number of tokens; it reads every weight once, and nothing else."""
    cache = DenseKVCache(model.config, 1, 128)
    model.forward(make_step([list(range(100, 100 + tokens))], [0], [[0]], cache.block_size), cache)
    assert len(products) == 4 * model.config.num_hidden_layers + 1
    norms = (2 * model.config.num_hidden_layers + 1) * model.config.hidden_size
    file_bytes = plots.load("part1_cpu.json")["bytes_per_step"]
    assert sum(matrix.nbytes for matrix in products) == file_bytes - 4 * norms


@pytest.mark.real_model
def test_memory_from_file_to_first_token(model_path: Path) -> None:
    _, peak = bench_part1.first_token()
    weights = 4 * sum(int(np.prod(t.shape)) for t in GGUFFile(model_path).tensors.values())
    print(f"peak anonymous memory {peak / 1e6:.0f} MB")
    assert peak <= 1.3 * weights + 100e6


def calls_of(work: Callable[[], object]) -> int:
    """How many functions it calls, Python's and C's."""
    count = 0

    def watch(_frame: object, event: str, _argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(watch)
    try:
        work()
    finally:
        sys.setprofile(None)
    return count


@pytest.mark.real_model
def test_the_hosts_work_grows_with_the_number_of_sequences(model_path: Path) -> None:
    """16 times the sequences are at most 16 times the work, and for each of them it is no more than some calls."""
    tokenizer = Tokenizer(GGUFFile(model_path).metadata)
    few, many = (calls_of(bench_part3.decoding(tokenizer, count).step) for count in (16, 256))
    print(f"function calls of a step: {few} for 16 sequences, {many} for 256")
    assert many <= 16 * few
    assert many <= 100 * 256


def test_recorded_times_of_part_one() -> None:
    """Taken on a quiet machine by tools/bench_part1.py; what is compared was measured in turns."""
    record = plots.load("part1_cpu.json")
    assert record["decode_ratio"] <= 1.3, "a decode step costs little more than its matrices"
    assert record["open_ms"] < 500
    assert record["first_token_s"] < 4
    for kind, ms in record["dequantize_ms"].items():  # F32 is a view and F16 one conversion, in both
        assert ms["rvllm"] <= (1.25 if kind in ("F32", "F16") else 1) * ms["gguf"], kind


def test_recorded_times_of_the_host() -> None:
    """By tools/bench_part3.py: what the engine itself takes in a step."""
    rows = {row["num_seqs"]: row for row in plots.load("part3_cpu.json")["host_step"]}
    assert rows[256]["schedule_ms"] < 1 and rows[256]["host_ms"] < 2
    assert rows[256]["host_ms"] < 32 * rows[16]["host_ms"]
