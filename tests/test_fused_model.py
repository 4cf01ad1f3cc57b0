"""The fused model beside NumPy's: every type of weights and shape of heads, any number of tokens, tokens chosen late.

On the emulator in check mode by default, on a GPU with RVLLM_TEST_DEVICE=cuda.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type

from rvllm import LLM, SamplingParams
from rvllm.cpu_model import CpuModel
from rvllm.fused_model import FusedModel
from rvllm.gguf import GGUFFile
from rvllm.graph_model import GraphModel
from rvllm.half_cache import HalfKVCache
from rvllm.kv_cache import PagedKVCache
from rvllm.runtime import Runtime
from rvllm.sampling import LogitsError, SamplingState
from rvllm.step_inputs import Limits
from tests import test_variants, toy
from tests.fast_toy import DEFAULT, FastShape, write_fast_toy
from tests.test_tiles import random_matrix
from tests.test_variants import NUM_SEQS, PAGE, ModelOfPages, PagesCache, greedy

EXACT = 1e-5  # of the largest logit: float32 sums in another order, 22 of 24 bits of activations
FAST = 3e-3  # activations, keys and values lose up to 2^-11 of themselves, in every layer
STATE = SamplingState(SamplingParams(temperature=0))
SMALL = FastShape(layers=2, H=3, K=1, F=96)
Change = Callable[[dict[str, np.ndarray]], object]


class Pair(test_variants.Pair):
    """A model and its reference over caches with the same shuffled block tables.

    of_pages: the reference attends to the halfs that the device has in its cache, so that nothing but the kernels'
    arithmetic differs; only for models that attend to each token by itself.
    """

    def __init__(
        self, rt: Runtime, path: Path, exact: bool, kind: type = FusedModel, of_pages: bool = True, width: int = 4
    ) -> None:
        file, num_blocks = GGUFFile(path), NUM_SEQS * width + 1
        self.cpu = ModelOfPages(file) if of_pages else CpuModel(file)
        cache, config = HalfKVCache(rt, self.cpu.config, num_blocks), self.cpu.config
        test_variants.poison(cache)
        self.host_cache: Any = PagedKVCache(config, num_blocks, PAGE)
        if of_pages:
            self.host_cache = PagesCache(rt, config, num_blocks, cache.pages)
        self.model: Any = kind(file, rt, cache, Limits(48 if width == 4 else 160, NUM_SEQS, width), exact)
        self.tables = np.random.default_rng(0).permutation(num_blocks)[:-1].reshape(NUM_SEQS, width).tolist()
        vocab = config.vocab_size
        self.ids = np.random.default_rng(21).integers(0, vocab, (NUM_SEQS, PAGE * width)).tolist()
        self.done = [0] * NUM_SEQS


def write(path: Path, shape: FastShape, type_: Type, change: Change = lambda _: None, vocab: int = 304) -> Path:
    """A toy model whose tensors were changed. Q4_K, which nobody quantises here: of random bytes."""
    real, quantize = toy.write, gguf.quants.quantize

    def changed(path: Path, meta: Any, tensors: dict[str, np.ndarray], types: Any) -> Path:
        change(tensors)
        return real(path, meta, tensors, types)

    def packed(data: np.ndarray, type_: Type) -> np.ndarray:
        return (
            random_matrix(type_, data.shape[0], data.shape[1], scale=3e-4)
            if type_ == Type.Q4_K
            else quantize(data, type_)
        )

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(toy, "write", changed)
        patch.setattr(gguf.quants, "quantize", packed)
        return write_fast_toy(path, shape, type_, vocab=vocab)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model of most tests here."""
    return write(tmp_path_factory.mktemp("fused") / "toy.gguf", SMALL, Type.Q8_0)


# Logits ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("exact", [True, False])
def test_every_kind_of_step(device: Runtime, path: Path, exact: bool) -> None:
    """Prefill, decode, mixed, in chunks, in any order, every token's logits; and what the cache then holds."""
    pair = Pair(device, path, exact)
    test_variants.every_kind_of_step(pair, EXACT if exact else FAST)
    if exact:
        pair.host_cache.check()


