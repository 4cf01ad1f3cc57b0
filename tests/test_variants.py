"""The variants on the way to the fused model, each beside NumPy's model; and all of them, the same greedy tokens.

On the emulator in check mode by default, on a GPU with RVLLM_TEST_DEVICE=cuda. Vocabulary 300, heads of 64.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type

from rvllm.config import LlamaConfig
from rvllm.cpu_model import CpuModel
from rvllm.fused_model import FusedModel
from rvllm.gguf import GGUFFile
from rvllm.half_cache import HalfKVCache
from rvllm.kv_cache import DeviceKVCache, PagedKVCache
from rvllm.paged_attention_model import PagedAttentionModel
from rvllm.quantised_model import QuantisedModel
from rvllm.runtime import Runtime
from rvllm.sampling import SamplingParams, SamplingState
from rvllm.step import Step, make_step
from rvllm.step_inputs import Limits, StepTooLargeError
from rvllm.step_model import StepModel
from rvllm.testing import assert_close
from rvllm.workspace_model import WorkspaceModel
from tests.fast_toy import FastShape, write_fast_toy

PAGE, NUM_SEQS, WIDTH = 16, 4, 4  # tokens of a block, sequences, blocks of each
LIMITS = Limits(21, NUM_SEQS, WIDTH)  # 21 tokens: no power of two, so that the largest bucket is cut off
SMALL = FastShape(layers=2, H=2, K=1, F=96)
FLOAT_LIKE = 1e-5  # of the largest logit: float32 sums in another order, and 22 of 24 bits of activations
HALF_LIKE = 2e-3  # cached keys and values lose up to 2^-11 of themselves
VARIANTS: dict[str, tuple[type[StepModel], type]] = {
    "workspace": (WorkspaceModel, DeviceKVCache),
    "quantised": (QuantisedModel, DeviceKVCache),
    "paged_attention": (PagedAttentionModel, HalfKVCache),
}
every_variant = pytest.mark.parametrize("variant", VARIANTS)
KINDS = [("workspace", Type.F16), *(("quantised", t) for t in (Type.Q8_0, Type.Q4_1)), ("paged_attention", Type.F16)]


def poison(cache: Any) -> None:
    """NaN in every page of a HalfKVCache: cells that no token has written may hold anything."""
    for pages in getattr(cache, "pages", []):
        pages[...] = np.nan


class PagesCache(PagedKVCache):
    """The pages of a HalfKVCache as NumPy's model reads a cache, for steps of one token a sequence.

    A token's own key and value are taken as they are: attention has them from the projections. Rounding the host's
    own keys would not do: one that lies between two halfs may go to either, and a few of them in a thousand do.
    """

    def __init__(self, rt: Runtime, config: LlamaConfig, num_blocks: int, pages: list[Any]) -> None:
        super().__init__(config, num_blocks, PAGE)
        self.keys[:], self.values[:], self.rt, self.pages = np.nan, np.nan, rt, pages

    def cells(self, layer: int) -> tuple[np.ndarray, np.ndarray]:
        """Keys and values of the pages, float32 [num_blocks, 16, K, d]."""
        pages, (_, _, _, K, d) = self.rt.download(self.pages[layer]).astype(np.float32), self.keys.shape
        keys, values = pages[:, 0].reshape(-1, K, PAGE, d), pages[:, 1].reshape(-1, K, d, PAGE)
        return keys.swapaxes(1, 2), values.transpose(0, 3, 1, 2)

    def read(self, layer: int, step: Step) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        blocks, last = step.block_tables[0], step.seq_lens[0] - 1
        found = []
        for pages, exact in zip(self.cells(layer), (self.keys[layer], self.values[layer]), strict=True):
            rows, own = (a[blocks].reshape(-1, *a.shape[2:]) for a in (pages, exact))
            found.append(np.concatenate([rows[:last], own[last : last + 1]]))
        yield found[0], found[1]

    def check(self) -> None:
        """Where the host has a key or value, the pages have it, rounded; nothing else is written."""
        for layer in range(len(self.pages)):
            for got, exact in zip(self.cells(layer), (self.keys[layer], self.values[layer]), strict=True):
                written = ~np.isnan(exact)
                assert_close(got[written], exact[written], atol=1e-5, rtol=2**-11, name="pages")
                assert np.isnan(got[~written]).all()


class ModelOfPages(CpuModel):
    """NumPy's model over a PagesCache: any step, one token at a time."""

    def forward(self, step: Step, cache: Any, all_positions: bool = False) -> np.ndarray:
        rows = []
        starts, counts = step.query_start_loc, np.diff(step.query_start_loc)
        for i, (start, count) in enumerate(zip(starts, counts, strict=False)):
            for t in range(start, start + count):
                single = make_step([[step.token_ids[t]]], [step.positions[t]], [step.block_tables[i]], PAGE)
                rows.append(super().forward(single, cache)[0])
        logits = np.array(rows)
        return logits if all_positions else logits[step.last_token_indices]


