"""The checks of `TorchFacts`: torch, the GPU's kernels, and those of the CPU."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from ...launch.resolve.host_facts import HostFacts
from ...launch.resolve.kernel_checks import runs_kernels
from ...launch.resolve.nvidia_gpus import DEVICE_ORDER
from ...launch.resolve.resolve import BF16_FLAGS
from ...runtime.config.engine_config import EngineConfig
from .check import Check, fail, ok, skip, warn

_TIME_LIMIT_S: Final = 400.0
"""A test of a kernel package takes seconds to minutes, compiling the CPU kernels half a minute."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchFacts:
    """See the module.

    Attributes:
        error: why torch cannot be imported, in one line; the other fields are unset then.
        version, cuda: of torch; `cuda` is None for a build without it.
        import_s: how long the import took.
        archs: the GPU code in torch: `sm_90`, `compute_90`.
        capability: of the first GPU that torch finds; None without one.
        kernel_lines: kernel packages that cannot be used, with reason and fix.
        kernels: those that can, with their versions.
        isa: the ISA target of the best CPU kernels for this CPU.
        loaded_isa: the ISA target of the loaded kernels, a lower one if the best cannot be compiled;
            "" if none are loaded.
        cpu_kernels_error: why those are not used; "" if they are.
        compilers: for C++, on the path.
        product_flops: floating-point operations per second of products on the CPU, in the faster of two dtypes.
    """

    error: str = ""
    version: str = ""
    cuda: str | None = None
    import_s: float = 0.0
    archs: tuple[str, ...] = ()
    capability: tuple[int, int] | None = None
    kernel_lines: tuple[str, ...] = ()
    kernels: dict[str, str] = field(default_factory=dict)
    isa: str = ""
    loaded_isa: str = ""
    cpu_kernels_error: str = ""
    compilers: tuple[str, ...] = ()
    product_flops: float = 0.0


