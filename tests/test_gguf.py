"""The GGUF reader: equal to the official one on good files, a named error for every bad one."""

import os
import struct
import tracemalloc
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf.constants import GGML_QUANT_SIZES
from gguf.constants import GGMLQuantizationType as Type
from gguf.constants import GGUFValueType as Value

from rvllm.errors import RvllmError
from rvllm.gguf import (
    GGUFError,
    GGUFFile,
    MetadataError,
    NotGGUFError,
    TensorInfoError,
    TruncatedError,
    VersionError,
)
from tests import toy
from tests.gguf_bytes import EVERY_VALUE, Bytes, every_key, every_type, file, join, key, number, string, tensor

U8, U32, ARRAY, STRING, BOOL = Value.UINT8, Value.UINT32, Value.ARRAY, Value.STRING, Value.BOOL
ROW = np.arange(8, dtype=np.float32).tobytes()  # 32 bytes: one tensor of 8 weights, already aligned


def save(path: Path, content: Bytes | bytes) -> Path:
    path.write_bytes(content.data if isinstance(content, Bytes) else content)
    return path


@contextmanager
def memory_below(limit: int) -> Iterator[None]:
    """Fails if Python and NumPy allocate so many bytes at a time."""
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < limit
    finally:
        tracemalloc.stop()


def expect(path: Path, kind: type[GGUFError], *words: str) -> GGUFError:
    """Opening fails with exactly this error, which names file, field, found, allowed, and holds all the words."""
    with pytest.raises(GGUFError) as caught:
        GGUFFile(path)
    error, text = caught.value, str(caught.value)
    assert type(error) is kind, text
    assert isinstance(error, RvllmError)
    assert error.path == path
    for part in (str(path), error.field, error.found, error.allowed, *words):
        assert part, text
        assert part in text
    return error


# Good files


def same(ours, official) -> bool:
    if isinstance(official, list):
        ours = [item for part in ours for item in np.atleast_1d(part).tolist()]  # the official reader flattens
        return ours == official and [type(a) for a in ours] == [type(b) for b in official]
    return type(ours) is type(official) and ours == official


def assert_parity(path: Path) -> None:
    """Metadata, tensor table and packed bytes equal to what the official reader gives."""
    ours, official = GGUFFile(path), gguf.GGUFReader(path)
    theirs = {name: field.contents() for name, field in official.fields.items() if not name.startswith("GGUF.")}
    assert list(ours.metadata) == list(theirs)
    for name, value in theirs.items():
        assert same(ours.metadata[name], value), name
    assert ours.version == official.fields["GGUF.version"].contents()
    assert ours.alignment == official.alignment
    assert list(ours.tensors) == [t.name for t in official.tensors]
    for t in official.tensors:
        info, raw = ours.tensors[t.name], ours.raw(t.name)
        assert (info.type, info.nbytes, info.offset) == (t.tensor_type, t.n_bytes, t.data_offset), t.name
        assert info.shape == tuple(reversed(t.shape.tolist())), t.name
        assert raw.dtype == np.uint8
        assert raw.shape[:-1] == info.shape[:-1]
        assert not raw.flags.writeable
        assert raw.tobytes() == t.data.tobytes(), t.name


def test_C20_every_value_type_equals_the_official_reader(tmp_path):
    path = save(tmp_path / "values.gguf", file(every_key()))
    assert_parity(path)
    metadata = GGUFFile(path).metadata
    assert metadata["a.sentinel"] == 0x5EED
    assert {kind for kind, _ in EVERY_VALUE.values()} == set(Value)
    assert [part.tolist() for part in metadata["a.nested"]] == [[1, 2], [3]]
    assert metadata["a.bools"].dtype == np.bool_
    assert metadata["a.longs"].dtype == np.uint64


