"""`build`: the kernels as a shared library, compiled if it is missing, and kept in the user's cache folder.

A file is named by its ISA target, its sources and flags, and its compiler; a change of any of them gives another file.
Without a compiler, any file with the same target, sources and flags is used, so a container image can ship one. A file
ends with its own hash and is renamed into place, so an incomplete or damaged file is detected and compiled again.
Processes that start at the same time wait for the first of them.

The library runs with the rights of this process. The folder and the file must therefore belong to its user or to root,
and no other user may have write access.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from ....launch.resolve.host_facts import COMPILERS
from ....launch.startup_display import COMPILE_STEP
from ....runtime.errors import ConfigError
from ....runtime.installation import cache_dir
from .compiler import (
    Compiler,
    Isa,
    NoLibraryError,
    best_isa,
    compiler_options,
    find_compilers,
    run_all,
    runnable_isas,
)

logger = logging.getLogger(__name__)

_OPTIONS: Final = ("-std=c++20", "-O3", "-fPIC", "-fvisibility=hidden", "-w")
_SOURCES: Final = Path(__file__).parent
_HASH_BYTES: Final = 32
_TIME_LIMIT_S: Final = 300
"""For everything: waiting for another process, and all compilers. A working compiler needs 20 s at most."""
_POLL_S: Final = 0.05
_UNUSED_S: Final = 60 * 86_400  # a file unused for this long is removed
_OTHERS_MAY_WRITE: Final = 0o022


def build(isa: Isa, folder: Path | None = None, *, options: tuple[str, ...] = ()) -> Path:
    """Path of the library, compiled if it does not exist.

    Args:
        folder: folder of compiled libraries; None: in the user's cache folder.
        options: further options for the compiler, also when linking.

    Raises:
        NoLibraryError: no compiler, all compilers fail, a time limit is exceeded, or others can write to the folder.
    """
    deadline_s = time.monotonic() + _TIME_LIMIT_S
    folder = _cache_folder() if folder is None else folder
    flags = (*_OPTIONS, *compiler_options(isa), *options)
    stem = _stem(isa, flags)
    failures = []
    try:
        _check_owner(folder)
        for compiler in find_compilers():
            path = folder / f"{stem}-{_compiler_key(compiler)}.so"
            if _is_usable(path):
                return path
            try:
                _make(path, compiler, flags, options, deadline_s)
            except NoLibraryError as error:
                failures.append(str(error))
                logger.info("cpu_kernels not compiled: %s", error)
                if time.monotonic() >= deadline_s:
                    break
            else:
                return path
        if failures:
            raise NoLibraryError("; ".join(dict.fromkeys(failures)))
        for path in sorted(folder.glob(f"{stem}-*.so")):  # without a compiler
            if _is_usable(path):
                return path
    except OSError as error:
        raise NoLibraryError(f"cannot write CPU kernels below {folder}: {error}") from error
    raise NoLibraryError(
        f"no C++ compiler ({', '.join(COMPILERS)}) for the CPU kernels; install one (Debian: apt install g++)"
    )


def is_built() -> bool:
    """Whether the cache folder has a library of these sources that this CPU can run. Takes milliseconds, without torch.

    Raises:
        NoLibraryError: there is no cache folder.
    """
    folder = _cache_folder()
    stems = [_stem(isa, (*_OPTIONS, *compiler_options(isa))) for isa in runnable_isas()]
    return any(path.exists() for stem in stems for path in folder.glob(f"{stem}-*.so"))


def _stem(isa: Isa, flags: tuple[str, ...]) -> str:
    """The name of a library's file, without its compiler."""
    return f"cpu-{isa}-{_source_key(flags)}"


def _cache_folder() -> Path:
    try:
        return cache_dir() / "kernels"
    except ConfigError as error:  # serving is possible without the library
        raise NoLibraryError(f"no place for the CPU kernels: {error}") from error


def _source_key(flags: tuple[str, ...]) -> str:
    digest = hashlib.sha256(repr((flags, platform.machine())).encode())
    for path in _source_files():
        digest.update(f"\0{path.name}\0".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:24]


def _compiler_key(compiler: Compiler) -> str:
    return hashlib.sha256(repr((compiler.identity, compiler.openmp)).encode()).hexdigest()[:12]


def _source_files() -> list[Path]:
    return sorted([*_SOURCES.glob("*.h"), *_SOURCES.glob("*.cpp")])


# ---------------------------------------------------------------- existing files


def is_whole(path: Path) -> bool:
    """Whether the file exists and its hash is correct."""
    try:
        content = path.read_bytes()
    except OSError:
        return False
    return hashlib.sha256(content[:-_HASH_BYTES]).digest() == content[-_HASH_BYTES:]


