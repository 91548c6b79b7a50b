"""`MULTIMODAL`: the kinds of multimodal folders with a text that is served; `TEXT_TYPES`: their language models.

A token of text attends to earlier tokens only and has the same position on all axes of M-RoPE, in each of these models;
one of which that is not true is not in the table. `language_part` reads folders by it; `usual_names` (weight_files)
takes the names of tensors from here for all that reads or counts weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple

_BODY: Final = ("language_model.model.", "model.language_model.", "language_model.")
"""Names for `model.`: of transformers before 4.52, since then, and in files without an output head."""
_HEAD: Final = "language_model.lm_head."
_TOWER, _TOWER_BODY, _TOWER_HEAD = "vision_tower.", "vision_model.", "vision_model.head."
_INTERNVIT: Final = {
    ".embeddings.cls_token": ".embeddings.class_embedding",
    ".embeddings.patch_embeddings.projection.": ".embeddings.patch_embedding.",
    ".embeddings.position_embeddings": ".embeddings.position_embedding.weight",
    ".encoder.layer.": ".encoder.layers.",
    ".attention.projection_layer.": ".self_attn.out_proj.",
    ".attention.o_proj.": ".self_attn.out_proj.",
    ".attention.": ".self_attn.",
    ".layernorm_before.": ".layer_norm1.",
    ".layernorm_after.": ".layer_norm2.",
}
"""Names of InternViT, and of one module of Pixtral, in transformers, and those of SigLIP."""
_LLAMA4: Final = {
    "vision_model.class_embedding": "vision_model.embeddings.class_embedding",
    "vision_model.patch_embedding.linear.": "vision_model.embeddings.patch_embedding.",
    "vision_model.positional_embedding_vlm": "vision_model.embeddings.position_embedding.weight",
    "vision_model.layernorm_pre.": "vision_model.pre_layrnorm.",
    "vision_model.layernorm_post.": "vision_model.post_layernorm.",
    "vision_model.model.layers.": "vision_model.encoder.layers.",
    ".input_layernorm.": ".layer_norm1.",
    ".post_attention_layernorm.": ".layer_norm2.",
    ".self_attn.o_proj.": ".self_attn.out_proj.",
}
"""Names of the tower of Llama 4 in transformers, and those of CLIP."""
_VISION: Final = (_TOWER, "multi_modal_projector.")
_NEWLINE: Final = "image_newline"
"""A row that LLaVA-NeXT inserts; it counts as a part of the connector."""
_AUDIO: Final = ("audio_tower.", "multi_modal_projector.")
_CONNECTED: Final = ("vision_model.", "connector.")
_TEXT_MODEL: Final = ("model.text_model.", "text_model.")
_THINKER: Final = "thinker"
_OF_AUDIO: Final = ("audio_tower.", "embed_audio.")
"""Towers that nothing reads, also in models that see."""
_UNIFIED: Final = {
    "embed_vision.multimodal_embedder.": "embed_vision.",
    "embed_vision.patch_": "vision_embedder.patch_",
    "embed_vision.pos_": "vision_embedder.pos_",
}
"""Names of transformers' modules of Gemma 4 12B, and those of its files."""
_GEMMA_TOWERS: Final = ("vision_tower.", "embed_vision.", *_OF_AUDIO)


