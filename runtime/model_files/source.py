"""ModelSource: the local files of the model that a user gives as `--model`.

Resolved once, by the command line or `LLM`, and sent to every process inside the launch settings. This module checks
that the files exist and are of a supported kind; `model_spec`, `tokenizer` and weight loading read their contents.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Final, Literal

import msgspec

from ..errors import ConfigError
from .default_model import DEFAULT_MODEL_NAME, Progress, ensure_default_model
from .hub import PICKLE_REASON, fetch_from_hub
from .json_file import read_json
from .stand_in import damage

HUB_NAME: Final = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_HUB_CACHE_FOLDER: Final = re.compile(r"models--(.+)--(.+)")


class ModelSource(msgspec.Struct, frozen=True):
    """A model's local files."""

    kind: Literal["hf", "gguf"]  # a folder in Hugging Face layout, or one GGUF file
    path: str  # absolute
    name: str  # the model's name in the API, unless --served-model-name gives another


def resolve_source(
    model: str | None = None,
    *,
    revision: str | None = None,
    need_weights: bool = True,
    progress: Progress | None = None,
) -> ModelSource:
    """Find the files of a model, and download them if necessary.

    Args:
        model: a folder, a .gguf file, a hub name "org/name", or None or "default" for the default model. A local path
            takes precedence over a hub name.
        revision: branch, tag or commit of a hub name.
        need_weights: False for `--load-format dummy`, which needs the configuration only.
        progress: called during the download of the default model.

    Raises:
        ConfigError: no files, or none that the engine reads; the message says what to do.
    """
    if model is None or model == "default":
        return ModelSource("gguf", str(ensure_default_model(progress)), DEFAULT_MODEL_NAME)
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
    if model.endswith(".gguf") or model.startswith((".", "/", "~")) or not HUB_NAME.fullmatch(model):
        raise ConfigError(
            f"{model}: there is no such folder or .gguf file; give one, a hub name like org/name, "
            "or 'default' for the default model"
        )
    folder = fetch_from_hub(model, revision)
    return msgspec.structs.replace(_folder_source(folder, need_weights), name=model)


def _file_source(path: Path) -> ModelSource:
    from .gguf.gguf_file import is_gguf  # with numpy: not needed for folders

    if not is_gguf(path):
        raise ConfigError(
            damage(path, "not a GGUF file; give a .gguf file or a folder in Hugging Face layout")
        )
    return ModelSource("gguf", str(path), path.name.removesuffix(".gguf"))


def _folder_source(folder: Path, need_weights: bool) -> ModelSource:
    _refuse_adapter(folder)
    if not (folder / "config.json").exists():
        ggufs = sorted(folder.glob("*.gguf"))
        if len(ggufs) == 1:
            return _file_source(ggufs[0])
        if ggufs:
            names = ", ".join(path.name for path in ggufs)
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
