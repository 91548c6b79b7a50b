"""Choice of the attention backend: the first that has nothing against the model and the device."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

from .torch_native import TorchNativeAttention

if TYPE_CHECKING:
    import torch

    from ...runtime.model_files.model_spec import ModelSpec
    from .backend import AttentionBackend

logger = logging.getLogger(__name__)

BACKENDS: Final[tuple[type[AttentionBackend], ...]] = (TorchNativeAttention,)
"""In the order of preference; the last one runs everywhere."""


def select_backend(
    spec: ModelSpec, device: torch.device, backends: tuple[type[AttentionBackend], ...] = BACKENDS
) -> type[AttentionBackend]:
    """The best backend that can run, with a log line for each one passed over."""
    for backend in backends:
        reasons = backend.reasons_against(spec, device)
        if not reasons:
            logger.info("attention_backend=%s device=%s", backend.name, device)
            return backend
        logger.info("attention_backend=%s passed over: %s", backend.name, "; ".join(reasons))
    raise AssertionError("the last backend runs everywhere")
