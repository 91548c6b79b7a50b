"""`select_ops`: who computes each operation on this device: the first maker that has nothing against it.

A maker is a way to compute one operation: sgl-kernel's, Triton's, our CPU library's, oneDNN's, or plain torch, which is
always the last and can do everything. The reasons against those passed over go into the table that is logged at start.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

import torch

from .kernels import native, native_linear, plain, sgl
from .ops import OpChoice, Ops

if TYPE_CHECKING:
    from ..runtime.model_files.model_spec import ModelSpec
    from .kernels.probe import KernelProbe

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Target:
    """What operations are chosen for.

    Attributes:
        spec: the model, with the heads and widths of this rank.
        dtype: of activations.
        kernels: which kernel packages work here; None: `select_ops` looks itself, if the device is a GPU.
    """

    spec: ModelSpec
    device: torch.device
    dtype: torch.dtype
    kernels: KernelProbe | None = None


@dataclass(frozen=True, slots=True)
class Maker:
    """One way to compute an operation.

    Attributes:
        name: in the log.
        reasons_against: why it cannot do it here: all reasons, none if it can.
        load: returns the function (see the operation's class in `ops`); called only if it was chosen, so this is where
            packages are imported that not everybody has.
        device_type: the only one that it is made for, on others it is not even mentioned; None: made for all.
    """

    name: str
    reasons_against: Callable[[Target], list[str]]
    load: Callable[[Target], Any]
    device_type: str | None = None


# ---------------------------------------------------------------- plain torch and oneDNN


def _nothing(_target: Target) -> list[str]:
    return []


def _plain(function: Any) -> Maker:
    return Maker("torch", _nothing, lambda _target: function)


def _onednn(function: Any) -> Maker:
    return Maker(
        "onednn",
        lambda target: plain.reasons_against_onednn(target.device, target.dtype),
        lambda _target: function,
        device_type="cpu",
    )


# ---------------------------------------------------------------- our C++ kernels for the CPU


def _native(
    method: str,
    reasons_against: Callable[[torch.device, torch.dtype], list[str]] = native.reasons_against_native,
) -> Maker:
    return Maker(
        "native",
        lambda target: reasons_against(target.device, target.dtype),
        lambda _target: getattr(native.native_ops(), method),
        device_type="cpu",
    )


# ---------------------------------------------------------------- Triton


def _triton(module: str, function: str, more: Callable[[Target], list[str]] = _nothing) -> Maker:
    """`more`: reasons of this one operation."""

    def reasons_against(target: Target) -> list[str]:
        assert target.kernels is not None
        found = target.kernels.triton
        return [found.reason] if found.version is None else more(target)

    def load(_target: Target) -> Any:
        return getattr(importlib.import_module(f".kernels.triton.{module}", __package__), function)

    return Maker("triton", reasons_against, load, device_type="cuda")


# ---------------------------------------------------------------- sgl-kernel


def _sgl(more: Callable[[Target], list[str]], load: Callable[[Target], Any]) -> Maker:
    """`more`: reasons of this one operation."""

    def reasons_against(target: Target) -> list[str]:
        assert target.kernels is not None
        found = target.kernels.sgl_kernel
        return [found.reason] if found.version is None else more(target)

    return Maker("sgl-kernel", reasons_against, load, device_type="cuda")


def _sgl_norm(method: str) -> Maker:
    def reasons_against(target: Target) -> list[str]:
        wide = sgl.reasons_against_wide_weights(target.spec.float32_norms)
        return sgl.reasons_against_dtype(target.dtype) + wide

    def load(target: Target) -> Any:
        assert target.kernels is not None
        return getattr(sgl.Norms(sgl.operators(), target.kernels.capability), method)

    return _sgl(reasons_against, load)


def _sgl_gate(operator: str) -> Maker:
    def reasons_against(target: Target) -> list[str]:
        width = sgl.reasons_against_width(target.spec.intermediate_size, target.dtype)
        return sgl.reasons_against_dtype(target.dtype) + width

    return _sgl(
        reasons_against, lambda _target: sgl.SglGatedActivation(getattr(sgl.operators(), operator).default)
    )


MAKERS: Final[Mapping[str, Sequence[Maker]]] = {
    "pack_linear": (
        _native("pack_linear", native_linear.reasons_against_native_linear),
        _onednn(plain.pack_linear_onednn),
        _plain(plain.pack_linear),
    ),
    "pack_experts": (
        _triton("experts", "pack_experts"),
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
    "rotate_and_store": (
        _triton("rotary_store", "rotate_and_store"),
        _native("rotate_and_store"),
        _plain(plain.rotate_and_store),
    ),
    "add": (_native("add"), _plain(plain.add)),
    "take_rows": (_native("take_rows"), _plain(plain.take_rows)),
    "to_float32": (_native("to_float32"), _plain(plain.to_float32)),
}
"""Of each operation, in the order of preference; the last one has nothing against anything."""


def select_ops(target: Target, makers: Mapping[str, Sequence[Maker]] = MAKERS) -> Ops:
    """Choose, and log the table. On a GPU this may take seconds: what is installed there is tried out first."""
    if target.device.type == "cuda" and target.kernels is None:
        from .kernels.probe import probe_kernels

        target = replace(target, kernels=probe_kernels())
    chosen: dict[str, Any] = {}
    choices: list[OpChoice] = []
    for op, candidates in makers.items():
        passed_over: list[str] = []
        for maker in candidates:
            if maker.device_type not in (None, target.device.type):
                continue
            reasons = maker.reasons_against(target)
            if not reasons:
                chosen[op] = maker.load(target)
                choices.append(OpChoice(op, maker.name, "; ".join(passed_over)))
                break
            passed_over.append(f"{maker.name}: {', '.join(reasons)}")
        else:
            raise AssertionError(f"nobody computes {op}: the last maker must have nothing against anything")
    ops = Ops(**chosen, choices=tuple(choices))
    for line in table_lines(ops.choices):
        logger.info("%s", line)
    return ops


def table_lines(choices: Sequence[OpChoice]) -> list[str]:
    """op, maker, and why not the ones before it, in columns."""
    op_width = max(len(choice.op) for choice in choices)
    maker_width = max(len(choice.maker) for choice in choices)
    return [
        f"op={choice.op:<{op_width}} maker={choice.maker:<{maker_width}}"
        + (f" passed over: {choice.why}" if choice.why else "")
        for choice in choices
    ]
