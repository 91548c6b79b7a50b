"""The first backend without reasons against it is taken, and the log says why the others were not."""

from __future__ import annotations

import logging
from typing import Any

import torch

from engine.model_runner.attention.selection import BACKENDS, select_backend


class FastBackend:
    name = "fast"

    @staticmethod
    def reasons_against(spec: Any, device: torch.device) -> list[str]:
        reasons = ["head_dim 40 is not a multiple of 64"] if spec == "odd model" else []
        return [*reasons, "needs a GPU"] if device.type == "cpu" else reasons


def test_backends_passed_over_are_logged_with_all_reasons(caplog):
    backends: Any = (FastBackend, *BACKENDS)
    spec: Any = "odd model"
    with caplog.at_level(logging.INFO):
        chosen = select_backend(spec, torch.device("cpu"), backends)
    assert chosen.name == "torch_native"
    assert "fast passed over: head_dim 40 is not a multiple of 64; needs a GPU" in caplog.text


def test_the_preferred_one_is_taken_when_nothing_speaks_against_it():
    backends: Any = (FastBackend, *BACKENDS)
    spec: Any = "model"
    assert select_backend(spec, torch.device("meta"), backends).name == "fast"
