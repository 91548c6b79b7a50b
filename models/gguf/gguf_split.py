"""Split GGUF models: `model-00001-of-00003.gguf` has the metadata, all parts have tensors."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from ...runtime.errors import ConfigError

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
        where = "" if parts[0].exists() else ", which is missing: put all parts into the same folder"
        raise ConfigError(
            f"{path}: is a later part of a split model; give the first one, {parts[0].name}{where}"
        )
    if missing := [part.name for part in parts if not part.exists()]:
        raise ConfigError(
            f"{path}: {len(missing)} of {count} parts are missing, first {missing[0]}; put them into the same folder"
        )
    return parts[1:]


def check_part(path: Path, metadata: Mapping[str, object], number: int, count: int) -> None:
    """Check that a further part, the `number`-th from 0 on, is the one that its name says.

    Raises:
        ConfigError: it is another part, or a part of a model with another number of parts.
    """
    no, its_count = metadata.get("split.no"), metadata.get("split.count")
    if (no, its_count) == (number, count):
        return
    held = "no part of a split model"
    if isinstance(no, int) and isinstance(its_count, int):
        held = f"part {no + 1} of {its_count}"
    raise ConfigError(
        f"{path}: holds {held}, by its name it is part {number + 1} of {count}; files were renamed or are of different "
        "models: download the parts again"
    )


def check_tensors(path: Path, metadata: Mapping[str, object], num_tensors: int) -> None:
    """Check the number of tensors in all parts together; `metadata` is that of the first part.

    Raises:
        ConfigError: it is not the stored one.
    """
    stored = metadata.get("split.tensors.count", num_tensors)
    if stored != num_tensors:
        raise ConfigError(
            f"{path}: the parts hold {num_tensors} tensors, split.tensors.count is {repr(stored)[:80]}; a part is of "
            "another model: download the parts again"
        )
