"""StarCoder2. Its files mention no window, as llama.cpp computes none."""

from __future__ import annotations

from typing import Final

from ...fields import Fields
from ...hf.families.starcoder import FORM
from .family import LAYER_NAMES, LAYER_NORM_EPS, Facts, GGUFFamily


def _starcoder2(fields: Fields, arch: str) -> Facts:
    return {"form": FORM}


_NAMES: Final = {
    **{module: stored for module, stored in LAYER_NAMES.items() if not module.startswith("mlp.")},
    "mlp.c_fc": "ffn_up",
    "mlp.c_proj": "ffn_down",
}

FAMILIES: Final[dict[str, GGUFFamily]] = {
    "starcoder2": GGUFFamily("starcoder2", _starcoder2, _NAMES, norm_eps=LAYER_NORM_EPS),
}
