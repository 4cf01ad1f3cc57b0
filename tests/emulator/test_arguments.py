"""What `launch` accepts as arguments, and what it says about the rest."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rvllm.emulator import KernelArgumentError, LaunchConfigError
from rvllm.emulator.arguments import parse_types

from .conftest import load

X, Y = np.arange(8, dtype=np.float32), np.zeros(8, np.float32)


def test_signature() -> None:
    module = load("arguments")
    assert module.kernels == ["every_type", "copy", "pairs", "nothing"]
    assert module.signature("copy") == ["const float*", "float*", "int"]
    assert module.signature("nothing") == []
    assert module.signature("pairs") == ["const Pair*", "float4*", "const void*"]
    small = ["bool", "signed char", "unsigned char", "short", "unsigned short"]
    large = ["int", "unsigned int", "long long", "unsigned long long", "float", "double"]
    assert module.signature("every_type") == [*small, *large, "Pair", "double*"]


@pytest.mark.parametrize(
    "text,want",
    [
        ("[with P = {const float*, short unsigned int}]", ["const float*", "unsigned short"]),
        ("[P = <const float *, unsigned short>]", ["const float*", "unsigned short"]),
        (
            "[with P = {Pair<int, float>*, volatile unsigned int*}]",
            ["Pair<int, float>*", "volatile unsigned int*"],
        ),
        ("[P = <>]", []),
        ("[with P = {}]", []),
    ],
)
def test_parse_types_of_both_compilers(text: str, want: list[str]) -> None:
    assert parse_types(f"const char *emu::parameter_types(void (*)(P...)) {text}") == want


def test_every_type() -> None:
    pair = np.array((0.5, 3), np.dtype([("a", "f4"), ("b", "i4")]))[()]
    values: list[Any] = [
        True,
        -128,
        255,
        -32768,
        65535,
        -(2**31),
        2**32 - 1,
        -(2**63),
        2**63,
        1e-5,
        1e-300,
        pair,
    ]
    out = np.zeros(12)
    load("arguments").launch("every_type", 1, 1, [*values, out])
    want = [float(v) for v in values[:9]] + [float(np.float32(1e-5)), 1e-300, 3.5]
    assert out.tolist() == want


@pytest.mark.parametrize("n", [8, np.int64(8), np.uint8(8), np.int32(8)])
def test_whole_numbers_become_the_declared_type(n: Any) -> None:
    y = np.zeros(8, np.float32)
    load("arguments").launch("copy", 1, 8, [X, y, n])
    assert (y == X).all()


@given(st.integers(-(2**40), 2**40))
def test_ints_pass_exactly_if_in_range(n: int) -> None:
    out = np.zeros(12)
    args = [0, 0, 0, 0, 0, n, 0, 0, 0, 0, 0, bytes(8), out]
    if -(2**31) <= n < 2**31:
        load("arguments").launch("every_type", 1, 1, args)
        assert out[5] == n
    else:
        with pytest.raises(KernelArgumentError):
            load("arguments").launch("every_type", 1, 1, args)


@given(st.floats(width=64))
def test_floats_round_as_numpy_does(value: float) -> None:
    out = np.zeros(12)
    args = [0, 0, 0, 0, 0, 0, 0, 0, 0, value, np.float64(value), bytes(8), out]
    load("arguments").launch("every_type", 1, 1, args)
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(out[9:11], [np.float32(value), value])


BAD: list[tuple[int, str, Any, str]] = [
    (0, "const float*", X.astype(np.float64), "array of float64 and shape (8,)"),
    (1, "float*", np.zeros(16, np.float32)[::2], "not C-contiguous"),
    (0, "const float*", [1.0, 2.0], "list"),
    (0, "const float*", 5, "int 5"),
    (0, "const float*", X.astype(">f4"), "array of >f4"),
    (2, "int", 8.0, "float 8.0"),
    (2, "int", np.float32(8), "float32"),
    (2, "int", 2**31, "int 2147483648"),
    (2, "int", "8", "str '8'"),
    (2, "int", None, "NoneType"),
    (2, "int", np.array([8]), "array of int64"),
]


@pytest.mark.parametrize("index,c_type,value,found", BAD)
def test_wrong_argument(index: int, c_type: str, value: Any, found: str) -> None:
    args: list[Any] = [X, Y, 8]
    args[index] = value
    with pytest.raises(KernelArgumentError) as caught:
        load("arguments").launch("copy", 1, 8, args)
    error = caught.value
    assert (error.kernel, error.index, error.expected) == ("copy", index, c_type)
    assert found in error.found and f"argument {index} is declared {c_type}, got" in str(error)
    assert isinstance(error, TypeError)


def test_wrong_count() -> None:
    with pytest.raises(KernelArgumentError, match=r"copy takes \(const float\*, float\*, int\), got 2 arguments"):
        load("arguments").launch("copy", 1, 8, [X, Y])


def test_struct_and_vector_pointers_take_any_dtype_of_whole_size() -> None:
    pairs = np.zeros(3, np.dtype([("a", "f4"), ("b", "i4")]))
    pairs[0] = (1.5, 2)
    y = np.zeros(4, np.float32)
    load("arguments").launch("pairs", 1, 1, [pairs, y, None])
    load("arguments").launch("pairs", 1, 1, [pairs.view(np.uint8), y, X])
    assert y[0] == 3.5
    with pytest.raises(KernelArgumentError, match="float4"):
        load("arguments").launch("pairs", 1, 1, [pairs, np.zeros(5, np.float32), None])
    with pytest.raises(KernelArgumentError, match="Pair"):
        load("arguments").launch("every_type", 1, 1, [0] * 9 + [0.0, 0.0, bytes(7), np.zeros(12)])


@pytest.mark.parametrize(
    "grid,block,shared",
    [
        (0, 8, 0),
        (1, 0, 0),
        (1, 1025, 0),
        (1, (32, 33), 0),
        (1, (1, 1, 65), 0),
        ((1, 65536), 1, 0),
        (1, 1, 1 << 20),
    ],
)
def test_sizes_that_no_gpu_accepts(grid: Any, block: Any, shared: int) -> None:
    with pytest.raises(LaunchConfigError):
        load("arguments").launch("copy", grid, block, [X, Y, 8], shared=shared)


def test_unknown_kernel() -> None:
    with pytest.raises(LaunchConfigError, match=r"arguments\.cu has no kernel 'commented_out'"):
        load("arguments").launch("commented_out", 1, 1, [])
