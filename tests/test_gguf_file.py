"""GGUF files: what gguf-py writes is read; a file that cannot be trusted is refused by name, at no cost."""

import random
import struct
import tracemalloc

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mutations import mutated

from deltic.errors import ModelError
from deltic.loader.gguf.file import GgufFile

U32, U64, STRING, ARRAY = 4, 10, 8, 9
PEAK = 4 << 20
"""Bytes that reading any small file may take: the file's own, buffers, and what the messages need."""


# A writer of our own, which also writes what must not be


def text(value):
    data = value if isinstance(value, bytes) else value.encode()
    return struct.pack("<Q", len(data)) + data


def key(name, kind, data):
    return text(name) + struct.pack("<I", kind) + data


def tensor(name, dimensions=(4,), type=0, offset=0):
    return text(name) + struct.pack(f"<I{len(dimensions)}QIQ", len(dimensions), *dimensions, type, offset)


def header(keys=(), tensors=(), version=3, magic=b"GGUF", counts=None):
    counts = counts or (len(tensors), len(keys))
    return magic + struct.pack("<IQQ", version, *counts) + b"".join(keys) + b"".join(tensors)


def whole(*args, data=64, alignment=32, **kwargs):
    start = header(*args, **kwargs)
    return start + bytes(-len(start) % alignment) + bytes(data)


ALIGNMENT = "general.alignment"
SMALL = whole([key("general.architecture", STRING, text("qwen35")), key("a.number", U32, struct.pack("<I", 7)),
               key("a.list", ARRAY, struct.pack("<IQ", STRING, 2) + text("one") + text("zwei")),
               key("a.row", ARRAY, struct.pack("<IQ3H", 2, 3, 1, 2, 3)), key("a.flag", 7, b"\1")],
              [tensor("x", (4, 2)), tensor("y.weight", (32, 3), 8, 32)], data=32 + 102)


def opened(tmp_path, data, name="model.gguf"):
    path = tmp_path / name
    path.write_bytes(data)
    return GgufFile.open(path)


# What is written is read


def test_every_kind_of_value_is_read(tmp_path):
    path = tmp_path / "values.gguf"
    values = {
        "k.u8": (200, "add_uint8"), "k.i8": (-100, "add_int8"), "k.u16": (60_000, "add_uint16"),
        "k.i16": (-30_000, "add_int16"), "k.u32": (4_000_000_000, "add_uint32"), "k.i32": (-2_000_000_000, "add_int32"),
        "k.u64": (1 << 63, "add_uint64"), "k.i64": (-(1 << 62), "add_int64"), "k.f32": (0.5, "add_float32"),
        "k.f64": (0.1, "add_float64"), "k.bool": (True, "add_bool"), "k.no": (False, "add_bool"),
        "k.text": ("grün 🌱", "add_string"), "k.words": (["a", "", "日本"], "add_array"),
        "k.flags": ([True, False], "add_array"), "k.ints": ([1, -2, 3], "add_array"),
        "k.floats": ([0.5, 0.25], "add_array")}
    writer = gguf.GGUFWriter(path, "qwen35")
    for name, (value, method) in values.items():
        getattr(writer, method)(name, value)
    finish(writer)
    metadata = GgufFile.open(path).metadata
    assert metadata["general.architecture"] == "qwen35"
    for name, (value, _) in values.items():
        found = metadata[name]
        assert (found.tolist() if isinstance(found, np.ndarray) else found) == value, name
        assert isinstance(found, type(value) | np.ndarray)
    assert metadata["k.ints"].dtype == np.int32 and metadata["k.floats"].dtype == np.float32


def finish(writer):
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def arrays():
    rng = np.random.default_rng(0)
    shapes = {"scalar": (), "row": (5,), "matrix": (3, 7), "cube": (2, 3, 5), "four": (2, 3, 1, 5)}
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


@pytest.mark.parametrize("alignment", [None, 8, 64, 4096])
def test_tensor_offsets(tmp_path, alignment):
    path, written = tmp_path / "tensors.gguf", arrays()
    writer = gguf.GGUFWriter(path, "qwen35")
    if alignment:
        writer.add_custom_alignment(alignment)
    for name, array in written.items():
        writer.add_tensor(name, array)
    quantized = np.random.default_rng(1).integers(0, 256, (6, 2 * 144), dtype=np.uint8)
    writer.add_tensor("blocks", quantized, raw_dtype=gguf.GGMLQuantizationType.Q4_K)
    finish(writer)
    file = GgufFile.open(str(path))
    assert file.paths == (path,) and list(file.tensors) == [*written, "blocks"]
    for name, array in written.items():
        found = file.tensors[name]
        assert found.shape == array.shape and found.type.name == "F32" and found.path == path
        assert np.array_equal(found.read().view(np.float32).reshape(array.shape), array)
    blocks = file.tensors["blocks"]
    assert (blocks.shape, blocks.type.name, blocks.nbytes) == ((6, 512), "Q4_K", quantized.size)
    assert np.array_equal(blocks.read(288, 144), quantized.reshape(-1)[288:432])
    assert blocks.read(blocks.nbytes).size == 0
    for start, count in ((-1, 2), (0, blocks.nbytes + 1), (blocks.nbytes + 1, None)):
        with pytest.raises(IndexError, match="blocks"):
            blocks.read(start, count)


