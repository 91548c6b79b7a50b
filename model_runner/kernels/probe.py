"""Which kernel packages this process can use on its GPU; for each unusable package, the reason and the fix.

`gather_facts` inspects the machine, `judge` decides. Each problem is one line in the log; serving continues with the
kernels that work.

sgl_kernel is a compiled library: the loader refuses a build for another torch release at best, and the process aborts
at worst. It is therefore first imported, and asked for one small result, in a child process.
"""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import json
import logging
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

import torch

logger = logging.getLogger(__name__)

MIN_CAPABILITY: Final = (8, 0)
"""Ampere: the first GPUs with bfloat16 tensor cores, which all of these kernels need."""

_TIME_LIMIT_S: Final = 120.0
"""Enough for importing torch on a busy machine, a CUDA context, and a library of a gigabyte from a cold disk."""

# The torch release that a package release was built for, if its metadata does not say: (from this release on, torch).
_TORCH_OF_RELEASE: Final = (
    ((0, 4, 7), None),  # pinned from here on
    ((0, 4, 6, 1), "2.13"),  # 0.4.6.post1
    ((0, 4, 2), "2.11"),
    ((0, 3, 19), "2.9"),
)
_INSTALL: Final[Mapping[str, str]] = {
    "2.14": "pip install 'sglang-kernel>=0.4.9'",
    "2.13": "pip install 'sglang-kernel>=0.4.7,<0.4.9'",
    "2.11": "pip install 'sglang-kernel>=0.4.2,<0.4.6'",
    "2.9": "pip install 'sgl-kernel==0.3.21'",
}


class Installed(NamedTuple):
    """An installed distribution; `torch`: the torch release that it is pinned to, such as "2.14", if any."""

    name: str
    version: str
    torch: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """The state of the machine; None for what does not exist.

    Attributes:
        torch_version: such as "2.11.0+cu130".
        torch_cuda: the CUDA release that torch was built for.
        driver_works: torch finds a GPU.
        capability: compute capability of that GPU.
        triton_version: version of the importable package.
        triton_error: why importing Triton or querying its driver failed, in one line.
        interpreted: TRITON_INTERPRET is set.
        compiler: the C compiler that Triton uses for its launchers.
        has_python_headers: Python's headers exist, which those launchers include.
        sgl_kernel: the distribution that contains it; not None does not imply that it works.
        sgl_error: the error of its trial in a child process, in one line; None: it worked, or was not tried.
        flash_dims, flash_fp8_dims, flash_error: see `Trial`.
    """

    torch_version: str
    torch_cuda: str | None
    driver_works: bool
    capability: tuple[int, int] | None
    triton_version: str | None
    triton_error: str | None = None
    interpreted: bool = False
    compiler: str | None
    has_python_headers: bool = True
    sgl_kernel: Installed | None
    sgl_error: str | None = None
    flash_dims: tuple[int, ...] | None = None
    flash_fp8_dims: tuple[int, ...] = ()
    flash_error: str = ""


class Trial(NamedTuple):
    """Findings of a child process about sgl_kernel.

    Attributes:
        error: in one line; None: it works.
        flash_dims: head dims, of those that FlashAttention-3 is compiled for, that it has computed; None: not tried.
        flash_fp8_dims: the same for queries, keys and values in float8_e4m3fn.
        flash_error: the first error among these, in one line.
    """

    error: str | None
    flash_dims: tuple[int, ...] | None = None
    flash_fp8_dims: tuple[int, ...] = ()
    flash_error: str = ""


class Finding(NamedTuple):
    """Whether a package can be used.

    Attributes:
        version: version of the usable package; None: it cannot be used.
        reason: why not; short, for the table of operations.
        fix: how to make it usable.
    """

    version: str | None
    reason: str = ""
    fix: str = ""


