"""ERNIE 4.5 without experts."""

from __future__ import annotations

from typing import Final

from ...fields import Fields
from ...hf.families.ernie import FORM
from .family import Facts, GGUFFamily


def _ernie4_5(fields: Fields, arch: str) -> Facts:
    return {"form": FORM}


FAMILIES: Final[dict[str, GGUFFamily]] = {"ernie4_5": GGUFFamily("ernie4_5", _ernie4_5)}
