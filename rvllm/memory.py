"""What a model takes in memory, and how much context that leaves: weights, workspace, cache, worked out beforehand.

The sum needs no weights in memory: shapes and types of the tensors are enough. `LLM` makes its cache by it, `rvllm
info MODEL --device ...` prints it, and the error for a model that does not fit holds it.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from rvllm.block_pool import blocks_needed
from rvllm.config import LlamaConfig
from rvllm.cpu_model import QUERY_TILE
from rvllm.device import cuda_available, device_index, free_memory
from rvllm.half_gemm import WORKSPACE_BYTES
from rvllm.runtime import DeviceMemoryError
from rvllm.sampling import ParameterError
from rvllm.step_inputs import Limits
from rvllm.transfers import TURNS
from rvllm.variants import FUSED, HALF_CACHE, PACKED, STEP_MODELS, cache_bytes_per_block
from rvllm.workspace_model import WorkspaceModel, row_sizes

MAX_SLOTS = 2**31  # tokens of a cache; kernels count them in 32 bits
USABLE = 0.9  # of the free memory; the rest is for compiled kernels, graphs, libraries, and what loading takes
# Part of the free memory that the cache takes beyond a single context. In main memory others want some too.
CACHE_SHARE = {"cuda": 0.5, "cpu": 0.25, "emulator": 0.25}
UNKNOWN_LEFT = 4 << 30  # bytes for workspace and cache where the system does not tell what is free
LEAST_CONTEXT = 128  # tokens; a model that has no room for so many is refused
OTHER_CARD = 132  # multiprocessors of a card that is not here; few bytes depend on it
Q4_K_TILE = 384  # bytes of a tile of 16 x 32 weights: factors are unpacked; other types take what they take in a file


class MemoryBudgetError(DeviceMemoryError):
    """A model that does not fit: the sum of what it takes, what is free, and what to change."""


def context_of(config: LlamaConfig, wanted: Any) -> int:
    """The context that was asked for, or the model's own. ParameterError for more than that, or for less than 2."""
    limit = config.max_position_embeddings
    if wanted is None:
        return limit
    require_at_least_one("max_model_len", wanted)
    if not 2 <= wanted <= limit:
        raise ParameterError(f"max_model_len: found {wanted}; allowed: 2 to {limit}, the model's context")
    return int(wanted)


def require_at_least_one(name: str, value: Any) -> None:
    """ParameterError unless a limit is an integer that the kernels can count to."""
    if not isinstance(value, (int, np.integer)) or isinstance(value, bool) or not 1 <= value < MAX_SLOTS:
        raise ParameterError(f"{name}: found {value!r}; allowed: an integer of at least 1, less than {MAX_SLOTS}")


@dataclass(frozen=True)
class Wish:
    """What is asked of a model: how it runs, where, and with which limits. None: as much as the model and memory allow.

    tensors: name -> anything with `shape` and `type`, such as `GGUFFile.tensors`.
    """

    variant: str
    device: str
    config: LlamaConfig
    tensors: Mapping[str, Any]
    exact: bool = False
    block_size: int = 16
    num_blocks: int | None = None
    max_model_len: int | None = None
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    multiprocessors: int = OTHER_CARD

    def __post_init__(self) -> None:
        for name in ("block_size", "max_num_seqs", "max_num_batched_tokens"):
            require_at_least_one(name, getattr(self, name))
        context_of(self.config, self.max_model_len)

    @property
    def block_bytes(self) -> int:
        """Bytes of a cache block."""
        return cache_bytes_per_block(self.variant, self.config, self.block_size)

    @property
    def context(self) -> int:
        """Most tokens of a sequence, were there memory for them."""
        most = context_of(self.config, self.max_model_len)
        blocks = (MAX_SLOTS - 1) // self.block_size if self.num_blocks is None else self.num_blocks
        return min(most, blocks * self.block_size)


