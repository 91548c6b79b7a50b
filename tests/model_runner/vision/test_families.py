"""Towers and connectors of further families against transformers: rows, log-probabilities, chunks."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine.models.hf.hf_config import read_hf_spec
from engine.models.weight_files.check_weights import check_folder_weights
from engine.models.weight_files.weight_memory import num_parameters

from .test_images import IMAGE_ID, TEXT, Pictures, Seeing, Tiles, pictures, scores

__all__ = ["pictures"]  # a fixture

SIDE = 24
COLORS = {"image_mean": [0.5, 0.4, 0.6], "image_std": [0.5, 0.3, 0.7]}
CROP = {"size": {"shortest_edge": SIDE}, "crop_size": {"height": SIDE, "width": SIDE}}
SQUARE = {"size": {"height": SIDE, "width": SIDE}}
TOWER = {
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "image_size": SIDE,
    "patch_size": 4,
}
CLIP, SIGLIP = {"model_type": "clip_vision_model"}, {"model_type": "siglip_vision_model"}
FULL = {"vision_feature_select_strategy": "full"}
INTERNVIT = {"attention_bias": True, "layer_scale_init_value": 0.5}
FAMILIES: dict[str, tuple[str, dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "llava": ("llava", CLIP, {}, CROP),
    "llava, the last layer and the class": ("llava", CLIP, FULL | {"vision_feature_layer": -1}, CROP),
    "llava with a tower of SigLIP and no biases": (
        "llava",
        SIGLIP | {"vision_use_head": False},
        FULL | {"multimodal_projector_bias": False},
        SQUARE,
    ),
    "internvl": ("internvl", INTERNVIT, {}, SQUARE | {"max_patches": 4}),
    "internvl without biases, joined by four": (
        "internvl",
        {"patch_size": 3},
        {"downsample_ratio": 0.25, "vision_feature_layer": -2},
        SQUARE,
    ),
}


class FlatSeeing(Seeing):
    """Tiles in one list, not one for each prompt."""

    def pixels(self, images: Sequence[Tiles]) -> torch.Tensor:
        return super().pixels(images)[0]


def make(folder: Path, outer: str, tower: dict[str, Any], fields: dict[str, Any], processor: Any) -> Seeing:
    import transformers

    torch.manual_seed(0)
    text = TEXT | ({"model_type": "qwen2"} if outer == "internvl" else {})
    config = transformers.AutoConfig.for_model(
        outer, text_config=text, vision_config=TOWER | tower, image_token_id=IMAGE_ID, **fields
    )
    config._attn_implementation = "eager"
    reference = transformers.AutoModelForImageTextToText.from_config(config).eval()
    with torch.no_grad():
        for name, parameter in reference.named_parameters():
            if "norm" in name or "lambda" in name:
                parameter.uniform_(0.5, 1.5)
            else:
                parameter.normal_(0.0, 0.3 if parameter.ndim == 1 else 1.5 / parameter[0].numel() ** 0.5)
    reference.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(processor | COLORS))
    return FlatSeeing(reference, folder, read_hf_spec(folder))


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize("name", ["llava", "internvl", *(name for name in FAMILIES if len(name) > 8)])
def test_rows_and_logits_are_those_of_transformers(
    make_driver: Any, unpack: Any, pictures: Callable[[Seeing], Pictures], tmp_path: Path, name: str
) -> None:
    seeing = make(tmp_path / "model", *FAMILIES[name])
    spec, _ = check_folder_weights(seeing.folder, seeing.spec)
    assert spec.vision is not None
    unused = sum(
        parameter.numel()
        for key, parameter in seeing.reference.named_parameters()
        if "post_layernorm" in key or (".2." in key and "vision" in key and spec.vision.num_layers == 2)
    )
    assert num_parameters(spec) == sum(p.numel() for p in seeing.reference.parameters()) - unused
    images, kept = [seeing.tiles(1, 2), seeing.tiles(2)], pictures(seeing)
    driver = make_driver(spec, seeing.folder, num_encoder_rows=4 * seeing.per_tile, max_model_len=512)
    tokens, encodes = seeing.prompt(images), tuple(map(kept.encode, images))
    expected = seeing.logprobs(tokens, images)[torch.arange(len(tokens) - 1), tokens[1:]]

    req = kept.start(driver, tokens, encodes)
    result = driver.step([(req, len(tokens))], encodes=encodes)

    np.testing.assert_allclose(scores(unpack, result), expected, atol=1e-4)
    with torch.inference_mode():
        rows = seeing.reference.model.get_image_features(seeing.pixels(images)).pooler_output
    rows = torch.cat(list(rows))
    np.testing.assert_allclose(driver.runner.encoder_rows.rows[: len(rows)], rows, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llava", "internvl"])
@pytest.mark.parametrize("num_images", [0, 1, 3])
def test_chunks_may_cut_images_anywhere(
    make_driver: Any,
    unpack: Any,
    pictures: Callable[[Seeing], Pictures],
    tmp_path: Path,
    name: str,
    num_images: int,
) -> None:
    seeing = make(tmp_path / "model", *FAMILIES[name])
    images = [seeing.tiles(seed, 1 + seed % 2) for seed in range(num_images)]
    tokens, kept = seeing.prompt(images), pictures(seeing)
    driver = make_driver(seeing.spec, seeing.folder, num_encoder_rows=256)
    encodes = tuple(map(kept.encode, images))
    target = seeing.logprobs(tokens, images)[torch.arange(len(tokens) - 1), tokens[1:]]

    for chunk in (1, 5, 40, len(tokens)):
        req, found = kept.start(driver, tokens, encodes), []
        while req.computed < len(tokens):
            part = (req, min(chunk, len(tokens) - req.computed))
            result = driver.step([part], encodes=encodes if not req.computed else ())
            found += scores(unpack, result) if result.prompt_logprobs else []
        np.testing.assert_allclose(found, target, atol=1e-4, err_msg=f"chunks of {chunk}")
        driver.finish(req)
