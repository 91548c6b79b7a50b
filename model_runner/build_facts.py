"""`build_facts`: what a runner computes with, as words for the log and for the labels of a metric."""

from __future__ import annotations

import torch

from .attention.cpu_native import CpuNativeAttention
from .kernels.cpu.library import loaded_isa
from .model_runner import ModelRunner


def build_facts(runner: ModelRunner) -> dict[str, str]:
    """Version of torch, device, attention backend, and the instruction set that the kernels are compiled for."""
    device = runner.kv_pool.k[0].device
    return {
        "torch": str(torch.__version__),  # a subclass of str, which msgspec does not encode
        "device": device.type,
        "backend": runner.attention_backend,
        "instruction_set": _instruction_set(device, runner.attention_backend),
    }


def _instruction_set(device: torch.device, backend: str) -> str:
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        return f"sm_{major}{minor}"
    if backend == CpuNativeAttention.name:  # its library is loaded; loading it only to ask would compile it
        return loaded_isa()
    return torch.backends.cpu.get_cpu_capability().lower()