@pytest.mark.parametrize("name", EVERY_VALUE)
def test_C20_sentinel_after_each_value_alone(tmp_path, name):
    content = file([key(name, *EVERY_VALUE[name]), key("sentinel", STRING, "here")])
    assert GGUFFile(save(tmp_path / "one.gguf", content)).metadata["sentinel"] == "here"


@pytest.mark.parametrize("element", [t for t in Value if t != ARRAY])
def test_C20_empty_arrays(tmp_path, element):
    content = file([key("empty", ARRAY, (element, [])), key("sentinel", U8, 7)])
    metadata = GGUFFile(save(tmp_path / "empty.gguf", content)).metadata
    assert len(metadata["empty"]) == 0
    assert metadata["sentinel"] == 7


def test_an_empty_array_may_end_the_file(tmp_path):
    path = save(tmp_path / "end.gguf", file([key("empty", ARRAY, (U8, []))], alignment=1))
    assert len(GGUFFile(path).metadata["empty"]) == 0


def test_toy_model_equals_the_official_reader(tmp_path):
    types = {"token_embd.weight": Type.Q8_0, "blk.0.ffn_up.weight": Type.Q4_1, "blk.1.attn_q.weight": Type.F16}
    assert_parity(toy.write(tmp_path / "toy.gguf", types=types))


