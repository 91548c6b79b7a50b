"""`build`: the kernels as a file, compiled where it is missing, and kept in the user's cache folder.

A file is named by its level, its sources and flags, and its compiler: whoever changes one of them gets another file.
Where there is no compiler any file of the same sources and flags is taken, so that a container image may bring it
along. A file carries its own hash at its end and is renamed into place, so a half-written or damaged one is noticed and
made again; processes that start at the same time wait for the first of them.

What is loaded runs with the rights of this process. So the folder and the file must belong to its user or to root, and
nobody else may be able to write them.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import platform
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from ....runtime.errors import ConfigError
from ....runtime.model_files.cache_dir import cache_dir
from ....runtime.resolve.host_facts import COMPILERS
from .compiler import Compiler, NoLibraryError, find_compilers, run_all
from .isa import Isa, compiler_options

logger = logging.getLogger(__name__)

_OPTIONS: Final = ("-std=c++20", "-O3", "-fPIC", "-fvisibility=hidden", "-w")
_SOURCES: Final = Path(__file__).parent
_HASH_BYTES: Final = 32
_TIME_LIMIT_S: Final = 300
"""For all of it: waiting for another process, and all compilers; one that works needs 20 s at most."""
_POLL_S: Final = 0.05
_UNUSED_S: Final = 60 * 86_400  # after which a file is removed
_OTHERS_MAY_WRITE: Final = 0o022


def build(isa: Isa, folder: Path | None = None, *, options: tuple[str, ...] = ()) -> Path:
    """The library's file, compiled if it is not there.

    Args:
        folder: where compiled libraries lie; None: below the user's cache folder.
        options: more for the compiler, also at linking.

    Raises:
        NoLibraryError: no compiler, all of them fail, it takes too long, or others can write to the folder.
    """
    deadline_s = time.monotonic() + _TIME_LIMIT_S
    folder = _cache_folder() if folder is None else folder
    flags = (*_OPTIONS, *compiler_options(isa), *options)
    stem = f"cpu-{isa}-{_source_key(flags)}"
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
        for path in sorted(folder.glob(f"{stem}-*.so")):  # there is no compiler
            if _is_usable(path):
                return path
    except OSError as error:
        raise NoLibraryError(f"cannot write CPU kernels below {folder}: {error}") from error
    raise NoLibraryError(
        f"no C++ compiler ({', '.join(COMPILERS)}) for the CPU kernels; install one (Debian: apt install g++)"
    )


def _cache_folder() -> Path:
    try:
        return cache_dir() / "kernels"
    except ConfigError as error:  # no reason not to serve
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


# ---------------------------------------------------------------- a file that is there


def is_whole(path: Path) -> bool:
    """Whether the file is there as it was compiled."""
    try:
        content = path.read_bytes()
    except OSError:
        return False
    return hashlib.sha256(content[:-_HASH_BYTES]).digest() == content[-_HASH_BYTES:]


def _is_usable(path: Path) -> bool:
    if not is_whole(path):
        return False
    _check_owner(path)
    with suppress(OSError):  # it may be another user's
        os.utime(path)  # so that it is not swept away
    return True


def _check_owner(path: Path) -> None:
    """Raises `NoLibraryError` if somebody else could have written what is there."""
    try:
        status = path.stat()
    except FileNotFoundError:
        return
    if status.st_uid not in (0, os.geteuid()):
        raise NoLibraryError(
            f"{path} belongs to user {status.st_uid}, whose code would run here; remove it, or set ENGINE_CACHE_DIR "
            "to a folder of your own"
        )
    if status.st_mode & _OTHERS_MAY_WRITE:
        raise NoLibraryError(
            f"others can write to {path}, and their code would run here; chmod go-w it, or set ENGINE_CACHE_DIR to a "
            "folder of your own"
        )


# ---------------------------------------------------------------- making one


def _make(
    path: Path, compiler: Compiler, flags: tuple[str, ...], options: tuple[str, ...], deadline_s: float
) -> None:
    folder = path.parent
    folder.mkdir(parents=True, exist_ok=True, mode=0o755)
    _check_owner(folder)
    with _locked(folder, deadline_s):
        if _is_usable(path):  # somebody else has made it meanwhile
            return
        _sweep(folder)
        logger.info("cpu_kernels compiling, once, with %s; this takes some 20 s", compiler.path)
        started_s = time.monotonic()
        command = [compiler.path, *flags, *(["-fopenmp"] if compiler.openmp else [])]
        _compile(command, options, path, deadline_s)
        logger.info("cpu_kernels compiled_s=%.1f path=%s", time.monotonic() - started_s, path)


@contextmanager
def _locked(folder: Path, deadline_s: float) -> Iterator[None]:
    """While nobody else compiles; the system releases the lock of a process that dies."""
    lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        has_told = False
        while not _try_lock(lock):
            if not has_told:
                logger.info("cpu_kernels waiting for another process that compiles them in %s", folder)
                has_told = True
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
    """Remove what processes left that died while they compiled, and files that nobody has used for long."""
    for partial in folder.glob("partial-*"):  # nobody else compiles now
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
        # Without -fopenmp: that would name a runtime to load.
        run_all([[command[0], "-shared", *options, *objects, "-o", str(linked)]], folder, deadline_s)
        content = linked.read_bytes()
        linked.write_bytes(content + hashlib.sha256(content).digest())
        linked.chmod(0o644)  # whatever the umask: what others can write is not loaded
        linked.replace(path)
