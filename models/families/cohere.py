"""Command R and Aya (`cohere`, in GGUF `command-r`), Command R7B, Command A and Tiny Aya (`cohere2`)."""

from __future__ import annotations

from typing import Final

from msgspec import structs

from ..fields import Fields
from ..spec.layer_form import PARALLEL, Biases, WindowsSpec
from .family import GGUF, LAYER_NAMES, LAYER_NORM_EPS, Facts, Family
from .gguf_readers import windowed_layers
from .hf_readers import rope_facts, windows_by_types
from .hf_rope import MAX_POSITIONS, read_rope


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
        "windows": WindowsSpec(
            size=fields.integer("sliding_window", 1, MAX_POSITIONS, default=4096), layers=windowed
        ),
        "rope_layers": windowed,
    }


def _layers(fields: Fields, default_theta: float) -> Facts:
    bias = fields.boolean("attention_bias", default=False)
    scale = fields.number("logit_scale", 1e-6, 1e6, default=0.0625)
    return rope_facts(fields, read_rope(fields, default_theta)) | {
        "biases": Biases(qkv=bias, attention_out=bias),
        "form": structs.replace(PARALLEL, logits_scale=scale),
    }


_PATTERN: Final = 4  # every fourth layer has no window


def _command_r(fields: Fields, arch: str) -> Facts:
    scale = fields.number(f"{arch}.logit_scale", 1e-6, 1e6)
    return {"form": structs.replace(PARALLEL, logits_scale=scale)}


def _cohere2_gguf(fields: Fields, arch: str) -> Facts:
    """Layers with a window rotate, the others do not."""
    windowed = windowed_layers(fields, arch, _PATTERN)
    return _command_r(fields, arch) | {
        "windows": WindowsSpec(
            size=fields.integer(f"{arch}.attention.sliding_window", 1, 1 << 30), layers=windowed
        ),
        "rope_layers": windowed,
    }


_NAMES: Final = {module: stored for module, stored in LAYER_NAMES.items() if stored != "ffn_norm"}


FAMILIES: Final = (
    Family(
        "cohere",
        structure="parallel",
        published="Command R, Aya 23, Aya Expanse",
        architecture="CohereForCausalLM",
        read=_cohere,
        tied=True,
        norm_eps="layer_norm_eps",
        defaults={"layer_norm_eps": 1e-5},
        gguf={"command-r": GGUF(_command_r, _NAMES, norm_eps=LAYER_NORM_EPS)},
    ),
    Family(
        "cohere2",
        structure="parallel",
        published="Command R7B, Command A, Tiny Aya",
        architecture="Cohere2ForCausalLM",
        read=_cohere2,
        tied=True,
        norm_eps="layer_norm_eps",
        defaults={"layer_norm_eps": 1e-5},
        gguf={"cohere2": GGUF(_cohere2_gguf, _NAMES, norm_eps=LAYER_NORM_EPS)},
    ),
)
