"""The models that an LLM can run on, by name: part IV's ladder, from the plain CUDA model to the fast path.

| variant | notebook | what it changes |
|---|---|---|
| f32 | 10 | the first CUDA model: float32, cuBLAS, a launch from Python for every operation |
| workspace | 15 | fixed arrays, tokens chosen on the device |
| quantised | 16 | weights stay packed, products on the tensor cores |
| paged_attention | 17 | attention reads the cache blocks themselves, keys and values as halfs |
| fused | 18 | five kernels a layer |
| graph | 19, 20 | one launch a step; products of halfs for prompts; host and device work at the same time |
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rvllm.blas_threads import fit_blas_threads
from rvllm.config import LlamaConfig
from rvllm.cpu_model import CpuModel, read_config
from rvllm.cuda_model import CudaModel
from rvllm.device import TENSOR_CORES, card_capability, dotted, shared_memory
from rvllm.device_engine import DeviceEngine
from rvllm.engine import Engine
from rvllm.fast_model import FastModel
from rvllm.fused_model import FusedModel
from rvllm.gguf import GGUFFile
from rvllm.half_cache import PAGE, HalfKVCache, half_bytes_per_block
from rvllm.kv_cache import DeviceKVCache, PagedKVCache, bytes_per_block
from rvllm.overlapped_engine import OverlappedEngine
from rvllm.paged_attention_model import PagedAttentionModel
from rvllm.quantised_model import QuantisedModel
from rvllm.runtime import Runtime
from rvllm.sampling import ParameterError
from rvllm.step_inputs import Limits
from rvllm.tile_shapes import MAX_K_BLOCKS, head_bytes
from rvllm.tiles import TILE_NAMES
from rvllm.workspace_model import WorkspaceModel

NAMES = ("f32", "workspace", "quantised", "paged_attention", "fused", "graph")
STEP_MODELS: dict[str, Any] = {
    "workspace": WorkspaceModel,
    "quantised": QuantisedModel,
    "paged_attention": PagedAttentionModel,
    "fused": FusedModel,
    "graph": FastModel,
}
HALF_CACHE = ("paged_attention", "fused", "graph")
PACKED = ("quantised", *HALF_CACHE)
FUSED = ("fused", "graph")
LEAST_SHARED = 64 << 10  # bytes that a block may have on every card from sm_75 on


@dataclass(frozen=True)
class Sizes:
    """What memory has room for: cache blocks, and the largest step."""

    block_size: int
    num_blocks: int
    limits: Limits


@dataclass(frozen=True)
class Runner:
    """A model with its cache, the engine that drives it, and the largest step it takes."""

    name: str
    model: Any
    cache: Any
    engine: type[Engine]
    max_num_seqs: int
    max_num_batched_tokens: int


def why_not(name: str, device: str, file: GGUFFile, config: LlamaConfig, block_size: int) -> str:
    """What keeps a file from running on a variant on this device; empty if nothing does."""
    capability = card_capability(device)
    if name in PACKED and capability is not None and capability < TENSOR_CORES:
        return f"compute capability {dotted(capability)}; allowed {dotted(TENSOR_CORES)} and up, for its tensor cores"
    if name in HALF_CACHE:
        group = config.num_attention_heads // config.num_key_value_heads
        if block_size != PAGE:
            return f"block_size {block_size}, allowed {PAGE}"
        if config.head_dim not in (64, 128) or group > 8:
            return f"heads of {config.head_dim}, {group} to a KV head; allowed 64 or 128, up to 8"
        if config.num_attention_heads * config.head_dim != config.hidden_size:
            return f"{config.num_attention_heads} heads of {config.head_dim} at width {config.hidden_size}"
    if name in FUSED and not _head_fits(device, config):
        return f"width {config.hidden_size}; lm_head has {shared_memory(device):,} bytes of shared memory here"
    if name in PACKED:
        return _why_not_packed(file, config)
    return ""


def _head_fits(device: str, config: LlamaConfig) -> bool:
    needed = head_bytes(-(-config.hidden_size // 32))
    return needed <= LEAST_SHARED or needed <= shared_memory(device)


def _why_not_packed(file: GGUFFile, config: LlamaConfig) -> str:
    widths = (config.hidden_size, config.intermediate_size)
    if any(width % 32 or width > 32 * MAX_K_BLOCKS for width in widths):
        return f"widths {widths}; allowed multiples of 32 up to {32 * MAX_K_BLOCKS}"
    matrices = [info for info in file.tensors.values() if len(info.shape) == 2]
    for info in matrices:
        if info.type not in TILE_NAMES:
            allowed = ", ".join(kind.name for kind in TILE_NAMES)
            return f"tensor {info.name} of type {info.type_name}; allowed {allowed}"
    types = {info.name: info.type for info in matrices}
    for layer in range(config.num_hidden_layers):
        for parts in (("attn_q", "attn_k", "attn_v"), ("ffn_gate", "ffn_up")):
            if len({types[f"blk.{layer}.{part}.weight"] for part in parts}) > 1:
                return f"block {layer}: {', '.join(parts)} of different types; allowed one type for them"
    return ""


def choose_variant(wanted: str | None, device: str, file: GGUFFile, block_size: int) -> tuple[str, str]:
    """The variant to run, and a remark if the fast one was wanted by default and does not cover this file.

    ParameterError for a name that does not exist, is not for this device, or does not cover the file.
    """
    if device == "cpu":
        if wanted is not None:
            raise ParameterError(f"variant: found {wanted!r}; allowed: None on the CPU, which has one model only")
        return "numpy", ""
    if wanted is not None and wanted not in NAMES:
        raise ParameterError(f"variant: found {wanted!r}; allowed: {', '.join(NAMES)}")
    name = wanted or ("graph" if device.startswith("cuda") else "f32")
    reason = why_not(name, device, file, read_config(file), block_size)
    if not reason:
        return name, ""
    if wanted:
        raise ParameterError(f"variant: found {name!r}, which does not cover this: {reason}")
    return "f32", f"the fast path does not cover this: {reason}. Running the plain CUDA model (variant f32) instead"


def cache_bytes_per_block(name: str, config: LlamaConfig, block_size: int) -> int:
    """Bytes of a cache block of a variant."""
    return half_bytes_per_block(config) if name in HALF_CACHE else bytes_per_block(config, block_size)


def make_runner(name: str, device: str, file: GGUFFile, sizes: Sizes, exact: bool) -> Runner:
    """Read the weights and make cache and workspace. DeviceMemoryError if there is no room."""
    fit = sizes.limits
    limits = (fit.max_num_seqs, fit.max_num_tokens)
    if not device.startswith("cuda"):
        fit_blas_threads()
    if name == "numpy":
        cpu = CpuModel(file)
        return Runner(name, cpu, PagedKVCache(cpu.config, sizes.num_blocks, sizes.block_size), Engine, *limits)
    rt = Runtime(device, "fast")
    if name == "f32":
        cuda = CudaModel(file, rt)
        cache = DeviceKVCache(rt, cuda.config, sizes.num_blocks, sizes.block_size)
        return Runner(name, cuda, cache, Engine, *limits)
    own: Any = HalfKVCache if name in HALF_CACHE else DeviceKVCache
    store = own(rt, read_config(file), sizes.num_blocks, sizes.block_size)
    engine = OverlappedEngine if name == "graph" else DeviceEngine
    return Runner(name, STEP_MODELS[name](file, rt, store, fit, exact), store, engine, *limits)
