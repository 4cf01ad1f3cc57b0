"""The device's model beside NumPy's: prefill, decode and mixed steps on small models, then the real one.

On the emulator in check mode by default, on a GPU with RVLLM_TEST_DEVICE=cuda; the long tests need the GPU.
"""

import json
import os
from dataclasses import replace

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type

from rvllm import LLM, SamplingParams, emulator
from rvllm.config import ConfigError
from rvllm.cpu_model import CpuModel
from rvllm.cuda_model import CudaModel, make_batch, split_step
from rvllm.gguf import GGUFFile
from rvllm.kv_cache import DeviceKVCache, PagedKVCache
from rvllm.step import make_step
from rvllm.testing import assert_close
from tests import toy
from tests.test_oracle import ORACLE, same_up_to_near_ties

DEVICE = os.environ.get("RVLLM_TEST_DEVICE", "emulator")
needs_gpu = pytest.mark.skipif(not DEVICE.startswith("cuda"), reason="takes hours on the emulator")
TOLERANCE = 1e-4  # of the largest logit
MATRICES = [name for name, tensor in toy.weights().items() if tensor.ndim == 2]


def tensors(layers: int = toy.LAYERS, **changes: np.ndarray) -> dict[str, np.ndarray]:
    """A toy's tensors with fewer layers; `changes` put others in their places, all layers alike."""
    found = {}
    for name, tensor in toy.weights().items():
        part = name.split(".")
        if part[0] != "blk" or int(part[1]) < layers:
            found[name] = changes.get(part[-2], tensor)
    return found | {f"{name}.weight": changes[name] for name in ("output", "rope_freqs") if name in changes}


def matrix(rows: int, columns: int) -> np.ndarray:
    return np.random.default_rng(rows + columns).standard_normal((rows, columns), np.float32) / columns**0.5


def quantised(type_: Type) -> dict:
    return {"types": dict.fromkeys(MATRICES, type_)}


