"""The names of the modules of Qwen's towers in files, by which they are checked, counted and built.

A folder may have `model.` before them, which `usual_names` removes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Final, NamedTuple

from ..spec.vision_spec import FRAMES
from .needed_tensors import Module

if TYPE_CHECKING:
    from ..spec.vision_spec import VisionFamily, VisionSpec

QWEN_TOWER: Final = "visual."
QWEN_PATCHES: Final = "visual.patch_embed.proj"
"""[hidden, 3, frames, side, side]: a product with each patch; a video has `FRAMES` in it, an image itself twice."""
QWEN_POSITIONS: Final = "visual.pos_embed"


class QwenForm(NamedTuple):
    """Differences between Qwen's towers.

    Attributes:
        rms_norms: the norms of layers and of the connector have no mean and no bias; else they are layer norms.
        patch_bias: the product with patches has a bias.
        mlp: modules of a layer's MLP, down last; three in a gated one.
        connector: the modules of a connector: norm, first and second product.
    """

    rms_norms: bool
    patch_bias: bool
    mlp: tuple[str, ...]
    connector: tuple[str, str, str]


QWEN_FORMS: Final[dict[VisionFamily, QwenForm]] = {
    "qwen2_vl": QwenForm(False, False, ("fc1", "fc2"), ("ln_q", "mlp.0", "mlp.2")),
    "qwen2_5_vl": QwenForm(True, False, ("gate_proj", "up_proj", "down_proj"), ("ln_q", "mlp.0", "mlp.2")),
    "qwen3_vl": QwenForm(False, True, ("linear_fc1", "linear_fc2"), ("norm", "linear_fc1", "linear_fc2")),
}


def qwen_layer(layer_id: int) -> str:
    """The name of a layer, to which the names of its modules are appended."""
    return f"visual.blocks.{layer_id}."


def qwen_connectors(vision: VisionSpec) -> list[str]:
    """The names of the connectors, that of the last layer first."""
    return [
        "visual.merger.",
        *(f"visual.deepstack_merger_list.{n}." for n in range(len(vision.deepstack_layers))),
    ]


def qwen_vision_modules(vision: VisionSpec, row_size: int) -> Iterator[Module]:
    """All modules of a tower; `row_size`: hidden size of the language model."""
    form, size, side = QWEN_FORMS[vision.family], vision.hidden_size, vision.patch_size
    yield Module(QWEN_PATCHES, (size, 3, FRAMES, side, side), has_bias=form.patch_bias)
    if vision.num_positions:
        yield Module(QWEN_POSITIONS, (vision.num_positions, size))
    for layer_id in range(vision.num_layers):
        name = qwen_layer(layer_id)
        for norm in ("norm1", "norm2"):
            yield Module(name + norm, (size,), has_bias=not form.rms_norms)
        yield Module(f"{name}attn.qkv", (3 * size, size), has_bias=True)
        yield Module(f"{name}attn.proj", (size, size), has_bias=True)
        *ups, down = form.mlp
        for up in ups:
            yield Module(f"{name}mlp.{up}", (vision.intermediate_size, size), has_bias=True)
        yield Module(f"{name}mlp.{down}", (size, vision.intermediate_size), has_bias=True)
    joined = vision.joined_size
    for number, name in enumerate(qwen_connectors(vision)):
        norm, first, second = form.connector
        yield Module(name + norm, (joined if number else size,), has_bias=not form.rms_norms)
        yield Module(name + first, (joined, joined), has_bias=True)
        yield Module(name + second, (row_size, joined), has_bias=True)
