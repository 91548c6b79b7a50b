"""`Mirror`: a CUDA device on the CPU, on which the unchanged product loads a model and serves.

    with mirror_device() as mirror:
        driver = load_driver(LLAMA, mirror)             # `runners.py`; as a server loads it: trial, recordings, and all
        result = driver.runner.launch(plan).wait()      # nothing has run before `wait`
    # leaving the block fails if anything was wrong: see `faults.Kind`

`mirror_device(triton=False)`: Triton is not usable; `order="eager"`: nothing is late; `kernels=`: other findings about
packages (`KernelProbe`). `mirror.faults.take()` gives the faults so far and forgets them, for tests that plant some.
`mirror.launches.variants` are the kernels that were compiled, `mirror.operators` the operators that ran on the device.
`mirror.memory.failing_at(n)` lets an allocation fail.

All is undone at the end of the block, but the device guard of `guard.cpp`, which nothing else notices.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from torch import Tensor

import engine.model_runner.attention.fa3
import engine.model_runner.attention.triton_paged
import engine.model_runner.weights.format_selection  # noqa: F401  # what imports `probe_kernels` is patched
from engine.model_runner.kernels.probe import Finding, KernelProbe

from . import torch_cuda
from .device_tensor import DeviceMode, DeviceTensor
from .faults import Faults
from .launches import Launches
from .memory import DeviceMemory, HostMemory
from .streams import Order, Streams

HOPPER = (9, 0)
NO_SGL_KERNEL = Finding(None, "not installed")


class Mirror:
    """One device.

    Attributes:
        num_sms, capability: of the GPU. Few multiprocessors mean few programs for Triton's interpreter.
        operators: the operators that ran on the device.
    """

    def __init__(self, order: Order, kernels: KernelProbe, num_sms: int) -> None:
        self.kernels = kernels
        self.capability = kernels.capability
        self.num_sms = num_sms
        self.faults = Faults()
        self.streams = Streams(self.faults, order)
        self.memory = DeviceMemory(self.faults)
        self.host_memory = HostMemory()
        self.launches = Launches(self)
        self.operators: set[str] = set()
        self.mode = DeviceMode(self)

    def allocate_like(self, form: Tensor) -> DeviceTensor:
        """New memory of a form, poisoned; in a capture it belongs to the recording."""
        host = self.memory.allocate(form.shape, form.stride(), form.dtype)
        if self.streams.capturing is not None:
            self.streams.capturing.memory.append(host)
        return DeviceTensor(host, self)

    @contextmanager
    def loading(self) -> Iterator[None]:
        """A model is loaded: the host may wait and compile; Triton's kernels compute nothing, which saves minutes."""
        self.faults.serving, self.launches.computes = False, False
        try:
            yield
            self.streams.run_all()
        finally:
            self.faults.serving, self.launches.computes = True, True

    def check(self) -> None:
        """Wait for all work; fail if anything was wrong so far."""
        self.streams.run_all()
        self.memory.check()
        self.faults.check()


@contextmanager
def mirror_device(
    *, triton: bool = True, order: Order = "late", kernels: KernelProbe | None = None, num_sms: int = 8
) -> Iterator[Mirror]:
    """A mirror in the place of the first GPU, for the calls of this thread in the block; see the module.

    Skips the test where kernels are compiled for a real GPU, and where nothing compiles the guard.
    """
    if triton and os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("kernels are compiled here, not interpreted")
    torch_cuda.load_guard()
    found = Finding("3.6") if triton else Finding(None, "switched off for a test")
    kernels = kernels or KernelProbe(NO_SGL_KERNEL, found, HOPPER)
    mirror = Mirror(order, kernels, num_sms)
    with pytest.MonkeyPatch.context() as patch:
        for name, module in list(sys.modules.items()):
            if name.startswith("engine.") and hasattr(module, "probe_kernels"):
                patch.setattr(module, "probe_kernels", lambda: mirror.kernels)
        torch_cuda.install(mirror, patch)
        if triton:
            mirror.launches.install(patch)
        with mirror.mode:
            yield mirror
            mirror.check()
    gc.collect()  # of what the block leaves, the red zones are looked at now
    mirror.faults.check()