@pytest.mark.parametrize("alignment", [8, 32, 64, 4096])
def test_alignment_of_the_file_is_used(tmp_path, alignment):
    writer = gguf.GGUFWriter(tmp_path / "aligned.gguf", "llama")
    writer.add_custom_alignment(alignment)
    for i in range(3):
        writer.add_tensor(f"t{i}", np.full(5, i, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert_parity(tmp_path / "aligned.gguf")


def test_C12_every_known_type_has_its_own_size(tmp_path):
    table, data = every_type(rows=3)
    opened = GGUFFile(save(tmp_path / "types.gguf", file(tensors=table, data=data)))
    assert {info.type for info in opened.tensors.values()} == set(Type)
    for name, info in opened.tensors.items():
        block, block_bytes = GGML_QUANT_SIZES[info.type]
        assert info.shape == (3, 2 * block)
        assert info.type_name == info.type.name
        assert opened.raw(name).shape == (3, 2 * block_bytes)


def test_C11_shape_is_reversed(tmp_path):
    data = np.arange(6, dtype=np.float32)
    opened = GGUFFile(save(tmp_path / "t.gguf", file(tensors=[tensor("t", [3, 2])], data=data.tobytes())))
    assert opened.tensors["t"].shape == (2, 3)
    assert opened.raw("t").view(np.float32).tolist() == [[0, 1, 2], [3, 4, 5]]


@pytest.mark.parametrize("dims", [[4], [4, 3], [4, 3, 2], [4, 3, 2, 5], [1, 1, 1, 1]])
def test_C11_shapes_of_one_to_four_dimensions(tmp_path, dims):
    data = np.arange(np.prod(dims), dtype=np.float32)
    opened = GGUFFile(save(tmp_path / "t.gguf", file(tensors=[tensor("t", dims)], data=data.tobytes())))
    np.testing.assert_array_equal(opened.raw("t").view(np.float32), data.reshape(dims[::-1]))


def test_C14_version_2_is_read(tmp_path):
    opened = GGUFFile(save(tmp_path / "v2.gguf", file([key("a", U8, 1)], version=2)))
    assert (opened.version, opened.metadata) == (2, {"a": 1})


def test_a_file_may_be_empty_of_keys_and_tensors(tmp_path):
    opened = GGUFFile(save(tmp_path / "nothing.gguf", file(alignment=1)))
    assert (opened.size, opened.metadata, opened.tensors) == (24, {}, {})


def test_tensors_may_lie_in_any_order_and_leave_gaps(tmp_path):
    table = [tensor("late", [8], offset=128), tensor("early", [8], offset=0)]
    data = ROW + bytes(96) + ROW[::-1]
    opened = GGUFFile(save(tmp_path / "gaps.gguf", file(tensors=table, data=data)))
    assert list(opened.tensors) == ["late", "early"]
    assert opened.raw("early").tobytes() == ROW
    assert opened.raw("late").tobytes() == ROW[::-1]


@pytest.mark.parametrize("name", ["x", "n" * 64, "ü" * 32, "it's \U0001f980"])
def test_names_up_to_64_bytes(tmp_path, name):
    assert name in GGUFFile(save(tmp_path / "t.gguf", file(tensors=[tensor(name, [8])], data=ROW))).tensors


def test_keys_up_to_65535_bytes(tmp_path):
    assert "k" * 65_535 in GGUFFile(save(tmp_path / "k.gguf", file([key("k" * 65_535, U8, 1)]))).metadata


def test_path_may_be_text_and_odd(tmp_path):
    path = save(tmp_path / "mit Leerzeichen, ü, %s {}.gguf", file())
    assert GGUFFile(str(path)).path == path


def test_raw_of_an_unknown_tensor(tmp_path):
    opened = GGUFFile(save(tmp_path / "t.gguf", file(tensors=[tensor("t", [8])], data=ROW)))
    with pytest.raises(TensorInfoError, match="no such tensor"):
        opened.raw("T")


@pytest.mark.real_model
def test_real_model_equals_the_official_reader(model_path):
    assert_parity(model_path)


@pytest.mark.real_model
def test_opening_the_real_model_reads_no_weights(model_path):
    """What it keeps is the metadata, most of it the 49,152 tokens and 48,900 merges as text."""
    with memory_below(40_000_000):
        GGUFFile(model_path)


# Not a GGUF at all

HTML = b"<!DOCTYPE html>\n<html><title>Sign in</title></html>"
LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n"
SAFETENSORS = struct.pack("<Q", 2) + b"{}"
LONG_SAFETENSORS = struct.pack("<Q", 70_000) + b'{"w":{}}'.ljust(70_000)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        pytest.param(HTML, ["b'<!DO'", "HTML page", "download it again"], id="html"),
        pytest.param(HTML.lower(), ["HTML page", "download it again"], id="html-lower-case"),
        pytest.param(b"<html>", ["HTML page", "download it again"], id="html-without-doctype"),
        pytest.param(b"<HTML>", ["HTML page", "download it again"], id="html-upper-case"),
        pytest.param(b"\n\n" + HTML, ["HTML page", "download it again"], id="html-after-blank-lines"),
        pytest.param(b"\xef\xbb\xbf" + HTML, ["HTML page", "download it again"], id="html-after-a-mark"),
        pytest.param(LFS, ["b'vers'", "Git LFS pointer", "git lfs pull"], id="git-lfs"),
        pytest.param(SAFETENSORS, ["safetensors", "convert_hf_to_gguf.py"], id="safetensors"),
        pytest.param(LONG_SAFETENSORS, ["safetensors", "convert_hf_to_gguf.py"], id="safetensors-long-header"),
        pytest.param(b"PK\x03\x04" + bytes(40), ["zip archive"], id="pytorch"),
        pytest.param(b"ggjt" + bytes(40), ["GGML"], id="old-ggml"),
        pytest.param(b"gguf" + bytes(40), ["b'gguf'"], id="lower-case-magic"),
        pytest.param(b"FUGG" + bytes(40), ["b'FUGG'"], id="reversed-magic"),
        pytest.param(b"G\0", [r"b'G\x00'"], id="two-bytes"),
        pytest.param(bytes(100), [r"b'\x00"], id="zeros"),
    ],
)
def test_C17_not_a_gguf(tmp_path, content, words):
    expect(save(tmp_path / "model.gguf", content), NotGGUFError, "magic", "b'GGUF'", *words)


