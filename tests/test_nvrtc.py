"""Every kernel file compiles by NVRTC for a T4, an A100 and an H200, with the macros that the models launch it with.

What is compiled is what the models say: they are built on a runtime that writes down what it is asked for.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib import resources
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rvllm import fused_model, paged_attention_model, quantised_model, step_model
from rvllm.attention_shapes import LONG
from rvllm.config import LlamaConfig
from rvllm.fast_model import WIDE, FastModel
from rvllm.fused_model import FusedModel
from rvllm.half_cache import HalfKVCache
from rvllm.kv_cache import DeviceKVCache
from rvllm.paged_attention_model import PagedAttentionModel
from rvllm.quantised_model import QuantisedModel
from rvllm.runtime import SHARED_BY_DEFAULT, headers_of, include_paths, source_text, with_defines
from rvllm.step import Step, make_step
from rvllm.step_inputs import Limits
from rvllm.tile_shapes import MAX_K_BLOCKS
from rvllm.tiles import Tiles

nvrtc = pytest.importorskip("cuda.bindings.nvrtc", reason="cuda-bindings is for Linux")

FILES = sorted(f.name for f in resources.files("rvllm.kernels").iterdir() if ".cu" in f.name)
KERNELS = [name for name in FILES if name.endswith(".cu")]
Defines = dict[str, Any]


def compile_with_log(source: str, name: str, arch: str) -> tuple[bytes, str]:
    """Machine code and what the assembler says of it, or AssertionError with the compiler's log."""
    headers = headers_of(source)
    texts, names = [h.encode() for h in headers.values()], [h.encode() for h in headers]
    options = [f"--gpu-architecture={arch}", "-std=c++17", "--ptxas-options=-v", *(f"-I{p}" for p in include_paths())]
    _, program = nvrtc.nvrtcCreateProgram(source.encode(), name.encode(), len(names), texts, names)
    (status,) = nvrtc.nvrtcCompileProgram(program, len(options), [o.encode() for o in options])
    log = bytearray(nvrtc.nvrtcGetProgramLogSize(program)[1])
    nvrtc.nvrtcGetProgramLog(program, log)
    assert status == nvrtc.nvrtcResult.NVRTC_SUCCESS, log.decode()
    cubin = bytearray(nvrtc.nvrtcGetCUBINSize(program)[1])
    nvrtc.nvrtcGetCUBIN(program, cubin)
    nvrtc.nvrtcDestroyProgram(program)
    return bytes(cubin), log.decode()


def compile_cubin(source: str, name: str, arch: str) -> bytes:
    """Machine code, or AssertionError with the compiler's log."""
    return compile_with_log(source, name, arch)[0]


# What the models launch -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Card:
    """An architecture, its multiprocessors, and the shared memory that a block may ask for."""

    arch: str
    multiprocessors: int
    max_shared: int


CARDS = {c.arch: c for c in (Card("sm_75", 40, 64 << 10), Card("sm_80", 108, 163 << 10), Card("sm_90", 132, 227 << 10))}


@dataclass(frozen=True)
class Launch:
    """A kernel with its macros, and the dynamic shared memory that it is given."""

    name: str
    defines: tuple[tuple[str, Any], ...]
    shared: int


@dataclass
class Recorder:
    """A Runtime that launches nothing. Arrays are empty: the memory behind them is never touched."""

    card: Card
    launches: dict[Launch, None] = field(default_factory=dict)  # in order, each once
    is_cuda, chain = False, None

    @property
    def multiprocessors(self) -> int:
        return self.card.multiprocessors

    @property
    def max_shared(self) -> int:
        return self.card.max_shared

    def empty(self, shape: Any, dtype: Any = np.float32) -> np.ndarray:
        return np.empty(shape, dtype)

    zeros = empty

    def upload(self, array: np.ndarray) -> np.ndarray:
        return array

    def synchronize(self) -> None:
        pass

    def prepare(
        self, name: str, grid: Any, block: Any, args: Any, shared: int = 0, defines: Defines | None = None, **_: Any
    ) -> None:
        self.launches[Launch(name, tuple((defines or {}).items()), shared)] = None

    launch = prepare


