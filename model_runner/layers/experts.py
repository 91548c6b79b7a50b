"""Mixture of experts: a router selects a few of many small MLPs for each token.

With several ranks each rank has a part of every expert's width, so the work is balanced for any routing.
"""

# Shapes: T tokens, E experts, k active experts of a token, N width of an expert (of this rank).

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ...models.adapters.base_modules import EXPERTS
from ..ops.linear import LinearToFloat32, LinearWeight
from ..weights.reader import ModuleWeight, Slice
from .linear import Linear
from .mlp import GatedMLP, PlainMLP
from .spans import equal_span

if TYPE_CHECKING:
    from collections.abc import Callable

    from ...models.spec.experts_spec import ExpertsSpec
    from ..adapter_runs import AdapterRuns
    from ..adapters.adapter_layers import AdaptedExperts
    from ..model_context import ModelContext
    from ..ops.experts import ExpertWeights
    from .norm import RMSNorm


def build_mlp(context: ModelContext, layer: str, layer_id: int) -> GatedMLP | PlainMLP | SparseMLP:
    """The MLP of a layer (`model.layers.<n>`): a mixture of experts, or a dense one where the configuration says so."""
    spec = context.spec
    assert spec.experts is not None
    experts = spec.experts.of_layer(layer_id)
    if layer_id in experts.dense_layers:
        name = f"{layer}.{experts.names.block}"
        return _dense(context, name, spec.intermediate_size, experts, is_summed=True)
    return SparseMLP(context, layer, spec.hidden_size, experts)


def _dense(
    context: ModelContext, name: str, inner: int, experts: ExpertsSpec, *, is_summed: bool
) -> GatedMLP | PlainMLP:
    """A dense MLP, in the form of the experts: with a gate, or without."""
    spec, clamp = context.spec, experts.mlp_clamp
    bias, size = spec.biases.mlp, spec.hidden_size
    if not experts.gated:
        up, down = (f"{name}.{part}" for part in spec.form.mlp_names)
        return PlainMLP(context, up, down, size, inner, bias, "relu2", is_summed=is_summed)
    return GatedMLP(
        context,
        name,
        size,
        inner,
        bias=bias,
        fused=spec.form.fused_gate_up,
        activation=None if clamp is None else partial(context.ops.clamped_swiglu, clamp=clamp),
        is_summed=is_summed,
    )


class SparseMLP:
    """sum over the active experts e of s_e(x) * down_e(silu(gate_e(x)) * up_e(x)), with s the router's shares.

    In some models s_e(x) is a factor of the expert's input. A shared expert computes for every token. Experts may
    compute with a projection of x, and their sum is projected back.
    """

    def __init__(self, context: ModelContext, layer: str, size: int, experts: ExpertsSpec) -> None:
        name = f"{layer}.{experts.names.block}"
        self.router = _Router(context, name, size, experts)
        self.latent: tuple[Linear, Linear] | None = None
        inner = size
        if experts.latent_size:
            inner = experts.latent_size
            down, up = f"{name}.{experts.names.latent_down}", f"{name}.{experts.names.latent_up}"
            self.latent = (
                Linear(context, [down], size, [inner], bias=False),
                Linear(context, [up], inner, [size], bias=False),
            )
        self.changes = _changes(context, name, inner, experts)
        source = _CheckpointExperts(context, name, inner, experts, is_adapted=self.changes is not None)
        self.experts = context.ops.pack_experts(source)
        self.shared = _SharedExpert(context, layer, size, experts) if experts.shared_size else None
        self._all_reduce = context.group.all_reduce

    def __call__(self, x: Tensor, adapters: AdapterRuns | None = None) -> Tensor:
        """[T, size] -> [T, size]; adapters do not change the router.

        The projection back is linear, so each rank projects its part of the experts' sum.
        """
        shares, ids = self.router(x)
        inner = x if self.latent is None else self.latent[0](x, adapters)
        y = _computed(self.experts, inner, shares, ids, self.changes, adapters)
        if self.latent is not None:
            y = self.latent[1](y, adapters)
        if self.shared is not None:
            y = self.shared.add(x, y, adapters)
        return self._all_reduce(y)


