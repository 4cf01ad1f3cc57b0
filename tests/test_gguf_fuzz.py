"""Mutated GGUF files: a named error or a file that really can be read; bounded memory, bounded time."""

import random
import resource
import time
import warnings
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from gguf.constants import GGML_QUANT_SIZES
from gguf.constants import GGMLQuantizationType as Type
from gguf.constants import GGUFValueType as Value
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rvllm.gguf import GGUFError, GGUFFile
from rvllm.quants import DECODERS, TensorTypeError, dequantize
from tests import toy
from tests.gguf_bytes import Bytes, every_key, every_type, file, join, key, number, payload, string, tensor

MEMORY = 20 << 20  # bytes above the size of the file
SECONDS = 60.0  # of this process's CPU time, one file: a guard against loops that never end
EXTREMES = [0, 1, 2, 3, 13, 33, 2**31, 2**32 - 1, 2**32, 2**40, 2**63 - 1, 2**63, 2**64 - 1]
VALUE_TYPES = [t for t in Value if t != Value.ARRAY]


def fuzz(examples: int):
    """The same examples every time; hypothesis leaves time limits to `check`, which counts this process only."""
    return settings(
        max_examples=examples,
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    )


@pytest.fixture
def scratch(tmp_path) -> Path:
    """Where the mutated files go."""
    return tmp_path / "mutant.gguf"


