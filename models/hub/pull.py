"""`pull`: brings a model of the hub, or a newer revision of it, into the cache.

huggingface_hub lists and transfers, with its cache, locks and settings (`HF_HOME`, `HF_TOKEN`, `HF_ENDPOINT`,
`HF_HUB_OFFLINE`). Chosen here: the files that serving needs, and that a revision appears when all of them are there.
"""

from __future__ import annotations

import hashlib
import queue
import shutil
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, Self

from ...runtime.errors import ConfigError
from .hub_cache import HubCache, mark_used, place_of, save_listing
from .hub_name import HubName
from .wanted_files import INDEX, wanted_files

if TYPE_CHECKING:
    from huggingface_hub.hf_api import ModelInfo

_PARALLEL: Final = 4
_SPARE_BYTES: Final = 64 << 20
"""Disk space that a download leaves."""
_INTERVAL_S: Final = 0.1
_JOIN_S: Final = 1.0

Event = Literal["begin", "part", "file", "note", "end"]


class DownloadState(NamedTuple):
    """One report of a download.

    Attributes:
        event: "begin" and "end" of the download, "part" (more bytes), "file" (a file is complete and verified), "note"
            (a second attempt).
        model: the model's name.
        done_bytes: of all files, with what was on the disk before.
        total_bytes: of all files.
        file: the file that the report is about; "" for the download as a whole.
        file_bytes: size of that file.
        note: the text of a "note".
    """

    event: Event
    model: str
    done_bytes: int
    total_bytes: int
    file: str = ""
    file_bytes: int = 0
    note: str = ""


Progress = Callable[[DownloadState], None]
"""Called during a download, by one thread at a time, though not always by the caller's."""


class HubUnreachableError(ConfigError):
    """No answer: no network, no such host, a timeout, offline mode."""


class HubAbsentError(ConfigError):
    """There is no such model, or this user may not see it."""


class RepoFile(NamedTuple):
    """One file of a repository.

    Attributes:
        path: in the repository, with "/".
        blob: its name in the cache: the SHA-256 of a large file (LFS), else git's SHA-1 of the blob.
        size_bytes: its size.
    """

    path: str
    blob: str
    size_bytes: int


class Pulled(NamedTuple):
    """The result of `pull`.

    Attributes:
        place: the snapshot's folder, or the (first) GGUF file.
        commit: of the revision.
        total_bytes: of all needed files.
        new_bytes: of these, downloaded now.
    """

    place: Path
    commit: str
    total_bytes: int
    new_bytes: int


def pull(
    name: HubName, *, need_weights: bool = True, need_tower: bool = True, progress: Progress | None = None
) -> Pulled:
    """Download the files of a model that are needed to serve it and are not in the cache.

    Args:
        name: of the model.
        need_weights: False: configuration and tokenizer only.
        need_tower: False: without the tower of a GGUF model.
        progress: receives reports.

    Raises:
        HubUnreachableError: no answer; whole files stay, and the next call continues with the others.
        ConfigError: no such model, no access, no files to serve, a wrong checksum, or too little disk space.
    """
    cache = HubCache(name.repo)
    try:
        commit, listing = _listing(name)
        files = _wanted(name, commit, listing, need_weights, need_tower)
        blobs = {file.blob: file for file in files}.values()
        missing = [file for file in blobs if not cache.has(file.blob, file.size_bytes)]
        total, left = (sum(file.size_bytes for file in each) for each in (blobs, missing))
        _check_space(str(name), cache.folder, left)
        download = _Download(name, commit, total, total - left, progress if missing else None)
        download.fetch(files, missing)
        cache.remove_parts(file.blob for file in missing)
        cache.set_revision(name.revision, commit)
    except ConfigError:
        raise
    except Exception as error:
        raise _explained(error, name, cache) from error
    save_listing(name.repo, commit, listing)
    place = place_of(cache.snapshot(commit), [file.path for file in files])
    mark_used(place)
    return Pulled(place, commit, total, left)


def _listing(name: HubName) -> tuple[str, dict[str, RepoFile]]:
    """The commit of a revision, and its files by path."""
    from huggingface_hub import HfApi, constants

    info = HfApi(endpoint=constants.ENDPOINT).model_info(
        name.repo, revision=name.revision, files_metadata=True, timeout=constants.HF_HUB_ETAG_TIMEOUT
    )
    try:
        return str(info.sha), {file.path: file for file in _files_of(info)}
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            f"{name.repo}: the answer has no list of files with sizes and hashes ({error}); HF_ENDPOINT must be a hub"
        ) from error


