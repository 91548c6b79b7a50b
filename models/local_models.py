"""`LocalModel`: the models on this machine: the built-in ones and those in the hub's cache."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from ..runtime.errors import ConfigError
from ..runtime.text import counted
from .hub.built_in.fetch import cached_model
from .hub.built_in.models import BUILT_IN_MODELS, BuiltInModel
from .hub.hub_cache import HubCache, paths_below
from .hub.hub_name import DEFAULT_REVISION, HubName
from .hub.hub_place import local_repos
from .hub.wanted_files import CONFIG, NoModelError, gguf_models, quantization_of

_BITS: Final = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}


class LocalModel(NamedTuple):
    """A model that commands take by `name`.

    Attributes:
        name: `org/repo:Q4_K_M`, with `@revision` if it is not the main branch.
        quantization: of the weights: `Q4_K_M`, `BF16`, `fp8`; "" if unknown.
        size_bytes: of its files; contents that two models share count for both.
        commit: of the revision; "" for a built-in model.
        last_used_s: Unix time of the last start with it; of the download, if there was none.
        path: what is loaded.
        complete: whether it can be served.
    """

    name: str
    quantization: str
    size_bytes: int
    commit: str
    last_used_s: float
    path: Path
    complete: bool = True


def local_models() -> list[LocalModel]:
    """Every model on this machine, by name."""
    models = [model for repo in local_repos() for model in _models_of(HubCache(repo))]
    models += [
        _built_in(model, path) for model in BUILT_IN_MODELS if (path := cached_model(model)) is not None
    ]
    return sorted(models, key=lambda model: model.name.lower())


def _built_in(model: BuiltInModel, place: Path) -> LocalModel:
    files = [model.place_of(member) for member in model.wheel.members]
    size = sum(path.stat().st_size for path in files)
    quantization = _precision(place) if model.is_folder else quantization_of(place.stem)
    return LocalModel(model.short_names[0], quantization, size, "", _last_used_s(files), place)


def _models_of(cache: HubCache) -> Iterable[LocalModel]:
    refs = cache.refs()
    for snapshot in sorted((cache.folder / "snapshots").iterdir()):
        revisions = sorted(refs.get(snapshot.name, ()), key=lambda ref: (ref != DEFAULT_REVISION, ref))
        name = HubName(cache.repo, revisions[0] if revisions else snapshot.name)
        files = paths_below(snapshot)
        models = gguf_models(files)
        labels = [quantization_of(model) for model in models]
        for model, label in zip(models, labels, strict=True):
            own = name._replace(quantization=label if labels.count(label) == 1 and label else model)
            yield _local(cache, snapshot, own, label, models[model])
        in_models = {part for parts in models.values() for part in parts}
        others = [path for path in files if path not in in_models]
        if CONFIG in others or not models:
            yield _local(cache, snapshot, name, _precision(snapshot), others)


def _local(
    cache: HubCache, snapshot: Path, name: HubName, quantization: str, files: Sequence[str]
) -> LocalModel:
    paths = [snapshot / file for file in files]
    try:
        place = cache.find(name, need_weights=True)
    except NoModelError:
        place = None
    size = sum(path.stat().st_size for path in paths)
    return LocalModel(
        str(name),
        quantization,
        size,
        snapshot.name,
        _last_used_s(paths),
        place or snapshot,
        place is not None,
    )


def _precision(snapshot: Path) -> str:
    """The quantization method, or the precision, that config.json states."""
    from .model_files import read_json

    with contextlib.suppress(ConfigError):
        config = read_json(snapshot / CONFIG)
        method = config.get("quantization_config")
        if isinstance(method, dict) and isinstance(method.get("quant_method"), str):
            return str(method["quant_method"])
        dtype = str(config.get("dtype") or config.get("torch_dtype") or "")
        return _BITS.get(dtype, dtype)
    return ""


def _last_used_s(paths: Iterable[Path]) -> float:
    """Time of the last use of the weights; other programs read the small files, too."""
    weights = [path for path in paths if path.suffix in (".gguf", ".safetensors")]
    return max((max(path.stat().st_atime, path.stat().st_mtime) for path in weights), default=0.0)


def unfinished_bytes() -> int:
    """Bytes of downloads that were interrupted, or are going on."""
    return sum(
        path.stat().st_size
        for repo in local_repos()
        for path in (HubCache(repo).folder / "blobs").glob("*.incomplete")
    )


def ago(unix_s: float, now_s: float | None = None) -> str:
    """`5 minutes ago`; "never" for 0."""
    if not unix_s:
        return "never"
    seconds = max(0.0, (time.time() if now_s is None else now_s) - unix_s)
    for unit, length in (("day", 86_400), ("hour", 3600), ("minute", 60)):
        if seconds >= length:
            return f"{counted(int(seconds // length), unit)} ago"
    return "just now"
