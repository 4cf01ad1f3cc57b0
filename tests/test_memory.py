"""What a model takes in memory: the sum that is worked out beforehand, and what is really there."""

from __future__ import annotations

import gc
import tracemalloc
import warnings
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type
from hypothesis import given, settings
from hypothesis import strategies as st

from rvllm import LLM, SamplingParams, memory
from rvllm.cli import main
from rvllm.config import LlamaConfig
from rvllm.cpu_model import expected_shapes, read_config
from rvllm.engine import PromptError
from rvllm.gguf import GGUFFile
from rvllm.memory import MemoryBudgetError, Plan, Wish, plan_memory
from rvllm.sampling import ParameterError
from rvllm.step import make_step
from rvllm.variants import NAMES, Sizes, make_runner
from tests import toy
from tests.fast_toy import FastShape, write_fast_toy

GB = 10**9
T4, H200, LAPTOP = 15 * GB, 141 * GB, 8 * GB
CONFIGS = {
    "135M": LlamaConfig(576, 1536, 30, 9, 3, 64, 49152, 8192, 1e-5, 1e4),
    "360M": LlamaConfig(960, 2560, 32, 15, 5, 64, 49152, 8192, 1e-5, 1e4),
    "1B": LlamaConfig(2048, 8192, 16, 32, 8, 64, 128256, 131072, 1e-5, 5e5),
    "3B": LlamaConfig(3072, 8192, 28, 24, 8, 128, 128256, 131072, 1e-5, 5e5),
    "8B": LlamaConfig(4096, 14336, 32, 32, 8, 128, 128256, 131072, 1e-5, 5e5),
}


def wish_of(name: str, variant: str, device: str, type_: Type = Type.Q4_1, **limits: Any) -> Wish:
    """A model of this shape, of which nothing but shapes exists; 8B has an output matrix of its own."""
    config = CONFIGS[name]
    shapes = expected_shapes(config) | (
        {"output.weight": (config.vocab_size, config.hidden_size)} if name == "8B" else {}
    )
    tensors = {n: SimpleNamespace(shape=s, type=type_ if len(s) == 2 else Type.F32) for n, s in shapes.items()}
    return Wish(variant, device, config, tensors, **limits)


# The sum and the arrays -----------------------------------------------------------------------------------------------


def held() -> int:
    """Bytes of all NumPy arrays made since tracing began."""
    gc.collect()
    arrays = tracemalloc.DomainFilter(True, np.lib.tracemalloc_domain)
    return sum(trace.size for trace in tracemalloc.take_snapshot().filter_traces([arrays]).traces)


def built(path: Path, variant: str, exact: bool = False, **limits: Any) -> tuple[Plan, Any, int]:
    """The plan, the model made by it, and the bytes of its arrays."""
    file, device = GGUFFile(path), "cpu" if variant == "numpy" else "emulator"
    plan = plan_memory(Wish(variant, device, read_config(file), file.tensors, exact, multiprocessors=2, **limits), H200)
    tracemalloc.start()
    try:
        before = held()
        sizes = Sizes(plan.wish.block_size, plan.num_blocks, plan.limits)
        runner = make_runner(variant, device, file, sizes, exact)
        return plan, runner, held() - before
    finally:
        tracemalloc.stop()


TOYS = {
    "tied": (FastShape(), Type.Q8_0, 304),
    "odd vocabulary": (FastShape(3, 4, 2, 64, 256), Type.Q4_1, 301),
    "wide heads": (FastShape(2, 4, 1, 128, 512), Type.Q4_0, 512),
    "halfs": (FastShape(1, 2, 2, 64, 96), Type.F16, 304),
    "Q4_K": (FastShape(1, 4, 2, 64, 256), Type.Q4_K, 304),
}


