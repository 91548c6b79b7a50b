"""Pairs of GGUF files, see `mmproj_files`, of LLaVA, LLaVA-NeXT, InternVL, Mistral 3, Pixtral, Qwen2-VL and
Qwen2.5-VL.

The names of tensors are those of the gguf package, the changes of their values those of llama.cpp's converters.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tests.mmproj_files import Arrays, add_keys, finish

Array = npt.NDArray[Any]


class Form(NamedTuple):
    """The converter's names for a family: architecture of the language model, projector, and tokens by id."""

    text: str
    projector: str
    tokens: dict[int, str]


PIXTRAL_TOKENS = {91: "[IMG_BREAK]", 92: "[IMG_END]", 93: "[IMG]"}
QWEN_TOKENS = {91: "<|vision_start|>", 92: "<|vision_end|>", 93: "<|image_pad|>"}
FORMS = {
    "llava": Form("LLAMA", "mlp", {93: "<image>"}),
    "llava_next": Form("LLAMA", "mlp", {93: "<image>"}),
    "internvl": Form("QWEN2", "internvl", {91: "<img>", 92: "</img>", 93: "<IMG_CONTEXT>"}),
    "mistral3": Form("MISTRAL3", "pixtral", PIXTRAL_TOKENS),
    "pixtral": Form("LLAMA", "pixtral", PIXTRAL_TOKENS),
    "qwen2_vl": Form("QWEN2VL", "qwen2vl_merger", QWEN_TOKENS),
    "qwen2_5_vl": Form("QWEN2VL", "qwen2.5vl_merger", QWEN_TOKENS),
}


def write_tower_pair(folder: Path, to: Path, kind: str = "F32", without: str = "-", **keys: Any) -> Path:
    """Write `model.gguf` and `mmproj-model.gguf` into `to`; returns the path of the first.

    Args:
        kind: of the tower's matrices.
        without: a part of the names of the tower's tensors that are left out.
        keys: of the tower's metadata, without `clip.`, dots as `__`; they replace the right ones.
    """
    from safetensors.torch import load_file

    config = json.loads((folder / "config.json").read_text())
    if config["vision_config"].get("model_type") == "pixtral" and config["model_type"] == "llava":
        config["model_type"] = "pixtral"
    tensors = {n: t.float().numpy() for n, t in load_file(folder / "model.safetensors").items()}
    towers = ("vision_tower.", "multi_modal_projector.", "visual.", "image_newline", "model.image_newline")
    of_tower = {n: a for n, a in tensors.items() if n.startswith(towers)}
    to.mkdir(exist_ok=True)
    _write_text(to / "model.gguf", config, {n: a for n, a in tensors.items() if n not in of_tower})
    _write_tower(folder, to / "mmproj-model.gguf", config, of_tower, kind, without, keys)
    return to / "model.gguf"