class Multimodal(NamedTuple):
    """A kind of multimodal folder, by the `model_type` of its config.json.

    Attributes:
        architecture: the class in transformers.
        text_type: `model_type` of the language model, unless the folder names another one.
        towers: prefixes of the tensors that are not read, also after `model.`: towers, and layers that only draft.
        body: prefixes of the language model's tensors, in the place of `model.`.
        is_fixed: transformers reads `text_config` as `text_type`, whatever it says.
        is_flat: older folders have the language model's fields beside `vision_config`, and no `text_config`.
        tied: the default of `tie_word_embeddings`.
        defaults: of `text_config`, with precedence over those of its `model_type`.
        also: another name of the class, by code that files bring along.
        place: the field with the language model's fields.
        head: the prefix of its output head.
        part: the model is a part of a larger one: its fields are in `<part>_config`, its tensors begin with `<part>.`.
    """

    architecture: str
    text_type: str
    towers: tuple[str, ...]
    body: tuple[str, ...] = _BODY
    is_fixed: bool = False
    is_flat: bool = False
    tied: bool = False
    defaults: Mapping[str, object] = {}
    also: str = ""
    place: str = "text_config"
    head: str = _HEAD
    part: str = ""

    def usual_name(self, name: str, *, sees: bool = False) -> str | None:
        """The name of a tensor in a folder with the language model only.

        None: it belongs to a tower, unless the model `sees` by it: then it begins with the name of the tower.
        """
        if self.part:
            name = name.removeprefix(f"{self.part}.")
        own = name.removeprefix("model.")
        if own.startswith(self.towers):
            return _usual_tower_name(own) if sees else None
        if name.startswith(self.head):
            return "lm_head." + name.removeprefix(self.head)
        prefix = next((prefix for prefix in self.body if name.startswith(prefix)), "model.")
        return "model." + name.removeprefix(prefix) if name.startswith(prefix) else name

    @property
    def renamed(self) -> tuple[tuple[str, str], ...]:
        """Beginnings of the usual names, and what the folder may have instead."""
        if self.part:
            return ("model.", f"{self.part}.model."), ("lm_head", f"{self.part}.lm_head")
        return *(("model.", prefix) for prefix in self.body), ("lm_head", self.head.removesuffix("."))


class TextType(NamedTuple):
    """A `model_type` of language models: the family that computes it, and transformers' defaults of its fields."""

    family: str
    defaults: Mapping[str, object]
    always: Mapping[str, object] = {}  # what its code does, whatever the file says
    divides_hidden: bool = False  # so is the head size: the hidden size divided by the heads


def _usual_tower_name(name: str) -> str | None:
    """The name of a tensor of a tower; None: of one for audio, or of SigLIP's head, which pools whole images.

    Files have `vision_tower.vision_model.` before it, without the second part since transformers 5.
    """
    usual, renamed = f"{_VISION[1]}{name}" if name == _NEWLINE else name, {}
    if name.startswith(_TOWER):
        usual = _TOWER_BODY + name.removeprefix(_TOWER).removeprefix(_TOWER_BODY)
        renamed = _INTERNVIT
    elif name.startswith(_TOWER_BODY):
        renamed = _LLAMA4
    for own, other in renamed.items():
        usual = usual.replace(own, other)
    for own, other in _UNIFIED.items():
        if name.startswith(own):
            usual = other + name.removeprefix(own)
    return None if usual.startswith((_TOWER_HEAD, *_OF_AUDIO)) else usual


