"""The section about experts in small, in Triton's interpreter: each tile computes, and nothing stays changed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from engine.model_runner.kernels.triton import experts
from tests.conftest import HAS_NVIDIA_DRIVER
from tests.triton_interpreter import repair_interpreter

repair_interpreter()


@pytest.mark.slow
def test_every_tile_is_measured_on_the_same_tokens(import_benchmark):
    if HAS_NVIDIA_DRIVER:
        pytest.skip("the command itself runs on a GPU")
    module: Any = import_benchmark("gpu.experts")
    told: list[dict[str, Any]] = []

    class Noted(import_benchmark("gpu.sections").Report):  # type: ignore[misc]
        def _tell(self, message: dict[str, Any]) -> None:
            told.append(message)

    torch.manual_seed(0)
    before = experts._tile(1000.0, 2)
    module.bench_experts(Noted("cpu", tiny=True), 1e12, 1e15)

    figures = [message["figure"] for message in told if "figure" in message]
    assert not [message for message in told if "failed" in message]
    tiles = ["128x64x64", "128x128x64", "128x256x64", "64x128x64"]
    assert [figure["name"].rpartition(" ")[2] for figure in figures] == tiles
    assert all(figure["value"] > 0 and figure["best"] > 0 for figure in figures)
    assert experts._tile(1000.0, 2) == before == module.TILES[0]
