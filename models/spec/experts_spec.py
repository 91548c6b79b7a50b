"""`ExpertsSpec`: the sparse MLPs of a mixture-of-experts model, and `Routing`: which experts compute for a token."""

from __future__ import annotations

import math
from typing import Final, Literal, get_args

import msgspec

MOST_GROUP_BEST: Final = 2
"""Largest `Routing.group_best` of the kernels."""

_SILU_STEPS: Final = 40
"""Steps of a fixed point that comes closer by a factor of at least 3 in each."""

ExpertActivation = Literal["silu", "gelu_tanh"]
ScoresKind = Literal["softmax", "sigmoid", "mixer"]
SCORES: Final[tuple[ScoresKind, ...]] = get_args(ScoresKind)
"""In the order of `Scores` in `kernels/cpu/experts.cpp`."""


class Routing(msgspec.Struct, frozen=True, kw_only=True):
    """How a token's logits over the experts become its experts and their shares.

    Each logit becomes a score. The experts with the largest scores are chosen; their scores are the shares, which are
    normalized and multiplied by `scale`.

    Attributes:
        num_active: experts that compute for a token.
        normalize: the shares of a token are divided by their sum. With `softmax` this is also the softmax of the
            chosen logits alone.
        scores: `softmax` over all experts; `sigmoid` of each logit; `mixer`: two experts, one after the other, each
            with its share of a softmax over those of the remaining experts whose logits are near the largest one
            (Liu et al. 2024, SparseMixer v2, as it is at inference).
        has_bias: a number for each expert is added to its score for the choice only, not for the share.
        num_groups: neighboring experts form groups of equal size; only those of the best groups can be chosen.
        num_active_groups: how many groups that are.
        group_best: a group is as good as the sum of so many of its best scores.
        scale: a factor of all shares.
        mixer_tolerance: how near the largest logit is, as a part of the larger magnitude of the two.
        float32_logits: the router is computed in float32 where the device would round its logits otherwise.
    """

    num_active: int
    normalize: bool = True
    scores: ScoresKind = "softmax"
    has_bias: bool = False
    num_groups: int = 1
    num_active_groups: int = 1
    group_best: int = 1
    scale: float = 1.0
    mixer_tolerance: float = 0.0
    float32_logits: bool = False

    def contradiction(self, num_experts: int) -> str | None:
        """The first contradiction between these facts, or None."""
        if self.num_active > num_experts:
            return f"{self.num_active} experts for each token, but there are only {num_experts}"
        if num_experts % self.num_groups:
            return f"{num_experts} experts cannot form {self.num_groups} groups evenly"
        if self.num_active_groups > self.num_groups:
            return f"experts of {self.num_active_groups} groups, but there are only {self.num_groups}"
        each = num_experts // self.num_groups
        if self.num_active > self.num_active_groups * each:
            return f"{self.num_active} experts for each token, but its groups have only {self.num_active_groups * each}"
        if self.num_groups > 1 and self.group_best > each:
            return f"groups are compared by their best {self.group_best} experts, but have only {each}"
        assert 1 <= self.group_best <= MOST_GROUP_BEST, self.group_best
        if self.scores == "mixer" and (self.num_active != 2 or self.has_bias or self.num_groups > 1):
            return f"{self.num_active} experts for each token, but this kind of router chooses 2"
        return None


class ClampedSwiGLU(msgspec.Struct, frozen=True, kw_only=True):
    """The activation (up + offset) * gate * sigmoid(alpha * gate): gate is at most `gate_limit`, up within +-`limit`.

    The defaults are those of gpt-oss.
    """

    alpha: float = 1.702
    limit: float = 7.0
    gate_limit: float = 7.0
    offset: float = 1.0

    @classmethod
    def after_silu(cls, limit: float) -> ClampedSwiGLU:
        """min(silu(gate), limit) * up, with up within +-`limit`: the gate is at most that of which silu is `limit`.

        Above it silu is larger, because it rises from its minimum of -0.28 on.
        """
        gate = limit
        for _ in range(_SILU_STEPS):
            gate = limit * (1.0 + math.exp(-gate))
        return cls(alpha=1.0, limit=limit, gate_limit=gate, offset=0.0)


