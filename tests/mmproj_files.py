"""Folders as llama.cpp stores them: a GGUF file of the language model, and a `mmproj` file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Arrays = dict[str, npt.NDArray[Any]]
_TOWERS = ("model.vision_model.", "model.connector.", "vision_tower.", "multi_modal_projector.")


def write_pair(folder: Path, to: Path, kind: str = "F32", *, swapped: bool = False, **keys: Any) -> Path:
    """Write `model.gguf` and `mmproj-model.gguf` into `to`; returns the path of the first.

    Args:
        kind: of the tower's matrices.
        swapped: the layers of an MLP have each other's names, as in files from before May 2025.
        keys: of the tower's metadata, without `clip.`, dots as `__`; they replace the right ones.
    """
    from safetensors.torch import load_file

    config = json.loads((folder / "config.json").read_text())
    tensors = {n: t.float().numpy() for n, t in load_file(folder / "model.safetensors").items()}
    of_tower = {n: a for n, a in tensors.items() if n.startswith(_TOWERS)}
    to.mkdir(exist_ok=True)
    _write_text(folder, to / "model.gguf", config, {n: a for n, a in tensors.items() if n not in of_tower})
    write_tower(folder, to / "mmproj-model.gguf", config, of_tower, kind, swapped, keys)
    return to / "model.gguf"


def _write_text(folder: Path, path: Path, config: dict[str, Any], tensors: Arrays) -> None:
    import gguf

    text, is_gemma = config["text_config"], config["model_type"] == "gemma3"
    writer = gguf.GGUFWriter(path, "gemma3" if is_gemma else "llama")
    writer.add_context_length(text["max_position_embeddings"])
    writer.add_embedding_length(text["hidden_size"])
    writer.add_block_count(text["num_hidden_layers"])
    writer.add_feed_forward_length(text["intermediate_size"])
    writer.add_head_count(text["num_attention_heads"])
    writer.add_head_count_kv(text["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(text["rms_norm_eps"])
    rope = text["rope_parameters"]
    writer.add_rope_freq_base(rope.get("full_attention", rope)["rope_theta"])
    if is_gemma:
        writer.add_key_length(text["head_dim"])
        writer.add_value_length(text["head_dim"])
        writer.add_sliding_window(text["sliding_window"])
        writer.add_sliding_window_pattern(2)
    _write_tokens(writer, folder, text["vocab_size"])
    arch = gguf.MODEL_ARCH.GEMMA3 if is_gemma else gguf.MODEL_ARCH.LLAMA
    names = gguf.get_tensor_name_map(arch, text["num_hidden_layers"])
    for name, array in tensors.items():
        hf = name.replace("model.text_model.", "model.").replace("language_model.model.", "model.")
        if is_gemma and name.endswith("norm.weight"):
            array = array + 1
        elif not is_gemma and ("q_proj" in name or "k_proj" in name):  # pairs of rotary side by side
            heads = text["num_attention_heads" if "q_proj" in name else "num_key_value_heads"]
            array = array.reshape(heads, 2, -1, array.shape[1]).swapaxes(1, 2).reshape(array.shape)
        stored = names.get_name(hf, try_suffixes=(".weight", ".bias"))
        assert stored is not None, name
        writer.add_tensor(stored, np.ascontiguousarray(array))
    finish(writer)


def _write_tokens(writer: Any, folder: Path, vocab_size: int) -> None:
    import gguf

    path = folder / "tokenizer.json"
    tokens = [f"<unused{n}>" for n in range(vocab_size)]
    special = {"<image>": 93, "<fake_token_around_image>": 94, "<global-img>": 95}
    if "gemma3" in (folder / "config.json").read_text():
        special = {"<image_soft_token>": 93, "<start_of_image>": 94, "<end_of_image>": 95}
    if path.exists():
        core = json.loads(path.read_text())
        special = {each["content"]: each["id"] for each in core["added_tokens"]}
        for token, number in core["model"]["vocab"].items():
            tokens[number] = token
        # The writer refuses a list without merges; no text has these bytes.
        tokens[core["model"]["vocab"]["ÿ"]] = "þý"
        writer.add_token_merges(["þ ý"])
        named = json.loads((folder / "tokenizer_config.json").read_text())
        writer.add_chat_template(named["chat_template"])
        writer.add_eos_token_id(special[named["eos_token"]])
    for token, number in special.items():
        tokens[number] = token
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types(
        [gguf.TokenType.CONTROL if token in special else gguf.TokenType.NORMAL for token in tokens]
    )


def write_tower(
    folder: Path,
    path: Path,
    config: dict[str, Any],
    tensors: Arrays,
    kind: str,
    swapped: bool,
    keys: dict[str, Any],
) -> None:
    """Write the `mmproj` file of a folder's tower, from its tensors in float32; see `write_pair`."""
    import gguf

    tower = config["vision_config"]
    images = json.loads((folder / "preprocessor_config.json").read_text())
    writer = gguf.GGUFWriter(path, "clip")
    writer.add_type("mmproj")
    values = {
        "has_vision_encoder": True,
        "projector_type": "gemma3" if config["model_type"] == "gemma3" else "idefics3",
        "use_gelu": True,
        "vision__projection_dim": config["text_config"]["hidden_size"],
        "vision__embedding_length": tower["hidden_size"],
        "vision__feed_forward_length": tower["intermediate_size"],
        "vision__block_count": tower["num_hidden_layers"],
        "vision__attention__head_count": tower["num_attention_heads"],
        "vision__attention__layer_norm_epsilon": tower.get("layer_norm_eps", 1e-5),
        "vision__image_size": tower["image_size"],
        "vision__patch_size": tower["patch_size"],
        "vision__projector__scale_factor": config.get("scale_factor", 2),
        "vision__preproc_image_size": images["size"].get("longest_edge"),
        "vision__image_mean": images["image_mean"],
        "vision__image_std": images["image_std"],
    } | keys
    add_keys(writer, values)
    # Layers of connectors have numbers, too, and a tower may have fewer.
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.MMPROJ, max(8, tower["num_hidden_layers"]))
    form = gguf.GGMLQuantizationType[kind]
    for name, array in tensors.items():
        if "soft_emb_norm" in name:
            array = array + 1
        known = name.replace("vision_tower.", "vision_tower.vision_model.").replace("_weight", ".weight")
        stored = names.get_name(known, try_suffixes=(".weight", ".bias"))
        assert stored is not None, name
        if swapped:
            others = {"ffn_up": "ffn_down", "ffn_down": "ffn_up"}
            stored = next(
                (stored.replace(own, other) for own, other in others.items() if own in stored), stored
            )
        if array.ndim != 2 or "embed" in name or array.shape[1] % 32:
            writer.add_tensor(stored, np.ascontiguousarray(array))
        else:
            writer.add_tensor(stored, gguf.quantize(array, form), raw_dtype=form)
    finish(writer)


