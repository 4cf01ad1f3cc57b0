"""Reading kernel source text, and writing the C++ unit that is compiled from it."""

from __future__ import annotations

import re

COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/|\"(?:\\.|[^\"\\\n])*\"|'(?:\\.|[^'\\\n])*'", re.S)
BOUNDS = r"(?:__launch_bounds__\s*\([^)]*\)\s*)?"
KERNEL = re.compile(rf'extern\s+"C"\s+__global__\s+{BOUNDS}void\s+{BOUNDS}(\w+)\s*\(')
DYNAMIC_SHARED = re.compile(
    r"extern\s+__shared__\s+(?:(?:__align__|alignas)\s*\([^)]*\)\s*)?"
    r"(?P<type>[\w\s:]+?)\s+(?:(?:__align__|alignas)\s*\([^)]*\)\s*)?(?P<name>\w+)\s*\[\s*\]\s*;"
)


def without_comments(source: str) -> str:
    """`source` with comments blanked. Line numbers stay, string literals too."""

    def blank(match: re.Match[str]) -> str:
        text = match.group()
        return re.sub(r"[^\n]", " ", text) if text.startswith("/") else text

    return COMMENT.sub(blank, source)


def kernel_names(source: str) -> list[str]:
    """The names of the `extern "C" __global__` functions, in the order of the text."""
    return list(dict.fromkeys(KERNEL.findall(without_comments(source))))


def parameter_names(source: str, kernel: str) -> list[str]:
    """The names of a kernel's parameters, for messages: the last word of each part between commas.

    Unnamed parameters, and templates with commas, lead to a list of odd length or content; callers must bear
    that.
    """
    text = without_comments(source)
    start = next((match.end() for match in KERNEL.finditer(text) if match[1] == kernel), len(text))
    parts = text[start : text.find(")", start)].split(",")
    return [match[1] for part in parts if (match := re.search(r"(\w+)\s*$", part))]


def rewrite_dynamic_shared(source: str) -> str:
    """Turns each `extern __shared__ T s[];` into a pointer to the emulator's buffer, on the same line.

    It is the only construct of CUDA C that macros and headers cannot express: a C++ array of unknown size
        would
    need a definition elsewhere, and each kernel may give it another type.
    """

    def pointer(match: re.Match[str]) -> str:
        newlines = "\n" * match.group().count("\n")
        return f"{match['type']}* {match['name']} = ({match['type']}*)emu::dynamic_shared();{newlines}"

    return DYNAMIC_SHARED.sub(pointer, source)


def unit_text(source: str, name: str, kernels: list[str]) -> str:
    """The C++ unit: the shim, the source under its own name and line numbers, the exports of its kernels."""
    quoted = name.replace("\\", "\\\\").replace('"', '\\"')
    exports = "\n".join(f"EMU_KERNEL({kernel})" for kernel in kernels)
    body = rewrite_dynamic_shared(source)
    return f'#include "cuda_shim.h"\n#line 1 "{quoted}"\n{body}\n#line 1 "exports of {quoted}"\n{exports}\n'
