"""Probes: run a copy of a module of transformers in float32, with its linear layers replaced by given values.

What a module computes around its linear layers can be tested this way without their weights, whatever their size.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

logger = logging.getLogger(__name__)

TOLERANCE: Final = 1e-5
"""Largest difference in float32, relative to the largest expected value."""
SCALES: Final = (0.02, 1.0, 40.0)
"""Sizes of random inputs: clamps and other bends show at one of them."""

_VIEWS: Final = (
    "alias chunk detach expand flatten permute select slice split split_with_sizes squeeze t tensor_split to transpose "
    "unflatten unsqueeze view _reshape_alias _unsafe_view"
)
_COPIES: Final = (
    "arange cat clone contiguous copy_ empty empty_like lift_fresh new_empty repeat repeat_interleave reshape stack "
    "_to_copy"
)
_HARMLESS: Final = frozenset(
    f"{_VIEWS} {_COPIES} add sub mul div neg pow square mean var sqrt rsqrt reciprocal rms_norm _fused_rms_norm "
    "layer_norm native_layer_norm randn dropout".split()
)
"""Operations without bends: what they compute at one size of numbers they compute at all."""


class Probe(nn.Module):
    """Stands for a linear layer in a copy of a module.

    Attributes:
        inputs: what it was called with.
        outputs: what it returned.
    """

    def __init__(self, num_outputs: int, answer: Callable[[Tensor], Tensor] | None = None) -> None:
        """`answer`: input -> output; None: random values of the input's size."""
        super().__init__()
        self.num_outputs = num_outputs
        self._scale = 1.0
        self.answer = answer or self._random
        self.inputs: list[Tensor] = []
        self.outputs: list[Tensor] = []

    def begin(self, scale: float) -> None:
        """Forget the calls so far; `scale`: the size of random values."""
        self.inputs.clear()
        self.outputs.clear()
        self._scale = scale

    def forward(self, x: Tensor) -> Tensor:
        """The given values, and a note of the call."""
        self.inputs.append(x.clone())
        out = self.answer(x)
        self.outputs.append(out.clone())
        return out

    def _random(self, x: Tensor) -> Tensor:
        return torch.randn(*x.shape[:-1], self.num_outputs) * self._scale


class Operations(TorchDispatchMode):
    """Notes the names of torch's operations.

    Attributes:
        names: without namespace and overload.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: set[str] = set()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # see `native_program`

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.names.add(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))

    def others(self, known: Iterable[str] = ()) -> set[str]:
        """Those whose results at a few sizes of numbers do not show what they compute: limits, choices, logarithms.

        Args:
            known: further operations that are no reason.
        """
        others = self.names - _HARMLESS - set(known)
        if others:
            logger.debug("other operations: %s", ", ".join(sorted(others)))
        return others


def probed_copy(module: nn.Module, replaced: Mapping[Any, nn.Module]) -> Any:
    """A copy in float32; `replaced`: submodules, and what stands for each. Configurations are shared."""
    memo: dict[int, Any] = {id(original): probe for original, probe in replaced.items()}
    for part in module.modules():
        config = getattr(part, "config", None)
        if config is not None:
            memo[id(config)] = config
    return copy.deepcopy(module, memo).float()


def randomize(parameters: Iterable[Tensor]) -> None:
    """Values around 1, so that a factor of 1 or an offset of 0 does not hide a parameter."""
    with torch.no_grad():
        for parameter in parameters:
            parameter.uniform_(0.5, 1.5)


def is_close(found: Tensor, expected: Tensor, tolerance: float = TOLERANCE) -> bool:
    """Whether two tensors of one shape are equal up to rounding."""
    if found.shape != expected.shape:
        return False
    found, expected = found.float(), expected.float()
    return bool((found - expected).abs().max() <= tolerance * expected.abs().max().clamp_min(1e-30))


def plain_linears(module: nn.Module) -> list[nn.Linear]:
    """The linear layers among a module's children; subclasses may compute something else."""
    return [child for child in module.children() if type(child) is nn.Linear]


def has_other_weights(module: nn.Module, known: Iterable[nn.Module]) -> bool:
    """Whether a module has parameters outside of these children."""
    inside = {id(parameter) for child in known for parameter in child.parameters()}
    return any(id(parameter) not in inside for parameter in module.parameters())