def test_version_2(tmp_path):
    file = opened(tmp_path, SMALL[:4] + struct.pack("<I", 2) + SMALL[8:])
    assert file.metadata["a.list"] == ["one", "zwei"] and file.metadata["a.row"].tolist() == [1, 2, 3]
    assert file.tensors["x"].shape == (2, 4) and file.tensors["y.weight"].nbytes == 102


def test_shrinking_file_detected(tmp_path):
    file = opened(tmp_path, SMALL)
    file.paths[0].write_bytes(SMALL[:-8])
    with pytest.raises(ModelError, match="ended while it was read"):
        file.tensors["y.weight"].read()
    file.paths[0].unlink()
    with pytest.raises(ModelError, match="No such file"):
        file.tensors["y.weight"].read()


# What is wrong is named


def number(name, value):
    return key(name, U32, struct.pack("<I", value))


HUGE = struct.pack("<Q", 1 << 62)
WRONG = {
    "no GGUF file": whole(magic=b"GGML"), "is no GGUF file: it begins with b'PK": b"PK\3\4" + bytes(60),
    "the magic needs 4 bytes": b"", "big-endian": b"GGUF" + struct.pack(">IQQ", 3, 0, 0),
    "of version 1;": whole(version=1), "of version 4;": whole(version=4), "of version 0;": whole(version=0),
    f"number of tensors is {1 << 60}": header(counts=(1 << 60, 0)),
    f"number of keys is {1 << 60}": header(counts=(0, 1 << 60)), "number of keys is 3,": header(counts=(0, 3)),
    "key 'twice' occurs twice": whole([number("twice", 1), number("twice", 1)]),
    "key 0 has 0 characters": whole([number("", 1)]), "key 0 has 600 characters": whole([number("k" * 600, 1)]),
    "key 0 is not UTF-8": whole([number(b"\xff\xfe", 1)]),
    "value of 'k' has the type 13": whole([key("k", 13, b"")]),
    "value of 'k' is an array of arrays": whole([key("k", ARRAY, struct.pack("<IQ", ARRAY, 0))]),
    "value of 'a' has the type 77": whole([key("a", ARRAY, struct.pack("<IQ", 77, 0))]),
    f"length of the value of 'a' is {1 << 62}": whole([key("a", ARRAY, struct.pack("<I", 0) + HUGE)]),
    f"length of the value of 's' is {1 << 62}": whole([key("s", ARRAY, struct.pack("<I", STRING) + HUGE)]),
    f"value of 's' needs {1 << 62} bytes": whole([key("s", STRING, HUGE)]),
    "value of 'b' is the boolean 2": whole([key("b", 7, b"\2")]),
    "value of 'u' is not UTF-8": whole([key("u", STRING, text(b"\xc3("))]),
    "general.alignment must be a power of two up to 1048576, not 0": whole([number(ALIGNMENT, 0)]),
    "general.alignment must be a power of two up to 1048576, not 24": whole([number(ALIGNMENT, 24)]),
    "general.alignment must be a power of two up to 1048576, not 1.0": whole(
        [key(ALIGNMENT, 6, struct.pack("<f", 1.0))]),
    "tensor 't' occurs twice": whole([], [tensor("t"), tensor("t", offset=32)]),
    "tensors 't' and 's' overlap": whole([], [tensor("t", (16,)), tensor("s", offset=32)]),
    "tensor 't' is at offset 8, no multiple": whole([], [tensor("t", offset=8)]),
    "tensor 't' has 16 bytes at": whole([], [tensor("t", offset=64)]),
    f"tensor 't' has {1 << 64} bytes": whole([], [tensor("t", (1 << 31, 1 << 31))]),
    "tensor 'far' has 16 bytes at": whole([], [tensor("far", offset=(1 << 64) - 32)]),
    "tensor 't' has 5 dimensions": whole([], [tensor("t", (1, 1, 1, 1, 1))]),
    "tensor 't' has the shape [4, 0]": whole([], [tensor("t", (0, 4))]),
    "tensor 't' has the shape [33], which is impossible for type Q8_0": whole([], [tensor("t", (33,), 8)]),
    "tensor 't' is of type 99": whole([], [tensor("t", (4,), 99)]),
    "tensor 't' is of type 4,": whole([], [tensor("t", (32,), 4)]),
    "a tensor's name has 0 characters": whole([], [tensor("")]),
}