MULTIMODAL: Final[dict[str, Multimodal]] = {
    "gemma3": Multimodal("Gemma3ForConditionalGeneration", "gemma3_text", _VISION, is_fixed=True, tied=True),
    "mistral3": Multimodal("Mistral3ForConditionalGeneration", "mistral", _VISION, tied=True),
    "qwen2_vl": Multimodal(
        "Qwen2VLForConditionalGeneration", "qwen2_vl_text", ("visual.",), is_fixed=True, is_flat=True
    ),
    "qwen2_5_vl": Multimodal(
        "Qwen2_5_VLForConditionalGeneration", "qwen2_5_vl_text", ("visual.",), is_fixed=True, is_flat=True
    ),
    "qwen3_vl": Multimodal("Qwen3VLForConditionalGeneration", "qwen3_vl_text", ("visual.",), is_fixed=True),
    "qwen3_vl_moe": Multimodal(
        "Qwen3VLMoeForConditionalGeneration", "qwen3_vl_moe_text", ("visual.",), is_fixed=True
    ),
    "llava": Multimodal(
        "LlavaForConditionalGeneration",
        "llama",
        (*_VISION, "mm_projector."),
        is_flat=True,
        also="LlavaLlamaForCausalLM",
    ),
    "mllama": Multimodal(
        "MllamaForConditionalGeneration",
        "mllama_text_model",
        ("vision_model.", "multi_modal_projector."),
        is_fixed=True,
    ),
    "step3p7": Multimodal(
        "Step3p7ForConditionalGeneration",
        "step3p5",
        ("vision_model.", "vit_large_projector.", "multi_modal_projector."),
    ),
    "multi_modality": Multimodal(
        "MultiModalityCausalLM",
        "llama",
        ("vision_model.", "aligner.", "gen_"),
        place="language_config",
    ),
    "deepseek_vl_v2": Multimodal(
        "DeepseekVLV2ForCausalLM",
        "deepseek_v2",
        (
            "vision.",
            "projector.",
            "image_newline",
            "view_seperator",
            "tile_indicators",
            "sam_model.",
            "vision_model.",
        ),
        ("language.model.",),
        also="DeepseekOCRForCausalLM",
        place="language_config",
        head="language.lm_head.",
    ),
    "llava_next": Multimodal("LlavaNextForConditionalGeneration", "llama", (*_VISION, _NEWLINE)),
    "llava_onevision": Multimodal(
        "LlavaOnevisionForConditionalGeneration", "qwen2", (*_VISION, "image_newline")
    ),
    "vipllava": Multimodal("VipLlavaForConditionalGeneration", "llama", _VISION),
    "internvl": Multimodal("InternVLForConditionalGeneration", "qwen2", _VISION, tied=True),
    # transformers does not scale the logits of these two; they were trained, and are scaled here, as Cohere 2.
    "cohere2_vision": Multimodal("Cohere2VisionForConditionalGeneration", "cohere2", _VISION, tied=True),
    "aya_vision": Multimodal("AyaVisionForConditionalGeneration", "cohere2", _VISION, tied=True),
    "idefics3": Multimodal("Idefics3ForConditionalGeneration", "llama", _CONNECTED, _TEXT_MODEL),
    "smolvlm": Multimodal("SmolVLMForConditionalGeneration", "llama", _CONNECTED, _TEXT_MODEL),
    "llama4": Multimodal(
        "Llama4ForConditionalGeneration",
        "llama4_text",
        ("vision_model.", "multi_modal_projector."),
        is_fixed=True,
    ),
    "gemma3n": Multimodal(
        "Gemma3nForConditionalGeneration", "gemma3n_text", _GEMMA_TOWERS, is_fixed=True, tied=True
    ),
    "gemma4": Multimodal(
        "Gemma4ForConditionalGeneration", "gemma4_text", _GEMMA_TOWERS, is_fixed=True, tied=True
    ),
    "gemma4_unified": Multimodal(
        "Gemma4UnifiedForConditionalGeneration",
        "gemma4_unified_text",
        ("embed_vision.", "embed_audio.", "vision_embedder."),
        is_fixed=True,
        tied=True,
    ),
    "qwen3_5": Multimodal("Qwen3_5ForConditionalGeneration", "qwen3_5_text", ("visual.",), is_fixed=True),
    "qwen3_5_moe": Multimodal(
        "Qwen3_5MoeForConditionalGeneration", "qwen3_5_moe_text", ("visual.",), is_fixed=True
    ),
    "kimi_k25": Multimodal(
        "Kimi_K25ForConditionalGeneration",
        "deepseek_v3",
        (*_VISION, "mm_projector."),
        tied=True,
        also="KimiK25ForConditionalGeneration",
    ),
    "glm4v": Multimodal("Glm4vForConditionalGeneration", "glm4v_text", ("visual.",), is_fixed=True),
    "glm46v": Multimodal("Glm46VForConditionalGeneration", "glm4v_text", ("visual.",)),
    "glm4v_moe": Multimodal(
        "Glm4vMoeForConditionalGeneration", "glm4v_moe_text", ("visual.",), is_fixed=True
    ),
    "exaone4_5": Multimodal("Exaone4_5_ForConditionalGeneration", "exaone4", ("visual.", "mtp.")),
    "ovis2": Multimodal(
        "Ovis2ForConditionalGeneration", "qwen2", ("vision_tower.", "visual_embeddings_table."), tied=True
    ),
    "video_llama_3": Multimodal(
        "VideoLlama3ForConditionalGeneration", "qwen2", ("vision_model.", "projector.")
    ),
    "llava_next_video": Multimodal(
        "LlavaNextVideoForConditionalGeneration", "llama", (*_VISION, "vision_resampler.", "image_newline")
    ),
    "idefics2": Multimodal("Idefics2ForConditionalGeneration", "mistral", _CONNECTED, _TEXT_MODEL),
    "lfm2_vl": Multimodal("Lfm2VlForConditionalGeneration", "lfm2", _VISION, tied=True),
    "qwen2_5_omni": Multimodal(
        "Qwen2_5OmniForConditionalGeneration",
        "qwen2_5_omni_text",
        ("audio_tower.", "visual.", "talker.", "token2wav."),
        is_fixed=True,
        part=_THINKER,
    ),
    "qwen3_omni_moe": Multimodal(
        "Qwen3OmniMoeForConditionalGeneration",
        "qwen3_omni_moe_text",
        ("audio_tower.", "visual.", "talker.", "code2wav."),
        is_fixed=True,
        part=_THINKER,
    ),
    "qwen2_audio": Multimodal("Qwen2AudioForConditionalGeneration", "qwen2", _AUDIO),
    "voxtral": Multimodal(
        "VoxtralForConditionalGeneration",
        "llama",
        _AUDIO,
        defaults={
            "vocab_size": 131_072,
            "hidden_size": 3072,
            "intermediate_size": 8192,
            "num_hidden_layers": 30,
            "num_key_value_heads": 8,
            "max_position_embeddings": 131_072,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1e8,
            "head_dim": 128,
        },
    ),
}
"""The folders of which the text is served."""