@pytest.mark.parametrize("exact", [True, False])
def test_any_number_of_tokens(rt: Runtime, path: Path, exact: bool) -> None:
    """Whole and broken groups of columns, one group and several."""
    for counts in ([3, 0, 0, 0], [4, 0, 0, 0], [0, 5, 0, 0], [0, 0, 9, 0], [0, 0, 0, 17], [33, 0, 0, 0], [0, 39, 1, 0]):
        Pair.compare(pair := Pair(rt, path, exact), counts, EXACT if exact else FAST)
        assert pair.done == counts


@pytest.mark.parametrize(
    ("type_", "shape"),
    [
        (Type.Q4_0, SMALL),
        (Type.Q4_1, SMALL),
        (Type.F16, SMALL),
        (Type.Q4_K, FastShape(layers=1, H=4, K=2, F=256)),
    ],
)
def test_types_of_weights(rt: Runtime, tmp_path: Path, type_: Type, shape: FastShape) -> None:
    pair = Pair(rt, write(tmp_path / "toy.gguf", shape, type_), exact=False)
    pair.compare([2, 1, 1, 0], EXACT)  # four tokens: hi/lo costs nothing, and is what they get
    pair.compare([1, 2, 2, 1], FAST)


@pytest.mark.parametrize(
    "shape",
    [
        FastShape(layers=1, H=7, K=1, d=128, F=64),
        FastShape(layers=1, H=8, K=1, d=128, F=64),
        FastShape(layers=1, H=3, K=3, d=128, F=32),
        FastShape(layers=1, H=2, K=2, F=32),
        FastShape(layers=1, H=10, K=2, F=64),
    ],
    ids=str,
)
def test_shapes_of_heads(rt: Runtime, tmp_path: Path, shape: FastShape) -> None:
    pair = Pair(rt, write(tmp_path / "toy.gguf", shape, Type.Q8_0), exact=True)
    pair.compare([2, 1, 0, 0], EXACT)
    pair.compare([1, 1, 0, 1], EXACT)


def outliers(tensors: dict[str, np.ndarray]) -> None:
    """One product of SiLU is 5,400 and one channel of the residual stream 22,500: thousands, as in the real model."""
    tensors["token_embd.weight"] *= np.float32(4 / tensors["token_embd.weight"].std())
    tensors["token_embd.weight"][:, 5] = 20
    tensors["blk.0.ffn_norm.weight"][5] = 1
    for name, weight in (("gate", 19), ("up", 12.8)):
        tensors[f"blk.0.ffn_{name}.weight"][7] = 0
        tensors[f"blk.0.ffn_{name}.weight"][7, 5] = weight
    tensors["blk.0.ffn_down.weight"][9, 7] = 22_500 / 5_400


@pytest.mark.parametrize("kind", [FusedModel, GraphModel])
@pytest.mark.parametrize("exact", [True, False])
def test_outliers_stay_inside_halfs(rt: Runtime, tmp_path: Path, exact: bool, kind: type) -> None:
    pair = Pair(rt, write(tmp_path / "toy.gguf", SMALL, Type.Q8_0, outliers), exact, kind)
    pair.compare([4, 3, 0, 0], EXACT if exact else FAST)
    assert 15_000 < rt.download(pair.model.workspace.x).max() < 40_000
    pair.compare([1, 1, 1, 0], EXACT)


# Choice ---------------------------------------------------------------------------------------------------------------


def bits(rt: Runtime, path: Path, kind: type, exact: bool) -> list[Any]:
    """Logits and chosen tokens of some steps."""
    pair = Pair(rt, path, exact, kind, of_pages=False)
    logits = [pair.model.forward(pair.step(counts)) for counts in ([7, 1, 0, 0], [1, 2, 5, 0])]
    pair.done = [0] * NUM_SEQS
    return [*logits, np.array(greedy(pair, [7, 3, 5], 4))]