@dataclass(frozen=True)
class Plan:
    """What a model takes, in bytes, and what that leaves for the cache. free: 0 where the system does not tell."""

    wish: Wish
    free: int
    weights: int
    workspace: int
    num_blocks: int
    max_model_len: int
    limits: Limits

    @property
    def cache(self) -> int:
        """Bytes of all cache blocks."""
        return self.num_blocks * self.wish.block_bytes

    @property
    def total(self) -> int:
        """Bytes of all three."""
        return self.weights + self.workspace + self.cache

    @property
    def free_text(self) -> str:
        """What is free, in words."""
        return megabytes(self.free) if self.free else "unknown"

    def __str__(self) -> str:
        parts = f"weights {megabytes(self.weights)} + workspace {megabytes(self.workspace)}"
        blocks = f"cache {megabytes(self.cache)} ({self.num_blocks:,} blocks of {self.wish.block_size} tokens)"
        return f"{parts} + {blocks} = {megabytes(self.total)}; free: {self.free_text}"

    def rows(self) -> list[tuple[str, str, str]]:
        """The sum as a table: what, in which units, bytes."""
        blocks = f"{self.num_blocks:,} blocks of {self.wish.block_size} tokens"
        step = f"steps of up to {self.limits.max_num_tokens:,} tokens, {self.limits.max_num_seqs:,} sequences"
        return [
            ("weights", f"{len(self.wish.tensors):,} tensors", megabytes(self.weights)),
            ("workspace", step, megabytes(self.workspace)),
            ("cache", blocks, megabytes(self.cache)),
            ("all", f"max_model_len {self.max_model_len:,}", megabytes(self.total)),
        ]

    @property
    def remark(self) -> str:
        """One sentence if the context had to be made shorter than what was asked for, else empty."""
        if self.max_model_len >= self.wish.context:
            return ""
        lowered = f"max_model_len is lowered from {self.wish.context:,} to {self.max_model_len:,} on {self.wish.device}"
        return f"{lowered}, since more does not fit: {self}"


def megabytes(count: int) -> str:
    """A number of bytes for people."""
    return f"{count / 1e9:,.1f} GB" if count >= 1e10 else f"{count / 1e6:,.0f} MB"


def plan_memory(wish: Wish, free: int | None = None) -> Plan:
    """The sum for a wish, with the largest cache and context that fit. free: bytes; None: what the device says.

    A context or cache that was given is taken as it is. MemoryBudgetError where that, or by default not even a short
    context, does not fit.
    """
    free = free_memory(wish.device) if free is None else free
    plan, budget = _best(wish, free)
    if plan.total > budget:
        raise MemoryBudgetError(f"{_what_failed(plan)}: {plan}. {_advice(plan, budget)}")
    return plan


def _best(wish: Wish, free: int) -> tuple[Plan, int]:
    """What comes nearest to the wish, and the bytes that it may take."""
    weights = weight_bytes(wish.variant, wish.config, wish.tensors, wish.exact)
    given = wish.max_model_len is not None or wish.num_blocks is not None
    room = free or weights + UNKNOWN_LEFT
    budget = room if given or not free else int(room * USABLE)

    def of(num_blocks: int) -> Plan:
        length = min(num_blocks * wish.block_size, wish.context)
        limits = limits_of(wish, max(0, budget - weights), length)
        workspace = workspace_bytes(wish, limits, length)
        return Plan(wish, free, weights, workspace, wish.num_blocks or num_blocks, length, limits)

    plan = of(blocks_needed(wish.context, wish.block_size))
    if plan.total > budget and wish.max_model_len is None:
        plan = _longest(of, budget, blocks_needed(wish.context, wish.block_size))
    if wish.num_blocks is None and not plan.remark:
        plan = replace(plan, num_blocks=_cache_blocks(plan, room, budget))
    return plan, plan.total if given and not free else budget  # what can't be checked is taken at its word


def _longest(of: Callable[[int], Plan], budget: int, too_many: int) -> Plan:
    """The longest context, in blocks, that fits, by bisection; the shortest one allowed if none does."""
    fits = min(blocks_needed(LEAST_CONTEXT, of(1).wish.block_size), too_many)
    while too_many - fits > 1:
        middle = (fits + too_many) // 2
        if of(middle).total <= budget:
            fits = middle
        else:
            too_many = middle
    return of(fits)