@pytest.mark.parametrize("message", WRONG)
def test_errors_name_file_and_field(tmp_path, message):
    with pytest.raises(ModelError) as caught:
        opened(tmp_path, WRONG[message])
    assert message in str(caught.value) and "model.gguf" in str(caught.value)
    assert len(str(caught.value)) < 1000


def test_paths_without_files(tmp_path):
    for path in (tmp_path, tmp_path / "absent.gguf"):
        with pytest.raises(ModelError, match=path.name):
            GgufFile.open(path)


def test_truncation_at_every_byte(tmp_path):
    path = tmp_path / "model.gguf"
    for length in range(len(SMALL)):
        path.write_bytes(SMALL[:length])
        with pytest.raises(ModelError, match=r"model\.gguf"):
            GgufFile.open(path)


# Split files


def write_parts(directory, count=7, per_part=3, name="model"):
    writer = gguf.GGUFWriter(directory / f"{name}.gguf", "qwen35", split_max_tensors=per_part)
    writer.add_string("general.name", "Split")
    for index in range(count):
        writer.add_tensor(f"t{index}", np.full((2, index + 1), index, np.float32))
    finish(writer)
    return sorted(directory.glob(f"{name}-*.gguf"))


def test_split_files_are_one_model(tmp_path):
    parts = write_parts(tmp_path)
    assert len(parts) == 3
    for part in parts:
        file = GgufFile.open(part)
        assert file.paths == tuple(parts) and file.metadata["general.name"] == "Split"
        assert list(file.tensors) == [f"t{index}" for index in range(7)]
        assert all(np.all(found.read().view(np.float32) == int(name[1:])) for name, found in file.tensors.items())


def test_mismatched_parts_named(tmp_path):
    parts = write_parts(tmp_path)
    second = parts[1].read_bytes()
    parts[1].unlink()
    for part in (parts[0], parts[2]):
        with pytest.raises(ModelError, match=r"model-00002-of-00003\.gguf is absent"):
            GgufFile.open(part)
    parts[1].write_bytes(parts[2].read_bytes())
    with pytest.raises(ModelError, match=r"00002-of-00003\.gguf: split\.(no|tensors\.count) is"):
        GgufFile.open(parts[0])
    parts[1].write_bytes(second[:-200])
    with pytest.raises(ModelError, match=r"00002-of-00003\.gguf"):
        GgufFile.open(parts[0])
    parts[1].write_bytes(second)
    renamed = parts[0].rename(tmp_path / "first.gguf")
    with pytest.raises(ModelError, match=r"first\.gguf is one of 3 parts"):
        GgufFile.open(renamed)


def test_a_tensor_in_two_parts_is_refused(tmp_path):
    parts = write_parts(tmp_path, count=4, per_part=2)
    data = parts[1].read_bytes()
    parts[1].write_bytes(data.replace(b"t2", b"t0"))
    with pytest.raises(ModelError, match="tensor 't0' is in both model-00001"):
        GgufFile.open(parts[0])


# Whatever the bytes are


def examine(path, data):
    """Open it and read all tensors, or be told why not; never take much memory."""
    path.write_bytes(data)
    tracemalloc.reset_peak()
    try:
        file = GgufFile.open(path)
        size = sum(found.read().size for found in file.tensors.values())
        assert size <= len(data)
    except ModelError as error:
        assert len(str(error)) < 2000
        return False
    finally:
        assert tracemalloc.get_traced_memory()[1] < PEAK
    return True


def fuzz(path, count, seed):
    rng = random.Random(seed)
    tracemalloc.start()
    try:
        return sum(examine(path, mutated(SMALL, rng)) for _ in range(count))
    finally:
        tracemalloc.stop()


def test_mutated_files_are_read_or_refused(tmp_path):
    accepted = fuzz(tmp_path / "model.gguf", 1700, seed=0)
    assert 0 < accepted < 1700


@pytest.mark.slow
def test_many_mutated_files_are_read_or_refused(tmp_path):
    assert 0 < fuzz(tmp_path / "model.gguf", 100_000, seed=1) < 100_000


@settings(max_examples=300)
@given(data=st.one_of(st.binary(max_size=300),
                      st.binary(max_size=300).map(lambda tail: b"GGUF\3\0\0\0" + tail),
                      st.tuples(st.integers(0, 3), st.integers(0, 3), st.binary(max_size=300)).map(
                          lambda parts: header(counts=parts[:2]) + parts[2])))
def test_any_bytes_are_read_or_refused(tmp_path_factory, data):
    tracemalloc.start()
    try:
        examine(tmp_path_factory.getbasetemp() / "any.gguf", data)
    finally:
        tracemalloc.stop()
