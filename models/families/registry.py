"""`FAMILIES`: every family with an implementation of the engine's own, collected from the files of this folder.

The files are found in the folder, so that a new family is one file and no line anywhere else. All of them are loaded at
once: they import neither numpy nor torch and take about 10 ms together, and most callers need the names of all.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Iterator, Mapping
from importlib import import_module
from pathlib import Path
from types import MappingProxyType
from typing import Final

from .family import GGUF, Family

_NO_FAMILIES: Final = ("registry", "gguf_rope")
"""Modules that are not loaded to look for families; `gguf_rope` needs numpy, which readers of a folder do not."""


def _families() -> Iterator[Family]:
    """The families of all modules that have some; the others are what several families share."""
    for found in pkgutil.iter_modules([str(Path(__file__).parent)]):
        if found.name not in _NO_FAMILIES:
            yield from getattr(import_module(f".{found.name}", __package__), "FAMILIES", ())


FAMILIES: Final[Mapping[str, Family]] = MappingProxyType(
    {family.model_type: family for family in sorted(_families(), key=lambda family: family.model_type)}
)
"""By Hugging Face's `model_type`."""

ENCODERS: Final = tuple(family.model_type for family in FAMILIES.values() if family.is_encoder)
"""The `model_type` values of encoders."""

GGUF_FAMILIES: Final[Mapping[str, Family]] = MappingProxyType(
    {architecture: family for family in FAMILIES.values() for architecture in family.gguf}
)
"""By GGUF architecture."""


def gguf_of(model_type: str) -> GGUF | None:
    """How GGUF files with models of this `model_type` are read; None: there are no such files."""
    family = FAMILIES.get(model_type)
    if family is None:
        return None
    if family.stored_as:
        return GGUF_FAMILIES[family.stored_as].gguf[family.stored_as]
    return next(iter(family.gguf.values()), None)