def _is_usable(path: Path) -> bool:
    if not is_whole(path):
        return False
    _check_owner(path)
    with suppress(OSError):  # the file may belong to another user
        os.utime(path)  # marks it as used for `_sweep`
    return True


def _check_owner(path: Path) -> None:
    """Raises `NoLibraryError` if another user could have written the file or folder."""
    try:
        status = path.stat()
    except FileNotFoundError:
        return
    if status.st_uid not in (0, os.geteuid()):
        raise NoLibraryError(
            f"{path} belongs to user {status.st_uid}, and its code would run here; remove it, or set ENGINE_CACHE_DIR "
            "to a folder of your own"
        )
    if status.st_mode & _OTHERS_MAY_WRITE:
        raise NoLibraryError(
            f"others can write to {path}, and their code would run here; chmod go-w it, or set ENGINE_CACHE_DIR to a "
            "folder of your own"
        )


# ---------------------------------------------------------------- compiling


def _make(
    path: Path, compiler: Compiler, flags: tuple[str, ...], options: tuple[str, ...], deadline_s: float
) -> None:
    folder = path.parent
    folder.mkdir(parents=True, exist_ok=True, mode=0o755)
    _check_owner(folder)
    with _locked(folder, deadline_s):
        if _is_usable(path):  # another process has compiled it meanwhile
            return
        _sweep(folder)
        logger.info("cpu_kernels compiling, once, with %s; this takes some 20 s", compiler.path)
        started_s = time.monotonic()
        command = [compiler.path, *flags, *(["-fopenmp"] if compiler.openmp else [])]
        _compile(command, options, path, deadline_s)
        logger.info("cpu_kernels compiled_s=%.1f path=%s", time.monotonic() - started_s, path)


@contextmanager
def _locked(folder: Path, deadline_s: float) -> Iterator[None]:
    """Exclusive right to compile; the operating system releases the lock when a process dies."""
    lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        has_logged = False
        while not _try_lock(lock):
            if not has_logged:
                logger.info("cpu_kernels waiting for another process that compiles them in %s", folder)
                has_logged = True
            if time.monotonic() >= deadline_s:
                raise NoLibraryError(f"another process has had {folder / 'lock'} for {_TIME_LIMIT_S} s")
            time.sleep(_POLL_S)
        yield
    finally:
        os.close(lock)


def _try_lock(lock: int) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _sweep(folder: Path) -> None:
    """Remove partial files of processes that died while compiling, and files that have not been used for long."""
    for partial in folder.glob("partial-*"):  # the lock excludes other compilations
        shutil.rmtree(partial, ignore_errors=True)
    oldest_s = time.time() - _UNUSED_S
    for path in folder.glob("cpu-*.so"):
        with suppress(OSError):
            if path.stat().st_mtime < oldest_s:
                path.unlink()


def _compile(command: list[str], options: tuple[str, ...], path: Path, deadline_s: float) -> None:
    """Compile each source on its own, at the same time, and link them."""
    with tempfile.TemporaryDirectory(dir=path.parent, prefix="partial-") as name:
        folder = Path(name)
        sources = [source for source in _source_files() if source.suffix == ".cpp"]
        objects = [str(folder / f"{source.stem}.o") for source in sources]
        commands = [
            [*command, "-c", str(source), "-o", out] for source, out in zip(sources, objects, strict=True)
        ]
        run_all(commands, folder, deadline_s)
        linked = folder / path.name
        # Without -fopenmp: linking with it would name an OpenMP runtime to load.
        run_all([[command[0], "-shared", *options, *objects, "-o", str(linked)]], folder, deadline_s)
        content = linked.read_bytes()
        linked.write_bytes(content + hashlib.sha256(content).digest())
        linked.chmod(0o644)  # for any umask: a file that others can write to is not loaded
        linked.replace(path)


def compile_ahead(device: str, on_step: Callable[[str], None]) -> None:
    """Compile the kernels of the CPU if they are needed and not there, in a process of their own.

    A failure is not reported: the process that loads the model tries again, and explains it.

    Args:
        device: of the model.
        on_step: called with `COMPILE_STEP` if the kernels are compiled.
    """
    if device != "cpu" or best_isa() == "portable" or not any(map(shutil.which, COMPILERS)):
        return
    with contextlib.suppress(NoLibraryError, ConfigError):
        if is_built():
            return
    on_step(COMPILE_STEP)
    subprocess.run(
        [sys.executable, "-P", "-m", __package__],  # -P and the path: as for the engine's processes
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        check=False,
    )