class KernelProbe(NamedTuple):
    """The available kernel packages, in addition to torch's own kernels.

    Attributes:
        capability: compute capability of the GPU, (0, 0) without one.
        flash_dims, flash_fp8_dims, flash_error: see `Trial`.
    """

    sgl_kernel: Finding
    triton: Finding
    capability: tuple[int, int]
    flash_dims: tuple[int, ...] | None = None
    flash_fp8_dims: tuple[int, ...] = ()
    flash_error: str = ""


def judge(facts: Facts) -> KernelProbe:
    """Decide. The first problem found is the reason: later problems often only follow from it."""
    common = _no_gpu(facts)
    return KernelProbe(
        common or _judge_sgl_kernel(facts),
        common or _judge_triton(facts),
        facts.capability or (0, 0),
        facts.flash_dims,
        facts.flash_fp8_dims,
        facts.flash_error,
    )


def log_lines(probe: KernelProbe) -> list[str]:
    """One line for each problem; a problem that both packages share gets one line."""
    lines: dict[tuple[str, str], list[str]] = {}
    for name, finding in (("sgl_kernel", probe.sgl_kernel), ("triton", probe.triton)):
        if finding.version is None:
            lines.setdefault((finding.reason, finding.fix), []).append(name)
    return [f"not used: {' and '.join(names)}: {reason}; {fix}" for (reason, fix), names in lines.items()]


def _no_gpu(facts: Facts) -> Finding | None:
    if facts.torch_cuda is None:
        return Finding(
            None,
            f"torch {facts.torch_version} was built without CUDA",
            "install torch from the default index: pip install --force-reinstall torch",
        )
    if not facts.driver_works or facts.capability is None:
        return Finding(
            None,
            "no NVIDIA driver that works",
            f"install one for CUDA {facts.torch_cuda} or newer, and see that nvidia-smi lists the GPU",
        )
    if facts.capability < MIN_CAPABILITY:
        have, need = ".".join(map(str, facts.capability)), ".".join(map(str, MIN_CAPABILITY))
        return Finding(
            None,
            f"the GPU has compute capability {have}, {need} is needed",
            "use a GPU of the Ampere generation or later, or --device cpu",
        )
    return None


def _judge_sgl_kernel(facts: Facts) -> Finding:
    torch_release = ".".join(facts.torch_version.split(".")[:2])
    if facts.sgl_kernel is None:
        return Finding(None, "not installed", _install_line(torch_release))
    name, version, pinned_to = facts.sgl_kernel
    built_for = pinned_to or _torch_of(version)
    if built_for is not None and built_for != torch_release:
        return Finding(
            None,
            f"{name} {version} was built for torch {built_for}, this is {facts.torch_version}",
            _install_line(torch_release),
        )
    if facts.sgl_error is None:
        return Finding(version)
    # Installing the matching release again would change nothing.
    fix = _install_line(torch_release) if built_for is None else _fix_of_right_release(torch_release, facts)
    return Finding(None, f"{name} {version} does not work here: {facts.sgl_error}", fix)


def _fix_of_right_release(torch_release: str, facts: Facts) -> str:
    cuda = "12" if torch_release == "2.9" else "13"
    if facts.torch_cuda is not None and facts.torch_cuda.partition(".")[0] != cuda:
        return (
            f"it is the release for torch {torch_release}, but for CUDA {cuda}, and this torch is for CUDA "
            f"{facts.torch_cuda}; install torch {torch_release} for CUDA {cuda}, or continue without it"
        )
    return (
        f"it is the release for torch {torch_release} and CUDA {cuda}; see that nvidia-smi shows a driver for CUDA "
        f"{facts.torch_cuda} or newer, or continue without it"
    )


def _install_line(torch_release: str) -> str:
    known = _INSTALL.get(torch_release)
    if known is not None:
        return known
    return (
        f"no release of it is known for torch {torch_release}; "
        "pip install 'torch==2.14.*' 'sglang-kernel>=0.4.9', or continue without it"
    )