@pytest.mark.parametrize("exact", [True, False])
def test_the_same_bits_in_any_order_and_as_a_graph(
    rt: Runtime, path: Path, exact: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = bits(rt, path, FusedModel, exact)
    for kind in (FusedModel, GraphModel):
        assert all(map(np.array_equal, bits(rt, path, kind, exact), expected))
    monkeypatch.setattr(rt, "reverse", not rt.is_cuda)
    assert all(map(np.array_equal, bits(rt, path, GraphModel, exact), expected))


@pytest.mark.parametrize("kind", [FusedModel, GraphModel])
def test_steady_decode_needs_nothing_from_the_host(
    rt: Runtime, path: Path, kind: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step names its tokens by row; from the second on nothing is sent, nothing made; and tokens are argmax's."""
    pair = Pair(rt, path, exact=True, kind=kind)
    other = Pair(rt, path, exact=True)
    greedy(pair, [7, 3, 5], 3)
    uploads, programs = pair.model.inputs.num_uploads, dict(pair.model._programs)
    monkeypatch.setattr(rt, "_allocate", lambda *_: pytest.fail("an array was made in a step"))
    for _ in range(3):
        ticket = pair.model.start(pair.feed([0, 1, 2], [[~0], [~1], [~2]]), [STATE] * 3)
    assert (pair.model.inputs.num_uploads, pair.model._programs) == (uploads, programs)
    monkeypatch.undo()
    tokens = np.array(greedy(other, [7, 3, 5], 6, late=False))
    other.done = [0] * NUM_SEQS
    logits = other.model.forward(other.step([7, 3, 5, 0]))
    assert logits.argmax(axis=1).tolist() == tokens[:, 0].tolist()
    assert ticket.token_ids().tolist() == tokens[:, 5].tolist()


def test_of_equal_logits_the_first_wins(rt: Runtime, tmp_path: Path) -> None:
    def all_alike(tensors: dict[str, np.ndarray]) -> None:
        tensors["token_embd.weight"][:] = tensors["token_embd.weight"][3]

    pair = Pair(rt, write(tmp_path / "toy.gguf", SMALL, Type.Q8_0, all_alike), exact=False)
    for counts in ([2, 0, 0, 0], [3, 3, 1, 1]):
        rows = sum(map(bool, counts))
        assert pair.model.start(pair.step(counts), [STATE] * rows).token_ids().tolist() == [0] * rows


@pytest.mark.parametrize("variant", ["fused", "graph"])
@pytest.mark.parametrize("name", ["output_norm.weight", "blk.1.ffn_norm.weight"])
def test_damaged_weights_are_reported(tmp_path: Path, variant: str, name: str) -> None:
    def damage(tensors: dict[str, np.ndarray]) -> None:
        tensors[name][3] = np.nan

    path = write(tmp_path / "toy.gguf", SMALL, Type.Q8_0, damage)
    device = os.environ.get("RVLLM_TEST_DEVICE", "emulator")
    with LLM(path, device, variant=variant, num_blocks=16, max_num_seqs=4, max_num_batched_tokens=48) as llm:
        with pytest.raises(LogitsError, match="no finite maximum"):
            llm.generate([5, 6, 7], SamplingParams(max_tokens=3, temperature=0))
        assert llm.engine.scheduler.pool.num_free == 16


def test_the_default_toy_is_covered(tmp_path: Path) -> None:
    """Engine and model together: text comes out, the same as of NumPy's model, which has no near tie here."""
    path, params = write(tmp_path / "toy.gguf", DEFAULT, Type.Q8_0), SamplingParams(max_tokens=6, ignore_eos=True)
    device = os.environ.get("RVLLM_TEST_DEVICE", "emulator")
    sizes: dict[str, Any] = {"num_blocks": 16, "max_num_seqs": 4, "max_num_batched_tokens": 8}
    prompts = [list(range(20, 31)), [7]]
    with LLM(path, "cpu", **sizes) as cpu, LLM(path, device, variant="fused", exact=True, **sizes) as llm:
        answers = [[o.outputs[0].token_ids for o in each.generate(prompts, params)] for each in (cpu, llm)]
    assert answers[0] == answers[1]
