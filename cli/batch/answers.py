"""`Answers`: the results of `engine batch`, in a file beside OUT until all are there.

    OUT.partial     a header, then each result as it comes: the line that OUT will have
    OUT             all results in the order of the input; written at the end under another name, and renamed

The header has the digest of the input, so that a later run with the same input goes on where this one has ended, and
one with another input is refused. A line that a crash has cut is dropped, and answered again. The file is locked: two
commands cannot write one OUT.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Final, Self

import msgspec

from ...runtime.errors import ConfigError

_LEAST_ERROR: Final = 400


class _Header(msgspec.Struct):
    input_digest: str


class _Response(msgspec.Struct):
    status_code: int


class _Result(msgspec.Struct):
    custom_id: str
    response: _Response | None = None


class _Place(msgspec.Struct, frozen=True):
    start: int
    length: int
    failed: bool


class Answers:
    """See the module. A context manager."""

    def __init__(self, output: Path, errors: Path | None, digest: str) -> None:
        """Name the files.

        Args:
            output: for the results.
            errors: for those that are errors; None: `output` has them, too.
            digest: of the input, see `digest_of`.
        """
        self._output, self._errors, self._digest = output, errors, digest
        self._partial = output.with_name(f"{output.name}.partial")
        self._places: dict[str, _Place] = {}  # by custom_id
        self._file: BinaryIO

    def __enter__(self) -> Self:
        """Open the results, with those of an earlier run.

        Raises:
            ConfigError: there are results already, those of another input, or another command writes them.
        """
        for path, option in ((self._output, "--output"), (self._errors, "--errors")):
            if path is not None and path.exists():
                raise ConfigError(
                    f"{option} {path} exists already; remove it, or name another file (a run that was interrupted "
                    f"has left {self._partial.name} instead, and goes on with it)"
                )
        try:
            fd = os.open(self._partial, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise ConfigError(
                f"--output {self._output} cannot be written: {error.strerror}; name another file"
            ) from None
        self._file = os.fdopen(fd, "r+b")
        try:
            self._take_up()
        except BaseException:
            self._file.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def _take_up(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"another command writes {self._output}; wait for it, or name another file"
            ) from None
        end = 0
        for line in self._file:
            if not line.endswith(b"\n"):
                break
            if end == 0:
                self._check_header(line)
            else:
                try:
                    self._note(line, end)
                except msgspec.DecodeError:  # a power cut may leave anything
                    break
            end += len(line)
        self._file.seek(end)
        self._file.truncate()
        if end == 0:
            self._write(msgspec.json.encode(_Header(self._digest)) + b"\n")

    def _check_header(self, line: bytes) -> None:
        with contextlib.suppress(msgspec.DecodeError):
            if msgspec.json.decode(line, type=_Header).input_digest == self._digest:
                return
        raise ConfigError(
            f"{self._partial} has results of another input; remove it, or name another file with --output"
        )

    def _note(self, line: bytes, start: int) -> None:
        result = msgspec.json.decode(line, type=_Result)
        failed = result.response is None or result.response.status_code >= _LEAST_ERROR
        self._places[result.custom_id] = _Place(start, len(line), failed)

    def __contains__(self, custom_id: str) -> bool:
        return custom_id in self._places

    def __len__(self) -> int:
        return len(self._places)

    @property
    def num_failed(self) -> int:
        """Results that are errors."""
        return sum(place.failed for place in self._places.values())

    def add(self, line: bytes) -> None:
        """Keep a result; it survives the end of the process."""
        self._note(line, self._file.tell())
        self._write(line)

    def _write(self, line: bytes) -> None:
        self._file.write(line)
        self._file.flush()

    def finish(self, custom_ids: Sequence[str]) -> None:
        """Write the results in this order, and remove the file beside them."""
        places = [self._places[custom_id] for custom_id in custom_ids]
        if self._errors is not None:
            failed = [place for place in places if place.failed]
            places = [place for place in places if not place.failed]
            if failed:
                self._copy(failed, self._errors)
        self._copy(places, self._output)
        self._partial.unlink()

    def _copy(self, places: Sequence[_Place], path: Path) -> None:
        new = path.with_name(f"{path.name}.new")
        with new.open("wb") as file:
            for place in places:
                self._file.seek(place.start)
                file.write(self._file.read(place.length))
            file.flush()
            os.fsync(file.fileno())
        new.rename(path)


def digest_of(path: Path) -> str:
    """A digest of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()
