"""A mixture's experts: which of them a token goes to, and their products."""

# Shapes: T tokens, K inputs, N outputs.

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol, TypeAlias

from torch import Tensor

if TYPE_CHECKING:
    from ...models.spec.experts_spec import ClampedSwiGLU, ExpertActivation, Routing
    from .deltas import ExpertChanges
    from .linear import LinearWeight


Route: TypeAlias = "Callable[[Tensor, Routing, Tensor | None], tuple[Tensor, Tensor]]"
"""(logits, routing, bias) -> shares [T, k] float32 and ids [T, k] int64 of each token's experts, best first.

`logits`: [T, E]; computed in float32; `bias`: [E] float32, see `Routing.has_bias`.
"""


class ExpertWeights(Protocol):
    """The weights of a layer's experts in the layout of their kernel."""

    def __call__(
        self, x: Tensor, shares: Tensor, expert_ids: Tensor, changes: ExpertChanges | None = None
    ) -> Tensor:
        """Compute each token's experts; their outputs are weighted and summed in float32.

        With `ExpertSource.scales_inputs` their inputs are weighted instead.

        Args:
            x: [T, K].
            shares: [T, k] float32.
            expert_ids: [T, k] int64.
            changes: by adapters, of weights from a source that `is_adapted`.

        Returns:
            [T, K] in x's dtype.
        """
        ...


class ExpertSource(Protocol):
    """The weights of a layer's experts before packing; only one of `stacked` and `linears` is called, and only once."""

    @property
    def clamp(self) -> ClampedSwiGLU | None:
        """The activation; None: activation(gate) * up."""
        ...

    @property
    def activation(self) -> ExpertActivation:
        """The activation of gates if there is no clamp."""
        ...

    @property
    def scales_inputs(self) -> bool:
        """Whether shares are factors of the experts' inputs instead of their outputs."""
        ...

    @property
    def gated(self) -> bool:
        """If not, gate_up is only up, with N rows, and the activation is relu(up) ** 2."""
        ...

    @property
    def is_adapted(self) -> bool:
        """Whether adapters may change the experts."""
        ...

    def stacked(self) -> tuple[Tensor, Tensor]:
        """gate_up [E, 2N, K], the gates in the first N rows, and down [E, K, N], in the serving dtype."""
        ...

    def linears(self) -> tuple[list[LinearWeight], list[LinearWeight]]:
        """A weight gate_up [2N, K] and a weight down [K, N] per expert, in the model's `LinearFormat`."""
        ...

    def biases(self) -> tuple[Tensor, Tensor] | None:
        """Biases of gate_up [E, 2N] and of down [E, K], in the serving dtype; None: there are none. Called once."""
        ...


PackExperts = Callable[[ExpertSource], ExpertWeights]
"""Makes the weights in the layout of the kernel."""
