"""Makes a folder with what a GPU host without network lacks: sgl_kernel, reduced, pure wheels, and golden answers.

The engine's Triton kernels are in it, compiled (`variants.py`).

    python benchmarks/gpu/bundle.py [--out build/gpu-bundle]

The host brings its own Python 3.12 with torch 2.11 for CUDA 13, triton and transformers. The bundle is put on its
`PYTHONPATH`; `check.py` and `bench.py` do that automatically, and unpack the archive of sgl_kernel there.

The kernel wheel holds 1.1 GB of device code, for three generations of GPUs and all head sizes. Unneeded code is
overwritten with zeros in place: sizes and offsets stay, so the library stays valid, and the zeros compress well.
CUDA loads device code lazily, so the zeros are not read; never set CUDA_MODULE_LOADING=EAGER with this. A missing
kernel fails with "invalid device image" or "no kernel image"; install the whole wheel then.
"""

from __future__ import annotations

import argparse
import lzma
import mmap
import re
import shutil
import struct
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
ARCHIVE = "sgl_kernel.tar.xz"
COMPILED = "triton_kernels.tar.xz"
KERNELS = "sglang-kernel==0.4.5"  # the last one for torch 2.11 with CUDA 13
WHEELS = (
    "pyzmq",
    "msgspec",
    "httptools",
    "setproctitle",
    "prompt_toolkit",
    "wcwidth",
    "uvicorn",
    "gguf",
    "pytest<9.2",  # as in pyproject.toml
    "iniconfig",
    "pluggy",
    "pytest-timeout",
    "pytest-xdist",
    "execnet",
    "hypothesis",
    "sortedcontainers",
)
"""Packages of the engine and its tests that a machine with torch and transformers usually lacks; no dependencies."""
PLATFORMS = (
    "manylinux_2_28_x86_64",
    "manylinux_2_26_x86_64",
    "manylinux_2_17_x86_64",
    "manylinux2014_x86_64",
)
MAX_MIB = 50
ARCHITECTURE = 90  # Hopper

FLASH = "sgl_kernel/flash_ops.abi3.so"
COMMON = "sgl_kernel/sm90/common_ops.abi3.so"
WANTED_SOURCE = re.compile(
    r"flash_prepare_scheduler|flash_fwd_combine"
    r"|flash_fwd_hdim(64|128|256)_bf16(_paged)?(_split)?_sm90|flash_fwd_hdim(64|128|256)_bf16_packgqa_sm90"
    r"|flash_fwd_hdim128_e4m3(_paged)?(_split)?_sm90|flash_fwd_hdim128_e4m3_packgqa_sm90"
)
"""Sources of FLASH with kernels of the models: bf16 for the usual head sizes, and an fp8 KV cache for one of them."""
SOURCE_IN_IMAGE = re.compile(
    rb"_\d+_(flash_[a-z0-9_]+)_cu_[0-9a-f]{8}"
)  # the compiler names internal symbols by it

FATBIN_MAGIC = 0xBA55ED50
FATBIN_HEADER = struct.Struct("<IHHQ")  # magic, version, bytes of this header, bytes of the images after it
IMAGE_HEADER_BYTES = (
    4  # offset of the field with the header's size, then the image's, then at 28 the architecture
)


class Image(NamedTuple):
    """Device code of one compiled source for one architecture."""

    architecture: int
    start: int
    size: int


def main() -> None:
    """Make the bundle."""
    parser = argparse.ArgumentParser(description="packages for a GPU host without network, in one folder")
    parser.add_argument("--out", type=Path, default=ROOT / "build/gpu-bundle")
    parser.add_argument(
        "--downloads", type=Path, default=ROOT / "build/gpu-wheels", help="kept, and used again"
    )
    parser.add_argument("--python", default="3.12", help="version of Python on the host")
    args = parser.parse_args()
    started_s = time.perf_counter()
    shutil.rmtree(args.out, ignore_errors=True)
    args.out.mkdir(parents=True)

    for wheel in download(WHEELS, args.downloads, args.python):
        unpack(wheel, args.out)
    make_golden_answers(args.out / "golden")
    (kernels,) = download((KERNELS,), args.downloads, args.python)
    compile_kernels(args.out / COMPILED)
    with tempfile.TemporaryDirectory(dir=args.out.parent) as work:
        unpack(kernels, Path(work), only=wanted_file)
        shrink_kernels(Path(work))
        pack(Path(work), args.out / ARCHIVE)
    size = sum(path.stat().st_size for path in args.out.rglob("*") if path.is_file()) / (1 << 20)
    print(f"{args.out}: {size:.1f} MiB in {time.perf_counter() - started_s:.0f} s")
    if size > MAX_MIB:
        sys.exit(f"the bundle has {size:.0f} MiB, more than {MAX_MIB}")


def make_golden_answers(folder: Path) -> None:
    """The models and answers that `triage.py` compares a GPU with; a minute. Needs the engine's packages here."""
    path = Path(__file__).with_name("path.py")
    if subprocess.run(
        [sys.executable, str(path), "benchmarks.gpu.golden", str(folder)], check=False
    ).returncode:
        print(
            "no golden answers; the triage will make them on the GPU host, which takes a minute of its time"
        )


def compile_kernels(archive: Path) -> None:
    """The engine's own kernels for the host's GPU. Without Triton here there are none, and the host compiles them."""
    path = Path(__file__).with_name("path.py")
    command = [sys.executable, str(path), "benchmarks.gpu.variants", "pack", str(archive)]
    if subprocess.run(command, check=False).returncode:
        print("the bundle has no compiled Triton kernels; see the message above", file=sys.stderr)


