"""Weights in a GGUF file, converted to the serving dtype, under Hugging Face's names.

llama.cpp orders the rows of Llama's q and k projections so that rotary pairs are neighbours; Hugging Face pairs the
first half of a head with the second. Rows are put back into Hugging Face's order here, so that models know one form.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor

from ...runtime.errors import ConfigError
from ...runtime.model_files.gguf import GGUFFile, dequantize

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
_LAYER_PATTERN: Final = re.compile(r"model\.layers\.(\d+)\.(.+)\.(weight|bias)")
_NOT_WEIGHTS: Final = frozenset({"rope_freqs.weight"})  # rope scaling, read by model_files
_ROWS_AT_A_TIME: Final = 4096
"""Rows converted to float32 before they go to the serving dtype: bounds the temporary for a large embedding."""


class GGUFStore:
    """The tensors of one GGUF file of a Llama-shaped model."""

    def __init__(self, path: Path, spec: ModelSpec) -> None:
        """Open the file.

        Raises:
            ConfigError: it is truncated or damaged.
        """
        self._file = GGUFFile(path)
        self._num_heads, self._num_kv_heads = spec.num_heads, spec.num_kv_heads
        hf_names = dict(_GLOBAL_NAMES)
        for layer in range(spec.num_layers):
            for hf, gguf in _LAYER_NAMES.items():
                for part in ("weight", "bias"):
                    hf_names[f"model.layers.{layer}.{hf}.{part}"] = f"blk.{layer}.{gguf}.{part}"
        self._stored_as = {hf: gguf for hf, gguf in hf_names.items() if gguf in self._file.tensors}

    def names(self) -> set[str]:
        """See `TensorStore`; tensors without a name in Hugging Face's layout keep their own."""
        unknown = set(self._file.tensors) - set(self._stored_as.values()) - _NOT_WEIGHTS
        return set(self._stored_as) | unknown

    def shape(self, name: str, wanted: tuple[int, ...]) -> tuple[int, ...] | None:
        """See `TensorStore`."""
        stored_as = self._stored_as.get(name)
        return None if stored_as is None else self._file.tensors[stored_as].shape

    def read(self, name: str, out: Tensor) -> None:
        """See `TensorStore`."""
        info = self._file.tensors[self._stored_as[name]]
        raw = self._file.raw(info)
        try:
            if out.ndim == 1:  # one row, whose bytes are no rows
                out.copy_(torch.from_numpy(dequantize(info, raw)))
            else:
                for start in range(0, out.shape[0], _ROWS_AT_A_TIME):
                    rows = slice(start, start + _ROWS_AT_A_TIME)
                    out[rows].copy_(torch.from_numpy(dequantize(info, raw[rows])))
        except ConfigError as error:
            raise ConfigError(f"{self._file.path}: {error}") from None
        match = _LAYER_PATTERN.fullmatch(name)
        if match and match[2] == "self_attn.q_proj":
            out.copy_(_pairs_apart(out, self._num_heads))
        elif match and match[2] == "self_attn.k_proj":
            out.copy_(_pairs_apart(out, self._num_kv_heads))

    def describe(self, name: str) -> str:
        """See `TensorStore`."""
        return str(self._file.path)


def _pairs_apart(weight: Tensor, num_heads: int) -> Tensor:
    """Within each head, even rows first, then odd ones: [heads * D, ...] -> the same shape."""
    by_pair = weight.view(num_heads, weight.shape[0] // num_heads // 2, 2, *weight.shape[1:])
    return by_pair.transpose(1, 2).reshape(weight.shape)
