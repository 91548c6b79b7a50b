"""`Family`: what the engine must know of one `model_type` to read its files and to build it.

A family is one file of this folder: the fields of its config.json, the keys and tensor names of its GGUF files, the
structure that computes it, and the names under which it is published. `registry` collects the files. A reader returns
the fields of `ModelSpec` that its family adds or changes; a feature that changes the computation and is not implemented
is refused by name.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from ..fields import Fields

if TYPE_CHECKING:
    from ..gguf.gguf_file import GGUFFile

Facts = dict[str, Any]
"""The fields of `ModelSpec` that a family adds or changes."""

LAYER_NAMES: Final[Mapping[str, str]] = {
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
"""Modules of a layer of Llama, and their names in a file."""

QK_NORM_NAMES: Final[Mapping[str, str]] = {
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
}


_GROUP: Final = re.compile(r"\(([^()]*)\)")

RMS_NORM_EPS: Final = "attention.layer_norm_rms_epsilon"
LAYER_NORM_EPS: Final = "attention.layer_norm_epsilon"


class GGUF(NamedTuple):
    """How to read one GGUF architecture.

    Attributes:
        facts: reads the facts that are not common to all; called with the architecture, the prefix of its keys.
        names: modules of a layer, and their names in a file.
        partial_rotary: only a part of each head may rotate.
        has_experts: the keys of experts are read.
        has_own_heads: `facts` reads the shape of heads, too.
        neighbors: the rows of q and k are ordered so that rotary pairs are adjacent; Hugging Face pairs the halves.
        offset_norms: 1 was added to the weights of norms, except to those within a layer with a state.
        tiled_values: the value heads of delta nets are ordered so that the first ones of all key heads come first;
            Hugging Face has those of each key head together.
        norm_eps: the key of the norms' eps.
        of_tensors: adds the facts that only the tensors show.
    """

    facts: Callable[[Fields, str], Facts]
    names: Mapping[str, str] = LAYER_NAMES
    partial_rotary: bool = False
    has_experts: bool = False
    has_own_heads: bool = False
    neighbors: bool = False
    offset_norms: bool = False
    tiled_values: bool = False
    norm_eps: str = RMS_NORM_EPS
    of_tensors: Callable[[GGUFFile, Facts], Facts] | None = None


class Family(NamedTuple):
    """One `model_type`.

    Attributes:
        model_type: the field of config.json.
        structure: the module of `model_runner/structures` that builds the model.
        architecture: the class in transformers; of an encoder, how the names of its classes begin.
        read: reads the fields of config.json beyond the common ones.
        published: models of this type as their makers call them, for docs/models.md; encoders have none.
        gguf: the readers of its GGUF files, by architecture.
        stored_as: the architecture of another family, whose GGUF files may hold this one.
        activation: the only supported one.
        old_activation: another name of it, in files of makers who meant it.
        tied: `tie_word_embeddings` of a file without it.
        head_dim: of a file without it; None: hidden size divided by heads.
        body: the class without an output head; "": that of `architecture`.
        norm_eps: the field of the norms' eps.
        renamed: fields of the family that stand for common ones, which they override.
        is_encoder: the model is no decoder.
        defaults: values of missing fields.
        tensors: patterns of names of tensors in folders, and what they are replaced by to make the engine's names; by
            nothing where the tensor is not read. Beside literal text they have anchors and groups only, so that
            `stored_names` can invert them.
    """

    model_type: str
    structure: str
    architecture: str
    read: Callable[[Fields], Facts]
    published: str = ""
    gguf: Mapping[str, GGUF] = {}
    stored_as: str = ""
    activation: str = "silu"
    old_activation: str = ""
    tied: bool = False
    head_dim: int | None = None
    body: str = ""
    norm_eps: str = "rms_norm_eps"
    renamed: Mapping[str, str] = {}
    is_encoder: bool = False
    defaults: Mapping[str, object] = {}
    tensors: Mapping[str, str] = {}

    def with_common_names(self, config: Mapping[str, object]) -> Mapping[str, object]:
        """A configuration in which the common fields have the values of the family's own, or its defaults."""
        config = {
            **config,
            **{name: value for name, value in self.defaults.items() if config.get(name) is None},
        }
        given = {name: config[own] for own, name in self.renamed.items() if config.get(own) is not None}
        return {**config, **given}

    def tensor_name(self, name: str) -> str:
        """The engine's name of a tensor of a folder; empty: it is not read."""
        for pattern, replacement in self.tensors.items():
            name = re.sub(pattern, replacement, name)
        return name

    @property
    def stored_names(self) -> tuple[tuple[str, str], ...]:
        """Patterns of the engine's names, and what names in files have instead: the inverse of `tensors`."""
        found = []
        for pattern, replacement in self.tensors.items():
            old, new = re.escape(replacement), pattern.strip("^$")
            for number, group in enumerate(_GROUP.findall(pattern), 1):
                old = old.replace(rf"\\{number}", f"({group})")
                new = new.replace(f"({group})", rf"\{number}", 1)
            if replacement:
                found.append((old, new.replace(r"\.", ".")))
        return tuple(found)

    def classes(self, task: str) -> tuple[str, ...]:
        """The classes in transformers with the weights for a task; the first one is the usual one."""
        stem = self.architecture.removesuffix("ForCausalLM")
        body = self.body or f"{stem}Model"
        match task:
            case "embed":
                return self.architecture, body
            case "score":
                inner = body.removesuffix("Model")
                names = (
                    f"{inner}ForSequenceClassification",
                    f"{stem}ForSequenceClassification",
                    f"{stem}ForRewardModel",
                )
                return (*dict.fromkeys(names), self.architecture)
            case _:
                return (self.architecture,)
