"""How attention and rotary modules of a loaded model are called: seen in one forward pass of a short text."""

# Shapes: T tokens, K hidden size, Hq query heads, D head dim, R rotated dimensions of a head.

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from ....models.spec.model_spec import ModelSpec

_LENGTH: Final = 9


class AttentionCall(NamedTuple):
    """How a layer calls its attention module."""

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def hidden_states(self) -> Tensor:
        """[1, T, K], by whatever name they are passed."""
        found = self.kwargs.get("hidden_states", self.args[0] if self.args else None)
        assert isinstance(found, Tensor)
        return found

    def angles(self) -> tuple[Tensor, Tensor] | None:
        """cos and sin, [1, T, R] each; None: the module is not given any."""
        for each in (*self.args, *self.kwargs.values()):
            if isinstance(each, tuple) and len(each) == 2 and all(isinstance(part, Tensor) for part in each):
                return each
        return None

    def run(self, module: nn.Module, hidden: Tensor, angles: tuple[Tensor, Tensor] | None, check: Any) -> Any:
        """Call a copy of the module with other values; `check`: gets its attention, see `Layers`.

        Other numbers among the arguments are random: a factor of 1 in a short text may be another one later.
        """
        old_hidden, old_angles = self.hidden_states(), self.angles()

        def new(value: Any) -> Any:
            if value is old_hidden:
                return hidden
            if value is old_angles:
                return value if angles is None else angles
            if isinstance(value, Tensor) and value.is_floating_point():
                return torch.randn(value.shape)
            return value

        kwargs = {name: new(value) for name, value in self.kwargs.items()}
        return module(*map(new, self.args), **{**kwargs, "engine_check": check})


class Seen:
    """The attention function of a probed module: keeps its arguments, and returns random values; see `Layers.look`.

    Attributes:
        modules: that called it.
        query, key, value: [T, heads, D] of the last call.
        scaling: of the last call; None: not given.
        has_sinks: whether the last call brought attention sinks.
        out: [1, T, Hq, D], what it returned.
    """

    def __init__(self) -> None:
        self.modules: list[nn.Module] = []
        self.query = self.key = self.value = self.out = torch.empty(0)
        self.scaling: float | None = None
        self.has_sinks = False

    def look(
        self,
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        options: dict[str, Any],
    ) -> tuple[Tensor, None]:
        """Note the arguments."""
        self.modules.append(module)
        self.query, self.key, self.value = (x[0].transpose(0, 1).clone() for x in (query, key, value))
        self.scaling = options.get("scaling")
        self.has_sinks = options.get("s_aux") is not None
        self.out = torch.randn(1, query.shape[2], query.shape[1], value.shape[3])
        return self.out.to(query.dtype), None


class Calls(Seen):
    """Collects how modules are called.

    Attributes:
        modules: attention modules, in the order of their calls.
        by_module: the last call of each.
        rotary: arguments and results of modules with rotary frequencies.
    """

    def __init__(self) -> None:
        super().__init__()
        self.by_module: dict[nn.Module, AttentionCall] = {}
        self.rotary: dict[nn.Module, list[tuple[tuple[Any, ...], dict[str, Any], Any]]] = {}


def observe(decoder: Any, spec: ModelSpec) -> Calls:
    """Run a short text, and note the calls of attention and rotary modules."""
    calls = Calls()

    def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        calls.by_module[module] = AttentionCall(module, args, kwargs)

    def note_angles(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        calls.rotary.setdefault(module, []).append((args, kwargs, result))

    handles = []
    for module in decoder.modules():
        if isinstance(getattr(module, "layer_idx", None), int):
            handles.append(module.register_forward_pre_hook(note, with_kwargs=True))
        if any("inv_freq" in name for name, _ in module.named_buffers(recurse=False)):
            handles.append(module.register_forward_hook(note_angles, with_kwargs=True))
    generator = torch.Generator().manual_seed(1)
    text = torch.randint(spec.vocab_size, (1, _LENGTH), generator=generator)
    positions = torch.arange(_LENGTH).unsqueeze(0)
    try:
        decoder(input_ids=text, position_ids=positions, use_cache=False, engine_check=calls)
    finally:
        for handle in handles:
            handle.remove()
    calls.modules = [module for module in calls.modules if module in calls.by_module]
    return calls
