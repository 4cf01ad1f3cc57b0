"""Hyper-parameters and tensors of a llama: what is accepted, what is refused and in which words."""

import gc
import tracemalloc
import warnings

import gguf
import numpy as np
import pytest
from gguf.constants import GGMLQuantizationType as Type
from gguf.constants import GGUFValueType as Value

from rvllm.config import ConfigError, LlamaConfig
from rvllm.cpu_model import (
    CpuModel,
    DenseKVCache,
    RotaryEmbedding,
    adjacent_rows,
    check_tensors,
    expected_shapes,
    half_split_rows,
)
from rvllm.errors import RvllmError
from rvllm.gguf import GGUFFile
from rvllm.quants import TensorTypeError
from rvllm.step import make_step
from tests import toy
from tests.gguf_bytes import EVERY_VALUE, file, key, tensor

PROMPT = [5, 17, 200, 42, 99, 3, 250, 8]


def config(**changes) -> LlamaConfig:
    return LlamaConfig.from_metadata(toy.metadata(**changes))


def refused(*words: str, **changes) -> None:
    """The toy's metadata with these changes is refused, in words that hold these."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(ConfigError) as caught:
            config(**changes)
    for word in words:
        assert word in str(caught.value)


def logits(model: CpuModel, token_ids=PROMPT, start: int = 0) -> np.ndarray:
    """Logits [n, V] of a prompt whose first token stands at position `start` (the cache before it is zero)."""
    cache = DenseKVCache(model.config, 1, 256)
    cache.keys[:], cache.values[:] = 0, 0
    return model.forward(make_step([token_ids], [start], [[0]], 256), cache, all_positions=True)


def load(tmp_path, tensors=None, **kwargs) -> CpuModel:
    """A toy in a file of its own: the model reads its embedding from there for as long as it lives."""
    path = tmp_path / f"{len(list(tmp_path.iterdir()))}.gguf"
    return CpuModel(GGUFFile(toy.write(path, tensors=tensors, **kwargs)))


# LlamaConfig


def test_the_toy():
    assert config() == LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        vocab_size=300,
        max_position_embeddings=256,
        rms_norm_eps=1e-5,
        rope_theta=10_000.0,
    )
    assert config().group_size == 2


def test_defaults():
    assert config(llama__rope__freq_base=None).rope_theta == 10_000
    assert config(llama__attention__head_count_kv=None).num_key_value_heads == 4
    assert config(llama__attention__key_length=32).head_dim == 32
    assert config(llama__vocab_size=300).vocab_size == 300
    assert config(tokenizer__ggml__tokens=None, llama__vocab_size=77).vocab_size == 77


@pytest.mark.parametrize(
    "missing",
    [
        "llama.block_count",
        "llama.context_length",
        "llama.embedding_length",
        "llama.feed_forward_length",
        "llama.attention.head_count",
        "llama.attention.layer_norm_rms_epsilon",
        "general.architecture",
    ],
)
def test_missing_keys_are_named(missing):
    refused(missing, **{missing.replace(".", "__"): None})


def test_no_vocabulary_at_all():
    refused("llama.vocab_size", "missing", tokenizer__ggml__tokens=None)


@pytest.mark.parametrize(
    "architecture",
    [
        "qwen2",
        "qwen3",
        "phi3",
        "gemma",
        "llama4",
        "mllama",
        "",
        "LLAMA",
        "clip",
        7,
        ["llama"],
        np.array([1, 2]),
        np.array([]),
    ],
    ids=repr,
)
def test_other_architectures(architecture):
    refused("general.architecture", "'llama'", general__architecture=architecture)


CONTRADICTIONS = {
    "heads and KV heads": (["head_count", "4", "3"], {"llama__attention__head_count_kv": 3}),
    "more KV heads than heads": (["head_count", "4", "8"], {"llama__attention__head_count_kv": 8}),
    "width and heads": (
        ["embedding_length", "64", "5"],
        {"llama__attention__head_count": 5, "llama__attention__head_count_kv": 5},
    ),
    "more heads than width": (["embedding_length", "64", "128"], {"llama__attention__head_count": 128}),
    "odd head size": (["key_length", "15"], {"llama__attention__key_length": 15}),
    "head size 1": (["key_length", "1"], {"llama__attention__head_count": 64, "llama__attention__head_count_kv": 64}),
    "value length": (["value_length", "32", "16"], {"llama__attention__value_length": 32}),
    "partial rotation": (["dimension_count", "8", "16"], {"llama__rope__dimension_count": 8}),
    "vocabulary": (["vocab_size", "299", "300"], {"llama__vocab_size": 299}),
    "split": (["split.count", "2"], {"split__count": 2}),
    "experts": (["expert_count", "8"], {"llama__expert_count": 8}),
    "window": (["sliding_window", "4096"], {"llama__attention__sliding_window": 4096}),
    "rope scaling linear": (["rope.scaling.type", "linear"], {"llama__rope__scaling__type": "linear"}),
    "rope scaling yarn": (["rope.scaling.type", "yarn"], {"llama__rope__scaling__type": "yarn"}),
    "rope scale of old files": (["scale_linear", "4.0"], {"llama__rope__scale_linear": 4.0}),
    "rope factor without a type": (["rope.scaling.factor", "4.0"], {"llama__rope__scaling__factor": 4.0}),
    "windows by layer": (["sliding_window"], {"llama__attention__sliding_window": np.array([0, 4096])}),
    "experts by layer": (["expert_count"], {"llama__expert_count": np.array([8, 8])}),
    "value length by layer": (["value_length"], {"llama__attention__value_length": np.array([16, 32])}),
}


@pytest.mark.parametrize("case", CONTRADICTIONS)
def test_contradictions(case):
    words, changes = CONTRADICTIONS[case]
    refused(*words, **changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"split__count": 0},
        {"split__count": 1},
        {"llama__rope__dimension_count": 16},
        {"llama__attention__key_length": 16, "llama__attention__value_length": 16},
        {"llama__expert_count": 0},
        {"llama__rope__scaling__type": "none"},
        {"llama__rope__scale_linear": 1.0},
        {"llama__rope__scaling__factor": 1.0},
        {"general__name": "anything", "tokenizer__ggml__scores": np.zeros(3)},
    ],
    ids=str,
)
def test_harmless_keys(changes):
    assert config(**changes) == config()


@pytest.mark.parametrize(
    ("key", "values"),
    [
        ("split.count", [True, False, 1.0, "1", [1], np.array([1]), np.array([])]),
        ("llama.expert_count", [False, 0.0, "0", [0], np.array([0])]),
        ("llama.attention.sliding_window", [False, 0.0, "0"]),
        ("llama.rope.dimension_count", [16.0, "16", np.array([16])]),
        ("llama.rope.scaling.factor", [True, False, "1.0", [1.0], np.array([1.0])]),
        ("llama.rope.scale_linear", [True, "1.0"]),
        ("llama.rope.scaling.type", [False, 0, ["none"], np.array([])]),
    ],
)
def test_c100_harmless_values_of_another_type_are_named(key, values):
    for value in values:
        refused(key, "allowed: absent or", **{key.replace(".", "__"): value})


COUNTS = [
    "llama__block_count",
    "llama__context_length",
    "llama__embedding_length",
    "llama__feed_forward_length",
    "llama__attention__head_count",
    "llama__attention__head_count_kv",
    "llama__vocab_size",
]
NO_COUNTS = {
    "a float": 2.0,
    "zero": 0,
    "negative": -2,
    "bool": True,
    "text": "2",
    "NaN": float("nan"),
    "no entries": np.array([], np.int32),
    "uneven": np.array([2, 1], np.int32),
    "zeros": np.array([0, 0], np.int32),
    "negatives": np.array([-2, -2], np.int32),
    "floats": np.array([2.0, 2.0], np.float32),
    "floats that differ": np.array([2.25, 2.75], np.float32),
    "NaNs": np.array([np.nan, np.nan], np.float32),
    "bools": np.array([True, True]),
    "texts": ["2", "2"],
    "letters": ["a", "b"],
    "arrays": [np.array([2, 2]), np.array([2, 2])],
    "lists": [["2"], ["2"]],
}


@pytest.mark.parametrize("name", COUNTS)
@pytest.mark.parametrize("case", NO_COUNTS)
def test_C16_no_counts(name, case):
    refused(name.replace("__", "."), **{name: NO_COUNTS[case]})


@pytest.mark.parametrize("count", [3, 1, 5])
def test_C16_one_entry_a_layer_means_as_many_as_layers(count):
    refused("llama.attention.head_count_kv", llama__attention__head_count_kv=np.full(count, 2))


@pytest.mark.parametrize("key", ["llama.attention.layer_norm_rms_epsilon", "llama.rope.freq_base"])
@pytest.mark.parametrize(
    "value", [0.0, -1e-5, float("nan"), float("inf"), "1e-5", True, [1e-5], np.array([1e-5, 1e-5])], ids=repr
)
def test_numbers(key, value):
    refused(key, **{key.replace(".", "__"): value})


EPS = {"llama__attention__layer_norm_rms_epsilon": float(np.float32(1e-5))}  # as a file holds it
INTEGERS = [Value.UINT8, Value.INT8, Value.UINT16, Value.INT16, Value.UINT32, Value.INT32, Value.UINT64, Value.INT64]


@pytest.mark.parametrize("kind", INTEGERS, ids=lambda t: t.name)
def test_C16_counts_of_every_integer_type(tmp_path, kind):
    """As they come out of a file: block_count and the head counts, alone and as one entry a layer."""
    types = dict.fromkeys(["llama.block_count", "llama.attention.head_count", "llama.attention.head_count_kv"], kind)
    path = toy.write(tmp_path / "toy.gguf", value_types=types)
    assert LlamaConfig.from_metadata(GGUFFile(path).metadata) == config(**EPS)
    lists = file([key("llama.attention.head_count_kv", Value.ARRAY, (kind, [2, 2]))])
    (tmp_path / "lists.gguf").write_bytes(lists.data)
    array = GGUFFile(tmp_path / "lists.gguf").metadata["llama.attention.head_count_kv"]
    assert config(llama__attention__head_count_kv=array) == config()


@pytest.mark.parametrize("kind", [Value.FLOAT32, Value.FLOAT64], ids=lambda t: t.name)
def test_C16_a_float_count_is_refused(tmp_path, kind):
    path = toy.write(
        tmp_path / "toy.gguf", toy.metadata(llama__block_count=2.0), value_types={"llama.block_count": kind}
    )
    with pytest.raises(ConfigError, match=r"llama\.block_count: found 2\.0"):
        LlamaConfig.from_metadata(GGUFFile(path).metadata)


def test_C16_arrays_in_a_file(tmp_path):
    even = toy.write(tmp_path / "even.gguf", toy.metadata(llama__attention__head_count_kv=[2, 2]))
    uneven = toy.write(tmp_path / "uneven.gguf", toy.metadata(llama__attention__head_count_kv=[2, 1]))
    assert CpuModel(GGUFFile(even)).config == config(**EPS)
    with pytest.raises(ConfigError, match=r"head_count_kv: found \[2, 1\]"):
        CpuModel(GGUFFile(uneven))


@pytest.mark.parametrize("name", [*COUNTS, "general__architecture", "split__count", "llama__rope__scaling__type"])
@pytest.mark.parametrize("value", EVERY_VALUE)
def test_any_value_under_any_key_gives_a_config_or_a_named_error(tmp_path, name, value):
    (tmp_path / "one.gguf").write_bytes(file([key("k", *EVERY_VALUE[value])]).data)
    changes = {name: GGUFFile(tmp_path / "one.gguf").metadata["k"]}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        try:
            config(**changes)
        except ConfigError as error:
            assert name.replace("__", ".").split(".")[0] in str(error)  # noqa: PT017


# check_tensors


def opened(tmp_path, tensors=None, **changes) -> GGUFFile:
    return GGUFFile(toy.write(tmp_path / "toy.gguf", toy.metadata(**changes), tensors))


def assert_tensors_refused(model: GGUFFile, *words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_tensors(model, LlamaConfig.from_metadata(model.metadata))
    for word in (str(model.path), *words):
        assert word in str(caught.value)
    with pytest.raises(ConfigError):
        CpuModel(model)


def test_expected_shapes_are_the_toy():
    assert expected_shapes(config()) == {name: data.shape for name, data in toy.weights().items()}


@pytest.mark.parametrize("name", toy.weights())
def test_each_missing_tensor_is_named(tmp_path, name):
    assert_tensors_refused(opened(tmp_path, {n: t for n, t in toy.weights().items() if n != name}), name, "missing")


@pytest.mark.parametrize("name", toy.weights())
def test_each_wrong_shape_is_named(tmp_path, name):
    tensors = toy.weights()
    shape = tensors[name].shape
    tensors[name] = np.concatenate([tensors[name]] * 2)
    assert_tensors_refused(opened(tmp_path, tensors), name, str(tensors[name].shape), str(shape))


@pytest.mark.parametrize("name", ["token_embd.weight", "blk.1.attn_k.weight", "blk.0.ffn_gate.weight"])
def test_transposed_matrices_are_named(tmp_path, name):
    tensors = toy.weights()
    tensors[name] = np.ascontiguousarray(tensors[name].T)
    assert_tensors_refused(opened(tmp_path, tensors), name)


def test_one_more_dimension_is_refused(tmp_path):
    tensors = toy.weights()
    tensors["output_norm.weight"] = tensors["output_norm.weight"][None]
    assert_tensors_refused(opened(tmp_path, tensors), "output_norm.weight", "(1, 64)", "(64,)")


@pytest.mark.parametrize(
    "name",
    [
        "blk.0.attn_q.bias",
        "blk.1.attn_q_norm.weight",
        "blk.2.attn_norm.weight",
        "blk.00.attn_norm.weight",
        "blk.0.ffn_gate_inp.weight",
        "rope_factors_long.weight",
        "output.bias",
        "position_embd.weight",
        "mystery",
    ],
)
def test_tensors_that_would_be_ignored_are_refused(tmp_path, name):
    assert_tensors_refused(opened(tmp_path, toy.weights() | {name: np.ones(64, np.float32)}), name)


@pytest.mark.parametrize("blocks", [1, 3, 1000])
def test_block_count_against_the_blocks_present(tmp_path, blocks):
    word = "blk.1." if blocks == 1 else "blk.2.attn_norm.weight"
    assert_tensors_refused(opened(tmp_path, llama__block_count=blocks), word)


def test_giant_block_count_costs_no_memory(tmp_path):
    """2^18 here, for a test that can fail; a file may say 2^64 - 1."""
    model = opened(tmp_path, llama__block_count=2**18)
    parameters = LlamaConfig.from_metadata(model.metadata)
    tracemalloc.start()
    try:
        with pytest.raises(ConfigError, match=r"blk\.2\."):
            check_tensors(model, parameters)
        assert tracemalloc.get_traced_memory()[1] < 1_000_000
    finally:
        tracemalloc.stop()


def test_vocabulary_against_the_embedding(tmp_path):
    tensors = toy.weights(vocab_size=299)
    assert_tensors_refused(opened(tmp_path, tensors), "token_embd.weight", "(299, 64)", "(300, 64)")


def test_output_of_another_vocabulary(tmp_path):
    tensors = toy.weights() | {"output.weight": np.zeros((299, 64), np.float32)}
    assert_tensors_refused(opened(tmp_path, tensors), "output.weight", "(299, 64)", "(300, 64)")


def test_an_engine_names_the_file_in_every_error(tmp_path):
    """A wrong key as well as a wrong tensor: with several models about, which one was it?"""
    for i, changes in enumerate([{"llama__block_count": 0}, {"split__count": 3}, {"general__architecture": "gpt2"}]):
        path = toy.write(tmp_path / f"{i}.gguf", toy.metadata(**changes))
        with pytest.raises(ConfigError) as caught:
            CpuModel(GGUFFile(path))
        assert str(path) in str(caught.value)


# C01: tied and untied output


def test_C01_tied_output_is_the_embedding(tmp_path):
    model = load(tmp_path)
    np.testing.assert_array_equal(model.output, toy.weights()["token_embd.weight"])
    own = load(tmp_path, toy.weights() | {"output.weight": toy.weights()["token_embd.weight"]})
    np.testing.assert_array_equal(logits(model), logits(own))


def test_C01_own_output_is_used(tmp_path):
    tied = logits(load(tmp_path))
    other = np.random.default_rng(9).standard_normal((300, 64), dtype=np.float32)
    own = load(tmp_path, toy.weights() | {"output.weight": other})
    np.testing.assert_array_equal(own.output, other)
    assert np.abs(logits(own) - tied).max() > 1
    zero = load(tmp_path, toy.weights() | {"output.weight": np.zeros_like(other)})
    assert not logits(zero).any()


@pytest.mark.parametrize("type_", [Type.F32, Type.Q8_0], ids=lambda t: t.name)
def test_C01_tied_output_takes_no_second_copy(tmp_path, type_):
    """A vocabulary far larger than the rest of the model: loading holds one float32 copy of it, not two."""
    vocabulary = 40_000
    meta = toy.metadata(tokenizer__ggml__tokens=None, llama__vocab_size=vocabulary)
    for name in ("token_type", "merges"):
        meta.pop(f"tokenizer.ggml.{name}")
    tensors = toy.weights(vocab_size=vocabulary)
    path = toy.write(tmp_path / "wide.gguf", meta, tensors, {"token_embd.weight": type_})
    size = tensors.pop("token_embd.weight").nbytes
    rest = sum(t.nbytes for t in tensors.values())
    del tensors
    gc.collect()
    tracemalloc.start()
    try:
        model = CpuModel(GGUFFile(path))
        logits(model, PROMPT[:1])
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert size < peak < 1.3 * size + rest


# C02: rope_freqs.weight


def with_factors(tmp_path, factors) -> CpuModel:
    return load(tmp_path, toy.weights() | {"rope_freqs.weight": np.asarray(factors, np.float32)})


def test_C02_factors_of_one_change_nothing(tmp_path):
    plain, ones = load(tmp_path), with_factors(tmp_path, np.ones(8))
    for start in (0, 200):
        np.testing.assert_array_equal(logits(ones, start=start), logits(plain, start=start))


def test_C02_other_factors_divide_the_frequencies(tmp_path):
    """As in Llama 3.1: high frequencies stay, low ones slow down. Late positions tell."""
    factors = np.array([1, 1, 1, 2, 4, 8, 8, 8], np.float32)
    plain, scaled, by_hand = load(tmp_path), with_factors(tmp_path, factors), load(tmp_path)
    inv_freq = 10_000.0 ** (-np.arange(8) / 8) / factors
    np.testing.assert_allclose(scaled.rotary.inv_freq, inv_freq, rtol=1e-12)
    by_hand.rotary.inv_freq = inv_freq
    for start in (0, 100, 240):
        np.testing.assert_array_equal(logits(scaled, start=start), logits(by_hand, start=start))
    rotated = [m.rotary.phases(np.array([1, 240], np.int32)) for m in (plain, scaled)]
    early, late = np.abs(rotated[0] - rotated[1]).max(axis=(1, 2))
    assert early < 0.1 < 1 < late
    assert np.abs(logits(scaled, start=0) - logits(plain, start=0)).max() > 1e-6


def test_C02_phases_at_a_late_position_are_exact():
    factors = np.array([1, 1.5, 2, 8], np.float32)
    phases = RotaryEmbedding(8, 500_000.0, factors).phases(np.array([131_071], np.int32))[0, 0]
    angles = [131_071 * 500_000.0 ** (-2 * i / 8) / float(f) for i, f in enumerate(factors)]
    np.testing.assert_allclose(phases, np.exp(1j * np.array(angles)), atol=1e-6)


@pytest.mark.parametrize("shape", [(7,), (16,), (1,), (2, 4)], ids=str)
def test_C02_factors_of_another_shape(tmp_path, shape):
    tensors = toy.weights() | {"rope_freqs.weight": np.ones(shape, np.float32)}
    assert_tensors_refused(opened(tmp_path, tensors), "rope_freqs.weight", str(shape), "(8,)")


@pytest.mark.parametrize("value", [0.0, np.nan, np.inf, -1.0])
def test_C02_factors_that_are_no_divisors(tmp_path, value):
    factors = np.ones(8)
    factors[3] = value
    with pytest.raises(ConfigError, match=r"rope_freqs\.weight"):
        with_factors(tmp_path, factors)


# C04: the row order of Q and K


def numbered(rows: int) -> np.ndarray:
    """Row r holds r everywhere."""
    return np.repeat(np.arange(rows, dtype=np.float32)[:, None], toy.D, axis=1)


def test_C04_file_rows_in_the_order_of_hugging_face(tmp_path):
    """K heads, not heads: rows 0, 2, ... 14, 1, 3, ... 15 of each KV head."""
    tensors = toy.weights() | {"blk.0.attn_k.weight": numbered(32)}
    raw = GGUFFile(toy.write(tmp_path / "k.gguf", tensors=tensors)).raw("blk.0.attn_k.weight").view(np.float32)
    head = [*range(0, 16, 2), *range(1, 16, 2)]
    assert half_split_rows(raw, toy.K)[:, 0].tolist() == [*head, *(16 + r for r in head)]
    assert adjacent_rows(half_split_rows(raw, toy.K), toy.K).tolist() == raw.tolist()


@pytest.mark.parametrize("heads", [1, 2, 3, 4, 9])
@pytest.mark.parametrize("d", [2, 4, 16, 64])
def test_C04_round_trip(heads, d):
    weight = numbered(heads * d)
    np.testing.assert_array_equal(adjacent_rows(half_split_rows(weight, heads), heads), weight)
    np.testing.assert_array_equal(half_split_rows(adjacent_rows(weight, heads), heads), weight)
    pairs = half_split_rows(weight, heads)[:, 0].reshape(heads, 2, d // 2)
    np.testing.assert_array_equal(pairs[:, 1], pairs[:, 0] + 1)  # pair i: rows i and i + d/2, adjacent in the file


def test_C04_the_converter_does_the_same():
    """llama.cpp's convert_hf_to_gguf.py: reshape(n_head, 2, d/2, in).swapaxes(1, 2)."""
    weight = np.random.default_rng(0).standard_normal((32, 64), dtype=np.float32)
    converted = weight.reshape(2, 2, 32 // 2 // 2, 64).swapaxes(1, 2).reshape(weight.shape)
    np.testing.assert_array_equal(adjacent_rows(weight, 2), converted)


# C12: types tensor by tensor

MIXED = {
    "token_embd.weight": Type.Q8_0,
    "blk.0.attn_q.weight": Type.F16,
    "blk.0.attn_k.weight": Type.BF16,
    "blk.0.attn_v.weight": Type.Q5_0,
    "blk.0.attn_output.weight": Type.Q5_1,
    "blk.0.ffn_gate.weight": Type.Q4_0,
    "blk.0.ffn_up.weight": Type.Q4_1,
    "blk.1.ffn_down.weight": Type.Q8_0,
}


def test_C12_types_side_by_side(tmp_path):
    model = load(tmp_path, types=MIXED)
    tensors = toy.weights()
    for name, type_ in MIXED.items():
        tensors[name] = gguf.quants.dequantize(gguf.quants.quantize(tensors[name], type_), type_)
    np.testing.assert_array_equal(logits(model), logits(load(tmp_path, tensors)))


@pytest.mark.parametrize(
    "name", ["token_embd.weight", "output_norm.weight", "blk.1.attn_norm.weight", "blk.0.ffn_up.weight"]
)
@pytest.mark.parametrize("type_", [Type.I32, Type.I8], ids=lambda t: t.name)
def test_C12_known_but_unsupported(tmp_path, name, type_):
    """The error names file, tensor, type and what is supported; whichever tensor it is."""
    tensors = toy.weights()
    tensors[name] = tensors[name].astype({Type.I32: np.int32, Type.I8: np.int8}[type_])
    path = toy.write(tmp_path / "toy.gguf", tensors=tensors)
    with pytest.raises(RvllmError) as caught:
        CpuModel(GGUFFile(path))
    assert isinstance(caught.value, (TensorTypeError, ConfigError))
    for word in (str(path), name, type_.name, "Q4_1", "Q6_K"):
        assert word in str(caught.value)


def test_C12_unknown_type_names_the_tensor(tmp_path):
    (tmp_path / "t.gguf").write_bytes(file(tensors=[tensor("blk.0.attn_q.weight", [32], 99)], data=bytes(128)).data)
    with pytest.raises(RvllmError, match=r"blk\.0\.attn_q\.weight: found tensor type 99; allowed: .*Q4_1"):
        GGUFFile(tmp_path / "t.gguf")