def prompts() -> list[list[int]]:
    """Token ids of each sequence. With this seed no greedy choice below is a near tie."""
    return np.random.default_rng(21).integers(0, 300, (NUM_SEQS, PAGE * WIDTH)).tolist()


class Pair:
    """A variant and its reference over caches with the same shuffled block tables."""

    def __init__(self, rt: Runtime, variant: str, path: Path, of_pages: bool = False) -> None:
        make, cache = VARIANTS.get(variant, (FusedModel, HalfKVCache))
        file, num_blocks = GGUFFile(path), NUM_SEQS * WIDTH + 1
        self.cpu = ModelOfPages(file) if of_pages else CpuModel(file)
        device_cache = cache(rt, self.cpu.config, num_blocks, PAGE)
        poison(device_cache)
        self.host_cache: Any = PagedKVCache(self.cpu.config, num_blocks, PAGE)
        if of_pages:
            self.host_cache = PagesCache(rt, self.cpu.config, num_blocks, device_cache.pages)
        self.model: Any = make(file, rt, device_cache, LIMITS)
        self.tables = np.random.default_rng(0).permutation(num_blocks)[:-1].reshape(NUM_SEQS, WIDTH).tolist()
        self.ids = prompts()
        self.done = [0] * NUM_SEQS

    def feed(self, who: Sequence[int], new: Sequence[Sequence[int]]) -> Step:
        """The step that feeds new[i] to sequence who[i]."""
        step = make_step(new, [self.done[i] for i in who], [self.tables[i] for i in who], PAGE)
        for i, token_ids in zip(who, new, strict=True):
            self.done[i] += len(token_ids)
        return step

    def step(self, counts: Sequence[int], order: Sequence[int] = range(NUM_SEQS)) -> Step:
        """The step that feeds counts[i] more tokens to sequence i."""
        who = [i for i in order if counts[i]]
        return self.feed(who, [self.ids[i][self.done[i] : self.done[i] + counts[i]] for i in who])

    def compare(self, counts: Sequence[int], tolerance: float, all_positions: bool = False, **order: Any) -> None:
        step = self.step(counts, **order)
        got = self.model.forward(step, None, all_positions)
        expected = self.cpu.forward(step, self.host_cache, all_positions)
        assert got.dtype == np.float32
        print(assert_close(got, expected, atol=tolerance * np.abs(expected).max(), name=f"logits {counts}"))


@pytest.fixture(scope="module")
def path_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """A model file of a type and shape, written once."""
    folder, known = tmp_path_factory.mktemp("variants"), {}

    def find(type_: Type = Type.Q8_0, shape: FastShape = SMALL) -> Path:
        if (type_, shape) not in known:
            known[type_, shape] = write_fast_toy(folder / f"{len(known)}.gguf", shape, type_, vocab=300)
        return known[type_, shape]

    return find


# Logits ---------------------------------------------------------------------------------------------------------------


