"""`stored_names`: the names in a GGUF file of the tensors of Hugging Face's models; `SplitKV`: two tensors for one.

llama.cpp's converter stores `kv_b_proj` as `attn_k_b`, transposed per head for absorbed queries, and `attn_v_b`. Files
from before May 2025 have the whole matrix, `attn_kv_b`.
"""

# Shapes: H heads, K size of a latent.

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from ..runtime.errors import ConfigError
from .families.family import LAYER_NAMES
from .families.registry import gguf_of
from .gguf.gguf_file import GGUFFile, TensorInfo, dequantize
from .spec.layer_form import KV_UP
from .spec.streams_spec import LAYER_TABLE

if TYPE_CHECKING:
    from .spec.experts_spec import ExpertNames
    from .spec.model_spec import ModelSpec

_GLOBAL_NAMES: Final = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "model.norm.bias": "output_norm.bias",
    "model.embedding_norm.weight": "token_embd_norm.weight",  # of LFM2, which normalizes the output with it
    f"{LAYER_TABLE}.weight": "per_layer_token_embd.weight",
    "model.per_layer_model_projection.weight": "per_layer_model_proj.weight",
    "model.per_layer_projection_norm.weight": "per_layer_proj_norm.weight",
    "lm_head.weight": "output.weight",
    "lm_head.bias": "output.bias",
}

_STREAM_STACKS: Final = {
    "model.altup_projections": "altup_proj.weight",
    "model.altup_unembed_projections": "altup_unembd_proj.weight",
}
"""Modules of AltUp without their numbers, and the tensors that stack them."""
_PARAMETERS: Final = {
    "layer_scalar": "layer_output_scale",
    "altup.correct_output_scale": "altup_correct_scale",
}
"""Parameters of a layer that are no module's weight."""
_KEYS_AND_VALUES: Final = ("attn_k.", "attn_v.", "attn_k_norm.")

NOT_WEIGHTS: Final = frozenset(
    {"rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight", "v.token_embd.img_break"}
)
"""Tensors of the rope scaling, see `gguf_rope`, and in a tower of Pixtral a copy of an embedding."""

A_LOG: Final = "A_log"
"""Name of a parameter of state layers; the file has the negative exponential."""
_HEAD_VECTORS: Final = {A_LOG: "ssm_a", "D": "ssm_d", "dt_bias": "ssm_dt.bias"}
"""Parameters of a state layer with a number for each head; delta nets have no D."""

FUSED: Final = {
    "self_attn.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
}
"""Modules of Phi-3 that are separate modules in other models."""


_NEXTN: Final = {
    "eh_proj": "nextn.eh_proj",
    "enorm": "nextn.enorm",
    "hnorm": "nextn.hnorm",
    "shared_head.norm": "nextn.shared_head_norm",
}
"""Modules beside the block in the layer that predicts further tokens."""
_NEXTN_COPIES: Final = ("nextn.embed_tokens.", "nextn.shared_head_head.")
"""Tensors of some files that equal those of the model."""


def _num_layers(spec: ModelSpec) -> int:
    """Layers that are read, with the one that predicts further tokens, which follows the others."""
    return spec.num_layers + (spec.mtp_layer is not None)


def stacked_names(spec: ModelSpec) -> Iterator[tuple[str, str]]:
    """Modules of experts without their numbers, and the file's tensors that stack those of a layer."""
    if spec.experts is None:
        return
    names = spec.experts.names
    for layer in range(_num_layers(spec)):
        for hf, gguf in _expert_names(names).items():
            yield f"model.layers.{layer}.{names.block}.experts.{hf}", f"blk.{layer}.{gguf}.weight"


def stored_names(spec: ModelSpec, *, experts: bool = True) -> Iterator[tuple[str, str, int | None]]:
    """Every tensor the model may have: Hugging Face's name, the file's name, and the index of the expert in it.

    Without `experts` there are at most some hundred thousand, for any values in the file.
    """
    for hf, gguf in _GLOBAL_NAMES.items():
        yield hf, gguf, None
    for hf, gguf in _STREAM_STACKS.items():
        for n in range(spec.streams.num_further):
            yield f"{hf}.{n}.weight", gguf, n
    family = gguf_of(spec.model_type)
    in_layer = LAYER_NAMES if family is None else family.names
    num_layers = _num_layers(spec)
    for hf, gguf in _NEXTN.items() if num_layers > spec.num_layers else ():
        yield f"model.layers.{spec.num_layers}.{hf}.weight", f"blk.{spec.num_layers}.{gguf}.weight", None
    for layer in range(num_layers):
        for hf, gguf in in_layer.items():
            for part in ("weight", "bias"):
                yield f"model.layers.{layer}.{hf}.{part}", f"blk.{layer}.{gguf}.{part}", None
        if spec.state is not None and spec.state.recurrent is not None:
            for hf, gguf in _HEAD_VECTORS.items():
                yield f"model.layers.{layer}.{spec.state.module}.{hf}", f"blk.{layer}.{gguf}", None
        if spec.streams.layer_inputs is not None or spec.form.layer_scalars:
            for hf, gguf in _PARAMETERS.items():
                yield f"model.layers.{layer}.{hf}", f"blk.{layer}.{gguf}.weight", None
        if spec.has_sinks(layer):
            yield f"model.layers.{layer}.self_attn.sinks", f"blk.{layer}.attn_sinks.weight", None
        if spec.experts is None:
            continue
        block = f"model.layers.{layer}.{spec.experts.names.block}"
        for hf, gguf in _sparse_names(spec.experts.names).items():
            yield f"{block}.{hf}", f"blk.{layer}.{gguf}", None
        for hf, gguf in _expert_names(spec.experts.names).items() if experts else ():
            for expert in range(spec.experts.num_experts):
                for part in ("weight", "bias") if spec.experts.has_bias else ("weight",):
                    yield f"{block}.experts.{expert}.{hf}.{part}", f"blk.{layer}.{gguf}.{part}", expert


