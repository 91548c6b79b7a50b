"""`list_gpus`: the GPUs and MIG devices that the driver's management library (NVML) lists; needs no CUDA context."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from typing import Any, Final

from .driver_gpu import DriverGpu, GpuFacts

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
