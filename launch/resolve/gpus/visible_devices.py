"""`visible_gpus`: which of the driver's GPUs CUDA shows to a process, and in which order.

The rules are those of the CUDA programming guide (environment variables) and of the MIG user guide (device
enumeration), and where they are silent those of `torch.cuda.device_count`:

- the variable is not set: all GPUs; it is empty: none;
- entries are numbers, or beginnings of UUIDs that fit one GPU only (`GPU-...`, `MIG-...`); the first entry decides;
- the list ends before the first entry that names no GPU (`-1` is one); an entry twice hides all;
- a process sees one MIG device, the first; where there is one, it sees no whole GPU.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

from .driver_gpu import DriverGpu, GpuFacts

_NUMBER: Final = re.compile(r"\+?\d+")  # `1abc` is 1, as for strtoul
_PREFIXES: Final = ("GPU-", "MIG-")


def visible_gpus(gpus: Sequence[DriverGpu], mask: str | None) -> tuple[GpuFacts, ...]:
    """The GPUs that CUDA shows.

    Args:
        gpus: of the driver, in the order of their buses.
        mask: `CUDA_VISIBLE_DEVICES`; None: not set.
    """
    chosen = list(gpus) if mask is None else _chosen(gpus, mask)
    devices = [device for gpu in chosen for device in (gpu.mig_devices if gpu.is_partitioned else (gpu,))]
    mig_devices = [device for device in devices if device.is_mig]
    return tuple(device.facts for device in mig_devices[:1] or devices)


def _chosen(gpus: Sequence[DriverGpu], mask: str) -> list[DriverGpu]:
    prefix = next((prefix for prefix in _PREFIXES if mask.startswith(prefix)), "")
    chosen: list[DriverGpu] = []
    for entry in mask.split(","):
        gpu = _named(gpus, entry.strip(), prefix) if prefix else _numbered(gpus, entry.strip())
        if gpu is None:
            break
        if gpu in chosen:
            return []
        chosen.append(gpu)
    return chosen


def _numbered(gpus: Sequence[DriverGpu], entry: str) -> DriverGpu | None:
    match = _NUMBER.match(entry)
    return gpus[int(match[0])] if match and int(match[0]) < len(gpus) else None


def _named(gpus: Sequence[DriverGpu], entry: str, prefix: str) -> DriverGpu | None:
    """The GPU, or MIG device, with a name that begins like this; None if there is none or several."""
    if not entry.startswith(prefix):
        return None
    devices = gpus if prefix == "GPU-" else [device for gpu in gpus for device in gpu.mig_devices]
    fitting = [device for device in devices if any(name.startswith(entry) for name in device.names)]
    return fitting[0] if len(fitting) == 1 else None
