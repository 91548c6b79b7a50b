"""Folders of families with code of their own: fields and tensors of a folder of Llama or its like, as published."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.deepseek_ocr2.configuration_deepseek_ocr2 import DeepseekOcr2TextConfig
from transformers.models.deepseek_ocr2.modeling_deepseek_ocr2 import DeepseekOcr2TextModel
from transformers.models.deepseek_v2.modeling_deepseek_v2 import (
    DeepseekV2ForCausalLM,
    DeepseekV2PreTrainedModel,
)
from transformers.models.llama.modeling_llama import LlamaForCausalLM, LlamaPreTrainedModel
from transformers.models.step3p7.configuration_step3p7 import Step3p7TextConfig
from transformers.models.step3p7.modeling_step3p7 import Step3p7TextModel

Tensors = dict[str, Tensor]

GPT = {
    "model.embed_tokens.": "transformer.wte.",
    "model.norm.": "transformer.ln_f.",
    "model.layers.": "transformer.h.",
    "input_layernorm": "ln_1",
    "post_attention_layernorm": "ln_2",
    "mlp.down_proj": "mlp.c_proj",
}
NAMES: dict[str, dict[str, str]] = {
    "baichuan": {"qkv_proj": "W_pack"},
    "xverse": {},
    "qwen": {
        **GPT,
        "self_attn.qkv_proj": "attn.c_attn",
        "self_attn.o_proj": "attn.c_proj",
        "mlp.up_proj": "mlp.w1",
        "mlp.gate_proj": "mlp.w2",
    },
    "exaone": {
        **GPT,
        "self_attn.o_proj": "attn.attention.out_proj",
        "self_attn.": "attn.attention.",
        "mlp.gate_proj": "mlp.c_fc_0",
        "mlp.up_proj": "mlp.c_fc_1",
    },
    "internlm2": {
        "embed_tokens": "tok_embeddings",
        "lm_head": "output",
        "self_attn.qkv_proj": "attention.wqkv",
        "self_attn.o_proj": "attention.wo",
        "input_layernorm": "attention_norm",
        "post_attention_layernorm": "ffn_norm",
        "mlp.gate_proj": "feed_forward.w1",
        "mlp.down_proj": "feed_forward.w2",
        "mlp.up_proj": "feed_forward.w3",
    },
    "chatglm": {
        "model.embed_tokens": "transformer.embedding.word_embeddings",
        "model.norm": "transformer.encoder.final_layernorm",
        "model.layers": "transformer.encoder.layers",
        "lm_head": "transformer.output_layer",
        "self_attn.qkv_proj": "self_attention.query_key_value",
        "self_attn.o_proj": "self_attention.dense",
        "mlp.gate_up_proj": "mlp.dense_h_to_4h",
        "mlp.down_proj": "mlp.dense_4h_to_h",
    },
    "phi3_v": {},
}
"""Parts of names in a folder of Llama, and what they are in files."""
FIELDS: dict[str, dict[str, str]] = {
    "qwen": {
        "rms_norm_eps": "layer_norm_epsilon",
        "num_key_value_heads": "",
        "head_dim": "kv_channels",
    },
    "exaone": {
        "rms_norm_eps": "layer_norm_epsilon",
        "num_hidden_layers": "num_layers",
        "hidden_act": "activation_function",
    },
    "internlm2": {"attention_bias": "bias"},
    "chatglm": {
        "rms_norm_eps": "layernorm_epsilon",
        "num_hidden_layers": "num_layers",
        "num_key_value_heads": "multi_query_group_num",
        "intermediate_size": "ffn_hidden_size",
        "vocab_size": "padded_vocab_size",
        "head_dim": "kv_channels",
        "max_position_embeddings": "seq_length",
        "attention_bias": "add_qkv_bias",
        "hidden_act": "",
    },
}
"""Fields, and their names in files; empty: the files do not have them."""
OTHER: dict[str, dict[str, Any]] = {
    "qwen": {"seq_length": 256, "use_dynamic_ntk": True, "use_logn_attn": True},
    "chatglm": {"multi_query_attention": True, "rmsnorm": True, "post_layer_norm": True},
}
"""Fields that only these files have."""
UNUSED = {
    "baichuan": "model.layers.0.self_attn.rotary_emb.inv_freq",
    "chatglm": "transformer.rotary_pos_emb.inv_freq",
    "exaone": "transformer.rotary.inv_freq",
    "phi3_v": "model.vision_embed_tokens.img_projection.0.weight",
}


def _fused(tensors: Tensors, join: Callable[[list[Tensor]], Tensor]) -> Tensors:
    """With one matrix of q, k and v."""
    found = {}
    for name, tensor in tensors.items():
        if ".q_proj." in name:
            parts = [tensors[name.replace("q_proj", f"{part}_proj")] for part in "qkv"]
            found[name.replace("q_proj", "qkv_proj")] = join(parts)
        elif ".k_proj." not in name and ".v_proj." not in name:
            found[name] = tensor
    return found


def write_as_published(folder: Path, model_type: str) -> None:
    """Rewrite a folder with the names of a family, if it has other ones than the type that it was made as."""
    if model_type not in NAMES:
        return
    path = folder / "config.json"
    config = json.loads(path.read_text())
    num_kv_heads = config.get("num_key_value_heads")

    def grouped(parts: list[Tensor]) -> Tensor:
        by_head = [each.unflatten(0, (num_kv_heads, -1)) for each in parts]
        return torch.cat(by_head, dim=1).flatten(0, 1).contiguous()

    tensors = load_file(folder / "model.safetensors")
    if model_type == "internlm2":
        tensors = _fused(tensors, grouped)
    elif model_type in ("baichuan", "qwen", "chatglm"):
        tensors = _fused(tensors, torch.cat)
    if unused := UNUSED.get(model_type):
        tensors[unused] = torch.ones(4)
    renamed = {}
    for name, tensor in tensors.items():
        for usual, own in NAMES[model_type].items():
            name = name.replace(usual, own)
        renamed[name] = tensor
    save_file(renamed, folder / "model.safetensors", {"format": "pt"})
    if model_type == "qwen":
        config["intermediate_size"] *= 2
        config["rotary_emb_base"] = config.pop("rope_parameters")["rope_theta"]
    if model_type == "chatglm":
        config["rope_ratio"] = config.pop("rope_parameters")["rope_theta"] / 10_000
    for usual, own in FIELDS.get(model_type, {}).items():
        value = config.pop(usual, None)
        if own and value is not None:
            config[own] = value
    path.write_text(json.dumps(config | OTHER.get(model_type, {})))


class DeepseekConfig(DeepseekOcr2TextConfig):  # type: ignore[misc]
    """DeepSeek-V2 with Llama's attention, of which transformers has only the body: the text of DeepSeek-OCR."""

    model_type = "deepseek"


class DeepseekForCausalLM(DeepseekV2ForCausalLM):  # type: ignore[misc]
    """That body with a head."""

    config_class = DeepseekConfig

    def __init__(self, config: DeepseekConfig) -> None:
        DeepseekV2PreTrainedModel.__init__(self, config)
        self.model = DeepseekOcr2TextModel(config)
        self.vocab_size = config.vocab_size
        self.lm_head = torch.nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()


class Step3p5ForCausalLM(LlamaForCausalLM):  # type: ignore[misc]
    """The text of Step-3.7 with a head, which transformers has only beside a vision tower."""

    config_class = Step3p7TextConfig

    def __init__(self, config: Step3p7TextConfig) -> None:
        LlamaPreTrainedModel.__init__(self, config)
        self.model = Step3p7TextModel(config)
        self.vocab_size = config.vocab_size
        self.lm_head = torch.nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()


AutoModelForCausalLM.register(Step3p7TextConfig, Step3p5ForCausalLM, exist_ok=True)
AutoConfig.register("deepseek", DeepseekConfig)
AutoModelForCausalLM.register(DeepseekConfig, DeepseekForCausalLM)
