"""Weights in a GGUF file, converted to the serving dtype, under Hugging Face's names and in its forms.

llama.cpp keeps some of them in forms of its own, which are turned back here, so that models know one form:

- It orders the rows of Llama's q and k projections so that rotary pairs are neighbours; Hugging Face pairs the first
  half of a head with the second. Of the architectures here only `llama` is stored so.
- Gemma's norm weights w are stored as 1 + w.
- Experts are one tensor of a layer, Hugging Face has one for each.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

import torch
from torch import Tensor

from ...runtime.errors import ConfigError
from ...runtime.model_files.gguf import GGUFFile, TensorInfo, dequantize

if TYPE_CHECKING:
    from ...runtime.model_files.model_spec import ModelSpec

_GLOBAL_NAMES: Final = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
_LAYER_NAMES: Final = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_GEMMA3_NAMES: Final = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
_PHI3_NAMES: Final = {
    "self_attn.qkv_proj": "attn_qkv",
    "mlp.gate_up_proj": "ffn_up",
}
_QK_NORM_NAMES: Final = {
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
}
_EXPERT_NAMES: Final = {
    "gate_proj": "ffn_gate_exps",
    "up_proj": "ffn_up_exps",
    "down_proj": "ffn_down_exps",
}
_LAYER_PATTERN: Final = re.compile(r"model\.layers\.(\d+)\.(.+)\.(weight|bias)")
_NOT_WEIGHTS: Final = frozenset(  # rope scaling, read by model_files
    {"rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"}
)
_ROWS_AT_A_TIME: Final = 4096
"""Rows converted to float32 before they go to the serving dtype: bounds the temporary for a large embedding."""


class _Stored(NamedTuple):
    """Where a tensor of Hugging Face's is: a tensor of the file, or one of those stacked in it."""

    info: TensorInfo
    expert: int | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return self.info.shape if self.expert is None else self.info.shape[1:]


class GGUFStore:
    """The tensors of one GGUF file."""

    def __init__(self, path: Path, spec: ModelSpec) -> None:
        """Open the file.

        Raises:
            ConfigError: it is truncated or damaged.
        """
        self._file = GGUFFile(path)
        self._num_heads, self._num_kv_heads = spec.num_heads, spec.num_kv_heads
        self._pairs_are_neighbours = spec.model_type == "llama"
        self._norms_are_offset = spec.model_type == "gemma3_text"
        self._stored = {
            hf: _Stored(self._file.tensors[gguf], expert)
            for hf, gguf, expert in _names(spec)
            if gguf in self._file.tensors
        }

    def names(self) -> set[str]:
        """See `TensorStore`; tensors without a name in Hugging Face's layout keep their own."""
        known = {stored.info.name for stored in self._stored.values()}
        return set(self._stored) | (set(self._file.tensors) - known - _NOT_WEIGHTS)

    def shape(self, name: str, wanted: tuple[int, ...]) -> tuple[int, ...] | None:
        """See `TensorStore`."""
        stored = self._stored.get(name)
        return None if stored is None else stored.shape

    def read(self, name: str, out: Tensor) -> None:
        """See `TensorStore`."""
        info, expert = self._stored[name]
        raw = self._file.raw(info)
        if expert is not None:
            raw = raw[expert]
        try:
            if out.ndim == 1:  # one row, whose bytes are no rows
                values = torch.from_numpy(dequantize(info, raw))
                if self._norms_are_offset and name.endswith("norm.weight"):
                    values = values - 1.0
                out.copy_(values)
            else:
                for start in range(0, out.shape[0], _ROWS_AT_A_TIME):
                    rows = slice(start, start + _ROWS_AT_A_TIME)
                    out[rows].copy_(torch.from_numpy(dequantize(info, raw[rows])))
        except ConfigError as error:
            raise ConfigError(f"{self._file.path}: {error}") from None
        match = _LAYER_PATTERN.fullmatch(name)
        if match and self._pairs_are_neighbours:
            if match[2] == "self_attn.q_proj":
                out.copy_(_pairs_apart(out, self._num_heads))
            elif match[2] == "self_attn.k_proj":
                out.copy_(_pairs_apart(out, self._num_kv_heads))

    def describe(self, name: str) -> str:
        """See `TensorStore`."""
        return str(self._file.path)


def _names(spec: ModelSpec) -> Iterator[tuple[str, str, int | None]]:
    """Every tensor the model may have: Hugging Face's name, the file's, and which of the experts stacked in it."""
    for hf, gguf in _GLOBAL_NAMES.items():
        yield hf, gguf, None
    in_layer = dict(_LAYER_NAMES)
    if spec.model_type == "gemma3_text":
        in_layer |= _GEMMA3_NAMES
    if spec.model_type == "phi3":
        in_layer = {hf: gguf for hf, gguf in in_layer.items() if gguf != "ffn_up"} | _PHI3_NAMES
    if spec.qk_norm:
        in_layer |= _QK_NORM_NAMES
    for layer in range(spec.num_layers):
        for hf, gguf in in_layer.items():
            for part in ("weight", "bias"):
                yield f"model.layers.{layer}.{hf}.{part}", f"blk.{layer}.{gguf}.{part}", None
        if spec.experts is not None:
            yield f"model.layers.{layer}.mlp.gate.weight", f"blk.{layer}.ffn_gate_inp.weight", None
            for hf, gguf in _EXPERT_NAMES.items():
                for expert in range(spec.experts.num_experts):
                    name = f"model.layers.{layer}.mlp.experts.{expert}.{hf}.weight"
                    yield name, f"blk.{layer}.{gguf}.weight", expert


def _pairs_apart(weight: Tensor, num_heads: int) -> Tensor:
    """Within each head, even rows first, then odd ones: [heads * D, ...] -> the same shape."""
    by_pair = weight.view(num_heads, weight.shape[0] // num_heads // 2, 2, *weight.shape[1:])
    return by_pair.transpose(1, 2).reshape(weight.shape)