class ExpertsBesideMLP:
    """after_mlp(mlp(before_mlp(x))) + after(experts(before(x))), as in Gemma 4, with norms around both.

    The router takes x divided by its root mean square and times a factor of each number; shares have a factor of each
    expert.
    """

    def __init__(
        self,
        context: ModelContext,
        layer: str,
        experts: ExpertsSpec,
        mlp: GatedMLP,
        mlp_norms: tuple[RMSNorm, RMSNorm],
        norms: tuple[RMSNorm, RMSNorm],
    ) -> None:
        """Take the experts from a checkpoint; `mlp_norms` and `norms`: before and after the MLP and the experts."""
        size, name = context.spec.hidden_size, f"{layer}.{experts.names.block}"
        self.mlp, self.mlp_norms, self.norms = mlp, mlp_norms, norms
        self.router = _Router(context, name, size, experts)
        scales = context.weights.tensor(f"{name}.router.scale", (size,), torch.float32)
        self.factors, self.eps = scales * size**-0.5, context.spec.rms_norm_eps
        shape = (experts.num_experts,)
        self.share_factors = context.weights.tensor(f"{name}.router.per_expert_scale", shape, torch.float32)
        self.changes = _changes(context, name, size, experts)
        source = _CheckpointExperts(context, name, size, experts, is_adapted=self.changes is not None)
        self.experts = context.ops.pack_experts(source)
        self.ops, self._all_reduce = context.ops, context.group.all_reduce

    def __call__(self, x: Tensor, adapters: AdapterRuns | None = None) -> Tensor:
        """[T, size] -> [T, size]; adapters do not change the router."""
        before, after = self.mlp_norms
        dense = after(self.mlp(before(x), adapters))
        shares, ids = self.router(self.ops.rms_norm(x, self.factors, self.eps))
        shares = shares * self.share_factors[ids]
        before, after = self.norms
        y = _computed(self.experts, before(x), shares, ids, self.changes, adapters)
        return self.ops.add(dense, after(self._all_reduce(y)))


def _changes(context: ModelContext, name: str, size: int, experts: ExpertsSpec) -> AdaptedExperts | None:
    """The memory for changes of the experts of a block by adapters; None: adapters do not change them."""
    if context.adapters is None:
        return None
    inner = experts.intermediate_size
    span = None if context.group.size == 1 else equal_span(inner, context.group)
    return context.adapters.experts(context.ops.deltas, f"{name}.{EXPERTS}", experts, size, span)


def _computed(
    experts: ExpertWeights,
    x: Tensor,
    shares: Tensor,
    ids: Tensor,
    changes: AdaptedExperts | None,
    adapters: AdapterRuns | None,
) -> Tensor:
    """The experts of each token, changed by its adapter."""
    if changes is None or adapters is None:
        return experts(x, shares, ids)
    return experts(x, shares, ids, changes.of_step(ids, adapters))


class _Router:
    """The experts of each token, by the `Routing` of the architecture."""

    def __init__(self, context: ModelContext, name: str, size: int, experts: ExpertsSpec) -> None:
        names, self.routing = experts.names, experts.routing
        self.logits = _logits(
            context,
            f"{name}.{names.router}",
            size,
            experts.num_experts,
            exact=self.routing.float32_logits,
            has_bias=experts.has_bias,
        )
        self.bias: Tensor | None = None
        if self.routing.has_bias:
            shape = (1, experts.num_experts) if names.bias_is_row else (experts.num_experts,)
            self.bias = context.weights.tensor(f"{name}.{names.bias}", shape, torch.float32).view(-1)
        self.route = context.ops.route

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """[T, size] -> shares [T, k] float32, expert ids [T, k] int64."""
        return self.route(self.logits(x), self.routing, self.bias)


class _SharedExpert:
    """The MLP that computes for every token, with or without a gate for its whole result."""

    def __init__(self, context: ModelContext, layer: str, size: int, experts: ExpertsSpec) -> None:
        names, ops = experts.names, context.ops
        name = f"{layer}.{names.shared_module}"
        self.mlp = _dense(context, name, experts.shared_size, experts, is_summed=False)
        self._add, self._add_gated, self._to_float32 = ops.add, ops.add_gated, ops.to_float32
        self.gate: Callable[[Tensor], Tensor] | None = None
        if experts.has_shared_gate:
            self.gate = _logits(context, f"{layer}.{names.block}.{names.shared_gate}", size, 1)

    def add(self, x: Tensor, y: Tensor, adapters: AdapterRuns | None) -> Tensor:
        """y + gate(x) * mlp(x), [T, size] all; `y` may be overwritten."""
        shared = self.mlp(x, adapters)
        if self.gate is None:
            return self._add(shared, y)
        return self._add_gated(shared, self._to_float32(self.gate(x)), y)


