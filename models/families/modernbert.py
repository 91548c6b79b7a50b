"""ModernBERT: rotary positions, a gated MLP, and windows in most layers."""

from __future__ import annotations

from typing import Final

from ..fields import Fields
from ..spec.encoder_spec import EncoderSpec
from ..spec.layer_form import Biases, WindowsSpec
from .bert import encoder_activation
from .family import Facts, Family
from .hf_readers import layer_types
from .hf_rope import MAX_POSITIONS, read_two_ropes

_GATED: Final = ("gelu", "gelu_new", "gelu_pytorch_tanh", "silu")
_EVERY: Final = 3  # every third layer, from the first on, has no window


def _modernbert(fields: Fields) -> Facts:
    num_layers = fields.integer("num_hidden_layers", 1, 1 << 12)
    if fields.get("layer_types") is not None:
        windowed = layer_types(fields)
    else:
        every = fields.integer("global_attn_every_n_layers", 1, 1 << 12, default=_EVERY)
        windowed = tuple(layer % every != 0 for layer in range(num_layers))
    rope, local_theta = read_two_ropes(fields, 160_000.0, "local_rope_theta", 10_000.0)
    if rope.partial_factor != 1.0:
        raise fields.error("partial_rotary_factor", rope.partial_factor, "only 1.0 is supported")
    bias = fields.boolean("attention_bias", default=False)
    facts: Facts = {
        "rope_theta": rope.theta,
        "rope_scaling": rope.scaling,
        "biases": Biases(qkv=bias, attention_out=bias, mlp=fields.boolean("mlp_bias", default=False)),
        "encoder": EncoderSpec(
            post_norm=False,
            activation=encoder_activation(fields, "hidden_activation", _GATED),
            gated_mlp=True,
            norm_bias=fields.boolean("norm_bias", default=False),
        ),
    }
    if any(windowed):
        reach = fields.integer("local_attention", 0, MAX_POSITIONS, default=128) // 2  # to each side
        facts["windows"] = WindowsSpec(size=2 * reach + 1, layers=windowed, rope_theta=local_theta)
    return facts


FAMILIES: Final = (
    Family(
        "modernbert",
        structure="modernbert",
        architecture="ModernBert",
        read=_modernbert,
        renamed={"norm_eps": "rms_norm_eps", "global_rope_theta": "rope_theta"},
        is_encoder=True,
        defaults={"norm_eps": 1e-5, "global_rope_theta": 160_000.0},
    ),
)
