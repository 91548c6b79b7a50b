"""`read_vision`: the tower of a SmolVLM folder, its processor, and what of both is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from engine.models.hf.hf_config import read_hf_spec
from engine.models.hf.multimodal_types import MULTIMODAL
from engine.models.spec.vision_spec import ImageProcessing, VisionSpec
from engine.models.weight_files.weight_memory import num_parameters
from engine.runtime.config.model_choice import TaskChoice
from engine.runtime.errors import ConfigError

TEXT = {
    "model_type": "llama",
    "vocab_size": 49_280,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 2,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 8192,
}
TOWER = {
    "hidden_size": 768,
    "image_size": 512,
    "num_attention_heads": 12,
    "patch_size": 16,
    "num_hidden_layers": 12,
}
CONFIG: dict[str, Any] = {
    "architectures": ["SmolVLMForConditionalGeneration"],
    "model_type": "smolvlm",
    "image_token_id": 49_190,
    "scale_factor": 4,
    "text_config": TEXT,
    "vision_config": TOWER,
}
PROCESSOR: dict[str, Any] = {
    "size": {"longest_edge": 2048},
    "max_image_size": {"longest_edge": 512},
    "do_image_splitting": True,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.25, 0.5],
    "resample": 1,
}


def vision_of(
    folder: Path,
    config: dict[str, Any] | None = None,
    processor: dict[str, Any] | None = PROCESSOR,
    choice: TaskChoice | None = None,
    name: str = "preprocessor_config.json",
) -> VisionSpec | None:
    """The tower that is read from a folder with these files."""
    (folder / "config.json").write_text(json.dumps(config or CONFIG))
    if processor is not None:
        (folder / name).write_text(json.dumps(processor))
    return read_hf_spec(folder, choice or TaskChoice()).vision


def test_the_tower_of_smolvlm_256m(tmp_path: Path) -> None:
    vision = vision_of(tmp_path)

    assert vision is not None
    assert vision.rows_per_tile == 64 and vision.grid == 32 and vision.joined_size == 12_288
    assert (vision.intermediate_size, vision.norm_eps, vision.activation) == (3072, 1e-6, "gelu_tanh")
    assert vision.image_token_id == 49_190 and vision.begin_token == "<fake_token_around_image>"
    assert vision.processing == ImageProcessing(
        longest_edge=2048,
        tile_size=512,
        splits=True,
        resample=1,
        rescale_factor=1 / 255,
        mean=(0.5, 0.5, 0.5),
        std=(0.5, 0.25, 0.5),
    )
    assert 200e9 < vision.flops_per_tile(576) < 230e9


def test_the_processor_may_be_nested_and_has_precedence_then(tmp_path: Path) -> None:
    vision_of(tmp_path)
    nested = {"image_processor": PROCESSOR | {"do_image_splitting": False, "do_normalize": False}}

    vision = vision_of(tmp_path, processor=nested, name="processor_config.json")

    assert vision is not None and not vision.processing.splits
    assert vision.processing.mean == (0.0, 0.0, 0.0) and vision.processing.std == (1.0, 1.0, 1.0)


def test_tokens_have_the_names_of_the_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"extra_special_tokens": {"image_token": "<img>"}})
    )

    vision = vision_of(tmp_path)

    assert vision is not None and (vision.image_token, vision.global_token) == ("<img>", "<global-img>")


def test_what_is_served_as_text(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert vision_of(tmp_path, choice=TaskChoice(language_only=True)) is None
    (tmp_path / "preprocessor_config.json").unlink()
    assert vision_of(tmp_path, processor=None) is None
    assert "there is no preprocessor_config.json" in caplog.text
    other = CONFIG | {"model_type": "aya_vision", "architectures": ["AyaVisionForConditionalGeneration"]}
    assert vision_of(tmp_path, other) is None


def test_the_tower_counts_as_memory(tmp_path: Path) -> None:
    assert vision_of(tmp_path) is not None
    spec = read_hf_spec(tmp_path)
    layer = 4 * 768 * 769 + 768 * 3072 * 2 + 3072 + 768 + 4 * 768
    ends = 768 * 769 + 1024 * 768 + 2 * 768 + 576 * 12_288

    tower = num_parameters(spec) - num_parameters(structs.replace(spec, vision=None))

    assert tower == 12 * layer + ends


@pytest.mark.parametrize(
    ("config", "processor", "message"),
    [
        ({"scale_factor": 5}, {}, r"scale_factor is 5, which cannot divide the 32 patches"),
        ({"image_token_id": 49_280}, {}, r"image_token_id is 49280, expected a whole number from 0 to 49279"),
        (
            {"vision_config": TOWER | {"hidden_act": "relu"}},
            {},
            r"vision_config.hidden_act is 'relu', .*-only",
        ),
        (
            {"vision_config": TOWER | {"num_attention_heads": 7}},
            {},
            "7, they cannot divide the hidden size 768",
        ),
        ({}, {"max_image_size": {"longest_edge": 364}}, "the tower sees tiles of 512 pixels"),
        ({}, {"size": {"height": 5}}, 'expected {"longest_edge": pixels}, or serve'),
        ({}, {"resample": 5}, r"resample is 5, expected one of 1 \(Lanczos\)"),
        ({}, {"image_std": [0.5, 0, 0.5]}, "image_std is .*, expected three numbers of at least 1e-09"),
    ],
)
def test_what_is_refused(
    tmp_path: Path, config: dict[str, Any], processor: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        vision_of(tmp_path, CONFIG | config, PROCESSOR | processor)


QWEN_TEXT = {
    "vocab_size": 151_936,
    "hidden_size": 2048,
    "intermediate_size": 11_008,
    "num_hidden_layers": 2,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128_000,
    "rope_theta": 1e6,
}
QWEN_TOWER = {
    "depth": 32,
    "hidden_act": "silu",
    "hidden_size": 1280,
    "intermediate_size": 3420,
    "num_heads": 16,
    "in_chans": 3,
    "out_hidden_size": 2048,
    "patch_size": 14,
    "spatial_merge_size": 2,
    "spatial_patch_size": 14,
    "window_size": 112,
    "fullatt_block_indexes": [7, 15, 23, 31],
    "temporal_patch_size": 2,
}
QWEN: dict[str, Any] = {
    **QWEN_TEXT,
    "architectures": ["Qwen2_5_VLForConditionalGeneration"],
    "model_type": "qwen2_5_vl",
    "image_token_id": 151_655,
    "vision_config": QWEN_TOWER,
    "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
}
QWEN_PROCESSOR = {
    "min_pixels": 3136,
    "max_pixels": 12_845_056,
    "patch_size": 14,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
}


def test_the_tower_of_qwen2_5_vl_3b(tmp_path: Path) -> None:
    """The published folder has the fields of the language model beside `vision_config`."""
    vision = vision_of(tmp_path, QWEN, QWEN_PROCESSOR)

    assert vision is not None and vision.family == "qwen2_5_vl"
    assert (vision.row_pixels, vision.window_size, vision.whole_layers) == (28, 112, (7, 15, 23, 31))
    assert (vision.rope_sections, vision.rope_alternates) == ((16, 24, 24), False)
    assert (vision.most_rows, vision.rows_of(56, 84), vision.row_width(2048)) == (16_384, 6, 2048)
    assert vision.marker == "<|image_pad|>" and vision.processing.resample == 3
    assert (vision.processing.min_pixels, vision.processing.max_pixels) == (3136, 12_845_056)
    tower = num_parameters(read_hf_spec(tmp_path)) - num_parameters(
        structs.replace(read_hf_spec(tmp_path), vision=None)
    )
    assert 660e6 < tower < 680e6  # as published: 668 million
    limited = vision.limited(100_000)
    assert limited.processing.max_pixels == 100_000 and limited.most_rows == 128
    assert vision.limited(1).processing.min_pixels == vision.limited(1).processing.max_pixels == 28 * 28


@pytest.mark.parametrize(
    ("config", "tower", "processor", "message"),
    [
        (
            {"rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 20]}},
            {},
            {},
            r"mrope_section is \[16, 24, 20\], expected three numbers with the sum 64",
        ),
        ({}, {"out_hidden_size": 3584}, {}, "out_hidden_size is 3584, but the language model has 2048"),
        ({}, {"temporal_patch_size": 1}, {}, "temporal_patch_size is 1, expected 2, or serve its text"),
        ({}, {"fullatt_block_indexes": [7, 32]}, {}, r"fullatt_block_indexes is \[7, 32\], expected"),
        ({}, {"window_size": 14}, {}, "window_size is 14, expected at least 28"),
        ({}, {"num_heads": 17}, {}, "num_heads is 17, they cannot divide the hidden size 1280"),
        ({}, {}, {"patch_size": 16}, "patch_size is 16, expected 14"),
        ({}, {}, {"max_pixels": 100}, "max_pixels is 100, expected at least min_pixels, 3136"),
        ({}, {}, {"do_resize": False}, "do_resize is False, expected True"),
    ],
)
def test_what_is_refused_of_qwen(
    tmp_path: Path,
    config: dict[str, Any],
    tower: dict[str, Any],
    processor: dict[str, Any],
    message: str,
) -> None:
    changed = QWEN | {"vision_config": QWEN_TOWER | tower} | config
    with pytest.raises(ConfigError, match=message):
        vision_of(tmp_path, changed, QWEN_PROCESSOR | processor)


GEMMA_TOWER = {
    "hidden_size": 1152,
    "image_size": 896,
    "intermediate_size": 4304,
    "model_type": "siglip_vision_model",
    "num_attention_heads": 16,
    "num_hidden_layers": 27,
    "patch_size": 14,
    "vision_use_head": False,
}
GEMMA: dict[str, Any] = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "model_type": "gemma3",
    "boi_token_index": 255_999,
    "eoi_token_index": 256_000,
    "image_token_index": 262_144,
    "mm_tokens_per_image": 256,
    "text_config": {"model_type": "gemma3_text", "hidden_size": 2560, "num_hidden_layers": 2},
    "vision_config": GEMMA_TOWER,
}
GEMMA_PROCESSOR = {
    "do_pan_and_scan": None,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "resample": 2,
    "size": {"height": 896, "width": 896},
}


def test_the_tower_of_gemma_3_4b(tmp_path: Path) -> None:
    vision = vision_of(tmp_path, GEMMA, GEMMA_PROCESSOR)

    assert vision is not None and vision.family == "gemma3" and vision.sees_whole
    assert (vision.rows_per_tile, vision.grid, vision.scale_factor, vision.most_tiles) == (256, 64, 4, 1)
    assert (vision.image_token_id, vision.marker, vision.end_token) == (
        262_144,
        "<start_of_image>",
        "<end_of_image>",
    )
    assert (vision.processing.resample, vision.processing.tile_size) == (2, 896)
    assert vision.joined_size == 1152 and 5e12 < vision.flops_per_tile(2560) < 6e12


@pytest.mark.parametrize(
    ("config", "processor", "message"),
    [
        (
            {"mm_tokens_per_image": 255},
            {},
            "mm_tokens_per_image is 255, expected the square of a number that",
        ),
        ({"mm_tokens_per_image": 225}, {}, "divides the 64 patches of an image's side"),
        ({"image_token_index": 262_208}, {}, "image_token_index is 262208, expected a whole number from 0"),
        (
            {},
            {"do_pan_and_scan": True},
            "do_pan_and_scan is True, only false is supported, or serve its text",
        ),
        ({}, {"do_resize": False}, "do_resize is False, only true is supported"),
        ({}, {"size": {"height": 896, "width": 224}}, "but the tower sees tiles of 896 pixels"),
    ],
)
def test_what_is_refused_of_gemma_3(
    tmp_path: Path, config: dict[str, Any], processor: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        vision_of(tmp_path, GEMMA | config, GEMMA_PROCESSOR | processor)


@pytest.mark.parametrize("prefix", ["vision_tower.vision_model.", "model.vision_tower.", "vision_tower."])
def test_names_of_the_tower_in_all_layouts(prefix: str) -> None:
    kind = MULTIMODAL["gemma3"]

    assert (
        kind.usual_name(f"{prefix}post_layernorm.weight", sees=True) == "vision_model.post_layernorm.weight"
    )
    assert kind.usual_name(f"{prefix}head.probe", sees=True) is None
    assert kind.usual_name(f"{prefix}post_layernorm.weight") is None
    projector = "multi_modal_projector.mm_soft_emb_norm.weight"
    assert kind.usual_name(f"model.{projector}", sees=True) == projector
