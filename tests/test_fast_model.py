"""The fast model's wide steps beside NumPy's model, "wide" beginning at four tokens; and what keeps to narrow ones.

On the emulator in check mode by default, on a GPU with RVLLM_TEST_DEVICE=cuda.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type

from rvllm import LLM, SamplingParams
from rvllm.fast_model import FastModel, query_tiles, single_tokens
from rvllm.graph_model import GraphModel
from rvllm.runtime import Runtime
from rvllm.sampling import LogitsError
from rvllm.step import make_step
from tests.fast_toy import FastShape
from tests.test_fused_model import EXACT, SMALL, STATE, Pair, outliers, write
from tests.test_variants import NUM_SEQS, greedy

FAST = 5e-3  # of the largest logit: as in narrow steps; weights, queries and keys are rounded to halfs as well
WIDTH = 9  # blocks of a sequence: 144 tokens, three tiles of queries


@pytest.fixture(autouse=True)
def wide_from_four(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rvllm.fast_model.WIDE", 3)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("fast") / "toy.gguf", SMALL, Type.Q8_0)


@pytest.fixture(scope="module")
def odd_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A vocabulary that is no multiple of 16."""
    return write(tmp_path_factory.mktemp("fast") / "odd.gguf", SMALL, Type.Q8_0, vocab=300)


@pytest.fixture
def make(rt: Runtime, path: Path) -> Callable[..., Pair]:
    """A FastModel beside NumPy's model, whose own cache holds float32."""

    def make(path: Path = path, exact: bool = False, kind: type = FastModel, of_pages: bool = False) -> Pair:
        return Pair(rt, path, exact, kind, of_pages, WIDTH)

    return make


def is_wide(pair: Pair) -> list[bool]:
    """Of each shape of step so far."""
    return [len(shape) > 3 for shape in pair.model._programs]


