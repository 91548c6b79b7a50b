"""`mlp_form_of`: recognizes feed-forward blocks, gated or not, by what they compute around their linear layers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Final, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...ops.elementwise import ActivationKind
from .probe import SCALES, Operations, Probe, has_other_weights, is_close, plain_linears, probed_copy

_NUM_TOKENS: Final = 7
_ACTIVATIONS: Final[Mapping[ActivationKind, Callable[[Tensor], Tensor]]] = {
    "silu": F.silu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "gelu": F.gelu,
    "relu": F.relu,
}
GATED: Final = ("silu", "gelu_tanh", "gelu")
"""Activations with an op for gated layers."""

_OPERATIONS: Final[Mapping[ActivationKind, tuple[str, ...]]] = {
    "silu": ("silu", "sigmoid"),
    "gelu_tanh": ("gelu", "tanh"),
    "gelu": ("gelu", "erf"),
    "relu": ("relu",),
}
"""Operations that an activation may consist of; with more of them the block has another bend, too."""


class MLPForm(NamedTuple):
    """down(act(gate(x)) * up(x)), or down(act(up(x))).

    Attributes:
        gate_up: the layers with gates and ups: two, or one with the gates in its first half; without gates one.
        down: the layer after the activation.
    """

    gate_up: list[nn.Linear]
    down: nn.Linear
    activation: ActivationKind
    is_gated: bool


@torch.inference_mode(False)
@torch.no_grad()
def mlp_form_of(module: nn.Module) -> MLPForm | None:
    """The form of a module; None: it is none of these blocks."""
    linears = plain_linears(module)
    if not 2 <= len(linears) <= 3 or has_other_weights(module, linears):
        return None
    probes = {linear: Probe(linear.out_features) for linear in linears}
    copied = probed_copy(module, probes)
    found: list[MLPForm] | None = None
    generator = torch.Generator().manual_seed(0)
    for scale in SCALES:
        for probe in probes.values():
            probe.begin(scale)
        x = torch.randn(1, _NUM_TOKENS, linears[0].in_features, generator=generator)
        operations = Operations()
        try:
            with operations:
                out = copied(x)
        except Exception:  # any type: it is the code of some module
            return None
        matching = [
            form for form in _matching(probes, x, out) if not operations.others(_OPERATIONS[form.activation])
        ]
        found = matching if found is None else [form for form in found if form in matching]
    return found[0] if found else None


def _matching(probes: Mapping[nn.Linear, Probe], x: Tensor, out: object) -> Iterator[MLPForm]:
    """The forms that explain one run."""
    if any(len(probe.inputs) != 1 for probe in probes.values()) or not isinstance(out, Tensor):
        return
    first = [
        linear
        for linear, probe in probes.items()
        if probe.inputs[0].shape == x.shape and torch.equal(probe.inputs[0], x)
    ]
    rest = [linear for linear in probes if linear not in first]
    if len(rest) != 1 or not torch.equal(out, probes[rest[0]].outputs[0]):
        return
    down, middle = rest[0], probes[rest[0]].inputs[0]
    values = [probes[linear].outputs[0] for linear in first]
    for kind, act in _ACTIVATIONS.items():
        if len(first) == 1 and is_close(middle, act(values[0])):
            yield MLPForm(first, down, kind, is_gated=False)
        if kind not in GATED:
            continue
        if len(first) == 1:
            gate, up = values[0].tensor_split(2, dim=-1)
            if gate.shape == up.shape and is_close(middle, act(gate) * up):
                yield MLPForm(first, down, kind, is_gated=True)
        elif is_close(middle, act(values[0]) * values[1]):
            yield MLPForm(first, down, kind, is_gated=True)
        elif is_close(middle, act(values[1]) * values[0]):
            yield MLPForm(first[::-1], down, kind, is_gated=True)
