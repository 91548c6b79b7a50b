"""Experts of a layer that are stored as one tensor, as Qwen3-VL-MoE has them: the parts that are the experts' own.

    mlp.experts.gate_up_proj   [E, 2I, H], or transposed: [E, H, 2I]
    mlp.experts.down_proj      [E, H, I], or transposed: [E, I, H]

In the header each part becomes an entry of its own, `mlp.experts.3.up_proj.weight`, so that nothing else knows about
stacks. As in transformers, a stack is transposed if it does not have the first shape.
"""

# E experts, I intermediate size of an expert, H hidden size.

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from ..model_spec import ModelSpec
    from .safetensors_header import HeaderEntry

_STACKS: Final[dict[str, tuple[str, ...]]] = {
    ".mlp.experts.gate_up_proj": ("gate_proj", "up_proj"),
    ".mlp.experts.down_proj": ("down_proj",),
}
_ITEM_BYTES: Final = {"F32": 4, "F16": 2, "BF16": 2}


def unstacked(entries: Mapping[str, HeaderEntry], spec: ModelSpec) -> dict[str, HeaderEntry]:
    """The entries of a file with those of the experts' parts instead of stacks."""
    found: dict[str, HeaderEntry] = {}
    for name, entry in entries.items():
        parts = dict(_parts(name, entry, spec))
        found |= parts or {name: entry}
    return found


def _parts(name: str, entry: HeaderEntry, spec: ModelSpec) -> Iterator[tuple[str, HeaderEntry]]:
    """The parts of a stack; nothing for any other tensor, or for a stack of another shape or dtype."""
    suffix = next((suffix for suffix in _STACKS if name.endswith(suffix)), None)
    item_bytes = _ITEM_BYTES.get(entry.dtype_name)
    if suffix is None or item_bytes is None or spec.experts is None:
        return
    num, inner, size = spec.experts.num_experts, spec.experts.intermediate_size, spec.hidden_size
    modules = _STACKS[suffix]
    rows, columns = (size, inner) if len(modules) == 1 else (inner, size)
    height = rows * len(modules)  # of one expert's matrix
    if entry.shape == (num, height, columns):
        strides, step = (columns, 1), rows * columns
    elif entry.shape == (num, columns, height):
        strides, step = (1, height), rows
    else:
        return
    for expert in range(num):
        for idx, module in enumerate(modules):
            start = expert * height * columns + idx * step
            yield (
                f"{name.removesuffix(suffix)}.mlp.experts.{expert}.{module}.weight",
                entry._replace(
                    shape=(rows, columns),
                    offset=entry.offset + start * item_bytes,
                    num_bytes=rows * columns * item_bytes,
                    strides=strides,
                ),
            )
