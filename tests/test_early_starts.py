"""Every kernel that waits, started as early as a GPU may start it: clean in all variants, and seeded faults are found.

On the emulator only: it knows what a kernel before may still be writing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rvllm import SamplingParams, fast_model
from rvllm.emulator import EmulatorError
from rvllm.graphs import GraphProgram, launch_checked
from rvllm.runtime import LIVE_SOURCES, Prepared, Runtime, source_text
from rvllm.sampling import SamplingState
from tests.random_shapes import MODELS, Case, Run, Shape

KERNELS = Path(fast_model.__file__).parent / "kernels"
EARLY = {file.stem for file in KERNELS.glob("*.cu") if "wait_for_previous_kernel()" in file.read_text()}
SHAPE = Shape(2, 3, 1, 64, 96, 304, "Q8_0")
GREEDY, WARM = (SamplingState(SamplingParams(temperature=t, seed=5)) for t in (0, 0.8))
DECODE, ALONE = (1, 1, 1), (1, 0, 0)
STEPS = ((20, 3, 0), (1, 1, 0), (1, 1, 9), DECODE)  # a prompt, decode, both, decode


class Chained(GraphProgram):
    """A program all of whose kernels that wait start early, but for the first launch, whatever stands before them."""

    def _launches(self) -> Iterator[tuple[Any, bool]]:
        for i, launch in enumerate(self.program.launches):
            yield launch, i > 0 and isinstance(launch, Prepared) and launch.name in EARLY


@pytest.fixture(scope="module")
def rt() -> Runtime:
    return Runtime("emulator", "check")


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return SHAPE.write(tmp_path_factory.mktemp("early") / "toy.gguf")


def case(variant: str, exact: bool = False, long: bool = False) -> Case:
    """Long contexts are split among blocks."""
    return Case(variant, exact, 12, 40, 4, 67 if long else 4, (700, 5, 30) if long else (1, 5, 30), STEPS, 0)


@pytest.fixture
def make(rt: Runtime, path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Run]:
    """A model whose programs start early wherever they can, and its reference."""
    monkeypatch.setattr(fast_model, "WIDE", 12)  # a prompt step of the graph variant is a wide one

    def make(variant: str, **sizes: Any) -> Run:
        run = Run(rt, path, case(variant, **sizes))
        build = run.model.build

        def chained(shape: Any) -> GraphProgram:
            program = build(shape)
            return Chained(rt, getattr(program, "program", program), True)

        run.model.build = chained
        return run

    return make


def launched(rt: Runtime) -> set[str]:
    assert rt.chain is not None
    return set(rt.chain.names)


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("variant", MODELS)
def test_all_variants_are_clean(rt: Runtime, make: Callable[..., Run], variant: str, reverse: bool) -> None:
    """And right: what attention reads early and the kernel before writes is NaN there."""
    rt.reverse = reverse
    try:
        run = make(variant)
        for counts in STEPS:
            run.compare(counts)
    finally:
        rt.reverse = False


@pytest.mark.parametrize("variant", ["paged_attention", "fused", "graph"])
def test_exact_and_split_attention(rt: Runtime, make: Callable[..., Run], variant: str) -> None:
    run = make(variant, exact=True, long=True)
    for counts in (ALONE, (2, 1, 3), ALONE):
        run.compare(counts)
    assert "attention_merge" in launched(rt)


@pytest.mark.parametrize("variant", ["workspace", "graph"])
def test_kernels_behind_a_step(
    rt: Runtime, make: Callable[..., Run], variant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """sample and redeliver, as if they were a part of the chain."""
    run, started = make(variant), []

    def launch(name: str, *arguments: Any, **more: Any) -> None:
        started.append(name)
        launch_checked(rt.prepare(name, *arguments, **more), rt, name in EARLY)

    monkeypatch.setattr(rt, "launch", launch)
    ids = run.model.start(run.step((3, 1, 0)), [WARM, GREEDY]).token_ids()
    assert started == ["sample", "redeliver"] and (ids >= 0).all()


def test_every_kernel_that_waits_was_tried(rt: Runtime, make: Callable[..., Run]) -> None:
    """Whoever adds such a kernel finds that no variant here runs it."""
    for variant in MODELS:
        run = make(variant)
        for counts in STEPS:
            run.compare(counts)
    assert EARLY - launched(rt) <= {"attention_merge", "sample", "redeliver"}  # see the two tests above


@pytest.fixture
def broken() -> Iterator[Callable[..., None]]:
    """Put a fault into a kernel file: replace one text by another."""
    before = dict(LIVE_SOURCES)

    def replace(filename: str, old: str, new: str) -> None:
        text = source_text(filename)
        assert text.count(old) == 1
        LIVE_SOURCES[filename] = text.replace(old, new)

    yield replace
    LIVE_SOURCES.clear()
    LIVE_SOURCES.update(before)


WAIT = "wait_for_previous_kernel();\n"
LOAD = "    product.load(weights, blockIdx.x * ROW_TILES, ROWS / 16);\n"
CHECK, READ = "    if (token >= counts[0]) return;\n", "    float4 v = load_fresh((const float4*)x + i);\n"
GAIN = "    const float weight = gain[row];\n"
FAULTS = {  # file: a text in it, what stands there instead; kind of the report and what it says
    "gate_up": (f"    {WAIT}", "", "early read", "residual_product comes before"),
    "activations": (f"    {WAIT}{CHECK}{READ}", f"{CHECK}{READ}    {WAIT}", "early read", "`x`"),
    "residual_product": (GAIN, f"{GAIN}    if (x[row] == 0.125f) return;\n", "early read", "`x`"),
    "qkv": (LOAD, f"{LOAD}    if (threadIdx.x + blockIdx.x + blockIdx.y == 0) out[0] = 0;\n", "early write", "`out`"),
    "choose": (f"    {WAIT}", "", "early read", "lm_head comes before"),
    "attention_merge": (f"    {WAIT}", "", "early read", "paged_attention comes before"),
}


@pytest.mark.parametrize("kernel", FAULTS)
def test_faults_in_kernels(make: Callable[..., Run], broken: Callable[..., None], kernel: str) -> None:
    old, new, kind, words = FAULTS[kernel]
    broken(f"{kernel}.cu", old, new)
    run = make("quantised" if kernel == "activations" else "fused", long=kernel == "attention_merge")
    with pytest.raises(EmulatorError, match=words) as caught:
        run.compare(ALONE)
    assert (caught.value.kind, caught.value.kernel) == (kind, kernel) and caught.value.line
    if "`" in words:  # the kernel's own load, though it is a function of memory.cuh
        assert caught.value.file == f"{kernel}.cu"


def test_pages_that_are_just_being_written(make: Callable[..., Run], broken: Any) -> None:
    """Too many pages read early: their cells come as NaN, and so do the logits."""
    broken("paged_attention.cu", "position <= computed[owner] ? num_pages : computed[owner] / PAGE", "num_pages")
    with pytest.raises(AssertionError, match="logits"):
        make("fused").compare((20, 3, 0))


def test_a_graph_model_is_checked_by_itself(rt: Runtime, path: Path, broken: Any) -> None:
    broken("gate_up.cu", f"    {WAIT}", "")
    run = Run(rt, path, case("graph"))
    with pytest.raises(EmulatorError, match="gate_up"):
        run.compare((1, 1, 0))
    fast = Runtime("emulator", "fast")
    Run(fast, path, case("graph")).compare((1, 1, 0))  # launch by launch it is right
