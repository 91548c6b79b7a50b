"""sgl_kernel on a mirror: operators and FlashAttention-3 with the signatures of a wheel, computed in plain torch.

    with mirror_device(kernels=SGL_KERNEL) as mirror, sgl_kernel_on(mirror):

Operators are dispatched as torch's own. FA3's functions are Python, so they queue their stand-in themselves: what it
insists on fails when the device gets there, as an illegal access does.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any, Final

import pytest
import torch
from torch import Tensor

from engine.model_runner.kernels.probe import Finding, KernelProbe
from tests.model_runner.attention.fake_flash_attention import FakeFlashAttention
from tests.model_runner.kernels.sgl_operators import define_operators

from .device_tensor import DeviceTensor, host_of
from .mirror import HOPPER, Mirror

VERSION: Final = "0.4.10"
SGL_KERNEL: Final = KernelProbe(
    Finding(VERSION), Finding("3.6"), HOPPER, flash_dims=(64, 96, 128, 192, 256), flash_fp8_dims=(128,)
)
"""Findings on a Hopper GPU with everything; for `mirror_device`."""


@contextmanager
def sgl_kernel_on(mirror: Mirror) -> Iterator[FakeFlashAttention]:
    """Make sgl_kernel importable; yields the stand-in of FA3, which counts its calls."""
    _define_once()
    queued = QueuedFlashAttention(mirror)
    package, flash = ModuleType("sgl_kernel"), ModuleType("sgl_kernel.flash_attn")
    package.flash_attn = flash  # type: ignore[attr-defined]
    vars(flash).update(
        flash_attn_with_kvcache=queued.flash_attn_with_kvcache,
        get_scheduler_metadata=queued.get_scheduler_metadata,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, package.__name__, package)
        patch.setitem(sys.modules, flash.__name__, flash)
        yield queued.stand_in


@functools.cache
def _define_once() -> torch.library.Library:
    """For the life of the process, since torch keeps the operators that it has looked up."""
    return define_operators("sgl_kernel", VERSION)


class QueuedFlashAttention:
    """`sgl_kernel.flash_attn` on a mirror."""

    def __init__(self, mirror: Mirror) -> None:
        self.stand_in = FakeFlashAttention(VERSION)
        self._mirror = mirror

    def get_scheduler_metadata(self, **given: Any) -> Tensor:
        plan = self.stand_in.module.get_scheduler_metadata
        arguments = self._on_host(given)
        ticket = self._mirror.allocate_like(torch.empty(1, dtype=torch.int32, device="meta"))
        self._mirror.streams.current.put(lambda: ticket.host.copy_(plan(**arguments)))
        return ticket

    def flash_attn_with_kvcache(self, q: Tensor, k_cache: Tensor, v_cache: Tensor, **given: Any) -> Tensor:
        attend = self.stand_in.module.flash_attn_with_kvcache
        arguments = self._on_host({"q": q, "k_cache": k_cache, "v_cache": v_cache, **given})
        out: Tensor | None = given.get("out")
        if out is None:
            dtype = torch.bfloat16 if q.dtype.itemsize == 1 else q.dtype
            out = self._mirror.allocate_like(torch.empty(q.shape, dtype=dtype, device="meta"))
            arguments["out"] = host_of(out)

        def compute() -> None:
            if self._mirror.launches.computes:
                attend(**arguments)

        self._mirror.streams.current.put(compute)
        return out

    def _on_host(self, given: dict[str, Any]) -> dict[str, Any]:
        for name, value in given.items():
            if isinstance(value, Tensor) and not isinstance(value, DeviceTensor):
                self._mirror.faults.add("host tensor", f"FA3: {name}, {tuple(value.shape)}")
                raise RuntimeError(f"{name} must be on CUDA")
        return {name: host_of(value) for name, value in given.items()}