def every_kind_of_step(pair: Pair, tolerance: float) -> None:
    """Prefill of one and of several, decode, mixed, chunks over the border of a block, any order, every token."""
    for counts in ([5, 0, 0, 0], [0, 9, 2, 1], [1, 1, 1, 1]):
        pair.compare(counts, tolerance)
    pair.compare([1, 8, 1, 7], tolerance, order=(2, 0, 3, 1))
    pair.compare([2, 1, 0, 2], tolerance, all_positions=True)
    pair.compare([0, 1, 0, 0], tolerance)


@pytest.mark.parametrize("variant, type_", KINDS)
def test_every_kind_of_step(device: Runtime, path_of: Callable[..., Path], variant: str, type_: Type) -> None:
    paged = variant == "paged_attention"
    every_kind_of_step(Pair(device, variant, path_of(type_)), HALF_LIKE if paged else FLOAT_LIKE)


def test_halfs_in_the_cache_are_all_that_paged_attention_loses(rt: Runtime, path_of: Callable[..., Path]) -> None:
    pair = Pair(rt, "paged_attention", path_of(Type.Q4_1), of_pages=True)
    every_kind_of_step(pair, FLOAT_LIKE)
    pair.host_cache.check()


@every_variant
def test_heads_that_share_keys(rt: Runtime, path_of: Callable[..., Path], variant: str) -> None:
    """Three query heads to each of two KV heads."""
    pair = Pair(rt, variant, path_of(Type.Q8_0, FastShape(layers=1, H=6, K=2, F=32)), variant == "paged_attention")
    pair.compare([3, 1, 0, 2], FLOAT_LIKE)
    pair.compare([1, 0, 1, 1], FLOAT_LIKE)


