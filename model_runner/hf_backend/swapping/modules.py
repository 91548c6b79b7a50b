"""The modules that stand in for those of transformers: the same results by the engine's kernels."""

# Shapes: T tokens, K inputs, N outputs, Hq query heads, H KV heads, D head dim, R rotated dimensions of a head.

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from ...ops.elementwise import ActivationKind
from ...ops.linear import GateableWeight, LinearToFloat32, LinearWithRows
from ...ops.rotation import HeadNorms

if TYPE_CHECKING:
    from ...ops.elementwise import GatedActivation
    from ...ops.linear import LinearWeight
    from ...ops.ops import Ops
    from ..transformers_model import AttentionStep


class PackedLinear(nn.Module):
    """A linear layer with a packed weight. It has no `weight`: in a model whose code reads it no module is replaced."""

    def __init__(self, weight: LinearWeight, bias: Tensor | None, shape: tuple[int, int]) -> None:
        """`shape`: (N, K)."""
        super().__init__()
        self.packed = weight
        self.packed_bias = bias
        self.out_features, self.in_features = shape

    def forward(self, x: Tensor) -> Tensor:
        """[..., K] -> [..., N]."""
        out = self.packed(x.reshape(-1, self.in_features), self.packed_bias)
        return out.view(*x.shape[:-1], self.out_features)


class PackedHead(PackedLinear):
    """An output head, which returns float32 if its kernel can."""

    def forward(self, x: Tensor) -> Tensor:
        """[..., K] -> [..., N]."""
        if not isinstance(self.packed, LinearToFloat32):
            return super().forward(x)
        out = self.packed.to_float32(x.reshape(-1, self.in_features), self.packed_bias)
        return out.view(*x.shape[:-1], self.out_features)


class PackedEmbedding(nn.Module):
    """Rows of a table, or of the packed weight of a head that is tied to it."""

    def __init__(self, ops: Ops, table: Tensor | LinearWithRows, scale: float | None) -> None:
        """`scale`: a factor of the rows."""
        super().__init__()
        self._scale = scale
        self._take_rows = ops.take_rows
        self._table = table

    def forward(self, token_ids: Tensor) -> Tensor:
        """[..., ] int64 -> [..., K]."""
        ids = token_ids.reshape(-1)
        if isinstance(self._table, Tensor):
            rows = self._take_rows(self._table, ids, self._scale)
        else:
            rows = self._table.rows(ids, self._scale)
        return rows.view(*token_ids.shape, -1)


class Norm(nn.Module):
    """A norm over the last axis."""

    def __init__(self, ops: Ops, kind: str, weight: Tensor, bias: Tensor | None, eps: float) -> None:
        """`kind`: see `NormForm`."""
        super().__init__()
        self._compute: Callable[[Tensor], Tensor]
        if kind == "rms":
            assert bias is None
            self._compute = lambda x: ops.rms_norm(x, weight, eps)
        else:
            self._compute = lambda x: ops.layer_norm(x, weight, bias, eps)

    def forward(self, x: Tensor) -> Tensor:
        """[..., K] -> [..., K]."""
        return self._compute(x)


class MLP(nn.Module):
    """down(act(gate(x)) * up(x)), with gate and up in one matmul; or down(act(up(x)))."""

    def __init__(
        self,
        gate_up: LinearWeight,
        bias: Tensor | None,
        activate: Callable[[Tensor], Tensor],
        down: PackedLinear,
    ) -> None:
        """Take the parts; see `gated` and `ungated`."""
        super().__init__()
        self._gate_up = gate_up
        self._bias = bias
        self._activate = activate
        self.down = down

    @classmethod
    def gated(
        cls,
        ops: Ops,
        gate_up: LinearWeight,
        bias: Tensor | None,
        activation: ActivationKind,
        down: PackedLinear,
    ) -> MLP:
        """The gates are the first half of the outputs of `gate_up`."""
        activations: dict[ActivationKind, GatedActivation] = {
            "silu": ops.silu_and_mul,
            "gelu_tanh": ops.gelu_and_mul,
            "gelu": ops.gelu_erf_and_mul,
        }
        is_done = (
            activation == "silu"
            and bias is None
            and isinstance(gate_up, GateableWeight)
            and gate_up.fuse_silu_and_mul()
        )
        return cls(gate_up, bias, (lambda x: x) if is_done else activations[activation], down)

    @classmethod
    def ungated(
        cls, ops: Ops, up: LinearWeight, bias: Tensor | None, activation: ActivationKind, down: PackedLinear
    ) -> MLP:
        """Without gates."""
        return cls(up, bias, lambda x: ops.activate(x, activation), down)

    def forward(self, x: Tensor) -> Tensor:
        """[..., K] -> [..., K]."""
        out = self._activate(self._gate_up(x.reshape(-1, x.shape[-1]), self._bias))
        return self.down(out.view(*x.shape[:-1], -1))  # type: ignore[no-any-return]