_QWEN: Final = {
    "vocab_size": 151_936,
    "hidden_size": 4096,
    "intermediate_size": 22_016,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "rms_norm_eps": 1e-6,
    "sliding_window": 4096,
}
_QWEN_DELTA: Final[dict[str, object]] = {
    "vocab_size": 248_320,
    "intermediate_size": 12_288,
    "num_hidden_layers": 32,
    "num_attention_heads": 16,
    "max_position_embeddings": 32_768,
    "rms_norm_eps": 1e-6,
    "head_dim": 256,
}
_QWEN_DELTA_MOE: Final = {"hidden_size": 2048, "num_hidden_layers": 40, "num_key_value_heads": 2}
_QWEN_VL: Final = {
    "vocab_size": 152_064,
    "hidden_size": 8192,
    "intermediate_size": 29_568,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "max_position_embeddings": 32_768,
    "rms_norm_eps": 1e-5,
    "sliding_window": 4096,
    "max_window_layers": 80,
    "rope_theta": 1e6,
}
_GEMMA4: Final = {
    "vocab_size": 262_144,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 30,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "rms_norm_eps": 1e-6,
}
TEXT_TYPES: Final[dict[str, TextType]] = {
    "llama": TextType(
        "llama",
        {
            "vocab_size": 32_000,
            "hidden_size": 4096,
            "intermediate_size": 11_008,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "max_position_embeddings": 2048,
            "rms_norm_eps": 1e-6,
        },
    ),
    "mllama_text_model": TextType(
        "llama", {"rms_norm_eps": 1e-5, "num_key_value_heads": 8, "rope_theta": 500_000.0}
    ),
    "mistral": TextType(
        "mistral",
        {
            "vocab_size": 32_000,
            "hidden_size": 4096,
            "intermediate_size": 14_336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "max_position_embeddings": 131_072,
            "rms_norm_eps": 1e-6,
            "sliding_window": 4096,
        },
    ),
    "llama4_text": TextType(
        "llama4_text",
        {
            "vocab_size": 202_048,
            "hidden_size": 5120,
            "intermediate_size": 8192,
            "num_hidden_layers": 48,
            "num_attention_heads": 40,
            "num_key_value_heads": 8,
            "max_position_embeddings": 131_072,
            "rms_norm_eps": 1e-5,
        },
    ),
    "qwen2": TextType("qwen2", _QWEN | {"max_position_embeddings": 32_768}),
    "qwen3": TextType("qwen3", _QWEN | {"max_position_embeddings": 32_768, "head_dim": 128}),
    "gemma3_text": TextType(
        "gemma3_text",
        {
            "vocab_size": 262_208,
            "hidden_size": 2304,
            "intermediate_size": 9216,
            "num_hidden_layers": 26,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "max_position_embeddings": 131_072,
            "rms_norm_eps": 1e-6,
        },
    ),
    "deepseek_v2": TextType("deepseek_v2", {"rms_norm_eps": 1e-6}),
    "glm4v_text": TextType(
        "glm4",
        {
            "vocab_size": 151_552,
            "hidden_size": 4096,
            "intermediate_size": 13_696,
            "num_hidden_layers": 40,
            "num_attention_heads": 32,
            "num_key_value_heads": 2,
            "max_position_embeddings": 32_768,
            "rms_norm_eps": 1e-5,
            "partial_rotary_factor": 1.0,
        },
        {"attention_bias": True},
        divides_hidden=True,
    ),
    "glm4v_moe_text": TextType(
        "glm4_moe",
        {
            "vocab_size": 151_424,
            "hidden_size": 4096,
            "intermediate_size": 10_944,
            "num_hidden_layers": 46,
            "num_attention_heads": 96,
            "num_key_value_heads": 8,
            "max_position_embeddings": 65_536,
            "rms_norm_eps": 1e-5,
            "attention_bias": True,
            "moe_intermediate_size": 1408,
        },
        {"use_qk_norm": False},
    ),
    "step3p5": TextType("step3p5", {}),
    "exaone4_5_text": TextType("exaone4", {}),
    "qwen3_5_text": TextType("qwen3_5_text", _QWEN_DELTA | {"hidden_size": 4096, "num_key_value_heads": 4}),
    "qwen3_5_moe_text": TextType("qwen3_5_moe_text", _QWEN_DELTA | _QWEN_DELTA_MOE),
    "gemma3n_text": TextType(
        "gemma3n_text",
        {
            "vocab_size": 262_400,
            "hidden_size": 2048,
            "intermediate_size": 16_384,
            "num_hidden_layers": 35,
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "head_dim": 256,
            "max_position_embeddings": 32_768,
            "rms_norm_eps": 1e-6,
        },
    ),
    "gemma4_text": TextType("gemma4_text", _GEMMA4 | {"max_position_embeddings": 131_072}),
    "gemma4_unified_text": TextType("gemma4_unified_text", _GEMMA4 | {"max_position_embeddings": 262_144}),
    "qwen2_vl_text": TextType("qwen2", _QWEN_VL),
    "qwen2_5_vl_text": TextType("qwen2", _QWEN_VL),
    "qwen2_5_omni_text": TextType(
        "qwen2",
        {
            "vocab_size": 152_064,
            "hidden_size": 3584,
            "intermediate_size": 18_944,
            "num_hidden_layers": 28,
            "num_attention_heads": 28,
            "num_key_value_heads": 4,
            "max_position_embeddings": 32_768,
            "rms_norm_eps": 1e-6,
            "sliding_window": 32_768,
            "rope_theta": 1e6,
        },
    ),
    "qwen3_omni_moe_text": TextType(
        "qwen3_moe",
        {
            "vocab_size": 3584,
            "hidden_size": 2048,
            "intermediate_size": 18_944,
            "num_hidden_layers": 28,
            "num_attention_heads": 28,
            "num_key_value_heads": 4,
            "max_position_embeddings": 32_768,
            "rms_norm_eps": 1e-6,
            "moe_intermediate_size": 768,
            "num_experts_per_tok": 8,
            "num_experts": 128,
            "norm_topk_prob": True,
            "rope_theta": 1e6,
        },
        {"use_sliding_window": False},
    ),
    "qwen3_vl_text": TextType(
        "qwen3", _QWEN | {"max_position_embeddings": 128_000, "head_dim": 128, "rope_theta": 5e5}
    ),
    "qwen3_vl_moe_text": TextType(
        "qwen3_moe",
        {
            "vocab_size": 151_936,
            "hidden_size": 2048,
            "intermediate_size": 5632,
            "num_hidden_layers": 24,
            "num_attention_heads": 16,
            "num_key_value_heads": 16,
            "max_position_embeddings": 128_000,
            "rms_norm_eps": 1e-6,
            "moe_intermediate_size": 1408,
            "num_experts_per_tok": 4,
            "rope_theta": 5e5,
        },
        {"norm_topk_prob": True, "use_sliding_window": False},
    ),
}
"""Older files have only the fields of `text_config` that differ from these defaults."""