def gather_torch(time_limit_s: float = _TIME_LIMIT_S) -> TorchFacts:
    """Gather the facts in another process."""
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-m", __name__],
            env={**os.environ, **DEVICE_ORDER, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=time_limit_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return TorchFacts(error=f"it did not end within {time_limit_s:g} s")
    return read_answer(done.returncode, done.stdout, done.stderr)


def read_answer(code: int, stdout: str, stderr: str) -> TorchFacts:
    """The facts from the exit code and output of that process; libraries may have printed more."""
    for line in reversed(stdout.splitlines()):
        try:
            answer: dict[str, Any] = json.loads(line)
            return TorchFacts(**{name: _tuple(value) for name, value in answer.items()})
        except (ValueError, TypeError, AttributeError):
            continue
    if code < 0:
        return TorchFacts(error=f"its process was ended by signal {-code}")
    last = next((line for line in reversed(stderr.splitlines()) if line.strip()), "")
    return TorchFacts(error=last.strip()[:300] or f"its process ended with exit code {code}")


def _tuple(value: object) -> Any:
    return tuple(value) if isinstance(value, list) else value


def torch_facts() -> TorchFacts:
    """Gather the facts in this process."""
    started_s = time.monotonic()
    try:
        import torch
    except Exception as error:  # of any kind: a loader's OSError, an ImportError, a bug of another package
        return TorchFacts(error=f"{type(error).__name__}: {str(error).partition(chr(10))[0][:300]}")
    import_s = time.monotonic() - started_s
    from ...model_runner.kernels.cpu.compiler import best_isa, find_compilers
    from ...model_runner.kernels.cpu.library import load_library, reasons_against_library
    from ...model_runner.kernels.probe import gather_facts, judge, log_lines

    facts = gather_facts()
    probe = judge(facts)
    reasons = reasons_against_library()
    found = {"sgl_kernel": probe.sgl_kernel, "triton": probe.triton}
    return TorchFacts(
        version=facts.torch_version,
        cuda=facts.torch_cuda,
        import_s=import_s,
        archs=tuple(torch.cuda.get_arch_list()) if facts.torch_cuda else (),
        capability=facts.capability,
        kernel_lines=tuple(log_lines(probe)),
        kernels={name: finding.version for name, finding in found.items() if finding.version is not None},
        isa=best_isa(),
        loaded_isa="" if reasons else Path(load_library()._name).name.split("-")[1],  # `build` names files so
        cpu_kernels_error="; ".join(reasons),
        compilers=tuple(compiler.path for compiler in find_compilers()),
        product_flops=_product_flops(),
    )


def _product_flops() -> float:
    """Measure products as a tower of images makes them, for some tenths of a second."""
    import torch

    rates = []
    for dtype in (torch.float32, torch.bfloat16):
        x, weight = (torch.ones((1024, 768), dtype=dtype) for _ in range(2))
        for _ in range(3):  # the first one also prepares
            started_s = time.perf_counter()
            torch.nn.functional.linear(x, weight)
            rates.append(2 * 1024 * 1024 * 768 / (time.perf_counter() - started_s))
    return max(rates)


if __name__ == "__main__":
    print(json.dumps(asdict(torch_facts())))


_REINSTALL: Final = "pip install --force-reinstall torch"


def check_compute(torch: TorchFacts, host: HostFacts, config: EngineConfig) -> Iterator[Check]:
    """All checks, in the order of the report."""
    yield check_torch(torch, host, config)
    if torch.error:
        for code in ("gpu", "kernels", "cpu"):
            yield skip(code, "torch does not work")
        return
    on_gpu = uses_gpu(host, config)
    if on_gpu:
        yield check_gpu(torch)
        yield check_gpu_kernels(torch)
    else:
        yield check_cpu(torch, host)
        yield check_cpu_kernels(torch, host)


def uses_gpu(host: HostFacts, config: EngineConfig) -> bool:
    """Whether the model would run on a GPU, as `resolve` decides it."""
    if config.model.device == "auto":
        return bool(host.gpus) and host.torch_has_cuda
    return config.model.device == "cuda"


def check_torch(torch: TorchFacts, host: HostFacts, config: EngineConfig) -> Check:
    """Check that torch can be imported and is the right build."""
    if torch.error:
        if not host.torch_version:
            return fail("torch", "torch is not installed", "pip install torch")
        return fail("torch", f"torch {host.torch_version} cannot be imported: {torch.error}", _REINSTALL)
    if host.gpus and not torch.cuda and config.model.device != "cpu":
        return warn(
            "torch",
            f"torch {torch.version} was built without CUDA, so {host.gpus[0].name} is not used",
            "install the engine with its extra: pip install '.[cuda]'",
        )
    build = f"for CUDA {torch.cuda}" if torch.cuda else "without CUDA"
    return ok("torch", f"torch {torch.version}, {build}, imported in {torch.import_s:.1f} s")


def check_gpu(torch: TorchFacts) -> Check:
    """Check that torch finds the GPU and has code for it."""
    if torch.capability is None:
        return fail(
            "gpu",
            f"torch {torch.version} finds no GPU",
            f"install a driver for CUDA {torch.cuda} or newer, see CUDA_VISIBLE_DEVICES, or use --device cpu",
        )
    major, minor = torch.capability
    if not covers(torch.archs, torch.capability):
        return fail(
            "gpu",
            f"torch {torch.version} has code for {', '.join(torch.archs) or 'no GPU'}, this one is sm_{major}{minor}",
            "install a torch that was built for it, or use --device cpu",
        )
    return ok("gpu", f"compute capability {major}.{minor}, for which torch has code")


def covers(archs: tuple[str, ...], capability: tuple[int, int]) -> bool:
    """Whether one of `sm_80`, `sm_90a`, `compute_90` runs on a GPU of this capability.

    Machine code runs on the same major version from its minor version on; that for `sm_90a` on 9.0 alone; an
    intermediate form (`compute_90`) is translated for every later GPU.
    """
    for arch in archs:
        match = re.fullmatch(r"(sm|compute)_(\d+)(\d)([a-z]?)", arch)
        if match is None:
            continue
        kind, suffix = match[1], match[4]
        has = (int(match[2]), int(match[3]))
        if suffix == "a":
            fits = has == capability
        elif kind == "compute":
            fits = has <= capability
        else:
            fits = has[0] == capability[0] and has[1] <= capability[1]
        if fits:
            return True
    return False


def check_gpu_kernels(torch: TorchFacts) -> Check:
    """Check that sgl-kernel and Triton match this torch and work."""
    found = ", ".join(f"{name} {version}" for name, version in torch.kernels.items())
    if not torch.kernel_lines:
        return ok("kernels", found)
    reasons, fixes = [], []
    for line in torch.kernel_lines:
        reason, _, fix = line.removeprefix("not used: ").partition("; ")
        reasons.append(reason)
        fixes.append(fix)
    return warn("kernels", f"not used: {'; '.join(reasons)}", " and ".join(dict.fromkeys(fixes)))


def check_cpu(torch: TorchFacts, host: HostFacts) -> Check:
    """Check which instructions the kernels can use, and name the cost of missing ones."""
    lacks = []
    has_kernels = runs_kernels(host)
    if not has_kernels and not host.cpu_flags.intersection(BF16_FLAGS):
        lacks.append("no bfloat16 instructions, so weights and keys are float32 and take twice the memory")
    if not has_kernels:
        lacks.append(
            "no AVX2 with FMA, so torch computes instead of the engine's own kernels, and 4- and 8-bit weights are "
            "dequantized"
        )
    if lacks:
        return warn("cpu", f"instructions: {torch.isa}; {'; '.join(lacks)}", "use a CPU with AVX2 for speed")
    wanted = "i8mm and bf16" if torch.isa.startswith("neon") else "AMX"
    more = "" if torch.isa in ("amx", "neon_bf16") else f"; with {wanted} prompts would be faster"
    return ok("cpu", f"instructions: {torch.isa}{more}")


def check_cpu_kernels(torch: TorchFacts, host: HostFacts) -> Check:
    """Check that the engine's own kernels are compiled or can be compiled."""
    if not runs_kernels(host):
        return ok("kernels", "torch's, on a CPU like this")
    if not torch.cpu_kernels_error:
        loaded = torch.loaded_isa or torch.isa
        lesser = "" if loaded == torch.isa else f": those for {torch.isa} are not available"
        return ok("kernels", f"the engine's own, for {loaded}{lesser}")
    text, _, fix = torch.cpu_kernels_error.rpartition("; ")
    if not torch.compilers:
        fix = "install a C++ compiler (Debian: apt install g++)"
    return warn(
        "kernels",
        f"{text or torch.cpu_kernels_error}: torch computes, decoding takes 1.5 to 4 times as long",
        fix if text else "install a C++ compiler (Debian: apt install g++)",
    )