def add_keys(writer: Any, values: dict[str, Any]) -> None:
    for name, value in values.items():
        key = f"clip.{name.replace('__', '.')}"
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        elif value is not None:
            writer.add_array(key, value)


def finish(writer: Any) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_qwen3_pair(folder: Path, to: Path, kind: str = "F32", **keys: Any) -> Path:
    """The same for a folder of Qwen3-VL; its tokens are those of `tests/model_runner/vision/test_qwen_vl.py`."""
    from safetensors.torch import load_file

    config = json.loads((folder / "config.json").read_text())
    tensors = {n: t.float().numpy() for n, t in load_file(folder / "model.safetensors").items()}
    of_tower = {n: a for n, a in tensors.items() if n.startswith("model.visual.")}
    to.mkdir(exist_ok=True)
    _write_qwen3_text(to / "model.gguf", config["text_config"], tensors.keys() - of_tower.keys(), tensors)
    _write_qwen3_tower(folder, to / "mmproj-model.gguf", config, of_tower, kind, keys)
    return to / "model.gguf"


def _write_qwen3_text(path: Path, text: dict[str, Any], own: set[str], tensors: Arrays) -> None:
    import gguf

    writer = gguf.GGUFWriter(path, "qwen3vl")
    writer.add_context_length(text["max_position_embeddings"])
    writer.add_embedding_length(text["hidden_size"])
    writer.add_block_count(text["num_hidden_layers"])
    writer.add_feed_forward_length(text["intermediate_size"])
    writer.add_head_count(text["num_attention_heads"])
    writer.add_head_count_kv(text["num_key_value_heads"])
    writer.add_key_length(text["head_dim"])
    writer.add_value_length(text["head_dim"])
    writer.add_layer_norm_rms_eps(text["rms_norm_eps"])
    rope = text["rope_parameters"]
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_rope_dimension_sections([*rope["mrope_section"], 0])
    tokens = [f"<unused{n}>" for n in range(text["vocab_size"])]
    tokens[91:94] = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(tokens)
    writer.add_eos_token_id(2)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN3VL, text["num_hidden_layers"])
    for name in sorted(own):
        hf = name.replace("model.language_model.", "model.")
        stored = names.get_name(hf, try_suffixes=(".weight", ".bias"))
        assert stored is not None, name
        writer.add_tensor(stored, np.ascontiguousarray(tensors[name]))
    finish(writer)