def _files_of(info: ModelInfo) -> list[RepoFile]:
    files = []
    if info.siblings is None:
        raise ValueError("no siblings")
    for sibling in info.siblings:
        path = sibling.rfilename
        blob, size = (
            (sibling.lfs.sha256, sibling.lfs.size) if sibling.lfs else (sibling.blob_id, sibling.size)
        )
        is_inside = all(part not in ("", ".", "..") for part in path.split("/")) and "\\" not in path
        if not blob or size is None or not is_inside:
            raise ValueError(f"file {path!r}")
        files.append(RepoFile(path, blob, size))
    return files


def _wanted(
    name: HubName, commit: str, listing: Mapping[str, RepoFile], need_weights: bool, need_tower: bool
) -> list[RepoFile]:
    """The needed files. The index of sharded weights is downloaded for that."""

    def read_index() -> Mapping[str, Any]:
        from ..model_files import read_json

        file = listing[INDEX]
        return read_json(_Download(name, commit, file.size_bytes, 0, None).get(file))

    paths = wanted_files(
        str(name),
        list(listing),
        quantization=name.quantization,
        need_weights=need_weights,
        need_tower=need_tower,
        read_index=read_index,
    )
    return [listing[path] for path in paths]


def _check_space(name: str, folder: Path, needed: int) -> None:
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    if needed and needed + _SPARE_BYTES > free:
        raise ConfigError(
            f"{name}: {needed / 2**30:.2f} GiB are to be downloaded, and {folder} has {free / 2**30:.2f} GiB of free "
            "space; `engine list` and `engine rm` make room, or set HF_HOME to a folder on another disk"
        )


class _StoppedError(Exception):
    """Another file has failed, or the user has pressed Ctrl-C."""


class _Download:
    """Brings files of one commit into the cache, verified and linked into the snapshot, and reports about it."""

    def __init__(
        self, name: HubName, commit: str, total_bytes: int, done_bytes: int, progress: Progress | None
    ) -> None:
        self._repo, self._commit = name.repo, commit
        self._state = DownloadState("part", str(name), done_bytes, total_bytes)
        self._progress = progress
        self._lock = threading.Lock()
        self._reported_s = 0.0
        self._stop = threading.Event()

    def fetch(self, files: Sequence[RepoFile], missing: Sequence[RepoFile]) -> None:
        """Download those that are missing, several at the same time, small ones first; the first error ends all."""
        self._report("begin")
        todo = iter(sorted(missing, key=lambda file: file.size_bytes))
        results: queue.SimpleQueue[Exception | None] = queue.SimpleQueue()

        def work() -> None:
            try:
                while (file := next(todo, None)) is not None:
                    self.get(file)
                results.put(None)
            except Exception as error:  # for the thread that waits
                results.put(error)

        # Daemons: Ctrl-C does not wait for one that is blocked in a read.
        threads = [threading.Thread(target=work, daemon=True) for _ in missing[:_PARALLEL]]
        for thread in threads:
            thread.start()
        try:
            for _ in threads:
                if (error := results.get()) is not None:
                    raise error
            for file in files:  # contents that another commit or path has
                self._place(file)
        finally:
            self._stop.set()
            for thread in threads:
                thread.join(_JOIN_S)
        self._report("end")

    def get(self, file: RepoFile) -> Path:
        """Download and verify a file; its place in the snapshot.

        Raises:
            ConfigError: its content is wrong twice.
        """
        found = ""
        for _ in range(2):
            path = self._place(file)
            if (found := _digest(path, file)) == file.blob:
                self._report("file", file)
                return path
            path.resolve().unlink()
            path.unlink()
            self._advance(file, -file.size_bytes)
            self._report("note", file, f"{file.path}: wrong checksum, downloading it again")
        raise ConfigError(
            f"{self._repo}: {file.path} has the wrong checksum twice ({found}, published {file.blob}); a "
            "proxy or mirror changes it: check HF_ENDPOINT and HTTPS_PROXY, then pull again"
        )

    def _place(self, file: RepoFile) -> Path:
        from huggingface_hub import constants, hf_hub_download

        folder, endpoint = constants.HF_HUB_CACHE, constants.ENDPOINT
        bar = _bar_class(partial(self._advance, file))
        return Path(
            hf_hub_download(
                self._repo,
                file.path,
                revision=self._commit,
                endpoint=endpoint,
                cache_dir=folder,
                tqdm_class=bar,
            )
        )

    def _advance(self, file: RepoFile, num_bytes: int) -> None:
        if self._stop.is_set():
            raise _StoppedError
        with self._lock:
            self._state = self._state._replace(done_bytes=self._state.done_bytes + num_bytes)
        now_s = time.monotonic()
        if now_s - self._reported_s >= _INTERVAL_S:
            self._reported_s = now_s
            self._report("part", file)

    def _report(self, event: Event, file: RepoFile | None = None, note: str = "") -> None:
        if self._progress is None:
            return
        path, size_bytes = (file.path, file.size_bytes) if file else ("", 0)
        with self._lock:
            self._progress(self._state._replace(event=event, file=path, file_bytes=size_bytes, note=note))


