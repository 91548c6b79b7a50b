"""`HubCache`: the files of one repository in the hub's cache folder, in the layout of huggingface_hub.

<HF_HOME>/hub/models--org--repo/
    refs/main                       the commit of a branch or tag
    snapshots/<commit>/<path>       links to blobs
    blobs/<SHA-256 or git's SHA-1>  the contents
    blobs/<...>.incomplete          the beginning of one
<HF_HOME>/hub/.locks/models--org--repo/<blob>.lock

huggingface_hub writes it, see `pull`; the engine keeps the list of files of each commit in its own cache folder.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Final

import msgspec

from ...runtime.errors import ConfigError
from ...runtime.installation import cache_dir
from .hub_name import HubName
from .wanted_files import CONFIG, INDEX, NoModelError, choose_gguf, gguf_models, missing_parts, wanted_files

_COMMIT_LEN: Final = 40


def hub_folder() -> Path:
    """The folder of all models: `$HF_HUB_CACHE`, else `$HF_HOME/hub`."""
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE)


class HubCache:
    """See the module.

    Attributes:
        repo: `org/repo`.
        folder: of the repository; it need not exist.
    """

    def __init__(self, repo: str) -> None:
        self.repo = repo
        self.folder = hub_folder() / f"models--{repo.replace('/', '--')}"

    def commit_of(self, revision: str) -> str | None:
        """The commit that a revision had when it was downloaded."""
        with contextlib.suppress(OSError, UnicodeDecodeError):
            return (self.folder / "refs" / revision).read_text(encoding="ascii").strip()
        return revision if len(revision) == _COMMIT_LEN and self.snapshot(revision).is_dir() else None

    def refs(self) -> dict[str, list[str]]:
        """Commit -> the branches and tags that were downloaded."""
        refs: dict[str, list[str]] = {}
        folder = self.folder / "refs"
        for path in sorted(folder.rglob("*")):
            if path.is_file():
                with contextlib.suppress(OSError, UnicodeDecodeError):
                    refs.setdefault(path.read_text(encoding="ascii").strip(), []).append(
                        path.relative_to(folder).as_posix()
                    )
        return refs

    def snapshot(self, commit: str) -> Path:
        """The folder of a commit."""
        return self.folder / "snapshots" / commit

    def has(self, blob: str, size_bytes: int) -> bool:
        """Whether a content is complete. Blobs get their name when they are; the size is one more check."""
        try:
            return (self.folder / "blobs" / blob).stat().st_size == size_bytes
        except OSError:
            return False

    def complete(self, name: HubName, *, need_weights: bool, need_tower: bool = True) -> Path | None:
        """The snapshot's folder, or its (first) GGUF file, if all needed files are certain to be there; else None.

        For a folder this takes a listing of the commit. The files of a GGUF model are known by their names, except its
        tower.

        Raises:
            NoModelError: the name does not say which of several GGUF models.
        """
        commit = self.commit_of(name.revision)
        if commit is None or not (snapshot := self.snapshot(commit)).is_dir():
            return None
        if listing := load_listing(self.repo, commit):
            return self._if_all(name, snapshot, listing, need_weights, need_tower)
        return self._gguf(name, snapshot) if name.quantization else None

    def find(self, name: HubName, *, need_weights: bool) -> Path | None:
        """As `complete`, without the tower of a GGUF model, and for a snapshot without a listing if it looks complete.

        Raises:
            NoModelError: the name does not say which of several GGUF models.
        """
        commit = self.commit_of(name.revision)
        if commit is None or load_listing(self.repo, commit):
            return self.complete(name, need_weights=need_weights, need_tower=False)
        if not (snapshot := self.snapshot(commit)).is_dir():
            return None
        if not (snapshot / CONFIG).exists() or name.quantization:
            return self._gguf(name, snapshot)
        try:
            return self._if_all(name, snapshot, paths_below(snapshot), need_weights, need_tower=False)
        except NoModelError:  # a tool has loaded the tokenizer only
            return None

    def _if_all(
        self, name: HubName, snapshot: Path, paths: list[str], need_weights: bool, need_tower: bool
    ) -> Path | None:
        if INDEX in paths and not (snapshot / INDEX).exists():
            return None
        wanted = wanted_files(
            str(name),
            paths,
            quantization=name.quantization,
            need_weights=need_weights,
            need_tower=need_tower,
            read_index=lambda: _read_index(snapshot / INDEX),
        )
        if not all((snapshot / path).exists() for path in wanted):
            return None
        return place_of(snapshot, wanted)

    def _gguf(self, name: HubName, snapshot: Path) -> Path | None:
        models = gguf_models(paths_below(snapshot))
        try:
            files = models[choose_gguf(str(name), models, name.quantization)]
        except NoModelError:
            return None
        return None if missing_parts(files) else place_of(snapshot, files)

    def remove_parts(self, blobs: Iterable[str]) -> None:
        """Remove what killed processes have left of contents that are complete now."""
        for blob in blobs:
            for part in (self.folder / "blobs").glob(f"{blob}.*incomplete"):
                part.unlink(missing_ok=True)

    def set_revision(self, revision: str, commit: str) -> None:
        """Note the commit of a branch or tag."""
        if revision == commit:
            return
        ref = self.folder / "refs" / revision
        ref.parent.mkdir(parents=True, exist_ok=True)
        fd, new = tempfile.mkstemp(dir=self.folder, prefix="ref-")
        with os.fdopen(fd, "w", encoding="ascii") as file:
            file.write(commit)
        os.replace(new, ref)


def place_of(snapshot: Path, files: Iterable[str]) -> Path:
    """Path to load from a snapshot's files: the first GGUF file, or the folder."""
    ggufs = [path for path in files if path.lower().endswith(".gguf")]
    return snapshot / ggufs[0] if ggufs else snapshot


