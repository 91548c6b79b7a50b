"""The tower of a GGUF model in a `mmproj` file beside it: the same rows and log-probabilities as the folder's."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from engine.launch.resolve.model_resolution import find_model, read_model
from engine.models.weight_files.weight_memory import num_parameters
from engine.runtime.config.engine_config import ModelConfig
from engine.runtime.errors import ConfigError
from tests.mmproj_files import write_pair, write_qwen3_pair

from . import test_qwen_vl as qwen_vl
from .test_images import MakeSeeing, Pictures, Seeing, make_seeing, pictures, scores
from .test_qwen_vl import MakeQwen, make_qwen

__all__ = ["make_qwen", "make_seeing", "pictures"]  # fixtures


def found(path: Path, **settings: Any) -> Any:
    config = ModelConfig(model=str(path), **settings)
    return read_model(config, find_model(config))


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize(
    ("kind", "swapped", "atol"),
    [("F32", True, 1e-4), ("F16", False, 0.02), ("BF16", False, 0.2), ("Q8_0", False, 0.2)],
)
def test_logits_are_those_of_the_folder(
    make_seeing: MakeSeeing,
    make_driver: Any,
    unpack: Any,
    pictures: Callable[[Seeing], Pictures],
    tmp_path: Path,
    kind: str,
    swapped: bool,
    atol: float,
) -> None:
    seeing = make_seeing(intermediate_size=64)
    model = found(write_pair(seeing.folder, tmp_path / "pair", kind, swapped=swapped))
    assert model.spec.vision == seeing.spec.vision and not model.no_tower
    assert num_parameters(model.spec) == num_parameters(seeing.spec)
    driver = make_driver(
        model.spec, Path(model.source.path), kind="gguf", tower=model.source.tower, num_encoder_rows=64
    )
    image, kept = seeing.tiles(1, 2), pictures(seeing)
    tokens, encode = seeing.prompt([image]), kept.encode(image)

    result = driver.step([(kept.start(driver, tokens, [encode]), len(tokens))], encodes=(encode,))

    expected = seeing.logprobs(tokens, [image])[torch.arange(len(tokens) - 1), tokens[1:]]
    np.testing.assert_allclose(scores(unpack, result), expected, atol=atol)


def test_gemma_3_is_that_of_the_folder(
    make_seeing: MakeSeeing,
    make_driver: Any,
    unpack: Any,
    pictures: Callable[[Seeing], Pictures],
    tmp_path: Path,
) -> None:
    """Attention both ways within an image, and the norm of the connector, which the file has as 1 + w."""
    seeing = make_seeing("gemma3")
    model = found(write_pair(seeing.folder, tmp_path / "pair"))
    assert model.spec.vision == seeing.spec.vision and not model.no_tower
    assert num_parameters(model.spec) == num_parameters(seeing.spec)
    driver = make_driver(
        model.spec, Path(model.source.path), kind="gguf", tower=model.source.tower, num_encoder_rows=64
    )
    images, kept = [seeing.tiles(1), seeing.tiles(2)], pictures(seeing)
    tokens, encodes = seeing.prompt(images), tuple(map(kept.encode, images))

    result = driver.step([(kept.start(driver, tokens, encodes), len(tokens))], encodes=encodes)

    expected = seeing.logprobs(tokens, images)[torch.arange(len(tokens) - 1), tokens[1:]]
    np.testing.assert_allclose(scores(unpack, result), expected, atol=1e-4)


def test_which_file_is_the_tower(make_seeing: MakeSeeing, tmp_path: Path, caplog: Any) -> None:
    seeing = make_seeing()
    path = write_pair(seeing.folder, tmp_path / "pair")
    tower = path.with_name("mmproj-model.gguf")

    assert found(path).source.tower == found(path.parent).source.tower == str(tower)
    assert found(path).weights.num_files == 2
    text = found(path, language_model_only=True)
    assert text.spec.vision is None and text.weights.num_files == 1 and not text.source.tower
    other = tower.rename(tmp_path / "elsewhere.gguf")
    assert found(path).spec.vision is None and not found(path).no_tower
    asked = found(path, mmproj=str(other))
    assert asked.source.tower == str(other) and asked.spec.vision is not None
    for name in ("a-mmproj.gguf", "mmproj-b.gguf"):
        path.with_name(name).write_bytes(other.read_bytes())
    assert found(path).spec.vision is None
    assert "several towers: a-mmproj.gguf, mmproj-b.gguf; images need one of them as --mmproj" in caplog.text


@pytest.mark.parametrize(
    ("keys", "cause"),
    [
        (
            {"projector_type": "ldp"},
            "'ldp', which the engine does not compute, only idefics3, gemma3, mlp, internvl, pixtral, qwen2vl_",
        ),
        (
            {"vision__projection_dim": 128},
            "projection_dim is 128, but the embedding_length of model.gguf is 64",
        ),
        ({"vision__attention__head_count": 5}, "head_count is 5, they cannot divide the embedding length 32"),
        ({"vision__projector__scale_factor": 4}, "scale_factor is 4, which cannot divide the 6 patches"),
        (
            {"vision__image_std": [1.0, 0.0, 1.0]},
            "image_std is array.*expected three numbers from 1e-09 to 1e9",
        ),
        (
            {"vision__image_mean": [0.5, float("inf"), 0.5]},
            "image_mean is array.*expected three numbers from",
        ),
        ({"vision__patch_size": None}, r"the field clip\.vision\.patch_size is missing"),
        ({"vision__projector_type": [1, 2, 3]}, "but clip.projector_type is 'idefics3', another name"),
        ({"use_gelu": False}, r"clip\.use_gelu is False, expected true"),
    ],
)
def test_a_tower_that_does_not_fit(
    make_seeing: MakeSeeing, tmp_path: Path, keys: dict[str, Any], cause: str
) -> None:
    path = write_pair(make_seeing().folder, tmp_path / "pair", **keys)
    tower = path.with_name("mmproj-model.gguf")

    with pytest.raises(ConfigError, match=rf"mmproj-model\.gguf: .*{cause}"):
        found(path, mmproj=str(tower))

    text = found(path)  # one that only lies there may be of another model
    assert text.spec.vision is None and not text.source.tower
    assert text.no_tower.startswith(f"{tower}: ")


def test_files_that_are_no_tower(make_seeing: MakeSeeing, tmp_path: Path) -> None:
    seeing = make_seeing()
    path = write_pair(seeing.folder, tmp_path / "pair")
    tower = path.with_name("mmproj-model.gguf")

    with pytest.raises(ConfigError, match="general.architecture is 'llama', expected 'clip': it is no tower"):
        found(path, mmproj=str(path))
    with pytest.raises(ConfigError, match="as the model, and this file with --mmproj"):
        found(tower)
    with pytest.raises(
        ConfigError, match="none.gguf: there is no such file; give the GGUF file of the model's tower"
    ):
        found(path, mmproj="none.gguf")
    with pytest.raises(ConfigError, match="not a GGUF file"):
        found(path, mmproj=str(seeing.folder / "config.json"))
    with pytest.raises(ConfigError, match="is a folder, which has its tower in its own files; drop --mmproj"):
        found(seeing.folder, mmproj=str(tower))
    with pytest.raises(ConfigError, match="but the task is embed, of texts only; drop --mmproj"):
        found(path, mmproj=str(tower), task="embed")
    with pytest.raises(ConfigError, match="but --language-model-only leaves towers out; drop one of them"):
        ModelConfig(model=str(path), mmproj=str(tower), language_model_only=True)


def test_a_tower_without_a_tensor(make_seeing: MakeSeeing, tmp_path: Path) -> None:
    path = write_pair(make_seeing().folder, tmp_path / "pair", vision__block_count=3)

    with pytest.raises(
        ConfigError, match=r"mmproj-model\.gguf: .*'vision_model.encoder.layers.2.* is missing"
    ):
        found(path)


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize(("kind", "atol"), [("F32", 1e-4), ("F16", 0.02)])
def test_qwen3_vl_is_that_of_the_folder(
    make_qwen: MakeQwen, make_driver: Any, unpack: Any, tmp_path: Path, kind: str, atol: float
) -> None:
    qwen = make_qwen("qwen3_vl")
    model = found(write_qwen3_pair(qwen.folder, tmp_path / "pair", kind))
    vision, own = qwen.spec.vision, model.spec.vision
    assert own is not None and vision is not None and not model.no_tower
    assert replace(own, processing=vision.processing) == vision
    assert (own.processing.min_pixels, own.processing.max_pixels) == (65_536, 16_777_216)
    assert (own.processing.mean, own.processing.tile_size) == (vision.processing.mean, 8)
    assert num_parameters(model.spec) == num_parameters(qwen.spec)
    driver = make_driver(
        model.spec, Path(model.source.path), kind="gguf", tower=model.source.tower, num_encoder_rows=128
    )
    images = [qwen.image(seed, *grid) for seed, grid in enumerate(qwen_vl.GRIDS)]
    kept, tokens = qwen_vl.Pictures(driver, tmp_path), qwen.prompt(images)
    encodes = tuple(map(kept.add, images))

    result = driver.step([(kept.start(driver, tokens, encodes), len(tokens))], encodes=encodes)

    expected = qwen.logprobs(tokens, images)[torch.arange(len(tokens) - 1), tokens[1:]]
    np.testing.assert_allclose(scores(unpack, result), expected, atol=atol)


def test_a_tower_of_qwen3_vl_that_does_not_fit(make_qwen: MakeQwen, tmp_path: Path) -> None:
    folder = make_qwen("qwen3_vl").folder
    path = write_qwen3_pair(folder, tmp_path / "pair", vision__is_deepstack_layers=[True])

    assert "expected true or false for each of the 4 layers" in found(path).no_tower
    smaller = write_qwen3_pair(folder, tmp_path / "other", vision__embedding_length=12)
    assert (
        "head_count is 2, they cannot divide the embedding length 12 into multiples of 4"
        in found(smaller).no_tower
    )