def test_C17_paths_that_are_no_files_keep_their_usual_errors(tmp_path):
    with pytest.raises(FileNotFoundError):
        GGUFFile(tmp_path / "missing.gguf")
    with pytest.raises(IsADirectoryError):
        GGUFFile(tmp_path)
    (tmp_path / "dangling.gguf").symlink_to(tmp_path / "missing.gguf")
    with pytest.raises(FileNotFoundError):
        GGUFFile(tmp_path / "dangling.gguf")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read every file")
def test_C17_permission_error_stays(tmp_path):
    path = save(tmp_path / "secret.gguf", file())
    path.chmod(0)
    with pytest.raises(PermissionError):
        GGUFFile(path)


# Truncated files


def test_C06_toy_model_cut_by_one_byte(tmp_path):
    content = toy.write(tmp_path / "toy.gguf").read_bytes()
    last = max(GGUFFile(tmp_path / "toy.gguf").tensors.values(), key=lambda t: t.offset)
    size = len(content)
    expect(save(tmp_path / "cut.gguf", content[:-1]), TruncatedError, last.name, f"{size:,}", f"{size - 1:,}")


@pytest.mark.parametrize("size", [0, 1, 3])
def test_C06_cut_to_less_than_the_magic(tmp_path, size):
    expect(save(tmp_path / "cut.gguf", b"GGUF"[:size]), TruncatedError, "magic", f"{size} byte")


def test_C06_cut_to_the_magic(tmp_path):
    expect(save(tmp_path / "cut.gguf", b"GGUF"), TruncatedError, "version", "0 bytes left", "4 bytes or more")


