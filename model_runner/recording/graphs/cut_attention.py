"""`CutAttention`: the attention of a forward pass that is recorded in pieces; it ends a piece and begins the next one.

    piece 0          embedding, first layer up to its queries, keys and values
    attention 0      launched in each step, by its plan: reads queries and the KV pool, writes results
    piece 1          output projection and MLP of the first layer, the second one up to its queries, ...
    ...
    piece L          the rest of the last layer

Everything between two attentions depends on the number of tokens only. Models see a `StepAttention` as in any step.
"""

# Shapes: n tokens of a recording, padding included; Hq query heads, D head dim.

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

HeadShape = tuple[int, int]
"""Hq, D."""


class AttentionMemory:
    """Queries and results of attention in fixed memory, which all layers of equal heads share.

    Attributes:
        buffers: queries and results, [max_tokens, Hq, D] and [max_tokens, Hq * D].
    """

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self.buffers: dict[HeadShape, tuple[Tensor, Tensor]] = {}

    def of(self, q: Tensor) -> tuple[Tensor, Tensor]:
        """The buffers for queries like `q`; allocated by the first pass, which is not recorded."""
        num_heads, head_dim = q.shape[1:]
        shape = num_heads, head_dim
        if shape not in self.buffers:
            self.buffers[shape] = (
                q.new_zeros((self._max_tokens, *shape)),
                q.new_zeros((self._max_tokens, num_heads * head_dim)),
            )
        return self.buffers[shape]

    def first(self, num: int) -> dict[HeadShape, tuple[Tensor, Tensor]]:
        """The buffers of the first tokens."""
        return {shape: (q[:num], attended[:num]) for shape, (q, attended) in self.buffers.items()}

    def clear_results(self, num: int) -> None:
        """Zero the results of the first tokens: attention writes none for padding, which must not keep older ones."""
        for _, attended in self.buffers.values():
            attended[:num].zero_()


class AttentionCall(NamedTuple):
    """The attention between two pieces; `heads` names its buffers."""

    layer_id: int
    heads: HeadShape
    sinks: Tensor | None


class CutAttention:
    """A `StepAttention` that computes nothing: see the module.

    Attributes:
        calls: the attention after each piece but the last.
    """

    def __init__(self, memory: AttentionMemory, cut: Callable[[], None]) -> None:
        """`cut`: ends a piece and begins the next one."""
        self.calls: list[AttentionCall] = []
        self._memory = memory
        self._cut = cut

    def forward(
        self, layer_id: int, q: Tensor, sinks: Tensor | None = None, out: Tensor | None = None
    ) -> Tensor:
        """The result of each layer is in the same memory, valid until the next one."""
        assert out is None, "models do not say where"
        queries, attended = self._memory.of(q)
        queries[: len(q)].copy_(q)
        self.calls.append(AttentionCall(layer_id, (q.shape[1], q.shape[2]), sinks))
        self._cut()
        return attended[: len(q)]
