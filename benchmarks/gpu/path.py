"""Run a module of this checkout without installing anything: links, the bundle of `bundle.py`, then the module.

    python3 benchmarks/gpu/path.py benchmarks.gpu.check [ARGS]

The repository's root is the package `engine`, whatever its folder is called; a link gives it that name. Packages of the
bundle come before the interpreter's own, if they were made for its version.
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import tarfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LINKS = ROOT / "build/gpu-path"
BUNDLE = ROOT / "build/gpu-bundle"
ARCHIVE = "sgl_kernel.tar.xz"  # in the bundle
COMPILED = BUNDLE / "triton_kernels.tar.xz"
TRITON_CACHE = ROOT / "build/gpu-triton"


def main() -> None:
    """Replace this process by `python -m MODULE ARGS` with the needed path."""
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    paths = [link_folder()]
    versions = versions_of(BUNDLE)
    if f"{sys.version_info.major}{sys.version_info.minor}" in versions:
        unpack_kernels()
        paths.append(BUNDLE)
    elif versions:
        print(f"build/gpu-bundle is for another Python ({', '.join(versions)}) and is not used", flush=True)
    earlier = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([*map(str, paths), *([earlier] if earlier else [])])
    os.environ["PYTHONUNBUFFERED"] = "1"  # a run that is cut off has printed its results
    if BUNDLE in paths:
        seat_kernels()
    # -P: without the current folder, which would allow `import runtime`.
    os.execv(sys.executable, [sys.executable, "-P", "-m", *sys.argv[1:]])


def link_folder() -> Path:
    """A folder in which this checkout is called `engine`."""
    LINKS.mkdir(parents=True, exist_ok=True)
    for name, target in (("engine", ROOT), ("benchmarks", ROOT / "benchmarks"), ("tests", ROOT / "tests")):
        link = LINKS / name
        with contextlib.suppress(FileExistsError):
            link.symlink_to(os.path.relpath(target, LINKS), target_is_directory=True)
    return LINKS


def versions_of(bundle: Path) -> list[str]:
    """The Python versions, such as "312", for which the bundle has compiled modules."""
    matches = [re.search(r"\.cpython-(\d+)", path.name) for path in bundle.glob("*/*.so")]
    return sorted({match[1] for match in matches if match})


def unpack_kernels() -> None:
    """Unpack the archive once; the libraries take a gigabyte, nearly all of it zeros."""
    done = BUNDLE / "sgl_kernel.unpacked"
    if done.exists() or not (BUNDLE / ARCHIVE).exists():
        return
    started_s = time.perf_counter()
    with tarfile.open(BUNDLE / ARCHIVE) as archive:
        archive.extractall(BUNDLE, filter="data")
    done.touch()
    print(f"unpacked sgl_kernel in {time.perf_counter() - started_s:.0f} s", flush=True)


def seat_kernels() -> None:
    """Put the bundle's compiled kernels into Triton's cache, once; a process of its own imports Triton for it."""
    os.environ.setdefault("TRITON_CACHE_DIR", str(TRITON_CACHE))
    done = BUNDLE / "triton_kernels.seated"
    if not COMPILED.exists() or done.exists():
        return
    command = [sys.executable, "-P", "-m", "benchmarks.gpu.variants", "seat", str(COMPILED)]
    try:
        subprocess.run(command, check=True, timeout=120)
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        print(f"the bundle's compiled Triton kernels are not used: {error}", flush=True)
    done.touch()


if __name__ == "__main__":
    main()
