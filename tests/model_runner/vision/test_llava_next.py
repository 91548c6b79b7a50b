"""Images of LLaVA-NeXT against transformers, on a tiny random one: log-probabilities, chunks, the scheduler's steps."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pytest
import torch

from engine.models.hf.hf_config import read_hf_spec
from engine.models.weight_files.check_weights import check_folder_weights
from engine.models.weight_files.weight_memory import num_parameters
from engine.runtime.messages import MediaItem
from engine.runtime.step_plan import Encode
from engine.scheduler.requests.prompt_images import tiles_of
from engine.tokenizer_manager.media.processors import llava_next
from tests.mmproj_towers import write_tower_pair
from tests.model_runner.conftest import Driver, int32

from .test_images import IMAGE_ID, SCORED, TEXT, Seeing, Tiles, scores
from .test_mmproj import found as found_model
from .test_scheduled_images import CASES, check_case

SIDE = 24
PINPOINTS = [[24, 48], [48, 24], [48, 48], [72, 24]]
TOWER = {
    "model_type": "clip_vision_model",
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "image_size": SIDE,
    "patch_size": 6,
}
SIZES = [(40, 22), (20, 70), (47, 46)]
"""Widths and heights: two tiles side by side, three one below the other, four; each has black at its sides."""


class Next(Seeing):
    """The tiles of an image come from the processor; its height and width, which its rows follow from, are kept."""

    sizes: dict[bytes, tuple[int, int]] = {}  # noqa: RUF012

    def tiles(self, seed: int, num: int = 1) -> Tiles:
        assert self.spec.vision is not None
        width, height = SIZES[seed]
        pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
        image = PIL.Image.fromarray(pixels)
        tiles, *size = llava_next.tiles_of(image, self.spec.vision.processing, splits=True)
        self.sizes[tiles.tobytes()] = (size[0], size[1])
        return tiles

    def _order(self, image: Tiles) -> list[tuple[int, int]]:
        assert self.spec.vision is not None
        return llava_next.rows_of(self.spec.vision, *self.sizes[image.tobytes()])

    def order_of(self, image: Tiles) -> tuple[int, bytes]:
        return 1, int32([n for piece in self._order(image) for n in piece])

    def rows_of(self, image: Tiles) -> int:
        return sum(length for _, length in self._order(image))

    def prompt(self, images: Sequence[Tiles], seed: int = 0) -> list[int]:
        tokens = [5 + seed, 3, 8]
        for image in images:
            tokens += [*[IMAGE_ID] * self.rows_of(image), 7]
        return [*tokens, 2, 9, 4]

    @torch.inference_mode()
    def logprobs(self, tokens: Sequence[int], images: Sequence[Tiles]) -> torch.Tensor:
        found: dict[str, torch.Tensor] = {}
        if images:
            pixels = torch.zeros(len(images), max(map(len, images)), 3, SIDE, SIDE)
            for number, image in enumerate(images):
                pixels[number, : len(image)] = self.pixels([image])[0]
            sizes = torch.tensor([self.sizes[image.tobytes()] for image in images])
            found = {"pixel_values": pixels, "image_sizes": sizes}
        logits: torch.Tensor = self.reference(torch.tensor([tokens]), **found).logits[0].float()
        return logits.log_softmax(-1)

    def media(self, tokens: Sequence[int], images: Sequence[Tiles], encodes: Sequence[Encode]) -> bytes:
        """The rows of the placeholders, by the code of the scheduler."""
        spans, start = [], 0
        for image, encode in zip(images, encodes, strict=True):
            start = tokens.index(IMAGE_ID, start)
            _, rows = self.order_of(image)
            item = MediaItem(b"", int32([start, self.rows_of(image)]), encode.pixels, encode.shape, rows)
            for tile in tiles_of(item, self.per_tile):
                first = encode.first_row + tile.number * self.per_tile
                spans += [(position, length, first + row) for position, length, row in tile.spans]
            start += self.rows_of(image)
        return int32([n for span in sorted(spans) for n in span])


@pytest.fixture
def make_next(tmp_path: Path) -> Callable[[], Next]:
    """A tiny random model, saved by transformers, with a processor's configuration."""

    def make() -> Next:
        import transformers

        torch.manual_seed(0)
        config = transformers.AutoConfig.for_model(
            "llava_next",
            text_config=TEXT,
            vision_config=TOWER,
            image_token_index=IMAGE_ID,
            image_grid_pinpoints=PINPOINTS,
        )
        config._attn_implementation = "eager"
        reference = transformers.LlavaNextForConditionalGeneration(config).eval()
        with torch.no_grad():
            for name, parameter in reference.named_parameters():
                if "norm" in name:
                    parameter.uniform_(0.5, 1.5)
                else:
                    parameter.normal_(0.0, 0.3 if parameter.ndim == 1 else 1.5 / parameter[0].numel() ** 0.5)
            reference.lm_head.weight[IMAGE_ID] = 0.0  # no placeholders in answers
        folder = tmp_path / "model"
        reference.save_pretrained(folder)
        processor = {
            "size": {"shortest_edge": SIDE},
            "crop_size": {"height": SIDE, "width": SIDE},
            "image_grid_pinpoints": PINPOINTS,
            "do_pad": True,
            "image_mean": [0.5, 0.4, 0.6],
            "image_std": [0.5, 0.3, 0.7],
        }
        (folder / "preprocessor_config.json").write_text(json.dumps(processor))
        return Next(reference, folder, read_hf_spec(folder))

    return make


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "num_images"), [*(("folder", num) for num in range(4)), ("gguf", 0), ("gguf", 3)]
)
def test_log_probabilities_are_those_of_transformers(
    make_next: Callable[[], Next], make_driver: Any, unpack: Any, tmp_path: Path, kind: str, num_images: int
) -> None:
    """Chunks may end anywhere, also within a row of patches that goes through two tiles; also a pair of GGUF files."""
    seeing = make_next()
    spec, _ = check_folder_weights(seeing.folder, seeing.spec)
    unused = sum(
        parameter.numel()
        for name, parameter in seeing.reference.named_parameters()
        if "post_layernorm" in name or ("vision" in name and ".layers.2." in name)
    )
    assert num_parameters(spec) == sum(p.numel() for p in seeing.reference.parameters()) - unused
    images, encodes, row = [seeing.tiles(seed) for seed in range(num_images)], [], 0
    assert [len(image) for image in images] == [3, 4, 5][:num_images]
    for number, image in enumerate(images):
        path = tmp_path / f"tiles{number}"
        path.write_bytes(image.tobytes())
        tiles, height, width, colors = image.shape
        encodes.append(Encode(str(path), (tiles, height, width, colors), 0, tiles, row))
        row += tiles * seeing.per_tile
    source: dict[str, Any] = {"num_encoder_rows": 12 * seeing.per_tile, "max_model_len": 512}
    if kind == "gguf":
        read = found_model(write_tower_pair(seeing.folder, tmp_path / "pair"))
        assert read.spec.vision == seeing.spec.vision and not read.no_tower
        path, source = Path(read.source.path), source | {"kind": "gguf", "tower": read.source.tower}
        driver = make_driver(read.spec, path, **source)
    else:
        driver = make_driver(spec, seeing.folder, **source)
    tokens = seeing.prompt(images)
    expected = seeing.logprobs(tokens, images)[torch.arange(len(tokens) - 1), tokens[1:]]

    for chunk in (1, 7, 40, len(tokens)):
        req, found = driver.start(tokens, SCORED), []
        req.media = seeing.media(tokens, images, encodes)
        while req.computed < len(tokens):
            work = [(req, min(chunk, len(tokens) - req.computed))]
            result = driver.step(work, encodes=() if req.computed else tuple(encodes))
            found += scores(unpack, result) if result.prompt_logprobs else []
        np.testing.assert_allclose(found, expected, atol=1e-4, err_msg=f"chunks of {chunk}")
        driver.finish(req)


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        "chunks of a page, one image at a time",
        "several steps for a tile",
        "several steps for an image",
        "no prefix cache",
        "retracted again and again",
    ],
)
def test_answers_are_those_of_transformers(
    make_next: Callable[[], Next], make_driver: Callable[..., Driver], tmp_path: Path, case: str
) -> None:
    """Two of the images at most, so that a prompt fits: as in the other families, with hits within an image."""
    check_case(make_next(), make_driver, tmp_path, CASES[case] | {"num_tiles": 7})
