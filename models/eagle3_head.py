"""`Eagle3Spec`: an EAGLE-3 draft head, read from a folder in the file forms of SGLang, vLLM and speculators.

The head is one decoder layer that predicts the token after next from the target's features, which are residual streams
of three of its layers (Li et al. 2025, EAGLE-3):

    f = fc(features of token t)                                     fc.weight [hidden, 3 * target's hidden]
    x = [input_layernorm(embedding of token t + 1), hidden_norm(f)]  q, k and v have 2 * hidden inputs
    y = f + attention(x);  y = y + mlp(post_attention_layernorm(y))
    logits = lm_head(norm(y))                                       over `draft_vocab_size` tokens; y is the next f

Names of tensors, each with or without `model.` before it: the layer is `midlayer` (SpecForge, SGLang) or `layers.0`
(vLLM, speculators). `d2t` [draft_vocab_size] is added to the id of a draft to get the target's id; `t2d` says the same
and is not read. A head without `embed_tokens` uses the target's table, one without `lm_head` the target's head.

Layers of features: `eagle_config` of SpecForge counts the layers whose *outputs* are the features, as SGLang reads it;
a list at the top level, of speculators, those whose *inputs* they are, as vLLM reads it. Without a list both take the
inputs of layers 2, L / 2 and L - 3.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec

from ..runtime.errors import ConfigError
from .fields import Fields
from .hf.hf_config import read_layers
from .model_files import read_json
from .spec.model_spec import ModelSpec
from .weight_files.needed_tensors import projection_sizes
from .weight_files.safetensors_header import read_headers

if TYPE_CHECKING:
    from .weight_files.stored_forms import HeaderEntry

_ARCHITECTURES: Final = frozenset(
    {"LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "Eagle3Speculator", "Eagle3DraftModel"}
)
_LAYERS: Final = ("midlayer", "layers.0")
_PLAIN: Final = ("F32", "F16", "BF16")
_IDS: Final = ("I32", "I64")
_LIST: Final = "eagle_aux_hidden_state_layer_ids"


class Eagle3Spec(msgspec.Struct, frozen=True, kw_only=True):
    """An EAGLE-3 head that belongs to a target.

    Attributes:
        layer: the head's layer as a model of one layer, with the vocabulary of the target.
        draft_vocab_size: the tokens that it can draft.
        feature_layers: ascending; n stands for the target's residual stream after its first n layers.
        feature_size: the target's hidden size.
        body: "model.", if the names of the head's tensors begin so, else "".
        beside: the same for `lm_head` and `d2t`.
        layer_name: of the module of the layer, with `body`.
        has_embedding, has_head: whether it has its own; if not, the target's is used.
        maps_tokens: whether it has `d2t`; if not, a draft's id is the target's.
        norm_before_residual: y starts from hidden_norm(f) in place of f.
    """

    layer: ModelSpec
    draft_vocab_size: int
    feature_layers: tuple[int, ...]
    feature_size: int
    body: str
    beside: str
    layer_name: str
    has_embedding: bool
    has_head: bool
    maps_tokens: bool
    norm_before_residual: bool = False

    @property
    def num_features(self) -> int:
        """Numbers of the features of a token."""
        return self.feature_size * len(self.feature_layers)


def is_eagle3_head(folder: Path) -> bool:
    """Whether a folder's configuration is that of an EAGLE-3 head: some name it, others only have its vocabulary."""
    path = folder / "config.json"
    config = read_json(path) if path.exists() else {}
    names = config.get("architectures")
    named = isinstance(names, list) and any(isinstance(one, str) and one in _ARCHITECTURES for one in names)
    return named or config.get("speculators_model_type") == "eagle3" or "draft_vocab_size" in config


