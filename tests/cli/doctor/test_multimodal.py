"""Of a folder with a tower the report says in one line what is served."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from msgspec import structs

from engine.cli.doctor.model import check_images, check_task
from engine.cli.doctor.model_facts import ModelFacts
from engine.models.source import ModelSource
from tests.launch.resolve.test_image_settings import ANY_SIZE, SEEING
from tests.launch.resolve.test_resolve import HOST, config

from .test_model import FAIL, WARN, examine, not_well


def test_the_text_is_served_and_the_tower_is_not_read(tiny_model: Path, tmp_path: Path) -> None:
    import torch
    from safetensors.torch import load_file, save_file

    folder = Path(shutil.copytree(tiny_model, tmp_path / "model"))
    path, weights = folder / "config.json", folder / "model.safetensors"
    fields = {"model_type": "llava", "vision_config": {}, "text_config": json.loads(path.read_text())}
    path.write_text(json.dumps(fields))
    tensors = {f"language_model.{name}": tensor for name, tensor in load_file(weights).items()}
    save_file({**tensors, "vision_tower.embeddings.weight": torch.ones(512, 1024)}, weights)

    checks = examine(folder)

    assert not_well(checks) == []
    assert [check.code for check in checks if "only the text" in check.text] == ["weights"]
    assert (
        "serves only the text of this llava model; 1 tensor of its towers, 2 MiB, are not read"
        in checks[2].text
    )

    path.write_text(json.dumps(fields | {"model_type": "seer"}))
    refused = not_well(examine(folder))[0]
    assert (refused.code, refused.verdict) == ("model", FAIL)
    assert "model_type is 'seer' with a text_config" in refused.text


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        (
            {"mm_max_pixels": 20 * 512**2},
            "takes about 0.6 s here, the largest image 17 tiles and 10 s; detail low if a request states none",
        ),
        ({}, "takes about 0.6 s here; an image is one tile, see --mm-max-pixels (786432)"),
        (
            {"allowed_media_domains": ("a.org", "b.org"), "allowed_local_media_path": "/tmp"},
            "fetches from a.org, b.org; any client may read images below /tmp",
        ),
    ],
)
def test_the_seconds_of_an_image(settings, text) -> None:
    assert SEEING.vision is not None
    flops = SEEING.vision.flops_per_tile(SEEING.hidden_size)

    check = check_images(SEEING, config(num_threads=2, **settings), HOST, flops / 0.6)

    assert text in check.text and check.details == {"tile_s": 0.6}


def test_a_folder_of_images_must_exist(tmp_path) -> None:
    missing = str(tmp_path / "missing")

    check = check_images(SEEING, config(allowed_local_media_path=missing), HOST, 0.0)

    assert check.verdict is FAIL and missing in check.text


def test_the_tower_of_a_gguf_model_is_named() -> None:
    source = ModelSource("gguf", "/m/vlm.gguf", "vlm", "/m/mmproj-vlm.gguf")
    text = structs.replace(SEEING, vision=None)
    why = "/m/mmproj-vlm.gguf: clip.projector_type is 'x', which the engine does not compute; give the folder"

    seeing = check_task(ModelFacts(source=source, spec=SEEING))
    blind = check_task(ModelFacts(source=source, spec=text, no_tower=why))

    assert "generate text, of images too" in seeing.text and "the tower is mmproj-vlm.gguf" in seeing.text
    assert (blind.verdict, blind.fix) == (
        WARN,
        "give the folder",
    ) and "not of images: /m/mmproj" in blind.text


def test_an_image_of_any_size_has_tokens_by_its_pixels() -> None:
    spec = structs.replace(SEEING, vision=ANY_SIZE)
    flops = ANY_SIZE.flops_per_tile(spec.hidden_size)

    task = check_task(ModelFacts(spec=spec))
    images = check_images(spec, config(num_threads=2, mm_max_pixels=2_000_000), HOST, flops / 3)

    assert "of images too: a token for 28 x 28 pixels, at most 16,384 an image" in task.text
    assert (
        "images of at most 2,000,000 pixels, see --mm-max-pixels; encoding one of 1,048,576 takes about 3 s here"
        in (images.text)
    )
