"""Steps of random sizes through every variant, beside NumPy's model: what tests of round numbers do not reach.

A `Shape` is what kernels are compiled for: heads, widths, vocabulary, type of weights. A `Case` is everything else:
limits of the model, blocks, what is in the cache, and how many tokens each sequence has in each step. The cache holds
random halfs where a sequence has been and NaN everywhere else, so contexts of any length cost nothing to make, and
whoever reads a cell that is not his gets NaN.

    python -m tests.random_shapes --shapes 50 --draws 60        many more than CI tries; says what failed
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType as Type
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from rvllm import fast_model
from rvllm.cpu_model import CpuModel
from rvllm.fast_model import FastModel
from rvllm.fused_model import FusedModel
from rvllm.gguf import GGUFFile
from rvllm.half_cache import HalfKVCache
from rvllm.kernels.sizes import SIZES
from rvllm.kv_cache import DeviceKVCache, PagedKVCache
from rvllm.paged_attention_model import PagedAttentionModel
from rvllm.quantised_model import QuantisedModel
from rvllm.runtime import Runtime
from rvllm.step import Step, make_step
from rvllm.step_inputs import Limits
from rvllm.testing import assert_close
from rvllm.workspace_model import WorkspaceModel
from tests.fast_toy import FastShape
from tests.test_fused_model import write

PAGE = 16  # tokens of a block
MODELS: dict[str, tuple[Callable[..., Any], type]] = {
    "workspace": (WorkspaceModel, DeviceKVCache),
    "quantised": (QuantisedModel, DeviceKVCache),
    "paged_attention": (PagedAttentionModel, HalfKVCache),
    "fused": (FusedModel, HalfKVCache),
    "graph": (FastModel, HalfKVCache),
}
# Of the largest logit: float32 sums in another order; activations as halfs. What rounded keys do comes on top.
TOLERANCE = {"workspace": 3e-5, "quantised": 3e-5, "paged_attention": 1e-4, "fused": 1e-2, "graph": 1e-2}
HEAVY = 4  # times that for Q4_K, whose random bytes make weights of very different sizes
TYPES = ("Q8_0", "Q4_0", "Q4_1", "F16", "Q4_K")
BLOCKS = (1, 2, 3, 4, 5, 33, 40, 67)  # of a context: short ones, and some from where attention is split on
WIDES = (3, fast_model.WIDE)  # from how many tokens on a step is a wide one: small steps are tried both ways


@dataclass(frozen=True)
class Shape:
    """A model: FastShape's sizes, vocabulary, type of its matrices."""

    layers: int
    H: int
    K: int
    d: int
    F: int
    vocab: int
    type: str

    def write(self, path: Path) -> Path:
        """A model file with random weights."""
        sizes = FastShape(self.layers, self.H, self.K, self.d, self.F, max(BLOCKS) * PAGE)
        return write(path, sizes, Type[self.type], vocab=self.vocab)


@dataclass(frozen=True)
class Case:
    """What a model is made for, and the steps it then gets.

    cached: tokens of each sequence in the cache at first.   steps: new tokens of each sequence, 0 for none.
    """

    variant: str
    exact: bool
    wide: int
    max_num_tokens: int
    max_num_seqs: int
    max_blocks: int
    cached: tuple[int, ...]
    steps: tuple[tuple[int, ...], ...]
    seed: int

    @staticmethod
    def of(values: dict[str, Any]) -> Case:
        """From a JSON object."""
        lists = {"cached": tuple(values["cached"]), "steps": tuple(map(tuple, values["steps"]))}
        return Case(**(values | lists))


def size_of(name: str, least: int, most: int) -> st.SearchStrategy[int]:
    """From least to most; half of them at an end or with a remainder that some kernel depends on."""
    anything, telling = st.integers(least, most), SIZES[name].values(least, most)
    return st.one_of(st.sampled_from(telling), anything) if telling else anything