def read_eagle3_head(folder: Path, target: ModelSpec) -> Eagle3Spec:
    """The head in `folder`, which must belong to `target`.

    Raises:
        ConfigError: a file, field or tensor is missing or wrong, the head needs something that is not implemented, or
            it belongs to another target.
    """
    path = folder / "config.json"
    config = read_json(path)
    fields = Fields(path, config)
    layer_config, prefix = _layer_config(fields)
    layer = read_layers(folder, layer_config, prefix)
    if layer.quantization is not None:
        raise ConfigError(
            f"{path}: the head is quantized ({layer.quantization.method}), and only plain ones are read; use the "
            "original weights"
        )
    layer = msgspec.structs.replace(layer, tie_word_embeddings=False, eos_token_ids=())
    entries = {name: entry for file in read_headers(folder) for name, entry in file.entries.items()}
    body = "model." if "model.fc.weight" in entries else ""
    beside = "model." if {"model.lm_head.weight", "model.d2t"} & entries.keys() else ""
    names = [f"{body}{one}" for one in _LAYERS if f"{body}{one}.self_attn.q_proj.weight" in entries]
    if not names:
        raise ConfigError(
            f"{folder}: has neither {_LAYERS[0]}.self_attn.q_proj.weight nor {_LAYERS[1]}.self_attn.q_proj.weight, "
            "so it is no EAGLE-3 head; give a folder with one, or use --speculative draft for a draft model"
        )
    spec = Eagle3Spec(
        layer=layer,
        draft_vocab_size=fields.integer("draft_vocab_size", 1, layer.vocab_size, default=layer.vocab_size),
        feature_layers=_feature_layers(fields, target),
        feature_size=fields.integer("target_hidden_size", 1, 1 << 20, default=layer.hidden_size),
        body=body,
        beside=beside,
        layer_name=names[0],
        has_embedding=f"{body}embed_tokens.weight" in entries,
        has_head=f"{beside}lm_head.weight" in entries,
        maps_tokens=f"{beside}d2t" in entries,
        norm_before_residual=fields.boolean("norm_before_residual", default=False),
    )
    _check_belongs(folder, spec, target)
    _check_tensors(folder, spec, entries)
    return spec


def _layer_config(fields: Fields) -> tuple[dict[str, Any], str]:
    """The configuration of the layer as that of a Llama model, and the prefix of its fields in messages."""
    nested = fields.get("transformer_layer_config")  # of speculators
    config, prefix = (nested, "transformer_layer_config.") if isinstance(nested, Mapping) else (fields, "")
    values: dict[str, Any] = {str(name): config.get(name) for name in config}
    own = Fields(fields.path, values, prefix)
    kind = own.text("model_type", default="llama")
    if kind != "llama":
        raise own.error("model_type", kind, "but only heads with a Llama layer are supported")
    if (count := own.integer("num_hidden_layers", 1, 64, default=1)) != 1:
        raise own.error("num_hidden_layers", count, "but only heads with one layer are supported")
    for name in ("norm_before_fc", "parallel_drafting"):
        if fields.get(name):
            raise fields.error(name, fields.get(name), "which is not supported; use a head without it")
    eagle = fields.get("eagle_config")
    if isinstance(eagle, Mapping) and eagle.get("use_aux_hidden_state") is False:
        raise fields.error(
            "eagle_config",
            dict(eagle),
            "but heads without features of three layers (EAGLE-1 and 2) are not supported",
        )
    return values | {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": 1,
    }, prefix


