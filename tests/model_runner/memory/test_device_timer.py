"""What the timer measures: the blocks, not what lies between them."""

from __future__ import annotations

import time

import pytest
import torch

from engine.model_runner.memory.device_timer import DeviceTimer


def test_on_the_cpu_blocks_add_up(monkeypatch):
    clock = iter([10.0, 10.5, 20.0, 20.25])
    timer = DeviceTimer(torch.device("cpu"))
    assert timer.wait_for_seconds() == 0.0
    with monkeypatch.context() as patch:
        patch.setattr(time, "perf_counter", lambda: next(clock))
        with timer:
            pass
        with timer:
            pass
    assert timer.wait_for_seconds() == 0.75


@pytest.mark.gpu
def test_on_a_gpu_it_is_the_devices_time_and_not_the_hosts():
    host = torch.empty(256 << 20, dtype=torch.uint8, pin_memory=True)
    device = torch.empty_like(host, device="cuda")
    torch.cuda.synchronize()
    timer = DeviceTimer(device.device)
    started_s = time.perf_counter()
    with timer:
        device.copy_(host, non_blocking=True)
    queued_s = time.perf_counter() - started_s
    assert timer.wait_for_seconds() > 1e-3  # 256 MiB at less than 256 GB/s
    assert queued_s < timer.wait_for_seconds()
