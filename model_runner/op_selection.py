"""`select_ops`: selects the provider of each op on this device: the first one without reasons against it.

A provider is one implementation of an op: sgl-kernel, Triton, our CPU library, oneDNN, or plain torch, which is always
the last and supports everything. The reasons against those passed over are in the table that is logged at start.
"""

from __future__ import annotations

import importlib
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import torch

from .kernels import (
    latent,
    native,
    native_linear,
    native_states,
    plain,
    plain_lora,
    sgl,
    streams,
    whole_attention,
)
from .kernels.avoided import AVOIDED, NOTHING_AVOIDED, AvoidedKernels
from .ops.ops import OpChoice, Ops
from .states import plain as plain_states

if TYPE_CHECKING:
    from ..models.spec.model_spec import ModelSpec
    from .kernels.probe import KernelProbe

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Target:
    """The model and device for which ops are selected.

    Attributes:
        spec: the model, with the heads and widths of this rank.
        dtype: dtype of activations.
        kernels: the kernel packages that work here; None: `select_ops` probes them if the device is a GPU.
        avoid: the components to do without.
    """

    spec: ModelSpec
    device: torch.device
    dtype: torch.dtype
    kernels: KernelProbe | None = None
    avoid: AvoidedKernels = NOTHING_AVOIDED


@dataclass(frozen=True, slots=True)
class Provider:
    """A provider of one op.

    Attributes:
        name: its name in the log.
        reasons_against: returns all reasons why it cannot run here; empty if it can.
        load: returns the function (see the op's class in `ops`). It is called only if the provider is selected, so it
            imports packages that may be missing.
        device_type: the only device type it supports; on others it is not listed in the log. None: all device types.
    """

    name: str
    reasons_against: Callable[[Target], list[str]]
    load: Callable[[Target], Any]
    device_type: str | None = None


# ---------------------------------------------------------------- plain torch and oneDNN


def _nothing(_target: Target) -> list[str]:
    return []


def _plain(function: Any) -> Provider:
    return Provider("torch", _nothing, lambda _target: function)


def _onednn(function: Any) -> Provider:
    return Provider(
        "onednn",
        lambda target: plain.reasons_against_onednn(target.device, target.dtype),
        lambda _target: function,
        device_type="cpu",
    )


# ---------------------------------------------------------------- our C++ kernels for the CPU


def _native(
    method: str,
    reasons_against: Callable[[torch.device, torch.dtype], list[str]] = native.reasons_against_native,
) -> Provider:
    return Provider(
        "native",
        lambda target: reasons_against(target.device, target.dtype),
        lambda _target: getattr(native.native_ops(), method),
        device_type="cpu",
    )


def _native_of(ops: Callable[[], Any], method: str) -> Provider:
    """A provider among the operations of a part of the models."""
    return Provider(
        "native",
        lambda target: native.reasons_against_native(target.device, target.dtype),
        lambda _target: getattr(ops(), method),
        device_type="cpu",
    )


_NATIVE_WHOLE_ATTENTION: Final = Provider(
    "native",
    lambda target: native.reasons_against_native(target.device, target.dtype),
    lambda _target: whole_attention.native_whole_attention(),
    device_type="cpu",
)
_native_latent = partial(_native_of, latent.native_latent_ops)
_native_streams = partial(_native_of, streams.native_stream_ops)
_native_states = partial(_native_of, native_states.native_state_ops)


# ---------------------------------------------------------------- Triton


def _triton(module: str, function: str, more: Callable[[Target], list[str]] = _nothing) -> Provider:
    """A Triton provider; `more`: reasons against this op only."""

    def reasons_against(target: Target) -> list[str]:
        assert target.kernels is not None
        found = target.kernels.triton
        return [found.reason] if found.version is None else more(target)

    def load(_target: Target) -> Any:
        return getattr(importlib.import_module(f".kernels.triton.{module}", __package__), function)

    return Provider("triton", reasons_against, load, device_type="cuda")