def _cache_blocks(plan: Plan, room: int, budget: int) -> int:
    """A context's blocks; more, for max_num_seqs contexts at most, while they keep to their share of the memory."""
    wish = plan.wish
    share = min(int(room * CACHE_SHARE[wish.device.partition(":")[0]]), budget - plan.weights - plan.workspace)
    most = min(plan.num_blocks * wish.max_num_seqs, (MAX_SLOTS - 1) // wish.block_size)
    return max(plan.num_blocks, min(most, share // wish.block_bytes))


def _what_failed(plan: Plan) -> str:
    wish, name = plan.wish, f"variant {plan.wish.variant} on {plan.wish.device}"
    if wish.num_blocks is not None:
        return f"num_blocks {wish.num_blocks:,} does not fit with {name}"
    if wish.max_model_len is not None:
        return f"max_model_len {wish.max_model_len:,} does not fit with {name}"
    return f"the model does not fit with {name}, not even for a context of {plan.max_model_len:,} tokens"


def _advice(plan: Plan, budget: int) -> str:
    """What to change: only what would be enough by itself, and in any case another model."""
    wish = plan.wish
    seqs, tokens = min(8, wish.max_num_seqs), min(128, wish.max_num_batched_tokens)
    found = [_smaller_cache(plan, budget)]
    if _fits(replace(wish, max_num_seqs=seqs, max_num_batched_tokens=tokens), plan.free):
        found.append(f"max_num_seqs={seqs} with max_num_batched_tokens={tokens}")
    if wish.variant == "graph" and _fits(replace(wish, variant="fused"), plan.free):
        found.append("variant='fused', which keeps no second copy of the weights")
    found.append("a smaller model, or device='cpu'" if wish.device.startswith("cuda") else "a smaller model")
    return f"What helps: {'; '.join(filter(None, found))}"


def _smaller_cache(plan: Plan, budget: int) -> str:
    """The most that fits of the one limit that was given; empty if nothing does."""
    wish, left = plan.wish, budget - plan.weights - plan.workspace
    if wish.num_blocks is not None:
        return f"num_blocks={left // wish.block_bytes}, or fewer" if left >= wish.block_bytes else ""
    free_choice = replace(wish, max_model_len=None)
    if wish.max_model_len is None or not _fits(free_choice, plan.free):
        return ""
    return f"max_model_len={_best(free_choice, plan.free)[0].max_model_len}, or none, which takes what fits"


def _fits(wish: Wish, free: int) -> bool:
    plan, budget = _best(wish, free)
    return plan.total <= budget


def multiprocessors(device: str) -> int:
    """Of the card, of the emulator, or a guess for a card that is not here."""
    if not device.startswith("cuda"):
        return 2
    if not cuda_available():
        return OTHER_CARD
    cupy = importlib.import_module("cupy")
    return int(cupy.cuda.runtime.getDeviceProperties(device_index(device))["multiProcessorCount"])


# Weights --------------------------------------------------------------------------------------------------------------


def weight_bytes(variant: str, config: LlamaConfig, tensors: Mapping[str, Any], exact: bool = False) -> int:
    """Bytes of the weights as a variant keeps them, copies included."""
    vectors = 4 * sum(prod(t.shape) for name, t in tensors.items() if len(t.shape) == 1 and name != "rope_freqs.weight")
    matrices = {name: t for name, t in tensors.items() if len(t.shape) == 2}
    if variant not in PACKED:
        in_file = {"token_embd.weight"} if variant == "numpy" and "output.weight" in matrices else set()
        return vectors + 4 * sum(prod(t.shape) for name, t in matrices.items() if name not in in_file)
    groups = _stacked(variant, matrices)
    packed = sum(_padded(rows) * columns // 16 * _row_bytes(type_) // 32 for rows, columns, type_ in groups.values())
    if variant != "graph" or exact or config.vocab_size % 16:
        return vectors + packed
    looked_up_only = "token_embd.weight" if "output.weight" in groups else None
    halfs = sum(2 * _padded(rows) * columns for name, (rows, columns, _) in groups.items() if name != looked_up_only)
    return vectors + packed + halfs


def _padded(rows: int) -> int:
    return -(-rows // 16) * 16


def _row_bytes(type_: GGMLQuantizationType) -> int:
    """Bytes of 16 x 32 weights as a tile."""
    if type_ == GGMLQuantizationType.Q4_K:
        return Q4_K_TILE
    weights, block_bytes = GGML_QUANT_SIZES[type_]
    return 16 * 32 * block_bytes // weights


def _stacked(variant: str, matrices: Mapping[str, Any]) -> dict[str, tuple[int, int, Any]]:
    """Rows, columns and type of each matrix that a variant keeps, those that lie one below the other taken as one."""
    together = {"attn_k": "attn_q", "attn_v": "attn_q"} if variant in HALF_CACHE else {}
    together |= {"ffn_up": "ffn_gate"} if variant in FUSED else {}
    groups: dict[str, tuple[int, int, Any]] = {}
    for layer_name, tensor in sorted(matrices.items(), key=lambda item: _part(item[0]) in together):
        part = _part(layer_name)
        name = layer_name.replace(part, together.get(part, part))
        rows = groups[name][0] if name in groups else 0
        groups[name] = rows + tensor.shape[0], tensor.shape[1], tensor.type
    return groups


def _part(name: str) -> str:
    """attn_q of blk.0.attn_q.weight."""
    return name.split(".")[-2]


# Workspace ------------------------------------------------------------------------------------------------------------


def limits_of(wish: Wish, left: int, max_model_len: int) -> Limits:
    """The largest step: what was asked for, or where every token brings its whole context, what a quarter holds."""
    tokens, config = wish.max_num_batched_tokens, wish.config
    seqs, blocks = min(wish.max_num_seqs, tokens), blocks_needed(max_model_len, wish.block_size)
    if wish.variant in ("workspace", "quantised"):
        kind: type[WorkspaceModel] = STEP_MODELS[wish.variant]
        return kind.limits_for(config, left, tokens, seqs, max_model_len, wish.block_size)
    if wish.variant == "f32":
        scores = 4 * config.num_attention_heads * max_model_len * _copies(wish)
        tokens = min(tokens, max(1, left // 4 // scores))
    return Limits(tokens, min(seqs, tokens), blocks)


def workspace_bytes(wish: Wish, limits: Limits, max_model_len: int) -> int:
    """Bytes of the arrays that a step needs; of f32 and NumPy, which make them as they go, those of a long prompt."""
    if wish.variant in STEP_MODELS:
        own = _step_arrays(wish, limits)
        return _shared_arrays(wish, limits) + own + (_host_arrays(wish, limits) if wish.device == "emulator" else 0)
    config, N, S = wish.config, limits.max_num_tokens, max_model_len
    H, K, d = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    widths = 4 * config.hidden_size + 3 * (H + K) * d + 3 * config.intermediate_size
    at_once = N * _copies(wish) if wish.variant == "f32" else min(N, QUERY_TILE)
    attention = at_once * H * S + 2 * 2 * K * S * d
    return 4 * (N * widths + attention + limits.max_num_seqs * config.vocab_size)


def _copies(wish: Wish) -> int:
    """Of a product's result: the emulator's stand-in for cuBLAS computes and scales it before it puts it in place."""
    return 3 if wish.device == "emulator" else 1


def _shared_arrays(wish: Wish, limits: Limits) -> int:
    """What StepModel and StepInputs have: logits, RoPE's table, the step, parameters of sampling."""
    N, B, config = limits.capacity, limits.row_capacity, wish.config
    positions = min(config.max_position_embeddings, limits.max_blocks * wish.block_size) + 1
    step = 3 + 3 * N + 2 * B + B * limits.max_blocks
    return 4 * (B * config.vocab_size + positions * config.head_dim + step + B + 7 * B)


def _host_arrays(wish: Wish, limits: Limits) -> int:
    """Letters to the device and back, which the emulator's own memory holds."""
    N, B = limits.capacity, limits.row_capacity
    letters = 4 + 3 * N + 2 * B + 2 * B * limits.max_blocks + 7 * B + B
    queries = 2 + B + 2 * (N // 64 + B) if _is_wide(wish) else 0
    return 4 * (TURNS * (letters + queries) + B * limits.max_blocks)


def _step_arrays(wish: Wish, limits: Limits) -> int:
    if wish.variant in FUSED:
        return _fused_arrays(wish, limits)
    config, N, B = wish.config, limits.max_num_tokens, limits.max_num_seqs
    H, K, d = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    D, F = config.hidden_size, config.intermediate_size
    if wish.variant == "paged_attention":
        rows = 3 * D + 3 * F + (H + 2 * K) * d
        own = 4 * N * H * d + 4 * N + 8 * wish.multiprocessors * (H // K) * (d + 2)
    else:
        rows = sum(row_sizes(config, limits.max_blocks, limits.max_blocks * wish.block_size).values())
        own = 0
    halfs = 0 if wish.variant == "workspace" else 4 * max(N, B) * max(D, H * d, F)
    return 4 * N * rows + 8 * B * D + own + halfs


def _fused_arrays(wish: Wish, limits: Limits) -> int:
    config, N, B, blocks = wish.config, limits.capacity, limits.row_capacity, wish.multiprocessors
    H, K, d = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    D, F = config.hidden_size, config.intermediate_size
    rows = 4 * (D + (H + 2 * K) * d) + 4 * (D + H * d + F) + 4 * (D // 16 + 2 + 1)
    arrays = N * rows + 8 * blocks * B + 4 * (2 * blocks + 8 * K) * (H // K) * (d + 2)
    if not _is_wide(wish):
        return arrays
    wide = 2 * N * (_padded((H + 2 * K) * d) + 2 * F) + 4 * (2 + B + 2 * (N // 64 + B))
    return arrays + wide + (WORKSPACE_BYTES if wish.device.startswith("cuda") else 0)


def _is_wide(wish: Wish) -> bool:
    """Whether the model also has its products of halfs."""
    return wish.variant == "graph" and not wish.exact and wish.config.vocab_size % 16 == 0
