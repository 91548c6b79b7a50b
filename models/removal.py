"""`remove`: removes a model from this machine.

What the name stands for is removed, and of the contents only those that no other revision or quantization uses.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final, NamedTuple

from ..runtime.errors import ConfigError
from .hub.built_in.fetch import cached_model, stamp_of
from .hub.built_in.models import find_built_in
from .hub.hub_cache import HubCache, forget_listing, paths_below
from .hub.hub_name import HubName, parse_hub_name
from .hub.hub_place import near_names
from .hub.wanted_files import choose_gguf, gguf_models, tower_of
from .local_models import local_models

_LOCK_S: Final = 0.1


class Removed(NamedTuple):
    """Result of `remove`: removed files, and bytes of the disk that are free now."""

    num_files: int
    freed_bytes: int


def remove(model: str, in_use: Mapping[str, int] | None = None) -> Removed:
    """Remove a model: all revisions for `org/repo`, else what the revision or quantization names.

    Args:
        model: its name.
        in_use: the paths of models that servers use, with the process id of each server.

    Raises:
        ConfigError: it is not on this machine, or a path; or a server uses it; or its files cannot be removed.
    """
    in_use = in_use or {}
    if (built_in := find_built_in(model)) is not None:
        if cached_model(built_in) is None:
            raise _absent(model)
        _check_unused([built_in.place], in_use, model)
        files = [built_in.place_of(member) for member in built_in.wheel.members]
        removed = _unlink([stamp_of(built_in), *files], files)
        if built_in.is_folder:
            _remove_empty(built_in.place)
        return removed
    name = parse_hub_name(model)
    is_path = os.path.exists(os.path.expanduser(model))
    if is_path and (name is None or not HubCache(name.repo).folder.exists()):
        raise ConfigError(
            f"{model}: `engine rm` removes models that were pulled, by name (see `engine list`); remove a folder or "
            "file of your own with rm"
        )
    if name is None:
        raise _absent(model)
    cache = HubCache(name.repo)
    if not (cache.folder / "snapshots").is_dir():
        raise _absent(model)
    try:
        _check_idle(cache, model)
        if "@" not in model and not name.quantization:
            _check_unused([cache.folder], in_use, model)
            return _remove_repo(cache)
        return _remove_files(cache, name, model, in_use)
    except OSError as error:
        raise ConfigError(f"{error.filename}: cannot be removed: {error.strerror}") from error


def _check_idle(cache: HubCache, model: str) -> None:
    """Raises `ConfigError` if a process downloads a file of the repository."""
    from huggingface_hub.utils import WeakFileLock  # type: ignore[attr-defined]  # not in its `__all__`

    for path in (cache.folder.parent / ".locks" / cache.folder.name).glob("*.lock"):
        try:
            with WeakFileLock(path, timeout=_LOCK_S):
                pass
        except TimeoutError:
            raise ConfigError(f"{model}: is being downloaded; end that first") from None


def _check_unused(places: Iterable[Path], in_use: Mapping[str, int], model: str) -> None:
    """Raises `ConfigError` if a server uses one of these files and folders, or a file in one of the folders."""
    for place in places:
        for path, pid in in_use.items():
            if Path(path).is_relative_to(place):
                raise ConfigError(
                    f"{model}: the server with process id {pid} uses it; stop that first, or pass --force"
                )


def _remove_repo(cache: HubCache) -> Removed:
    contents = [path for path in (cache.folder / "blobs").glob("*") if path.is_file()]
    freed = sum(path.stat().st_size for path in contents)
    for snapshot in (cache.folder / "snapshots").iterdir():
        forget_listing(cache.repo, snapshot.name)
    shutil.rmtree(cache.folder)
    shutil.rmtree(cache.folder.parent / ".locks" / cache.folder.name, ignore_errors=True)
    return Removed(len(contents), freed)


def _remove_files(cache: HubCache, name: HubName, model: str, in_use: Mapping[str, int]) -> Removed:
    """One revision, or one quantization: its links, and the contents that no other link names."""
    commit = cache.commit_of(name.revision)
    if commit is None:
        raise _absent(model)
    snapshot = cache.snapshot(commit)
    files = paths_below(snapshot)
    if name.quantization:
        models = gguf_models(files)
        if not models:
            raise _absent(model)
        own = models[choose_gguf(str(name), models, name.quantization)]
        tower = tower_of(files, own[0]) if len(models) == 1 else ""  # others may need it
        files = [*own, tower] if tower else own
    links = [snapshot / file for file in files]
    _check_unused(links if name.quantization else [snapshot], in_use, model)
    kept = {path.resolve() for path in (cache.folder / "snapshots").rglob("*") if path not in set(links)}
    contents = {link.resolve() for link in links} - kept
    removed = _unlink([*links, *contents], contents)
    _remove_empty(snapshot)
    if not snapshot.exists():
        forget_listing(cache.repo, commit)
        for ref in cache.refs().get(commit, ()):
            (cache.folder / "refs" / ref).unlink()
    if not any((cache.folder / "snapshots").iterdir()):
        removed = removed._replace(freed_bytes=removed.freed_bytes + _remove_repo(cache).freed_bytes)
    return removed._replace(num_files=len(links))


def _unlink(paths: Iterable[Path], counted: Iterable[Path]) -> Removed:
    freed = sum(path.stat().st_size for path in counted if path.exists())
    num_files = 0
    for path in paths:
        with contextlib.suppress(FileNotFoundError):
            path.unlink()
            num_files += 1
    return Removed(num_files, freed)


def _remove_empty(folder: Path) -> None:
    for path, _, _ in os.walk(folder, topdown=False):
        with contextlib.suppress(OSError):
            os.rmdir(path)


def _absent(model: str) -> ConfigError:
    near = near_names(model, [local.name for local in local_models()])
    hint = f"; did you mean {' or '.join(near)}?" if near else "; `engine list` shows what is"
    return ConfigError(f"{model}: is not on this machine{hint}")