# Logits ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reverse", [False, True])
def test_every_kind_of_step(
    rt: Runtime, make: Callable[..., Pair], reverse: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts, chunks, decode, all of it in one step, in any order; then narrow steps over the same cache."""
    if reverse and rt.is_cuda:
        pytest.skip("a GPU chooses its own order")
    monkeypatch.setattr(rt, "reverse", reverse)
    pair = make()
    for counts in ([70, 0, 0, 0], [0, 17, 2, 4], [1, 1, 1, 1], [2, 1, 0, 1]):
        pair.compare(counts, FAST)
    pair.compare([1, 18, 1, 9], FAST, order=(2, 0, 3, 1))
    pair.compare([5, 1, 1, 0], FAST, all_positions=True)
    assert all(is_wide(pair))
    pair.compare([1, 0, 1, 0], FAST)
    assert is_wide(pair)[-1] is False
    pair.compare([1, 1, 1, 1], FAST)


def test_long_prompts(make: Callable[..., Pair]) -> None:
    """Several tiles of queries, whole and broken; chunks that begin anywhere in a block."""
    pair = make()
    for counts in ([129, 0, 0, 0], [0, 64, 0, 65], [0, 67, 0, 3], [1, 2, 0, 64]):
        pair.compare(counts, FAST)


@pytest.mark.parametrize(
    "shape",
    [
        FastShape(layers=1, H=7, K=1, d=128, F=32),
        FastShape(layers=1, H=2, K=2, F=32),
        FastShape(layers=1, H=4, K=2, F=32),
    ],
    ids=str,
)
def test_shapes_of_heads(make: Callable[..., Pair], tmp_path: Path, shape: FastShape) -> None:
    pair = make(write(tmp_path / "toy.gguf", shape, Type.Q4_1))
    pair.compare([5, 0, 2, 0], FAST)
    for _ in range(2):  # attention stores keys and values of the first step, and reads them in the second
        pair.compare([1, 1, 1, 1], FAST)


@pytest.mark.parametrize("type_", [Type.Q4_0, Type.F16, Type.Q4_K])
def test_types_of_weights(make: Callable[..., Pair], tmp_path: Path, type_: Type) -> None:
    pair = make(write(tmp_path / "toy.gguf", FastShape(layers=1, H=4, K=2, F=256), type_))
    pair.compare([3, 2, 0, 0], FAST)


def test_outliers_stay_inside_halfs(rt: Runtime, make: Callable[..., Pair], tmp_path: Path) -> None:
    pair = make(write(tmp_path / "toy.gguf", SMALL, Type.Q8_0, outliers))
    pair.compare([9, 3, 0, 0], FAST)
    assert all(is_wide(pair))
    assert 15_000 < rt.download(pair.model.workspace.x).max() < 40_000


@pytest.mark.parametrize(("gate", "up", "fits"), [(1.4, 1e5, True), (1e5, 1.4, True), (0.01, 3e6, False)])
@pytest.mark.parametrize("sign", [1, -1])
def test_what_is_too_large_does_not_depend_on_the_length(
    make: Callable[..., Pair], tmp_path: Path, gate: float, up: float, fits: bool, sign: int
) -> None:
    """A gate or up value beyond half's range: right in a wide step and in a narrow one, or in neither of them."""

    def large(tensors: dict[str, np.ndarray]) -> None:
        outliers(tensors)
        normal = 4.7  # about what the norm makes of channel 5
        tensors["blk.0.ffn_gate.weight"][7, 5], tensors["blk.0.ffn_up.weight"][7, 5] = sign * gate / normal, up / normal
        tensors["blk.0.ffn_down.weight"][9, 7] = 0.1

    path = write(tmp_path / "toy.gguf", SMALL, Type.Q8_0, large)
    for counts in ([9, 3, 0, 0], [2, 1, 0, 0]):
        pair = make(path)
        if fits:
            pair.compare(counts, FAST)
        else:
            assert not np.isfinite(pair.model.forward(pair.step(counts))).any()
        assert is_wide(pair) == [sum(counts) > 3]


# What is narrow -------------------------------------------------------------------------------------------------------


def test_exact_is_never_wide(make: Callable[..., Pair]) -> None:
    pair = make(exact=True, of_pages=True)
    pair.compare([9, 1, 0, 0], EXACT)
    assert not hasattr(pair.model, "half_layers")
    assert is_wide(pair) == [False]


def test_other_vocabularies_are_never_wide(make: Callable[..., Pair], odd_path: Path) -> None:
    pair = make(odd_path)
    pair.compare([9, 1, 0, 0], FAST, all_positions=True)
    assert is_wide(pair) == [False]


def test_up_to_wide_it_is_the_graph_model(make: Callable[..., Pair], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rvllm.fast_model.WIDE", 8)
    pairs = [make(kind=kind) for kind in (FastModel, GraphModel)]
    for counts in ([5, 3, 0, 0], [1, 1, 1, 1]):
        ours, theirs = (pair.model.forward(pair.step(counts)) for pair in pairs)
        assert np.array_equal(ours, theirs)
    assert is_wide(pairs[0]) == [False, False]


# Choice ---------------------------------------------------------------------------------------------------------------


def test_the_same_bits_again(rt: Runtime, make: Callable[..., Pair], monkeypatch: pytest.MonkeyPatch) -> None:
    runs = []
    for reverse in (False, False, True):
        monkeypatch.setattr(rt, "reverse", reverse and not rt.is_cuda)
        pair = make()
        logits = [pair.model.forward(pair.step(counts)) for counts in ([19, 5, 0, 0], [1, 1, 3, 0])]
        pair.done = [0] * NUM_SEQS
        runs.append([*logits, np.array(greedy(pair, [5, 3, 9], 3))])
    assert all(map(np.array_equal, runs[0], runs[1]))
    assert all(map(np.array_equal, runs[0], runs[2]))


def test_steady_decode_needs_nothing_from_the_host(
    rt: Runtime, make: Callable[..., Pair], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four sequences decode in wide steps: tokens by row, nothing sent, not even which rows attend alone."""
    pair, known = make(), make()
    who, late = range(NUM_SEQS), [[~i] for i in range(NUM_SEQS)]
    pair.model.start(pair.step([7, 3, 5, 1]), [STATE] * NUM_SEQS)
    for _ in range(2):
        pair.model.start(pair.feed(who, late), [STATE] * NUM_SEQS)
    uploads = pair.model.inputs.num_uploads
    monkeypatch.setattr(rt, "_allocate", lambda *_: pytest.fail("an array was made in a step"))
    sent: list[Any] = []
    monkeypatch.setattr(pair.model.queries._uplink, "send", sent.append)
    for _ in range(3):
        ticket = pair.model.start(pair.feed(who, late), [STATE] * NUM_SEQS)
    assert (pair.model.inputs.num_uploads, sent) == (uploads, [])
    monkeypatch.undo()
    monkeypatch.setattr("rvllm.fast_model.WIDE", 3)
    logits = known.model.forward(known.step([7, 3, 5, 1]))
    for _ in range(5):
        logits = known.model.forward(known.feed(who, logits.argmax(axis=1)[:, None].tolist()))
    assert ticket.token_ids().tolist() == logits.argmax(axis=1).tolist()
    assert all(is_wide(pair))


def test_of_equal_logits_the_first_wins(make: Callable[..., Pair], tmp_path: Path) -> None:
    def all_alike(tensors: dict[str, np.ndarray]) -> None:
        tensors["token_embd.weight"][:] = 0
        tensors["token_embd.weight"][:, 3] = 1  # alone, or a library's order of adding would tell the columns apart

    pair = make(write(tmp_path / "toy.gguf", SMALL, Type.Q8_0, all_alike))
    assert pair.model.start(pair.step([3, 0, 2, 0]), [STATE] * 2).token_ids().tolist() == [0, 0]


def test_damaged_weights_are_reported(tmp_path: Path) -> None:
    def damage(tensors: dict[str, np.ndarray]) -> None:
        tensors["output_norm.weight"][3] = np.nan

    path = write(tmp_path / "toy.gguf", SMALL, Type.Q8_0, damage)
    device = os.environ.get("RVLLM_TEST_DEVICE", "emulator")
    with LLM(path, device, variant="graph", num_blocks=16, max_num_seqs=4, max_num_batched_tokens=48) as llm:
        with pytest.raises(LogitsError, match="no finite maximum"):
            llm.generate([5, 6, 7, 8, 9], SamplingParams(max_tokens=3, temperature=0))
        assert llm.engine.scheduler.pool.num_free == 16


# How attention is shared out ------------------------------------------------------------------------------------------


def test_tokens_alone_and_in_tiles() -> None:
    new = [[5], [5] * 64, [5], [5] * 130, [5, 5]]
    step = make_step(new, [40, 0, 3, 7, 1], [list(range(9))] * 5, 16)
    assert single_tokens(step).tolist() == [0, 65]
    assert query_tiles(step).tolist() == [[1, 64], [66, 64], [130, 64], [194, 2], [196, 2]]
    only: Any = make_step([[5], [6], [7], [8]], [1, 20, 2, 20], [[0], [1, 2], [3], [4, 5]], 16)
    assert query_tiles(only).shape == (0, 2)
    assert single_tokens(only).tolist() == [1, 3, 2, 0], "the longest contexts first"
