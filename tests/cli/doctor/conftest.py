"""A machine on which all is well, as facts; tests break one of them."""

from __future__ import annotations

from typing import Any

import pytest

from engine.cli.doctor import compute as torch_probe
from engine.cli.doctor import machine_facts
from engine.cli.doctor.compute import TorchFacts
from engine.cli.doctor.machine_facts import MachineFacts
from engine.launch.resolve.host_facts import HostFacts
from engine.launch.resolve.nvidia_gpus import GpuFacts

GIB = 1 << 30
AVX512 = ("avx2", "fma", "avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_bf16", "avx512_vnni")
FLAGS = frozenset((*AVX512, "amx_tile", "amx_bf16"))
GPU = GpuFacts("H100", 80 * GIB, 78 * GIB, (9, 0))


def host(**changes: Any) -> HostFacts:
    facts: dict[str, Any] = {
        "num_cpus": 8,
        "num_cores": 4,
        "cpu_quota": None,
        "cpu_flags": FLAGS,
        "mem_available_bytes": 16 * GIB,
        "cgroup_free_bytes": None,
        "torch_version": "2.14.1+cpu",
    }
    return HostFacts(**facts | changes)


def machine(**changes: Any) -> MachineFacts:
    facts: dict[str, Any] = {
        "python": (3, 12, 1),
        "is_64_bit": True,
        "system": "linux",
        "unmet": (),
        "host": host(),
        "has_nvidia_card": False,
        "has_nvidia_device": False,
        "shm_free_bytes": 8 * GIB,
        "open_files": (65536, 65536),
        "port_error": "",
        "port_holder": "",
        "server_error": "",
        "orphans": (),
        "socket_dirs": (),
        "cache_error": "",
    }
    return MachineFacts(**facts | changes)


def torch(**changes: Any) -> TorchFacts:
    facts: dict[str, Any] = {
        "version": "2.14.1+cpu",
        "import_s": 1.0,
        "isa": "amx",
        "compilers": ("/usr/bin/g++",),
    }
    return TorchFacts(**facts | changes)


def cuda_torch(**changes: Any) -> TorchFacts:
    facts: dict[str, Any] = {
        "version": "2.14.1+cu130",
        "cuda": "13.0",
        "archs": ("sm_80", "sm_90"),
        "capability": (9, 0),
        "kernels": {"sgl_kernel": "0.4.9", "triton": "3.8.0"},
    }
    return torch(**facts | changes)


@pytest.fixture
def gpu_host() -> HostFacts:
    """A machine with a GPU that all is well with."""
    return host(gpus=(GPU,), torch_version="2.14.1+cu130")


@pytest.fixture
def good_machine(monkeypatch):
    """No look at the real one."""
    monkeypatch.setattr(machine_facts, "gather_machine", lambda *args, **kwargs: machine())
    monkeypatch.setattr(torch_probe, "gather_torch", torch)
