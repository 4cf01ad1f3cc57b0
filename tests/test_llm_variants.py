"""`LLM` on part IV's models, on the emulator: the texts of the NumPy model, whatever the variant, company or cache.

Logits differ by what halfs lose; a test of its own says that no greedy choice here is near enough to a tie to show it.
"""

from __future__ import annotations

import gc
import itertools
import warnings
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type

import rvllm.llm
from rvllm import variants
from rvllm.cpu_model import CpuModel, DenseKVCache, read_config
from rvllm.device_engine import DeviceEngine
from rvllm.engine import Engine, PromptError
from rvllm.gguf import GGUFFile
from rvllm.half_cache import HalfKVCache
from rvllm.llm import LLM, ClosedError
from rvllm.outputs import CompletionOutput, RequestOutput
from rvllm.overlapped_engine import OverlappedEngine
from rvllm.sampling import ParameterError, SamplingParams
from rvllm.step import make_step
from tests import toy
from tests.fast_toy import FastShape, write_fast_toy
from tests.test_engine import check_empty

SHAPE = FastShape(layers=2, H=2, K=1, F=96)
SEED = 7  # of the toy's weights
WIDE = 16  # tokens above which "graph" takes products of halfs; 64 in earnest
PROMPTS = ["hello world", "a", [5, 6, 7], "x" * 30]
GREEDY = SamplingParams(max_tokens=8, ignore_eos=True)
WARM = [SamplingParams(temperature=1.0, seed=i, max_tokens=4, ignore_eos=True) for i in range(len(PROMPTS))]
SIZES: dict[str, Any] = {"num_blocks": 64, "max_num_seqs": 8, "max_num_batched_tokens": 64}
HALF_LIKE = 5e-3  # of the largest logit: halfs of 11 bits as keys, values, and activations of wide steps
every_variant = pytest.mark.parametrize("variant", variants.NAMES)


@pytest.fixture(scope="module", autouse=True)
def _wide_steps_begin_early() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("rvllm.fast_model.WIDE", WIDE)
        yield


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_fast_toy(tmp_path_factory.mktemp("variants") / "fast.gguf", SHAPE, seed=SEED)