def _bar_class(advance: Callable[[int], None]) -> Any:
    """Progress bar for huggingface_hub in place of tqdm: it passes the bytes on, and draws nothing."""

    class Bar:
        def __init__(self, *_args: object, **_fields: object) -> None:
            return

        def __enter__(self) -> Self:
            return self

        def __exit__(self, *_exc_info: object) -> None:
            return

        def update(self, num_bytes: int) -> None:
            advance(num_bytes)

        def _ignore(self, *_args: object, **_fields: object) -> None:
            return

        update_transfer = set_postfix_str = set_transfer_postfix_str = close = _ignore

    return Bar


def _digest(path: Path, file: RepoFile) -> str:
    """SHA-256 of a large file, git's SHA-1 of a small one."""
    with open(path, "rb") as content:
        if len(file.blob) == 64:
            return hashlib.file_digest(content, "sha256").hexdigest()
        beginning = b"blob %d\0" % file.size_bytes
        return hashlib.sha1(beginning + content.read(), usedforsecurity=False).hexdigest()


def _explained(error: Exception, name: HubName, cache: HubCache) -> Exception:
    """The error of a download as the user can act on it; a bug stays as it is."""
    from huggingface_hub import constants, errors, get_token

    endpoint, has_token = constants.ENDPOINT, get_token() is not None
    causes = [error]
    while (cause := causes[-1].__cause__ or causes[-1].__context__) and isinstance(cause, Exception):
        causes.append(cause)
    if any(isinstance(each, errors.OfflineModeIsEnabled) for each in causes):
        return HubUnreachableError("HF_HUB_OFFLINE is set")
    if isinstance(error, errors.GatedRepoError):
        login = "" if has_token else ", then set HF_TOKEN or run `hf auth login`"
        who = "the user of HF_TOKEN" if has_token else "you"
        return ConfigError(
            f"{name}: access must be granted; accept the terms at {endpoint}/{name.repo} as {who}{login}"
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return ConfigError(
            f"{name.repo}: there is no revision {name.revision!r}; give a branch, a tag or a commit"
        )
    if isinstance(error, errors.RepositoryNotFoundError):
        return HubAbsentError(str(name))
    if isinstance(error, errors.RemoteEntryNotFoundError):
        return ConfigError(f"{name}: a file is not in the repository any more; pull again")
    # The error of a file is the cause of one that says that the file is not on this machine.
    for each in causes:
        if isinstance(each, errors.HfHubHTTPError):
            status, said = each.response.status_code, each.server_message or each.response.reason_phrase
            token = "" if has_token else ", or with HF_TOKEN, which has higher limits"
            kind = (
                HubUnreachableError
                if status == HTTPStatus.TOO_MANY_REQUESTS or status >= 500
                else ConfigError
            )
            return kind(f"{name}: {endpoint} answers {status} {said}; try again later{token}")
    for each in causes:  # huggingface_hub changes its HTTP library between versions
        if any(
            kind.__name__ in ("TransportError", "TooManyRedirects", "InvalidURL")
            for kind in type(each).__mro__
        ):
            late = (
                "no answer in time" if "Timeout" in type(each).__name__ else str(each) or type(each).__name__
            )
            return HubUnreachableError(f"{endpoint}: {late}")
    if isinstance(error, OSError):
        if "Consistency check failed" in str(error):
            return HubUnreachableError(
                f"{name}: the download stopped: the connection ended early; pull again"
            )
        return ConfigError(
            f"{name}: cannot be stored in {cache.folder}: {error.strerror or error}; set HF_HOME to a writable "
            "folder with enough space"
        )
    return error
