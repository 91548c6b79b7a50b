"""`hub_place`: a model of the hub as local files, downloaded if they are not in the cache.

A start uses what is there and makes no request if the files are known to be complete; only `pull` looks for a newer
revision. A start without network is thus as fast as one with it.
"""

from __future__ import annotations

import difflib
import logging
from collections.abc import Iterable
from pathlib import Path

from ...runtime.errors import ConfigError
from .hub_cache import HubCache, hub_folder, mark_used
from .hub_name import BUILT_IN, HubName
from .pull import HubAbsentError, HubUnreachableError, Progress, Pulled, pull

logger = logging.getLogger(__name__)


def hub_place(
    name: HubName, *, need_weights: bool = True, need_tower: bool = True, progress: Progress | None = None
) -> Path:
    """The folder or GGUF file of a model; without the tower of a GGUF model if just this cannot be downloaded.

    Raises:
        ConfigError: as `pull_named`.
    """
    cache = HubCache(name.repo)
    place = cache.complete(name, need_weights=need_weights, need_tower=need_tower)
    if place is None:
        try:
            return pull_named(name, need_weights=need_weights, need_tower=need_tower, progress=progress).place
        except ConfigError as error:
            if isinstance(error, HubUnreachableError):
                place = cache.find(name, need_weights=need_weights)
            else:
                place = cache.complete(name, need_weights=need_weights, need_tower=False)
            if place is None:
                raise
            logger.info("model=%s is read from the cache: %s", name, error)
    mark_used(place)
    return place


def cached_place(name: HubName, *, need_weights: bool = True) -> Path | None:
    """As `hub_place`, without network: None if the model is not in the cache.

    Raises:
        NoModelError: the name does not say which of several GGUF models.
    """
    return HubCache(name.repo).find(name, need_weights=need_weights)


def pull_named(
    name: HubName, *, need_weights: bool = True, need_tower: bool = True, progress: Progress | None = None
) -> Pulled:
    """As `pull`, with errors that also say what is on this machine.

    Raises:
        HubUnreachableError: no answer.
        ConfigError: no such model, no access, or as `pull`.
    """
    try:
        return pull(name, need_weights=need_weights, need_tower=need_tower, progress=progress)
    except HubAbsentError:
        raise ConfigError(
            f"{name}: neither a local folder or .gguf file nor a model on the hub{_near(name)} "
            "(or it is private: set HF_TOKEN or run `hf auth login`)"
        ) from None
    except HubUnreachableError as error:
        local = local_repos()
        there = f"; on this machine are {', '.join(local)}" if local else ""
        raise HubUnreachableError(
            f"{name}: the hub cannot be reached ({error}) and the model is not complete in {hub_folder()}{there}; "
            "check the network, or pass a local folder or .gguf file"
        ) from error


def local_repos() -> list[str]:
    """The repositories in the cache, by name."""
    try:
        names = sorted(
            path.name for path in hub_folder().glob("models--*--*") if (path / "snapshots").is_dir()
        )
    except OSError:
        return []
    return ["/".join(name.split("--", 2)[1:]) for name in names]


def near_names(wanted: str, known: Iterable[str]) -> list[str]:
    """Names like the wanted one, ignoring case and, in one without organization, that of the others."""
    by_key: dict[str, str] = {}
    for name in known:
        by_key[name.lower()] = name
        by_key.setdefault(name.rpartition("/")[2].lower(), name)
    keys = [wanted.lower(), wanted.rpartition("/")[2].lower()]
    found = [by_key[key] for wanted_key in keys for key in difflib.get_close_matches(wanted_key, by_key, n=3)]
    return list(dict.fromkeys(found))[:3]


def _near(name: HubName) -> str:
    near = near_names(name.repo, [*local_repos(), *BUILT_IN])
    return f"; did you mean {' or '.join(near)}?" if near else ""
