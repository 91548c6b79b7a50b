"""`usual_block_name`: the names of tensors where each layer is a single block, as in Nemotron-H.

The block of a layer is its `mixer`, whatever it is; everything else knows it by its kind:

    backbone.layers.3.mixer.q_proj.weight  ->  model.layers.3.self_attn.q_proj.weight
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from ..spec.model_spec import ModelSpec

_BODY: Final = "backbone."
_RENAMED: Final = {"model.embeddings.": "model.embed_tokens.", "model.norm_f.": "model.norm."}
_BLOCK: Final = re.compile(r"((?:model\.)?layers\.(\d+)\.)mixer\.(.+)")


def usual_block_name(spec: ModelSpec, name: str) -> str:
    """The name in a model in which the kinds of blocks have names of their own; `name`: of a tensor or module."""
    if name.startswith(_BODY):
        name = "model." + name.removeprefix(_BODY)
    for old, new in _RENAMED.items():
        if f"{name}.".startswith(old):
            name = (new + f"{name}.".removeprefix(old)).removesuffix(".")
    match = _BLOCK.fullmatch(name)
    if match is None or int(match[2]) >= spec.num_layers:
        return name
    layer = int(match[2])
    kind = "self_attn" if spec.attends(layer) else spec.form.names.mlp
    if spec.state is not None and spec.state.layers[layer]:
        kind = spec.state.module
    return f"{match[1]}{kind}.{match[3]}"
