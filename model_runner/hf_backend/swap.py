"""`swap_modules`: puts the engine's kernels into a loaded model of transformers.

Modules of torch are recognized by type; RMS norms and embeddings with a factor by their parameters, their attributes
and what they compute from a small input, because transformers' classes of one name differ in their arithmetic. All else
stays transformers' code. If a model reads weights that are gone, `transformers_load` loads it again unchanged.
"""

# Shapes: K inputs, N outputs.

from __future__ import annotations

import copy
import inspect
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
    tables: dict[int, LinearWithRows] = {}
    dtype, head = causal_lm.dtype, causal_lm.get_output_embeddings()
    # Without the leaves, which are freed.
    parents = [module for module in causal_lm.modules() if module._modules]
    places = [(parent, name, child is head) for parent in parents for name, child in parent.named_children()]
    places.sort(key=lambda place: not place[2])  # the head first: a tied embedding takes its table
    del head
    for parent, name, is_head in places:
        new = _replacement(getattr(parent, name), ops, dtype, tables, is_head=is_head)
        if new is not None:
            setattr(parent, name, new)
            counts[new.kind] += 1
    return counts


def _replacement(
    module: Any, ops: Ops, dtype: torch.dtype, tables: dict[int, LinearWithRows], *, is_head: bool
) -> KernelModule | None:
    """The new module; None: the old one stays, as a linear layer does that its model keeps in float32.

    Args:
        tables: the packed head by the address of its weight, noted here.
    """
    from transformers.pytorch_utils import Conv1D

    parameter = getattr(module, "weight", None)
    if not isinstance(parameter, nn.Parameter) or not _is_plain(module):
        return None
    weight = parameter.detach()
    if weight.dtype == dtype:
        if type(module) in (nn.Linear, Conv1D):  # the second one stores its weight transposed
            packed = ops.pack_linear(weight if type(module) is nn.Linear else weight.t().contiguous())
            if is_head and isinstance(packed, LinearWithRows):
                tables[weight.data_ptr()] = packed
            return _linear(packed, module.bias, is_head=is_head)
        if isinstance(module, nn.Embedding):
            return _embedding(ops, module, tables.get(weight.data_ptr(), weight))
        if type(module) is nn.LayerNorm and weight.ndim == 1:
            bias, eps = module.bias, module.eps
            return KernelModule("norm", lambda x: ops.layer_norm(x, weight, bias, eps))
    return _rms_norm(ops, module, weight)


def _is_plain(module: nn.Module) -> bool:
    """Whether a call of the module is the `forward` of its class, with one argument."""
    is_own = not (module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module))
    return is_own and len(inspect.signature(module.forward).parameters) == 1


def _linear(packed: LinearWeight, bias: Tensor | None, *, is_head: bool) -> KernelModule:
    """A linear layer; an output head returns float32 if its kernel can."""
    multiply = packed.to_float32 if is_head and isinstance(packed, LinearToFloat32) else packed
    kind = "head" if is_head else "linear"
    return KernelModule(kind, lambda x: multiply(x.reshape(-1, x.shape[-1]), bias).view(*x.shape[:-1], -1))


def _embedding(ops: Ops, module: nn.Embedding, table: Tensor | LinearWithRows) -> KernelModule | None:
    """Rows of a table times the factor `embed_scale` if there is one; None: the module computes something else."""
    scale = getattr(module, "embed_scale", None)
    if isinstance(scale, Tensor):
        scale = scale.to(module.weight.dtype).item()
    attributes = {"embed_scale", "scalar_embed_scale", *nn.Embedding.__constants__}
    ids = torch.tensor([[0, module.num_embeddings - 1]], device=module.weight.device)
    expected = module.weight[ids] * (1.0 if scale is None else scale)
    is_known = {*_attributes(module)} <= attributes and module.max_norm is None
    # The factor may be rounded to bfloat16.
    if not is_known or not _computes(module, ids, expected, rtol=1e-2):
        return None

    def rows(ids: Tensor) -> Tensor:
        flat = ids.reshape(-1)
        found = ops.take_rows(table, flat, scale) if isinstance(table, Tensor) else table.rows(flat, scale)
        return found.view(*ids.shape, -1)

    return KernelModule("embedding", rows)


def _rms_norm(ops: Ops, module: nn.Module, weight: Tensor) -> KernelModule | None:
    """An RMS norm that multiplies by its only parameter, or by 1 + it; None: the module computes something else.

    It is computed in float32, at three scales of the input, of which one is that of eps, and for inputs of 3 and of 4
    dimensions. Attributes besides eps, such as the size of a group, may have an effect on other inputs only.
    """
    attributes = _attributes(module)
    eps = next((attributes.pop(name) for name in [*attributes] if "eps" in name), None)
    has_more = len([*module.parameters(), *module.buffers(), *module.children()]) > 1
    if has_more or weight.ndim != 1 or not isinstance(eps, float):
        return None
    if not all(value is None or isinstance(value, bool) for value in attributes.values()):
        return None
    exact = copy.deepcopy(module).float()
    x = torch.randn(1, 3, 2, len(weight), generator=torch.Generator().manual_seed(0))
    x = (x * torch.tensor([1.0, eps**0.5, 1e3]).view(3, 1, 1)).to(weight.device)
    normalized = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    for factor in (weight, 1.0 + weight.float()):
        expected = normalized * factor
        if _computes(exact, x, expected) and _computes(exact, x[:, :, 0], expected[:, :, 0]):
            return KernelModule("norm", _normalize(ops, factor, eps))
    return None


def _normalize(ops: Ops, weight: Tensor, eps: float) -> Callable[[Tensor], Tensor]:
    return lambda x: ops.rms_norm(x, weight, eps)


def _attributes(module: nn.Module) -> dict[str, Any]:
    """Attributes of a module besides parameters, buffers and children."""
    known = vars(nn.Module())
    return {name: value for name, value in vars(module).items() if name not in known and name[0] != "_"}


def _computes(module: nn.Module, x: Tensor, expected: Tensor, rtol: float = 1e-4) -> bool:
    try:
        found = module(x)
        return found.shape == expected.shape and torch.allclose(found, expected, rtol, 0.0)
    except Exception:  # any type: it is the code of some model
        return False
