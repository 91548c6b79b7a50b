"""`Ops`: the functions that a model's layers call, and the only access of layers to kernels.

The ops are selected once at start (`op_selection`) and passed to the layers. A layer calls `ops.rms_norm` and does not
depend on its provider: sgl-kernel, Triton, our CPU library or plain torch. Each op is one attribute; its class below is
its contract, and every provider is tested against it.
"""

# Shapes: T tokens, K inputs, N outputs, Hq query heads, H KV heads (both of this rank), D head dim, R rotated
# dimensions of a head.

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol, runtime_checkable

from torch import Tensor

if TYPE_CHECKING:
    import torch

    from ..runtime.model_files.experts_spec import ClampedSwiGLU, Routing
    from .adapter_runs import AdapterRuns
    from .states.delta_weights import DeltaWeights
    from .states.layer_states import LayerStates
    from .states.mamba_weights import MambaWeights
    from .states.state_runs import StateRuns

ActivationKind = Literal["gelu", "gelu_tanh", "relu", "relu2", "silu"]
"""`gelu` is the exact one, by the error function; `relu2` is the square of `relu`."""


class LinearWeight(Protocol):
    """A linear layer's weight in the layout and precision of its kernel."""

    def __call__(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """x @ weight.T + bias; [T, K] -> [T, N] in x's dtype. `bias`: [N]."""
        ...


@runtime_checkable
class LinearWithRows(LinearWeight, Protocol):
    """A `LinearWeight` that can look up its rows, so a tied embedding needs no table of its own."""

    def rows(self, ids: Tensor, scale: float | None = None) -> Tensor:
        """weight[ids] * scale, [T] int64 -> [T, K] in the serving dtype; ids must be in range, which is not checked."""
        ...


@runtime_checkable
class LinearToFloat32(LinearWeight, Protocol):
    """A `LinearWeight` with a kernel that accumulates in float32 and can return the sums without rounding."""

    def to_float32(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """The matmul without rounding: [T, K] -> [T, N] float32, the dtype of the sampler's logits."""
        ...


@runtime_checkable
class LinearInto(LinearWeight, Protocol):
    """A `LinearWeight` that can write its result into given memory."""

    def write(self, x: Tensor, bias: Tensor | None, out: Tensor) -> None:
        """The result of a call, into `out`: [T, N] in x's dtype, contiguous."""
        ...


@runtime_checkable
class GateableWeight(LinearWeight, Protocol):
    """A `LinearWeight` that may fuse the activation of a gated layer into its matmul."""

    def fuse_silu_and_mul(self) -> bool:
        """Try to fuse the activation; if True, later calls return silu(gate) * up: [T, K] -> [T, N / 2].

        Called once, by the only user of the weight. The gates are the first N / 2 outputs. The result is bit for bit
        that of the library's `silu_and_mul` on the unfused output.
        """
        ...


class PackLinear(Protocol):
    """Make a `LinearWeight` of [N, K], contiguous, in the serving dtype. May copy, so callers drop their reference."""

    def __call__(self, weight: Tensor) -> LinearWeight: ...


class ExpertWeights(Protocol):
    """The weights of a layer's experts in the layout of their kernel."""

    def __call__(self, x: Tensor, shares: Tensor, expert_ids: Tensor) -> Tensor:
        """Compute each token's experts; their outputs are weighted and summed in float32.

        With `ExpertSource.scales_inputs` their inputs are weighted instead.

        Args:
            x: [T, K].
            shares: [T, k] float32.
            expert_ids: [T, k] int64.

        Returns:
            [T, K] in x's dtype.
        """
        ...


class ExpertSource(Protocol):
    """The weights of a layer's experts before packing; only one of `stacked` and `linears` is called, and only once."""

    @property
    def clamp(self) -> ClampedSwiGLU | None:
        """The activation; None: silu(gate) * up."""
        ...

    @property
    def scales_inputs(self) -> bool:
        """Whether shares are factors of the experts' inputs instead of their outputs."""
        ...

    @property
    def gated(self) -> bool:
        """If not, gate_up is only up, with N rows, and the activation is relu(up) ** 2."""
        ...

    def stacked(self) -> tuple[Tensor, Tensor]:
        """gate_up [E, 2N, K], the gates in the first N rows, and down [E, K, N], in the serving dtype."""
        ...

    def linears(self) -> tuple[list[LinearWeight], list[LinearWeight]]:
        """A weight gate_up [2N, K] and a weight down [K, N] per expert, in the model's `LinearFormat`."""
        ...

    def biases(self) -> tuple[Tensor, Tensor] | None:
        """Of gate_up [E, 2N] and of down [E, K], in the serving dtype; None: there are none. Called once."""
        ...


class PackExperts(Protocol):
    """Make `ExpertWeights` in the layout of the kernel."""

    def __call__(self, experts: ExpertSource) -> ExpertWeights: ...


class Route(Protocol):
    """Select experts: logits [T, E] -> their shares [T, k] float32 and ids [T, k] int64, in the order of the choice."""

    def __call__(self, logits: Tensor, routing: Routing, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Select the experts of each token, computed in float32; `bias`: [E] float32, see `Routing.has_bias`."""
        ...


class RMSNormOp(Protocol):
    """x / rms(x) * weight over the last axis, computed in float32; [..., K] -> [..., K]."""

    def __call__(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """The weight may be float32 if x is not; the result has x's dtype and is rounded once."""
        ...


class AddRMSNormOp(Protocol):
    """Add x to the residual stream and normalize it: (normalized, new residual). [T, K] all."""

    def __call__(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """Both `x` and `residual` may be overwritten; use the returned tensors."""
        ...


class LayerNormOp(Protocol):
    """(x - mean(x)) / std(x) * weight + bias over the last axis, computed in float32; [..., K] -> [..., K]."""

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
        """Weight and bias have x's dtype; the result is rounded once."""
        ...


class AddLayerNormOp(Protocol):
    """Add x to the residual stream and normalize it: (normalized, new residual). [T, K] all."""

    def __call__(
        self, x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, eps: float
    ) -> tuple[Tensor, Tensor]:
        """Both `x` and `residual` may be overwritten; use the returned tensors. The sum is rounded before the norm."""
        ...


class Activate(Protocol):
    """act(x), rounded once; any shape."""

    def __call__(self, x: Tensor, kind: ActivationKind) -> Tensor:
        """`x` may be overwritten; use the returned tensor."""
        ...


class Scale(Protocol):
    """x * factor, rounded once; any shape."""

    def __call__(self, x: Tensor, factor: float) -> Tensor:
        """`x` may be overwritten; use the returned tensor."""
        ...


class AddOp(Protocol):
    """x + y, rounded once; [T, K] all, of one dtype."""

    def __call__(self, x: Tensor, y: Tensor) -> Tensor:
        """`y` may be overwritten; use the returned tensor."""
        ...


class AddGatedOp(Protocol):
    """x + sigmoid(gate) * y, rounded once."""

    def __call__(self, y: Tensor, gate: Tensor, x: Tensor) -> Tensor:
        """`y`, `x`: [T, K] of one dtype; `gate`: [T, 1] float32. `x` may be overwritten; use the returned tensor."""
        ...


class MulSigmoidOp(Protocol):
    """x * sigmoid(gate), rounded once."""

    def __call__(self, gate: Tensor, x: Tensor) -> Tensor:
        """`gate`, `x`: [T, K] of one dtype. `x` may be overwritten; use the returned tensor."""
        ...


class TakeRows(Protocol):
    """Look up rows of a table [R, N], contiguous: [T] int64 indices, all of them in range -> [T, N]."""

    def __call__(self, table: Tensor, indices: Tensor, scale: float | None = None) -> Tensor:
        """Look up the rows; `scale` is a factor of the result, which is rounded once."""
        ...


class SoftCap(Protocol):
    """cap * tanh(x / cap); any shape, contiguous, in float32."""

    def __call__(self, x: Tensor, cap: float) -> Tensor:
        """`x` may be overwritten; use the returned tensor."""
        ...


class ToFloat32(Protocol):
    """The same values in float32, contiguous."""

    def __call__(self, x: Tensor) -> Tensor: ...


class GatedActivation(Protocol):
    """act(gate) * up; [T, 2N] with the gate in the first half -> [T, N]."""

    def __call__(self, gate_up: Tensor) -> Tensor: ...


class HeadNorms(NamedTuple):
    """Norms of q and of k, applied before rotary: weights as in `RMSNormOp`, one eps.

    The weights are [D] each, of every head alone; or [Hq * D] and [H * D], of all heads of a token together.

    Attributes:
        values: each head of v is divided by its root mean square, too, without a weight.
    """

    q_weight: Tensor
    k_weight: Tensor
    eps: float
    values: bool = False


class LayerKV(NamedTuple):
    """One layer's part of the KV pool: [slots, H, D] each, in the pool's dtype.

    Attributes:
        k_scale, v_scale: [slots, H] float32, for int8 pools only: a value is the stored integer times the scale of its
            token and head.
    """

    k: Tensor
    v: Tensor
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None


class RotateAndStore(Protocol):
    """The work between the projections and attention: head norms, rotary, and the store into the KV pool."""

    def __call__(
        self,
        qkv: Tensor,
        norms: HeadNorms | None,
        cos: Tensor,
        sin: Tensor,
        kv: LayerKV | None,
        out_cache_loc: Tensor,
        *,
        interleaved: bool = False,
        query_factors: Tensor | None = None,
        keys_are_values: bool = False,
    ) -> Tensor:
        """Normalize the heads of q and k if there are norms, rotate them by position, store k and v; returns q.

        With R = 0 nothing is rotated, for models or layers that know positions by other means.

        Rotation is as in Su et al. 2021, with halves paired as in Hugging Face's Llama. It is computed in float32 or in
        the dtype of cos and sin, and rounded to the model's dtype at the end. Stored values are converted to the pool's
        dtype and clamped to its range. The scale of an int8 pool is the largest magnitude / 127, NaN if a value is not
        finite.

        Args:
            qkv: [T, Hq + 2H, D], the heads of q, then of k, then of v; may be overwritten.
            kv: None: the layer attends to the keys and values of another one, and `qkv` has only q.
            cos: [T, R], with equal halves; the first R dimensions of each head are rotated, the others are unchanged.
            sin: [T, R], the first half negated, so that x * cos + swapped(x) * sin is the rotation.
            out_cache_loc: [T] int64, no slot twice except slots of the dummy page, which are not read.
            interleaved: neighboring elements are paired, (0, 1), (2, 3), ..., and not the halves; cos and sin are the
                same.
            query_factors: [T] float32, contiguous: factors of the rotated q; None: 1.
            keys_are_values: `qkv` has no v: [T, Hq + H, D]. Values are the keys before norm and rotary.

        Returns:
            [T, Hq, D], contiguous or a view into `qkv`.
        """
        ...


class GeluTimes(Protocol):
    """gelu(x) * y by the tanh approximation, rounded once; [T, N] both."""

    def __call__(self, x: Tensor, y: Tensor) -> Tensor:
        """Rows of `y` may be apart. `x` may be overwritten; use the returned tensor."""
        ...


class SparseGatedActivation(Protocol):
    """gelu(max(gate - cutoff, 0)) * up; [T, 2N] with the gate in the first half -> [T, N], rounded once."""

    def __call__(self, gate_up: Tensor, multiplier: float) -> Tensor:
        """The cutoff of a token is the mean of its gates plus `multiplier` standard deviations."""
        ...


class IdsBelow(Protocol):
    """Ids of rows for a table with fewer rows: [T] int64, contiguous -> the same, with 0 for those it does not have."""

    def __call__(self, ids: Tensor, bound: int) -> Tensor: ...


class AltUpWeights(NamedTuple):
    """What mixes the streams of one layer, float32 and contiguous.

    A mixture is made by the numbers tanh(router @ (x / rms(x))) of a token, one for each stream.

    Attributes:
        router: [S, K], with the weight of the norm in each row.
        predictions: [S * S, S].
        corrections: [S, S].
        output_scale: [K].
        active: the stream that the layer computes.
        eps: of the norm.
    """

    router: Tensor
    predictions: Tensor
    corrections: Tensor
    output_scale: Tensor
    active: int
    eps: float


class AltUpOps(Protocol):
    """Residual streams, [T, S, K] (Baykal et al. 2023, as in Gemma 3n); computed in float32, results are rounded."""

    def stack(self, x: Tensor, projected: Tensor) -> Tensor:
        """x [T, K] as the first stream, then each of [T, (S - 1) K], scaled to the root mean square of x."""
        ...

    def predict(self, streams: Tensor, weights: AltUpWeights) -> tuple[Tensor, Tensor]:
        """Each stream j plus sum_i c[j, i] stream i, with c = predictions @ numbers of the active stream.

        Returns:
            [T, S, K], and the active one of them, [T, K].
        """
        ...

    def correct(self, predictions: Tensor, activated: Tensor, weights: AltUpWeights) -> tuple[Tensor, Tensor]:
        """Add (1 + c[j]) (activated - active prediction) to each stream j, c = corrections @ numbers of `activated`.

        Both arguments may be overwritten; use the returned tensors.

        Returns:
            [T, S, K], and the active one of them times `output_scale`, [T, K].
        """
        ...

    def spread(self, x: Tensor, streams: Tensor) -> Tensor:
        """Add x [T, K] to all streams but the first; `streams` may be overwritten; use the returned tensor."""
        ...

    def add_matched(self, streams: Tensor, x: Tensor, total: Tensor | None) -> Tensor:
        """total + x, scaled to the root mean square of the first stream; [T, K]. None: the total is that stream.

        `total` may be overwritten; use the returned tensor.
        """
        ...


class ShortConvOp(Protocol):
    """The gated short convolution of a state layer: C * conv(B * x), over each request's tokens."""

    def __call__(
        self, bcx: Tensor, weight: Tensor, bias: Tensor | None, slots: Tensor, runs: StateRuns
    ) -> Tensor:
        """Convolve causally and move the states; returns [T, K].

        B * x is rounded, as it is kept in the states; the convolution and its product with C are rounded once, together
        with the bias. So the result does not depend on how tokens are divided among steps.

        Args:
            bcx: [T, 3K]: B, C and x.
            weight: [L, K]: the taps, that of the newest token last.
            bias: [K].
            slots: [S, L - 1, K] of the layer; all in one dtype.
            runs: of the step; they cover all T tokens.
        """
        ...


class GatedDeltaOp(Protocol):
    """A gated delta net between its projections (Yang et al. 2024), over each request's tokens."""

    def __call__(
        self, qkvz: Tensor, ba: Tensor, weights: DeltaWeights, states: LayerStates, runs: StateRuns
    ) -> Tensor:
        """Convolve q, k and v causally, correct the states of the heads and ask them; returns [T, H * Dv].

        After silu of the convolution, q and k of each head are divided by their lengths, q also by sqrt(Dk). With
        g = decay * softplus(a + dt_bias) and beta = sigmoid(b), each token takes the state S of a head to
        S' = exp(g) * S + k^T (beta * (v - exp(g) * k S)) and returns norm(q S') * silu(z). All of it is computed in
        float32 and rounded once at the end.

        Args:
            qkvz: [T, K + H * Dv]: q, k, v and z, each of all heads.
            ba: [T, 2 * H]: b and a.
            states: of the layer: `conv` [S, L - 1, K], `recurrent` [S, H, Dk, Dv] in float32.
            runs: of the step; they cover all T tokens.
        """
        ...


class Mamba2Op(Protocol):
    """A layer of Mamba 2 between its projections (Dao and Gu 2024), over each request's tokens."""

    def __call__(self, zxbcdt: Tensor, weights: MambaWeights, states: LayerStates, runs: StateRuns) -> Tensor:
        """Convolve x, B and C causally, add to the states of the heads and read them; returns [T, H * P].

        After silu of the convolution, with t = softplus(dt + dt_bias) within the bounds of time steps, each token takes
        the state S of a head to S' = exp(t * decay) * S + B^T (t * x) and returns norm((C S' + skip * x) * silu(z)).
        All of it is computed in float32 and rounded once at the end; without a norm the result is float32.

        Args:
            zxbcdt: [T, H * P + K + H]: z, the K channels x, B and C, and dt.
            states: of the layer: `conv` [S, L - 1, K], `recurrent` [S, H, N, P] in float32.
            runs: of the step; they cover all T tokens.
        """
        ...


class HeadMatmul(Protocol):
    """A matrix for each head."""

    def __call__(self, x: Tensor, out: Tensor) -> None:
        """out[:, h] = x[:, h] @ weight[h].T for each head h, rounded once.

        Args:
            x: [T, Hq, K], out: [T, Hq, N], in one dtype; both may be parts of wider heads.
        """
        ...


class PackHeads(Protocol):
    """Make a `HeadMatmul` of [Hq, N, K] in the serving dtype, which may be a view. Copies what it keeps."""

    def __call__(self, weight: Tensor) -> HeadMatmul: ...


class StoreLatent(Protocol):
    """The work before latent attention, besides matmuls: the latent's norm, rotary, and the store into the KV pool."""

    def __call__(
        self,
        q: Tensor,
        q_out: Tensor,
        row: Tensor,
        norm: tuple[Tensor, float],
        cos: Tensor,
        sin: Tensor,
        kv: LayerKV,
        out_cache_loc: Tensor,
        *,
        interleaved: bool,
    ) -> None:
        """Normalize the latents, rotate the queries and the ends of the rows, and store the rows.

        Args:
            q: [T, Hq, R], the parts of the queries that rotate; may be parts of wider heads.
            q_out: [T, Hq, R], the same parts of the absorbed queries, filled by the call.
            row: [T, K + R], a latent and the key part that rotates; may be overwritten.
            norm: weight [K] as in `RMSNormOp`, and eps.
            cos, sin: [T, R], see `RotateAndStore`.
            kv: its keys, [slots, 1, K + R], get the rows; its values are the same memory.
            out_cache_loc: [T] int64, see `RotateAndStore`.
            interleaved: neighboring elements (0, 1), (2, 3), ... are pairs; else the halves are paired.
        """
        ...


class PackedDelta(NamedTuple):
    """One layer's part of an adapter in the layout of its kernel; `rank` is the largest of its modules'."""

    rank: int
    a: Tensor
    b: Tensor


class LowRankDelta(Protocol):
    """The changes of a linear layer by adapters: B (A x) for some rows of x, with the matrices of the row's slot.

    The layer may be several modules, stacked by their outputs; each has its own A and B.
    """

    def pack(self, parts: Sequence[tuple[Tensor, Tensor] | None]) -> PackedDelta:
        """An adapter's A [rank, K] and B [outputs, rank] of each module, float32; None: it does not change the module.

        May be called on any thread. Smaller ranks are filled up with zeros.
        """
        ...

    def put(self, slot: int, packed: PackedDelta | None) -> None:
        """Copy an adapter into a slot; None: it does not change this layer."""
        ...

    def add(self, x: Tensor, y: Tensor, runs: AdapterRuns) -> Tensor:
        """y + B (A x), rounded once: x [T, K] in the serving dtype, y [T, N] in it or in float32, contiguous.

        A x is accumulated in float32 and rounded to the serving dtype. `y` may be overwritten; use the returned tensor.
        """
        ...

    @property
    def num_bytes(self) -> int:
        """Memory of all slots."""
        ...


@runtime_checkable
class GatedDelta(LowRankDelta, Protocol):
    """A `LowRankDelta` for a weight with a fused activation, see `UngateableWeight`."""

    def add_gated(self, x: Tensor, paired: Tensor, runs: AdapterRuns) -> Tensor:
        """silu(gate) * up of the changed gates and ups: [T, K], [T, N] as by `ungated` -> [T, N / 2]."""
        ...


@runtime_checkable
class UngateableWeight(GateableWeight, Protocol):
    """A `GateableWeight` that can also be multiplied without the fused activation."""

    def ungated(self, x: Tensor) -> Tensor:
        """The product before the activation: [T, K] -> [T, N]; 16 gates, their 16 ups, the next 16 gates, ..."""
        ...


class EmbeddingDelta(Protocol):
    """The changes of an embedding by adapters: B times the token's column of A."""

    def pack(self, parts: Sequence[tuple[Tensor, Tensor] | None]) -> PackedDelta:
        """See `LowRankDelta`: one part, A [rank, tokens] and B [K, rank]."""
        ...

    def put(self, slot: int, packed: PackedDelta | None) -> None:
        """See `LowRankDelta`."""
        ...

    def add(self, token_ids: Tensor, y: Tensor, runs: AdapterRuns) -> Tensor:
        """[T] int64, y [T, K], contiguous -> [T, K]; `y` may be overwritten."""
        ...

    @property
    def num_bytes(self) -> int:
        """Memory of all slots."""
        ...


class MakeDeltas(Protocol):
    """Makes the memory of adapters, all slots empty; used only by servers with adapters."""

    def linear(
        self,
        inputs: int,
        outputs: Sequence[int],
        num_slots: int,
        max_rank: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> LowRankDelta:
        """For a linear layer whose modules have so many `outputs` each."""
        ...

    def embedding(
        self,
        vocab_size: int,
        size: int,
        num_slots: int,
        max_rank: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> EmbeddingDelta:
        """For the embedding."""
        ...


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
    choices: tuple[OpChoice, ...] = field(default=(), compare=False)
