"""`Listing`: the files of a repository at one commit, with sizes and hashes; kept on the disk for later starts.

A commit does not change, so a listing never becomes outdated. Listings are in the engine's cache folder and not in the
hub's: the layout there belongs to huggingface_hub.
"""

from __future__ import annotations

import contextlib
import os
import re
import tempfile
from pathlib import Path
from typing import Any, Final

import msgspec

from ...runtime.errors import ConfigError
from ...runtime.installation import cache_dir

_HEX: Final = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
_COMMIT: Final = re.compile(r"[0-9a-f]{40}")


class RepoFile(msgspec.Struct, frozen=True):
    """One file.

    Attributes:
        path: in the repository, with "/".
        blob: its name in the cache: the SHA-256 of a large file (LFS), else git's SHA-1 of the blob.
        size_bytes: its size.
    """

    path: str
    blob: str
    size_bytes: int

    @property
    def is_large(self) -> bool:
        """Whether `blob` is a SHA-256."""
        return len(self.blob) == 64


class Listing(msgspec.Struct, frozen=True):
    """The files of a commit."""

    commit: str
    files: tuple[RepoFile, ...]

    def file(self, path: str) -> RepoFile | None:
        """The file of this path, or None."""
        return next((file for file in self.files if file.path == path), None)


def parse_listing(repo: str, answer: Any) -> Listing:
    """The hub's description of a model, with the sizes and hashes of its files.

    Raises:
        ConfigError: it is not one.
    """
    try:
        files = []
        for sibling in answer["siblings"]:
            large = sibling.get("lfs") or {}
            blob = large.get("sha256") or sibling["blobId"]
            size = large.get("size") if large.get("size") is not None else sibling["size"]
            path = sibling["rfilename"]
            if not _HEX.fullmatch(blob) or not isinstance(size, int) or size < 0 or not _is_inside(path):
                raise ValueError(f"file {path!r}")
            files.append(RepoFile(path, blob, size))
        if not _COMMIT.fullmatch(answer["sha"]):
            raise ValueError(f"sha {answer['sha']!r}")
        return Listing(answer["sha"], tuple(files))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(
            f"{repo}: the answer has no list of files with sizes and hashes ({error}); HF_ENDPOINT must be a hub"
        ) from error


def _is_inside(path: str) -> bool:
    return all(part not in ("", ".", "..") for part in path.split("/")) and "\\" not in path


def save_listing(repo: str, listing: Listing) -> None:
    """Keep a listing; without effect if the cache folder cannot be written, as later starts then ask the hub."""
    with contextlib.suppress(OSError):
        path = _path_of(repo, listing.commit)
        path.parent.mkdir(parents=True, exist_ok=True)
        fd, new = tempfile.mkstemp(dir=path.parent, prefix="new-")
        with os.fdopen(fd, "wb") as file:
            file.write(msgspec.json.encode(listing))
        os.replace(new, path)


def load_listing(repo: str, commit: str) -> Listing | None:
    """A kept listing, of an earlier download by the engine, else by huggingface_hub (2.0 and later); or None."""
    try:
        return msgspec.json.decode(_path_of(repo, commit).read_bytes(), type=Listing)
    except (OSError, msgspec.DecodeError, ConfigError):
        return _of_library(repo, commit)


def forget_listing(repo: str, commit: str) -> None:
    """Remove a kept listing."""
    path = _path_of(repo, commit)
    with contextlib.suppress(OSError):
        path.unlink()
        path.parent.rmdir()


def _path_of(repo: str, commit: str) -> Path:
    return cache_dir() / "listings" / repo.replace("/", "--") / f"{commit}.json"


def _of_library(repo: str, commit: str) -> Listing | None:
    """The names of a listing that huggingface_hub keeps; it gives no SHA-256, and only the names are needed."""
    import huggingface_hub

    read = getattr(huggingface_hub, "get_cached_repo_tree", None)
    if read is None:
        return None
    try:
        return Listing(
            commit,
            tuple(RepoFile(file.path, file.blob_id, file.size) for file in read(repo, revision=commit)),
        )
    except Exception:  # which of its errors differs by version; without a listing the hub is asked
        return None
