"""`read_gpus`: the GPUs that CUDA will show to the engine's processes, in CUDA's order.

The driver's management library (NVML) lists all GPUs in the order of their buses, whatever `CUDA_VISIBLE_DEVICES` says,
so its list is filtered as CUDA does it. Containers may lack that library although CUDA works: then torch is asked.
"""

from __future__ import annotations

import ctypes
import json
import logging
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

_TIMEOUT_S: Final = 120.0
_PROGRAM: Final = """
import json, torch
gpus = []
for index in range(torch.cuda.device_count()):
    facts, (free, total) = torch.cuda.get_device_properties(index), torch.cuda.mem_get_info(index)
    gpus.append([facts.name, total, free, facts.major, facts.minor])
print(json.dumps(gpus))
"""


def gpus_of_torch(program: str = _PROGRAM) -> tuple[GpuFacts, ...]:
    """The GPUs that torch finds, as CUDA shows and orders them, for machines without a usable NVML; none if it fails.

    It takes seconds, and a process of its own: a CUDA context in this one would take memory of the GPU that its
    children serve with.
    """
    command = [sys.executable, "-P", "-c", program]
    environ = {**os.environ, **DEVICE_ORDER}
    try:
        done = subprocess.run(
            command,
            env=environ,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_TIMEOUT_S,
            check=True,
        )
        rows = json.loads(done.stdout)
    except (subprocess.SubprocessError, OSError, ValueError) as error:
        logger.warning("neither libnvidia-ml.so.1 nor torch can list the GPUs: %s", error)
        return ()
    return tuple(GpuFacts(name, total, free, (major, minor)) for name, total, free, major, minor in rows)


@dataclass(frozen=True, slots=True)
class GpuFacts:
    """One NVIDIA GPU: name, total and free memory, compute capability as (major, minor), None if unknown."""

    name: str
    total_bytes: int
    free_bytes: int
    compute_capability: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class DriverGpu:
    """One GPU, or one MIG device of it.

    Attributes:
        names: that `CUDA_VISIBLE_DEVICES` may give, in full: its UUID; a MIG device has the older form, too.
        is_partitioned: MIG is on: CUDA shows its MIG devices in its place.
        mig_devices: in the driver's order.
    """

    names: tuple[str, ...]
    facts: GpuFacts
    is_partitioned: bool = False
    mig_devices: tuple[DriverGpu, ...] = ()

    @property
    def is_mig(self) -> bool:
        """Whether it is a MIG device."""
        return self.names[0].startswith("MIG-")


_LIBRARY: Final = "libnvidia-ml.so.1"
_NAME_BYTES: Final = 96


class _Memory(ctypes.Structure):
    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


def list_gpus(load: Callable[[str], Any] = ctypes.CDLL) -> list[DriverGpu] | None:
    """All GPUs that this process may use, in the order of their buses; None: the library cannot be used."""
    try:
        nvml = load(_LIBRARY)
    except OSError:
        return None
    if nvml.nvmlInit_v2() != 0:
        return None
    try:
        count = ctypes.c_uint()
        if nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)) != 0:
            return None
        return [gpu for index in range(count.value) if (gpu := _gpu(nvml, index)) is not None]
    finally:
        nvml.nvmlShutdown()


def _gpu(nvml: Any, index: int) -> DriverGpu | None:
    handle = ctypes.c_void_p()
    if nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(handle)) != 0:
        return None
    major, minor = ctypes.c_int(), ctypes.c_int()
    failed = nvml.nvmlDeviceGetCudaComputeCapability(handle, ctypes.byref(major), ctypes.byref(minor))
    capability = None if failed else (major.value, minor.value)
    facts = _facts(nvml, handle, capability)
    if facts is None:
        return None
    uuid = _text(nvml.nvmlDeviceGetUUID, handle)
    current, pending = ctypes.c_uint(), ctypes.c_uint()
    not_known = nvml.nvmlDeviceGetMigMode(handle, ctypes.byref(current), ctypes.byref(pending))
    if not_known or not current.value:
        return DriverGpu((uuid,), facts)
    return DriverGpu((uuid,), facts, True, tuple(_mig_devices(nvml, handle, uuid, capability)))