def test_C06_cut_by_half_and_inside_the_metadata(tmp_path):
    content = toy.write(tmp_path / "toy.gguf").read_bytes()
    expect(save(tmp_path / "half.gguf", content[: len(content) // 2]), TruncatedError, "weight")
    expect(save(tmp_path / "keys.gguf", content[:300]), TruncatedError)


def test_C06_cut_anywhere(tmp_path):
    content = bytes(file(every_key(), [tensor("t", [8]), tensor("u", [8], offset=32)], ROW * 2).data)
    path = tmp_path / "cut.gguf"
    for size in range(len(content)):
        expect(save(path, content[:size]), TruncatedError)
    GGUFFile(save(path, content))


# Bytes that break the format: (content, error, words of the message)

HUGE = [2**31, 2**32 - 1, 2**40, 2**63 - 1, 2**63, 2**64 - 1]
LONG_NAME = "n" * 65


def one_key(kind: int, value, name: str | bytes = "some.key") -> Bytes:
    return file([key(name, kind, value), key("last", U8, 1)])


def one_tensor(dims=(8,), type_: int = Type.F32, data: bytes = ROW, **entry) -> Bytes:
    return file(tensors=[tensor("some.tensor", dims, type_, **entry)], data=data)


def nested(depth: int) -> Bytes:
    value = (U8, [1])
    for _ in range(depth - 1):
        value = (ARRAY, [value])
    return one_key(ARRAY, value)


def aligned(kind: Value, value) -> Bytes:
    return file([key("general.alignment", kind, value)])


BAD_VERSIONS = {
    "big-endian-3": (struct.pack(">4sIQQ", b"GGUF", 3, 0, 0), ["endian"]),
    "big-endian-2": (struct.pack(">4sIQQ", b"GGUF", 2, 0, 0), ["endian"]),
    "0": (file(version=0), ["version 0", "not supported", "2 and 3 are"]),
    "1": (file(version=1), ["version 1", "not supported", "2 and 3 are"]),
    "4": (file(version=4), ["version 4", "not supported", "2 and 3 are"]),
    "last": (file(version=2**32 - 1), ["version 4294967295", "not supported"]),
}


@pytest.mark.parametrize("case", BAD_VERSIONS)
def test_C14_versions(tmp_path, case):
    content, words = BAD_VERSIONS[case]
    error = expect(save(tmp_path / "v.gguf", content), VersionError, *words)
    assert ("endian" in str(error)) == case.startswith("big"), error


@pytest.mark.parametrize("count", [2, 1000, *HUGE])
@pytest.mark.parametrize("field", ["metadata_kv_count", "tensor_count"])
def test_C08_counts_are_compared_with_the_bytes_left(tmp_path, field, count):
    counts = {"n_keys": count} if field == "metadata_kv_count" else {"n_tensors": count}
    expect(save(tmp_path / "c.gguf", file(**counts)), TruncatedError, field, f"{count:,}")


@pytest.mark.parametrize("count", HUGE)
@pytest.mark.parametrize("element", Value)
def test_C08_giant_array(tmp_path, element, count):
    path = save(tmp_path / "a.gguf", one_key(ARRAY, join(number("I", element), number("Q", count))))
    with memory_below(1_000_000):
        expect(path, TruncatedError, "some.key", f"{count:,}")


@pytest.mark.parametrize("length", [40, *HUGE])
def test_C08_giant_string(tmp_path, length):
    content = file([join(string("some.key"), number("I", STRING), string("abc", length))], alignment=1)
    capped = length > 1 << 30
    kind = MetadataError if capped else TruncatedError
    with memory_below(1_000_000):
        expect(save(tmp_path / "s.gguf", content), kind, "some.key", f"{length:,}")
    content = file([join(string("some.key", length), number("I", U8), b"\1" * 20)], alignment=1)
    kind = MetadataError if length > 65_535 else TruncatedError
    with memory_below(1_000_000):
        expect(save(tmp_path / "k.gguf", content), kind, f"{length:,}")


@pytest.mark.parametrize("n_dims", [0, 5, 2**31, 2**32 - 1])
def test_C08_number_of_dimensions(tmp_path, n_dims):
    expect(save(tmp_path / "d.gguf", one_tensor(n_dims=n_dims)), TensorInfoError, "some.tensor", f"{n_dims} dim")


BAD_KEYS = {
    "empty key": (one_key(U8, 1, ""), MetadataError, ["empty key"]),
    "key too long": (one_key(U8, 1, "k" * 65_536), MetadataError, ["65,536", "65,535"]),
    "key not UTF-8": (one_key(U8, 1, b"\xff\xfe"), MetadataError, ["UTF-8"]),
    "key twice": (file([key("k", U8, 1), key("k", U8, 1)]), MetadataError, ["'k' twice"]),
    "key twice, other type": (file([key("k", U8, 1), key("k", STRING, "")]), MetadataError, ["'k' twice"]),
    "string not UTF-8": (one_key(STRING, b"ab\xc3"), MetadataError, ["some.key", "UTF-8"]),
    "string with a lone surrogate": (one_key(STRING, b"\xed\xa0\x80"), MetadataError, ["some.key", "UTF-8"]),
    "array string not UTF-8": (one_key(ARRAY, (STRING, ["ok", b"\x80"])), MetadataError, ["some.key", "UTF-8"]),
    "value type 13": (one_key(13, b""), MetadataError, ["some.key", "value type 13", "0 to 12"]),
    "value type 2^32-1": (one_key(2**32 - 1, b""), MetadataError, ["value type 4294967295"]),
    "element type 13": (one_key(ARRAY, join(number("I", 13), number("Q", 0))), MetadataError, ["type 13", "0 to 12"]),
    "bool 2": (one_key(BOOL, 2), MetadataError, ["some.key", "bool byte 2", "0 or 1"]),
    "bool 255": (one_key(BOOL, 255), MetadataError, ["bool byte 255"]),
    "bool 2 in an array": (one_key(ARRAY, (BOOL, [0, 1, 2])), MetadataError, ["some.key", "bool byte 2"]),
    "arrays nested 5 deep": (nested(5), MetadataError, ["some.key", "5 deep", "at most 4"]),
    "alignment 0": (aligned(U32, 0), MetadataError, ["general.alignment", "0 (UINT32)"]),
    "alignment 1": (aligned(U32, 1), MetadataError, ["general.alignment"]),
    "alignment 4": (aligned(U32, 4), MetadataError, ["general.alignment", "4 (UINT32)", "from 8"]),
    "alignment 24": (aligned(U32, 24), MetadataError, ["24", "power of two"]),
    "alignment 2^31": (aligned(U32, 2**31), MetadataError, ["general.alignment", "1,048,576"]),
    "alignment 2^32-1": (aligned(U32, 2**32 - 1), MetadataError, ["general.alignment"]),
    "alignment of u64": (aligned(Value.UINT64, 32), MetadataError, ["UINT64", "uint32"]),
    "alignment of i32": (aligned(Value.INT32, -32), MetadataError, ["-32", "INT32"]),
    "alignment of float": (aligned(Value.FLOAT32, 32), MetadataError, ["FLOAT32"]),
    "alignment NaN": (aligned(Value.FLOAT64, float("nan")), MetadataError, ["FLOAT64"]),
    "alignment of bool": (aligned(BOOL, 1), MetadataError, ["BOOL"]),
    "alignment of text": (aligned(STRING, "32"), MetadataError, ["STRING"]),
    "alignment of an array": (aligned(ARRAY, (U32, [32])), MetadataError, ["ARRAY"]),
}


@pytest.mark.parametrize("case", BAD_KEYS)
def test_bad_metadata(tmp_path, case):
    content, kind, words = BAD_KEYS[case]
    expect(save(tmp_path / "bad.gguf", content), kind, *words)


def test_arrays_nested_4_deep_are_read(tmp_path):
    metadata = GGUFFile(save(tmp_path / "deep.gguf", nested(4))).metadata
    assert metadata["some.key"][0][0][0].tolist() == [1]
    assert metadata["last"] == 1


UNKNOWN_TYPES = [4, 5, 31, 32, 33, 36, 37, 38, 43, 99, 2**31, 2**32 - 1]


@pytest.mark.parametrize("type_", UNKNOWN_TYPES)
def test_C12_unknown_tensor_type(tmp_path, type_):
    words = ["some.tensor", f"tensor type {type_}", "Q4_1", "Q6_K"]
    expect(save(tmp_path / "type.gguf", one_tensor(type_=type_)), TensorInfoError, *words)


def two(first: Bytes, second: Bytes) -> Bytes:
    return file(tensors=[first, second], data=ROW * 8)


BAD_TENSORS = {
    "no name": (file(tensors=[tensor("", [8])], data=ROW), TensorInfoError, ["name"]),
    "name too long": (file(tensors=[tensor(LONG_NAME, [8])], data=ROW), TensorInfoError, ["65", "64"]),
    "name not UTF-8": (file(tensors=[tensor(b"\xff", [8])], data=ROW), TensorInfoError, ["UTF-8"]),
    "name twice": (two(tensor("t", [8]), tensor("t", [8], offset=32)), TensorInfoError, ["t", "twice"]),
    "dim 0": (one_tensor([0]), TensorInfoError, ["some.tensor", "[0]"]),
    "last dim 0": (one_tensor([8, 1, 0]), TensorInfoError, ["some.tensor", "[8, 1, 0]"]),
    "part of a block": (one_tensor([8], Type.Q8_0), TensorInfoError, ["[8]", "multiples of 32", "Q8_0"]),
    "part of a K block": (one_tensor([576], Type.Q4_K), TensorInfoError, ["[576]", "multiples of 256", "Q4_K"]),
    "blocks by rows only": (one_tensor([16, 2], Type.Q8_0), TensorInfoError, ["[16, 2]"]),
    "product wraps to 0": (one_tensor([2**32, 2**32]), TruncatedError, ["some.tensor", f"{2**66 + 96:,}"]),
    "product wraps to 8": (one_tensor([2**61 + 1, 8]), TruncatedError, ["some.tensor"]),
    "largest dims": (one_tensor([2**64 - 1] * 4), TruncatedError, ["some.tensor"]),
    "largest blocks": (one_tensor([2**64 - 32] * 4, Type.Q8_0), TruncatedError, ["some.tensor"]),
    "bytes wrap": (one_tensor([2**62]), TruncatedError, ["some.tensor", f"{2**64 + 96:,}"]),
    "past the end": (one_tensor([9]), TruncatedError, ["some.tensor"]),
    "offset past the end": (one_tensor(offset=32), TruncatedError, ["some.tensor"]),
    "offset 2^63": (one_tensor(offset=2**63), TruncatedError, ["some.tensor"]),
    "offset wraps": (one_tensor(offset=2**64 - 32), TruncatedError, ["some.tensor", f"{2**64 - 32 + 96:,}"]),
    "offset 4": (one_tensor([2], offset=4), TensorInfoError, ["some.tensor", "offset 4", "32"]),
    "offset 16": (one_tensor([2], offset=16), TensorInfoError, ["some.tensor", "offset 16", "32"]),
    "same bytes": (two(tensor("t", [8]), tensor("u", [8])), TensorInfoError, ["shared", "overlap"]),
    "overlap": (two(tensor("t", [9]), tensor("u", [8], offset=32)), TensorInfoError, ["u", "t", "overlap"]),
    "overlap, listed late": (two(tensor("u", [8], offset=32), tensor("t", [9])), TensorInfoError, ["overlap"]),
    "one inside another": (two(tensor("t", [64]), tensor("u", [8], offset=64)), TensorInfoError, ["overlap"]),
}


@pytest.mark.parametrize("case", BAD_TENSORS)
def test_bad_tensor_table(tmp_path, case):
    content, kind, words = BAD_TENSORS[case]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        expect(save(tmp_path / "bad.gguf", content), kind, *words)


def test_overlap_of_the_first_with_the_third(tmp_path):
    table = [tensor("t", [24]), tensor("u", [8], offset=32), tensor("v", [8], offset=64)]
    expect(save(tmp_path / "bad.gguf", file(tensors=table, data=ROW * 8)), TensorInfoError, "overlap")


def test_file_alignment_binds_the_offsets(tmp_path):
    keys = [key("general.alignment", U32, 64)]
    good = file(keys, [tensor("t", [8], offset=64)], ROW * 4, alignment=64)
    assert GGUFFile(save(tmp_path / "good.gguf", good)).raw("t").tobytes() == ROW
    bad = file(keys, [tensor("t", [8], offset=32)], ROW * 4, alignment=64)
    expect(save(tmp_path / "bad.gguf", bad), TensorInfoError, "offset 32", "64")


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(aligned(STRING, "x" * 1_000_000), id="alignment-of-long-text"),
        pytest.param(aligned(ARRAY, (STRING, ["x" * 100] * 10_000)), id="alignment-of-many-texts"),
        pytest.param(file([key("k" * 65_535, U8, 1)] * 2), id="long-key-twice"),
        pytest.param(one_key(13, b"", "k" * 65_535), id="long-key-of-bad-type"),
    ],
)
def test_messages_stay_short(tmp_path, content):
    """What was found is shown, but not a megabyte of it."""
    assert len(str(expect(save(tmp_path / "long.gguf", content), MetadataError))) < 2000 + len(str(tmp_path))


@pytest.mark.parametrize("name", ["a\nb", "\x1b[2J", "a\0b"])
def test_messages_hold_no_control_characters(tmp_path, name):
    """A name out of the file can't forge lines or drive the terminal."""
    content = file(tensors=[tensor(name, [0])])
    assert str(expect(save(tmp_path / "t.gguf", content), TensorInfoError)).isprintable()
    assert str(expect(save(tmp_path / "k.gguf", one_key(13, b"", name)), MetadataError)).isprintable()