def is_not_read(spec: ModelSpec, name: str) -> bool:
    """Whether a tensor of the file is none that the model takes.

    It is of the rope scaling, of a layer after the last, or makes keys and values that the layer does not use; or it
    is a copy of an embedding or a head, in the layer that predicts further tokens or in a tower.
    """
    unused = tuple(
        f"blk.{layer}.{part}"
        for layer in range(spec.num_layers if spec.streams.kv_sources else 0)
        for part in _KEYS_AND_VALUES
        if not spec.computes_kv(layer)
    )
    last = spec.num_layers + spec.files.num_mtp_layers
    further = tuple(f"blk.{layer}." for layer in range(_num_layers(spec), last))
    copies = tuple(f"blk.{spec.num_layers}.{part}" for part in _NEXTN_COPIES)
    return name in NOT_WEIGHTS or name.startswith((*further, *copies, *unused))


def full_shape(stored: tuple[int, ...], wanted: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of a tensor with the axes that Hugging Face's has.

    llama.cpp's converters drop axes of length 1: from a matrix of one row, from the weight of a convolution of each
    channel, from parameters of towers. They add one to vectors of Mamba 2: those of heads become columns, the norm has
    a row for each group.
    """
    if len(wanted) == 1 and len(stored) == 2 and math.prod(stored) == wanted[0]:
        return wanted
    same = [size for size in stored if size != 1] == [size for size in wanted if size != 1]
    return wanted if same and len(stored) < len(wanted) else stored


def _expert_names(names: ExpertNames) -> dict[str, str]:
    return {names.gate: "ffn_gate_exps", names.up: "ffn_up_exps", names.down: "ffn_down_exps"}


def _sparse_names(names: ExpertNames) -> dict[str, str]:
    """The tensors of a sparse MLP beside its experts."""
    return {
        f"{names.router}.weight": "ffn_gate_inp.weight",
        f"{names.router}.bias": "ffn_gate_inp.bias",
        "router.scale": "ffn_gate_inp.scale",
        "router.per_expert_scale": "ffn_down_exps.scale",
        names.bias: "exp_probs_b.bias",
        f"{names.shared}.gate_proj.weight": "ffn_gate_shexp.weight",
        f"{names.shared}.up_proj.weight": "ffn_up_shexp.weight",
        f"{names.shared}.down_proj.weight": "ffn_down_shexp.weight",
        f"{names.shared_gate}.weight": "ffn_gate_inp_shexp.weight",
        f"{names.latent_down}.weight": "ffn_latent_down.weight",
        f"{names.latent_up}.weight": "ffn_latent_up.weight",
    }


# Shapes: H heads, K size of a latent.


class SplitKV(NamedTuple):
    """The two tensors of a layer: [H, K, unrotated] and [H, values, K]."""

    keys: TensorInfo
    values: TensorInfo

    @property
    def shape(self) -> tuple[int, int]:
        """Shape of the whole matrix."""
        num_heads, size, width = self.keys.shape
        return num_heads * (width + self.values.shape[1]), size

    def read(self, file: GGUFFile) -> npt.NDArray[np.float32]:
        """The whole matrix as Hugging Face has it: [H * (unrotated + values), K]."""
        parts = []
        for keys, values in zip(file.raw(self.keys), file.raw(self.values), strict=True):
            parts += [dequantize(self.keys, keys).T, dequantize(self.values, values)]
        return np.concatenate(parts)


def find_split_kv(file: GGUFFile, spec: ModelSpec) -> dict[str, SplitKV]:
    """The split matrices of a file by the Hugging Face name of the whole; empty if it has none.

    Raises:
        ConfigError: a part is missing, or of another shape.
    """
    latent, found = spec.latent, {}
    for layer in range(_num_layers(spec) if latent is not None else 0):
        assert latent is not None
        names = f"blk.{layer}.attn_k_b.weight", f"blk.{layer}.attn_v_b.weight"
        if not set(names) & set(file.tensors):
            continue
        shapes = (
            (spec.num_heads, latent.kv_lora_rank, latent.qk_nope_head_dim),
            (spec.num_heads, latent.v_head_dim, latent.kv_lora_rank),
        )
        for name, shape in zip(names, shapes, strict=True):
            if name not in file.tensors:
                raise ConfigError(f"{file.path}: tensor {name!r} is missing; download the file again")
            if file.tensors[name].shape != shape:
                raise ConfigError(
                    f"{file.path}: tensor {name!r} has the shape {list(file.tensors[name].shape)}, but the metadata "
                    f"asks for {list(shape)}; the file is damaged: download it again"
                )
        keys, values = (file.tensors[name] for name in names)
        found[f"model.layers.{layer}.{KV_UP}.weight"] = SplitKV(keys, values)
    return found
