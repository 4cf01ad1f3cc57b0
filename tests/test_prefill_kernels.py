"""The small kernels of the prefill path and its attention against float64: odd lengths, chunks, shuffled tables.

With RVLLM_TEST_DEVICE=cuda the same tests run on a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from rvllm.runtime import Runtime, source_text, with_defines
from rvllm.testing import assert_close

PAGE, TILE = 16, 64
RNG = np.random.default_rng(0)
HALF = "a result is rounded to half, 11 bits"


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def halfs(*shape: int) -> np.ndarray:
    return RNG.standard_normal(shape, dtype=np.float32).astype(np.float16)


@pytest.mark.parametrize("gather", [0, 1])
@pytest.mark.parametrize("width", [32, 96, 576, 960, 2080])
def test_rmsnorm_half(device: Runtime, width: int, gather: int) -> None:
    x, gain = RNG.standard_normal((7, width), dtype=np.float32), RNG.uniform(0.5, 1.5, width).astype(np.float32)
    x *= np.array([1, 22_500, 1e-4, 0, 30, 1, 1], np.float32)[:, None]  # the real residual passes 20,000
    x[4] = 0
    x[4, 3] = 22_500  # the largest that a normalised value can be: sqrt(width)
    rows, count = ints(5, 1, 4, 4, 3), 5
    out = device.upload(np.full((8, width), 7, np.float16))
    args = [device.upload(x), device.upload(gain), device.upload(rows), device.upload(ints(count)), out, 1e-5]
    device.launch("rmsnorm_half", 8, 128, args, defines={"WIDTH": width, "GATHER": gather})
    wide = x[rows if gather else slice(count)].astype(np.float64)
    expected = wide / np.sqrt((wide**2).mean(axis=1, keepdims=True) + 1e-5) * gain
    got = device.download(out)
    assert_close(got[:count], expected, rtol=6e-4, atol=1e-7, why=HALF)
    assert (got[count:] == 7).all(), "rows past num_rows were written"


@pytest.mark.parametrize("width", [8, 96, 1536])
def test_silu_mul_half(device: Runtime, width: int) -> None:
    gate_up = halfs(5, width // 8, 2, 8) / np.float16(4)  # a sixteenth of 8 gates, of their 8 ups, and so on
    gate_up[0, 0] = [[-340, 340, -0.0, 0.0, -5.5, 5.5, 65504, -65504], [1, 10, 1, 1, 4000, -3, 0.05, 65504]]
    act = device.upload(np.full((5, width), 7, np.float16))
    grid = -(-5 * (width // 8) // 64)
    device.launch("silu_mul_half", grid, 64, [device.upload(gate_up), act, device.upload(ints(3, 1)), width])
    gate, up = (gate_up[:3, :, i].reshape(3, width).astype(np.float64) * 16 for i in (0, 1))
    with np.errstate(over="ignore"):
        expected = gate / (1 + np.exp(-gate)) * up / 16
    got = device.download(act)
    assert_close(got[:3], expected, rtol=6e-4, atol=6e-8, why=f"{HALF}; subnormals are 6e-8 apart")
    assert (got[3:] == 7).all(), "rows past counts[0] were written"


@dataclass
class Chunks:
    """A step: of each sequence (tokens in the cache before it, tokens in it), on shuffled blocks."""

    parts: list[tuple[int, int]]
    positions: np.ndarray
    owners: np.ndarray
    tables: np.ndarray
    tiles: np.ndarray
    num_blocks: int

    @property
    def counts(self) -> np.ndarray:
        return ints(len(self.positions), len(self.parts))


def step_of(parts: list[tuple[int, int]]) -> Chunks:
    positions = np.concatenate([np.arange(old, old + new) for old, new in parts]).astype(np.int32)
    owners = np.repeat(np.arange(len(parts)), [new for _, new in parts]).astype(np.int32)
    width = max(-(-sum(part) // PAGE) for part in parts) + 1
    tables = (RNG.permutation(len(parts) * width) + 1).astype(np.int32).reshape(len(parts), width)
    starts = np.cumsum([0, *(new for _, new in parts)])
    tiles = [(starts[b] + i, min(TILE, new - i)) for b, (_, new) in enumerate(parts) for i in range(0, new, TILE)]
    return Chunks(parts, positions, owners, tables, np.array(tiles, np.int32), tables.size + 1)


def filled(chunks: Chunks, K: int, d: int) -> tuple[np.ndarray, list[np.ndarray], list[np.ndarray]]:
    """Pages with keys and values of all tokens, [n, K, d] for each sequence; unused cells hold NaN."""
    pages = np.full((chunks.num_blocks, 2, K, PAGE * d), np.nan, np.float16)
    keys = [halfs(sum(part), K, d) for part in chunks.parts]
    values = [halfs(sum(part), K, d) for part in chunks.parts]
    for b in range(len(keys)):
        put(pages, chunks.tables[b], np.arange(len(keys[b])), keys[b], values[b])
    return pages, keys, values


def put(pages: np.ndarray, table: np.ndarray, positions: np.ndarray, keys: np.ndarray, values: np.ndarray) -> None:
    """Write keys and values [n, K, d] into the cells of their positions."""
    _, _, K, cells = pages.shape
    by_token = pages[:, 0].reshape(-1, K, PAGE, cells // PAGE)
    by_feature = pages[:, 1].reshape(-1, K, cells // PAGE, PAGE)
    for p, key, value in zip(positions, keys, values, strict=True):
        by_token[table[p // PAGE], :, p % PAGE] = key
        by_feature[table[p // PAGE], :, :, p % PAGE] = value
    pages[:, 0], pages[:, 1] = by_token.reshape(-1, K, cells), by_feature.reshape(-1, K, cells)


@pytest.mark.parametrize(("G", "K", "d"), [(1, 2, 64), (3, 5, 64), (8, 1, 128)])
@pytest.mark.parametrize("parts", [[(0, 1)], [(5, 20), (0, 16), (31, 2)], [(17, 33), (15, 1), (0, 3)]])
def test_rope_and_store(device: Runtime, parts: list[tuple[int, int]], G: int, K: int, d: int) -> None:
    chunks, H, longest = step_of(parts), G * K, 64
    N, spare = len(chunks.positions), 3
    qkv = halfs(N + spare, H + 2 * K, d) * np.float16(20)
    angles = RNG.uniform(0, 2 * np.pi, (longest, d // 2))
    table = np.stack([np.cos(angles), np.sin(angles)], axis=-1).astype(np.float32)
    pages = np.full((chunks.num_blocks, 2, K, PAGE * d), 300, np.float16)
    on_device, stored = device.upload(qkv), device.upload(pages)
    per_token = (chunks.positions, chunks.owners)
    padded = [np.concatenate([a, np.full(spare, 2**30, np.int32)]) for a in per_token]  # nobody may follow these
    args = [on_device, device.upload(table), stored, *map(device.upload, padded), device.upload(chunks.tables)]
    args += [device.upload(chunks.counts), chunks.tables.shape[1]]
    octets = (H + 2 * K) * d // 8
    grid = (-(-octets // 8), -(-(N + spare) // 16))
    device.launch("rope_and_store", grid, 128, args, defines={"HEAD_DIM": d, "GROUP": G, "KV_HEADS": K})
    pairs = qkv[:N, : H + K].astype(np.float64).reshape(N, H + K, d // 2, 2)
    c, s = np.moveaxis(table[chunks.positions].astype(np.float64), -1, 0)[:, :, None]
    turned = np.stack([pairs[..., 0] * c - pairs[..., 1] * s, pairs[..., 1] * c + pairs[..., 0] * s], -1)
    got = device.download(on_device)
    why = f"{HALF}; a difference of two products of up to 80"
    assert_close(got[:N, : H + K], turned.reshape(N, H + K, d), rtol=6e-4, atol=2e-5, why=why)
    assert np.array_equal(got[:N, H + K :], qkv[:N, H + K :]) and np.array_equal(got[N:], qkv[N:])
    for b in range(len(parts)):
        mine = got[:N][chunks.owners == b]
        put(pages, chunks.tables[b], chunks.positions[chunks.owners == b], mine[:, H : H + K], mine[:, H + K :])
    assert np.array_equal(device.download(stored), pages), "a cell differs, or one that is not of the step changed"


def attention(chunks: Chunks, q: np.ndarray, keys: list[np.ndarray], values: list[np.ndarray]) -> np.ndarray:
    """Causal attention in float64: q [N, H, d] -> [N, H, d]."""
    out = np.empty(q.shape)
    for n, (b, position) in enumerate(zip(chunks.owners, chunks.positions, strict=True)):
        k, v = (a[b][: position + 1].astype(np.float64).swapaxes(0, 1) for a in (keys, values))
        K, _, d = k.shape
        scores = q[n].astype(np.float64).reshape(K, -1, d) @ k.swapaxes(1, 2) * d**-0.5
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        out[n] = (weights / weights.sum(axis=-1, keepdims=True) @ v).reshape(-1, d)
    return out


def attend(rt: Runtime, chunks: Chunks, q: np.ndarray, pages: np.ndarray) -> np.ndarray:
    """Run prefill_attention; keys and values in qkv are NaN, since it may read them from the pages only."""
    (N, H, d), K = q.shape, pages.shape[2]
    qkv = np.concatenate([q, np.full((N, 2 * K, d), np.nan, np.float16)], axis=1)
    T = len(chunks.tiles)
    tiles = np.concatenate([chunks.tiles, np.full((2, 2), 2**30, np.int32)])  # the bucket is larger than the step
    out = rt.upload(np.full((N + 1, H * d), 7, np.float16))
    args = [qkv, pages, tiles, ints(T), chunks.positions, chunks.owners, chunks.tables]
    args = [*map(rt.upload, args), out, chunks.tables.shape[1]]
    defines = {"HEAD_DIM": d, "GROUP": H // K, "KV_HEADS": K}
    rt.launch("prefill_attention", (H, T + 2), 128, args, defines=defines)
    got = rt.download(out)
    assert (got[N] == 7).all(), "a row past the step was written"
    return got[:N].reshape(N, H, d)


ATTENTION = "weights and results are rounded to half: 5e-4 of values of up to 4"


@pytest.mark.parametrize(("G", "K", "d"), [(1, 2, 64), (3, 1, 64), (8, 1, 128), (1, 1, 128)])
@pytest.mark.parametrize(
    "parts", [[(0, 1)], [(0, 15), (0, 16), (0, 17)], [(5, 1), (40, 3), (64, 17), (15, 16)]], ids=str
)
def test_attention(device: Runtime, parts: list[tuple[int, int]], G: int, K: int, d: int) -> None:
    chunks = step_of(parts)
    pages, keys, values = filled(chunks, K, d)
    q = halfs(len(chunks.positions), G * K, d) * np.float16(2)
    assert_close(attend(device, chunks, q, pages), attention(chunks, q, keys, values), atol=2e-3, why=ATTENTION)


@pytest.mark.parametrize(("G", "K", "d"), [(3, 1, 64), (1, 2, 64), (1, 1, 128)])
def test_attention_of_several_tiles(rt: Runtime, G: int, K: int, d: int) -> None:
    chunks = step_of([(0, 63), (0, 64), (0, 65), (0, 130), (100, 70)])
    pages, keys, values = filled(chunks, K, d)
    q = halfs(len(chunks.positions), G * K, d)
    got = attend(rt, chunks, q, pages)
    expected = attention(chunks, q, keys, values)
    assert_close(got, expected, atol=2e-3, why=ATTENTION)
    error = np.linalg.norm(got - expected) / np.linalg.norm(expected)
    assert error < 1e-3, f"relative error {error:.1e}; allowed 1e-3: roundings to half average out"


def test_attention_is_one_number_however_the_prompt_is_cut(rt: Runtime) -> None:
    """Bit for bit: tiles start elsewhere, but each row adds its tokens in the same groups of 32."""
    whole = step_of([(0, 100)])
    pages, _, _ = filled(whole, 1, 64)
    q = halfs(100, 2, 64)
    expected = attend(rt, whole, q, pages)
    parts = [(0, 37), (37, 63)]
    for first, new in parts:
        chunks = step_of([(first, new)])
        chunks.tables = whole.tables
        assert np.array_equal(attend(rt, chunks, q[first : first + new], pages), expected[first : first + new])


def test_attention_with_scores_that_differ_widely(device: Runtime) -> None:
    """Scores of up to some hundred: weights are 0 or 1, the largest comes early or late."""
    chunks = step_of([(0, 40), (50, 30)])
    pages, keys, values = filled(chunks, 1, 64)
    q = halfs(len(chunks.positions), 1, 64) * np.float16(100)
    got = attend(device, chunks, q, pages)
    assert_close(got, attention(chunks, q, keys, values), atol=5e-3, why="scores of 300 in float32 are exact to 3e-5")


@pytest.mark.parametrize("arch", ["sm_75", "sm_80", "sm_90"])
@pytest.mark.parametrize("name", ["rmsnorm_half", "silu_mul_half", "rope_and_store", "prefill_attention"])
def test_compiles(name: str, arch: str) -> None:
    pytest.importorskip("cuda.bindings.nvrtc", reason="cuda-bindings is for Linux")
    from tests.test_nvrtc import compile_cubin

    shapes = [{"HEAD_DIM": 64, "GROUP": 3, "KV_HEADS": 5}, {"HEAD_DIM": 128, "GROUP": 8, "KV_HEADS": 1}]
    wanted = {"rmsnorm_half": [{"WIDTH": 960, "GATHER": 0}], "silu_mul_half": [{}]}
    for defines in wanted.get(name, shapes):
        source = with_defines(source_text(f"{name}.cu"), f"{name}.cu", defines)
        assert compile_cubin(source, f"{name}.cu", arch)[:4] == b"\x7fELF"
