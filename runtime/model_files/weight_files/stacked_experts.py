"""`expert_parts`: where the weights of each expert are, in files that stack those of all experts of a layer.

Most checkpoints have tensors of their own for each expert. Newer ones have two for each layer:

    gate_up   [experts, 2 * inner, size]: gates, then ups; or [experts, size, 2 * inner]: gate, up, gate, up, ...
    down      [experts, size, inner]; or [experts, inner, size]

A stack `<name>` may have biases, `<name>_bias` [experts, outputs]. In MXFP4 it is two tensors, `<name>_blocks`
[experts, outputs, inputs / 32, 16] and `<name>_scales` [experts, outputs, inputs / 32].
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from typing import TYPE_CHECKING, Final, NamedTuple

from ..block_forms import BLOCK_LEN

if TYPE_CHECKING:
    from ..experts_spec import ExpertsSpec
    from ..model_spec import ModelSpec

BLOCKS, SCALES, BIAS = "_blocks", "_scales", "_bias"
_BYTES_OF_BLOCK: Final = BLOCK_LEN // 2


class ExpertPart(NamedTuple):
    """The place of a weight [outputs, inputs] or of a bias [outputs] of one expert.

    Attributes:
        stored: the tensor of all experts.
        expert: index in it.
        outputs: of all that it has of an expert.
        num_outputs: how many that are in all.
        transposed: stored as [inputs, outputs].
    """

    stored: str
    expert: int
    outputs: slice
    num_outputs: int
    transposed: bool = False

    @property
    def is_blocks(self) -> bool:
        """Whether the weight is in MXFP4."""
        return self.stored.endswith(BLOCKS)

    @property
    def scales(self) -> str:
        """The tensor of the scales of blocks."""
        return self.stored.removesuffix(BLOCKS) + SCALES

    def shape(self, stored: tuple[int, ...], num_experts: int) -> tuple[int, ...]:
        """The shape of the part; that of the stored tensor if it is not as expected."""
        shape = stored[1:]
        if self.is_blocks and len(shape) == 3 and shape[2] == _BYTES_OF_BLOCK:
            shape = shape[0], shape[1] * BLOCK_LEN
        if self.transposed:
            shape = shape[::-1]
        if stored[:1] != (num_experts,) or shape[:1] != (self.num_outputs,) or len(shape) > 2:
            return stored
        return len(range(*self.outputs.indices(self.num_outputs))), *shape[1:]


def expert_parts(spec: ModelSpec, names: Container[str]) -> Mapping[str, ExpertPart]:
    """The parts by the names of single experts; empty if `names`, the tensors of the files, has no stacks."""
    if spec.experts is None:
        return {}
    return {
        name: part
        for layer in range(spec.num_layers)
        for name, part in _of_layer(f"model.layers.{layer}.", spec.hidden_size, spec.experts, names)
    }


def _of_layer(
    layer: str, size: int, experts: ExpertsSpec, names: Container[str]
) -> Iterator[tuple[str, ExpertPart]]:
    called, inner = experts.names, experts.intermediate_size
    block = f"{layer}{called.block}."
    gates, ups = slice(0, inner), slice(inner, 2 * inner)
    if called.interleaved_stack:
        gates, ups = slice(0, 2 * inner, 2), slice(1, 2 * inner, 2)
    stacks = (
        (called.gate_up_stack, 2 * inner, {called.gate: gates, called.up: ups}),
        (called.down_stack, size, {called.down: slice(0, size)}),
    )
    for stack, num_outputs, modules in stacks:
        stored = block + stack
        weight = stored + BLOCKS if stored + BLOCKS in names else stored
        if weight not in names:
            continue
        transposed = called.interleaved_stack and weight == stored
        for expert in range(experts.num_experts):
            for module, outputs in modules.items():
                name = f"{block}experts.{expert}.{module}"
                yield f"{name}.weight", ExpertPart(weight, expert, outputs, num_outputs, transposed)
                if experts.has_bias:
                    yield f"{name}.bias", ExpertPart(stored + BIAS, expert, outputs, num_outputs)
