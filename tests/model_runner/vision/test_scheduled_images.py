"""The scheduler with the product's runner: answers about images are those of transformers, whatever the steps are."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from engine.runtime.config.engine_config import CacheConfig, SchedulerConfig
from engine.runtime.feasibility import Capacity
from engine.runtime.messages import FinishKind, GenerateRequest, MediaItem
from engine.runtime.sampling_params import SamplingParams
from engine.runtime.step_plan import Encode, Pending
from engine.scheduler.batch import ScheduleBatch
from engine.scheduler.scheduler import Scheduler
from tests.model_runner.conftest import Driver, int32
from tests.model_runner.drafting.drafters import drafting
from tests.scheduler.speculation.proposers import free_drafts

from .test_images import IMAGE_ID, MakeSeeing, Seeing, Tiles, make_seeing  # noqa: F401

ANSWER_LEN = 5


class Served:
    """A scheduler and a runner, step by step."""

    def __init__(
        self, seeing: Seeing, driver: Driver, folder: Path, *, num_tiles: int, num_pages: int, **config: Any
    ) -> None:
        self._seeing, self._runner, self._folder = seeing, driver.runner, folder
        self._overlap = config.get("overlap", False)
        self._has_target = config.get("target_step_ms", 0) > 0
        per_tile = seeing.per_tile
        capacity = Capacity(
            256,
            num_pages,
            4,
            8,
            96,
            num_encoder_rows=num_tiles * per_tile,
            encoder_tile_rows=per_tile,
            encoder_tile_parts=config.pop("tile_parts", seeing.num_parts),
            encoder_row_pixels=seeing.row_pixels,
            has_rope_axes=seeing.spec.vision is not None and bool(seeing.spec.vision.rope_sections),
            images_are_whole=seeing.spec.vision is not None and seeing.spec.vision.sees_whole,
        )
        radix_cache = config.pop("radix_cache", True)
        self.scheduler = Scheduler(
            SchedulerConfig(schedule_conservativeness=0.01, **config),
            CacheConfig(page_size=4, radix_cache=radix_cache),
            capacity,
            frozenset(),
        )
        self._now_s = 0.0
        self.num_encoded = self.num_divided = 0
        self.answers: dict[str, list[int]] = {}
        self._in_flight: list[tuple[ScheduleBatch, Pending]] = []

    def item(self, tokens: Sequence[int], image: Tiles, start: int) -> MediaItem:
        """An image whose tiles are the next runs of placeholders from `start` on."""
        digest = hashlib.blake2b(image.tobytes(), digest_size=32)
        path = self._folder / digest.hexdigest()
        path.write_bytes(image.tobytes())
        firsts = [p for p in range(start, len(tokens)) if tokens[p] == IMAGE_ID and tokens[p - 1] != IMAGE_ID]
        num_runs, rows = self._seeing.order_of(image)
        runs = int32([n for first in firsts[:num_runs] for n in (first, self._seeing.rows_of(image))])
        tiles, height, width, colors = image.shape
        return MediaItem(digest.digest(), runs, str(path), (tiles, height, width, colors), rows)

    def submit(self, rid: str, tokens: Sequence[int], images: Sequence[Tiles]) -> None:
        media: list[MediaItem] = []
        start = 1
        for image in images:
            media.append(self.item(tokens, image, start))
            start = int(np.frombuffer(media[-1].runs, dtype=np.int32)[-2:].sum())
        params = SamplingParams(temperature=0.0, max_new_tokens=ANSWER_LEN, seed=0, ignore_eos=True)
        self.answers[rid] = []
        message = GenerateRequest(rid, int32(tokens), params, media=tuple(media))
        self.scheduler.handle(message, self._now_s)

    def step(self) -> None:
        self._now_s += 0.01
        batch = self.scheduler.next_batch(self._now_s)
        if batch is not None:
            self.num_encoded += sum(batch.num_tiles.values())
            self.num_divided += sum(each.num_parts > 0 for each in batch.plan.encodes)
            self._in_flight.append((batch, self._runner.launch(batch.plan)))
        waits = batch is None or not self._overlap or self.scheduler.needs_result(batch)
        while len(self._in_flight) > (not waits):
            oldest, pending = self._in_flight.pop(0)
            result = pending.wait()
            if oldest.plan.encodes and self._has_target:  # so that tiles are divided on any machine
                result = replace(result, encode_s=1.0)
            self.scheduler.settle(oldest, result, self._now_s)
        for output in self.scheduler.take_outputs():
            for row in output.outputs:
                assert row.finish is None or row.finish.kind is FinishKind.LENGTH, row.finish
                self.answers[row.rid] += np.frombuffer(row.token_ids, dtype=np.int32).tolist()
        self.scheduler.audit()

    def run(self) -> None:
        while self.scheduler.num_unfinished or self._in_flight:
            self.step()
        self.step()  # tells the runner of the last rows
        self.step()
        self.scheduler.on_idle()


CASES: dict[str, dict[str, Any]] = {
    "chunks of a page, one image at a time": {"chunked_prefill_size": 4, "num_tiles": 2},
    "whole prompts": {"chunked_prefill_size": -1},
    "no prefix cache": {"chunked_prefill_size": 16, "radix_cache": False},
    "several steps for a tile": {"chunked_prefill_size": 64, "target_step_ms": 0.01},
    "several steps for an image": {"chunked_prefill_size": 64, "target_step_ms": 0.01, "tile_parts": 1},
    "ahead of results": {"chunked_prefill_size": 24, "overlap": True},
    "retracted again and again": {"chunked_prefill_size": 24, "chaos": "retract=0.3:30"},
    "too few pages": {"chunked_prefill_size": 24, "num_pages": 32},
    "drafts": {"chunked_prefill_size": 24, "num_pages": 40, "chaos": "retract=0.2:10", "speculative": "mtp"},
}


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("outer", ["smolvlm", "gemma3"])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_answers_are_those_of_transformers(
    make_seeing: MakeSeeing,  # noqa: F811
    make_driver: Callable[..., Driver],
    tmp_path: Path,
    case: dict[str, Any],
    outer: str,
) -> None:
    """Prompts with 0 to 3 of three images, some with a common beginning, come while others run."""
    check_case(make_seeing(outer), make_driver, tmp_path, case)


def check_case(
    seeing: Seeing, make_driver: Callable[..., Driver], tmp_path: Path, case: dict[str, Any]
) -> None:
    settings = {"num_tiles": 6, "num_pages": 120} | case
    settings["num_tiles"] *= seeing.image_blocks
    num_pages, num_rows = settings["num_pages"], settings["num_tiles"] * seeing.per_tile
    speculative = case.get("speculative", "off")
    with (
        drafting(lambda known: known[-2], right=True),
        free_drafts(),
    ):  # it checks that it gets each token once
        driver = make_driver(
            seeing.spec,
            seeing.folder,
            num_pages=num_pages,
            num_encoder_rows=num_rows,
            speculative=speculative,
        )
        served = Served(seeing, driver, tmp_path, **settings)
        _check_answers(seeing, served, settings, case)
    drafts = served.scheduler.report(0.0).totals.draft_tokens
    assert (drafts > 0) == (speculative != "off")


def _check_answers(seeing: Seeing, served: Served, settings: dict[str, Any], case: dict[str, Any]) -> None:
    pictures = [seeing.tiles(seed, 1 + seed % 2) for seed in range(3)]
    rng = random.Random(4)
    asked = []
    for number in range(10):
        images = [pictures[0]] if number < 4 else rng.sample(pictures, rng.randrange(4))
        while sum(map(seeing.blocks_of, images)) > settings["num_tiles"]:
            images.pop()
        tokens = [*seeing.prompt(images, seed=number % 2), *(rng.randrange(90) for _ in range(3))]
        asked.append((tokens, images))
        served.submit(f"{number}", tokens, images)
        for _ in range(rng.randrange(5)):
            served.step()
    served.run()
    for number, (tokens, images) in enumerate(asked):
        answer = served.answers[f"{number}"]
        likely = seeing.logprobs([*tokens, *answer], images)[len(tokens) - 1 : -1].argmax(-1)
        assert answer == likely.tolist(), f"request {number}"
    assert (served.num_divided > 0) == (case.get("target_step_ms", 0) > 0 and "tile_parts" not in case)
    if "num_tiles" not in case and "chaos" not in case:
        assert served.num_encoded <= 4 * 2, "most are found"


def test_an_image_whose_file_is_gone_ends_its_request_and_no_later_one(
    make_seeing: MakeSeeing,  # noqa: F811
    make_driver: Callable[..., Driver],
    tmp_path: Path,
) -> None:
    """The rows of the failed tile are not taken for those of the image when it comes again."""
    seeing = make_seeing()
    driver = make_driver(seeing.spec, seeing.folder, num_pages=64, num_encoder_rows=4 * seeing.per_tile)
    served = Served(seeing, driver, tmp_path, num_tiles=4, num_pages=64, chunked_prefill_size=12)
    image = seeing.tiles(1, 2)
    tokens = seeing.prompt([image])
    served.submit("gone", tokens, [image])
    path = next(iter(tmp_path.glob("?" * 64)))
    content = path.read_bytes()
    path.unlink()
    with pytest.raises(AssertionError, match="not there any more"):
        served.run()
    path.write_bytes(content)
    del served.answers["gone"]
    served.submit("again", tokens, [image])
    served.run()
    answer = served.answers["again"]
    likely = seeing.logprobs([*tokens, *answer], [image])[len(tokens) - 1 : -1].argmax(-1)
    assert answer == likely.tolist()


def test_parts_of_a_tile_give_the_bits_of_the_whole(
    make_seeing: MakeSeeing,  # noqa: F811
    make_driver: Callable[..., Driver],
    tmp_path: Path,
) -> None:
    """Work on two tiles takes turns; one of them is begun, given up for another image, and not gone on with."""
    seeing = make_seeing()
    per_tile, num_parts = seeing.per_tile, seeing.num_parts
    driver = make_driver(seeing.spec, seeing.folder, num_encoder_rows=4 * per_tile)
    image, other = tmp_path / "image", tmp_path / "other"
    image.write_bytes(seeing.tiles(1, 2).tobytes())
    other.write_bytes(seeing.tiles(2, 2).tobytes())
    shape = (2, *seeing.tiles(1).shape[1:])

    def encode(path: Path, tile: int, row: int, first_part: int = 0, num_parts: int = 0) -> Encode:
        return Encode(str(path), shape, tile, 1, row * per_tile, first_part, num_parts)

    driver.step([], encodes=(Encode(str(image), shape, 0, 2, 0),))
    driver.step([], encodes=(encode(other, 0, 2, 0, num_parts - 1),))
    for part in range(num_parts):
        driver.step([], encodes=(encode(image, 0, 2, part, 1), encode(image, 1, 3, part, 1)))

    assert num_parts == 2 * 3 * 4, "2 layers, 3 shares of 36 patches"
    rows = driver.runner.encoder_rows.rows
    assert torch.equal(rows[: 2 * per_tile], rows[2 * per_tile :]) and rows.isfinite().all()