class ExpertNames(msgspec.Struct, frozen=True, kw_only=True):
    """Names in a checkpoint of the modules of a sparse MLP; experts are `<block>.experts.<number>.<part>`.

    Attributes:
        block: the MLP in its layer, also of dense layers.
        router: in the block.
        bias: `Routing.has_bias`: the tensor in the block.
        bias_is_row: this tensor has a first axis of length 1.
        gate, up, down: of each expert.
        shared: the shared expert in the block.
        shared_in_block: else it is beside the block, in the layer.
        shared_gate: the gate of the shared expert in the block.
        latent_down, latent_up: the projections around the experts in the block, see `ExpertsSpec.latent_size`.
        gate_up_stack, down_stack: in the block, of files that stack the weights of all experts.
        stacks_in_turn: such a stack has gates and ups in turn, as in gpt-oss, see `stored_forms`.
        stacks_transposed: such stacks always have inputs before outputs, as in Llama 4.
    """

    block: str = "mlp"
    router: str = "gate"
    bias: str = "gate.e_score_correction_bias"
    bias_is_row: bool = False
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    shared: str = "shared_experts"
    shared_in_block: bool = True
    shared_gate: str = "shared_expert_gate"
    latent_down: str = "fc1_latent_proj"
    latent_up: str = "fc2_latent_proj"
    gate_up_stack: str = "experts.gate_up_proj"
    down_stack: str = "experts.down_proj"
    stacks_in_turn: bool = False
    stacks_transposed: bool = False

    @property
    def shared_module(self) -> str:
        """The shared expert in its layer."""
        return f"{self.block}.{self.shared}" if self.shared_in_block else self.shared


MIXTRAL_NAMES: Final = ExpertNames(block="block_sparse_moe", gate="w1", up="w3", down="w2")
"""Of Mixtral and Phi-3.5-MoE."""

GRANITE_NAMES: Final = ExpertNames(
    block="block_sparse_moe",
    router="router.layer",
    shared="shared_mlp",
    shared_in_block=False,
    gate_up_stack="input_linear.weight",
    down_stack="output_linear.weight",
)
"""Of Granite."""

ERNIE_NAMES: Final = ExpertNames(bias="moe_statics.e_score_correction_bias", bias_is_row=True)
"""Of ERNIE 4.5."""

LFM2_NAMES: Final = ExpertNames(block="feed_forward", bias="expert_bias", gate="w1", up="w3", down="w2")
"""Of LFM2-MoE."""


GEMMA_NAMES: Final = ExpertNames(block="moe", router="router.proj", shared="mlp", shared_in_block=False)
"""Names in Gemma 4, which has a dense MLP beside the experts in each layer."""


class ExpertsSpec(msgspec.Struct, frozen=True, kw_only=True):
    """The sparse MLPs of a mixture-of-experts model.

    Attributes:
        intermediate_size: of each expert.
        dense_layers: layers with a dense MLP instead.
        shared_size: width of the MLP that computes for every token, beside the experts; 0: there is none.
        has_shared_gate: its result is multiplied by a number from 0 to 1 for each token.
        has_bias: the three modules of each expert and the router have biases.
        clamp: the activation of experts; None: silu(gate) * up.
        mlp_clamp: the same of the shared expert and of dense MLPs.
        limits, mlp_limits: where layers differ, one for each layer: that of `ClampedSwiGLU.after_silu`, or 0 for none;
            see `of_layer`.
        scales_inputs: a share is a factor of the expert's input instead of its output.
        gated: if False, experts have no gate: down(relu(up) ** 2).
        activation: of the gates of experts, if there is no clamp.
        has_scales: the router's input is normalized and has a factor of each number, and the shares of each expert have
            one; see `ExpertsBesideMLP`.
        latent_size: experts compute with projections of this size, and the sum of their outputs is projected back; the
            router and the shared expert take the whole input. 0: experts take it, too.
    """

    num_experts: int
    intermediate_size: int
    routing: Routing
    dense_layers: tuple[int, ...] = ()
    shared_size: int = 0
    has_shared_gate: bool = False
    has_bias: bool = False
    clamp: ClampedSwiGLU | None = None
    mlp_clamp: ClampedSwiGLU | None = None
    limits: tuple[float, ...] = ()
    mlp_limits: tuple[float, ...] = ()
    scales_inputs: bool = False
    gated: bool = True
    activation: ExpertActivation = "silu"
    has_scales: bool = False
    latent_size: int = 0
    names: ExpertNames = ExpertNames()

    def of_layer(self, layer_id: int) -> ExpertsSpec:
        """The same with the activations of one layer."""
        if not self.limits and not self.mlp_limits:
            return self
        clamp, mlp_clamp = (
            ClampedSwiGLU.after_silu(limits[layer_id]) if limits and limits[layer_id] else None
            for limits in (self.limits, self.mlp_limits)
        )
        return msgspec.structs.replace(self, clamp=clamp, mlp_clamp=mlp_clamp, limits=(), mlp_limits=())

    @property
    def first_parts(self) -> tuple[str, ...]:
        """The modules of an expert before its activation."""
        return (self.names.gate, self.names.up) if self.gated else (self.names.up,)

    @property
    def num_active(self) -> int:
        """Experts that compute for a token, without the shared one."""
        return self.routing.num_active
