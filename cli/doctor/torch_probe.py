"""Facts about torch and the kernels, gathered in a process that may crash: `python -m ...torch_probe`.

A torch with a missing library, or a kernel package for another torch, ends the process that imports it, sometimes by a
signal. So this module is run by `gather_torch`, and prints one JSON object; how it ends is a fact, too.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from ...launch.resolve.nvidia_gpus import DEVICE_ORDER

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


def look() -> TorchFacts:
    """Gather the facts in this process."""
    started_s = time.monotonic()
    try:
        import torch
    except Exception as error:  # of any kind: a loader's OSError, an ImportError, a bug of another package
        return TorchFacts(error=f"{type(error).__name__}: {str(error).partition(chr(10))[0][:300]}")
    import_s = time.monotonic() - started_s
    from ...model_runner.kernels.cpu.compiler import find_compilers
    from ...model_runner.kernels.cpu.isa import best_isa
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
    )


if __name__ == "__main__":
    print(json.dumps(asdict(look())))
