"""The GGUF reader: what the reference writer writes is read back, and damaged files are refused."""

from __future__ import annotations

import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.models.gguf.gguf_file import GGUFFile, dequantize, is_gguf
from engine.runtime.errors import ConfigError
from tests.selection import examples

MakeGGUF = Callable[..., Path]


def write(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


def header(version: int = 3, num_tensors: int = 0, num_metadata: int = 0, magic: bytes = b"GGUF") -> bytes:
    return struct.pack("<4sIQQ", magic, version, num_tensors, num_metadata)


def string(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def tensor(name: str, shape: list[int], type_id: int, offset: int) -> bytes:
    """One directory entry; `shape` in the order of the file."""
    dims = struct.pack(f"<{len(shape)}Q", *shape)
    return string(name) + struct.pack("<I", len(shape)) + dims + struct.pack("<IQ", type_id, offset)


def padded(directory: bytes, data_bytes: int) -> bytes:
    return directory + bytes(-len(directory) % 32) + bytes(data_bytes)


def test_metadata_and_tensors_come_back(make_gguf: MakeGGUF) -> None:
    weights = np.arange(6 * 64, dtype=np.float32).reshape(6, 64)
    path = make_gguf(
        {
            "a.int": 7,
            "a.float": 0.5,
            "a.bool": True,
            "a.text": "naïve 🙂",
            "a.words": ["x", "", "é"],
            "a.ids": [3, 4],
        },
        {"norm": np.ones(64, np.float32), "w": (weights, gguf.GGMLQuantizationType.F16)},
    )

    file = GGUFFile(path)

    assert file.version == 3
    assert file.metadata["general.architecture"] == "llama"
    assert file.metadata["a.int"] == 7
    assert file.metadata["a.float"] == 0.5
    assert file.metadata["a.bool"] is True
    assert file.metadata["a.text"] == "naïve 🙂"
    assert file.metadata["a.words"] == ["x", "", "é"]
    np.testing.assert_array_equal(file.metadata["a.ids"], [3, 4])
    info = file.tensors["w"]
    assert (info.shape, info.ggml_type.name, info.num_bytes) == ((6, 64), "F16", 6 * 64 * 2)
    np.testing.assert_array_equal(file.read("w"), weights)
    np.testing.assert_array_equal(dequantize(info, file.raw(info)[2:4]), weights[2:4])
    assert file.read("norm").shape == (64,)


def test_tensor_bytes_are_a_read_only_view(make_gguf: MakeGGUF) -> None:
    file = GGUFFile(make_gguf({}, {"w": np.ones((2, 32), np.float32)}))
    raw = file.raw(file.tensors["w"])
    assert not raw.flags.owndata
    with pytest.raises(ValueError, match="read-only"):
        raw[0] = 0


def test_a_missing_tensor_is_named(make_gguf: MakeGGUF) -> None:
    with pytest.raises(ConfigError, match=r"tiny\.gguf: there is no tensor 'output.weight'"):
        GGUFFile(make_gguf({}, {"w": np.ones((2, 32), np.float32)})).read("output.weight")


def test_every_truncation_is_refused(make_gguf: MakeGGUF, tmp_path: Path) -> None:
    whole = make_gguf(
        {"a.words": ["x", "y"], "a.ids": [1, 2]}, {"w": np.ones((2, 32), np.float32)}
    ).read_bytes()
    for length in range(len(whole)):
        with pytest.raises(ConfigError, match=r"download it again|not a GGUF file"):
            GGUFFile(write(tmp_path / "cut.gguf", whole[:length]))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "shorter than a GGUF header"),
        (header(magic=b"PK\x03\x04"), "not a GGUF file"),
        (header(version=1), "version 1 is not supported"),
        (header(version=4), "version 4 is not supported"),
        (struct.pack(">4sIQQ", b"GGUF", 3, 0, 0), "big-endian"),
        (header(num_metadata=1 << 40), "1099511627776 metadata entries"),
        (header(num_tensors=1 << 63), "9223372036854775808 tensors"),
        (header(num_metadata=1) + struct.pack("<Q", 1 << 62), "bytes long, the limit is"),
        (header(num_metadata=1) + struct.pack("<Q", 2) + b"\xff\xfe", "not UTF-8"),
        (header(num_metadata=1) + string("k") + struct.pack("<I", 99), "unsupported value type 99"),
        (header(num_metadata=1) + string("k") + struct.pack("<IIQ", 9, 9, 1), "unsupported value type 9"),
        (header(num_metadata=1) + string("k") + struct.pack("<IIQ", 9, 8, 1 << 50), "elements, the limit is"),
        (
            header(num_metadata=1) + string("k") + struct.pack("<IIQ", 9, 8, 1 << 23),
            "truncated or damaged in k",
        ),
        (
            header(num_metadata=1) + string("k") + struct.pack("<IIQ", 9, 4, 1 << 23),
            "truncated or damaged in k",
        ),
        (header(num_metadata=2) + (string("k") + struct.pack("<IB", 0, 1)) * 2, "'k' appears twice"),
        (
            header(num_metadata=1) + string("general.alignment") + struct.pack("<II", 4, 24),
            "general.alignment is 24, expected a power of two",
        ),
        (header(num_tensors=1) + string("w") + struct.pack("<I", 1 << 30), "1073741824 dimensions"),
        (padded(header(num_tensors=1) + tensor("w", [32], 77, 0), 128), "unknown type 77"),
        (padded(header(num_tensors=1) + tensor("w", [33], 3, 0), 128), "impossible shape"),
        (padded(header(num_tensors=1) + tensor("w", [0], 0, 0), 128), "impossible shape"),
        (padded(header(num_tensors=1) + tensor("w", [1 << 63, 1 << 63], 0, 0), 128), "impossible shape"),
        (padded(header(num_tensors=1) + tensor("w", [32], 0, 4), 256), "not aligned"),
        (padded(header(num_tensors=1) + tensor("w", [32], 0, 1 << 62), 128), "truncated: tensor 'w'"),
        (padded(header(num_tensors=2) + tensor("a", [32], 0, 0) + tensor("b", [32], 0, 64), 256), "overlap"),
        (
            padded(header(num_tensors=2) + tensor("a", [32], 0, 0) + tensor("a", [32], 0, 128), 256),
            "same name",
        ),
    ],
)
def test_damage_is_refused_with_the_reason(tmp_path: Path, data: bytes, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        GGUFFile(write(tmp_path / "bad.gguf", data))
    assert "bad.gguf" in str(caught.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"absent\.gguf: cannot be read"):
        GGUFFile(tmp_path / "absent.gguf")


def test_is_gguf(make_gguf: MakeGGUF, tmp_path: Path) -> None:
    assert is_gguf(make_gguf({}))
    assert not is_gguf(write(tmp_path / "other", b"PK"))
    assert not is_gguf(tmp_path / "absent")


def fuzz_seed() -> bytes:
    """A small valid file with every kind of field."""
    words = struct.pack("<IIQ", 9, 8, 3) + string("a") + string("bc") + string("é")
    numbers = struct.pack("<IIQ3i", 9, 5, 3, 1, -1, 2)
    metadata = (
        string("t.words")
        + words
        + string("t.types")
        + numbers
        + string("t.eps")
        + struct.pack("<If", 6, 1e-5)
    )
    metadata += string("t.flag") + struct.pack("<IB", 7, 1) + string("t.none") + struct.pack("<IIQ", 9, 4, 0)
    directory = tensor("a", [32, 2], 3, 0) + tensor("b", [4], 0, 64)
    return padded(header(num_tensors=2, num_metadata=5) + metadata + directory, 96)


EDITS = st.lists(
    st.tuples(
        st.integers(0, len(fuzz_seed()) - 1),
        st.one_of(st.binary(min_size=1, max_size=9), st.just(b"\xff" * 8), st.just(b"\x00" * 8)),
    ),
    max_size=6,
)


def test_lists_of_strings_can_be_skipped(make_gguf: MakeGGUF, tmp_path: Path) -> None:
    path = make_gguf({"a.words": ["x", "", "é"], "b.int": 7}, {"norm": np.ones(64, np.float32)})
    whole, without = GGUFFile(path), GGUFFile(path, with_lists=False)
    assert set(whole.metadata) - set(without.metadata) == {"a.words"} and without.metadata["b.int"] == 7
    assert without.tensors == whole.tensors

    data = header(num_metadata=1) + string("k") + struct.pack("<IIQ", 9, 8, 2) + string("a")
    for end in (b"", struct.pack("<Q", 1 << 40), struct.pack("<Q", 9) + b"abc"):
        with pytest.raises(ConfigError, match="truncated or damaged in k"):
            GGUFFile(write(tmp_path / "short.gguf", data + end), with_lists=False)


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="no /proc")
def test_pages_that_are_released_are_not_resident_and_read_the_same(
    make_gguf: MakeGGUF,
) -> None:
    weights = np.arange(1 << 20, dtype=np.float32).reshape(1024, 1024)
    path = make_gguf({}, {"w": weights, "norm": np.ones(64, np.float32)})
    file = GGUFFile(path)
    info = file.tensors["w"]
    raw = file.raw(info)

    def resident_kib() -> int:
        _, _, after = Path("/proc/self/smaps").read_text().partition(str(path))
        return int(after.partition("Rss:")[2].split()[0])

    assert np.array_equal(raw.view(np.float32), weights) and resident_kib() >= 4096
    file.release(info, 0, 2 << 20)
    assert resident_kib() <= 2200
    file.release(info)
    assert resident_kib() <= 100
    assert np.array_equal(raw.view(np.float32), weights)


@settings(
    max_examples=examples(600),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(edits=EDITS, length=st.integers(0, len(fuzz_seed()) + 16))
def test_mutated_files_are_read_or_refused(
    tmp_path: Path, edits: list[tuple[int, bytes]], length: int
) -> None:
    data = bytearray(fuzz_seed())
    for position, replacement in edits:
        data[position : position + len(replacement)] = replacement
    path = write(tmp_path / "fuzz.gguf", bytes(data[:length]) if length < len(data) else bytes(data))
    tracemalloc.start()
    try:
        file = GGUFFile(path)
        for info in file.tensors.values():
            assert file.raw(info).nbytes == info.num_bytes
    except ConfigError:
        pass
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < 1 << 20


def test_the_fuzzed_file_is_valid_before_it_is_mutated(tmp_path: Path) -> None:
    file = GGUFFile(write(tmp_path / "seed.gguf", fuzz_seed()))
    assert list(file.tensors) == ["a", "b"]
    assert file.metadata["t.words"] == ["a", "bc", "é"]
