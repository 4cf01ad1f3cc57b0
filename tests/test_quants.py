"""Decoders: bit-equal to the gguf package in every layout, lean, and at least as fast."""

import tracemalloc
import warnings

import gguf
import numpy as np
import pytest
from gguf.constants import GGML_QUANT_SIZES
from gguf.constants import GGMLQuantizationType as Type

from rvllm.errors import RvllmError
from rvllm.gguf import GGUFFile
from rvllm.quants import DECODERS, TensorTypeError, dequantize
from tests.gguf_bytes import every_type, file

OWN = [
    Type.F32,
    Type.F16,
    Type.BF16,
    Type.Q4_0,
    Type.Q4_1,
    Type.Q5_0,
    Type.Q5_1,
    Type.Q8_0,
    Type.Q4_K,
    Type.Q5_K,
    Type.Q6_K,
]
BY_GGUF = sorted(set(gguf.quants._type_traits) - set(OWN))
BY_NOBODY = sorted(set(Type) - set(OWN) - set(BY_GGUF))
every_own_type = pytest.mark.parametrize("type_", OWN, ids=lambda t: t.name)


def random_raw(type_: Type, *shape: int, seed: int = 0) -> np.ndarray:
    """Random bytes for rows of `shape[-1]` blocks: every bit pattern, NaN and inf scales included."""
    rng = np.random.default_rng(seed)
    return rng.integers(0, 256, (*shape[:-1], shape[-1] * GGML_QUANT_SIZES[type_][1]), np.uint8)


def finite_raw(type_: Type, *shape: int) -> np.ndarray:
    """Random weights, packed; where the package can't pack the type, random bytes with every half set to 0.5."""
    rng = np.random.default_rng(1)
    block, block_bytes = GGML_QUANT_SIZES[type_]
    try:
        values = rng.standard_normal((*shape[:-1], shape[-1] * block), dtype=np.float32)
        return np.ascontiguousarray(gguf.quants.quantize(values, type_)).view(np.uint8)
    except NotImplementedError:
        raw = random_raw(type_, *shape).reshape(-1, block_bytes)
        halves = {Type.Q4_K: [0, 2], Type.Q5_K: [0, 2], Type.Q6_K: [208], Type.Q2_K: [80, 82], Type.Q3_K: [108]}
        for at in halves[type_]:
            raw[:, at : at + 2] = np.array([0.5], np.float16).view(np.uint8)
        return raw.reshape(*shape[:-1], -1)


def official(raw: np.ndarray, type_: Type) -> np.ndarray:
    with np.errstate(all="ignore"):
        return gguf.quants.dequantize(np.ascontiguousarray(raw), type_)


def assert_bits_equal(ours: np.ndarray, theirs: np.ndarray) -> None:
    """The same float32 bits; any NaN equals any other, for which of two a sum hands on is the CPU's affair."""
    assert ours.dtype == theirs.dtype == np.float32
    assert ours.shape == theirs.shape
    both_nan = np.isnan(ours) & np.isnan(theirs)
    a, b = (np.ascontiguousarray(x).view(np.uint32) for x in (ours, theirs))
    np.testing.assert_array_equal(np.where(both_nan, 0, a), np.where(both_nan, 0, b))


def filled(shape: tuple[int, ...], order: str = "C") -> np.ndarray:
    """An output full of a value that no decoder gives by chance."""
    return np.full(shape, 12345.678, np.float32, order=order)


def test_the_eleven_types_have_decoders_of_their_own():
    assert set(DECODERS) == set(OWN)


# Shapes and layouts: shapes count blocks in the last place

SHAPES = [(1,), (3,), (1, 1), (1, 7), (2, 3), (17, 1), (33, 5), (2, 3, 2), (3, 1, 5), (2, 2, 2, 2), (1, 600), (700, 9)]


@every_own_type
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_bits_equal_the_gguf_package(type_, shape):
    raw = random_raw(type_, *shape, seed=sum(shape))
    assert_bits_equal(dequantize(raw, type_), official(raw, type_))


@every_own_type
def test_every_byte_in_every_place(type_):
    """256 blocks; block b holds b + i at byte i, so each byte of a block takes every value."""
    block_bytes = GGML_QUANT_SIZES[type_][1]
    raw = (np.arange(256)[:, None] + np.arange(block_bytes)).astype(np.uint8)
    assert_bits_equal(dequantize(raw, type_), official(raw, type_))


