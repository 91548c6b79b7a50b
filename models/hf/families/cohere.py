"""Command R and Aya (`cohere`), Command R7B, Command A and Tiny Aya (`cohere2`)."""

from __future__ import annotations

from typing import Final

from msgspec import structs

from ...fields import Fields
from ...spec.layer_form import PARALLEL
from ..hf_rope import MAX_POSITIONS, read_rope
from .family import Facts, Family, rope_facts, windows_by_types


def _cohere(fields: Fields) -> Facts:
    if fields.boolean("use_qk_norm", default=False):
        raise fields.error(
            "use_qk_norm", True, "norms of q and k with a weight for each head are not supported"
        )
    return _layers(fields, 500_000.0)


def _cohere2(fields: Fields) -> Facts:
    """Layers with a window rotate, the others do not."""
    windowed = windows_by_types(fields, 4, "sliding_window_pattern")
    return _layers(fields, 10_000.0) | {
        "sliding_window": fields.integer("sliding_window", 1, MAX_POSITIONS, default=4096),
        "windowed_layers": windowed,
        "rope_layers": windowed,
    }


def _layers(fields: Fields, default_theta: float) -> Facts:
    bias = fields.boolean("attention_bias", default=False)
    scale = fields.number("logit_scale", 1e-6, 1e6, default=0.0625)
    return rope_facts(fields, read_rope(fields, default_theta)) | {
        "attention_bias": bias,
        "attention_out_bias": bias,
        "form": structs.replace(PARALLEL, logits_scale=scale),
    }


FAMILIES: Final[dict[str, Family]] = {
    "cohere": Family("CohereForCausalLM", _cohere, tied=True, norm_eps="layer_norm_eps"),
    "cohere2": Family("Cohere2ForCausalLM", _cohere2, tied=True, norm_eps="layer_norm_eps"),
}
