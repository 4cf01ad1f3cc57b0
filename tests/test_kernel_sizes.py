"""The table of what kernels' sizes may be (`rvllm.kernels.sizes`) beside the kernels: it names every macro and every
`static_assert`, and a wrong size does not compile."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest

from rvllm.kernels.sizes import KERNELS, SIZES, Size
from rvllm.runtime import headers_of, source_text, with_defines, without_comments

test_nvrtc = pytest.importorskip("tests.test_nvrtc", reason="cuda-bindings is for Linux")

DECLARED = re.compile(
    r"#\s*define (\w+)|\b([A-Z]\w*)(?= = )|\b(?:struct|class|bool|int) ([A-Z]\w*)|\btypedef [^;]* (\w+);"
)
ASSERT = re.compile(r'static_assert\(([^"]*)"([^"]*)"\)')
GIVEN = {"CUDA_EMULATOR", "__CUDA_ARCH__"}


def texts_of_file(file: str) -> str:
    """Without comments."""
    return without_comments(source_text(file))


def texts(name: str) -> dict[str, str]:
    """The kernel's text and those of its headers, without comments, by name of the file."""
    files = [f"{name}.cu", *headers_of(source_text(f"{name}.cu"))]
    return {file: texts_of_file(file) for file in files}


def open_macros(name: str) -> set[str]:
    """Names in capitals that neither the kernel nor one of its headers declares."""
    code = re.sub(r'"[^"]*"', "", "\n".join(texts(name).values()))
    used = set(re.findall(r"\b[A-Z][A-Z0-9_]+\b", code))
    return used - {name for names in DECLARED.findall(code) for name in names} - GIVEN


def test_every_kernel_has_an_entry() -> None:
    assert set(KERNELS) == {file.removesuffix(".cu") for file in test_nvrtc.KERNELS}
    assert set(SIZES) == {size for kernel in KERNELS.values() for size in kernel.sizes}


@pytest.mark.parametrize("name", KERNELS)
def test_every_macro_has_an_entry(name: str) -> None:
    assert set(KERNELS[name].macros) == open_macros(name)


@pytest.mark.parametrize("file", test_nvrtc.FILES)
def test_every_assertion_says_what_is_wrong(file: str) -> None:
    text = texts_of_file(file)
    assert text.count("static_assert") == len(ASSERT.findall(text))


@cache
def log_of(name: str, macro: str = "", value: Any = None, old: str = "", new: str = "") -> str:
    """What the compiler says of a kernel with good values but for this one, or this constant; empty if it compiles."""
    defines = {other: entry.good for other, entry in KERNELS[name].macros.items()} | ({macro: value} if macro else {})
    source = with_defines(source_text(f"{name}.cu"), f"{name}.cu", defines)
    with pytest.MonkeyPatch.context() as patch:
        if old:
            headers = {file: text.replace(old, new) for file, text in headers_of(source).items()}
            patch.setattr(test_nvrtc, "headers_of", lambda _: headers)
        try:
            test_nvrtc.compile_cubin(source, f"{name}.cu", "sm_80")
        except AssertionError as error:
            return str(error)
    return ""


def wrong_sizes(name: str) -> Iterator[tuple[str, str, str]]:
    """Every wrong size of a kernel, what is expected to be said of it, and what is."""
    for macro, entry in KERNELS[name].macros.items():
        for value, message in entry.wrong.items():
            yield f"{macro} {value}", message, log_of(name, macro, value)
    for (old, new), message in KERNELS[name].constants.items():
        yield new, message, log_of(name, old=old, new=new)


@pytest.mark.parametrize("name", KERNELS)
def test_sizes_that_are_wrong_do_not_compile(name: str) -> None:
    assert log_of(name) == ""
    for what, message, log in wrong_sizes(name):
        assert log, f"{what} compiles"
        assert message in log, f"{what}: {log[:600]}"


@pytest.mark.parametrize("file", test_nvrtc.FILES)
def test_every_assertion_has_a_wrong_size(file: str) -> None:
    """Of some kernel that includes the file."""
    logs = [log for name in KERNELS if file in texts(name) for _, _, log in wrong_sizes(name)]
    for condition, message in ASSERT.findall(texts_of_file(file)):
        assert any(f'"{message}"' in log and file in log for log in logs), f"{condition} {message}"


def test_values_of_a_size() -> None:
    assert Size((4, 8), 16, (0, 15)).values(3, 40) == [4, 5, 8, 9, 15, 16, 31, 32]
    assert Size((4, 8)).values(5, 8) == [5, 8]
    assert Size(modulus=3, residues=(1,)).values(1, 3) == [1]