class Angles(tuple[Tensor, Tensor]):
    """cos and sin as transformers passes them on, [1, T, R] each.

    Attributes:
        rotation: cos and sin as in `RotateAndStore`, [T, R] each.
    """

    rotation: tuple[Tensor, Tensor]


class RotaryTable(nn.Module):
    """cos and sin of every position, computed once by the module that it stands in for.

    Attributes:
        tables: by the arguments besides positions, [positions, R] each: cos and sin as the module returns them, and as
            in `RotateAndStore`.
    """

    def __init__(self, ops: Ops, tables: dict[tuple[Any, ...], list[Tensor]]) -> None:
        super().__init__()
        self.tables = tables
        self._take_rows = ops.take_rows

    def forward(self, *args: Any, **kwargs: Any) -> Angles:
        """The hidden states, positions [1, T] int64, and what the module takes besides."""
        positions, key = positions_and_key(args, kwargs)
        rows = positions.reshape(-1)
        taken = {id(table): table for table in self.tables[key]}
        found = {number: self._take_rows(table, rows) for number, table in taken.items()}
        cos, sin, own_cos, own_sin = (found[id(table)] for table in self.tables[key])
        angles = Angles((cos.unsqueeze(0), sin.unsqueeze(0)))
        angles.rotation = own_cos, own_sin
        return angles


def positions_and_key(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, tuple[Any, ...]]:
    """The positions among the arguments of a rotary module, and those that are no tensors."""
    values = [*args, *(kwargs[name] for name in sorted(kwargs))]
    tensors = [each for each in values if isinstance(each, Tensor) and not each.is_floating_point()]
    if len(tensors) != 1:
        raise ValueError("a rotary module that takes other tensors than positions")
    return tensors[0], tuple(each for each in values if not isinstance(each, Tensor))


class Attention(nn.Module):
    """o(attention(rotary(norm(q(x))), rotary(norm(k(x))), v(x))), with q, k and v in one matmul."""

    def __init__(
        self,
        ops: Ops,
        layer_idx: int,
        *,
        qkv: LinearWeight,
        bias: Tensor | None,
        norms: HeadNorms | None,
        rotary_dim: int,
        head_dim: int,
        out: PackedLinear,
        num_results: int,
    ) -> None:
        """Take the parts; see `AttentionForm`."""
        super().__init__()
        self.layer_idx = layer_idx
        self.out = out
        self._qkv = qkv
        self._bias = bias
        self._norms = norms
        self._rotary_dim = rotary_dim
        self._head_dim = head_dim
        self._num_results = num_results
        self._rotate_and_store = ops.rotate_and_store

    def forward(self, *args: Any, engine_step: AttentionStep | None = None, **kwargs: Any) -> Any:
        """[1, T, K] -> [1, T, K] and None for each further result."""
        assert engine_step is not None
        hidden: Tensor = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
        x = hidden.reshape(-1, hidden.shape[-1])
        qkv = self._qkv(x, self._bias).view(x.shape[0], -1, self._head_dim)
        cos, sin = self._rotation(qkv, (*args, *kwargs.values()))
        kv = engine_step.kv_pool.layer(self.layer_idx)
        q = self._rotate_and_store(qkv, self._norms, cos, sin, kv, engine_step.out_cache_loc)
        out = self.out(engine_step.attention.forward(self.layer_idx, q)).view(hidden.shape)
        return (out, *[None] * (self._num_results - 1)) if self._num_results else out

    def _rotation(self, qkv: Tensor, arguments: tuple[Any, ...]) -> tuple[Tensor, Tensor]:
        if not self._rotary_dim:
            nothing = qkv.new_empty((qkv.shape[0], 0))
            return nothing, nothing
        return next(each for each in arguments if isinstance(each, Angles)).rotation
