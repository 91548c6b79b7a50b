"""The operations of `ops`, computed by the C++ kernels for the CPU (`kernels/cpu`).

All of them compute in float32. The bits of a token's result do not depend on the other tokens of the batch.
"""

# Shapes: see `ops`.

from __future__ import annotations

import ctypes
import logging
from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor

from ..ops.elementwise import ActivationKind
from ..ops.experts import ExpertSource, ExpertWeights
from ..ops.linear import LinearWeight
from ..ops.rotation import HeadNorms, LayerKV, RotaryStore
from . import native_experts, plain
from .cpu.library import load_library, loaded_isa, reasons_against_library
from .native_experts import NativeExperts
from .native_linear import pack_native_linear, reasons_against_compression
from .native_lora import native_deltas
from .native_matmul import NativeMatmul

if TYPE_CHECKING:
    from ...models.spec.experts_spec import ClampedSwiGLU, Routing
    from ..ops.deltas import MakeDeltas

logger = logging.getLogger(__name__)

_DTYPES: Final = (torch.bfloat16, torch.float32)
ACTIVATIONS: Final[tuple[ActivationKind, ...]] = ("gelu", "gelu_tanh", "relu", "relu2", "silu")
"""In the order of `Activation` in `kernels/cpu/activations.h`."""


def reasons_against_native(device: torch.device, dtype: torch.dtype) -> list[str]:
    """Reason why the C++ kernels cannot run on this device and dtype."""
    if device.type != "cpu":
        return [f"runs on CPUs only, not on {device.type}"]
    if dtype not in _DTYPES:
        return [f"computes in bfloat16 and float32 only, not in {dtype}"]
    return reasons_against_library()


