"""Images of Mistral 3 and Pixtral 12B against transformers, on tiny random ones: rows, log-probabilities, chunks."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine.models.hf.hf_config import read_hf_spec
from engine.models.spec.model_spec import with_quantization
from engine.models.weight_files.check_weights import check_folder_weights
from engine.models.weight_files.weight_memory import num_parameters
from engine.runtime.messages import MediaItem
from engine.runtime.step_plan import Encode
from engine.scheduler.requests.prompt_images import tiles_of
from tests.model_runner.conftest import int32

from .test_qwen_vl import BEGIN_ID, END_ID, GRIDS, IMAGE_ID, SCORED, TEXT, Image, Pictures, Qwen, scores

TOWER = {
    "model_type": "pixtral",
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 64,
    "patch_size": 4,
}


class Mistral(Qwen):
    """The images of a prompt are in one tensor, padded, with their sizes."""

    def prompt(self, images: Sequence[Image], seed: int = 0) -> list[int]:
        """Each row of an image ends with a token of its own."""
        assert self.spec.vision is not None
        side, tokens = self.spec.vision.row_pixels, [5, 3, 8]
        for image in images:
            height, width = (size // side for size in image.shape[:2])
            tokens += [BEGIN_ID, *[*[IMAGE_ID] * width, END_ID] * height, 7]
        return [*tokens, 2, 9, 4]

    def inputs(self, tokens: Sequence[int], images: Sequence[Image]) -> dict[str, torch.Tensor]:
        found: dict[str, torch.Tensor] = {"input_ids": torch.tensor([tokens])}
        assert self.spec.vision is not None
        how = self.spec.vision.processing
        sizes = [image.shape[:2] for image in images]
        pixels = np.zeros((len(images), 3, *np.max([*sizes, (1, 1)], axis=0)), np.float32)
        for number, (image, (height, width)) in enumerate(zip(images, sizes, strict=True)):
            rescaled = (image.astype(np.float64) * how.rescale_factor).astype(np.float32)
            values = (rescaled - np.asarray(how.mean, np.float32)) / np.asarray(how.std, np.float32)
            pixels[number, :, :height, :width] = values.transpose(2, 0, 1)
        if images:
            found |= {"pixel_values": torch.from_numpy(pixels), "image_sizes": torch.tensor(sizes)}
        return found


def media_of(model: Mistral, tokens: Sequence[int], encodes: Sequence[Encode], block_rows: int) -> bytes:
    """The rows of the placeholders, by the code of the scheduler for the rows of a tile that text interrupts."""
    assert model.spec.vision is not None
    media, start = [], 0
    for encode in encodes:
        num_rows = model.spec.vision.rows_of(*encode.shape[1:3])
        positions = [p for p, token in enumerate(tokens) if token == IMAGE_ID and p >= start][:num_rows]
        runs = [n for position in positions for n in (position, 1)]
        (tile,) = tiles_of(MediaItem(b"", int32(runs), encode.pixels, encode.shape), num_rows)
        blocks = np.frombuffer(encode.blocks, dtype=np.int32).tolist() or [encode.first_row]
        for position, length, row in tile.spans:
            media += [position, length, blocks[row // block_rows] + row % block_rows]
        start = positions[-1] + 1
    return int32(media)


def make(folder: Path, tower: dict[str, Any], fields: dict[str, Any], outer: str = "mistral3") -> Mistral:
    import transformers

    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(
        outer,
        text_config=TEXT | {"model_type": "mistral", "sliding_window": None},
        vision_config=TOWER | tower,
        image_token_index=IMAGE_ID,
        **fields,
    )
    config._attn_implementation = "eager"
    reference = transformers.AutoModelForImageTextToText.from_config(config).eval()
    with torch.no_grad():
        for name, parameter in reference.named_parameters():
            if "norm" in name or "ln_pre" in name:
                parameter.uniform_(0.5, 1.5)
            else:
                parameter.normal_(0.0, 0.3 if parameter.ndim == 1 else 1.5 / parameter[0].numel() ** 0.5)
    reference.save_pretrained(folder)
    processor = {
        "patch_size": config.vision_config.patch_size,
        "size": {"longest_edge": 64},
        "image_mean": [0.5, 0.4, 0.6],
        "image_std": [0.5, 0.3, 0.7],
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    return Mistral(reference, folder, read_hf_spec(folder))


PIXTRAL_12B = (
    {"hidden_act": "silu", "patch_size": 8},
    {"vision_feature_layer": -1, "vision_feature_select_strategy": "full"},
    "llava",
)
FORMS: dict[str, tuple[Any, ...]] = {
    "as Mistral Small 3.1": ({}, {}),
    "silu, joined by three, with biases": (
        {"hidden_act": "silu"},
        {"spatial_merge_size": 3, "multimodal_projector_bias": True, "tie_word_embeddings": False},
    ),
    "as Pixtral 12B": PIXTRAL_12B,
}


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("form", FORMS)
def test_rows_and_logits_are_those_of_transformers(
    make_driver: Any, unpack: Any, tmp_path: Path, form: str
) -> None:
    model = make(tmp_path / "model", *FORMS[form])
    spec, summary = check_folder_weights(model.folder, model.spec)
    assert spec.vision is not None and summary.num_ignored == 0
    assert num_parameters(spec) == sum(p.numel() for p in model.reference.parameters())
    driver = make_driver(spec, model.folder, num_encoder_rows=128, max_model_len=512)
    images = [model.image(seed, *grid) for seed, grid in enumerate(GRIDS)]
    kept, tokens = Pictures(driver, tmp_path), model.prompt(images)
    encodes = tuple(map(kept.add, images))
    expected = model.logprobs(tokens, images)[torch.arange(len(tokens) - 1), tokens[1:]]

    for chunk in (len(tokens), 7):
        req, found = driver.start(tokens, SCORED), []
        req.media = media_of(model, tokens, encodes, spec.vision.rows_per_tile)
        while req.computed < len(tokens):
            work = [(req, min(chunk, len(tokens) - req.computed))]
            result = driver.step(work, encodes=() if req.computed else encodes)
            found += scores(unpack, result) if result.prompt_logprobs else []
        np.testing.assert_allclose(found, expected, atol=1e-4, err_msg=f"chunks of {chunk}")
        driver.finish(req)

    inputs = model.inputs(tokens, images)
    with torch.inference_mode():
        rows = model.reference.model.get_image_features(
            inputs["pixel_values"], image_sizes=inputs["image_sizes"]
        )
        parts = list(driver.runner.encoder_rows._tower.parts_of(torch.from_numpy(images[0])))
    num_parts = spec.vision.num_parts * spec.vision.num_shares(*images[0].shape[:2])
    assert len(parts) == 1 + num_parts and all(part is None for part in parts[:-1])
    np.testing.assert_allclose(parts[-1], rows.pooler_output[0], atol=1e-4)
    assert tokens.count(BEGIN_ID) == 3


def test_the_tower_is_computed_in_8_bits(make_driver: Any, tmp_path: Path) -> None:
    model = make(tmp_path / "model", {"hidden_size": 64, "intermediate_size": 96}, {})
    image, rows = model.image(0, 3, 4), []
    for quantization in (None, "int8"):
        spec = with_quantization(model.spec, quantization)
        driver = make_driver(
            spec, model.folder, num_encoder_rows=32, quantization=quantization, dtype="bfloat16"
        )
        encode = Pictures(driver, tmp_path).add(image)
        driver.step([], encodes=(encode,))
        rows.append(driver.runner.encoder_rows.rows[encode.first_row : encode.first_row + 3 * 4])
    plain, made = rows

    assert not torch.equal(plain, made)
    assert (plain - made).norm() < 0.05 * plain.norm()
