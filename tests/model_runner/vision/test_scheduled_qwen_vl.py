"""The scheduler with the product's runner, tiny models of Qwen and of Gemma 4: images of any size."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from engine.models.spec import vision_spec
from tests.model_runner.conftest import Driver

from .test_gemma4 import Gemma4, make_gemma4  # noqa: F401
from .test_images import Seeing, Tiles
from .test_qwen_vl import MakeQwen, Qwen, make_qwen  # noqa: F401
from .test_scheduled_images import CASES, check_case

pytestmark = pytest.mark.slow
GRIDS = [(3, 5), (4, 6), (5, 2)]


class _AnySize:
    """`Seeing` for a model in which an image is one tile, [1, height, width, 3]."""

    def __init__(self, qwen: Qwen) -> None:
        vision = qwen.spec.vision
        assert vision is not None
        self._qwen, self._vision, self.spec, self.folder = qwen, vision, qwen.spec, qwen.folder
        self.per_tile, self.num_parts, self.row_pixels = (
            vision.rows_per_tile,
            vision.num_parts,
            vision.row_pixels,
        )

    @property
    def image_blocks(self) -> int:
        return max(self.blocks_of(self.tiles(seed)) for seed in range(len(GRIDS)))

    def rows_of(self, image: Tiles) -> int:
        return self._vision.rows_of(*image.shape[1:3])

    def blocks_of(self, image: Tiles) -> int:
        return -(-self.rows_of(image) // self.per_tile)

    def order_of(self, image: Tiles) -> tuple[int, bytes]:
        return 1, b""

    def tiles(self, seed: int, num: int = 1) -> Tiles:
        return self._qwen.image(seed, *GRIDS[seed])[None]

    def prompt(self, images: Sequence[Tiles], seed: int = 0) -> list[int]:
        return self._qwen.prompt([image[0] for image in images], seed)

    def logprobs(self, tokens: Sequence[int], images: Sequence[Tiles]) -> torch.Tensor:
        return self._qwen.logprobs(tokens, [image[0] for image in images])


ALL = [("qwen3_vl", name) for name in CASES]
SOME = [("qwen2_5_vl", name) for name in ("several steps for a tile", "retracted again and again", "drafts")]


@pytest.mark.parametrize(("outer", "case"), [*ALL, *SOME])
def test_answers_are_those_of_transformers(
    make_qwen: MakeQwen,  # noqa: F811
    make_driver: Callable[..., Driver],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    outer: str,
    case: str,
) -> None:
    if "tile_parts" in CASES[case]:
        monkeypatch.setattr(vision_spec, "PART_PATCHES", 4 * 24)  # an image is a block, and its work a part
    seeing: Any = _AnySize(make_qwen(outer))
    check_case(cast(Seeing, seeing), make_driver, tmp_path, CASES[case])


SEEING = ("chunks of a page, one image at a time", "ahead of results", "retracted again and again", "drafts")
WHOLE = ("chunks of a page, one image at a time", "several steps for a tile", "retracted again and again")


@pytest.mark.parametrize(
    ("form", "case"),
    [
        *(("as E2B", case) for case in SEEING),
        *(("inputs of layers, whole images, windows last", case) for case in WHOLE),
        ("as 31B", "too few pages"),
    ],
)
def test_answers_of_gemma_4(
    make_gemma4: Callable[[str], Gemma4],  # noqa: F811
    make_driver: Callable[..., Driver],
    tmp_path: Path,
    form: str,
    case: str,
) -> None:
    seeing: Any = _AnySize(make_gemma4(form))
    check_case(cast(Seeing, seeing), make_driver, tmp_path, CASES[case])