def test_attention_in_splits(rt: Runtime, path_of: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Contexts of 256 tokens would be needed; here two blocks share the few there are."""
    monkeypatch.setattr("rvllm.attention_shapes.attention_splits", lambda *_: 2)
    pair = Pair(rt, "paged_attention", path_of(), of_pages=True)
    pair.compare([2, 0, 0, 0], FLOAT_LIKE)
    for _ in range(2):
        pair.compare([0, 2, 0, 0], FLOAT_LIKE)
    pair.compare([1, 0, 0, 0], FLOAT_LIKE)


@every_variant
def test_the_last_position(rt: Runtime, path_of: Callable[..., Path], variant: str) -> None:
    """A full table; then an idle row remembers a position one past its end, which must not be looked up."""
    pair = Pair(rt, variant, path_of(), variant == "paged_attention")
    for count in (21, 21, 21):
        pair.compare([count, 0, 0, 0], FLOAT_LIKE)
    pair.compare([1, 1, 1, 1], FLOAT_LIKE, order=(1, 2, 3, 0))
    assert rt.download(pair.model.inputs.positions)[3] == PAGE * WIDTH
    pair.compare([0, 1, 1, 1], FLOAT_LIKE)  # a bucket of four


@every_variant
def test_steps_that_do_not_fit(rt: Runtime, path_of: Callable[..., Path], variant: str) -> None:
    pair = Pair(rt, variant, path_of())
    with pytest.raises(StepTooLargeError, match="22, 1, 4"):
        pair.model.forward(pair.step([22, 0, 0, 0]))


# Without the host -----------------------------------------------------------------------------------------------------


def greedy(pair: Pair, lengths: Sequence[int], num_tokens: int, late: bool = True) -> list[list[int]]:
    """Tokens of each sequence by start(). late: a step's tokens are waited for when the next one is under way."""
    who, found = list(range(len(lengths))), []
    states = [SamplingState(SamplingParams(temperature=0))] * len(who)
    ticket = pair.model.start(pair.step([*lengths, 0]), states)
    for _ in range(num_tokens - 1):
        if late:
            following = pair.model.start(pair.feed(who, [[~i] for i in who]), states)
            found.append(ticket.token_ids())
        else:
            found.append(ticket.token_ids())
            following = pair.model.start(pair.feed(who, found[-1][:, None].tolist()), states)
        ticket = following
    return np.transpose([*found, ticket.token_ids()]).tolist()


@pytest.fixture(scope="module")
def expected_tokens(path_of: Callable[..., Path]) -> list[list[int]]:
    """What NumPy's model answers to prompts of 7, 3 and 5 tokens."""
    model, ids = CpuModel(GGUFFile(path_of())), prompts()
    cache = PagedKVCache(model.config, 3 * WIDTH, PAGE)
    tables, done, new = np.arange(3 * WIDTH).reshape(3, WIDTH).tolist(), [0, 0, 0], [ids[0][:7], ids[1][:3], ids[2][:5]]
    found = []
    for _ in range(12):
        logits = model.forward(make_step(new, done, tables, PAGE), cache)
        done = [n + len(token_ids) for n, token_ids in zip(done, new, strict=True)]
        second, best = np.sort(logits, axis=1)[:, -2:].T
        assert (best - second > 2 * HALF_LIKE * np.abs(logits).max()).all(), "halfs may decide; take another seed"
        found.append(logits.argmax(axis=1))
        new = found[-1][:, None].tolist()
    return np.transpose(found).tolist()


@pytest.mark.parametrize(
    "variant, late", [*((v, True) for v in [*VARIANTS, "fused"]), ("workspace", False), ("paged_attention", False)]
)
def test_greedy_tokens(
    rt: Runtime, path_of: Callable[..., Path], expected_tokens: list[list[int]], variant: str, late: bool
) -> None:
    assert greedy(Pair(rt, variant, path_of()), [7, 3, 5], 12, late) == expected_tokens


@every_variant
def test_steady_decode_needs_nothing_from_the_host(
    rt: Runtime, path_of: Callable[..., Path], variant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No upload of inputs, no array made: after the first steps of its shape, a step only starts things."""
    pair = Pair(rt, variant, path_of())
    greedy(pair, [7, 3, 5], 3)
    uploads = pair.model.inputs.num_uploads
    monkeypatch.setattr(rt, "_allocate", lambda *_: pytest.fail("an array was made in a step"))
    programs = dict(pair.model._programs)
    states = [SamplingState(SamplingParams(temperature=0))] * 3
    for _ in range(3):
        pair.model.start(pair.feed([0, 1, 2], [[~0], [~1], [~2]]), states).token_ids()
    assert pair.model.inputs.num_uploads == uploads
    assert pair.model._programs == programs


@every_variant
def test_logits_that_are_no_numbers_choose_nothing(rt: Runtime, path_of: Callable[..., Path], variant: str) -> None:
    """-1 for the row, and a step that asks for it reads row 0 of the embedding."""
    pair = Pair(rt, variant, path_of())
    gain = pair.model.output_norm.copy()
    pair.model.output_norm[...] = np.nan
    states = [SamplingState(SamplingParams(temperature=0))]
    assert pair.model.start(pair.step([2, 0, 0, 0]), states).token_ids().tolist() == [-1]
    pair.model.output_norm[...] = gain
    (chosen,) = pair.model.start(pair.feed([0], [[~0]]), states).token_ids().tolist()
    assert 0 <= chosen < 300


# Limits ---------------------------------------------------------------------------------------------------------------


def test_limits(path_of: Callable[..., Path]) -> None:
    """The gather is cut to a quarter of the memory; without one nothing is cut."""
    config = CpuModel(GGUFFile(path_of())).config
    wanted = 512, 64, 1000
    assert WorkspaceModel.limits_for(config, 1 << 40, *wanted) == Limits(512, 64, 63)
    bytes_of_gather = 1008 * (2 * 64 + 2) * 4  # keys, values and two scores of each position
    few = QuantisedModel.limits_for(config, 4 * 50 * bytes_of_gather, *wanted)
    assert 40 < few.max_num_tokens == few.max_num_seqs < 50
    assert WorkspaceModel.limits_for(config, 0, *wanted) == Limits(1, 1, 63)
    assert PagedAttentionModel.limits_for(config, 0, *wanted) == Limits(512, 64, 63)
