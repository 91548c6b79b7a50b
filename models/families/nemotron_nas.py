"""Llama Nemotron Super and Ultra: Llama with blocks that a search has made smaller or left out (Puzzle, 2024)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from ..fields import Fields
from ..spec.layer_form import LayerForm, LayerHeads
from ..spec.streams_spec import StreamsSpec
from .family import Facts, Family
from .hf_readers import rope_facts
from .hf_rope import read_rope

_MULTIPLE: Final = 256
"""Widths of MLPs are rounded up to multiples of this."""
_UNSUPPORTED: Final = (
    "replace_with_linear",
    "sparsify",
    "window_length",
    "num_sink_tokens",
    "unshifted_sink",
)
"""Settings of a block that no published model has."""


def _nemotron_nas(fields: Fields) -> Facts:
    num_layers = fields.integer("num_hidden_layers", 1, 1 << 12)
    num_heads = fields.integer("num_attention_heads", 1, 1 << 12)
    size = fields.integer("hidden_size", 1, 1 << 20)
    head_dim = size // num_heads
    attention, mlp = (_blocks(fields, name, num_layers) for name in ("attention", "ffn"))
    groups = [None if each is None else each.integer("n_heads_in_group", 1, num_heads) for each in attention]
    widths = [None if each is None else _width(each, size) for each in mlp]
    given = [each for each in groups if each is not None]
    if not given or (widths[0] is None and groups[0] is None):
        raise fields.error(
            "block_configs", "...", "expected layers with attention, and a block in the first one"
        )
    num_kv_heads = num_heads // given[0]
    heads = tuple(
        LayerHeads(head_dim=head_dim, num_kv_heads=num_kv_heads if each is None else num_heads // each)
        for each in groups
    )
    return rope_facts(fields, read_rope(fields)) | {
        "num_kv_heads": num_kv_heads,
        "intermediate_size": max(each or _MULTIPLE for each in widths),
        "form": LayerForm(
            without_attention=tuple(layer for layer, each in enumerate(groups) if each is None),
            without_mlp=tuple(layer for layer, each in enumerate(widths) if each is None),
        ),
        "streams": StreamsSpec(
            layer_heads=heads, intermediate_sizes=tuple(each or _MULTIPLE for each in widths)
        ),
    }


def _blocks(fields: Fields, kind: str, num_layers: int) -> list[Fields | None]:
    """The settings of a block of each layer; None: the layer has none."""
    name = "block_configs"
    given = fields.get(name)
    if not isinstance(given, list) or len(given) != num_layers:
        raise fields.error(name, given, f"expected an object for each of the {num_layers} layers")
    found: list[Fields | None] = []
    for layer, each in enumerate(given):
        block = each.get(kind) if isinstance(each, Mapping) else None
        if not isinstance(block, Mapping):
            raise fields.error(f"{name}[{layer}].{kind}", block, "expected an object")
        settings = Fields(fields.path, block, f"{name}[{layer}].{kind}.")
        for setting in _UNSUPPORTED:
            if settings.get(setting):
                raise settings.error(setting, settings.get(setting), "which is not supported")
        found.append(None if settings.boolean("no_op", default=False) else settings)
    return found


def _width(block: Fields, size: int) -> int:
    width = int(2 * block.number("ffn_mult", 1e-6, 1e3) * size / 3)
    return -(-width // _MULTIPLE) * _MULTIPLE


FAMILIES: Final = (
    Family(
        "nemotron-nas",
        structure="llama",
        published="Llama Nemotron Super 49B, Ultra 253B",
        architecture="DeciLMForCausalLM",
        read=_nemotron_nas,
    ),
)