def _torch_of(version: str) -> str | None:
    """The torch release that a release of the package was built for, if known."""
    parts = version.partition("+")[0].replace("post", "").split(".")
    numbers = tuple(int(digits[0]) for part in parts if (digits := re.match(r"\d+", part)))
    return next((release for first, release in _TORCH_OF_RELEASE if numbers >= first), None)


def _judge_triton(facts: Facts) -> Finding:
    if facts.triton_version is None:
        return Finding(
            None,
            f"cannot be imported ({facts.triton_error})" if facts.triton_error else "not installed",
            "pip install --force-reinstall torch; its CUDA builds ship a matching Triton",
        )
    if facts.interpreted:
        return Finding(
            None, "TRITON_INTERPRET is set, which runs kernels in Python", "unset TRITON_INTERPRET"
        )
    if facts.compiler is None:
        return Finding(
            None,
            "no C compiler, which it needs to build the launchers of kernels",
            "install one (apt-get install gcc), or name it in the environment variable CC",
        )
    if not facts.has_python_headers:
        return Finding(
            None,
            "Python's headers are missing, which the launchers of kernels include",
            "install them (apt-get install python3-dev)",
        )
    if facts.triton_error is not None:
        return Finding(
            None,
            f"its driver does not start ({facts.triton_error})",
            "pip install --force-reinstall torch, and see that nvidia-smi lists the GPU",
        )
    return Finding(facts.triton_version)


@functools.cache  # the machine does not change, and a trial costs seconds
def probe_kernels() -> KernelProbe:
    """Inspect, decide, and log the problems."""
    probe = judge(gather_facts())
    for line in log_lines(probe):
        logger.warning("%s", line)
    return probe


def gather_facts() -> Facts:
    """Inspect the machine. Takes seconds if sgl_kernel is installed."""
    driver_works = torch.version.cuda is not None and torch.cuda.is_available()
    installed = _installed_sgl_kernel()
    trial = Trial(None)
    if installed and driver_works:
        trial = try_sgl_kernel(torch.cuda.current_device())
    triton_version, triton_error = _try_triton(driver_works)
    # posix_local, Debian's own scheme, has no headers; Triton falls back to those of posix_prefix, too.
    scheme = sysconfig.get_default_scheme().replace("posix_local", "posix_prefix")
    return Facts(
        torch_version=torch.__version__,
        torch_cuda=torch.version.cuda,
        driver_works=driver_works,
        capability=torch.cuda.get_device_capability() if driver_works else None,
        triton_version=triton_version,
        triton_error=triton_error,
        interpreted=os.environ.get("TRITON_INTERPRET", "0") not in ("", "0"),
        compiler=os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang"),
        has_python_headers=(Path(sysconfig.get_path("include", scheme)) / "Python.h").is_file(),
        sgl_kernel=installed,
        sgl_error=trial.error,
        flash_dims=trial.flash_dims,
        flash_fp8_dims=trial.flash_fp8_dims,
        flash_error=trial.flash_error,
    )


def _installed_sgl_kernel() -> Installed | None:
    """The new distribution or the old one; both contain the package `sgl_kernel`."""
    if importlib.util.find_spec("sgl_kernel") is None:
        return None
    for name in ("sglang-kernel", "sgl-kernel"):
        try:
            found = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        pins = (re.match(r"torch\s*\(?==\s*(\d+\.\d+)", requirement) for requirement in found.requires or [])
        return Installed(name, found.version, next((pin[1] for pin in pins if pin), None))
    return Installed("sgl_kernel", "of an unknown version")


def _try_triton(driver_works: bool) -> tuple[str | None, str | None]:
    """The version if Triton can be imported, and the error if something failed."""
    try:
        import triton
    except (ImportError, OSError) as err:
        missing = isinstance(err, ModuleNotFoundError) and err.name == "triton"
        return None, None if missing else _first_line(str(err))
    version: str = triton.__version__
    if driver_works:
        try:
            triton.runtime.driver.active.get_current_target()  # builds its own C module
        except Exception as err:  # any kind: compiler, loader, or driver
            return version, _first_line(f"{type(err).__name__}: {err}")
    return version, None