def download(requirements: tuple[str, ...], folder: Path, python: str) -> list[Path]:
    """The wheels of some requirements for the host, from the package index or from an earlier download."""
    folder.mkdir(parents=True, exist_ok=True)
    found = [wheel_of(requirement, folder) for requirement in requirements]
    missing = [requirement for requirement, wheel in zip(requirements, found, strict=True) if wheel is None]
    if missing:
        platforms = [part for name in PLATFORMS for part in ("--platform", name)]
        tags = [part for name in (f"cp{python.replace('.', '')}", "abi3", "none") for part in ("--abi", name)]
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
        command += ["--python-version", python, "--implementation", "cp", *tags, *platforms]
        run = subprocess.run([*command, "--dest", str(folder), *missing], check=False)
        if run.returncode:
            sys.exit(f"cannot download {', '.join(missing)}; see pip's message above")
    wheels = [wheel_of(requirement, folder) for requirement in requirements]
    return [wheel for wheel in wheels if wheel is not None]


def wheel_of(requirement: str, folder: Path) -> Path | None:
    """The newest wheel of a requirement in a folder, if there is one."""
    match = re.fullmatch(r"([\w-]+)(?:(==|<)([\d.]+))?", requirement)
    assert match is not None, requirement
    name, operator, limit = match[1].replace("-", "_"), match[2], match[3]
    found = {_numbers(wheel.name.split("-")[1]): wheel for wheel in folder.glob(f"{name}-*.whl")}
    if operator == "==":
        found = {version: wheel for version, wheel in found.items() if version == _numbers(limit)}
    elif operator == "<":
        found = {version: wheel for version, wheel in found.items() if version < _numbers(limit)}
    return found[max(found)] if found else None


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r"\d+", version)))


def unpack(wheel: Path, folder: Path, only: Callable[[str], bool] = lambda _name: True) -> None:
    """Some files of a wheel, where `pip install --target` would put them."""
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder, [name for name in archive.namelist() if only(name)])


def wanted_file(name: str) -> bool:
    """Python, metadata, and the two libraries that a Hopper GPU needs."""
    return name in (FLASH, COMMON) or not name.endswith(".so")


def shrink_kernels(folder: Path) -> None:
    """Overwrite the unneeded device code.

    Raises:
        SystemExit: the library names its sources differently, or has no names.
    """
    shrink(folder / COMMON, lambda image, _code: image.architecture == ARCHITECTURE)
    kept: set[str] = set()

    def keep(image: Image, code: bytes) -> bool:
        if image.architecture != ARCHITECTURE:
            return False
        match = SOURCE_IN_IMAGE.search(code)
        source = match[1].decode() if match else ""
        if not WANTED_SOURCE.fullmatch(source):
            return False
        kept.add(source)
        return True

    shrink(folder / FLASH, keep)
    print("\n".join(f"  {source}" for source in sorted(kept)))
    for needed in ("flash_prepare_scheduler", "flash_fwd_combine", "flash_fwd_hdim128_bf16_paged_split_sm90"):
        if needed not in kept:
            sys.exit(
                f"{FLASH} of {KERNELS} has no device code of {needed}: are its sources named differently?"
            )


def shrink(library: Path, keep: Callable[[Image, bytes], bool]) -> None:
    """Overwrite all images with zeros for which `keep` is false; it receives the bytes of the image, too."""
    with library.open("r+b") as file, mmap.mmap(file.fileno(), 0) as data:
        kept = 0
        for image in list(device_images(data, *section(data, b".nv_fatbin"))):
            stop = image.start + image.size
            if keep(image, data[image.start : stop]):
                kept += image.size
            else:
                data[image.start : stop] = bytes(image.size)
        print(f"{library.name}: {kept / (1 << 20):.1f} of {len(data) / (1 << 20):.0f} MiB kept")


def section(data: mmap.mmap | bytes, name: bytes) -> tuple[int, int]:
    """Offset and size of a section of a 64-bit little-endian ELF file.

    Raises:
        ValueError: not such a file, or it has no such section.
    """
    if data[:6] != b"\x7fELF\x02\x01":
        raise ValueError("not a 64-bit little-endian ELF file")
    (table,) = struct.unpack_from("<Q", data, 0x28)
    entry_bytes, count, names_idx = struct.unpack_from("<HHH", data, 0x3A)
    headers = [struct.unpack_from("<IIQQQQ", data, table + n * entry_bytes) for n in range(count)]
    names_at = headers[names_idx][4]
    for name_at, _type, _flags, _address, offset, size in headers:
        start = names_at + name_at
        if data[start : start + len(name) + 1] == name + b"\0":
            return offset, size
    raise ValueError(f"no section {name.decode()}")


def device_images(data: mmap.mmap | bytes, offset: int, size: int) -> Iterator[Image]:
    """Every image of every fat binary; each compiled source has one."""
    at, end = offset, offset + size
    while at + FATBIN_HEADER.size <= end:
        magic, _version, header_bytes, images_bytes = FATBIN_HEADER.unpack_from(data, at)
        if magic != FATBIN_MAGIC:  # padding between two
            at += 8
            continue
        image_at, images_end = at + header_bytes, at + header_bytes + images_bytes
        while image_at < images_end:
            image_header, image_bytes = struct.unpack_from("<IQ", data, image_at + IMAGE_HEADER_BYTES)
            (architecture,) = struct.unpack_from("<I", data, image_at + 28)
            yield Image(architecture, image_at + image_header, image_bytes)
            image_at += image_header + image_bytes
        at = images_end


def pack(folder: Path, archive: Path) -> None:
    """A folder's contents as tar.xz; a minute, most of it for zeros."""
    with lzma.open(archive, "wb", preset=3) as packed, tarfile.open(fileobj=packed, mode="w|") as tar:
        for path in sorted(folder.iterdir()):
            tar.add(path, arcname=path.name)


if __name__ == "__main__":
    main()
