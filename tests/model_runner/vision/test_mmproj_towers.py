"""Towers of LLaVA, InternVL, Mistral 3 and Qwen2(.5)-VL in `mmproj` files: the log-probabilities of the folders."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from engine.models.gguf.gguf_file import GGUFFile
from engine.models.gguf_vision import with_tower
from engine.models.weight_files.weight_memory import num_parameters
from engine.runtime.errors import ConfigError
from tests.mmproj_towers import write_tower_pair

from . import test_families as tiles
from . import test_pixtral as pixtral
from . import test_qwen_vl as qwen_vl
from .test_images import Pictures, Seeing, pictures, scores
from .test_mmproj import found
from .test_qwen_vl import MakeQwen, make_qwen

__all__ = ["make_qwen", "pictures"]  # fixtures


def folder_of(tmp_path: Path, outer: str) -> Path:
    """A tiny folder of a family of tiles, or of Mistral 3."""
    if outer == "mistral3":
        return pixtral.make(tmp_path / "model", {"hidden_act": "silu"}, {}).folder
    return tiles.make(tmp_path / "model", *tiles.FAMILIES[outer]).folder


@pytest.mark.slow
@pytest.mark.parametrize("outer", ["llava", "internvl"])
@pytest.mark.parametrize(("kind", "atol"), [("F32", 1e-4), ("F16", 0.03)])
def test_tiles_are_those_of_the_folder(
    make_driver: Any,
    unpack: Any,
    pictures: Callable[[Seeing], Pictures],
    tmp_path: Path,
    outer: str,
    kind: str,
    atol: float,
) -> None:
    seeing = tiles.make(tmp_path / "model", *tiles.FAMILIES[outer])
    model = found(write_tower_pair(seeing.folder, tmp_path / "pair", kind))
    assert model.spec.vision == seeing.spec.vision and not model.no_tower
    assert num_parameters(model.spec) == num_parameters(seeing.spec)
    driver = make_driver(
        model.spec, Path(model.source.path), kind="gguf", tower=model.source.tower, num_encoder_rows=256
    )
    kept = pictures(seeing)

    for num_images in range(4):
        images = [seeing.tiles(seed, 1 + seed % 2) for seed in range(num_images)]
        tokens, encodes = seeing.prompt(images), tuple(map(kept.encode, images))
        expected = seeing.logprobs(tokens, images)[torch.arange(len(tokens) - 1), tokens[1:]]
        for chunk in (7, len(tokens)):
            req, got = kept.start(driver, tokens, encodes), []
            while req.computed < len(tokens):
                work = [(req, min(chunk, len(tokens) - req.computed))]
                result = driver.step(work, encodes=() if req.computed else encodes)
                got += scores(unpack, result) if result.prompt_logprobs else []
            np.testing.assert_allclose(got, expected, atol=atol, err_msg=f"{num_images}, chunks of {chunk}")
            driver.finish(req)
        kept.next_row = 0


@pytest.mark.slow
@pytest.mark.parametrize("outer", ["mistral3", "pixtral", "qwen2_vl", "qwen2_5_vl"])
@pytest.mark.parametrize(("kind", "atol"), [("F32", 1e-4), ("F16", 0.03)])
def test_images_of_any_size_are_those_of_the_folder(
    make_qwen: MakeQwen, make_driver: Any, unpack: Any, tmp_path: Path, outer: str, kind: str, atol: float
) -> None:
    is_qwen = outer.startswith("qwen")
    of_pixtral: Any = pixtral.PIXTRAL_12B if outer == "pixtral" else ({"hidden_act": "silu"}, {})
    model = make_qwen(outer) if is_qwen else pixtral.make(tmp_path / "model", *of_pixtral)
    read = found(write_tower_pair(model.folder, tmp_path / "pair", kind))
    vision, own = model.spec.vision, read.spec.vision
    assert own is not None and vision is not None and not read.no_tower
    assert replace(own, processing=vision.processing) == vision
    if is_qwen:
        assert (own.processing.min_pixels, own.processing.max_pixels) == (3_136, 12_845_056)
    else:
        assert own.processing == vision.processing
    assert num_parameters(read.spec) == num_parameters(model.spec)
    driver = make_driver(
        read.spec,
        Path(read.source.path),
        kind="gguf",
        tower=read.source.tower,
        num_encoder_rows=256,
        max_model_len=512,
    )

    for num_images in range(4):
        images = [model.image(seed, *grid) for seed, grid in enumerate(qwen_vl.GRIDS[:num_images])]
        kept, tokens = qwen_vl.Pictures(driver, tmp_path), model.prompt(images)
        encodes = tuple(map(kept.add, images))
        expected = model.logprobs(tokens, images)[torch.arange(len(tokens) - 1), tokens[1:]]
        for chunk in (7, len(tokens)):
            if is_qwen:
                req = kept.start(driver, tokens, encodes)
            else:
                req = driver.start(tokens, qwen_vl.SCORED)
                assert isinstance(model, pixtral.Mistral)
                req.media = pixtral.media_of(model, tokens, encodes, own.rows_per_tile)
            got: list[float] = []
            while req.computed < len(tokens):
                work = [(req, min(chunk, len(tokens) - req.computed))]
                result = driver.step(work, encodes=() if req.computed else encodes)
                got += scores(unpack, result) if result.prompt_logprobs else []
            np.testing.assert_allclose(got, expected, atol=atol, err_msg=f"{num_images}, chunks of {chunk}")
            driver.finish(req)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("outer", "keys", "cause"),
    [
        (
            "llava",
            {"vision__image_grid_pinpoints": [24, 40]},
            "expected pairs of multiples of 24, the side of a",
        ),
        (
            "llava",
            {"vision__image_grid_pinpoints": [24, 48], "vision__mm_patch_merge_type": "flat"},
            "mm_patch_merge_type is 'flat', expected 'spatial_unpad'",
        ),
        ("llava", {"vision__image_grid_pinpoints": [24, 48]}, "image_newline' is missing"),
        (
            "llava",
            {"vision__feature_layer": [1]},
            "feature_layer is .*expected only the last of the 2 layers",
        ),
        ("llava", {"use_silu": True}, "clip.use_gelu is False, expected true for a tower of this kind"),
        ("internvl", {"vision__projector__scale_factor": 4}, "which cannot divide the 6 patches"),
        (
            "internvl",
            {"vision__preproc_min_tiles": 5},
            "preproc_min_tiles is 5, expected a whole number from 1",
        ),
        ("mistral3", {"vision__spatial_merge_size": 3}, "merging_layer.weight.* has the shape"),
        ("mistral3", {"use_silu": None}, "clip.use_silu is False, expected true"),
        (
            "mistral3",
            {"vision__attention__head_count": 16},
            "cannot divide the embedding length 32 into multi",
        ),
    ],
)
def test_a_tower_that_is_not_computed(tmp_path: Path, outer: str, keys: dict[str, Any], cause: str) -> None:
    path = write_tower_pair(folder_of(tmp_path, outer), tmp_path / "pair", **keys)

    with pytest.raises(ConfigError, match=rf"mmproj-model\.gguf: .*{cause}"):
        found(path, mmproj=str(path.with_name("mmproj-model.gguf")))


@pytest.mark.slow
def test_a_tower_of_qwen2_5_vl_that_is_not_computed(make_qwen: MakeQwen, tmp_path: Path) -> None:
    folder = make_qwen("qwen2_5_vl").folder
    path = write_tower_pair(folder, tmp_path / "pair", vision__n_wa_pattern=None)
    assert "n_wa_pattern is missing" in found(path).no_tower
    path = write_tower_pair(folder, tmp_path / "gelu", use_silu=None)
    assert "clip.use_silu is False, expected true" in found(path).no_tower
    path = write_tower_pair(folder, tmp_path / "other", projector_type="qwen3vl_merger", use_gelu=True)
    other = found(path).no_tower
    assert "general.architecture is 'qwen2vl', but the tower is one for qwen3vl and qwen3vlmoe" in other
    path = write_tower_pair(folder, tmp_path / "patches", vision__patch_size=8)
    with pytest.raises(ConfigError, match=r"patch_embed.proj.weight' has the shape \[32, 3, 2, 4, 4\]"):
        found(path)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("outer", "without", "cause"),
    [
        ("internvl", ".ln1.bias", "is a tower of InternViT-6B, of which only that of 300M is computed"),
        ("llava", "v.class_embd", "has no tensor 'v.class_embd': it is not a tower of CLIP"),
    ],
)
def test_a_tower_without_a_tensor(tmp_path: Path, outer: str, without: str, cause: str) -> None:
    path = write_tower_pair(folder_of(tmp_path, outer), tmp_path / "pair", without=without)

    assert cause in found(path).no_tower


@pytest.mark.slow
def test_towers_of_another_model(make_qwen: MakeQwen, tmp_path: Path) -> None:
    path = write_tower_pair(folder_of(tmp_path, "llava"), tmp_path / "llava")
    other = write_tower_pair(make_qwen("qwen2_vl").folder, tmp_path / "qwen")
    tower = other.with_name("mmproj-model.gguf")

    with pytest.raises(
        ConfigError, match="general.architecture is 'llama', but the tower is one for qwen2vl"
    ):
        found(path, mmproj=str(tower))
    wider = replace(found(path, language_model_only=True).spec, hidden_size=128)
    own = path.with_name("mmproj-model.gguf")
    with pytest.raises(
        ConfigError, match=r"rows of mm\.2\.weight is 64, but the embedding_length of model.gguf is 128"
    ):
        with_tower(GGUFFile(path), wider, own)
