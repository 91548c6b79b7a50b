"""`MTPSpec`: the layer with which a checkpoint predicts further tokens (DeepSeek-V3, DeepSeek-AI 2024, section 2.2).

    feature of token p, after the model's norm -- hidden_norm -----.
                                                                   +-- projection, layer, head_norm, the model's head
    embedding of token p + 1 -------------------- embedding_norm --'

The layer is one of the model's own kind, with attention over its own keys and values. Its logits predict token p + 2.
Its output is the feature of token p + 1 for the next draft. It shares embedding and head with the model.
"""

from __future__ import annotations

from typing import Final

import msgspec

_COPIES: Final = (".embed_tokens.weight", ".shared_head.head.weight")
"""Tensors of some files that equal those of the model."""


class MTPSpec(msgspec.Struct, frozen=True, kw_only=True):
    """See the module. Names are those of modules in the checkpoint.

    Attributes:
        layers: the layer is `<layers>.<number>`.
        number: see there.
        feeds_normed: the next draft's feature is the layer's output after `head_norm`, not before.
        is_used: the engine reads the layer and drafts with it; False: it has no memory and no KV.
        feature_token_bytes: memory of the features of pages, by tokens; known where it is used.
    """

    layers: str
    number: int
    projection: str
    embedding_norm: str
    hidden_norm: str
    head_norm: str
    feeds_normed: bool = False
    is_used: bool = False
    feature_token_bytes: int = 0

    @property
    def layer(self) -> str:
        """The module of the layer."""
        return f"{self.layers}.{self.number}"

    @property
    def norms(self) -> tuple[str, str, str]:
        """The norms beside the layer's own."""
        return self.embedding_norm, self.hidden_norm, self.head_norm

    def takes(self, name: str) -> bool:
        """Whether a tensor is one of these modules'."""
        modules = self.layer, self.projection, *self.norms
        return name.startswith(tuple(f"{module}." for module in modules)) and not name.endswith(_COPIES)


def mtp_after(num_layers: int, *, feeds_normed: bool = False) -> MTPSpec:
    """DeepSeek's and GLM's form: a further layer with the other modules in it; Qwen's in GGUF files, too."""
    name = f"model.layers.{num_layers}"
    return MTPSpec(
        layers="model.layers",
        number=num_layers,
        projection=f"{name}.eh_proj",
        embedding_norm=f"{name}.enorm",
        hidden_norm=f"{name}.hnorm",
        head_norm=f"{name}.shared_head.norm",
        feeds_normed=feeds_normed,
    )


QWEN_MTP: Final = MTPSpec(
    layers="mtp.layers",
    number=0,
    projection="mtp.fc",
    embedding_norm="mtp.pre_fc_norm_embedding",
    hidden_norm="mtp.pre_fc_norm_hidden",
    head_norm="mtp.norm",
    feeds_normed=True,
)
"""Names of Qwen3-Next and Qwen3.5."""