def _without_gates(target: Target) -> list[str]:
    experts = target.spec.experts
    if experts is not None and experts.activation != "silu":
        return [f"the activation of the model's experts is {experts.activation}"]
    return ["the model's experts have no gates"] if experts is not None and not experts.gated else []


def _without_rotary(target: Target) -> list[str]:
    encoder = target.spec.encoder
    return ["the model has no rotary positions"] if encoder is not None and encoder.position_rows else []


# ---------------------------------------------------------------- sgl-kernel


def _sgl(more: Callable[[Target], list[str]], load: Callable[[Target], Any]) -> Provider:
    """A provider from sgl-kernel; `more`: reasons against this op only."""

    def reasons_against(target: Target) -> list[str]:
        assert target.kernels is not None
        found = target.kernels.sgl_kernel
        return [found.reason] if found.version is None else more(target)

    return Provider("sgl-kernel", reasons_against, load, device_type="cuda")


def _sgl_norm(method: str) -> Provider:
    def reasons_against(target: Target) -> list[str]:
        wide = sgl.reasons_against_wide_weights(target.spec.form.float32_norms)
        return sgl.reasons_against_dtype(target.dtype) + wide

    def load(target: Target) -> Any:
        assert target.kernels is not None
        pdl = sgl.supports_pdl(target.kernels.capability)
        if pdl and target.avoid.reasons("pdl"):
            pdl = False
            logger.debug("op=%s pdl=0: %s", method, AVOIDED)
        return getattr(sgl.Norms(sgl.operators(), pdl=pdl), method)

    return _sgl(reasons_against, load)


def _sgl_gate(operator: str) -> Provider:
    def reasons_against(target: Target) -> list[str]:
        width = sgl.reasons_against_width(target.spec.intermediate_size, target.dtype)
        return sgl.reasons_against_dtype(target.dtype) + width

    return _sgl(
        reasons_against, lambda _target: sgl.SglGatedActivation(getattr(sgl.operators(), operator).default)
    )