RAW_LAYOUTS = {
    "every other row": lambda raw: np.repeat(raw, 2, axis=0)[::2],
    "rows backwards": lambda raw: raw[::-1].copy()[::-1],
    "F order": np.asfortranarray,
    "columns of a wider array": lambda raw: np.pad(raw, [(0, 0), (3, 5)])[:, 3:-5],
    "every other byte": lambda raw: np.repeat(raw, 2, axis=1)[:, ::2],
    "odd address": lambda raw: np.frombuffer(b"x" + raw.tobytes(), np.uint8, offset=1).reshape(raw.shape),
    "the same row again": lambda raw: np.broadcast_to(raw[:1], raw.shape),
}


@every_own_type
@pytest.mark.parametrize("layout", RAW_LAYOUTS)
@pytest.mark.parametrize("with_out", [False, True], ids=["new", "out"])
def test_raw_of_any_layout(type_, layout, with_out):
    raw = RAW_LAYOUTS[layout](random_raw(type_, 5, 3))
    expected = official(raw, type_)
    out = filled(expected.shape) if with_out else None
    assert_bits_equal(dequantize(raw, type_, out), expected)


OUT_LAYOUTS = {
    "C order": filled,
    "F order": lambda shape: filled(shape, "F"),
    "row slice of C": lambda shape: filled((shape[0] + 9, *shape[1:]))[4:-5],
    "row slice of F": lambda shape: filled((shape[0] + 9, *shape[1:]), "F")[4:-5],
    "every other row": lambda shape: filled((shape[0] * 2, *shape[1:]))[::2],
    "every other column": lambda shape: filled((*shape[:-1], shape[-1] * 2))[..., ::2],
    "backwards": lambda shape: filled(shape)[::-1],
    "column slice": lambda shape: filled((*shape[:-1], shape[-1] + 3))[..., 1:-2],
}


@every_own_type
@pytest.mark.parametrize("layout", OUT_LAYOUTS)
@pytest.mark.parametrize("shape", [(1, 1), (5, 3), (2, 3, 2), (3, 2, 2, 1), (700, 3)], ids=str)
def test_out_of_any_layout(type_, layout, shape):
    raw = random_raw(type_, *shape)
    expected = official(raw, type_)
    out = OUT_LAYOUTS[layout](expected.shape)
    assert dequantize(raw, type_, out) is out
    assert_bits_equal(out, expected)


@every_own_type
@pytest.mark.parametrize("step", [1, 2, -1])
def test_out_of_a_vector(type_, step):
    raw = random_raw(type_, 3)
    expected = official(raw, type_)
    out = filled((len(expected) * abs(step),))[::step]
    assert_bits_equal(dequantize(raw, type_, out), expected)


@every_own_type
def test_stacked_matrices_keep_to_their_rows(type_):
    """As the loader stacks q, k and v: each writes its own rows of one F-order matrix and nothing else."""
    parts = [random_raw(type_, rows, 3, seed=rows) for rows in (7, 300, 1)]
    stacked = filled((310, 3 * GGML_QUANT_SIZES[type_][0]), "F")
    start = 1
    for raw in parts:
        dequantize(raw, type_, stacked[start : start + len(raw)])
        start += len(raw)
    assert_bits_equal(stacked[1:309], np.concatenate([official(raw, type_) for raw in parts]))
    assert np.all(stacked[[0, -1]] == np.float32(12345.678))


@every_own_type
@pytest.mark.parametrize("change", [(1, 0), (-1, 0), (0, 1), (0, -1)], ids=["more rows", "fewer", "wider", "narrower"])
def test_out_of_another_shape_is_refused(type_, change):
    raw = random_raw(type_, 4, 3)
    rows, columns = official(raw, type_).shape
    with pytest.raises(ValueError):
        dequantize(raw, type_, filled((rows + change[0], columns + change[1])))


@every_own_type
def test_transposed_out_is_refused(type_):
    raw = random_raw(type_, 4, 3)
    with pytest.raises(ValueError):
        dequantize(raw, type_, filled(official(raw, type_).shape[::-1]))


@pytest.mark.parametrize("type_", [t for t in OWN if GGML_QUANT_SIZES[t][1] > 1], ids=lambda t: t.name)
@pytest.mark.parametrize("with_out", [False, True], ids=["new", "out"])
def test_rows_that_end_inside_a_block_are_refused(type_, with_out):
    raw = random_raw(type_, 4, 3)[:, :-1]
    with pytest.raises(ValueError):
        dequantize(raw, type_, filled((4, 3 * GGML_QUANT_SIZES[type_][0])) if with_out else None)


@every_own_type
def test_no_rows(type_):
    raw = random_raw(type_, 4, 3)[:0]
    assert dequantize(raw, type_).shape == (0, 3 * GGML_QUANT_SIZES[type_][0])


@every_own_type
def test_raw_is_never_written(type_):
    raw = random_raw(type_, 5, 3)
    raw.flags.writeable = False
    before = raw.tobytes()
    dequantize(raw, type_)
    dequantize(raw, type_, filled((5, 3 * GGML_QUANT_SIZES[type_][0]), "F"))
    assert raw.tobytes() == before