@contextmanager
def limits(size: int):
    """More memory than MEMORY above the file's size is a MemoryError; more time than SECONDS fails the test."""
    in_use = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    start = time.process_time()
    resource.setrlimit(resource.RLIMIT_AS, (in_use + size + MEMORY, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
    assert time.process_time() - start < SECONDS


def check(path: Path, content: bytes | bytearray) -> bool:
    """Read all of the file, within the limits; True if the reader accepted it."""
    path.write_bytes(content)
    with warnings.catch_warnings(), limits(len(content)):
        warnings.simplefilter("error")
        return read_all(path, len(content))


def read_all(path: Path, size: int) -> bool:
    """Open, check what the table promises, and decode; only named errors pass."""
    try:
        opened = GGUFFile(path)
    except GGUFError:
        return False
    end = 0
    for info in sorted(opened.tensors.values(), key=lambda t: t.offset):
        block, block_bytes = GGML_QUANT_SIZES[info.type]
        weights = int(np.prod(info.shape, dtype=object))
        assert end <= info.offset
        assert info.offset % opened.alignment == 0
        assert info.nbytes * block == weights * block_bytes
        end = info.offset + info.nbytes
        assert end <= size
        raw = opened.raw(info.name)
        assert raw.nbytes == info.nbytes
        try:
            values = dequantize(raw, info.type)
        except TensorTypeError:
            assert info.type not in DECODERS
        else:
            assert values.shape == info.shape
            assert values.dtype == np.float32
    return True


# The files to be mutated


def zoo() -> Bytes:
    """Every value type and every tensor type, a few kilobytes."""
    table, data = every_type(rows=1)
    return file(every_key(), table, data)


def header_end(content: Bytes) -> int:
    offset, size = content.integers[-1]
    return offset + size


@pytest.fixture(scope="module")
def toy_bytes(tmp_path_factory) -> bytes:
    types = {"blk.0.ffn_up.weight": Type.Q4_1, "blk.0.attn_q.weight": Type.Q8_0, "blk.1.attn_v.weight": Type.F16}
    tensors = {name: data for name, data in toy.weights().items() if "norm" in name or "attn" in name}
    return toy.write(tmp_path_factory.mktemp("fuzz") / "toy.gguf", tensors=tensors, types=types).read_bytes()


# Integers at their extremes


def replace(content: bytearray, where: tuple[int, int], value: int) -> None:
    offset, size = where
    content[offset : offset + size] = (value % 256**size).to_bytes(size, "little")


def test_every_integer_at_every_extreme(scratch):
    """Exhaustive: one field at a time; the file has every field there is."""
    whole = zoo()
    assert check(scratch, whole.data)
    accepted = 0
    for where in whole.integers:
        for value in {extreme % 256 ** where[1] for extreme in EXTREMES}:
            content = bytearray(whole.data)
            replace(content, where, value)
            accepted += check(scratch, content)
    assert accepted > 0


ZOO = zoo()
AN_INTEGER = st.tuples(st.sampled_from(ZOO.integers), st.sampled_from(EXTREMES) | st.integers(0, 2**64 - 1))


@fuzz(400)
@given(changes=st.lists(AN_INTEGER, min_size=2, max_size=4))
def test_several_integers_at_once(scratch, changes):
    content = bytearray(ZOO.data)
    for where, value in changes:
        replace(content, where, value)
    check(scratch, content)


# Bytes


def damage(content: bytes, rng: random.Random, limit: int, times: int) -> bytearray:
    """Flip, overwrite, cut out, insert, repeat or truncate; mostly within the first `limit` bytes."""
    mutant = bytearray(content)
    for _ in range(times):
        at = rng.randrange(min(limit, len(mutant)) or 1)
        length = rng.choice([1, 1, 1, 4, 8, rng.randrange(64)])
        match rng.randrange(7):
            case 0 | 1:
                mutant[at : at + 1] = bytes([mutant[at] ^ 1 << rng.randrange(8)]) if mutant else b""
            case 2:
                mutant[at : at + length] = rng.randbytes(length)
            case 3:
                del mutant[at : at + length]
            case 4:
                mutant[at:at] = rng.randbytes(length)
            case 5:
                mutant[at:at] = mutant[at : at + length]
            case _:
                del mutant[rng.randrange(len(mutant) + 1) :]
    return mutant


@fuzz(800)
@given(seed=st.integers(0, 2**32), times=st.integers(1, 5))
def test_damaged_bytes_of_every_kind_of_field(scratch, seed, times):
    check(scratch, damage(ZOO.data, random.Random(seed), header_end(ZOO), times))


@fuzz(300)
@given(seed=st.integers(0, 2**32), times=st.integers(1, 3))
def test_damaged_bytes_of_a_toy_model(scratch, toy_bytes, seed, times):
    check(scratch, damage(toy_bytes, random.Random(seed), len(toy_bytes), times))


@fuzz(300)
@given(st.binary(max_size=300))
def test_random_bytes_after_the_header(scratch, tail):
    check(scratch, join(file(n_keys=1, n_tensors=1, alignment=1), tail).data)


# Files that are nearly right: each field drawn, the sizes mostly true

SIZES = st.sampled_from([0, 1, 2, 7, 31, 32, 33, 256, 2**31, 2**32, 2**61, 2**63, 2**64 - 1])
TEXT = st.sampled_from(["", "k", "k", "general.alignment", "general.architecture", "t", "t" * 64, "t" * 65, "\0"])
SCALAR = st.sampled_from(
    [(Value.UINT8, 1), (Value.BOOL, 1), (Value.BOOL, 2), (Value.STRING, ""), (Value.STRING, b"\xff")]
)
POWERS = st.tuples(st.just(Value.UINT32), st.sampled_from([0, 1, 7, 8, 16, 32, 48, 64, 2**16, 2**20, 2**21, 2**32 - 1]))


@st.composite
def arrays(draw, depth: int = 0) -> tuple[Value, Bytes]:
    """An array whose count may lie, nested up to six deep."""
    if depth < 6 and draw(st.booleans()):
        element, parts = Value.ARRAY, [draw(arrays(depth + 1))[1] for _ in range(draw(st.integers(0, 2)))]
    else:
        element = draw(st.sampled_from(VALUE_TYPES))
        parts = [payload(element, "" if element == Value.STRING else 1)] * draw(st.integers(0, 3))
    count = draw(st.sampled_from([len(parts)] * 6 + [len(parts) + 1, 2**32, 2**63]))
    return Value.ARRAY, join(number("I", element), number("Q", count), *parts)


KEYS = st.tuples(TEXT, SCALAR | POWERS | arrays()).map(lambda drawn: key(drawn[0], *drawn[1]))
TENSORS = st.builds(
    tensor,
    TEXT,
    st.lists(st.sampled_from([1, 2, 32, 256]) | SIZES, min_size=0, max_size=5),
    st.sampled_from([*Type, 4, 99, 2**31]) | st.sampled_from([Type.F32, Type.Q8_0]),
    st.integers(0, 8).map(lambda n: 32 * n) | SIZES,
)


@fuzz(500)
@given(
    keys=st.lists(KEYS, max_size=3),
    tensors=st.lists(TENSORS, max_size=3),
    data=st.integers(0, 2048).map(bytes),
    extra=st.sampled_from([(0, 0)] * 5 + [(1, 0), (0, 1), (2**63, 0), (0, 2**63)]),
    version=st.sampled_from([3] * 8 + [0, 1, 2, 4, 3 << 24]),
)
def test_files_that_are_nearly_right(scratch, keys, tensors, data, extra, version):
    counts = {"n_keys": len(keys) + extra[0], "n_tensors": len(tensors) + extra[1]}
    check(scratch, file(keys, tensors, data, version=version, **counts).data)


# Files that ask for much work with few bytes


def array(element: Value, count: int, body: bytes) -> bytes:
    return bytes(join(number("I", element), number("Q", count), body).data)


EMPTY = array(Value.UINT8, 0, b"")
STUFFING = {
    "letters": (Value.STRING, bytes(string("é").data)),
    "empty strings": (Value.STRING, bytes(8)),
    "empty arrays": (Value.ARRAY, EMPTY),
    "arrays in arrays": (Value.ARRAY, array(Value.ARRAY, 1, array(Value.ARRAY, 1, EMPTY))),
    "bools": (Value.BOOL, b"\1"),
}


@pytest.mark.parametrize("case", STUFFING)
def test_twenty_thousand_small_elements(scratch, case):
    element, one = STUFFING[case]
    content = file([join(string("k"), number("I", Value.ARRAY), array(element, 20_000, one * 20_000))])
    assert check(scratch, content.data)


def test_many_keys_and_tensors(scratch):
    keys = [key(f"k{i}", Value.UINT8, 1) for i in range(5_000)]
    table = [tensor(f"t{i}", [8], offset=32 * i) for i in range(5_000)]
    assert check(scratch, file(keys, table, bytes(32 * 5_000)).data)
    assert not check(scratch, file(keys, table, bytes(32 * 5_000 - 1)).data)
