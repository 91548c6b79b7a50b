"""`pull`: brings a model of the hub, or a newer revision of it, into the cache."""

from __future__ import annotations

import queue
import shutil
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from ...runtime.errors import ConfigError
from .download_progress import DownloadState, Progress
from .file_download import FileDownload, StoppedError
from .hub_cache import HubCache, mark_used, place_of
from .hub_client import HubClient, HubUnreachableError
from .hub_name import HubName
from .listing import Listing, RepoFile, save_listing
from .meter import Meter
from .wanted_files import INDEX, wanted_files

Sleep = Callable[[float], None]

_PARALLEL: Final = 4
_SPARE_BYTES: Final = 64 << 20
"""Disk space that a download leaves."""
_JOIN_S: Final = 1.0
_MAX_HTTP_BYTES: Final = 50_000_000_000  # as in huggingface_hub, which needs hf_xet above it


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
    name: HubName,
    *,
    need_weights: bool = True,
    progress: Progress | None = None,
    sleep: Sleep = time.sleep,
) -> Pulled:
    """Download the files of a model that are needed to serve it and are not in the cache.

    Args:
        name: of the model.
        need_weights: False: configuration and tokenizer only.
        progress: receives reports.
        sleep: waits for seconds, before another attempt.

    Raises:
        HubUnreachableError: no answer; what has arrived stays, and the next call continues.
        ConfigError: no such model, no access, no files to serve, a wrong checksum, or too little disk space.
    """
    cache = HubCache(name.repo)

    def on_wait(line: str) -> None:
        if progress is not None:
            progress(DownloadState("note", str(name), 0, 0, note=line))

    with HubClient(sleep=sleep, on_wait=on_wait) as client:
        try:
            listing = client.listing(name.repo, name.revision)
            files = _wanted(name, listing, client, cache, need_weights, sleep)
            blobs = {file.blob: file for file in files}.values()
            missing = [file for file in blobs if not cache.has(file)]
            total = sum(file.size_bytes for file in blobs)
            left = sum(file.size_bytes - cache.part_bytes(file) for file in missing)
            _check_sizes(str(name), missing)
            _check_space(str(name), cache.folder, left)
            if missing:
                meter = Meter(str(name), total, total - left, progress)
                _fetch_all(client, cache, listing.commit, missing, meter, sleep)
                meter.end()
            for file in files:
                cache.link(listing.commit, file)
            cache.set_revision(name.revision, listing.commit)
        except OSError as error:
            raise ConfigError(
                f"{name}: cannot be stored in {cache.folder}: {error.strerror or error}; set HF_HOME to a writable "
                "folder with enough space"
            ) from error
    save_listing(name.repo, listing)
    place = place_of(cache.snapshot(listing.commit), [file.path for file in files])
    mark_used(place)
    return Pulled(place, listing.commit, total, left)


def _wanted(
    name: HubName,
    listing: Listing,
    client: HubClient,
    cache: HubCache,
    need_weights: bool,
    sleep: Sleep,
) -> list[RepoFile]:
    """The needed files. The index of sharded weights is downloaded for that."""

    def read_index() -> Mapping[str, Any]:
        from ..model_files import read_json

        file = listing.file(INDEX)
        assert file is not None
        _fetch_all(client, cache, listing.commit, [file], Meter(str(name), file.size_bytes, 0, None), sleep)
        return read_json(cache.blob(file))

    paths = wanted_files(
        str(name),
        [file.path for file in listing.files],
        quantization=name.quantization,
        need_weights=need_weights,
        read_index=read_index,
    )
    by_path = {file.path: file for file in listing.files}
    return [by_path[path] for path in paths]


def _check_sizes(name: str, files: Sequence[RepoFile]) -> None:
    for file in files:
        if file.size_bytes > _MAX_HTTP_BYTES:
            repo = name.partition(":")[0].partition("@")[0]
            raise ConfigError(
                f"{name}: {file.path} has {file.size_bytes / 1e9:.0f} GB, and the hub sends files above "
                f"{_MAX_HTTP_BYTES / 1e9:.0f} GB only by its own protocol; download it with "
                f"`hf download {repo} {file.path}`, then start again"
            )


def _check_space(name: str, folder: Path, needed: int) -> None:
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    if needed and needed + _SPARE_BYTES > free:
        raise ConfigError(
            f"{name}: {needed / 2**30:.2f} GiB are to be downloaded, and {folder} has {free / 2**30:.2f} GiB of free "
            "space; `engine list` and `engine rm` make room, or set HF_HOME to a folder on another disk"
        )


def _fetch_all(
    client: HubClient,
    cache: HubCache,
    commit: str,
    files: Sequence[RepoFile],
    meter: Meter,
    sleep: Sleep,
) -> None:
    """Download several files at the same time, small ones first; the first error ends all.

    The threads are daemons: Ctrl-C does not wait for one that is blocked in a read.
    """
    todo: queue.SimpleQueue[RepoFile] = queue.SimpleQueue()
    for file in sorted(files, key=lambda file: file.size_bytes):
        todo.put(file)
    stop = threading.Event()
    errors: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
    download = FileDownload(client, cache, commit, meter, stop, sleep)

    def work() -> None:
        try:
            while True:
                download.fetch(todo.get_nowait())
        except queue.Empty:
            errors.put(None)
        except BaseException as error:  # for the thread that waits
            errors.put(error)

    threads = [threading.Thread(target=work, daemon=True) for _ in range(min(_PARALLEL, len(files)))]
    for thread in threads:
        thread.start()
    try:
        for _ in threads:
            error = errors.get()
            if error is not None and not isinstance(error, StoppedError):
                raise _explained(error, meter)
    finally:
        stop.set()
        for thread in threads:
            thread.join(_JOIN_S)


def _explained(error: BaseException, meter: Meter) -> BaseException:
    if isinstance(error, HubUnreachableError):
        return HubUnreachableError(f"{meter.model}: the download stopped: {error}; pull again to continue it")
    return error
