"""`swap_modules`: puts the engine's kernels into a loaded model of transformers.

Linear layers and embeddings are known by type, norms by the name of their class and the shape of their weight. All else
stays transformers' code. If a model then computes something else, or reads weights that are gone, `transformers_load`
loads it again unchanged.
"""

# Shapes: K inputs, N outputs.

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ..ops.linear import LinearToFloat32, LinearWithRows

if TYPE_CHECKING:
    from ..ops.linear import LinearWeight
    from ..ops.ops import Ops


class KernelModule(nn.Module):
    """A module computed by one of our kernels; it has no parameters. `kind`: its name in the log."""

    def __init__(self, kind: str, compute: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.kind = kind
        self._compute = compute

    def __call__(self, x: Tensor) -> Tensor:
        """[..., K] -> [..., N]; an embedding takes ids [...]. Without hooks, whose check takes as long as a norm."""
        return self._compute(x)


@torch.inference_mode()
def swap_modules(causal_lm: Any, ops: Ops) -> Counter[str]:
    """Replace what is recognized, one by one, so that each old module is freed; returns the number of each kind."""
    counts: Counter[str] = Counter()
    dtype: torch.dtype = causal_lm.dtype
    head, embedding = causal_lm.get_output_embeddings(), causal_lm.get_input_embeddings()
    if type(head) is nn.Linear and head.weight.dtype == dtype:
        packed = ops.pack_linear(head.weight.detach())
        is_tied = _is_table(embedding) and embedding.weight.data_ptr() == head.weight.data_ptr()
        replacements: Any = {head: _linear("head", packed, head)}
        if is_tied and isinstance(packed, LinearWithRows):
            replacements[embedding] = _embedding(ops, embedding, packed)
        counts += _replace(causal_lm, replacements.get)
        del replacements
    del head, embedding
    return counts + _replace(causal_lm, lambda module: _replacement(module, ops, dtype))


def _replace(model: nn.Module, replacement: Callable[[nn.Module], KernelModule | None]) -> Counter[str]:
    counts: Counter[str] = Counter()
    parents = [module for module in model.modules() if module._modules]  # without the leaves, which are freed
    for parent in parents:
        for name in [name for name, _ in parent.named_children()]:
            new = replacement(getattr(parent, name))
            if new is not None:
                setattr(parent, name, new)
                counts[new.kind] += 1
    return counts


def _replacement(module: Any, ops: Ops, dtype: torch.dtype) -> KernelModule | None:
    """The new module; None: the old one stays, as a linear layer does that its model keeps in float32."""
    from transformers.pytorch_utils import Conv1D

    weight = getattr(module, "weight", None)
    if not isinstance(weight, nn.Parameter):
        return None
    if type(module) is Conv1D and weight.dtype == dtype:  # a linear layer that is stored transposed
        return _linear("linear", ops.pack_linear(weight.detach().t().contiguous()), module)
    if type(module) is nn.Linear and weight.dtype == dtype:
        return _linear("linear", ops.pack_linear(weight.detach()), module)
    if _is_table(module) and weight.dtype == dtype:
        return _embedding(ops, module, weight.detach())
    return _norm(ops, module, weight.detach(), dtype)


def _linear(kind: str, packed: LinearWeight, module: Any) -> KernelModule:
    """A linear layer; an output head returns float32 if its kernel can."""
    bias: Tensor | None = None if module.bias is None else module.bias.detach()
    multiply: Callable[..., Tensor] = packed
    if kind == "head" and isinstance(packed, LinearToFloat32):
        multiply = packed.to_float32
    return KernelModule(kind, lambda x: multiply(x.reshape(-1, x.shape[-1]), bias).view(*x.shape[:-1], -1))


def _is_table(module: Any) -> bool:
    is_known = type(module) is nn.Embedding or type(module).__name__.endswith("ScaledWordEmbedding")
    return is_known and isinstance(module, nn.Embedding) and module.max_norm is None


def _embedding(ops: Ops, module: Any, table: Tensor | LinearWithRows) -> KernelModule:
    """Rows of a table, or of the weight of a head that is tied to it, times the module's factor if it has one."""
    scale = getattr(module, "embed_scale", None)
    if isinstance(scale, Tensor):
        scale = scale.to(module.weight.dtype).item()

    def rows(ids: Tensor) -> Tensor:
        flat = ids.reshape(-1)
        found = ops.take_rows(table, flat, scale) if isinstance(table, Tensor) else table.rows(flat, scale)
        return found.view(*ids.shape, -1)

    return KernelModule("embedding", rows)


def _norm(ops: Ops, module: Any, weight: Tensor, dtype: torch.dtype) -> KernelModule | None:
    """A `LayerNorm` of torch or a `...RMSNorm` of transformers; None: the module is no such norm."""
    eps = next((value for key, value in vars(module).items() if "eps" in key), None)
    if weight.ndim != 1 or [*module.children(), *module.buffers()] or not isinstance(eps, float):
        return None
    if type(module) is nn.LayerNorm and weight.dtype == dtype:
        bias: Tensor | None = getattr(module, "bias", None)
        return KernelModule("norm", lambda x: ops.layer_norm(x, weight, bias, eps))
    if not type(module).__name__.endswith("RMSNorm") or len(list(module.parameters())) != 1:
        return None
    try:  # norms that multiply by 1 + weight begin with weights of 0
        factor = weight if float(type(module)(1).weight) else 1.0 + weight.float()
    except (TypeError, ValueError):
        return None
    return KernelModule("norm", lambda x: ops.rms_norm(x, factor, eps))
