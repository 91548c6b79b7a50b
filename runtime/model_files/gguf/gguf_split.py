"""Split GGUF models: `model-00001-of-00003.gguf` has the metadata, all parts have tensors."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from ...errors import ConfigError

_PART: Final = re.compile(r"(?P<stem>.+)-(?P<part>\d{5})-of-(?P<parts>\d{5})\.gguf")
_MAX_PARTS: Final = 99_999  # that the names can number


def whole_name(name: str) -> str:
    """The name of the model in a file name: without part and suffix."""
    match = _PART.fullmatch(name)
    return match["stem"] if match else name.removesuffix(".gguf")


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
    match = _PART.fullmatch(path.name)
    if match is None or int(match["parts"]) != count:
        raise ConfigError(
            f"{path}: is one of {count} parts, so its name must end with -00001-of-{count:05}.gguf; rename all parts"
        )
    parts = [path.with_name(f"{match['stem']}-{part:05}-of-{count:05}.gguf") for part in range(1, count + 1)]
    if metadata.get("split.no", 0) != 0 or path != parts[0]:
        raise ConfigError(f"{path}: is a later part of a split model; give the first one, {parts[0].name}")
    if missing := [part.name for part in parts if not part.exists()]:
        raise ConfigError(
            f"{path}: {len(missing)} of {count} parts are missing, first {missing[0]}; put them into the same folder"
        )
    return parts[1:]
