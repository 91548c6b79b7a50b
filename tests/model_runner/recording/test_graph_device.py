"""Recordings of CUDA graphs: a replay computes with what its inputs hold at that time, in one piece and in several."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from engine.model_runner.recording.graph_device import CudaGraphDevice

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")


def test_a_replay_computes_with_the_new_inputs():
    x, y = torch.ones(8, device=CUDA), torch.zeros(8, device=CUDA)

    def compute() -> None:
        y.copy_(x * 2).add_(1.0)

    replay = CudaGraphDevice(CUDA).capture(compute)

    x.fill_(5.0)
    replay()

    assert y.tolist() == [11.0] * 8


def test_pieces_hand_on_their_tensors_and_leave_what_is_between_them_to_the_caller():
    x, between, y = (torch.ones(8, device=CUDA) for _ in range(3))

    def run(cut: Callable[[], None]) -> None:
        doubled = x * 2
        cut()
        y.copy_(doubled + between)

    first, second = CudaGraphDevice(CUDA).capture_pieces(run)
    x.fill_(3.0)
    first()
    between.fill_(10.0)
    second()

    assert y.tolist() == [16.0] * 8


def test_a_capture_that_fails_is_ended():
    device, x, attempts = CudaGraphDevice(CUDA), torch.ones(8, device=CUDA), iter(range(3))

    def run(cut: Callable[[], None]) -> None:
        cut()
        if next(attempts) == 2:  # after the warm-up
            raise ValueError("a kernel needs the host")

    with pytest.raises(ValueError, match="a kernel needs the host"):
        device.capture_pieces(run)

    y = torch.zeros(8, device=CUDA)

    def compute() -> None:
        y.copy_(x + 1)

    device.capture(compute)()
    assert y.tolist() == [2.0] * 8