class NativeOps:
    """The operations, bound to a loaded library."""

    def __init__(self, library: ctypes.CDLL, *, compress: bool = True) -> None:
        """`compress`: see `pack_native_linear`."""
        self._library = library
        self._compress = compress
        self._has_warned_of_loops = False

    @property
    def deltas(self) -> MakeDeltas:
        return native_deltas(self._library)

    def pack_linear(self, weight: Tensor) -> LinearWeight:
        return pack_native_linear(self._library, weight, compress=self._compress)

    def pack_experts(self, experts: ExpertSource) -> ExpertWeights:
        """Weights that the C++ kernels cannot take are computed expert by expert."""
        gate_up, down = experts.linears()
        ours = [one for one in (*gate_up, *down) if isinstance(one, NativeMatmul)]
        if len(ours) == 2 * len(gate_up):
            biases = experts.biases()
            return NativeExperts(
                self._library,
                ours[: len(gate_up)],
                ours[len(gate_up) :],
                experts.clamp,
                biases,
                scales_inputs=experts.scales_inputs,
                gated=experts.gated,
                activation=experts.activation,
                fuses=not experts.is_adapted,
            )
        if not self._has_warned_of_loops:
            self._has_warned_of_loops = True
            logger.warning(
                "experts are computed one after the other, in steps that are not recorded: their gate and up weights "
                "are stored in different formats, or have an odd number of inputs"
            )
        return plain.LoopedExperts(gate_up, down, plain.ExpertForm.of(experts))

    def route(self, logits: Tensor, routing: Routing, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return native_experts.route(self._library, logits, routing, bias)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        x = x.contiguous()
        out = torch.empty_like(x)
        self._norm(None, x, weight, eps, out)
        return out

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        assert x.dtype == residual.dtype and x.shape == residual.shape, (x.dtype, x.shape)
        x, residual = x.contiguous(), residual.contiguous()
        self._norm(
            x.data_ptr(), residual, weight, eps, x
        )  # in place: the kernel reads a row before it writes it
        return x, residual

    def _norm(self, x: int | None, residual: Tensor, weight: Tensor, eps: float, out: Tensor) -> None:
        size = residual.shape[-1]
        assert residual.dtype in _DTYPES and weight.dtype in (residual.dtype, torch.float32), weight.dtype
        assert weight.shape == (size,) and weight.is_contiguous(), weight.shape
        self._library.add_rms_norm(
            x,
            residual.data_ptr(),
            weight.data_ptr(),
            out.data_ptr(),
            residual.numel() // size,
            size,
            eps,
            residual.dtype == torch.bfloat16,
            weight.dtype == torch.bfloat16,
        )

    def silu_and_mul(self, gate_up: Tensor) -> Tensor:
        return _gated(self._library.silu_and_mul, gate_up)

    def clamped_swiglu(self, gate_up: Tensor, clamp: ClampedSwiGLU) -> Tensor:
        numbers = clamp.alpha, clamp.limit, clamp.gate_limit, clamp.offset
        return _gated(self._library.clamped_swiglu, gate_up, *numbers)

    def gelu_and_mul(self, gate_up: Tensor) -> Tensor:
        """Gelu by the tanh approximation."""
        return _gated(self._library.gelu_and_mul, gate_up)

    def gelu_erf_and_mul(self, gate_up: Tensor) -> Tensor:
        """Gelu by the error function."""
        return _gated(self._library.gelu_erf_and_mul, gate_up)

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
        x = x.contiguous()
        out = torch.empty_like(x)
        self._layer_norm(None, x, weight, bias, eps, out)
        return out

    def add_layer_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, eps: float
    ) -> tuple[Tensor, Tensor]:
        assert x.dtype == residual.dtype and x.shape == residual.shape, (x.dtype, x.shape)
        x, residual = x.contiguous(), residual.contiguous()
        self._layer_norm(x.data_ptr(), residual, weight, bias, eps, x)  # in place, as in `add_rms_norm`
        return x, residual

    def _layer_norm(
        self, x: int | None, residual: Tensor, weight: Tensor, bias: Tensor | None, eps: float, out: Tensor
    ) -> None:
        size = residual.shape[-1]
        assert residual.dtype in _DTYPES, residual.dtype
        for part in (weight, bias):
            assert part is None or (part.dtype == residual.dtype and part.is_contiguous()), part.dtype
            assert part is None or part.shape == (size,), part.shape
        self._library.add_layer_norm(
            x,
            residual.data_ptr(),
            weight.data_ptr(),
            None if bias is None else bias.data_ptr(),
            out.data_ptr(),
            residual.numel() // size,
            size,
            eps,
            residual.dtype == torch.bfloat16,
        )

    def activate(self, x: Tensor, kind: ActivationKind) -> Tensor:
        assert x.dtype in _DTYPES, x.dtype
        x = x.contiguous()
        self._library.activate(x.data_ptr(), x.numel(), ACTIVATIONS.index(kind), x.dtype == torch.bfloat16)
        return x

    def scale(self, x: Tensor, factor: float) -> Tensor:
        assert x.dtype in _DTYPES, x.dtype
        x = x.contiguous()
        self._library.scale(x.data_ptr(), x.numel(), factor, x.dtype == torch.bfloat16)
        return x

    def add(self, x: Tensor, y: Tensor) -> Tensor:
        assert x.dtype == y.dtype in _DTYPES and x.shape == y.shape, (x.dtype, y.dtype, x.shape, y.shape)
        x, y = x.contiguous(), y.contiguous()
        self._library.add(x.data_ptr(), y.data_ptr(), y.numel(), y.dtype == torch.bfloat16)
        return y

    def add_gated(self, y: Tensor, gate: Tensor, x: Tensor) -> Tensor:
        assert x.dtype == y.dtype in _DTYPES and x.shape == y.shape, (x.dtype, y.dtype, x.shape, y.shape)
        assert gate.dtype == torch.float32 and gate.shape == (len(x), 1), (gate.dtype, gate.shape)
        y, gate, x = y.contiguous(), gate.contiguous(), x.contiguous()
        rows, size = x.shape
        self._library.add_gated(
            y.data_ptr(), gate.data_ptr(), x.data_ptr(), rows, size, x.dtype == torch.bfloat16
        )
        return x

    def mul_sigmoid(self, gate: Tensor, x: Tensor) -> Tensor:
        assert x.dtype == gate.dtype in _DTYPES, (x.dtype, gate.dtype)
        assert len(x) == len(gate) and x.shape[1] % gate.shape[1] == 0, (x.shape, gate.shape)
        x, gate = x.contiguous(), gate.contiguous()
        each = x.shape[1] // gate.shape[1]
        self._library.mul_sigmoid(gate.data_ptr(), x.data_ptr(), x.numel(), each, x.dtype == torch.bfloat16)
        return x

    def take_rows(self, table: Tensor, indices: Tensor, scale: float | None = None) -> Tensor:
        assert table.dtype in _DTYPES and table.is_contiguous(), table.dtype
        assert indices.dtype == torch.int64 and indices.is_contiguous(), indices.dtype
        num_rows, size = len(indices), table.shape[1]
        out = table.new_empty((num_rows, size))
        self._library.take_rows(
            table.data_ptr(),
            indices.data_ptr(),
            out.data_ptr(),
            num_rows,
            size,
            1.0 if scale is None else scale,
            table.dtype == torch.bfloat16,
        )
        return out

    def soft_cap(self, x: Tensor, cap: float) -> Tensor:
        assert x.dtype == torch.float32 and x.is_contiguous(), x.dtype
        self._library.soft_cap(x.data_ptr(), x.numel(), cap)
        return x

    def to_float32(self, x: Tensor) -> Tensor:
        if x.dtype == torch.float32:
            return x.contiguous()
        assert x.dtype == torch.bfloat16, x.dtype
        x = x.contiguous()
        out = x.new_empty(x.shape, dtype=torch.float32)
        self._library.widen(x.data_ptr(), out.data_ptr(), x.numel())
        return out

    def rotate_and_store(self, qkv: Tensor, norms: HeadNorms | None, store: RotaryStore) -> Tensor:
        """A pool whose floating-point dtype differs from the model's takes the torch path."""
        cos, sin, kv, out_cache_loc, interleaved, query_factors, keys_are_values = store
        if kv is not None and kv.k.dtype != qkv.dtype and kv.k_scale is None:
            return plain.rotate_and_store(qkv, norms, store)
        _check_rotation(qkv, norms, store)
        qkv, cos, sin = qkv.contiguous(), cos.contiguous(), sin.contiguous()
        num_tokens, num_heads_in_all, head_dim = qkv.shape
        num_kv_heads = 0 if kv is None else kv.k.shape[1]
        num_heads = num_heads_in_all - (1 if keys_are_values else 2) * num_kv_heads
        k, v, k_scale, v_scale = (None if part is None else part.data_ptr() for part in kv or (None,) * 4)
        self._library.rotate_and_store(
            qkv.data_ptr(),
            None if norms is None else norms.q_weight.data_ptr(),
            None if norms is None else norms.k_weight.data_ptr(),
            cos.data_ptr(),
            sin.data_ptr(),
            k,
            v,
            k_scale,
            v_scale,
            out_cache_loc.data_ptr(),
            num_tokens,
            num_heads,
            num_kv_heads,
            head_dim,
            cos.shape[-1],
            0.0 if norms is None else norms.eps,
            qkv.dtype == torch.bfloat16,
            cos.dtype == torch.bfloat16,
            norms is not None and norms.q_weight.dtype == torch.bfloat16,
            norms is not None and len(norms.q_weight) != head_dim,
            interleaved,
            None if query_factors is None else query_factors.data_ptr(),
            norms is not None and norms.values,
            keys_are_values,
        )
        return qkv[:, :num_heads]


