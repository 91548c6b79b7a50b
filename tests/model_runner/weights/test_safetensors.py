"""The safetensors reader on damaged files: read or refused with the reason, in bounded memory, and nothing else."""

from __future__ import annotations

import json
import math
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from engine.model_runner.weights.safetensors import SafetensorsStore
from engine.models.weight_files.safetensors_header import SINGLE_FILE
from engine.runtime.errors import ConfigError
from tests.selection import examples

GOOD: dict[str, Any] = {
    "__metadata__": {"format": "pt"},
    "a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
    "b": {"dtype": "BF16", "shape": [4], "data_offsets": [24, 32]},
    "c": {"dtype": "I64", "shape": [2], "data_offsets": [32, 48]},
}
DATA = bytes(range(48))
DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16}


def file_of(header: bytes, data: bytes = DATA, length: int | None = None) -> bytes:
    return (len(header) if length is None else length).to_bytes(8, "little") + header + data


def store_of(folder: Path, content: bytes) -> SafetensorsStore:
    (folder / SINGLE_FILE).write_bytes(content)
    return SafetensorsStore(folder)


def read_all(store: SafetensorsStore, header: Any) -> None:
    """Read every tensor that a reader would ask for, in the shape and type of its header."""
    for name in sorted(store.names()):
        shape = store.shape(name, ())
        assert shape is not None
        dtype = DTYPES.get(header[name]["dtype"]) if isinstance(header.get(name), dict) else None
        if dtype is not None and math.prod(shape) < 1000:
            store.read(name, torch.empty(shape, dtype=dtype))


def test_the_file_is_good_before_it_is_damaged(tmp_path):
    store = store_of(tmp_path, file_of(json.dumps(GOOD).encode()))
    out = torch.empty(2, 3)
    store.read("a", out)
    assert out.flatten().tolist() == torch.frombuffer(bytearray(DATA[:24]), dtype=torch.float32).tolist()
    assert store.names() == {"a", "b", "c"}


@pytest.mark.parametrize(
    ("name", "fields", "message"),
    [
        ("b", {"data_offsets": [16, 24]}, "tensors 'a' and 'b' overlap"),
        ("b", {"data_offsets": [23, 31]}, "overlap"),
        ("b", {"data_offsets": [48, 56]}, "tensor 'b' ends at byte"),
        ("b", {"data_offsets": [24.0, 32.0]}, "damaged"),
        ("b", {"data_offsets": [24, 32, 40]}, "damaged"),
        ("b", {"data_offsets": [32, 24]}, "damaged"),
        ("b", {"data_offsets": [-8, 0]}, "damaged"),
        ("b", {"data_offsets": "24"}, "damaged"),
        ("b", {"data_offsets": [24, 10**30]}, "damaged"),
        ("b", {"shape": [4, 2]}, "does not take 8 bytes"),
        ("b", {"shape": [True, 4]}, "damaged"),
        ("b", {"shape": [4.0]}, "damaged"),
        ("b", {"shape": [-2, -2]}, "damaged"),
        ("b", {"shape": [2**40, 2**40]}, "damaged"),
        ("b", {"shape": None}, "damaged"),
        ("b", {"dtype": ["BF16"]}, "damaged"),
        ("b", {"dtype": None}, "damaged"),
    ],
)
def test_a_damaged_entry_is_refused_with_the_reason(tmp_path, name, fields, message):
    header = GOOD | {name: GOOD[name] | fields}
    with pytest.raises(ConfigError, match=message) as caught:
        store_of(tmp_path, file_of(json.dumps(header).encode()))
    assert "download it again" in str(caught.value)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x00" * 7,
        file_of(b"", length=2**64 - 1),
        file_of(b"{}", length=2**40),
        file_of(b"[]"),
        file_of(b"null"),
        file_of(b"5"),
        file_of(b'{"a": 5}'),
        file_of(b'{"a": {}}'),
        file_of(b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}, "a": {}}'),
        file_of(b'{"a": ' + b"[" * 100_000),
        file_of(b'{"a": ' + b"9" * 5000 + b"}"),
        file_of(b"\xff\xfe"),
        file_of(json.dumps(GOOD).encode(), DATA[:-1]),
    ],
)
def test_a_damaged_file_is_refused_with_the_reason(tmp_path, content):
    with pytest.raises(ConfigError, match="download it again"):
        store_of(tmp_path, content)


NUMBERS = st.sampled_from(
    [0, 1, 2, 4, 8, 24, 32, 48, 49, -1, 2**31, 2**63, 2**64, 10**40, 0.5, 24.0, True, None]
)
VALUES = (
    NUMBERS
    | st.lists(NUMBERS, max_size=5)
    | st.text(max_size=3)
    | st.dictionaries(st.text(max_size=2), NUMBERS)
)
ENTRIES = st.fixed_dictionaries(
    {},
    optional={
        "dtype": st.sampled_from(["F32", "BF16", "F16", "I64", "F8_E4M3", "I32", "X", ""]) | VALUES,
        "shape": st.lists(st.integers(0, 9), max_size=4) | VALUES,
        "data_offsets": st.lists(st.integers(0, 60), min_size=2, max_size=2) | VALUES,
        "extra": VALUES,
    },
)
FUZZ = settings(
    max_examples=examples(200),
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


def check(folder: Path, content: bytes, header: Any) -> None:
    tracemalloc.start()
    try:
        read_all(store_of(folder, content), header)
    except ConfigError:
        pass
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < 1 << 20


@FUZZ
@given(
    changes=st.dictionaries(
        st.sampled_from(["a", "b", "c", "d", "", "__metadata__"]), ENTRIES | VALUES, max_size=4
    )
)
def test_any_header_is_read_or_refused(tmp_path, changes):
    header: dict[str, Any] = {**GOOD}
    for name, change in changes.items():
        before = GOOD.get(name)
        header[name] = before | change if isinstance(before, dict) and isinstance(change, dict) else change
    check(tmp_path, file_of(json.dumps(header).encode()), header)


@FUZZ
@given(
    edits=st.lists(st.tuples(st.integers(0, 250), st.binary(min_size=1, max_size=9)), max_size=4),
    cut=st.integers(0, 300),
)
def test_any_bytes_are_read_or_refused(tmp_path, edits, cut):
    content = bytearray(file_of(json.dumps(GOOD).encode()))
    for position, replacement in edits:
        content[position : position + len(replacement)] = replacement
    check(tmp_path, bytes(content[:cut] if cut < 290 else content), {})


def test_a_decoder_without_a_head_has_names_without_the_prefix(tmp_path):
    save_file(
        {"embed_tokens.weight": torch.ones(2, 3), "layers.0.mlp.up_proj.weight": torch.full((1, 2), 5.0)},
        tmp_path / SINGLE_FILE,
    )
    store = SafetensorsStore(tmp_path)

    assert store.names() == {"model.embed_tokens.weight", "model.layers.0.mlp.up_proj.weight"}
    out = torch.empty(1, 2)
    store.read("model.layers.0.mlp.up_proj.weight", out)
    assert out.tolist() == [[5.0, 5.0]]
