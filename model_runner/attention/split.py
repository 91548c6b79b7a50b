"""Two attention backends as one: the extends of a batch go to the first, its decodes to the second.

Prompts are bound by arithmetic and decodes by memory, so the best kernel for one need not be the best for the other.
"""

# Shapes: see `backend`.

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, cast

from .backend import AttentionBackend, BatchLayout, result_of

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from ...models.spec.model_spec import ModelSpec
    from ..memory.io_buffers import InputBuffers
    from ..memory.kv_pool import KVPool
    from .backend import CapturableAttention, StepAttention


def split_backend(prompts: type[AttentionBackend], decodes: type[AttentionBackend]) -> type[AttentionBackend]:
    """The backend that is `prompts` for extends and `decodes` for decodes; capturable where `decodes` is."""
    members = {"name": f"{prompts.name},{decodes.name}", "prompts": prompts, "decodes": decodes}
    return cast("type[AttentionBackend]", type("Split", (Split,), members))


class Split(AttentionBackend):
    """A backend made of two; `split_backend` sets them as class attributes."""

    name: ClassVar[str]
    prompts: ClassVar[type[AttentionBackend]]
    decodes: ClassVar[type[AttentionBackend]]

    @classmethod
    def reasons_against(
        cls, spec: ModelSpec, device: torch.device, dtype: torch.dtype, kv_dtype: torch.dtype
    ) -> list[str]:
        """The reasons of both parts."""
        parts = (cls.prompts, cls.decodes)
        return [
            f"{part.name}: {reason}"
            for part in parts
            for reason in part.reasons_against(spec, device, dtype, kv_dtype)
        ]

    def __init__(self, spec: ModelSpec, kv_pool: KVPool, req_to_token: Tensor, buffers: InputBuffers) -> None:
        self._prompts = self.prompts(spec, kv_pool, req_to_token, buffers)
        self._decodes = self.decodes(spec, kv_pool, req_to_token, buffers)

    @property
    def gathered_token_bytes(self) -> int:
        """The larger of both, because prompts and decodes run one after the other."""
        return max(self._prompts.gathered_token_bytes, self._decodes.gathered_token_bytes)

    def capturable(self) -> CapturableAttention | None:
        return self._decodes.capturable()

    def plan_step(self, layout: BatchLayout) -> StepAttention:
        split = layout.num_extends
        if split == len(layout.rows):
            return self._prompts.plan_step(layout)
        if split == 0:
            return self._decodes.plan_step(layout)
        return _SplitStep(
            self._prompts.plan_step(_part(layout, slice(split), split)),
            self._decodes.plan_step(_part(layout, slice(split, None), 0)),
            int(layout.extend_lens[:split].sum()),
        )


def _part(layout: BatchLayout, requests: slice, num_extends: int) -> BatchLayout:
    sees_to = layout.sees_to
    if sees_to is not None:
        num_tokens = int(layout.extend_lens[: layout.num_extends].sum())
        sees_to = sees_to[:num_tokens] if num_extends else None
    rows, prefix_lens, extend_lens = layout.rows, layout.prefix_lens, layout.extend_lens
    return BatchLayout(
        rows[requests], prefix_lens[requests], extend_lens[requests], num_extends, sees_to=sees_to
    )


@dataclass(frozen=True, slots=True)
class _SplitStep:
    """The attention of both parts; `num_prompt_tokens` tokens come first in the batch."""

    prompts: StepAttention
    decodes: StepAttention
    num_prompt_tokens: int

    def forward(
        self, layer_id: int, q: Tensor, sinks: Tensor | None = None, out: Tensor | None = None
    ) -> Tensor:
        split = self.num_prompt_tokens
        if out is None:
            out = result_of(q)
        self.prompts.forward(layer_id, q[:split], sinks, out[:split])
        self.decodes.forward(layer_id, q[split:], sinks, out[split:])
        return out