def _write_qwen3_tower(
    folder: Path, path: Path, config: dict[str, Any], tensors: Arrays, kind: str, keys: dict[str, Any]
) -> None:
    import gguf

    tower = config["vision_config"]
    images = json.loads((folder / "preprocessor_config.json").read_text())
    layers = tower["deepstack_visual_indexes"]
    writer = gguf.GGUFWriter(path, "clip")
    writer.add_type("mmproj")
    values = {
        "has_vision_encoder": True,
        "projector_type": "qwen3vl_merger",
        "use_gelu": True,
        "vision__projection_dim": config["text_config"]["hidden_size"],
        "vision__embedding_length": tower["hidden_size"],
        "vision__feed_forward_length": tower["intermediate_size"],
        "vision__block_count": tower["depth"],
        "vision__attention__head_count": tower["num_heads"],
        "vision__attention__layer_norm_epsilon": 1e-6,
        "vision__image_size": round(tower["num_position_embeddings"] ** 0.5) * tower["patch_size"],
        "vision__patch_size": tower["patch_size"],
        "vision__spatial_merge_size": tower["spatial_merge_size"],
        "vision__is_deepstack_layers": [layer in layers for layer in range(tower["depth"])],
        "vision__image_mean": images["image_mean"],
        "vision__image_std": images["image_std"],
    } | keys
    add_keys(writer, values)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.MMPROJ, tower["depth"])
    form = gguf.GGMLQuantizationType[kind]
    parts = {"norm": "post_ln", "linear_fc1": "0", "linear_fc2": "2"}
    for name, array in tensors.items():
        own = name.removeprefix("model.")
        if own == "visual.patch_embed.proj.weight":
            for number, stored in enumerate(("v.patch_embd.weight", "v.patch_embd.weight.1")):
                writer.add_tensor(stored, np.ascontiguousarray(array[:, :, number]))
            continue
        module, _, part = own.rpartition(".")
        *_, last = module.split(".")
        if own.startswith("visual.merger."):
            stored = f"{'v' if last == 'norm' else 'mm'}.{parts[last]}.{part}"
        elif own.startswith("visual.deepstack_merger_list."):
            layer = layers[int(own.split(".")[2])]
            stored = f"v.deepstack.{layer}.{last.removeprefix('linear_')}.{part}"
        else:
            stored = names.get_name(own, try_suffixes=(".weight", ".bias"))
        assert stored is not None, name
        if array.ndim != 2 or "pos_embed" in name or array.shape[1] % 32:
            writer.add_tensor(stored, np.ascontiguousarray(array))
        else:
            writer.add_tensor(stored, gguf.quantize(array, form), raw_dtype=form)
    finish(writer)
