"""`read_vision`: the tower of a SmolVLM folder, its processor, and what of both is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from engine.models.hf.hf_config import read_hf_spec
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
    llava = CONFIG | {"model_type": "llava", "architectures": ["LlavaForConditionalGeneration"]}
    assert vision_of(tmp_path, llava) is None


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
