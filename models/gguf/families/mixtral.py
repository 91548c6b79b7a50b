"""`mixture_of`: the experts of a file; Mixtral, whose files have the architecture `llama`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...spec.experts_spec import MIXTRAL_NAMES, ExpertNames, ExpertsSpec, Routing

if TYPE_CHECKING:
    from ...fields import Fields
    from .family import Facts


def mixture_of(fields: Fields, arch: str, names: ExpertNames, *, normalize: bool = True) -> ExpertsSpec:
    """The experts by the keys that all architectures have."""
    width = fields.integer(f"{arch}.feed_forward_length", 1, 1 << 22)
    return ExpertsSpec(
        num_experts=fields.integer(f"{arch}.expert_count", 1, 1 << 16),
        intermediate_size=fields.integer(f"{arch}.expert_feed_forward_length", 1, 1 << 22, default=width),
        routing=Routing(
            num_active=fields.integer(f"{arch}.expert_used_count", 1, 1 << 16), normalize=normalize
        ),
        names=names,
    )


def llama_or_mixtral(fields: Fields, arch: str) -> Facts:
    """Facts of a file that says `llama`: with experts it is Mixtral."""
    if fields.integer(f"{arch}.expert_count", 0, 1 << 16, default=0) == 0:
        return {}
    return {"model_type": "mixtral", "experts": mixture_of(fields, arch, MIXTRAL_NAMES)}
