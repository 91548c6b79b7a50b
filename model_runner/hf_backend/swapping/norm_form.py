"""`norm_form_of`: recognizes normalization layers by what they compute."""

from __future__ import annotations

from typing import Final, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .probe import SCALES, Operations, is_close, probed_copy, randomize

_EPS: Final = (1e-5, 1e-6)  # of modules that do not name theirs
_NUM_ROWS: Final = 5
_TINY: Final = 1e-3  # inputs of this size show eps


class NormForm(NamedTuple):
    """A norm over the last axis.

    Attributes:
        kind: by the root mean square, or by mean and standard deviation.
        offset: added to the weight.
        size: of the last axis.
        has_weight, has_bias: whether the module has them.
    """

    kind: Literal["rms", "layer"]
    offset: float
    eps: float
    size: int
    has_weight: bool
    has_bias: bool

    def weight_of(self, module: nn.Module) -> Tensor:
        """The factor of a module of this form, [size] float32."""
        weight: Tensor | None = getattr(module, "weight", None)
        if weight is None:
            return torch.ones(self.size)
        return self.offset + weight.detach().float()

    def bias_of(self, module: nn.Module) -> Tensor | None:
        """The bias of a module of this form, [size] float32."""
        bias = getattr(module, "bias", None)
        return bias.detach().float() if self.has_bias and bias is not None else None

    def compute(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """The norm in float32."""
        if self.kind == "rms":
            out = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * weight
            return out if bias is None else out + bias
        return F.layer_norm(x, (self.size,), weight, bias, self.eps)


@torch.inference_mode(False)
@torch.no_grad()
def norm_form_of(module: nn.Module) -> NormForm | None:
    """The form of a module; None: it is no norm, or one of another kind."""
    candidates = _candidates(module)
    if not candidates:
        return None
    generator = torch.Generator().manual_seed(0)
    copied = probed_copy(module, {})
    randomize(copied.parameters())
    size = candidates[0].size
    inputs = [torch.randn(1, _NUM_ROWS, size, generator=generator) * s + s for s in (_TINY, *SCALES)]
    operations = Operations()
    try:
        with operations:
            outputs = [copied(x) for x in inputs]
    except Exception:  # any type: it is the code of some module
        return None
    if operations.others() or not all(isinstance(out, Tensor) for out in outputs):
        return None
    for form in candidates:
        weight, bias = form.weight_of(copied), form.bias_of(copied)
        if all(is_close(out, form.compute(x, weight, bias)) for x, out in zip(inputs, outputs, strict=True)):
            return form
    return None


def _candidates(module: nn.Module) -> list[NormForm]:
    parameters = dict(module.named_parameters())
    others = [*module.children(), *module.buffers()]  # a buffer may be a state, or depend on positions
    if others or not parameters.keys() <= {"weight", "bias"}:
        return []
    sizes: set[tuple[int, ...]] = {tuple(parameter.shape) for parameter in parameters.values()}
    if not sizes and "norm" in type(module).__name__.lower():
        declared = getattr(module, "normalized_shape", None)
        sizes = {tuple(declared)} if isinstance(declared, (tuple, list)) else set()
    shape = next(iter(sizes), ())
    if len(sizes) != 1 or len(shape) != 1:
        return []
    has_weight, has_bias = "weight" in parameters, "bias" in parameters
    named = [
        value
        for name, value in vars(module).items()
        if "eps" in name and isinstance(value, float) and value > 0
    ]
    kinds: tuple[Literal["rms", "layer"], ...] = ("layer",) if has_bias else ("rms", "layer")
    return [
        NormForm(kind, offset, eps, shape[0], has_weight, has_bias)
        for eps in dict.fromkeys([*named, *_EPS])
        for kind in kinds
        for offset in ((0.0, 1.0) if has_weight else (0.0,))
    ]
