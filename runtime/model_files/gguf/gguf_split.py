"""Split GGUF models: `model-00001-of-00003.gguf` has the metadata, all parts have tensors."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from ...errors import ConfigError

PART: Final = re.compile(r"(?P<stem>.+)-(?P<part>\d{5})-of-(?P<parts>\d{5})(?P<suffix>\.gguf)", re.IGNORECASE)
"""The name of a part, or its path."""
_SUFFIX: Final = ".gguf"
_MAX_PARTS: Final = 99_999  # that the names can number


def whole_name(name: str) -> str:
    """The name of the model in a file name, or in a path: without part and suffix."""
    if match := PART.fullmatch(name):
        return match["stem"]
    return name[: -len(_SUFFIX)] if name.lower().endswith(_SUFFIX) else name


def parts_of(path: Path) -> list[Path]:
    """The files of a model by the name of one: all parts of a split one, in order, else the file itself."""
    match = PART.fullmatch(path.name)
    if match is None:
        return [path]
    stem, parts, suffix = match["stem"], match["parts"], match["suffix"]
    return [path.with_name(f"{stem}-{part:05}-of-{parts}{suffix}") for part in range(1, int(parts) + 1)]


def further_parts(path: Path, metadata: Mapping[str, object]) -> list[Path]:
    """The parts of a split model after the first one, `path`; none if the model is whole.

    Raises:
        ConfigError: `path` is not the first part, a part is missing, or the names do not fit the metadata.
    """
    count = metadata.get("split.count", 1)
    if not isinstance(count, int) or not 0 <= count <= _MAX_PARTS:
        raise ConfigError(
            f"{path}: split.count is {repr(count)[:80]}, expected a number of parts; download it again"
        )
    if count <= 1:
        return []
    parts = parts_of(path)
    if len(parts) != count:
        raise ConfigError(
            f"{path}: is one of {count} parts, so its name must end with -00001-of-{count:05}.gguf; rename all parts"
        )
    if metadata.get("split.no", 0) != 0 or path != parts[0]:
        raise ConfigError(f"{path}: is a later part of a split model; give the first one, {parts[0].name}")
    if missing := [part.name for part in parts if not part.exists()]:
        raise ConfigError(
            f"{path}: {len(missing)} of {count} parts are missing, first {missing[0]}; put them into the same folder"
        )
    return parts[1:]
