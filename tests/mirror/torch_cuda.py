"""The names of `torch.cuda` that the product uses, on a mirror; and the device guard that CPU builds of torch lack."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from engine.model_runner.kernels.cpu.compiler import find_compilers, run_all
from engine.runtime.installation import cache_dir

from .streams import Event, Graph

if TYPE_CHECKING:
    from .mirror import Mirror

_SOURCE = Path(__file__).parent / "guard.cpp"
_TIME_LIMIT_S = 300.0


def install(mirror: Mirror, patch: pytest.MonkeyPatch) -> None:
    """Replace the names until the patch is undone."""
    streams, memory, host_memory = mirror.streams, mirror.memory, mirror.host_memory

    def properties(_device: Any = None) -> SimpleNamespace:
        return SimpleNamespace(
            name="mirror", multi_processor_count=mirror.num_sms, total_memory=memory.total_bytes
        )

    def empty_cache() -> None:
        streams.forbid_in_capture("torch.cuda.empty_cache")

    names: dict[str, Any] = {
        "_lazy_init": lambda: None,
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "set_device": lambda _device: None,
        "get_device_capability": lambda _device=None: mirror.capability,
        "get_device_properties": properties,
        "Stream": streams.new,
        "Event": functools.partial(Event, streams),
        "CUDAGraph": functools.partial(Graph, streams),
        "current_stream": lambda _device=None: streams.current,
        "stream": streams.use,
        "graph": streams.capture,
        "graph_pool_handle": lambda: (0, 1),
        "synchronize": lambda _device=None: streams.synchronize(),
        "empty_cache": empty_cache,
        "mem_get_info": lambda _device=None: (memory.total_bytes - memory.live_bytes, memory.total_bytes),
        "memory_reserved": lambda _device=None: memory.live_bytes,
        "max_memory_reserved": lambda _device=None: memory.peak_bytes,
        "reset_peak_memory_stats": lambda _device=None: memory.reset_peak(),
        "cudart": lambda: host_memory,
    }
    for name, replacement in names.items():
        patch.setattr(torch.cuda, name, replacement)
    patch.setattr(torch.Tensor, "pin_memory", lambda tensor, _device=None: host_memory.pin(tensor))
    make_tensor = torch.tensor

    def tensor(data: Any, *, device: Any = None, **options: Any) -> torch.Tensor:
        """As `torch.tensor`; no dispatch mode sees its copy to the device."""
        made = make_tensor(data, **options)
        return made if device is None else made.to(device)

    patch.setattr(torch, "tensor", tensor)


@functools.cache
def load_guard() -> None:
    """Give "cuda" a device guard that does nothing, in this process from now on; compiled at the first use."""
    if torch.version.cuda is not None:  # such a build has one, also without a driver
        return
    compilers = find_compilers()
    if not compilers:
        pytest.skip("no C++ compiler for the device guard of the mirror")
    compiler = compilers[0]
    key = repr((_SOURCE.read_text(), torch.__version__, torch.__file__, compiler.identity))
    path = cache_dir() / "tests" / f"guard-{hashlib.sha256(key.encode()).hexdigest()[:24]}.so"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        root = Path(torch.__file__).parent
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            made = Path(folder) / path.name
            paths = (f"-I{root / 'include'}", f"-L{root / 'lib'}")
            command = [compiler.path, "-std=c++20", "-shared", "-fPIC", "-w", *paths]
            command += [str(_SOURCE), "-lc10", "-o", str(made)]
            run_all([command], Path(folder), time.monotonic() + _TIME_LIMIT_S)
            os.replace(made, path)
    ctypes.CDLL(str(path))
