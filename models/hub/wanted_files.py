"""Which files of a repository are needed to serve it: one set of safetensors with configuration, or one GGUF model."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

from ...runtime.errors import ConfigError
from ..gguf.gguf_split import PART, whole_name

logger = logging.getLogger(__name__)

CONFIG: Final = "config.json"
INDEX: Final = "model.safetensors.index.json"
SINGLE: Final = "model.safetensors"
MODULES: Final = "modules.json"
PICKLE_REASON: Final = (
    "has only pickled weights (.bin, .pt), which are refused because loading them runs code from the file; "
    "use a version in safetensors"
)
_PICKLES: Final = (".bin", ".pt", ".pth")
_OTHER_JSON: Final = re.compile(
    r".*\.(?:bin|h5|msgpack)\.index\.json|(?:trainer_state|training_args|all_results).*"
)
_TEMPLATES: Final = re.compile(r"additional_chat_templates/[^/]+\.jinja")
_MODULE: Final = re.compile(r"\d+_[A-Za-z]+/(config\.json|model\.safetensors)")
"""Files of a part of a sentence-transformers model, like `1_Pooling/config.json`."""
_NO_MODEL: Final = re.compile(r"(?:.*/)?(?:mmproj|imatrix)[^/]*|.*[.-](?:mmproj|imatrix)[^/]*", re.IGNORECASE)
_QUANTIZATION: Final = re.compile(
    r"(?:^|[-._])((?:UD-)?(?:I?Q\d+_(?:K(?:_(?:XXS|XS|S|M|L|XL))?|\d+(?:_\d+)*|XXS|XS|S|M|L|XL|NL)(?:_\d+)*"
    r"|Q\d+|TQ\d_\d|BF16|FP?16|FP?32|MXFP4(?:_MOE)?|NVFP4))$",
    re.IGNORECASE,
)
_TOWER: Final = re.compile(r"(?:.*/)?[^/]*mmproj[^/]*\.gguf", re.IGNORECASE)
_TOWERS: Final = ("F16", "BF16", "Q8_0", "F32")


class NoModelError(ConfigError):
    """A repository, or what of it is on this machine, has no files that can be served."""


def wanted_files(
    name: str,
    paths: Sequence[str],
    *,
    quantization: str = "",
    need_weights: bool = True,
    need_tower: bool = True,
    read_index: Callable[[], Mapping[str, Any]] | None = None,
) -> list[str]:
    """The files to download of a repository with the files `paths`.

    Args:
        name: for errors.
        quantization: of a GGUF file, or its name; "" for safetensors, else for the only GGUF model.
        need_weights: False: configuration and tokenizer only; a GGUF file has all in one.
        need_tower: False: without the tower of a GGUF model, which then serves text.
        read_index: gives the index of sharded weights; called only if `paths` has one.

    Raises:
        NoModelError: there are no files that the engine reads, or several GGUF models and none is named.
    """
    top = [path for path in paths if "/" not in path]
    weights = [path for path in top if path.endswith(".safetensors")]
    if not quantization and CONFIG in top and weights:
        settings = _settings(paths)
        return (
            [*settings, *_shards(name, weights, top, read_index), *_parts(paths, top)]
            if need_weights
            else settings
        )
    models = gguf_models(paths)
    if models:
        files = models[choose_gguf(name, models, quantization)]
        tower = tower_of(paths, files[0]) if need_tower else ""
        return [*files, tower] if tower else files
    if quantization:
        raise NoModelError(
            f"{name}: the repository has no GGUF files, so ':{quantization}' chooses none; drop it"
        )
    if any(path.endswith(_PICKLES) for path in top):
        raise NoModelError(f"{name}: {PICKLE_REASON}")
    raise NoModelError(
        f"{name}: has neither config.json with .safetensors weights nor a .gguf file, so it is no model to serve"
    )


def _settings(paths: Iterable[str]) -> list[str]:
    return [
        path
        for path in paths
        if _TEMPLATES.fullmatch(path)
        or ((part := _MODULE.fullmatch(path)) and part[1] == CONFIG)
        or ("/" not in path and path.endswith((".json", ".jinja")) and not _OTHER_JSON.fullmatch(path))
    ]


def _parts(paths: Iterable[str], top: Sequence[str]) -> list[str]:
    """The weights of layers after pooling, each in a folder of its own."""
    if MODULES not in top:
        return []
    return [path for path in paths if (part := _MODULE.fullmatch(path)) and part[1] == SINGLE]


def _shards(
    name: str, weights: list[str], top: Sequence[str], read_index: Callable[[], Mapping[str, Any]] | None
) -> list[str]:
    """The weight files that are read. Some repositories hold the same weights twice, or in several precisions."""
    if INDEX in top and read_index is not None:
        weight_map = read_index().get("weight_map")
        named = set(weight_map.values()) if isinstance(weight_map, dict) else set()
        if missing := sorted(str(shard) for shard in named if shard not in weights):
            raise NoModelError(f"{name}: {INDEX} names {missing[0]}, which the repository does not have")
        return [path for path in weights if path in named]
    if SINGLE in weights:
        return [SINGLE]
    return [path for path in weights if path.startswith("model")] or weights


# ---------------------------------------------------------------- GGUF


def gguf_models(paths: Iterable[str]) -> dict[str, list[str]]:
    """The GGUF models of a repository: path without parts and suffix -> its files, all parts of a split one."""
    models: dict[str, list[str]] = {}
    for path in sorted(paths):
        if path.lower().endswith(".gguf") and not _NO_MODEL.fullmatch(path):
            models.setdefault(whole_name(path), []).append(path)
    return models


def tower_of(paths: Iterable[str], model: str) -> str:
    """The tower of a GGUF model: a `*mmproj*.gguf` in its folder, else at the top; "": there is none, or several are.

    Of one tower in several precisions it is F16, which most repositories have, else BF16, Q8_0 or F32.
    """
    found = sorted(path for path in paths if _TOWER.fullmatch(path))
    for folder in (model.rpartition("/")[0], ""):
        towers = [path for path in found if path.rpartition("/")[0] == folder]
        if len({_QUANTIZATION.sub("", path[: -len(".gguf")]) for path in towers}) == 1:
            order = {label: number for number, label in enumerate(_TOWERS)}
            return min(towers, key=lambda path: order.get(quantization_of(path[: -len(".gguf")]), len(order)))
        if towers:
            logger.warning("several towers: %s; images need one of them as --mmproj", ", ".join(towers))
            return ""
    return ""


def missing_parts(files: Sequence[str]) -> int:
    """Number of parts of a split model that are not among `files`."""
    match = PART.fullmatch(files[0])
    return max(0, int(match["parts"]) - len(files)) if match else 0


def quantization_of(model: str) -> str:
    """The quantization that a file name states, in capitals: `Q4_K_M`; "" if it states none."""
    match = _QUANTIZATION.search(model.rpartition("/")[2])
    return match[1].upper() if match else ""


def choose_gguf(name: str, models: Mapping[str, Sequence[str]], quantization: str) -> str:
    """The key in `models` (see `gguf_models`) of the wanted one.

    Raises:
        NoModelError: none or several match; the message lists those that are there.
    """
    if not models:
        raise NoModelError(f"{name}: has no GGUF files")
    wanted = quantization.upper().removesuffix(".GGUF")
    rules: tuple[Callable[[str], bool], ...] = (
        lambda model: model.upper() == wanted or model.rpartition("/")[2].upper() == wanted,
        lambda model: quantization_of(model) == wanted,
        lambda model: quantization_of(model).removeprefix("UD-") == wanted,
    )
    found = list(models) if not wanted else []
    for rule in rules if wanted else ():
        if found := [model for model in models if rule(model)]:
            break
    if len(found) == 1:
        return found[0]
    repo = name.partition(":")[0]
    if found and wanted:
        raise NoModelError(
            f"{name}: {quantization!r} means {', '.join(sorted(found))}; write one of these names after the colon"
        )
    labels = sorted({quantization_of(model) or model for model in models})
    problem = f"has no GGUF file of {quantization}" if wanted else "has several GGUF models"
    raise NoModelError(
        f"{name}: {problem}; it has {', '.join(labels)}: choose one, such as {repo}:{labels[0]}"
    )
