"""`HostFacts`: the CPUs, memory and GPUs that this process may use. Read once at start, without torch.

The limits of the process count, not the size of the machine: a container with a limit of 2 GB on a machine with 64 GB
has 2 GB, and a process pinned to two cores has two. Everything is read from files under `root`, so that tests can
describe any machine.
"""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Final

from ...runtime.errors import ConfigError
from ...runtime.installation import cache_dir
from .nvidia_gpus import GpuFacts, read_gpus

COMPILERS: Final = ("g++", "c++", "clang++")
"""Compilers for the engine's own CPU kernels. GCC first: torch ships the runtime library that its code calls."""
_UNLIMITED_BYTES = 1 << 60  # cgroup v1 writes "no limit" as a number just below 2**63


@dataclass(frozen=True, slots=True, kw_only=True)
class HostFacts:
    """Resources that the engine may use on this machine.

    Attributes:
        num_cpus: logical CPUs in the affinity mask.
        num_cores: physical cores that these CPUs belong to.
        cpu_quota: CPU time that the cgroup grants, in CPUs; None: no quota.
        cpu_flags: instruction set extensions, as Linux names them.
        mem_available_bytes: memory that can be allocated without swapping, machine-wide.
        cgroup_free_bytes: memory that the cgroup still grants; None: no limit.
        gpus: the NVIDIA GPUs that CUDA shows, in its order.
        num_hidden_gpus: others, which CUDA_VISIBLE_DEVICES hides.
        has_cpu_kernels: whether the engine's own kernels are compiled, or there is a compiler.
        torch_version: with its local part (`2.9.0+cpu`); empty when torch is not installed.
    """

    num_cpus: int
    num_cores: int
    cpu_quota: float | None
    cpu_flags: frozenset[str]
    mem_available_bytes: int
    cgroup_free_bytes: int | None
    gpus: tuple[GpuFacts, ...] = ()
    num_hidden_gpus: int = 0
    torch_version: str = ""
    has_cpu_kernels: bool = True

    @property
    def mem_usable_bytes(self) -> int:
        """The smaller of the machine's and the cgroup's free memory."""
        if self.cgroup_free_bytes is None:
            return self.mem_available_bytes
        return min(self.mem_available_bytes, self.cgroup_free_bytes)

    @property
    def torch_has_cuda(self) -> bool:
        """Whether the installed torch is a CUDA build, according to its version (importing it takes seconds)."""
        return _has_cuda(self.torch_version)


def read_host_facts(root: Path = Path("/")) -> HostFacts:
    """Read the facts of the machine; takes milliseconds, or seconds on a machine with a GPU but without NVML."""
    cpus = sorted(os.sched_getaffinity(0))
    torch_version = _torch_version()
    gpus = read_gpus(root, os.environ, torch_has_cuda=_has_cuda(torch_version))
    return HostFacts(
        num_cpus=len(cpus),
        num_cores=_count_cores(root, cpus),
        cpu_quota=_cpu_quota(root),
        cpu_flags=_cpu_flags(root),
        mem_available_bytes=_mem_available_bytes(root),
        cgroup_free_bytes=_cgroup_free_bytes(root),
        gpus=gpus.visible,
        num_hidden_gpus=gpus.num_hidden,
        torch_version=torch_version,
        has_cpu_kernels=_has_cpu_kernels(),
    )


# ---------------------------------------------------------------- CPUs


