"""`rank_spec`: one rank's part of a model in a tensor-parallel group: heads, widths, rows of the vocabulary.

Heads and MLP widths are divided evenly. Key/value heads that are fewer than the ranks are replicated. The vocabulary
may have any size: each rank has the same number of rows, and rows beyond the end are padding. Modules that act on the
residual stream (norms, the router of experts) are complete on every rank.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from ...runtime.errors import ConfigError

if TYPE_CHECKING:
    from ...models.spec.model_spec import ModelSpec


def rank_spec(spec: ModelSpec, tp: int) -> ModelSpec:
    """The part of each of `tp` ranks, as a model of its own: for attention, the KV pool, and the memory budget."""
    if tp == 1:
        return spec
    assert reason_against_tp(spec, tp) is None
    experts = spec.experts
    if experts is not None:
        experts = msgspec.structs.replace(
            experts,
            intermediate_size=experts.intermediate_size // tp,
            shared_size=experts.shared_size // tp,
        )
    return msgspec.structs.replace(
        spec,
        num_heads=spec.num_heads // tp,
        num_kv_heads=max(1, spec.num_kv_heads // tp),
        intermediate_size=spec.intermediate_size // tp,
        vocab_size=-(-spec.vocab_size // tp),
        experts=experts,
        state=None if spec.state is None else spec.state.of_rank(tp),
        streams=spec.streams.of_rank(tp),
    )


def check_tp(spec: ModelSpec, tp: int) -> None:
    """Check that `tp` ranks can share the model.

    Raises:
        ConfigError: they cannot; the message names the number that does not divide, and the values that work.
    """
    reason = reason_against_tp(spec, tp)
    if reason is not None:
        working = [n for n in range(1, spec.num_heads + 1) if reason_against_tp(spec, n) is None]
        raise ConfigError(
            f"tp is {tp}, but {reason}; for this model --tp can be {', '.join(map(str, working))}"
        )


def reason_against_tp(spec: ModelSpec, tp: int) -> str | None:
    """Reason why `tp` ranks cannot share the model; None: they can."""
    streams = spec.streams
    for num_heads in dict.fromkeys((spec.num_heads, *(each.num_heads for each in streams.layer_heads))):
        if num_heads % tp:
            return f"the model's {num_heads} attention heads cannot be divided by it"
    numbers = spec.num_kv_heads, *(each.num_kv_heads for each in streams.layer_heads)
    for num_kv_heads in dict.fromkeys(numbers):
        if num_kv_heads % tp and tp % num_kv_heads:
            return f"the model's {num_kv_heads} key/value heads can neither be divided by it nor divide it"
    for size in dict.fromkeys((spec.intermediate_size, *streams.intermediate_sizes)):
        if has_dense_mlp(spec) and size % tp:
            return f"the model's intermediate size of {size} cannot be divided by it"
    if spec.experts is not None and spec.experts.intermediate_size % tp:
        return f"its experts' intermediate size of {spec.experts.intermediate_size} cannot be divided by it"
    if spec.experts is not None and spec.experts.shared_size % tp:
        return f"its shared expert's intermediate size of {spec.experts.shared_size} cannot be divided by it"
    return None if spec.state is None else spec.state.reason_against_tp(tp)


def has_dense_mlp(spec: ModelSpec) -> bool:
    """Whether any layer has a dense MLP; a model with experts in all layers still names its width in the file."""
    return spec.experts is None or bool(spec.experts.dense_layers)