def _feature_layers(fields: Fields, target: ModelSpec) -> tuple[int, ...]:
    eagle = fields.get("eagle_config")
    last = target.num_layers
    if isinstance(eagle, Mapping) and eagle.get(_LIST):
        inner = Fields(fields.path, {_LIST: eagle[_LIST]}, "eagle_config.")
        outputs = inner.integers(_LIST, 0, last - 2)
        found, owner = tuple(one + 1 for one in outputs), inner
    elif fields.get(_LIST):
        found, owner = fields.integers(_LIST, 1, last - 1), fields
    else:
        found, owner = (2, last // 2, last - 3), fields
    if len(found) != 3 or not 1 <= found[0] < found[1] < found[2]:
        raise owner.error(
            _LIST,
            owner.get(_LIST),
            f"expected three layers of the target in ascending order, which has {last}; use a head of this model",
        )
    return found


def _check_belongs(folder: Path, spec: Eagle3Spec, target: ModelSpec) -> None:
    """Check sizes that head and target share."""
    same = [("the target's hidden size", spec.feature_size, target.hidden_size)]
    same.append(("vocab_size", spec.layer.vocab_size, target.vocab_size))
    if not spec.has_embedding or not spec.has_head:
        same.append(("hidden_size", spec.layer.hidden_size, target.hidden_size))
    if not spec.has_head:
        same.append(("draft_vocab_size, without lm_head,", spec.draft_vocab_size, target.vocab_size))
    for name, found, wanted in same:
        if found != wanted:
            raise ConfigError(
                f"{folder}: {name} is {found}, but the target model has {wanted}; use a head that was trained for this "
                "model"
            )
    scaled = target.form.embedding_scale != 1.0 and not spec.has_embedding
    if target.streams.altup is not None or not target.causal or target.form.residual_scale != 1.0 or scaled:
        raise ConfigError(
            f"{folder}: the target is {target.model_type}, whose residual stream or embedding is not the one that "
            "heads are trained with; use --speculative suffix"
        )
    if spec.draft_vocab_size != target.vocab_size and not spec.maps_tokens:
        raise ConfigError(
            f"{folder}: draft_vocab_size is {spec.draft_vocab_size} of {target.vocab_size}, but there is no tensor "
            "'d2t', which says the tokens; download the head again"
        )


def _check_tensors(folder: Path, spec: Eagle3Spec, entries: Mapping[str, HeaderEntry]) -> None:
    expected = dict(needed_tensors(spec))
    for name, (shape, is_ids) in expected.items():
        entry = entries.get(name)
        if entry is None:
            raise ConfigError(
                f"{folder}: tensor {name!r} is missing; download the head again, or check that config.json belongs "
                "to it"
            )
        if entry.shape != shape:
            raise ConfigError(
                f"{folder}: tensor {name!r} has the shape {list(entry.shape)}, but the configuration asks for "
                f"{list(shape)}; the weights and the configuration do not belong together"
            )
        if entry.dtype_name not in (_IDS if is_ids else _PLAIN):
            raise ConfigError(
                f"{folder}: tensor {name!r} has the dtype {entry.dtype_name}, but heads must have "
                f"{', '.join(_IDS if is_ids else _PLAIN)}; use the original weights"
            )
    if left := {name for name in entries if not name.endswith(("t2d", ".inv_freq"))} - set(expected):
        raise ConfigError(
            f"{folder}: unexpected tensor {min(left)!r} ({len(left)} in all); the weights are those of another kind of "
            "head than the configuration says"
        )


def needed_tensors(spec: Eagle3Spec) -> list[tuple[str, tuple[tuple[int, ...], bool]]]:
    """Name, shape, and whether it holds ids, of each tensor that is read."""
    layer, name, body = spec.layer, spec.layer_name, spec.body
    hidden, inner = layer.hidden_size, layer.intermediate_size
    shapes: dict[str, tuple[int, ...]] = {f"{body}fc.weight": (hidden, spec.num_features)}
    for part, rows in zip("qkv", projection_sizes(layer, 0), strict=True):
        shapes[f"{name}.self_attn.{part}_proj.weight"] = (rows, 2 * hidden)
        if layer.biases.qkv:
            shapes[f"{name}.self_attn.{part}_proj.bias"] = (rows,)
    shapes[f"{name}.self_attn.o_proj.weight"] = (hidden, layer.num_heads * layer.head_dim)
    if layer.biases.attention_out:
        shapes[f"{name}.self_attn.o_proj.bias"] = (hidden,)
    for part, shape in (("gate", (inner, hidden)), ("up", (inner, hidden)), ("down", (hidden, inner))):
        shapes[f"{name}.mlp.{part}_proj.weight"] = shape
        if layer.biases.mlp:
            shapes[f"{name}.mlp.{part}_proj.bias"] = shape[:1]
    for norm in ("input_layernorm", "hidden_norm", "post_attention_layernorm"):
        shapes[f"{name}.{norm}.weight"] = (hidden,)
    shapes[f"{body}norm.weight"] = (hidden,)
    if spec.has_embedding:
        shapes[f"{body}embed_tokens.weight"] = (layer.vocab_size, hidden)
    if spec.has_head:
        shapes[f"{spec.beside}lm_head.weight"] = (spec.draft_vocab_size, hidden)
    found = [(one, (shape, False)) for one, shape in shapes.items()]
    if spec.maps_tokens:
        found.append((f"{spec.beside}d2t", ((spec.draft_vocab_size,), True)))
    return found