# Values

SCALES = [np.nan, np.inf, -np.inf, 0.0, -0.0, 65_504.0, -65_504.0, 6e-8, 1.0]


@every_own_type
@pytest.mark.parametrize("scale", SCALES)
def test_odd_scales_without_warnings(type_, scale):
    raw = random_raw(type_, 4, 3)
    halves = raw.view(np.float16) if type_ != Type.F32 else raw.view(np.float32)
    halves[:, ::3] = scale
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ours = dequantize(raw, type_)
        into = dequantize(raw, type_, filled(ours.shape, "F"))
    expected = official(raw, type_)
    assert_bits_equal(ours, expected)
    assert_bits_equal(into, expected)


def test_f32_without_out_is_a_view():
    raw = random_raw(Type.F32, 4, 3)
    assert np.shares_memory(dequantize(raw, Type.F32), raw)


# Half the width of a step, as a share of the largest of a block: 8 bits +-127, 5 bits 32 levels, 4 bits 16 levels.
ERRORS = {
    Type.F32: 0.0,
    Type.F16: 2**-11,
    Type.BF16: 2**-8,
    Type.Q8_0: 0.51 / 127,
    Type.Q5_0: 1.05 / 16,
    Type.Q5_1: 0.51 * 2 / 31,
    Type.Q4_0: 1.05 / 8,
    Type.Q4_1: 0.51 * 2 / 15,
}


@pytest.mark.parametrize("type_", ERRORS, ids=lambda t: t.name)
def test_error_of_packing_stays_within_a_step(type_):
    weights = np.random.default_rng(3).uniform(-1, 1, (64, 256)).astype(np.float32)
    weights[:, ::32] = 1
    weights[:, 1::32] = -1
    raw = np.ascontiguousarray(gguf.quants.quantize(weights, type_)).view(np.uint8)
    assert np.abs(dequantize(raw, type_) - weights).max() <= ERRORS[type_]


# Types beyond the eleven


@pytest.mark.parametrize("type_", BY_GGUF, ids=lambda t: t.name)
@pytest.mark.parametrize("order", ["new", "C", "F"])
@pytest.mark.parametrize("shape", [(1,), (5, 3), (2, 3, 1)], ids=str)
def test_C12_other_types_come_from_the_gguf_package(type_, order, shape):
    raw = random_raw(type_, *shape)
    expected = official(raw, type_)
    out = None if order == "new" else filled(expected.shape, order)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_bits_equal(dequantize(raw, type_, out), expected)


def test_there_are_types_of_each_sort():
    assert {Type.Q2_K, Type.Q3_K, Type.IQ4_NL} <= set(BY_GGUF)
    assert {Type.Q8_1, Type.Q8_K, Type.I8, Type.F64} <= set(BY_NOBODY)


@pytest.mark.parametrize("type_", BY_NOBODY, ids=lambda t: t.name)
@pytest.mark.parametrize("with_out", [False, True], ids=["new", "out"])
def test_C12_types_that_nobody_decodes(type_, with_out):
    out = filled((4, 3 * GGML_QUANT_SIZES[type_][0])) if with_out else None
    with pytest.raises(TensorTypeError) as caught:
        dequantize(random_raw(type_, 4, 3), type_, out)
    assert isinstance(caught.value, RvllmError)
    for word in [type_.name, *(t.name for t in OWN)]:
        assert word in str(caught.value)


def test_C12_types_side_by_side_in_one_file(tmp_path):
    table, data = every_type(rows=3)
    (tmp_path / "all.gguf").write_bytes(file(tensors=table, data=data).data)
    opened = GGUFFile(tmp_path / "all.gguf")
    decoded = [
        dequantize(opened.raw(name), info.type).shape == info.shape
        for name, info in opened.tensors.items()
        if info.type not in BY_NOBODY
    ]
    assert decoded == [True] * (len(OWN) + len(BY_GGUF))


# Memory


@every_own_type
@pytest.mark.parametrize("order", ["C", "F"])
def test_memory_of_decoding_into_out(type_, order):
    """50 MB of weights: next to nothing beside `out`."""
    block = GGML_QUANT_SIZES[type_][0]
    raw = finite_raw(type_, 1, 4096 // block).repeat(3200, axis=0)
    out = np.zeros((3200, 4096), np.float32, order=order)
    assert out.nbytes > 50_000_000
    tracemalloc.start()
    try:
        dequantize(raw, type_, out)
        assert tracemalloc.get_traced_memory()[1] < 5_000_000
    finally:
        tracemalloc.stop()