def config_of(D: int, F: int, H: int, K: int, vocab: int) -> LlamaConfig:
    sizes: dict[str, Any] = {"block_count": 2, "embedding_length": D, "feed_forward_length": F, "context_length": 8192}
    sizes |= {"attention.head_count": H, "attention.head_count_kv": K, "attention.layer_norm_rms_epsilon": 1e-5}
    sizes |= {"rope.freq_base": 1e5, "rope.dimension_count": D // H, "vocab_size": vocab}
    return LlamaConfig.from_metadata({"general.architecture": "llama", **{f"llama.{k}": v for k, v in sizes.items()}})


MAIN = config_of(960, 2560, 15, 5, 49152)  # 360M
SMALL = config_of(576, 1536, 9, 3, 49152)  # 135M
WIDE_HEADS = config_of(1024, 1536, 8, 1, 1000)  # heads of 128, eight to a KV head: the most that variants allow
SEVEN_HEADS = config_of(896, 1536, 7, 1, 1000)
WIDEST = config_of(512, 32 * MAX_K_BLOCKS, 8, 4, 1000)  # the most k-blocks that a product takes


def fake_tiles(config: LlamaConfig, kind: str) -> Any:
    """`read_tiles` for matrices that exist as shapes only."""
    D, F, heads = config.hidden_size, config.intermediate_size, config.num_attention_heads * config.head_dim
    kv = config.num_key_value_heads * config.head_dim
    shapes = {"attn_q": (heads, D), "attn_k": (kv, D), "attn_v": (kv, D), "attn_output": (D, heads)}
    shapes |= {"ffn_gate": (F, D), "ffn_up": (F, D), "ffn_down": (D, F), "token_embd": (config.vocab_size, D)}

    def read(_rt: Any, _file: Any, *names: str, interleaved: bool = False) -> Tiles:
        parts = [shapes[name.split(".")[-2]] for name in names]
        rows, columns = sum(rows for rows, _ in parts), parts[0][1]
        return Tiles(np.empty((-(-rows // 16), columns // 32, 1), np.uint8), rows, columns, kind)

    return read


def step_of(tokens: int, context: int, seqs: int) -> Step:
    """A step of so many tokens, shared out evenly; the sequences have this context afterwards."""
    counts = [tokens // seqs + (i < tokens % seqs) for i in range(seqs)]
    table = list(range(-(-context // 16)))
    return make_step([[5] * n for n in counts], [context - n for n in counts], [table] * seqs, 16)


def launches_of(card: Card, kind: type, config: LlamaConfig, tile: str, steps: list[Step], exact: bool) -> list[Launch]:
    """What a model launches in these steps."""
    rt: Any = Recorder(card)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(step_model, "read_config", lambda _file: config)
        patch.setattr(step_model, "rope_table", lambda *_: np.empty((2, config.head_dim // 2, 2), np.float32))
        for module in (fused_model, paged_attention_model, quantised_model):
            patch.setattr(module, "read_tiles", fake_tiles(config, tile))
            patch.setattr(module, "load_vector", lambda *_: np.empty(config.hidden_size, np.float32))
        limits = Limits(2048, 256, 256) if issubclass(kind, FusedModel) else Limits(8, 8, 8)
        cache = DeviceKVCache if kind is QuantisedModel else HalfKVCache
        model = kind(SimpleNamespace(tensors={}), rt, cache(rt, config, 2, 16), limits, exact)
        for step in steps:
            model.program(step)
    return list(rt.launches)


def model_launches(card: Card) -> list[Launch]:
    """What is compiled: steps of all sizes of the 360M model for an H200, a few for others; every type of weights."""
    sizes = (1, 8, 16, 32, 64) if card.arch == "sm_90" else (1, 16)
    steps = [step_of(n, 100, n) for n in sizes] + [step_of(WIDE, 2 * LONG, WIDE)] * (card.arch == "sm_90")
    one, eight, wide = step_of(1, 2 * LONG, 1), step_of(8, 100, 8), [step_of(300, 400, 3), step_of(80, 2 * LONG, 80)]
    asked: list[tuple[type, LlamaConfig, str, list[Step], bool]] = [
        (FastModel, MAIN, "TileQ8_0", [*steps, *wide], False),
        (FastModel, MAIN, "TileQ8_0", steps, True),
        (FastModel, SMALL, "TileQ4_1", [one, eight, *wide], False),
        (FastModel, WIDE_HEADS, "TileQ4_0", [one, eight, *wide], False),
        (FusedModel, WIDEST, "TileQ4_K", [one], True),
        (FusedModel, WIDE_HEADS, "TileF16", [eight], True),
        (FusedModel, SEVEN_HEADS, "TileF16", [eight], False),
        (PagedAttentionModel, MAIN, "TileQ8_0", [step_of(2, 20, 2)], False),
        (QuantisedModel, SMALL, "TileQ4_1", [step_of(2, 20, 2)], False),
    ]
    return list(dict.fromkeys(launch for what in asked for launch in launches_of(card, *what)))


# Tests ----------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=CARDS)
def card(request: pytest.FixtureRequest) -> Card:
    return CARDS[request.param]


@pytest.fixture(scope="module")
def launches(card: Card) -> list[Launch]:
    return model_launches(card)


@pytest.mark.parametrize("name", [file.removesuffix(".cu") for file in KERNELS])
def test_kernel_compiles(name: str, card: Card, launches: list[Launch]) -> None:
    """And finds its shared memory; and what its loops unroll to stays in registers, but for a few."""
    asked = [launch for launch in launches if launch.name == name] or [Launch(name, (), 0)]
    for launch in asked:
        source = with_defines(source_text(f"{name}.cu"), f"{name}.cu", dict(launch.defines))
        cubin, log = compile_with_log(source, f"{name}.cu", card.arch)
        assert cubin[:4] == b"\x7fELF"
        fixed, spilled = number_before("bytes smem", log), number_before("bytes spill stores", log)
        assert fixed <= SHARED_BY_DEFAULT, launch
        assert fixed + launch.shared <= card.max_shared, launch
        assert spilled <= 200, launch


def number_before(words: str, log: str) -> int:
    """The largest number that stands before these words; 0 if there is none."""
    return max((int(n) for n in re.findall(rf"(\d+) {words}", log)), default=0)


def test_models_are_what_is_compiled(launches: list[Launch]) -> None:
    """A kernel whose text leaves macros open can't compile alone: all of them are asked for by some model."""
    open_sizes = re.compile(r"\b(TILE|WIDTH|HEAD_DIM|HI_LO|SPLITS)\b")
    open_ended = {file.removesuffix(".cu") for file in KERNELS if open_sizes.search(source_text(file))}
    assert {"qkv", "paged_attention", "prefill_attention"} <= open_ended <= {launch.name for launch in launches}


def test_what_the_emulator_accepts_and_nvrtc_does_not() -> None:
    """Why both are needed: g++ knows INFINITY."""
    with pytest.raises(AssertionError, match='identifier "INFINITY" is undefined'):
        compile_cubin('extern "C" __global__ void bad(float* x) { *x = INFINITY; }', "bad.cu", "sm_75")


@pytest.mark.parametrize("name", FILES)
def test_kernel_files_are_short_and_say_what_they_do(name: str) -> None:
    lines = source_text(name).splitlines()
    if lines[0].startswith("// Generated from"):
        lines = lines[2:]  # what the export put in front
    assert len(lines) <= 70
    header = "\n".join(line for line in lines[:14] if line.startswith("//"))
    for word in ("Launch:", "Limit:") if name.endswith(".cu") else ("block",):
        assert word in header, f"{name}: its header lacks {word!r}"
    for first, count in functions_of(lines):
        assert count <= (50 if "__global__" in first else 40), first


def functions_of(lines: list[str]) -> Iterator[tuple[str, int]]:
    """First line and number of lines of every function on the device."""
    for start, line in enumerate(lines):
        if not re.search(r"\b__(device|global)__\b", line.split("//")[0]):
            continue
        depth = 0
        for end in range(start, len(lines)):
            code = lines[end].split("//")[0]
            depth += code.count("{") - code.count("}")
            if depth == 0 and re.search(r"[;}]\s*$", code):
                break
        yield line, end - start + 1


def test_functions_of() -> None:
    text = [
        "__device__ int f() { return 1; }",
        "__device__ void g(",
        "int x) {",
        "if (x) {",
        "}",
        "}",
        "__device__ int h();",
    ]
    assert [count for _, count in functions_of(text)] == [1, 5, 1]