def _mig_devices(
    nvml: Any, handle: ctypes.c_void_p, uuid: str, capability: tuple[int, int] | None
) -> Iterator[DriverGpu]:
    """The MIG devices of a GPU; their numbers may have gaps."""
    count = ctypes.c_uint()
    nvml.nvmlDeviceGetMaxMigDeviceCount(handle, ctypes.byref(count))
    for index in range(count.value):
        device, instances = ctypes.c_void_p(), (ctypes.c_uint(), ctypes.c_uint())
        if nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, index, ctypes.byref(device)) != 0:
            continue
        facts = _facts(nvml, device, capability)
        if facts is None:
            continue
        nvml.nvmlDeviceGetGpuInstanceId(device, ctypes.byref(instances[0]))
        nvml.nvmlDeviceGetComputeInstanceId(device, ctypes.byref(instances[1]))
        older = f"MIG-{uuid}/{instances[0].value}/{instances[1].value}"
        yield DriverGpu((_text(nvml.nvmlDeviceGetUUID, device), older), facts)


def _facts(nvml: Any, handle: ctypes.c_void_p, capability: tuple[int, int] | None) -> GpuFacts | None:
    memory = _Memory()
    if nvml.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory)) != 0:
        return None
    name = _text(nvml.nvmlDeviceGetName, handle)
    return GpuFacts(name, int(memory.total), int(memory.free), capability)


def _text(ask: Callable[..., int], handle: ctypes.c_void_p) -> str:
    text = ctypes.create_string_buffer(_NAME_BYTES)
    ask(handle, text, len(text))
    return text.value.decode(errors="replace")


_NUMBER: Final = re.compile(r"\+?\d+")  # `1abc` is 1, as for strtoul
_PREFIXES: Final = ("GPU-", "MIG-")


def visible_gpus(gpus: Sequence[DriverGpu], mask: str | None) -> tuple[GpuFacts, ...]:
    """The GPUs of the driver that CUDA shows to a process, in CUDA's order.

    The rules are those of the CUDA programming guide (environment variables) and of the MIG user guide (device
    enumeration), and where they are silent those of `torch.cuda.device_count`:

    - the variable is not set: all GPUs; it is empty: none;
    - entries are numbers, or beginnings of UUIDs that fit one GPU only (`GPU-...`, `MIG-...`); the first entry decides;
    - the list ends before the first entry that names no GPU (`-1` is one); an entry twice hides all;
    - a process sees one MIG device, the first; where there is one, it sees no whole GPU.

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


DEVICE_ORDER: Final = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
"""Environment of every process that uses CUDA: it numbers the GPUs as nvidia-smi does, not by their speed."""


def other_order(environ: Mapping[str, str]) -> str | None:
    """The order that the user asks for and the engine replaces; None: there is none."""
    ((variable, order),) = DEVICE_ORDER.items()
    asked = environ.get(variable, order)
    return None if asked == order else asked


logger = logging.getLogger(__name__)

_MASK: Final = "CUDA_VISIBLE_DEVICES"


class Gpus(NamedTuple):
    """The GPUs that CUDA shows, in its order, and the number of others that `CUDA_VISIBLE_DEVICES` hides."""

    visible: tuple[GpuFacts, ...] = ()
    num_hidden: int = 0


def read_gpus(
    root: Path,
    environ: Mapping[str, str],
    *,
    torch_has_cuda: bool,
    ask_driver: Callable[[], Sequence[DriverGpu] | None] = list_gpus,
    ask_torch: Callable[[], tuple[GpuFacts, ...]] = gpus_of_torch,
) -> Gpus:
    """Find the GPUs; without a driver there are none.

    Args:
        root: of the file system with `dev/`.
        environ: the environment of this process.
        torch_has_cuda: whether the installed torch is a CUDA build.
        ask_driver, ask_torch: for tests.
    """
    if not (root / "dev/nvidiactl").exists():
        return Gpus()
    mask = environ.get(_MASK)
    gpus = ask_driver()
    if gpus is None:
        if not torch_has_cuda or mask == "":
            return Gpus()
        found = ask_torch()
        if found:
            logger.warning(
                "libnvidia-ml.so.1 cannot be used, so torch was asked for the GPUs, which takes seconds"
            )
        return Gpus(found)
    order = other_order(environ)
    if order is not None and len({gpu.facts.name for gpu in gpus}) > 1:
        logger.warning(
            "CUDA_DEVICE_ORDER=%s is replaced by PCI_BUS_ID: numbers in %s are those of nvidia-smi",
            order,
            _MASK,
        )
    visible = visible_gpus(gpus, mask)
    return Gpus(visible, max(0, len(gpus) - len(visible)))