def toy_file(folder: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    shape, type_, vocab = TOYS[name]
    if type_ is Type.Q4_K:  # the package cannot write it: any bytes will do
        monkeypatch.setattr("gguf.quants.quantize", random_q4_k)
    return write_fast_toy(folder / "toy.gguf", shape, type_, vocab=vocab)


def random_q4_k(data: np.ndarray, _type: Type) -> np.ndarray:
    return np.zeros((len(data), data.shape[1] // 256 * 144), np.uint8)


@pytest.mark.parametrize("name", TOYS)
@pytest.mark.parametrize(("variant", "exact"), [*((name, False) for name in NAMES[1:]), ("graph", True)])
def test_a_plan_is_what_fixed_arrays_take(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variant: str, name: str, exact: bool
) -> None:
    """To the byte, but for some scalars."""
    path = toy_file(tmp_path, name, monkeypatch)
    plan, _, bytes_held = built(
        path, variant, exact, num_blocks=40, max_num_seqs=70, max_num_batched_tokens=130 + 30 * exact
    )
    assert abs(bytes_held - plan.total) <= 64


@pytest.mark.parametrize("name", TOYS)
@pytest.mark.parametrize("variant", ["numpy", "f32"])
def test_a_plan_is_what_plain_models_take(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variant: str, name: str
) -> None:
    """Weights and cache within 1%. What a step makes as it goes is planned for, and not more than twice of it."""
    path = toy_file(tmp_path, name, monkeypatch)
    limits = {"num_blocks": 17, "max_num_seqs": 4, "max_num_batched_tokens": 200}
    plan, runner, bytes_held = built(path, variant, **limits)
    assert bytes_held == pytest.approx(plan.weights + plan.cache, rel=0.01)
    table = list(range(16))
    runner.model.forward(make_step([[5] * 56], [0], [table], 16), runner.cache)
    step = make_step([[5] * 200], [56], [table], 16)
    runner.model.forward(step, runner.cache)
    tracemalloc.start()
    try:
        runner.model.forward(step, runner.cache)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak <= plan.workspace <= 2 * peak


def test_an_output_matrix_of_its_own_counts(tmp_path: Path) -> None:
    """On the CPU the embedding then stays in the file; on a device both are there."""
    tensors = toy.weights() | {"output.weight": np.ones((300, toy.D), np.float32)}
    path = toy.write(tmp_path / "untied.gguf", tensors=tensors)
    for variant in ("numpy", "f32"):
        plan, _, bytes_held = built(path, variant, num_blocks=8)
        assert bytes_held == pytest.approx(plan.weights + plan.cache, rel=0.01)


# Machines -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "variant", "free", "context"),
    [
        *((name, variant, T4, 8192) for name in ("135M", "360M") for variant in ("graph", "fused", "f32")),
        *((name, "graph", H200, CONFIGS[name].max_position_embeddings) for name in CONFIGS),
        ("1B", "graph", T4, 131072),
        ("3B", "graph", T4, range(32_000, 50_000)),
        ("3B", "fused", T4, range(90_000, 110_000)),
        ("3B", "f32", T4, range(128, 5000)),
        ("8B", "fused", T4, range(50_000, 70_000)),
    ],
)
def test_cards(name: str, variant: str, free: int, context: int | range) -> None:
    plan = plan_memory(wish_of(name, variant, "cuda"), free)
    check(plan, free)
    assert plan.max_model_len == context if isinstance(context, int) else plan.max_model_len in context


def check(plan: Plan, free: int) -> None:
    """It fits with a tenth to spare; nine tenths of the room are used where that would lengthen the context."""
    assert plan.num_blocks * plan.wish.block_size >= plan.max_model_len >= 128
    assert plan.total <= 0.9 * free
    limits = plan.limits
    assert limits.max_blocks * plan.wish.block_size >= plan.max_model_len
    if plan.max_model_len < plan.wish.context:
        more = replace(plan.wish, max_model_len=plan.max_model_len + plan.wish.block_size)
        assert memory._best(more, int(0.9 * free))[0].total > 0.9 * free
        assert plan.remark.count("max_model_len is lowered") == 1
    else:
        assert plan.remark == ""


@pytest.mark.parametrize(("name", "context"), [("135M", 8192), ("360M", 8192), ("1B", range(8000, 40_000))])
def test_a_laptop(name: str, context: int | range) -> None:
    plan = plan_memory(wish_of(name, "numpy", "cpu"), LAPTOP)
    check(plan, LAPTOP)
    assert plan.max_model_len == context if isinstance(context, int) else plan.max_model_len in context


@pytest.mark.parametrize("variant", ["numpy", *NAMES])
@pytest.mark.parametrize("name", CONFIGS)
def test_where_nobody_says_what_is_free(monkeypatch: pytest.MonkeyPatch, name: str, variant: str) -> None:
    """No error, a cache for a useful context; what is given is taken at its word."""
    device = "cpu" if variant == "numpy" else "emulator"
    monkeypatch.setattr(memory, "free_memory", lambda _device: 0)
    plan = plan_memory(wish_of(name, variant, device))
    assert plan.max_model_len >= 2048 and plan.num_blocks * 16 >= plan.max_model_len
    assert "free: unknown" in str(plan)
    given = plan_memory(wish_of(name, variant, device, num_blocks=10**7, max_model_len=8192))
    assert (given.num_blocks, given.max_model_len) == (10**7, 8192)


@pytest.mark.parametrize("name", ["3B", "8B"])
def test_a_model_that_does_not_fit_says_the_sum_and_what_helps(name: str) -> None:
    with pytest.raises(MemoryBudgetError, match="not even for a context of 128 tokens: weights") as caught:
        plan_memory(wish_of(name, "numpy", "cpu"), LAPTOP)
    for word in ("workspace", "cache", "free: 8,000 MB", "What helps:", "a smaller model"):
        assert word in str(caught.value)


def test_the_second_copy_of_the_weights_is_named() -> None:
    with pytest.raises(MemoryBudgetError, match="variant='fused'"):
        plan_memory(wish_of("8B", "graph", "cuda"), T4)
    assert plan_memory(wish_of("8B", "graph", "cuda", exact=True), T4).max_model_len > 10_000


@settings(max_examples=150, deadline=None)
@given(
    st.sampled_from(list(CONFIGS)),
    st.sampled_from(["numpy", *NAMES]),
    st.integers(1, 300 * GB),
    st.sampled_from([1, 3, 16, 500, 100_000]),
    st.integers(1, 500),
    st.integers(1, 5000),
)
def test_any_machine(name: str, variant: str, free: int, block: int, seqs: int, tokens: int) -> None:
    """A plan that fits, or the named error; and advice in it that holds."""
    device = "cpu" if variant == "numpy" else "cuda"
    block = 16 if variant in memory.HALF_CACHE else block
    wish = wish_of(name, variant, device, block_size=block, max_num_seqs=seqs, max_num_batched_tokens=tokens)
    try:
        plan = plan_memory(wish, free)
    except MemoryBudgetError:
        assert memory._best(wish, free)[0].max_model_len <= max(128, block) + block
        return
    assert plan.total <= 0.9 * free and plan.num_blocks * block >= plan.max_model_len >= min(128, block)
    assert plan.num_blocks * block < memory.MAX_SLOTS
    assert 1 <= plan.limits.max_num_seqs <= seqs and 1 <= plan.limits.max_num_tokens <= tokens


# What is given --------------------------------------------------------------------------------------------------------


def test_a_given_context_is_kept_or_refused() -> None:
    assert plan_memory(wish_of("3B", "graph", "cuda", max_model_len=40_000), T4).max_model_len == 40_000
    with pytest.raises(MemoryBudgetError, match="max_model_len 100,000 does not fit") as caught:
        plan_memory(wish_of("3B", "graph", "cuda", max_model_len=100_000), T4)
    advised = int(str(caught.value).split("max_model_len=")[1].split(",")[0])
    assert plan_memory(wish_of("3B", "graph", "cuda", max_model_len=advised), T4).remark == ""


def test_given_blocks_are_kept_or_refused() -> None:
    plan = plan_memory(wish_of("3B", "graph", "cuda", num_blocks=100), T4)
    assert (plan.num_blocks, plan.max_model_len, plan.remark) == (100, 1600, "")
    with pytest.raises(MemoryBudgetError, match="num_blocks 100,000 does not fit") as caught:
        plan_memory(wish_of("3B", "graph", "cuda", num_blocks=100_000), T4)
    advised = int(str(caught.value).split("num_blocks=")[1].split(",")[0])
    assert plan_memory(wish_of("3B", "graph", "cuda", num_blocks=advised), T4).num_blocks == advised


def test_limits_are_checked_where_they_are_asked_for() -> None:
    for name, value in (("max_model_len", 1), ("max_model_len", 10**6), ("max_num_seqs", 0), ("block_size", 2.5)):
        with pytest.raises(ParameterError, match=name):
            wish_of("3B", "graph", "cuda", **{name: value})


# LLM ------------------------------------------------------------------------------------------------------------------


def long_toy(folder: Path, context: int) -> Path:
    return toy.write(folder / f"{context}.gguf", toy.metadata(llama__context_length=context))


@pytest.mark.parametrize("device", ["cpu", "emulator"])
@pytest.mark.parametrize("context", [2**20, 2**26, 2**27, 2**28, 2**31, 2**32 - 1])
def test_c92_a_context_of_millions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, context: int, device: str) -> None:
    """It loads and runs; where the context had to be lowered, one warning says so."""
    monkeypatch.setattr(memory, "free_memory", lambda _device: LAPTOP)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        llm = LLM(long_toy(tmp_path, context), device=device)
    said = [str(warning.message) for warning in caught]
    with llm:
        pool = llm.engine.scheduler.pool
        assert pool.num_blocks * 16 * 512 <= LAPTOP and 10**6 <= llm.max_model_len <= pool.num_blocks * 16
        assert len(said) == (context > llm.max_model_len)
        assert all(f"lowered from {min(context, 2**31 - 16):,} to {llm.max_model_len:,}" in text for text in said)
        assert len(llm.generate([5, 6], SamplingParams(max_tokens=2, ignore_eos=True))[0].outputs[0].token_ids) == 2


@pytest.mark.parametrize("device", ["cpu", "emulator"])
def test_c92_what_is_given_beside_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    monkeypatch.setattr(memory, "free_memory", lambda _device: LAPTOP)
    path = long_toy(tmp_path, 2**27)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with LLM(path, device=device, max_model_len=4096) as llm:
            assert llm.max_model_len == 4096
        with LLM(path, device=device, num_blocks=np.int32(100)) as llm:
            assert llm.max_model_len == 1600
    for options in ({"max_model_len": 2**27}, {"num_blocks": 2**26}, {"num_blocks": 2**23, "max_model_len": 64}):
        with pytest.raises(MemoryBudgetError, match=r"does not fit.*weights.*workspace.*cache"):
            LLM(path, device=device, **options)  # type: ignore[arg-type]


def test_c92_a_step_model_makes_its_tables_for_the_context_that_fits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The table of RoPE of 2**27 positions alone would take 34 GB."""
    monkeypatch.setattr(memory, "free_memory", lambda _device: 40_000_000)
    path = toy.write(tmp_path / "long.gguf", toy.metadata(llama__context_length=2**27))
    limits: dict[str, Any] = {"max_num_seqs": 4, "max_num_batched_tokens": 64}
    with pytest.warns(UserWarning, match="max_model_len is lowered"):
        llm = LLM(path, "emulator", "workspace", **limits)
    with llm, LLM(path, "cpu", max_model_len=1000) as cpu:
        positions = len(llm.engine.model.rope) - 1  # type: ignore[attr-defined]
        assert 128 <= llm.max_model_len <= positions < llm.max_model_len + 16
        params = SamplingParams(max_tokens=3, ignore_eos=True)
        assert llm.generate([5, 6], params)[0].outputs == cpu.generate([5, 6], params)[0].outputs


def test_a_prompt_longer_than_what_was_lowered_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "free_memory", lambda _device: 30_000_000)
    with pytest.warns(UserWarning, match="lowered"):
        llm = LLM(long_toy(tmp_path, 2**20), "cpu", max_num_seqs=2)
    with llm, pytest.raises(PromptError, match=f"allowed: at most {llm.max_model_len - 1}"):
        llm.generate([5] * llm.max_model_len)


def test_a_system_that_gives_less_than_it_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_room(*_: Any) -> Any:
        raise MemoryError

    monkeypatch.setattr("rvllm.llm.make_runner", no_room)
    with pytest.raises(MemoryBudgetError, match=r"no room on cpu .*weights.*workspace.*cache"):
        LLM(long_toy(tmp_path, 256), "cpu")


# rvllm info -----------------------------------------------------------------------------------------------------------


def info(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main(["info", *arguments])
    out, err = capsys.readouterr()
    return code, out, err


def test_info_prints_the_sum(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(write_fast_toy(tmp_path / "toy.gguf"))
    assert "weights " not in info(capsys, path)[1]
    code, out, _ = info(capsys, path, "--device", "cuda", "--memory", "15GB")
    file = GGUFFile(Path(path))
    plan = plan_memory(Wish("graph", "cuda", read_config(file), file.tensors), T4)
    assert code == 0 and "memory on cuda, variant graph; free: 15.0 GB" in out
    assert f"{plan.num_blocks:,} blocks of 16 tokens" in out and "max_model_len 256" in out
    assert [line.split()[0] for line in out.splitlines()[-4:]] == ["weights", "workspace", "cache", "all"]


def test_info_says_what_is_lowered_and_what_does_not_fit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(long_toy(tmp_path, 2**27))
    code, out, _ = info(capsys, path, "--device", "cpu", "--memory", "1e9", "--max-num-seqs", "4")
    assert code == 0 and out.count("max_model_len is lowered from 134,217,728 to") == 1
    code, _, err = info(capsys, path, "--device", "cpu", "--memory", "100kB")
    assert code == 2 and "not even for a context of 128 tokens" in err


@pytest.mark.parametrize(
    ("text", "size"),
    [("15GB", T4), ("16 GiB", 2**34), ("8e9", LAPTOP), ("1.5M", 1_500_000), ("7", 7), ("2tb", 2 * 10**12)],
)
def test_sizes_are_read(tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, size: int) -> None:
    code, out, err = info(capsys, str(long_toy(tmp_path, 256)), "--device", "cpu", "--memory", text)
    assert f"free: {memory.megabytes(size)}" in out + err and code == (0 if size > GB else 2)


@pytest.mark.parametrize("text", ["", "x", "-1", "0", "1e99", "5 apples", "1.2.3", "nan"])
def test_other_sizes_are_refused(capsys: pytest.CaptureFixture[str], text: str) -> None:
    assert main(["info", "toy", "--memory", text]) == 2
    assert "allowed: a size such as 15GB" in capsys.readouterr().err
