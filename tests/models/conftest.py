"""Tiny GGUF files and model folders, made in the test's own folder."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

Tensor = np.ndarray | tuple[np.ndarray, gguf.GGMLQuantizationType]


@pytest.fixture(scope="session")
def write_gguf() -> Callable[..., Path]:
    """Write a GGUF file with the given metadata and tensors; the `gguf` package is the reference writer.

    Metadata values: bool, int (u32), float (f32), str, or a list of one of them. Tensors are float arrays,
    stored in the `gguf.GGMLQuantizationType` given with them (default F32).
    """

    def write(
        path: Path,
        metadata: Mapping[str, Any],
        tensors: Mapping[str, Tensor] | None = None,
        arch: str = "llama",
    ) -> Path:
        writer = gguf.GGUFWriter(path, arch)
        for key, value in metadata.items():
            if isinstance(value, bool):
                writer.add_bool(key, value)
            elif isinstance(value, int):
                writer.add_uint32(key, value)
            elif isinstance(value, float):
                writer.add_float32(key, value)
            elif isinstance(value, str):
                writer.add_string(key, value)
            else:
                writer.add_array(key, value)
        for name, tensor in (tensors or {}).items():
            data, kind = tensor if isinstance(tensor, tuple) else (tensor, gguf.GGMLQuantizationType.F32)
            writer.add_tensor(name, gguf.quants.quantize(data, kind), raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    return write


@pytest.fixture
def make_gguf(write_gguf: Callable[..., Path], tmp_path: Path) -> Callable[..., Path]:
    """`write_gguf` to tiny.gguf in the test's own folder."""

    def make(
        metadata: Mapping[str, Any], tensors: Mapping[str, Tensor] | None = None, arch: str = "llama"
    ) -> Path:
        return write_gguf(tmp_path / "tiny.gguf", metadata, tensors, arch)

    return make
