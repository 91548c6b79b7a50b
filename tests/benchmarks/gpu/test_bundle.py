"""What is left of a kernel library when the device code that nobody wants is overwritten."""

from __future__ import annotations

import importlib.util
import lzma
import struct
import tarfile
import zipfile
from pathlib import Path
from types import ModuleType

import pytest

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
WANTED = "flash_fwd_hdim128_bf16_paged_split_sm90"


@pytest.fixture(scope="module")
def bundle() -> ModuleType:
    return script("bundle")


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, BENCHMARKS / "gpu" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def image(architecture: int, code: bytes) -> bytes:
    """One entry of a fat binary: 64 bytes of header, then the code."""
    header = struct.pack("<HHIQIIHHI", 2, 0x101, 64, len(code), 0, 0, 0, 0, architecture)
    return header.ljust(64, b"\0") + code


def fat_binary(*images: bytes) -> bytes:
    body = b"".join(images)
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(body)) + body


def code_of(source: str, filler: bytes) -> bytes:
    """With the compiler's name of an internal symbol in it."""
    symbol = f"_ZN9_INTERNAL_5d778298_{len(source)}_{source}_cu_cab2ad54_1676x".encode()
    return (symbol + filler * 64).ljust(256, filler)


def library(*fat_binaries: bytes) -> bytes:
    """A 64-bit ELF file with the sections .text, .nv_fatbin and names."""
    names = b"\0.text\0.nv_fatbin\0.shstrtab\0"
    text, device = b"\xcc" * 32, b"\0\0\0\0\0\0\0\0".join(fat_binaries)
    starts = [64, 64 + len(text), 64 + len(text) + len(device)]
    table = starts[2] + len(names)
    header = b"\x7fELF\x02\x01".ljust(0x28, b"\0") + struct.pack("<Q", table)
    header = header.ljust(0x3A, b"\0") + struct.pack("<HHH", 64, 4, 3)
    sections = [
        (0, 0, 0),
        (1, starts[0], len(text)),
        (7, starts[1], len(device)),
        (18, starts[2], len(names)),
    ]
    entries = b"".join(
        struct.pack("<IIQQQQ", name, 1, 0, 0, start, size).ljust(64, b"\0") for name, start, size in sections
    )
    return header + text + device + names + entries


def write_libraries(bundle: ModuleType, folder: Path, flash: bytes, common: bytes) -> None:
    for name, data in ((bundle.FLASH, flash), (bundle.COMMON, common)):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)


def test_only_wanted_device_code_is_left_and_nothing_moves(bundle: ModuleType, tmp_path: Path) -> None:
    wanted, other_gpu = code_of(WANTED, b"w"), code_of(WANTED, b"8")
    capped = code_of("flash_fwd_hdim128_bf16_paged_softcap_sm90", b"c")
    scheduler, combine = code_of("flash_prepare_scheduler", b"s"), code_of("flash_fwd_combine", b"m")
    before = library(
        fat_binary(image(80, other_gpu), image(90, wanted)),
        fat_binary(image(90, capped)),
        fat_binary(image(90, scheduler)),
        fat_binary(image(90, combine)),
    )
    common = library(fat_binary(image(90, b"kept" * 8), image(100, b"gone" * 8)))
    write_libraries(bundle, tmp_path, before, common)

    bundle.shrink_kernels(tmp_path)

    after = (tmp_path / bundle.FLASH).read_bytes()
    assert after == before.replace(capped, bytes(len(capped))).replace(other_gpu, bytes(len(other_gpu)))
    assert (tmp_path / bundle.COMMON).read_bytes() == common.replace(b"gone" * 8, bytes(32))


def test_a_library_with_other_names_is_refused(bundle: ModuleType, tmp_path: Path) -> None:
    nameless = library(fat_binary(image(90, b"x" * 64)))
    write_libraries(bundle, tmp_path, nameless, nameless)
    with pytest.raises(SystemExit, match="no device code of flash_prepare_scheduler"):
        bundle.shrink_kernels(tmp_path)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"MZ" * 64, "not a 64-bit little-endian ELF file"),
        (library().replace(b".nv_fat", b".nv_fit"), "no section"),
    ],
)
def test_a_file_without_device_code_is_refused(bundle: ModuleType, data: bytes, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        bundle.section(data, b".nv_fatbin")


@pytest.mark.parametrize(
    ("source", "is_wanted"),
    [
        ("flash_fwd_combine", True),
        ("flash_fwd_hdim64_bf16_packgqa_sm90", True),
        ("flash_fwd_hdim256_bf16_paged_sm90", True),
        ("flash_fwd_hdim128_e4m3_paged_split_sm90", True),
        ("flash_fwd_hdim128_bf16_softcap_sm90", False),
        ("flash_fwd_hdim96_bf16_sm90", False),
        ("flash_fwd_hdim64_fp16_sm90", False),
    ],
)
def test_which_sources_are_wanted(bundle: ModuleType, source: str, is_wanted: bool) -> None:
    assert bool(bundle.WANTED_SOURCE.fullmatch(source)) is is_wanted


def test_a_download_is_used_again_and_the_archive_holds_the_files(bundle: ModuleType, tmp_path: Path) -> None:
    wheel = tmp_path / "sglang_kernel-0.4.5-cp310-abi3-manylinux2014_x86_64.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name in ("sgl_kernel/__init__.py", "sgl_kernel/sm100/common_ops.abi3.so", bundle.COMMON):
            archive.writestr(name, name)

    assert bundle.download(("sglang-kernel==0.4.5",), tmp_path, "3.12") == [wheel]
    bundle.unpack(wheel, tmp_path / "out", only=bundle.wanted_file)
    bundle.pack(tmp_path / "out", tmp_path / "kernels.tar.xz")

    with lzma.open(tmp_path / "kernels.tar.xz") as packed, tarfile.open(fileobj=packed) as tar:
        files = sorted(member.name for member in tar if member.isfile())
    assert files == ["sgl_kernel/__init__.py", bundle.COMMON]


@pytest.mark.parametrize(
    ("requirement", "version"),
    [("pytest<9.2", "9.1.10"), ("pytest", "9.2.0"), ("pytest==9.1.9", "9.1.9"), ("pytest==8.0.0", None)],
)
def test_a_download_is_of_the_version_that_the_tests_run_with(
    bundle: ModuleType, tmp_path: Path, requirement: str, version: str | None
) -> None:
    for each in ("9.1.9", "9.1.10", "9.2.0"):
        (tmp_path / f"pytest-{each}-py3-none-any.whl").touch()
    (tmp_path / "pytest_timeout-2.4.0-py3-none-any.whl").touch()
    found = bundle.wheel_of(requirement, tmp_path)
    assert (found and found.name.split("-")[1]) == version


def test_the_bundles_pytest_is_that_of_the_project(bundle: ModuleType) -> None:
    wanted = next(name for name in bundle.WHEELS if name.startswith("pytest<"))
    project = (Path(__file__).parents[3] / "pyproject.toml").read_text(encoding="utf-8")
    assert f",{wanted.removeprefix('pytest')}" in next(
        line for line in project.splitlines() if '"pytest>=' in line
    )


def test_it_is_known_for_which_python_a_bundle_is(tmp_path: Path) -> None:
    names = ["zmq/_zmq.abi3.so", "msgspec/_core.cpython-312-x86_64-linux-gnu.so", "gguf/constants.py"]
    assert script("path").versions_of(tmp_path) == []
    for name in names:
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).touch()
    assert script("path").versions_of(tmp_path) == ["312"]