def _count_cores(root: Path, cpus: list[int]) -> int:
    """Hyperthreads of one core count once: two of them multiply matrices no faster than one."""
    siblings = {
        _read(root / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list") or str(cpu)
        for cpu in cpus
    }
    return len(siblings)


def _cpu_flags(root: Path) -> frozenset[str]:
    for line in _read(root / "proc/cpuinfo").splitlines():
        key, _, value = line.partition(":")
        if key.strip() in ("flags", "Features"):  # x86, ARM
            return frozenset(value.split())
    return frozenset()


def _has_cpu_kernels() -> bool:
    """An estimate: the compiler may fail, and the compiled files may belong to another version."""
    if any(shutil.which(name) for name in COMPILERS):
        return True
    try:
        return any((cache_dir() / "kernels").glob("cpu-*.so"))
    except (ConfigError, OSError):
        return False


def _cpu_quota(root: Path) -> float | None:
    """The tightest quota between this process's cgroup and the root of the hierarchy, in CPUs."""
    quotas = []
    for folder in _cgroup_v2_folders(root):
        quota, _, period = _read(folder / "cpu.max").partition(" ")
        if quota.isdigit() and period.isdigit():
            quotas.append(int(quota) / int(period))
    for folder in _cgroup_v1_folders(root, "cpu"):
        quota, period = _read(folder / "cpu.cfs_quota_us"), _read(folder / "cpu.cfs_period_us")
        if quota.isdigit() and period.isdigit():  # -1: no quota
            quotas.append(int(quota) / int(period))
    return min(quotas, default=None)


# ---------------------------------------------------------------- memory


def _mem_available_bytes(root: Path) -> int:
    for line in _read(root / "proc/meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 0


def _cgroup_free_bytes(root: Path) -> int | None:
    """Limit minus use, of the tightest cgroup. File pages that can be dropped at once do not count as used."""
    free = []
    for folder in _cgroup_v2_folders(root):
        limit = _read(folder / "memory.max")
        if limit.isdigit():
            used = _int(_read(folder / "memory.current")) - _memory_stat(folder, "inactive_file")
            free.append(int(limit) - used)
    for folder in _cgroup_v1_folders(root, "memory"):
        limit = _read(folder / "memory.limit_in_bytes")
        if limit.isdigit() and int(limit) < _UNLIMITED_BYTES:
            used = _int(_read(folder / "memory.usage_in_bytes")) - _memory_stat(folder, "total_inactive_file")
            free.append(int(limit) - used)
    return max(0, min(free)) if free else None


def _memory_stat(folder: Path, key: str) -> int:
    for line in _read(folder / "memory.stat").splitlines():
        name, _, value = line.partition(" ")
        if name == key:
            return _int(value)
    return 0


def _cgroup_v2_folders(root: Path) -> Iterator[Path]:
    for line in _read(root / "proc/self/cgroup").splitlines():
        hierarchy, _, path = line.split(":", 2)
        if hierarchy == "0":
            yield from _up_to_mount(root / "sys/fs/cgroup", path)


def _cgroup_v1_folders(root: Path, controller: str) -> Iterator[Path]:
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controller in controllers.split(","):
            yield from _up_to_mount(root / "sys/fs/cgroup" / controller, path)


def _up_to_mount(mount: Path, path: str) -> Iterator[Path]:
    """The cgroup's folder and its parents; in a container the path may be the host's, then only the mount exists."""
    folder = mount / path.lstrip("/")
    while folder != mount:
        yield folder
        folder = folder.parent
    yield mount


# ---------------------------------------------------------------- torch


def _torch_version() -> str:
    try:
        return metadata.version("torch")
    except metadata.PackageNotFoundError:
        return ""


def _has_cuda(torch_version: str) -> bool:
    is_other = torch_version.endswith(("+cpu", "+xpu")) or "rocm" in torch_version
    return bool(torch_version) and not is_other


def _read(path: Path) -> str:
    """The file's text without surrounding space; empty if it cannot be read, which means "no such limit"."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def _int(text: str) -> int:
    return int(text) if text.isdigit() else 0


def usable_threads(host: HostFacts) -> int:
    """Threads that can compute at the same time: physical cores, fewer if a quota grants less."""
    if host.cpu_quota is None:
        return max(1, host.num_cores)
    return max(1, min(host.num_cores, math.ceil(host.cpu_quota)))