@pytest.fixture(scope="module")
def narrow(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file that the fast path does not cover: heads of 16."""
    return toy.write(tmp_path_factory.mktemp("variants") / "toy.gguf")


@pytest.fixture(scope="module")
def cpu(path: Path) -> LLM:
    return LLM(path, device="cpu")


@pytest.fixture(scope="module")
def of(path: Path) -> Iterator[Callable[[str], LLM]]:
    """The LLM of a variant, opened once."""
    known: dict[str, LLM] = {}

    def find(variant: str) -> LLM:
        if variant not in known:
            known[variant] = open_llm(path, variant)
        return known[variant]

    yield find
    for llm in known.values():
        llm.close()


@pytest.fixture
def graph(of: Callable[[str], LLM]) -> Iterator[LLM]:
    """The fast path; after each test nothing is left in it."""
    llm = of("graph")
    yield llm
    check_empty(llm)


@pytest.fixture(scope="module")
def expected(cpu: LLM) -> list[list[int]]:
    return ids(cpu.generate(PROMPTS, GREEDY))


def open_llm(path: Path, variant: str | None = "graph", **changes: Any) -> LLM:
    return LLM(path, device="emulator", variant=variant, **{**SIZES, **changes})


def ids(results: list[RequestOutput]) -> list[list[int]]:
    return [out.token_ids for result in results for out in result.outputs]


def without_logprobs(out: CompletionOutput) -> tuple[int, list[int], str, str | None]:
    return out.index, out.token_ids, out.text, out.finish_reason


# The same texts -------------------------------------------------------------------------------------------------------


def test_no_greedy_choice_is_near_a_tie(cpu: LLM, expected: list[list[int]]) -> None:
    """What most tests here stand on; if a change to the toy breaks it, take another seed."""
    for prompt, out in zip(PROMPTS, expected, strict=True):
        own = cpu.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
        step = make_step([[*own, *out]], [0], [[0]], 128)
        logits = cpu.engine.model.forward(step, DenseKVCache(cpu.config, 1, 128), all_positions=True)[len(own) - 1 : -1]
        best, second = np.sort(logits, axis=1)[:, :-3:-1].T
        assert ((best - second) / np.abs(logits).max()).min() > 2 * HALF_LIKE


def test_a_long_prompt_makes_a_wide_step(of: Callable[[str], LLM], monkeypatch: pytest.MonkeyPatch) -> None:
    """And short ones do not: both kinds are in the comparisons below."""
    model, built = of("graph").engine.model, []
    monkeypatch.setattr(model, "build", lambda shape: built.append(shape) or type(model).build(model, shape))
    model._programs.clear()
    of("graph").generate([PROMPTS[3], "a"], SamplingParams(max_tokens=2, ignore_eos=True))
    assert [len(shape) for shape in built] == [5, 3]


@every_variant
def test_greedy_texts_are_those_of_the_cpu(of: Callable[[str], LLM], expected: list[list[int]], variant: str) -> None:
    llm = of(variant)
    assert ids(llm.generate(PROMPTS, GREEDY)) == expected
    check_empty(llm)


@every_variant
def test_a_variant_is_what_its_name_says(of: Callable[[str], LLM], variant: str) -> None:
    llm, engines = of(variant), {"f32": Engine, "graph": OverlappedEngine}
    assert llm.variant == variant
    assert type(llm.engine) is engines.get(variant, DeviceEngine)
    assert type(llm.engine.model).__name__ == variants.STEP_MODELS.get(variant, variants.CudaModel).__name__
    assert isinstance(llm.engine.cache, HalfKVCache) == (variant in variants.HALF_CACHE)


def test_the_numpy_model_has_no_variants(cpu: LLM) -> None:
    assert cpu.variant == "numpy"


@every_variant
def test_a_seed_draws_the_same_whatever_the_company(of: Callable[[str], LLM], variant: str) -> None:
    llm = of(variant)
    together = ids(llm.generate(PROMPTS, WARM))
    assert ids(llm.generate(PROMPTS[::-1], WARM[::-1])) == together[::-1]
    assert [ids(llm.generate(p, q))[0] for p, q in zip(PROMPTS[:2], WARM[:2], strict=True)] == together[:2]


def test_variants_that_draw_on_the_device_draw_alike(of: Callable[[str], LLM]) -> None:
    drawn = [ids(of(variant).generate(PROMPTS[:3], WARM[:3])) for variant in ("workspace", "fused", "graph")]
    assert drawn[0] == drawn[1] == drawn[2]


def test_chunks_of_prompts(path: Path, expected: list[list[int]]) -> None:
    with open_llm(path, max_num_batched_tokens=24) as llm:
        assert ids(llm.generate(PROMPTS, GREEDY)) == expected


@pytest.mark.parametrize("variant", ["workspace", "fused", "graph"])
def test_exact(path: Path, expected: list[list[int]], variant: str) -> None:
    with open_llm(path, variant, exact=True) as llm:
        assert llm.engine.model.exact
        assert not getattr(llm.engine.model, "can_be_wide", False), "products of halfs are not exact"
        assert ids(llm.generate(PROMPTS, GREEDY)) == expected


# What does not go together --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("device", "options", "words"),
    [
        ("emulator", {"variant": "fastest"}, r"variant: found 'fastest'; allowed: f32, workspace, .*, graph"),
        ("emulator", {"variant": ""}, "variant: found ''; allowed: f32"),
        ("emulator", {"variant": "numpy"}, "variant: found 'numpy'; allowed: f32"),
        ("cpu", {"variant": "graph"}, "variant: found 'graph'; allowed: None on the CPU"),
        ("cpu", {"variant": "f32"}, "variant: found 'f32'; allowed: None on the CPU"),
        *(
            ("emulator", {"variant": variant, "block_size": 8}, "not cover this: block_size 8, allowed 16")
            for variant in variants.HALF_CACHE
        ),
    ],
)
def test_a_variant_that_can_not_be(path: Path, device: str, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ParameterError, match=words):
        LLM(path, device=device, **options)


@pytest.mark.parametrize(
    ("variant", "words"),
    [
        ("quantised", "tensor token_embd.weight of type F32; allowed F16, Q4_0, Q4_1, Q8_0, Q4_K"),
        *((variant, "heads of 16, 2 to a KV head; allowed 64") for variant in variants.HALF_CACHE),
    ],
)
def test_a_file_that_the_wanted_variant_does_not_cover(narrow: Path, variant: str, words: str) -> None:
    with pytest.raises(ParameterError, match=f"variant: found '{variant}', which does not cover this: {words}"):
        open_llm(narrow, variant)


@pytest.mark.parametrize("variant", ["workspace", "quantised"])
def test_other_blocks_where_nothing_reads_pages(path: Path, expected: list[list[int]], variant: str) -> None:
    with open_llm(path, variant, block_size=8) as llm:
        assert ids(llm.generate(PROMPTS[:2], GREEDY)) == expected[:2]


def test_a_file_that_only_float32_covers(narrow: Path) -> None:
    with open_llm(narrow, "workspace") as llm, LLM(narrow, device="cpu") as cpu:
        assert ids(llm.generate(PROMPTS[:3], GREEDY)) == ids(cpu.generate(PROMPTS[:3], GREEDY))


# The default ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The emulator, with the variant that a GPU would get."""
    real = variants.choose_variant
    monkeypatch.setattr(rvllm.llm, "choose_variant", lambda wanted, _device, *rest: real(wanted, "cuda:0", *rest))


@pytest.mark.usefixtures("as_on_a_gpu")
def test_a_gpu_gets_the_fast_path_where_it_covers_the_file(path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with open_llm(path, None) as llm:
            assert llm.variant == "graph"


@pytest.mark.usefixtures("as_on_a_gpu")
def test_a_file_that_is_not_covered_runs_with_a_warning(narrow: Path) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with LLM(narrow, device="emulator", **SIZES) as llm:
            assert llm.variant == "f32"
            first, second = (ids(llm.generate(PROMPTS[:2], GREEDY)) for _ in range(2))
    assert first == second
    (remark,) = (w for w in caught if "fast path" in str(w.message))  # one for the LLM, none for what it is asked
    assert "does not cover this: heads of 16" in str(remark.message) and "variant f32" in str(remark.message)
    assert remark.filename == __file__, "it points to where the LLM was made"


def test_choices(path: Path, narrow: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine with two T4s."""
    monkeypatch.setattr(variants, "card_capability", lambda device: 75 if device.startswith("cuda") else None)
    monkeypatch.setattr(variants, "shared_memory", lambda _device: 64 << 10)
    covered, other = GGUFFile(path), GGUFFile(narrow)
    assert variants.choose_variant(None, "cpu", other, 16) == ("numpy", "")
    assert variants.choose_variant(None, "emulator", covered, 16) == ("f32", "")
    for device in ("cuda", "cuda:1"):
        assert variants.choose_variant(None, device, covered, 16) == ("graph", "")
        assert variants.choose_variant("fused", device, covered, 16) == ("fused", "")
        name, remark = variants.choose_variant(None, device, covered, 32)
        assert name == "f32" and "block_size 32, allowed 16" in remark


@pytest.mark.parametrize(("shared", "covered"), [(64 << 10, False), (227 << 10, True)])  # a T4's, an H200's
def test_a_wide_model_needs_shared_memory(
    path: Path, monkeypatch: pytest.MonkeyPatch, shared: int, covered: bool
) -> None:
    """The activations of eight tokens lie there while lm_head works."""
    monkeypatch.setattr(variants, "shared_memory", lambda _device: shared)
    file = GGUFFile(path)
    shape = {"hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128}
    reason = variants.why_not("graph", "cuda", file, replace(read_config(file), **shape), 16)
    assert reason == ("" if covered else "width 4096; lm_head has 65,536 bytes of shared memory here")


@pytest.mark.parametrize("variant", ["fused", "graph"])
@pytest.mark.parametrize(("limit", "count"), [(96, 80), (40, 33), (97, 97)])
def test_limits_between_round_numbers(tmp_path: Path, variant: str, limit: int, count: int) -> None:
    """Groups of rows end where the arrays do, not at the next power of two; a vocabulary of 301 likewise."""
    path = write_fast_toy(tmp_path / "odd.gguf", SHAPE, seed=SEED, vocab=301)
    sizes: dict[str, Any] = {"max_model_len": 32, "max_num_seqs": limit, "max_num_batched_tokens": 128}
    prompts, params = [[20 + i % 7] for i in range(count)], SamplingParams(max_tokens=2, ignore_eos=True)
    with (
        LLM(path, "cpu", num_blocks=200, **sizes) as cpu,
        LLM(path, "emulator", variant, num_blocks=200, **sizes) as llm,
    ):
        assert ids(llm.generate(prompts, params)) == ids(cpu.generate(prompts, params))


HALFS = ("paged_attention", "fused", "graph")
PACKED = ("quantised", *HALFS)


def shape(d: int, H: int, K: int, F: int = 96, **other: int) -> dict[str, int]:
    sizes = {"hidden_size": H * d, "num_attention_heads": H, "num_key_value_heads": K, "head_dim": d}
    return sizes | {"intermediate_size": F} | other


# Variants, sizes of a model, and why it is refused: each limit at its value, where it is not, and past it.
AT_THE_LIMITS: list[tuple[tuple[str, ...], dict[str, int], str]] = [
    (HALFS, shape(64, 8, 1), ""),
    (HALFS, shape(128, 8, 1), ""),
    (HALFS, shape(128, 16, 2), ""),
    (HALFS, shape(64, 9, 1), "heads of 64, 9 to a KV head; allowed 64 or 128, up to 8"),
    *((HALFS, shape(d, 8, 1), f"heads of {d}, 8 to") for d in (32, 63, 65, 96, 127, 129, 192, 256)),
    (HALFS, shape(64, 2, 1, hidden_size=160), "2 heads of 64 at width 160"),
    (HALFS, shape(64, 3, 1, hidden_size=128), "3 heads of 64 at width 128"),
    (("quantised",), shape(96, 9, 1, hidden_size=160), ""),
    (("quantised", "paged_attention"), shape(128, 64, 8, 8192), ""),
    (PACKED, shape(64, 2, 1, 8192), ""),
    (PACKED, shape(64, 2, 1, 8224), "widths (128, 8224); allowed multiples of 32 up to 8192"),
    (("quantised",), shape(64, 2, 1, hidden_size=8224), "widths (8224, 96)"),
    (PACKED, shape(64, 2, 1, 97), "widths (128, 97)"),
    (PACKED, shape(64, 2, 1, 80), "widths (128, 80)"),
    (("quantised",), shape(64, 2, 1, hidden_size=144), "widths (144, 96)"),
]


@pytest.mark.parametrize(("names", "sizes", "reason"), AT_THE_LIMITS)
def test_each_limit(path: Path, names: tuple[str, ...], sizes: dict[str, int], reason: str) -> None:
    file = GGUFFile(path)
    for name in names:
        found = variants.why_not(name, "emulator", file, replace(read_config(file), **sizes), 16)
        assert found.startswith(reason) if reason else not found, name


@pytest.mark.parametrize("block_size", [8, 15, 17, 32])
def test_pages_of_16_tokens_alone(path: Path, block_size: int) -> None:
    file = GGUFFile(path)
    reasons = {name: variants.why_not(name, "cuda", file, read_config(file), block_size) for name in variants.NAMES}
    assert {name for name, reason in reasons.items() if reason} == set(HALFS)
    assert reasons["graph"] == f"block_size {block_size}, allowed 16"


@pytest.mark.parametrize(
    ("sizes", "needed"),
    [(shape(64, 55, 11), 0), (shape(128, 28, 4), 66_048), (shape(128, 64, 8), 8 * (8192 * 2 + 64) + 8192)],
)
def test_shared_memory_to_the_byte(
    path: Path, monkeypatch: pytest.MonkeyPatch, sizes: dict[str, int], needed: int
) -> None:
    """110 k-blocks fit on every card; more need what they need."""
    file = GGUFFile(path)
    for shared, covered in ((needed, True), (needed - 1, needed == 0)):
        monkeypatch.setattr(variants, "shared_memory", lambda _device, shared=shared: shared)
        for name in ("fused", "graph"):
            assert (variants.why_not(name, "cuda", file, replace(read_config(file), **sizes), 16) == "") == covered


STACKED = ("attn_q", "attn_k", "attn_v", "ffn_gate", "ffn_up")


@pytest.mark.parametrize("part", ["attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"])
@pytest.mark.parametrize("layer", [0, 1])
def test_matrices_of_one_product_have_one_type(path: Path, part: str, layer: int) -> None:
    """One of them of another type, in any layer, is refused; a product's only matrix may have its own."""
    file = GGUFFile(path)
    changed = with_type(file, f"blk.{layer}.{part}.weight", Type.Q4_0)
    for name in PACKED:
        reason = variants.why_not(name, "cuda", changed, read_config(file), 16)
        assert reason.startswith(f"block {layer}: ") == (part in STACKED)
        assert (part in reason) == (part in STACKED)


@pytest.mark.parametrize("tensor", ["token_embd.weight", "blk.0.attn_q.weight", "blk.1.ffn_down.weight"])
def test_types_that_no_tile_has(path: Path, tensor: str) -> None:
    file = GGUFFile(path)
    for name in PACKED:
        reason = variants.why_not(name, "cuda", with_type(file, tensor, Type.Q6_K), read_config(file), 16)
        assert reason.startswith(f"tensor {tensor} of type Q6_K; allowed ")


def with_type(file: GGUFFile, tensor: str, type_: Type) -> Any:
    """What why_not reads of a file in which one tensor has this type."""
    return SimpleNamespace(tensors=file.tensors | {tensor: replace(file.tensors[tensor], type=type_)})


# All that an LLM does, on the fast path -------------------------------------------------------------------------------


def test_a_beginning_is_found_again(path: Path, cpu: LLM) -> None:
    with open_llm(path) as llm:
        shared = "the same beginning, more than two blocks of it: "
        first, second = (llm.generate(shared + end, GREEDY)[0] for end in ("one", "two"))
        again = llm.generate(shared + "one", GREEDY)[0]
        assert (first.metrics.num_cached_tokens, second.metrics.num_cached_tokens > 0) == (0, True)
        assert again.metrics.num_cached_tokens >= second.metrics.num_cached_tokens
        assert ids([first, second, again]) == ids(cpu.generate([shared + e for e in ("one", "two", "one")], GREEDY))


@pytest.mark.parametrize("params", [GREEDY, SamplingParams(max_tokens=8, ignore_eos=True, logprobs=0)])
def test_answers_that_make_room_for_others(path: Path, cpu: LLM, params: SamplingParams) -> None:
    prompts = [[10 + i] * 14 for i in range(4)]
    with open_llm(path, num_blocks=5, enable_prefix_caching=False) as llm:
        results = llm.generate(prompts, params)
        assert sum(result.metrics.num_preemptions for result in results) > 0
        check_empty(llm)
    assert ids(results) == ids(cpu.generate(prompts, params))


def test_several_answers_of_a_prompt(graph: LLM) -> None:
    params = SamplingParams(n=3, temperature=2.0, seed=4, max_tokens=6, ignore_eos=True)
    both = graph.generate(["hello", "world"], params)
    assert [out.index for out in both[0].outputs] == [0, 1, 2]
    assert len(set(map(tuple, ids(both)))) == 6
    assert ids(graph.generate("hello", params)) == ids(both)[:3]
    greedy = graph.generate("hello", SamplingParams(n=2, max_tokens=4, ignore_eos=True))[0].outputs
    assert greedy[0].token_ids == greedy[1].token_ids


def test_stop_texts_and_ids(graph: LLM, cpu: LLM) -> None:
    whole = cpu.generate("a b c", SamplingParams(max_tokens=16, ignore_eos=True))[0].outputs[0]
    middle = len(whole.text) // 2
    stops: list[dict[str, Any]] = [{"stop": whole.text[middle : middle + 2]}, {"stop_token_ids": [whole.token_ids[5]]}]
    for stop in stops:
        params = SamplingParams(max_tokens=16, ignore_eos=True, **stop)
        (got,), (wanted,) = (llm.generate(["a b c", "hello"], params)[:1] for llm in (graph, cpu))
        assert got.outputs == wanted.outputs
        assert got.outputs[0].finish_reason == "stop" and len(got.outputs[0].token_ids) < 16


HOST_SAMPLED: dict[str, dict[str, Any]] = {
    "logprobs": {"logprobs": 3},
    "repetition": {"repetition_penalty": 1.3},
    "presence and frequency": {"presence_penalty": 0.7, "frequency_penalty": 0.4},
    "bias": {"logit_bias": {7: 100.0}},
    "min_tokens": {"min_tokens": 4, "stop_token_ids": list(range(304)), "ignore_eos": False},
}


@pytest.mark.parametrize("own", HOST_SAMPLED.values(), ids=HOST_SAMPLED)
def test_what_the_host_samples_beside_what_the_device_chooses(
    graph: LLM, cpu: LLM, expected: list[list[int]], own: dict[str, Any]
) -> None:
    """The host's request ends first: the device goes on with the other one."""
    params = SamplingParams(**({"max_tokens": 5, "ignore_eos": True} | own))
    hosted, other = graph.generate(["hello", PROMPTS[0]], [params, GREEDY])
    reference = cpu.generate("hello", params)[0].outputs[0]
    assert other.outputs[0].token_ids == expected[0]
    assert without_logprobs(hosted.outputs[0]) == without_logprobs(reference)
    for got, wanted in zip(hosted.outputs[0].logprobs or [], reference.logprobs or [], strict=True):
        assert got == pytest.approx(wanted, abs=0.05), "halfs in the cache"
    assert (hosted.outputs[0].logprobs is None) == ("logprobs" not in own)


def test_a_seed_draws_the_same_where_the_host_samples(graph: LLM) -> None:
    """Logprobs send the step to the host, for this request or for another one's sake."""
    wanted = ids(graph.generate(PROMPTS[0], WARM[0]))
    with_logprobs = SamplingParams(temperature=1.0, seed=0, max_tokens=4, ignore_eos=True, logprobs=1)
    assert ids(graph.generate(PROMPTS[0], with_logprobs)) == wanted
    company = SamplingParams(max_tokens=2, ignore_eos=True, logprobs=1)
    assert ids(graph.generate([PROMPTS[0], "b"], [WARM[0], company]))[:1] == wanted


@pytest.mark.parametrize("temperature", [0, 1])
def test_a_stream_gives_what_generate_gives(graph: LLM, temperature: float) -> None:
    params = SamplingParams(temperature=temperature, seed=2, max_tokens=8)
    wanted = graph.generate("hello", params)[0]
    stream = graph.stream("hello", params)
    assert "".join(stream) == wanted.text
    assert stream.output.outputs == wanted.outputs


def test_aborting_one_of_two(graph: LLM, cpu: LLM, expected: list[list[int]]) -> None:
    """While its step is on the device: what that one says is thrown away, and its blocks go to others."""
    stopped = graph.stream("something else", SamplingParams(max_tokens=100, ignore_eos=True))
    stays = graph.stream(PROMPTS[0], GREEDY)
    seen = next(stopped) + next(stopped)
    stopped.close()
    assert (stopped.output.text, stopped.output.outputs[0].finish_reason) == (seen, "abort")
    assert "".join(stays) == cpu.tokenizer.decode(expected[0])
    assert cpu.generate("something else", SamplingParams(max_tokens=100))[0].text.startswith(seen)
    assert ids(graph.generate(PROMPTS[:2], GREEDY)) == expected[:2]


def test_an_interrupt_takes_all_requests_out(
    graph: LLM, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = itertools.count()
    step = graph.engine.step

    def interrupted() -> Any:
        if next(calls) == 3:
            raise KeyboardInterrupt
        return step()

    with monkeypatch.context() as patch:
        patch.setattr(graph.engine, "step", interrupted)
        with pytest.raises(KeyboardInterrupt):
            graph.generate(PROMPTS, GREEDY)
    check_empty(graph)
    assert ids(graph.generate(PROMPTS[:2], GREEDY)) == expected[:2]


def test_a_bad_prompt_among_good_ones(graph: LLM, expected: list[list[int]]) -> None:
    first, bad, ids_too, last = graph.generate([PROMPTS[0], [304], "", PROMPTS[1]], GREEDY)
    assert ids([first, last]) == expected[:2]
    assert isinstance(bad.error, PromptError) and "token id 304; allowed: 0 to 303" in str(bad.error)
    assert isinstance(ids_too.error, PromptError)


def test_up_to_the_last_place_of_the_context(path: Path) -> None:
    with open_llm(path, max_model_len=40) as llm, LLM(path, device="cpu", max_model_len=40) as cpu:
        params = SamplingParams(max_tokens=None, ignore_eos=True)
        for length in (39, 33):
            out = llm.generate([7] * length, params)[0].outputs[0]
            assert out == cpu.generate([7] * length, params)[0].outputs[0]
            assert (len(out.token_ids), out.finish_reason) == (40 - length, "length")


def test_a_trace_sees_every_step(path: Path) -> None:
    with open_llm(path, trace=True) as llm:
        llm.generate(PROMPTS[:2], GREEDY)
        assert llm.trace is not None and len(llm.trace.steps) >= 8


# Closing --------------------------------------------------------------------------------------------------------------


@every_variant
def test_closing_lets_go_of_everything(path: Path, variant: str) -> None:
    with open_llm(path, variant) as llm:
        stream = llm.stream("hello", SamplingParams(max_tokens=100, ignore_eos=True))
        next(stream)
        alive = [weakref.ref(llm.engine.model), weakref.ref(llm.engine.cache)]
    assert stream.output.outputs[0].finish_reason == "abort"
    with pytest.raises(ClosedError, match="closed"):
        llm.generate("a", GREEDY)
    llm.close()
    gc.collect()
    assert [ref() for ref in alive] == [None, None], "whoever still has the stream"


# Sizes ----------------------------------------------------------------------------------------------------------------


def test_a_cache_of_halfs_takes_half_the_bytes(path: Path) -> None:
    config = CpuModel(GGUFFile(path)).config
    whole, half = (variants.cache_bytes_per_block(name, config, 16) for name in ("quantised", "graph"))
    assert whole == 2 * half == 16 * 2 * 4 * SHAPE.layers * SHAPE.K * SHAPE.d


def test_more_sequences_than_the_largest_step_has_tokens(path: Path, expected: list[list[int]]) -> None:
    with open_llm(path, max_num_seqs=64, max_num_batched_tokens=3) as llm:
        assert llm.engine.scheduler.max_num_seqs <= 3
        assert ids(llm.generate(PROMPTS[:3], GREEDY)) == expected[:3]


def test_a_step_beyond_the_last_power_of_two(path: Path, cpu: LLM) -> None:
    """With 96 tokens at most a step of 80 takes arrays for 96, not for 128."""
    prompt = list(range(5, 85))
    with open_llm(path, max_num_batched_tokens=96) as llm:
        assert ids(llm.generate([prompt], GREEDY)) == ids(cpu.generate([prompt], GREEDY))
