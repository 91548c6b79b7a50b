"""`read_vision`: the towers of LLaVA and InternVL folders as they are published, and what of them is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from engine.models.weight_files.vision_tensors import is_unused_of_tower
from engine.runtime.errors import ConfigError

from .test_vision_part import TEXT, vision_of

LLAVA: dict[str, Any] = {
    "architectures": ["LlavaForConditionalGeneration"],
    "model_type": "llava",
    "image_token_index": 32_000,
    "projector_hidden_act": "gelu",
    "text_config": TEXT,
    "vision_config": {
        "hidden_size": 1024,
        "image_size": 336,
        "intermediate_size": 4096,
        "model_type": "clip_vision_model",
        "num_attention_heads": 16,
        "num_hidden_layers": 24,
        "patch_size": 14,
        "projection_dim": 768,
        "vocab_size": 32_000,
    },
    "vision_feature_layer": -2,
    "vision_feature_select_strategy": "default",
}
CLIP: dict[str, Any] = {
    "crop_size": {"height": 336, "width": 336},
    "do_center_crop": True,
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
    "resample": 3,
    "size": {"shortest_edge": 336},
}
INTERNVL: dict[str, Any] = {
    "architectures": ["InternVLForConditionalGeneration"],
    "model_type": "internvl",
    "image_token_id": 49_190,
    "downsample_ratio": 0.5,
    "text_config": TEXT | {"model_type": "qwen2"},
    "vision_config": {
        "attention_bias": True,
        "hidden_act": "gelu",
        "hidden_size": 1024,
        "image_size": [448, 448],
        "intermediate_size": 4096,
        "model_type": "internvl_vision",
        "norm_type": "layer_norm",
        "num_attention_heads": 16,
        "num_hidden_layers": 24,
        "patch_size": [14, 14],
        "use_mean_pooling": True,
        "use_qk_norm": False,
    },
    "vision_feature_layer": -1,
}
TILES: dict[str, Any] = {
    "crop_to_patches": False,
    "max_patches": 12,
    "min_patches": 1,
    "resample": 3,
    "size": {"height": 448, "width": 448},
}


MISTRAL: dict[str, Any] = {
    "architectures": ["Mistral3ForConditionalGeneration"],
    "model_type": "mistral3",
    "image_token_index": 10,
    "multimodal_projector_bias": False,
    "projector_hidden_act": "gelu",
    "spatial_merge_size": 2,
    "text_config": TEXT | {"model_type": "mistral"},
    "vision_config": {
        "head_dim": 64,
        "hidden_act": "silu",
        "hidden_size": 1024,
        "image_size": 1540,
        "intermediate_size": 4096,
        "model_type": "pixtral",
        "num_attention_heads": 16,
        "num_hidden_layers": 24,
        "patch_size": 14,
        "rope_theta": 10_000.0,
    },
    "vision_feature_layer": -1,
}
LONGEST: dict[str, Any] = {"do_resize": True, "patch_size": 14, "resample": 3, "size": {"longest_edge": 1540}}

SCOUT: dict[str, Any] = {
    "architectures": ["Llama4ForConditionalGeneration"],
    "model_type": "llama4",
    "boi_token_index": 200_080,
    "eoi_token_index": 200_081,
    "image_token_index": 200_092,
    "text_config": {"model_type": "llama4_text", "vocab_size": 202_048, "num_hidden_layers": 4},
    "vision_config": {
        "hidden_act": "gelu",
        "hidden_size": 1408,
        "image_size": 336,
        "intermediate_size": 5632,
        "model_type": "llama4_vision_model",
        "norm_eps": 1e-5,
        "num_attention_heads": 16,
        "num_hidden_layers": 34,
        "patch_size": 14,
        "pixel_shuffle_ratio": 0.5,
        "projector_input_dim": 4096,
        "projector_output_dim": 4096,
        "rope_theta": 10_000,
        "vision_feature_layer": -1,
        "vision_output_dim": 4096,
    },
}
SCOUT_TILES: dict[str, Any] = {
    "max_patches": 16,
    "resample": 2,
    "resize_to_max_canvas": False,
    "size": {"height": 336, "width": 336},
}


def test_llava_1_5(tmp_path: Path) -> None:
    vision = vision_of(tmp_path, LLAVA, CLIP)

    assert vision is not None and (vision.family, vision.body, vision.activation) == (
        "llava",
        "clip",
        "quick_gelu",
    )
    assert (vision.rows_per_tile, vision.num_layers, vision.num_tower_rows) == (576, 23, 577)
    assert not vision.ends_normed and vision.norm_eps == 1e-5 and vision.most_tiles == 1
    assert vision.processing.crops and vision.image_token_id == 32_000
    assert is_unused_of_tower(vision, "vision_model.encoder.layers.23.mlp.fc1.weight")
    assert is_unused_of_tower(vision, "vision_model.post_layernorm.bias")
    assert not is_unused_of_tower(vision, "vision_model.encoder.layers.22.mlp.fc1.weight")


def test_llava_with_siglip_keeps_all_rows(tmp_path: Path) -> None:
    siglip = {
        "model_type": "siglip_vision_model",
        "image_size": 384,
        "patch_size": 14,
        "num_hidden_layers": 26,
    }
    config = LLAVA | {"vision_config": siglip, "vision_feature_select_strategy": "full"}

    vision = vision_of(tmp_path, config, {"size": {"height": 384, "width": 384}})

    assert vision is not None and (vision.body, vision.rows_per_tile, vision.num_layers) == (
        "siglip",
        729,
        25,
    )


def test_internvl_3(tmp_path: Path) -> None:
    vision = vision_of(tmp_path, INTERNVL, TILES)

    assert vision is not None and (vision.family, vision.body, vision.activation) == (
        "internvl",
        "internvit",
        "gelu",
    )
    assert (vision.rows_per_tile, vision.num_layers, vision.most_tiles) == (256, 24, 13)
    assert vision.processing.splits and vision.joined_size == 4096 and vision.has_qkv_bias
    limited = [vision.limited(num * 448**2).most_tiles for num in (1, 2, 3, 4, 13, 99)]
    assert limited == [1, 1, 3, 4, 13, 13]
    assert (vision.begin_token, vision.image_token, vision.end_token) == ("<img>", "<IMG_CONTEXT>", "</img>")


def test_llama_4_scout(tmp_path: Path) -> None:
    vision = vision_of(tmp_path, SCOUT, SCOUT_TILES)

    assert vision is not None and (vision.family, vision.body, vision.activation) == (
        "llama4",
        "llama4",
        "gelu",
    )
    assert (vision.rows_per_tile, vision.num_tower_rows, vision.joined_size) == (144, 577, 5632)
    assert (vision.most_tiles, vision.most_rows, vision.connector_size) == (17, 17 * 144, 4096)
    assert vision.processing.splits and vision.processing.mean == vision.processing.std == (0.5, 0.5, 0.5)
    assert (vision.image_token_id, vision.image_token, vision.marker) == (200_092, "<|patch|>", "<|image|>")
    limited = [vision.limited(num * 336**2).most_tiles for num in (1, 2, 3, 9, 17, 99)]
    assert limited == [1, 1, 3, 9, 17, 17]
    one = vision_of(tmp_path, SCOUT, SCOUT_TILES | {"max_patches": 1})
    assert one is not None and (one.most_tiles, one.processing.splits) == (1, False)


def test_mistral_small_3_1(tmp_path: Path) -> None:
    vision = vision_of(tmp_path, MISTRAL, LONGEST)

    assert vision is not None and (vision.family, vision.activation) == ("pixtral", "silu")
    assert (vision.row_pixels, vision.rows_of(1540, 1540), vision.rows_of(28, 56)) == (28, 3025, 2)
    assert (vision.joined_size, vision.most_pixels, vision.has_mlp_bias) == (4096, 1540**2, False)
    assert (vision.image_token, vision.begin_token, vision.end_token) == ("[IMG]", "[IMG_BREAK]", "[IMG_END]")


def test_other_towers_of_llava_are_served_as_text(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert vision_of(tmp_path, LLAVA | {"vision_config": {"model_type": "dinov2"}}, CLIP) is None
    assert (
        "vision_config.model_type is 'dinov2', and of this model only clip_vision_model, siglip"
        in caplog.text
    )
    siglip = {"vision_config": {"model_type": "siglip_vision_model"}, "vision_feature_layer": [-24, -1]}
    assert vision_of(tmp_path, NEXT | siglip, CLIP) is None
    assert "and of this model only clip_vision_model can be computed" in caplog.text


PINPOINTS = [[336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]]
OF_NEXT = {"model_type": "llava_next", "architectures": ["LlavaNextForConditionalGeneration"]}
NEXT = LLAVA | OF_NEXT | {"image_grid_pinpoints": PINPOINTS}
NEXT_CLIP = CLIP | {"do_pad": True, "image_grid_pinpoints": PINPOINTS}
GEMMA4: dict[str, Any] = {
    "architectures": ["Gemma4ForConditionalGeneration"],
    "model_type": "gemma4",
    "image_token_id": 258_880,
    "text_config": {
        "model_type": "gemma4_text",
        "vocab_size": 262_144,
        "hidden_size": 5376,
        "intermediate_size": 21_504,
        "num_hidden_layers": 6,
        "num_attention_heads": 32,
        "num_key_value_heads": 16,
        "hidden_size_per_layer_input": 0,
        "use_bidirectional_attention": "vision",
    },
    "vision_config": {
        "default_output_length": 280,
        "head_dim": 72,
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size": 1152,
        "intermediate_size": 4304,
        "model_type": "gemma4_vision",
        "num_attention_heads": 16,
        "num_hidden_layers": 27,
        "num_key_value_heads": 16,
        "patch_size": 16,
        "pooling_kernel_size": 3,
        "position_embedding_size": 10_240,
        "rope_parameters": {"rope_theta": 100.0, "rope_type": "default"},
        "standardize": True,
        "use_clipped_linears": False,
    },
}
SOFT_TOKENS = {"do_normalize": False, "image_mean": [0.1, 0.1, 0.1], "max_soft_tokens": 560, "patch_size": 16}
PROCESSORS = {
    "llava": CLIP,
    "llava_next": NEXT_CLIP,
    "internvl": TILES,
    "mistral3": LONGEST,
    "llama4": SCOUT_TILES,
    "gemma4": SOFT_TOKENS,
}


def test_gemma_4_31b(tmp_path: Path) -> None:
    vision = vision_of(tmp_path, GEMMA4, SOFT_TOKENS)

    assert vision is not None and (vision.family, vision.activation, vision.num_layers) == (
        "gemma4",
        "gelu_tanh",
        27,
    )
    assert vision.sees_whole and vision.only_in_windows and vision.standardizes and not vision.clips
    assert (vision.row_pixels, vision.rows_of(48, 96), vision.most_rows) == (48, 2, 560)
    assert vision.processing.mean == (0.0, 0.0, 0.0), "do_normalize is false"
    assert vision.limited(100 * 48**2 + 7).most_rows == 112
    assert (vision.image_token, vision.begin_token, vision.end_token) == ("<|image|>", "<|image>", "<image|>")


def test_gemma_4_e2b(tmp_path: Path) -> None:
    tower = {
        "num_hidden_layers": 16,
        "hidden_size": 768,
        "num_attention_heads": 12,
        "num_key_value_heads": 12,
        "head_dim": 64,
        "intermediate_size": 3072,
        "standardize": False,
        "use_clipped_linears": True,
    }
    text = {"use_bidirectional_attention": None, "hidden_size_per_layer_input": 256, "pad_token_id": 3}
    config = GEMMA4 | {"text_config": GEMMA4["text_config"] | text}

    vision = vision_of(tmp_path, config | {"vision_config": GEMMA4["vision_config"] | tower}, {})
    plain = vision_of(tmp_path, config | {"vision_config": {"model_type": "gemma4_vision"}}, {})

    assert vision is not None and plain is not None and vision.clips and not vision.standardizes
    assert not vision.sees_whole and not vision.only_in_windows and vision.layer_input_id == 3
    assert vision.most_rows == 280, "in whole blocks of 28"
    defaults = (plain.hidden_size, plain.num_layers, plain.num_heads, plain.num_positions, plain.clips)
    assert defaults == (768, 16, 12, 10_240, False)


def test_llava_1_6(tmp_path: Path) -> None:
    vision = vision_of(tmp_path, NEXT, NEXT_CLIP)

    assert vision is not None and (vision.family, vision.rows_per_tile, vision.most_tiles) == (
        "llava_next",
        577,
        5,
    )
    assert (
        vision.processing.splits
        and not vision.processing.crops
        and vision.processing.pinpoints[3] == (1008, 336)
    )
    limited = {num: vision.limited(num * 336**2).processing for num in (1, 2, 3, 4, 5)}
    assert [how.splits for how in limited.values()] == [False, False, True, True, True]
    assert [len(limited[num].pinpoints) for num in (3, 4, 5)] == [2, 4, 5]
    assert vision_of(tmp_path, LLAVA | OF_NEXT, CLIP) == vision, "the defaults"


def test_pixtral_12b(tmp_path: Path) -> None:
    tower = {
        "model_type": "pixtral",
        "hidden_act": "silu",
        "head_dim": 64,
        "image_size": 1024,
        "patch_size": 16,
    }
    config = LLAVA | {
        "image_token_index": 10,
        "text_config": TEXT | {"model_type": "mistral"},
        "vision_config": tower,
        "vision_feature_layer": -1,
        "vision_feature_select_strategy": "full",
    }
    processor = {"patch_size": {"height": 16, "width": 16}, "size": {"longest_edge": 1024}}

    vision = vision_of(tmp_path, config, processor)

    assert vision is not None and (vision.family, vision.activation, vision.num_layers) == (
        "pixtral",
        "silu",
        24,
    )
    assert (vision.row_pixels, vision.rows_of(1024, 1024), vision.has_mlp_bias) == (16, 4096, True)
    with pytest.raises(ConfigError, match="Pixtral has no row for the class to leave out"):
        vision_of(tmp_path, config | {"vision_feature_select_strategy": "default"}, processor)


@pytest.mark.parametrize(
    ("base", "config", "tower", "processor", "message"),
    [
        (
            LLAVA,
            {"vision_feature_layer": [-2, -5]},
            {},
            {},
            r"vision_feature_layer is \[-2, -5\], expected the number",
        ),
        (LLAVA, {"vision_feature_layer": -25}, {}, {}, "expected the number of one of the 24 layers"),
        (LLAVA, {"vision_feature_select_strategy": "cls"}, {}, {}, "is 'cls', expected default or full"),
        (
            LLAVA,
            {},
            {"model_type": "siglip_vision_model"},
            {},
            "SigLIP has no row for the class to leave out",
        ),
        (LLAVA, {"projector_hidden_act": "relu"}, {}, {}, "projector_hidden_act is 'relu', expected 'gelu'"),
        (
            MISTRAL,
            {"spatial_merge_size": 1},
            {},
            {},
            "spatial_merge_size is 1, expected a whole number from 2",
        ),
        (LLAVA, {}, {}, {"crop_size": {"height": 336, "width": 224}}, "the tower sees tiles of 336 pixels"),
        (
            LLAVA,
            {},
            {},
            {"size": {"longest_edge": 336}},
            "size is .*, but the tower sees tiles of 336 pixels",
        ),
        (LLAVA, {}, {}, {"do_center_crop": False}, "do_center_crop is False, only true is supported"),
        (LLAVA, {}, {}, {"do_pad": True}, "do_pad is True, expected False"),
        (INTERNVL, {}, {"norm_type": "rms_norm"}, {}, "norm_type is 'rms_norm', expected 'layer_norm'.*300M"),
        (INTERNVL, {}, {"use_qk_norm": True}, {}, "use_qk_norm is True, expected False"),
        (
            INTERNVL,
            {},
            {"image_size": [448, 224]},
            {},
            r"image_size is \[448, 224\], expected the same number",
        ),
        (
            INTERNVL,
            {"downsample_ratio": 0.3},
            {},
            {},
            "downsample_ratio is 0.3, expected 1 divided by a number",
        ),
        (INTERNVL, {}, {}, {"size": {"height": 224, "width": 224}}, "the tower sees tiles of 448 pixels"),
        (
            MISTRAL,
            {},
            {"model_type": "siglip_vision_model"},
            {},
            "model_type is .*, expected 'pixtral', or serve",
        ),
        (MISTRAL, {}, {"rope_theta": 1e6}, {}, "rope_theta is 1000000.0, expected 10000.0"),
        (
            MISTRAL,
            {},
            {"rope_parameters": {"rope_theta": 1e6}},
            {},
            "vision_config.rope_parameters.rope_theta is 1000000.0, expected 10000.0",
        ),
        (MISTRAL, {}, {"head_dim": 32}, {}, "head_dim is 32, expected 64"),
        (
            MISTRAL,
            {},
            {"hidden_act": "quick_gelu"},
            {},
            "hidden_act is 'quick_gelu', expected one of gelu, silu",
        ),
        (MISTRAL, {"vision_feature_layer": -2}, {}, {}, "vision_feature_layer is -2, expected -1"),
        (MISTRAL, {}, {}, {"size": {"height": 5}}, 'expected {"longest_edge": pixels}'),
        (
            NEXT,
            {"vision_feature_select_strategy": "full"},
            {},
            {},
            "select_strategy is 'full', expected 'default'",
        ),
        (NEXT, {}, {}, {"image_grid_pinpoints": [[336, 672]]}, "but config.json has .*; download both again"),
        (
            NEXT,
            {"image_grid_pinpoints": [[336, 600]]},
            {},
            {"image_grid_pinpoints": [[336, 600]]},
            "expected a list of heights and widths that are multiples of 336",
        ),
        (SCOUT, {}, {"rope_theta": 5e5}, {}, "vision_config.rope_theta is 500000.0, expected 10000.0"),
        (
            SCOUT,
            {},
            {"hidden_act": "silu"},
            {},
            "hidden_act is 'silu', expected one of gelu, or serve its text",
        ),
        (SCOUT, {}, {"num_attention_heads": 32, "hidden_size": 1472}, {}, "1472 into multiples of 4"),
        (
            SCOUT,
            {},
            {"pixel_shuffle_ratio": 0.2},
            {},
            "is 0.2, expected 1 divided by a number that divides the 24",
        ),
        (
            SCOUT,
            {},
            {"intermediate_size": 5000},
            {},
            "intermediate_size is 5000, expected 5632 by the other sizes",
        ),
        (SCOUT, {}, {"projector_output_dim": 2048}, {}, "projector_output_dim is 2048, expected 4096"),
        (SCOUT, {}, {"vision_output_dim": None}, {}, "vision_output_dim is 7680, expected 4096"),
        (SCOUT, {}, {}, {"resize_to_max_canvas": True}, "resize_to_max_canvas is True, expected False"),
        (SCOUT, {}, {}, {"size": {"height": 448, "width": 448}}, "the tower sees tiles of 336 pixels"),
        (
            SCOUT,
            {"image_token_index": 202_048},
            {},
            {},
            "image_token_index is 202048, expected a whole number",
        ),
        (INTERNVL, {}, {}, {"min_patches": 13}, "min_patches is 13, expected a whole number from 1 to 12"),
        (GEMMA4, {}, {}, {"max_soft_tokens": 300}, "max_soft_tokens is 300, expected one of 70, 140, 280"),
        (GEMMA4, {}, {}, {"patch_size": 14}, "patch_size is 14, expected 16, or serve its text"),
        (GEMMA4, {}, {}, {"do_resize": False}, "do_resize is False, expected True"),
        (GEMMA4, {}, {"head_dim": None}, {}, "head_dim is None, expected 72"),
        (GEMMA4, {}, {"num_key_value_heads": 8}, {}, "num_key_value_heads is 8, expected 16"),
        (
            GEMMA4,
            {},
            {"num_attention_heads": 64},
            {},
            "64, they cannot divide the hidden size 1152 into mult",
        ),
        (GEMMA4, {}, {"rope_parameters": {"rope_theta": 1e4}}, {}, "rope_theta is 10000.0, expected 100.0"),
        (GEMMA4, {}, {"hidden_activation": "silu"}, {}, "hidden_activation is 'silu', expected"),
        (
            GEMMA4,
            {},
            {"position_embedding_size": 900},
            {},
            "position_embedding_size is 900, expected .* 1680",
        ),
    ],
)
def test_what_is_refused(
    tmp_path: Path,
    base: dict[str, Any],
    config: dict[str, Any],
    tower: dict[str, Any],
    processor: dict[str, Any],
    message: str,
) -> None:
    whole = base | config | {"vision_config": base["vision_config"] | tower}

    with pytest.raises(ConfigError, match=message):
        vision_of(tmp_path, whole, PROCESSORS[base["model_type"]] | processor)
