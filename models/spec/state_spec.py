"""`StateSpec`: the layers of a decoder that keep a state of fixed size instead of keys and values.

A state has parts: the last inputs of a short convolution, and in some families a recurrent state beside them. Sizes,
budgets, pools, checkpoints and the division among ranks follow from the parts; only layers know what they compute.
"""

from __future__ import annotations

import math
from typing import Final, Literal, NamedTuple

import msgspec

StateDType = Literal["float32", "bfloat16", "float16"]

_BYTES: Final[dict[StateDType, int]] = {"float32": 4, "bfloat16": 2, "float16": 2}


class RecurrentState(NamedTuple):
    """State of a layer beside the inputs of its convolution: an array for each request, its heads along the first axis.

    The dtype does not depend on the model's: a state is a sum over all tokens of a request.
    """

    shape: tuple[int, ...]
    dtype: StateDType = "float32"

    @property
    def num_bytes(self) -> int:
        """Memory of the array."""
        return math.prod(self.shape) * _BYTES[self.dtype]


class DeltaSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Layers of a gated delta net (Yang et al. 2024): each value head has a matrix that keys read and write.

    Attributes:
        num_key_heads: also of queries; each of them serves as many neighboring value heads.
        num_value_heads: each has a state of [key_dim, value_dim].
        fused_large: q, k, v and z are one matrix with the parts of each key head in turn, as in Qwen3-Next; if not,
            z is a matrix of its own.
        fused_small: b and a are one matrix of this kind, and not two.
    """

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    fused_large: bool = False
    fused_small: bool = False

    @property
    def key_size(self) -> int:
        """Elements of the keys of a token, and of its queries."""
        return self.num_key_heads * self.key_dim

    @property
    def value_size(self) -> int:
        """Elements of the values of a token."""
        return self.num_value_heads * self.value_dim

    @property
    def conv_size(self) -> int:
        """Channels of the convolution: those of queries, keys and values."""
        return 2 * self.key_size + self.value_size

    @property
    def values_per_key(self) -> int:
        """Value heads that share a key head."""
        return self.num_value_heads // self.num_key_heads


class Mamba2Spec(msgspec.Struct, frozen=True, kw_only=True):
    """Layers of Mamba 2 (Dao and Gu 2024): each head has a matrix that decays, and to which each token adds.

    Attributes:
        num_heads: each has a state of [state_dim, head_dim].
        num_groups: of neighboring heads; those of a group share the vectors B and C of [state_dim], which are the key
            and the query of linear attention. The norm of what heads return is one over each group.
        projection_bias: the projections before and after have biases.
        least_step, most_step: bounds of a token's time step; None: there is no upper one.
    """

    num_heads: int
    head_dim: int
    num_groups: int
    state_dim: int
    projection_bias: bool = False
    least_step: float = 0.0
    most_step: float | None = None

    @property
    def inner_size(self) -> int:
        """Elements of all heads of a token: of x, of z, and of what the layer projects."""
        return self.num_heads * self.head_dim

    @property
    def group_size(self) -> int:
        """Elements of B of a token, and of its C."""
        return self.num_groups * self.state_dim

    @property
    def conv_size(self) -> int:
        """Channels of the convolution: those of x, B and C."""
        return self.inner_size + 2 * self.group_size

    @property
    def projected_size(self) -> int:
        """Outputs of the first projection: z, x, B, C and the time steps."""
        return self.inner_size + self.conv_size + self.num_heads

    def of_rank(self, tp: int) -> Mamba2Spec:
        """The part of each of `tp` ranks; with fewer groups than ranks, several ranks have the same one."""
        return msgspec.structs.replace(
            self, num_heads=self.num_heads // tp, num_groups=max(1, self.num_groups // tp)
        )


class StateSpec(msgspec.Struct, frozen=True, kw_only=True):
    """State layers: what they keep of a request is one slot, which is exact at the request's last computed token only.

    Attributes:
        layers: one for each layer of the model: whether it keeps a state. The others attend to keys and values.
        conv_size: channels of the short convolution of a state layer.
        conv_taps: tokens that the convolution reads; the state has its inputs for the last `conv_taps - 1` tokens.
        conv_bias: the convolution has a bias; without `mamba` also the projections around it.
        delta: of a model whose state layers are gated delta nets.
        mamba: of a model whose state layers are those of Mamba 2. Without both they are short convolutions alone.
    """

    layers: tuple[bool, ...]
    conv_size: int
    conv_taps: int
    conv_bias: bool = False
    delta: DeltaSpec | None = None
    mamba: Mamba2Spec | None = None

    @property
    def num_layers(self) -> int:
        """State layers of the model."""
        return sum(self.layers)

    @property
    def module(self) -> str:
        """The name of a state layer's module, which is in the place of attention."""
        if self.mamba is not None:
            return "mamba"
        return "conv" if self.delta is None else "linear_attn"

    @property
    def conv_shape(self) -> tuple[int, int]:
        """Numbers that a layer's convolution keeps of a request, in the dtype of the model."""
        return self.conv_taps - 1, self.conv_size

    @property
    def recurrent(self) -> RecurrentState | None:
        """State beside them; None: the layer has none."""
        if self.mamba is not None:
            return RecurrentState((self.mamba.num_heads, self.mamba.state_dim, self.mamba.head_dim))
        if self.delta is None:
            return None
        return RecurrentState((self.delta.num_value_heads, self.delta.key_dim, self.delta.value_dim))

    def slot_bytes(self, dtype_bytes: int) -> int:
        """Memory of one slot, all state layers."""
        recurrent = 0 if self.recurrent is None else self.recurrent.num_bytes
        return self.num_layers * (math.prod(self.conv_shape) * dtype_bytes + recurrent)

    def of_rank(self, tp: int) -> StateSpec:
        """The part of each of `tp` ranks, which have equal numbers of channels and heads."""
        if self.mamba is not None:
            mamba = self.mamba.of_rank(tp)
            return msgspec.structs.replace(self, conv_size=mamba.conv_size, mamba=mamba)
        delta = self.delta
        if delta is not None:
            delta = msgspec.structs.replace(
                delta,
                num_key_heads=delta.num_key_heads // tp,
                num_value_heads=delta.num_value_heads // tp,
            )
        return msgspec.structs.replace(self, conv_size=self.conv_size // tp, delta=delta)

    def reason_against_tp(self, tp: int) -> str | None:
        """Why `tp` ranks cannot share the state layers; None: they can."""
        delta, mamba = self.delta, self.mamba
        if mamba is not None:
            if mamba.num_heads % tp:
                return f"the {mamba.num_heads} heads of its Mamba layers cannot be divided by it"
            if mamba.num_groups % tp and tp % mamba.num_groups:
                return f"the {mamba.num_groups} groups of its Mamba layers can neither be divided by it nor divide it"
            return None
        if delta is not None and delta.num_key_heads % tp:
            return f"the {delta.num_key_heads} key heads of its delta nets cannot be divided by it"
        if self.conv_size % tp:
            return f"the {self.conv_size} channels of its convolutions cannot be divided by it"
        return None

    def contradiction(self) -> str | None:
        """The first contradiction between these facts, or None."""
        delta, mamba = self.delta, self.mamba
        if mamba is not None and mamba.num_heads % mamba.num_groups:
            return f"{mamba.num_heads} heads of a Mamba layer cannot form {mamba.num_groups} groups evenly"
        if delta is not None and delta.num_value_heads % delta.num_key_heads:
            heads = f"{delta.num_value_heads} value heads cannot share {delta.num_key_heads} key heads"
            return f"{heads} of a delta net evenly"
        return None
