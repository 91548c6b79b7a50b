"""`DecoderParts`: makes the parts of a decoder from a checkpoint, as its `LayerForm` says."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from .attention import SelfAttention
from .decoder import Decoder, DecoderEnds, LayerRotary
from .embedding import Embedding
from .experts import build_mlp
from .layer import Layer
from .mlp import GatedMLP, PlainMLP
from .norm import LayerNorm, RMSNorm, UnitOffsetRMSNorm
from .query_norms import QueryFactors

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ..model_context import ModelContext
    from ..ops.elementwise import ActivationKind, GatedActivation
    from .layer import MLP, Attention
    from .norm import Norm


class DecoderParts:
    """The parts of the layers that a structure puts together; each is read when it is asked for."""

    def __init__(self, context: ModelContext) -> None:
        """`context`: of the model."""
        self.context = context
        self._spec, self._form = context.spec, context.spec.form
        self._query_factors = QueryFactors.of(context)

    def norm(self, name: str) -> Norm:
        """A norm over the hidden size, by its full name."""
        size, eps = self._spec.hidden_size, self._eps
        if self._form.norm == "layer":
            return LayerNorm(self.context, name, size, eps, bias=self._form.norm_bias)
        return self._rms_norm(self.context, name, size, eps)

    @property
    def _rms_norm(self) -> type[RMSNorm]:
        return UnitOffsetRMSNorm if self._form.norm == "offset_rms" else RMSNorm

    @property
    def _eps(self) -> float:
        """Norm eps, corrected for `residual_scale`: the stream is divided by the scale of what is added to it."""
        return self._spec.rms_norm_eps / self._form.residual_scale**2

    def layer_norm(self, layer_id: int, index: int) -> Norm:
        """One of the layer's norms in the order of `LayerForm.norms`."""
        return self.norm(f"{self._spec.layer_name(layer_id)}.{self._form.norms[index]}")

    def attention(self, layer_id: int) -> SelfAttention:
        """The attention of a layer."""
        spec, name = self._spec, f"{self._spec.layer_name(layer_id)}.self_attn"
        factors, qk_norms = self._query_factors, None
        if self._form.qk_norm and not self._form.qk_norm_over_heads:
            head_norm = partial(self._rms_norm, self.context, size=spec.head_dim, eps=spec.rms_norm_eps)
            names = self._form.names
            qk_norms = head_norm(f"{name}.{names.q_norm}"), head_norm(f"{name}.{names.k_norm}")
        return SelfAttention(
            self.context,
            name,
            layer_id,
            fused=self._form.fused_qkv,
            qk_norms=qk_norms,
            query_factors=factors and factors.for_layer(spec.rotates(layer_id)),
        )

    def gated_mlp(self, layer_id: int, activation: GatedActivation | None = None) -> MLP:
        """The MLP of a layer; `activation`: see `GatedMLP`."""
        spec = self._spec
        return GatedMLP(
            self.context,
            f"{spec.layer_name(layer_id)}.{self._form.names.mlp}",
            spec.hidden_size,
            spec.inner_size_of(layer_id),
            bias=spec.biases.mlp,
            fused=self._form.fused_gate_up,
            activation=activation,
        )

    def mlp(self, layer_id: int) -> MLP:
        """The MLP of a layer of Llama's structure, which may be a mixture of experts."""
        if self._spec.experts is None:
            plain = self._form.mlp == "plain"
            return self.plain_mlp(layer_id, "gelu_tanh") if plain else self.gated_mlp(layer_id)
        return build_mlp(self.context, self._spec.layer_name(layer_id), layer_id)

    def plain_mlp(self, layer_id: int, activation: ActivationKind) -> MLP:
        """The MLP of a layer without a gate."""
        spec, prefix = self._spec, f"{self._spec.layer_name(layer_id)}.mlp."
        up, down = (prefix + name for name in self._form.mlp_names)
        return PlainMLP(
            self.context, up, down, spec.hidden_size, spec.intermediate_size, spec.biases.mlp, activation
        )

    def pre_norm_layer(self, layer_id: int, mixer: Attention | None = None) -> Layer:
        """A layer of Llama's structure; `mixer`: what it has in the place of attention."""
        layer = Layer(self.context.ops.add)
        if layer_id not in self._form.without_attention:
            layer.attention_norm = self.layer_norm(layer_id, 0)
            layer.attention = self.attention(layer_id) if mixer is None else mixer
        if layer_id not in self._form.without_mlp:
            layer.mlp_norm, layer.mlp = self.layer_norm(layer_id, 1), self.mlp(layer_id)
        return layer

    def hybrid_decoder(
        self, module: str, state_layer: Callable[[ModelContext, str, int], Attention]
    ) -> Decoder:
        """The whole model; layers without attention have a `state_layer` there, with the weights in `module`."""
        layers = []
        for layer_id in range(self._spec.num_layers):
            mixer = None
            if not self._spec.attends(layer_id):
                mixer = state_layer(self.context, f"{self._spec.layer_name(layer_id)}.{module}", layer_id)
            layers.append(self.pre_norm_layer(layer_id, mixer))
        return self.decoder(layers)

    def decoder(self, layers: Sequence[Layer]) -> Decoder:
        """The whole model around its layers."""
        context, form = self.context, self._form
        scale = form.embedding_scale / form.residual_scale
        ends = DecoderEnds.of(
            context,
            lambda: Embedding(
                context,
                "model.embed_tokens",
                self._spec.vocab_size,
                self._spec.hidden_size,
                scale=None if scale == 1.0 else scale,
            ),
            lambda: self.norm(f"model.{self._form.names.final_norm}"),
        )
        return Decoder(
            ends,
            LayerRotary(context),
            layers,
            context.ops.add,
            context.ops.take_rows,
        )
