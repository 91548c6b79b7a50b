"""Selects the attention backends for prompts and for decodes: those requested, or the first that can run here.

`MEASURED` names the faster backend for decodes where the general order is wrong.
`python3 benchmarks/gpu/path.py benchmarks.gpu.bench --only attention` measures all of them on a GPU and prints its
lines. Until one has run, the table is empty and the general order holds.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

import torch

from ...runtime.errors import ConfigError
from ..kernels.avoided import AVOIDED, NOTHING_AVOIDED, AvoidedKernels
from .cpu_native import CpuNativeAttention
from .fa3 import FlashAttention3
from .split import split_backend
from .torch_native import TorchNativeAttention
from .triton_paged import TritonAttention

if TYPE_CHECKING:
    from ...models.spec.model_spec import ModelSpec
    from .backend import AttentionBackend

Choices = Mapping[tuple[tuple[int, int], int], str]
"""(compute capability, query heads per KV head) -> name of the backend for decodes."""

MEASURED: Final[Choices] = {}


def measured_decodes(spec: ModelSpec, capability: tuple[int, int], choices: Choices) -> str | None:
    """The backend for decodes of a model; None: not measured, or its layers have several head shapes."""
    shapes = {spec.heads_of(layer_id) for layer_id in range(spec.num_layers)}
    if len(shapes) != 1:
        return None
    heads = shapes.pop()
    return choices.get((capability, heads.num_heads // heads.num_kv_heads))


logger = logging.getLogger(__name__)

BACKENDS: Final[tuple[type[AttentionBackend], ...]] = (
    FlashAttention3,
    TritonAttention,
    CpuNativeAttention,
    TorchNativeAttention,
)
"""In order of preference; the last one runs everywhere."""


def names_of(backend: type[AttentionBackend]) -> tuple[str, str]:
    """The names of a backend in `--avoid-kernels`: its package, and the backend itself."""
    if backend.name == FlashAttention3.name:
        return "sgl-kernel", backend.name
    return backend.name, f"{backend.name}:attention"


def select_backend(
    spec: ModelSpec,
    device: torch.device,
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    asked: tuple[str, str] | None = None,
    page_size: int = 1,
    avoid: AvoidedKernels = NOTHING_AVOIDED,
    backends: tuple[type[AttentionBackend], ...] = BACKENDS,
    choices: Choices = MEASURED,
) -> type[AttentionBackend]:
    """Select the backends, and log those passed over with the reasons.

    Args:
        spec, device, dtype, kv_dtype: see `AttentionBackend.reasons_against`.
        asked: names for prompts and for decodes (`parse_attention_backend`); None: the first that can run, for both.
        page_size: slots of a page of the KV pool.
        avoid: the components to do without.
        choices: the faster backends for decodes, if no backends were requested.

    Raises:
        ConfigError: a requested backend cannot run here.
    """

    def against(backend: type[AttentionBackend]) -> list[str]:
        if avoided := avoid.reasons(*names_of(backend)):
            return avoided
        reasons = backend.reasons_against(spec, device, dtype, kv_dtype)
        return reasons + backend.reasons_against_pages(spec, page_size)

    by_name = {backend.name: backend for backend in backends}
    reasons = {
        backend.name: against(backend) for backend in backends if asked is None or backend.name in asked
    }
    if asked is None:
        for backend in backends:
            reasons[backend.name] += backend.reasons_to_ask(dtype, kv_dtype)
        best = next(backend.name for backend in backends if not reasons[backend.name])
        faster = None
        if device.type == "cuda":
            faster = measured_decodes(spec, torch.cuda.get_device_capability(device), choices)
        asked = best, best if faster is None or reasons.get(faster, ["missing"]) else faster
    elif any(reasons[name] for name in asked):
        possible = [backend.name for backend in backends if not against(backend)]
        refused = "; ".join(f"{name}: {', '.join(found)}" for name, found in reasons.items() if found)
        raise ConfigError(
            f"attention_backend is {','.join(dict.fromkeys(asked))!r}, but that cannot run here: {refused}; omit "
            f"--attention-backend, or use {' or '.join(possible)}"
        )
    for name, found in reasons.items():
        if found:
            # What the user can change without another model or machine is worth a line. An avoided backend is not even
            # asked whether it can run: the question may load its library.
            only_pages = AVOIDED not in found and not by_name[name].reasons_against(
                spec, device, dtype, kv_dtype
            )
            logger.log(
                logging.WARNING if only_pages else logging.DEBUG,
                "attention_backend=%s passed over: %s",
                name,
                "; ".join(found),
            )
    prompts, decodes = (by_name[name] for name in asked)
    logger.info("attention_backend prompts=%s decodes=%s device=%s", prompts.name, decodes.name, device)
    return prompts if prompts is decodes else split_backend(prompts, decodes)
