"""`select_sampler_backend`: selects the sampler backend of this device: the first without reasons against it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import torch

from ..kernels.avoided import NOTHING_AVOIDED, AvoidedKernels

if TYPE_CHECKING:
    from .sampler_backend import SamplerBackend
    from .token_counts import TokenCounts

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SamplerProvider:
    """A sampler backend that can be selected.

    Attributes:
        name: its name in the log.
        reasons_against: returns all reasons why it cannot run here; empty if it can.
        make: constructs the backend for logits of a dtype; called only if it is selected.
    """

    name: str
    reasons_against: Callable[[torch.device], list[str]]
    make: Callable[[TokenCounts, torch.dtype], SamplerBackend]


def _reasons_against_triton(device: torch.device) -> list[str]:
    if device.type != "cuda":
        return [f"runs on CUDA devices, not on {device.type}"]
    from ..kernels.probe import probe_kernels

    found = probe_kernels().triton
    return [found.reason] if found.version is None else []


def _make_triton(counts: TokenCounts, logits_dtype: torch.dtype) -> SamplerBackend:
    from .triton_backend import TritonSamplerBackend

    backend, started_s = TritonSamplerBackend(counts), time.perf_counter()
    backend.warm_up(counts.in_output.shape[1], logits_dtype)
    logger.info("sampler_compiled_s=%.2f", time.perf_counter() - started_s)
    return backend


def _reasons_against_native(device: torch.device) -> list[str]:
    from .native_backend import reasons_against_native_backend

    return reasons_against_native_backend(device)


def _make_native(counts: TokenCounts, logits_dtype: torch.dtype) -> SamplerBackend:
    from .native_backend import NativeSamplerBackend

    return NativeSamplerBackend(counts)


def _make_torch(counts: TokenCounts, logits_dtype: torch.dtype) -> SamplerBackend:
    from .torch_backend import TorchSamplerBackend

    return TorchSamplerBackend(counts)


OP: Final = "sample"
"""The name of the operation in the log and in `--avoid-kernels`."""

PROVIDERS: Final = (
    SamplerProvider("triton", _reasons_against_triton, _make_triton),
    SamplerProvider("native", _reasons_against_native, _make_native),
    SamplerProvider("torch", lambda _device: [], _make_torch),
)
"""In order of preference; the last one runs on every device."""


def select_sampler_backend(
    counts: TokenCounts,
    device: torch.device,
    logits_dtype: torch.dtype = torch.float32,
    avoid: AvoidedKernels = NOTHING_AVOIDED,
    providers: Sequence[SamplerProvider] = PROVIDERS,
) -> SamplerBackend:
    """Make the first backend that can run on this device; log it, and the reasons against those before it."""
    passed_over: list[str] = []
    for provider in providers:
        reasons = avoid.reasons(provider.name, f"{provider.name}:{OP}") or provider.reasons_against(device)
        if not reasons:
            why = f" passed over: {'; '.join(passed_over)}" if passed_over else ""
            logger.debug("op=%s provider=%s%s", OP, provider.name, why)
            return provider.make(counts, logits_dtype)
        passed_over.append(f"{provider.name}: {', '.join(reasons)}")
    raise AssertionError("no sampler backend can run: the last one must have no reasons against any device")