def _logits(
    context: ModelContext, name: str, size: int, num: int, *, exact: bool = False, has_bias: bool = False
) -> Callable[[Tensor], Tensor]:
    """A small linear layer, [T, size] -> [T, num]: in float32 if its kernel need not round.

    Args:
        exact: also where it must, with a weight in float32; not with a bias.
    """
    weight = context.linear_format.load([ModuleWeight(context.weights, name, (num, size))])
    bias = context.weights.tensor(f"{name}.bias", (num,)) if has_bias else None
    if isinstance(weight, LinearToFloat32):
        return partial(weight.to_float32, bias=bias)
    if not exact or context.dtype == torch.float32:
        return partial(weight, bias=bias)
    assert bias is None
    ops = context.ops
    wide = ops.pack_linear(context.weights.tensor(f"{name}.weight", (num, size), torch.float32))
    return lambda x: wide(ops.to_float32(x))


class _CheckpointExperts:
    """`ExpertSource` that reads this rank's part of a layer's experts from the checkpoint."""

    def __init__(
        self, context: ModelContext, name: str, size: int, experts: ExpertsSpec, *, is_adapted: bool
    ) -> None:
        self.is_adapted = is_adapted
        self._format, self._weights = context.linear_format, context.weights
        self.clamp, self._has_bias = experts.clamp, experts.has_bias
        self.scales_inputs, self.gated = experts.scales_inputs, experts.gated
        self.activation = experts.activation
        self._adds_bias = context.group.rank == 0
        self._modules = [f"{name}.experts.{expert}" for expert in range(experts.num_experts)]
        self._first, self._names = experts.first_parts, experts.names
        self._size, self._inner = size, experts.intermediate_size
        self._span = equal_span(self._inner, context.group)

    def stacked(self) -> tuple[Tensor, Tensor]:
        num_experts, width = len(self._modules), len(self._span)
        gate_up = self._format.dense(self._gate_up(self._modules))
        down = self._format.dense(self._down(self._modules))
        return gate_up.view(num_experts, len(self._first) * width, self._size), down.view(
            num_experts, self._size, width
        )

    def linears(self) -> tuple[list[LinearWeight], list[LinearWeight]]:
        gate_up = [self._format.load(self._gate_up([module])) for module in self._modules]
        return gate_up, [self._format.load(self._down([module])) for module in self._modules]

    def biases(self) -> tuple[Tensor, Tensor] | None:
        """Biases of gate_up and down. Down's are zeros except on one rank, because the ranks' results are summed."""
        if not self._has_bias:
            return None
        num_experts = len(self._modules)
        gate_up = self._stacked_biases(self._gate_up(self._modules))
        down = self._stacked_biases(
            [one._replace(part=None) for one in self._down(self._modules)]  # cut by inputs
        )
        if not self._adds_bias:
            down.zero_()
        return gate_up.view(num_experts, -1), down.view(num_experts, -1)

    def _stacked_biases(self, modules: list[ModuleWeight]) -> Tensor:
        """[sum of outputs], of modules that are cut by outputs or whole."""
        slices = [one.part or Slice(0, 0, one.shape[0]) for one in modules]
        names, shapes = [f"{one.name}.bias" for one in modules], [one.shape[:1] for one in modules]
        return self._weights.stacked(names, shapes, slices=slices)

    def _gate_up(self, modules: list[str]) -> list[ModuleWeight]:
        shape, part = (self._inner, self._size), self._part(0)
        return [
            ModuleWeight(self._weights, f"{module}.{name}", shape, part)
            for module in modules
            for name in self._first
        ]

    def _down(self, modules: list[str]) -> list[ModuleWeight]:
        # Stacked along the first axis, cut along the other one.
        shape, part = (self._size, self._inner), self._part(1)
        return [
            ModuleWeight(self._weights, f"{module}.{self._names.down}", shape, part) for module in modules
        ]

    def _part(self, axis: int) -> Slice | None:
        return None if len(self._span) == self._inner else Slice(axis, *self._span)