@st.composite
def shapes(draw: st.DrawFn) -> Shape:
    """Heads of 64 or 128, up to 8 for a KV head; widths in multiples of what the type packs; any vocabulary."""
    d, type_ = draw(st.sampled_from([64, 64, 128])), draw(st.sampled_from(TYPES))
    unit, most = (256, 768) if type_ == "Q4_K" else (32, 384)
    heads = [
        (G * K, K)
        for K in range(1, 7)
        for G in range(1, 9)
        if G * K * d <= max(most, 8 * d) and G * K * d % unit == 0 and (K == 1 or G * K * d <= most)
    ]
    shared = [(H, K) for H, K in heads if H > K > 1]
    H, K = draw(st.one_of(st.sampled_from(shared), st.sampled_from(heads)) if shared else st.sampled_from(heads))
    widths = st.one_of(*(size_of(name, 1, most // unit) for name in ("ffn", "k_blocks")))
    return Shape(1, H, K, d, unit * draw(widths), draw(size_of("vocab", 260, 500)), type_)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Limits between round numbers; contexts from none to several parts of attention; one to three steps."""
    variant = draw(st.sampled_from(list(MODELS)))
    blocks = draw(st.sampled_from(BLOCKS))
    most = 100 if blocks < 33 else 6
    if variant in ("workspace", "quantised"):  # they gather whole contexts for each token
        blocks, most = min(blocks, 5), 20
    seqs = draw(st.one_of(st.integers(1, min(most, 8)), size_of("rows", 1, most)))
    tokens = draw(size_of("tokens", seqs, seqs + most))
    present = draw(st.one_of(st.just(seqs), size_of("rows", 1, seqs)))
    room = blocks * PAGE
    length = st.one_of(st.just(room - 1), size_of("context", 0, room - 1))
    cached = draw(st.lists(length, min_size=present, max_size=present))
    done, steps = list(cached), []
    for _ in range(draw(st.integers(1, 2))):
        counts = draw(counts_of_step(done, room, tokens))
        done = [a + b for a, b in zip(done, counts, strict=True)]
        steps.append(tuple(counts))
    exact = draw(st.booleans())
    return Case(variant, exact, draw(st.sampled_from(WIDES)), tokens, seqs, blocks, tuple(cached), tuple(steps), 0)


@st.composite
def counts_of_step(draw: st.DrawFn, done: list[int], room: int, budget: int) -> list[int]:
    """New tokens of each sequence: mostly one, sometimes none or a chunk, at least one in all where there is room."""
    chunk = st.one_of(st.just(1), st.just(1), st.just(1), st.integers(0, 1), size_of("chunk", 2, 70))
    counts = []
    for length in done:
        counts.append(min(draw(chunk), room - length, budget - sum(counts)))
    return counts


class RoundedCache(PagedKVCache):
    """Keys and values as halfs hold them."""

    def write(self, layer: int, k: np.ndarray, v: np.ndarray, step: Step) -> None:
        super().write(layer, *(a.astype(np.float16).astype(np.float32) for a in (k, v)), step)


class Run:
    """A model and its reference over caches that hold the same."""

    def __init__(self, rt: Runtime, path: Path, case: Case) -> None:
        make_model, kind = MODELS[case.variant]
        file, rng = GGUFFile(path), np.random.default_rng(case.seed)
        self.case, self.rt, self.cpu = case, rt, CpuModel(file)
        config, blocks = self.cpu.config, len(case.cached) * case.max_blocks
        heavy = file.tensors["token_embd.weight"].type_name == "Q4_K"
        self.tolerance = TOLERANCE[case.variant] * (HEAVY if heavy else 1)
        self.cache = kind(rt, config, blocks + 1, PAGE)
        self.host, self.rounded = (make(config, blocks + 1, PAGE) for make in (PagedKVCache, RoundedCache))
        self.tables = (rng.permutation(blocks) + 1).reshape(-1, case.max_blocks).tolist()
        self._fill(rng)
        limits = Limits(case.max_num_tokens, case.max_num_seqs, case.max_blocks)
        self.model = make_model(file, rt, self.cache, limits, case.exact)
        self.ids = rng.integers(0, config.vocab_size, (len(case.cached), case.max_blocks * PAGE))
        self.done = list(case.cached)

    def _fill(self, rng: np.random.Generator) -> None:
        """Random halfs in the cells that sequences have been in, NaN elsewhere; on host and device alike."""
        host = self.host
        host.keys[:], host.values[:] = np.nan, np.nan
        for table, length in zip(self.tables, self.case.cached, strict=True):
            slots = np.array([table[i // PAGE] * PAGE + i % PAGE for i in range(length)], np.int64)
            for storage in (host.keys, host.values):
                flat = storage.reshape(len(storage), -1, *storage.shape[3:])
                flat[:, slots] = rng.standard_normal((len(storage), length, *storage.shape[3:])).astype(np.float16)
        self.rounded.keys[:], self.rounded.values[:] = host.keys, host.values
        for layer, (keys, values) in enumerate(zip(host.keys, host.values, strict=True)):
            if isinstance(self.cache, HalfKVCache):
                by_head = keys.swapaxes(1, 2), values.transpose(0, 2, 3, 1)
                pages = np.stack([part.reshape(len(keys), keys.shape[2], -1) for part in by_head], axis=1)
                self.cache.pages[layer] = self.rt.upload(pages.astype(np.float16))
            else:
                self.cache.keys[layer], self.cache.values[layer] = self.rt.upload(keys), self.rt.upload(values)

    def step(self, counts: tuple[int, ...]) -> Step:
        """The step that feeds so many more tokens to each sequence."""
        who = [i for i, count in enumerate(counts) if count]
        new = [self.ids[i, self.done[i] : self.done[i] + counts[i]].tolist() for i in who]
        step = make_step(new, [self.done[i] for i in who], [self.tables[i] for i in who], PAGE)
        for i in who:
            self.done[i] += counts[i]
        return step

    def compare(self, counts: tuple[int, ...]) -> None:
        """Logits of the step, and the token that the device chooses."""
        step = self.step(counts)
        got, expected = self.model.forward(step), self.cpu.forward(step, self.host)
        tolerance = self.tolerance * np.abs(expected).max()
        if isinstance(self.cache, HalfKVCache):
            # Where a score is large, a rounded key moves much, in NumPy's model too.
            tolerance += 2 * np.abs(self.cpu.forward(step, self.rounded) - expected).max()
        assert_close(got, expected, atol=tolerance, name=f"logits of {counts}")
        chosen = self.rt.download(self.model.chosen)[: len(got)]
        assert chosen.tolist() == got.argmax(axis=1).tolist(), "not the likeliest tokens"


@contextmanager
def wide_from(tokens: int) -> Iterator[None]:
    """Steps of more tokens than that are wide ones."""
    before, fast_model.WIDE = fast_model.WIDE, tokens
    try:
        yield
    finally:
        fast_model.WIDE = before


def check(rt: Runtime, path: Path, case: Case) -> None:
    """AssertionError or EmulatorError unless every step comes out as NumPy's model has it."""
    with wide_from(case.wide):
        run = Run(rt, path, case)
        for counts in case.steps:
            if any(counts):
                run.compare(counts)


def main() -> None:
    """Draw shapes, and cases for each; print and count what fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", type=int, default=50)
    parser.add_argument("--draws", type=int, default=60, help="cases of each shape")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--shrink", action="store_true", help="look for the smallest case that fails: minutes each")
    parser.add_argument("--report", type=Path, help="write what was drawn and what failed as JSON, shape by shape")
    options = parser.parse_args()
    rt, tried, failed = Runtime("emulator", "check"), Counter[str](), list[dict[str, Any]]()
    start = time.perf_counter()
    for count in range(1, options.shapes + 1):
        number = options.seed + count - 1
        shape = drawn_shape(number)
        with tempfile.TemporaryDirectory() as folder:
            path = shape.write(Path(folder) / "toy.gguf")
            failed += try_shape(rt, shape, path, options.draws, number, tried, options.shrink)
        print(f"{count} shapes, {tried.total()} draws, {len(failed)} failed, {time.perf_counter() - start:.0f} s")
        if options.report:
            report = {"seed": options.seed, "shapes": count, "draws": dict(tried), "failed": failed}
            options.report.write_text(json.dumps(report) + "\n")


def drawn_shape(number: int) -> Shape:
    """The shape of this number, always the same."""
    found = []

    @seed(number)
    @settings(max_examples=2, database=None, phases=[Phase.generate])  # the first is always the simplest one
    @given(shapes())
    def draw(shape: Shape) -> None:
        found.append(shape)

    draw()
    return found[-1]


def try_shape(
    rt: Runtime, shape: Shape, path: Path, draws: int, number: int, tried: Counter[str], shrink: bool
) -> list[dict[str, Any]]:
    """The case that fails, if one does; the first one, or the smallest that can be found."""
    last: list[Case] = []
    phases = [Phase.generate, Phase.shrink] if shrink else [Phase.generate]

    @seed(number)
    @settings(max_examples=draws, database=None, deadline=None, phases=phases, suppress_health_check=list(HealthCheck))
    @given(cases())
    def attempt(case: Case) -> None:
        last[:] = [case]
        tried[case.variant] += 1
        check(rt, path, case)

    try:
        attempt()
    except Exception as error:  # whatever a kernel does wrong
        print(f"FAILED {shape}\n       {last[0]}\n       {error}")
        return [{"shape": asdict(shape), "case": asdict(last[0]), "error": str(error)[:300]}]
    return []


if __name__ == "__main__":
    main()