def _write_text(path: Path, config: dict[str, Any], tensors: Arrays) -> None:
    import gguf

    text, form = config["text_config"], FORMS[config["model_type"]]
    arch = gguf.MODEL_ARCH[form.text]
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[arch])
    writer.add_context_length(text["max_position_embeddings"])
    writer.add_embedding_length(text["hidden_size"])
    writer.add_block_count(text["num_hidden_layers"])
    writer.add_feed_forward_length(text["intermediate_size"])
    writer.add_head_count(text["num_attention_heads"])
    writer.add_head_count_kv(text["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(text["rms_norm_eps"])
    if text.get("head_dim"):
        writer.add_key_length(text["head_dim"])
        writer.add_value_length(text["head_dim"])
    rope = text["rope_parameters"]
    writer.add_rope_freq_base(rope["rope_theta"])
    if sections := rope.get("mrope_section"):
        writer.add_rope_dimension_sections([*sections, 0])
    tokens = [form.tokens.get(n, f"<unused{n}>") for n in range(text["vocab_size"])]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(tokens)
    writer.add_eos_token_id(2)
    names = gguf.get_tensor_name_map(arch, text["num_hidden_layers"])
    for name, array in tensors.items():
        hf = name.replace("language_model.model.", "model.").replace("language_model.lm_head", "lm_head")
        if form.text in ("LLAMA", "MISTRAL3") and ("q_proj" in name or "k_proj" in name):
            array = _pairs(array, text["num_attention_heads" if "q_proj" in name else "num_key_value_heads"])
        writer.add_tensor(_stored(names, hf), np.ascontiguousarray(array))
    finish(writer)


def _write_tower(
    folder: Path,
    path: Path,
    config: dict[str, Any],
    tensors: Arrays,
    kind: str,
    without: str,
    keys: dict[str, Any],
) -> None:
    import gguf

    tower, outer = config["vision_config"], config["model_type"]
    images = json.loads((folder / "preprocessor_config.json").read_text())
    inner, layers = tower.get("intermediate_size", 0), tower.get("num_hidden_layers", tower.get("depth"))
    if outer.startswith("llava"):
        layers -= 1  # the converter leaves out the last one
    writer = gguf.GGUFWriter(path, "clip")
    writer.add_type("mmproj")
    activation = tower.get("hidden_act")
    values: dict[str, Any] = {
        "has_vision_encoder": True,
        "projector_type": FORMS[outer].projector,
        "use_gelu": activation == "gelu" or None,
        "use_silu": activation == "silu" or None,
        "vision__projection_dim": 768 if outer.startswith("llava") else config["text_config"]["hidden_size"],
        "vision__embedding_length": tower.get("embed_dim", tower["hidden_size"]),
        "vision__feed_forward_length": inner,
        "vision__block_count": layers,
        "vision__attention__head_count": tower.get("num_attention_heads", tower.get("num_heads")),
        "vision__attention__layer_norm_epsilon": tower.get("layer_norm_eps", 1e-6),
        "vision__image_size": _side(tower.get("image_size", 560)),
        "vision__patch_size": _side(tower["patch_size"]),
        "vision__image_mean": images["image_mean"],
        "vision__image_std": images["image_std"],
    }
    if outer.startswith("llava"):
        values["has_llava_projector"] = True
    if outer == "llava_next":
        values["vision__image_grid_pinpoints"] = [
            side for each in config["image_grid_pinpoints"] for side in each
        ]
        values["vision__mm_patch_merge_type"] = "spatial_unpad"
    elif outer == "internvl":
        values["vision__projector__scale_factor"] = int(1 / config["downsample_ratio"])
        values["vision__preproc_max_tiles"] = images.get("max_patches", 12)
    elif outer in ("mistral3", "pixtral"):
        values["vision__spatial_merge_size"] = config.get("spatial_merge_size")
        values["vision__attention__layer_norm_epsilon"] = 1e-5
        writer.add_tensor(
            "v.token_embd.img_break", np.zeros(config["text_config"]["hidden_size"], np.float32)
        )
    elif outer == "qwen2_5_vl":
        values["vision__n_wa_pattern"] = tower["fullatt_block_indexes"][0] + 1
        values["vision__window_size"] = tower["window_size"]
    add_keys(writer, values | keys)
    form = gguf.GGMLQuantizationType[kind]
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.MMPROJ, 8)
    for name, array in tensors.items():
        if outer in ("mistral3", "pixtral") and name.endswith(("q_proj.weight", "k_proj.weight")):
            array = _pairs(array, tower["num_attention_heads"])
        for stored, part in _parts(names, outer, layers, name, array):
            if without in stored:
                continue
            if part.ndim != 2 or "embd" in stored or part.shape[1] % 32:
                writer.add_tensor(stored, np.ascontiguousarray(part))
            else:
                writer.add_tensor(stored, gguf.quantize(part, form), raw_dtype=form)
    finish(writer)


def _parts(names: Any, outer: str, layers: int, name: str, array: Array) -> Iterator[tuple[str, Array]]:
    """A tensor as the converter of its family stores it: some are left out, some become several."""
    if outer.startswith("qwen"):
        if "patch_embed" in name:
            yield "v.patch_embd.weight", array[:, :, 0]
            yield "v.patch_embd.weight.1", array[:, :, 1]
        elif ".qkv." in name:
            for which, part in zip("qkv", np.split(array, 3), strict=True):
                yield _stored(names, name.replace("qkv", which)), part
        else:
            yield _stored(names, name), array
    elif outer.startswith("llava"):
        if name.endswith("image_newline"):
            yield "model.image_newline", array
        elif name.startswith("multi_modal_projector."):
            yield (
                name.replace("multi_modal_projector.linear_1", "mm.0").replace(
                    "multi_modal_projector.linear_2", "mm.2"
                ),
                array,
            )
        elif "post_layernorm" not in name and f".layers.{layers}." not in name:
            yield _stored(names, name.replace("vision_tower.", "vision_tower.vision_model.")), array
    elif outer == "internvl":
        for hf, original in (("layer_norm", "0"), ("linear_1", "1"), ("linear_2", "3")):
            name = name.replace(f"multi_modal_projector.{hf}", f"mlp1.{original}")
        plain = "lambda" in name or "position" in name
        yield _stored(names, ("model." if "vision" in name else "") + name + ".weight" * plain), array
    else:
        yield _stored(names, name), array


def _stored(names: Any, name: str) -> str:
    stored = names.get_name(name, try_suffixes=(".weight", ".bias"))
    assert stored is not None, name
    return str(stored)


def _pairs(array: Array, num_heads: int) -> Array:
    """The pairs that rotate together side by side, as llama.cpp turns them."""
    found: Array = array.reshape(num_heads, 2, -1, array.shape[1]).swapaxes(1, 2).reshape(array.shape)
    return found


def _side(value: Any) -> int:
    return int(value[0] if isinstance(value, list) else value)
