"""Every kernel file compiles by NVRTC for a T4, an A100 and an H200, with the macros that the models launch it with.

What is compiled is what the models say: they are built on a runtime that writes down what it is asked for.
"""

from __future__ import annotations

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
from rvllm.runtime import headers_of, include_paths
from rvllm.step import Step, make_step
from rvllm.step_inputs import Limits
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
    is_cuda = False

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
    sizes = {"block_count": 2, "embedding_length": D, "feed_forward_length": F, "context_length": 8192}
    sizes |= {"attention.head_count": H, "attention.head_count_kv": K, "attention.layer_norm_rms_epsilon": 1e-5}
    sizes |= {"rope.freq_base": 1e5, "rope.dimension_count": D // H, "vocab_size": vocab}
    return LlamaConfig.from_metadata({"general.architecture": "llama", **{f"llama.{k}": v for k, v in sizes.items()}})


SMALL = config_of(576, 1536, 9, 3, 49152)  # 135M
MAIN = config_of(960, 2560, 15, 5, 49152)  # 360M
WIDE_HEADS = config_of(1024, 2816, 8, 1, 32000)  # heads of 128, eight to a KV head
WIDEST = config_of(8192, 8192, 64, 8, 128256)  # most k-blocks that there may be


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
    """What is compiled: steps of all sizes of the 360M model, single ones of others, every type of weights."""
    steps = [step_of(n, 100, n) for n in (1, 8, 16, 32, 64)] + [step_of(WIDE, 2 * LONG, WIDE)]
    wide = [step_of(300, 400, 3), step_of(WIDE + 1, 2 * LONG, WIDE + 1)]
    one, few = [step_of(1, 2 * LONG, 1)], [step_of(n, 100, n) for n in (8, 64)]
    asked = [
        (FastModel, MAIN, "TileQ8_0", steps + wide, False),
        (FastModel, MAIN, "TileQ8_0", steps, True),
        (FastModel, SMALL, "TileQ4_1", one + few + wide, False),
        (FastModel, WIDE_HEADS, "TileQ4_0", one + few + wide, False),
        (FusedModel, WIDEST, "TileQ4_K", one + few, True),
        (FusedModel, SMALL, "TileF16", one + few, False),
        (PagedAttentionModel, MAIN, "TileQ8_0", [step_of(2, 20, 2)], False),
        (QuantisedModel, SMALL, "TileQ4_1", [step_of(2, 20, 2)], False),
    ]
    return list(dict.fromkeys(launch for what in asked for launch in launches_of(card, *what)))