def mark_used(place: Path) -> None:
    """Set the time of the last access of a model's files, which a kernel writes rarely or never (`relatime`)."""
    now_ns = time.time_ns()
    for path in [place] if place.is_file() else place.glob("*.safetensors"):
        with contextlib.suppress(OSError):  # of another user, or on a read-only file system
            os.utime(path, ns=(now_ns, path.stat().st_mtime_ns))


def paths_below(folder: Path) -> list[str]:
    """The files below a folder, with "/"; no links to contents that are gone."""
    return [path.relative_to(folder).as_posix() for path in sorted(folder.rglob("*")) if path.is_file()]


def save_listing(repo: str, commit: str, paths: Iterable[str]) -> None:
    """Keep the files of a commit, which do not change; without effect if the cache folder cannot be written."""
    with contextlib.suppress(OSError):
        path = _listing_path(repo, commit)
        path.parent.mkdir(parents=True, exist_ok=True)
        fd, new = tempfile.mkstemp(dir=path.parent, prefix="new-")
        with os.fdopen(fd, "wb") as file:
            file.write(msgspec.json.encode(_Listing([_ListedFile(path) for path in paths])))
        os.replace(new, path)


def load_listing(repo: str, commit: str) -> list[str]:
    """The files of a commit, of an earlier download by the engine, else by huggingface_hub; none if not known."""
    from huggingface_hub import get_cached_repo_tree

    with contextlib.suppress(OSError, msgspec.DecodeError, ConfigError):
        kept = msgspec.json.decode(_listing_path(repo, commit).read_bytes(), type=_Listing)
        return [file.path for file in kept.files]
    try:
        return [file.path for file in get_cached_repo_tree(repo, revision=commit, cache_dir=hub_folder())]
    except Exception:  # which of its errors differs by version; without a listing the hub is asked
        return []


def forget_listing(repo: str, commit: str) -> None:
    """Remove a kept listing."""
    path = _listing_path(repo, commit)
    with contextlib.suppress(OSError):
        path.unlink()
        path.parent.rmdir()


class _ListedFile(msgspec.Struct):
    path: str


class _Listing(msgspec.Struct):
    files: list[_ListedFile]


def _listing_path(repo: str, commit: str) -> Path:
    return cache_dir() / "listings" / repo.replace("/", "--") / f"{commit}.json"


def _read_index(path: Path) -> dict[str, object]:
    from ..model_files import read_json

    return read_json(path)