def _check_rotation(qkv: Tensor, norms: HeadNorms | None, store: RotaryStore) -> None:
    """Check what the kernel does not: a violation would be an out-of-bounds access."""
    cos, sin, kv, out_cache_loc, _, query_factors, keys_are_values = store
    num_parts = 1 if keys_are_values else 2
    known = (qkv.dtype, torch.float32)
    num_tokens = qkv.shape[0]
    assert qkv.dtype in _DTYPES and cos.dtype == sin.dtype and cos.dtype in known, (qkv.dtype, cos.dtype)
    assert cos.shape == sin.shape and cos.shape[0] == num_tokens, (cos.shape, sin.shape)
    assert out_cache_loc.dtype == torch.int64 and out_cache_loc.is_contiguous(), out_cache_loc.dtype
    assert len(out_cache_loc) == num_tokens, out_cache_loc.shape
    assert cos.shape[1] <= qkv.shape[2], (cos.shape, qkv.shape)
    num_kv_heads, head_dim = 0, qkv.shape[2]
    if kv is not None:
        _check_pool(kv, qkv.dtype)
        num_kv_heads = kv.k.shape[1]
        assert kv.k.shape[2] == head_dim and qkv.shape[1] > num_parts * num_kv_heads, (qkv.shape, kv.k.shape)
    if norms is not None:
        q_weight, k_weight = norms.q_weight, norms.k_weight
        assert q_weight.dtype == k_weight.dtype and q_weight.dtype in known, (q_weight.dtype, k_weight.dtype)
        together = head_dim * (qkv.shape[1] - num_parts * num_kv_heads), head_dim * num_kv_heads
        assert (len(q_weight), len(k_weight)) in ((head_dim, head_dim), together), (
            q_weight.shape,
            k_weight.shape,
        )
        assert q_weight.is_contiguous() and k_weight.is_contiguous()
    if query_factors is not None:
        assert query_factors.dtype == torch.float32 and query_factors.is_contiguous()
        assert query_factors.numel() == num_tokens, query_factors.shape


def _check_pool(kv: LayerKV, dtype: torch.dtype) -> None:
    """The same for the KV memory of a layer; `dtype`: of activations."""
    assert kv.k.is_contiguous() and kv.v.is_contiguous()
    stored = dtype if kv.k_scale is None else torch.int8
    assert kv.k.dtype == kv.v.dtype == stored and kv.v.shape == kv.k.shape, (kv.v.dtype, kv.v.shape)
    for scales in (kv.k_scale, kv.v_scale):
        assert (scales is None) == (kv.k_scale is None)
        if scales is not None:
            assert scales.dtype == torch.float32 and scales.is_contiguous(), scales.dtype
            assert scales.shape == kv.k.shape[:2], scales.shape


def _gated(function: ctypes._NamedFuncPointer, gate_up: Tensor, *numbers: float) -> Tensor:
    assert gate_up.dtype in _DTYPES, gate_up.dtype
    gate_up = gate_up.contiguous()
    num_tokens, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty((num_tokens, size))
    is_bf16 = gate_up.dtype == torch.bfloat16
    function(gate_up.data_ptr(), out.data_ptr(), num_tokens, size, *numbers, is_bf16)
    return out


def native_ops() -> NativeOps:
    """The operations for this CPU. Call only if `reasons_against_native` is empty."""
    return NativeOps(load_library(), compress=not reasons_against_compression(loaded_isa()))