PROVIDERS: Final[Mapping[str, Sequence[Provider]]] = {
    "pack_linear": (
        _native("pack_linear", native_linear.reasons_against_native_linear),
        _onednn(plain.pack_linear_onednn),
        _plain(plain.pack_linear),
    ),
    "pack_experts": (
        _triton("experts", "pack_experts", _without_gates),
        _native("pack_experts", native_linear.reasons_against_native_linear),
        _onednn(plain.loop_experts),
        _plain(plain.pack_experts),
    ),
    "route": (_triton("route", "route"), _native("route"), _plain(plain.route)),
    "rms_norm": (
        _sgl_norm("rms_norm"),
        _triton("norm", "rms_norm"),
        _native("rms_norm"),
        _plain(plain.rms_norm),
    ),
    "add_rms_norm": (
        _sgl_norm("add_rms_norm"),
        _triton("norm", "add_rms_norm"),
        _native("add_rms_norm"),
        _plain(plain.add_rms_norm),
    ),
    "silu_and_mul": (
        _sgl_gate("silu_and_mul"),
        _triton("activation", "silu_and_mul"),
        _native("silu_and_mul"),
        _plain(plain.silu_and_mul),
    ),
    "gelu_and_mul": (
        _sgl_gate("gelu_tanh_and_mul"),
        _triton("activation", "gelu_and_mul"),
        _native("gelu_and_mul"),
        _plain(plain.gelu_and_mul),
    ),
    "clamped_swiglu": (_native("clamped_swiglu"), _plain(plain.clamped_swiglu)),
    "gelu_erf_and_mul": (_native("gelu_erf_and_mul"), _plain(plain.gelu_erf_and_mul)),
    "layer_norm": (_native("layer_norm"), _plain(plain.layer_norm)),
    "add_layer_norm": (_native("add_layer_norm"), _plain(plain.add_layer_norm)),
    "activate": (_native("activate"), _plain(plain.activate)),
    "rotate_and_store": (
        _triton("rotary_store", "rotate_and_store", _without_rotary),
        _native("rotate_and_store"),
        _plain(plain.rotate_and_store),
    ),
    "scale": (_native("scale"), _plain(plain.scale)),
    "pack_heads": (_native_latent("pack_heads"), _plain(latent.pack_heads)),
    "store_latent": (_native_latent("store_latent"), _plain(latent.store_latent)),
    "add": (_native("add"), _plain(plain.add)),
    "add_gated": (_native("add_gated"), _plain(plain.add_gated)),
    "take_rows": (_native("take_rows"), _plain(plain.take_rows)),
    "soft_cap": (_native("soft_cap"), _plain(plain.soft_cap)),
    "to_float32": (_native("to_float32"), _plain(plain.to_float32)),
    "short_conv": (
        _triton("state_conv", "short_conv"),
        _native_states("short_conv"),
        _plain(plain_states.short_conv),
    ),
    "gated_delta": (
        _triton("delta_net", "gated_delta"),
        _native_states("gated_delta"),
        _plain(plain_states.gated_delta),
    ),
    "mamba2": (
        _triton("mamba2", "mamba2"),
        _native_states("mamba2"),
        _plain(plain_states.mamba2),
    ),
    "mul_sigmoid": (_native("mul_sigmoid"), _plain(plain.mul_sigmoid)),
    "gelu_times": (_native_streams("gelu_times"), _plain(streams.gelu_times)),
    "sparse_gelu_and_mul": (
        _native_streams("sparse_gelu_and_mul"),
        _plain(streams.sparse_gelu_and_mul),
    ),
    "ids_below": (_native_streams("ids_below"), _plain(streams.ids_below)),
    "altup": (_native_streams("altup"), _plain(streams.PlainAltUp())),
    "deltas": (
        _native("deltas"),
        _plain(plain_lora.DELTAS),
    ),
    "whole_attention": (_NATIVE_WHOLE_ATTENTION, _plain(whole_attention.TorchWholeAttention)),
}
"""The providers of each op, in order of preference; the last one has no reasons against any target."""


def select_ops(target: Target, providers: Mapping[str, Sequence[Provider]] = PROVIDERS) -> Ops:
    """Select the ops; log how many each provider has, and the table at DEBUG.

    On a GPU this may take seconds, because installed packages are tested first.
    """
    if target.device.type == "cuda" and target.kernels is None:
        from .kernels.probe import probe_kernels

        target = replace(target, kernels=probe_kernels())
    chosen: dict[str, Any] = {}
    choices: list[OpChoice] = []
    for op, candidates in providers.items():
        passed_over: list[str] = []
        for provider in candidates:
            if provider.device_type not in (None, target.device.type):
                continue
            reasons = target.avoid.reasons(provider.name, f"{provider.name}:{op}")
            reasons = reasons or provider.reasons_against(target)
            if not reasons:
                chosen[op] = provider.load(target)
                choices.append(OpChoice(op, provider.name, "; ".join(passed_over)))
                break
            passed_over.append(f"{provider.name}: {', '.join(reasons)}")
        else:
            raise AssertionError(f"no provider of {op}: the last one must have no reasons against any target")
    ops = Ops(**chosen, choices=tuple(choices))
    for line in table_lines(ops.choices):
        logger.debug("%s", line)
    counts = Counter(choice.provider for choice in ops.choices)
    logger.info("ops: %s", ", ".join(f"{count} by {name}" for name, count in counts.items()))
    return ops


def table_lines(choices: Sequence[OpChoice]) -> list[str]:
    """The table as lines: op, provider, and the reasons against the providers before it."""
    op_width = max(len(choice.op) for choice in choices)
    provider_width = max(len(choice.provider) for choice in choices)
    return [
        f"op={choice.op:<{op_width}} provider={choice.provider:<{provider_width}}"
        + (f" passed over: {choice.why}" if choice.why else "")
        for choice in choices
    ]