_TRIAL: Final = """
import json, sys, torch
if torch.cuda.is_available():
    torch.cuda.set_device(int(sys.argv[1]))  # before sgl_kernel asks what GPU this is
import sgl_kernel
x = torch.ones(2, 64, dtype=torch.bfloat16, device="cuda")
out = torch.empty_like(x)
torch.ops.sgl_kernel.rmsnorm.default(out, x, x[0], 0.0, False)
error = None if bool((out == 1).all()) else "a norm of ones is not ones"
flash_dims, flash_fp8_dims, flash_error = None, [], ""
try:
    from sgl_kernel.flash_attn import flash_attn_with_kvcache
    flash_dims = []
    one = torch.ones(1, dtype=torch.int32, device="cuda")
    cases = [(torch.bfloat16, head_dim, flash_dims) for head_dim in (128, 64, 256, 96, 192)]
    if torch.cuda.get_device_capability() == (9, 0):
        cases += [(torch.float8_e4m3fn, head_dim, flash_fp8_dims) for head_dim in (128, 64, 256, 96, 192)]
    for dtype, head_dim, found in cases:
        q = torch.ones(1, 2, head_dim, device="cuda").to(dtype)
        kv = torch.ones(1, 16, 1, head_dim, device="cuda").to(dtype)
        try:
            out = flash_attn_with_kvcache(
                q, kv, kv, cache_seqlens=one, page_table=(one - 1)[None], cu_seqlens_q=torch.cat([one - 1, one]),
                max_seqlen_q=1, causal=True,
            )
            if bool((out.float() - 1).abs().max() < 0.02):
                found.append(head_dim)
            else:
                flash_error = flash_error or "the mean of ones is not one"
        except Exception as failure:
            flash_error = flash_error or str(failure).strip().partition("\\n")[0]
except (ImportError, OSError):
    pass
found = {"flash_dims": flash_dims, "flash_fp8_dims": flash_fp8_dims, "flash_error": flash_error}
print(json.dumps({"error": error, **found}))
"""


def try_sgl_kernel(device_index: int, trial: str = _TRIAL, time_limit_s: float = _TIME_LIMIT_S) -> Trial:
    """Import sgl_kernel and compute something in a child process.

    Args:
        device_index: the caller's own GPU: the contexts of all ranks on the first GPU would fill its memory.
    """
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-c", trial, str(device_index)],
            capture_output=True,
            text=True,
            timeout=time_limit_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return Trial(f"its trial took more than {time_limit_s:g} s")
    if done.returncode < 0:
        return Trial(f"its trial was ended by signal {-done.returncode}")
    if done.returncode:
        return Trial(_telling_line(done.stderr) or f"its trial ended with exit code {done.returncode}")
    for line in reversed(done.stdout.splitlines()):  # libraries may print when they are unloaded
        try:
            answer = json.loads(line)
            error: str | None = answer["error"]
            dims: list[int] | None = answer.get("flash_dims")
            fp8_dims: list[int] = answer.get("flash_fp8_dims", [])
            flash_error: str = answer.get("flash_error", "")
        except (ValueError, TypeError, KeyError):
            continue
        return Trial(error, None if dims is None else tuple(dims), tuple(fp8_dims), flash_error)
    return Trial("its trial ended without a result")


def _telling_line(text: str) -> str:
    """The exception of a traceback. sgl_kernel's own lists its attempts under "Error details", the real one first."""
    tried = [line[2:] for line in text.partition("Error details")[2].splitlines() if line.startswith("- ")]
    return _first_line(tried[0] if tried else _last_line(text))


def _last_line(text: str) -> str:
    return next((line for line in reversed(text.splitlines()) if line.strip()), "")


def _first_line(text: str) -> str:
    return text.strip().partition("\n")[0][:300]
