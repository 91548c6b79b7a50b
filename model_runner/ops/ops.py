"""`Ops`: the ops of a model, each by its selected provider."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from .altup import AltUpOps
    from .deltas import MakeDeltas
    from .elementwise import (
        Activate,
        AddGatedOp,
        AddLayerNormOp,
        AddOp,
        AddRMSNormOp,
        ClampedActivation,
        GatedActivation,
        GeluTimes,
        IdsBelow,
        LayerNormOp,
        MulSigmoidOp,
        RMSNormOp,
        Scale,
        SoftCap,
        SparseGatedActivation,
        TakeRows,
        ToFloat32,
    )
    from .experts import PackExperts, Route
    from .linear import PackHeads, PackLinear
    from .rotation import RotateAndStore, StoreLatent
    from .state_ops import GatedDeltaOp, Mamba2Op, ShortConvOp
    from .whole_attention import MakeWholeAttention


class OpChoice(NamedTuple):
    """One row of the logged table: the provider of an op, and the reasons against the preferred ones."""

    op: str
    provider: str
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Ops:
    """All ops, each by its selected provider; see their classes.

    Attributes:
        choices: the table of selected providers with the reasons, in the order of the fields.
    """

    pack_linear: PackLinear
    pack_experts: PackExperts
    route: Route
    rms_norm: RMSNormOp
    add_rms_norm: AddRMSNormOp
    silu_and_mul: GatedActivation
    gelu_and_mul: GatedActivation
    clamped_swiglu: ClampedActivation
    gelu_erf_and_mul: GatedActivation
    layer_norm: LayerNormOp
    add_layer_norm: AddLayerNormOp
    activate: Activate
    rotate_and_store: RotateAndStore
    scale: Scale
    pack_heads: PackHeads
    store_latent: StoreLatent
    add: AddOp
    add_gated: AddGatedOp
    take_rows: TakeRows
    soft_cap: SoftCap
    to_float32: ToFloat32
    short_conv: ShortConvOp
    gated_delta: GatedDeltaOp
    mamba2: Mamba2Op
    mul_sigmoid: MulSigmoidOp
    gelu_times: GeluTimes
    sparse_gelu_and_mul: SparseGatedActivation
    ids_below: IdsBelow
    altup: AltUpOps
    deltas: MakeDeltas
    whole_attention: MakeWholeAttention
    choices: tuple[OpChoice, ...] = field(default=(), compare=False)
