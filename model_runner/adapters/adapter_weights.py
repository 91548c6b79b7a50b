"""`read_modules`: the matrices of an adapter's files, as numbers."""

from __future__ import annotations

import mmap
from typing import TYPE_CHECKING, Final

import torch

from ...models.adapters.read_adapter import adapter_fingerprint
from ...models.gguf.gguf_file import GGUFFile, is_gguf
from ...models.weight_files.safetensors_header import read_header
from ...runtime.errors import ConfigError
from ..weights.gguf_layout.gguf_order import pairs_apart
from .adapter_layers import LowRank

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from torch import Tensor

    from ...runtime.adapter_spec import AdapterSpec

_DTYPES: Final = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def read_modules(spec: AdapterSpec) -> dict[str, LowRank]:
    """The matrices by module, float32; B is multiplied by the module's scale.

    Raises:
        ConfigError: the files are missing or not those of the spec any more, or a number is not finite.
    """
    path = spec.file
    if adapter_fingerprint(path, spec.modules) != spec.fingerprint:
        raise ConfigError(f"{path}: has changed since adapter {spec.name!r} was loaded; load it again")
    read = _gguf_reader(path) if is_gguf(path) else _safetensors_reader(path)
    modules = {}
    for module in spec.modules:
        a, b = read(module.a), read(module.b)
        for name, tensor in ((module.a, a), (module.b, b)):
            if not bool(torch.isfinite(tensor.sum(dtype=torch.float64))) or not bool(
                torch.isfinite(tensor).all()
            ):
                raise ConfigError(
                    f"{path}: tensor {name!r} holds a value that is not finite (NaN or infinity); train or download "
                    "the adapter again"
                )
        if module.a_is_transposed:
            a = a.T
        if module.heads:
            b = pairs_apart(b, module.heads)
        modules[module.name] = LowRank(a, b * module.scale)
    return modules


def _safetensors_reader(path: Path) -> Callable[[str], Tensor]:
    entries = read_header(path).entries
    try:
        with open(path, "rb") as file:
            data = mmap.mmap(file.fileno(), 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from error

    def read(name: str) -> Tensor:
        entry = entries.get(name)
        if entry is None:
            raise ConfigError(f"{path}: tensor {name!r} is missing; load the adapter again")
        count = entry.num_bytes // _DTYPES[entry.dtype_name].itemsize
        flat = torch.frombuffer(data, dtype=_DTYPES[entry.dtype_name], count=count, offset=entry.offset)
        return flat.view(entry.shape).to(torch.float32, copy=True)

    return read


def _gguf_reader(path: Path) -> Callable[[str], Tensor]:
    file = GGUFFile(path)
    return lambda name: torch.from_numpy(file.read(name))
