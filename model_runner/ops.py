"""`Ops`: the one door to kernels: what a model's layers compute with, whoever computes it.

Chosen once at start (`op_selection`), handed to the layers, and never looked up again: a layer calls `ops.rms_norm` and
does not know whether sgl-kernel, Triton, our CPU library or plain torch answers. Each operation is one attribute; its
class below says what it promises, and every maker is tested against that.
"""

# Shapes: T tokens, K inputs, N outputs, Hq query heads, H KV heads (both of this rank), D head dim, R numbers of a head
# that rotate.

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, runtime_checkable

from torch import Tensor


class LinearWeight(Protocol):
    """A linear layer's weight in whatever layout and precision its kernel wants."""

    def __call__(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """x @ weight.T + bias; [T, K] -> [T, N] in x's dtype. `bias`: [N]."""
        ...


@runtime_checkable
class LinearWithRows(LinearWeight, Protocol):
    """A `LinearWeight` that gives its rows back, so that an embedding which shares it needs no table of its own."""

    def rows(self, ids: Tensor, scale: float | None = None) -> Tensor:
        """weight[ids] * scale, [T] int64 -> [T, K] in the serving dtype; ids must be in range, nobody checks them."""
        ...


@runtime_checkable
class LinearToFloat32(LinearWeight, Protocol):
    """A `LinearWeight` whose kernel has the sums in float32 and need not round them."""

    def to_float32(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """The product before it is rounded: [T, K] -> [T, N] float32, as the sampler wants its logits."""
        ...


@runtime_checkable
class GateableWeight(LinearWeight, Protocol):
    """A `LinearWeight` that may compute a gated layer's activation with its product, before anything is written."""

    def fuse_silu_and_mul(self) -> bool:
        """From now on, if the answer is yes, a call gives silu(gate) * up: [T, K] -> [T, N / 2].

        To be asked once, by the only one who uses the weight. The gates are the first N / 2 outputs. Bit for bit what
        `silu_and_mul` of the same library makes of the product.
        """
        ...


class PackLinear(Protocol):
    """Make a `LinearWeight` of [N, K], contiguous, in the serving dtype. May copy: the caller drops his reference."""

    def __call__(self, weight: Tensor) -> LinearWeight: ...


class ExpertWeights(Protocol):
    """The weights of a layer's experts in whatever layout their kernel wants."""

    def __call__(self, x: Tensor, shares: Tensor, expert_ids: Tensor) -> Tensor:
        """Each token through its experts, weighted and added up in float32.

        Args:
            x: [T, K].
            shares: [T, k] float32.
            expert_ids: [T, k] int64.

        Returns:
            [T, K] in x's dtype.
        """
        ...


class ExpertSource(Protocol):
    """The weights of a layer's experts before they are packed; to be asked once, for one of the two."""

    def stacked(self) -> tuple[Tensor, Tensor]:
        """gate_up [E, 2N, K], the gates in the first N rows, and down [E, K, N], in the serving dtype."""
        ...

    def linears(self) -> tuple[list[LinearWeight], list[LinearWeight]]:
        """A weight gate_up [2N, K] and a weight down [K, N] of each expert, as other layers have theirs."""
        ...


class PackExperts(Protocol):
    """Make `ExpertWeights` in whichever way suits the kernel."""

    def __call__(self, experts: ExpertSource) -> ExpertWeights: ...


class Route(Protocol):
    """Choose experts: logits [T, E] -> their shares [T, k] float32 and ids [T, k] int64, the largest first."""

    def __call__(self, logits: Tensor, num_active: int, *, normalise: bool) -> tuple[Tensor, Tensor]:
        """`normalise`: let the shares of a token add up to 1."""
        ...


class RMSNormOp(Protocol):
    """x / rms(x) * weight over the last axis, computed in float32; [..., K] -> [..., K]."""

    def __call__(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """The weight may be float32 where x is not; the result has x's dtype, and is rounded to it once."""
        ...


class AddRMSNormOp(Protocol):
    """Add x to the residual stream and normalise it: (normalised, new residual). [T, K] all."""

    def __call__(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """Both `x` and `residual` may be overwritten; use what comes back."""
        ...


class AddOp(Protocol):
    """x + y, rounded once; [T, K] all, of one dtype."""

    def __call__(self, x: Tensor, y: Tensor) -> Tensor:
        """`y` may be overwritten; use what comes back."""
        ...


class TakeRows(Protocol):
    """Look up rows of a table [R, N], contiguous: [T] int64 indices, all of them in range -> [T, N]."""

    def __call__(self, table: Tensor, indices: Tensor, scale: float | None = None) -> Tensor:
        """`scale`: a factor of what comes out, which is rounded once."""
        ...


class ToFloat32(Protocol):
    """The same numbers in float32, contiguous."""

    def __call__(self, x: Tensor) -> Tensor: ...


class GatedActivation(Protocol):
    """act(gate) * up; [T, 2N] with the gate in the first half -> [T, N]."""

    def __call__(self, gate_up: Tensor) -> Tensor: ...


class HeadNorms(NamedTuple):
    """Norms of each head of q and of each head of k, before they rotate: weights [D] as in `RMSNormOp`, one eps."""

    q_weight: Tensor
    k_weight: Tensor
    eps: float


class LayerKV(NamedTuple):
    """One layer's part of the KV pool: [slots, H, D] each, in the pool's dtype.

    Attributes:
        k_scale, v_scale: [slots, H] float32, of int8 pools only: a number is the stored one times the scale of its
            token and head.
    """

    k: Tensor
    v: Tensor
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None


class RotateAndStore(Protocol):
    """What stands between the projections and attention: norms of the heads, rotary, and the KV pool."""

    def __call__(
        self,
        qkv: Tensor,
        norms: HeadNorms | None,
        cos: Tensor,
        sin: Tensor,
        kv: LayerKV,
        out_cache_loc: Tensor,
    ) -> Tensor:
        """Normalise the heads of q and k where asked for, rotate them by position, store k and v; returns q.

        Rotation as in Su et al. 2021, halves paired as in Hugging Face's Llama. Computed in float32 or in the dtype of
        cos and sin, rounded to the model's dtype at the end; stored numbers are converted to the pool's dtype, beyond
        its largest number to that number. An int8 pool's scale is the largest magnitude / 127, NaN where a number is
        not finite.

        Args:
            qkv: [T, Hq + 2H, D], the heads of q, then of k, then of v; may be overwritten.
            cos: [T, R], both halves alike; the first R numbers of each head rotate, the others stay.
            sin: [T, R], the first half negated, so that x * cos + swapped(x) * sin is the rotation.
            out_cache_loc: [T] int64, no slot twice except slots of the dummy page, which nobody reads.

        Returns:
            [T, Hq, D], contiguous or a view into `qkv`.
        """
        ...


class OpChoice(NamedTuple):
    """One row of the table that the log shows: who computes an operation, and why not somebody better."""

    op: str
    maker: str
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Ops:
    """Every operation, each by whoever was chosen for it; see their classes.

    Attributes:
        choices: the table of who was chosen and why, in the order of the fields.
    """

    pack_linear: PackLinear
    pack_experts: PackExperts
    route: Route
    rms_norm: RMSNormOp
    add_rms_norm: AddRMSNormOp
    silu_and_mul: GatedActivation
    gelu_and_mul: GatedActivation
    rotate_and_store: RotateAndStore
    add: AddOp
    take_rows: TakeRows
    to_float32: ToFloat32
    choices: tuple[OpChoice, ...] = field(default=(), compare=False)
