"""Tiny GGUF files and model folders, made in the test's own folder."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

MakeGGUF = Callable[..., Path]


@pytest.fixture
def make_gguf(tmp_path: Path) -> MakeGGUF:
    """Write a GGUF file with the given metadata and tensors; the `gguf` package is the reference writer.

    Metadata values: bool, int (u32), float (f32), str, or a list of one of them. Tensors are float arrays,
    stored in the `gguf.GGMLQuantizationType` given with them (default F32).
    """

    def make(
        metadata: Mapping[str, Any],
        tensors: Mapping[str, np.ndarray | tuple[np.ndarray, gguf.GGMLQuantizationType]] | None = None,
        name: str = "tiny.gguf",
        arch: str = "llama",
    ) -> Path:
        path = tmp_path / name
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
        for tensor_name, tensor in (tensors or {}).items():
            data, kind = tensor if isinstance(tensor, tuple) else (tensor, gguf.GGMLQuantizationType.F32)
            writer.add_tensor(tensor_name, gguf.quants.quantize(data, kind), raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    return make