VARIANTS = {
    "toy": {},
    "one layer": {"meta": {"llama__block_count": 1}, "tensors": tensors(1)},
    "untied output": {"tensors": tensors(output=matrix(300, 64))},
    "H == K": {
        "meta": {"llama__attention__head_count_kv": 4},
        "tensors": tensors(attn_k=matrix(64, 64), attn_v=matrix(64, 64)),
    },
    "K == 1": {
        "meta": {"llama__attention__head_count_kv": 1},
        "tensors": tensors(attn_k=matrix(16, 64), attn_v=matrix(16, 64)),
    },
    "H · d is not D": {
        "meta": {"llama__attention__key_length": 6},
        "tensors": tensors(
            attn_q=matrix(24, 64), attn_k=matrix(12, 64), attn_v=matrix(12, 64), attn_output=matrix(64, 24)
        ),
    },
    "rope_freqs": {"tensors": tensors(rope_freqs=np.linspace(1, 8, toy.HEAD // 2, dtype=np.float32))},
    "F16": quantised(Type.F16),
    "BF16 (C64)": quantised(Type.BF16),
    "Q8_0": quantised(Type.Q8_0),
    "Q4_0": quantised(Type.Q4_0),
}


class Pair:
    """Both models over their own paged caches, NaN in every unused cell, and the same shuffled block tables."""

    def __init__(self, rt, path, block_size: int = 4, length: int = 64) -> None:
        file = GGUFFile(path)
        self.cpu, self.cuda, self.block_size = CpuModel(file), CudaModel(file, rt), block_size
        width = -(-length // block_size)
        blocks = np.random.default_rng(0).permutation(4 * width + 1)[: 4 * width]
        self.tables = blocks.reshape(4, width).tolist()
        self.ids = np.random.default_rng(1).integers(0, 300, (4, length)).tolist()
        self.done = [0] * 4
        self.paged = PagedKVCache(self.cpu.config, 4 * width + 1, block_size)
        self.cache = DeviceKVCache(rt, self.cpu.config, 4 * width + 1, block_size)
        self.paged.keys[:], self.paged.values[:] = np.nan, np.nan
        for storage in (self.cache.keys, self.cache.values):
            storage[:] = [rt.upload(np.full(array.shape, np.nan, np.float32)) for array in storage]

    def step(self, counts, order=(0, 1, 2, 3)):
        """The step that feeds counts[i] more tokens to sequence i; tables are as long as they must be."""
        who = [i for i in order if counts[i]]
        new = [self.ids[i][self.done[i] : self.done[i] + counts[i]] for i in who]
        ends = [self.done[i] + counts[i] for i in who]
        tables = [self.tables[i][: -(-end // self.block_size)] for i, end in zip(who, ends, strict=True)]
        step = make_step(new, [self.done[i] for i in who], tables, self.block_size)
        for i, end in zip(who, ends, strict=True):
            self.done[i] = end
        return step

    def compare(self, counts, all_positions: bool = False, order=(0, 1, 2, 3)) -> None:
        step = self.step(counts, order)
        expected = self.cpu.forward(step, self.paged, all_positions)
        got = self.cuda.forward(step, self.cache, all_positions)
        assert got.dtype == np.float32
        why = "float32, sums in another order"
        print(assert_close(got, expected, atol=TOLERANCE * np.abs(expected).max(), why=why, name=f"logits {counts}"))
        assert np.array_equal(got.argmax(axis=1), expected.argmax(axis=1))

    def compare_caches(self) -> None:
        """The same cells are written, and no other."""
        for layer in range(self.cpu.config.num_hidden_layers):
            for ours, theirs in ((self.cache.keys, self.paged.keys), (self.cache.values, self.paged.values)):
                got = self.cuda.rt.download(ours[layer])
                assert np.array_equal(np.isnan(got), np.isnan(theirs[layer]))
                assert_close(np.nan_to_num(got), np.nan_to_num(theirs[layer]), atol=1e-4, name="cache")


@pytest.fixture(scope="module")
def toy_path(tmp_path_factory):
    return toy.write(tmp_path_factory.mktemp("toy") / "toy.gguf")


@pytest.fixture
def pair(rt, toy_path) -> Pair:
    return Pair(rt, toy_path)


@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS)
def test_every_kind_of_step(rt, tmp_path, variant):
    """Prefill of one, of three of different length, decode of four at different positions, mixed; then every token."""
    meta = toy.metadata(**variant.get("meta", {}))
    path = toy.write(tmp_path / "toy.gguf", meta, variant.get("tensors"), variant.get("types"))
    pair = Pair(rt, path)
    for counts in ([5, 0, 0, 0], [0, 9, 3, 1], [1, 1, 1, 1], [1, 0, 6, 1]):
        pair.compare(counts)
    pair.compare([2, 1, 0, 5], all_positions=True)
    pair.compare_caches()


@pytest.mark.parametrize("block_size", [1, 3, 16, 64])
def test_block_borders(rt, toy_path, block_size):
    """Prefills that end before, at and after a border (C48), then decode across it, in any order of sequences."""
    pair = Pair(rt, toy_path, block_size)
    pair.compare([15, 16, 17, 1])
    pair.compare([1, 1, 1, 14], order=(2, 0, 3, 1))
    pair.compare([1, 1, 1, 1], order=(3, 1, 0, 2))
    pair.compare([16, 0, 1, 1], order=(3, 2, 1, 0))
    pair.compare_caches()


def test_one_token_at_a_time_equals_all_at_once(rt, toy_path):
    """Decode alone, from an empty cache."""
    whole, single = Pair(rt, toy_path, block_size=4), Pair(rt, toy_path, block_size=4)
    expected = whole.cuda.forward(whole.step([9, 0, 0, 0]), whole.cache, all_positions=True)
    for t in range(9):
        got = single.cuda.forward(single.step([1, 0, 0, 0]), single.cache)[0]
        assert_close(got, expected[t], atol=TOLERANCE * np.abs(expected).max(), name=f"token {t}")


def test_c54_chunks_of_seven_one_and_three(rt, toy_path):
    """C54: the offset moves by what was fed."""
    whole, chunks = Pair(rt, toy_path), Pair(rt, toy_path)
    expected = whole.cuda.forward(whole.step([11, 0, 0, 0]), whole.cache)
    got = [chunks.cuda.forward(chunks.step([n, 0, 0, 0]), chunks.cache) for n in (7, 1, 3)][-1]
    assert_close(got, expected, atol=TOLERANCE * np.abs(expected).max())
    written = np.isfinite(rt.download(chunks.cache.keys[1])[:, :, 0, 0]).sum()
    assert written == 11


@pytest.mark.parametrize("counts", [[1, 1, 1, 1], [5, 2, 0, 3], [4, 1, 6, 1], [1, 0, 0, 0]])
def test_all_positions_and_last_ones_are_the_same(rt, toy_path, counts):
    every, last = Pair(rt, toy_path), Pair(rt, toy_path)
    step = every.step(counts)
    rows = every.cuda.forward(step, every.cache, all_positions=True)
    assert rows.shape == (sum(counts), 300)
    got = last.cuda.forward(step, last.cache)
    assert_close(got, rows[step.last_token_indices], atol=TOLERANCE * np.abs(rows).max())


def test_late_positions(pair):
    """The angles of a position that float32 would blur are computed in float64."""
    step = pair.step([40, 0, 0, 0])
    step = replace(step, positions=step.positions + 1_000_000)
    batch = make_batch(pair.cuda.rt, step, np.array([0], np.int32), pair.cuda.rotary)
    angles = step.positions[:, None] * 10_000.0 ** (-2 * np.arange(toy.HEAD // 2) / toy.HEAD)
    assert_close(pair.cuda.rt.download(batch.cos), np.cos(angles), atol=1e-6)
    assert_close(pair.cuda.rt.download(batch.sin), np.sin(angles), atol=1e-6)


def test_batches_of_a_mixed_step(pair):
    """Decode first, then the prefills, padded with copies that own no slot and write nothing."""
    pair.step([0, 6, 0, 2])
    step = pair.step([3, 1, 2, 1])
    decode, prefill = split_step(step)
    assert (decode.tolist(), prefill.tolist()) == ([1, 3], [0, 2])
    rt, batch = pair.cuda.rt, make_batch(pair.cuda.rt, step, prefill, pair.cuda.rotary)
    assert batch.tokens.tolist() == [[0, 1, 2], [4, 5, 5]]
    assert batch.real.tolist() == [[True, True, True], [True, True, False]]
    slots = rt.download(batch.slot_mapping)
    assert slots[5] == -1
    assert np.array_equal(slots[:5], step.slot_mapping[[0, 1, 2, 4, 5]])
    assert rt.download(batch.positions).tolist() == [[0, 1, 2], [0, 1, 1]]
    assert rt.download(batch.last).tolist() == [2, 1]
    assert (rt.download(batch.seq_lens).tolist(), batch.longest) == ([3, 2], 3)


def test_what_the_numpy_model_refuses_is_refused(rt, tmp_path):
    path = toy.write(tmp_path / "toy.gguf", tensors={n: t for n, t in toy.weights().items() if "1.ffn_up" not in n})
    with pytest.raises(ConfigError, match=r"ffn_up\.weight: missing"):
        CudaModel(GGUFFile(path), rt)


# Through the LLM ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def device():
    works, reason = emulator.available("fast")
    if DEVICE == "emulator" and not works:
        pytest.skip(reason)
    return DEVICE


PROMPTS = ["hello world", "a", "The quick brown fox", [5, 6, 7], "x" * 40, [299]]
GREEDY = SamplingParams(max_tokens=12, ignore_eos=True)


@pytest.mark.parametrize("options", [{}, {"max_num_seqs": 2}, {"max_num_batched_tokens": 7}], ids=str)
def test_llm_greedy_equals_the_cpu(toy_path, device, options):
    """Several prompts in company and by twos, and prompts computed in chunks."""
    expected = LLM(toy_path, device="cpu").generate(PROMPTS, GREEDY)
    got = LLM(toy_path, device=device, **options).generate(PROMPTS, GREEDY)
    assert [r.outputs for r in got] == [r.outputs for r in expected]


def test_llm_streams_and_parallel_answers_equal_the_cpus(toy_path, device):
    several = SamplingParams(n=3, seed=1, temperature=1.2, max_tokens=9, ignore_eos=True)
    cpu, other = LLM(toy_path, device="cpu"), LLM(toy_path, device=device)
    assert other.generate("hello", several)[0].outputs == cpu.generate("hello", several)[0].outputs
    streams = [llm.stream("hello world", GREEDY) for llm in (cpu, other)]
    assert list(streams[0]) == list(streams[1])
    assert streams[0].output.outputs == streams[1].output.outputs


def test_llm_c48_answers_that_cross_the_border_of_a_block(toy_path, device):
    """C48: prompts of 15, 16, 17, 31 and 32 tokens with 20 new ones, in blocks of 16."""
    prompts = [np.random.default_rng(n).integers(3, 300, n).tolist() for n in (15, 16, 17, 31, 32)]
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    expected = LLM(toy_path, device="cpu").generate(prompts, params)
    got = LLM(toy_path, device=device).generate(prompts, params)
    assert [r.outputs[0].token_ids for r in got] == [r.outputs[0].token_ids for r in expected]


# The real model -------------------------------------------------------------------------------------------------------


def greedy_cases() -> list[dict]:
    return json.loads((ORACLE / "greedy.json").read_text(encoding="utf-8"))["cases"]


@pytest.mark.real_model
def test_real_model_says_what_the_oracle_says(model_path, device):
    case = min(greedy_cases(), key=lambda case: len(case["ids"]))
    with LLM(model_path, device=device) as llm:
        out = llm.generate(case["ids"], SamplingParams(max_tokens=6, ignore_eos=True))[0].outputs[0]
    assert out.token_ids == case["float64"]["ids"][:6]


@needs_gpu
@pytest.mark.real_model
@pytest.mark.parametrize("max_num_seqs", [1, 16])
def test_real_model_greedy_continuations(model_path, device, max_num_seqs):
    """16 prompts of 1 to 400 tokens, 48 new tokens each; a flip only where float64 itself was near a tie."""
    with LLM(model_path, device=device, max_num_seqs=max_num_seqs) as llm:
        outputs = llm.generate([case["ids"] for case in greedy_cases()], SamplingParams(max_tokens=48, ignore_eos=True))
    for case, output in zip(greedy_cases(), outputs, strict=True):
        same_up_to_near_ties(output.outputs[0].token_ids, case["float64"], case["name"])


@needs_gpu
@pytest.mark.real_model
def test_real_model_logits(rt, model_path):
    """1 to 400 tokens in one prefill; then all six as one padded prefill."""
    recorded = np.load(ORACLE / "logits.npz")
    model, lengths = CudaModel(GGUFFile(model_path), rt), [1, 5, 17, 64, 129, 400]
    ids = [recorded[f"ids_{length}"].tolist() for length in lengths]
    tables = [list(range(i, 6 * 26, 6)) for i in range(6)]
    cache = DeviceKVCache(rt, model.config, 6 * 26, 16)
    single = [model.forward(make_step([ids[i]], [0], [tables[i]], 16), cache)[0] for i in range(6)]
    together = model.forward(make_step(ids, [0] * 6, tables, 16), cache)
    for i, length in enumerate(lengths):
        expected = recorded[f"ref64_{length}"]
        for logits, name in ((single[i], "alone"), (together[i], "together")):
            print(assert_close(logits, expected, atol=2e-3, why="float32 against float64", name=f"{length} {name}"))
            assert logits.argmax() == expected.argmax()
