"""Pipeline stages: which layers each has, and its part of the model as a model of its own.

A stage computes the layers [first, end) and has KV memory for these only. The first stage has the embedding; the last
one has the final norm, the output head and the sampler. With a tied head both have the table.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Final

import msgspec

from ...models.spec.streams_spec import ONE_STREAM
from ...models.weight_files.needed_tensors import needed_modules
from ...models.weight_files.vision_tensors import TOWER
from ...models.weight_files.weight_memory import end_bytes, tied_head_bytes, weight_bytes
from ...runtime.config.device_config import parse_pp_layers
from ...runtime.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ...models.spec.model_spec import ModelSpec
    from ...runtime.config.device_config import ParallelConfig

_EMBEDDING: Final = "model.embed_tokens."
_LAYER: Final = "model.layers."


@dataclass(frozen=True, slots=True)
class Stage:
    """One stage of `count`; it computes the layers `first` to `end` - 1 of the whole model."""

    index: int
    count: int
    first: int
    end: int

    @property
    def is_first(self) -> bool:
        """Whether this stage embeds the input tokens."""
        return self.index == 0

    @property
    def is_last(self) -> bool:
        """Whether this stage computes logits and samples."""
        return self.index == self.count - 1


WHOLE_MODEL: Final = Stage(0, 1, 0, 0)
"""The stage of a model that is not divided; it has all layers, whatever its numbers say."""


def stages_of(spec: ModelSpec, parallel: ParallelConfig) -> list[Stage]:
    """The stages of the whole model, first to last.

    Raises:
        ConfigError: the model cannot be divided so.
    """
    if parallel.pp == 1:
        return [WHOLE_MODEL]
    check_stages(spec, parallel)
    given = parse_pp_layers(parallel.pp_layers)
    lengths = given if given is not None else balanced_lengths(spec, parallel.pp)
    spans = pairwise(accumulate(lengths, initial=0))
    return [Stage(index, parallel.pp, *span) for index, span in enumerate(spans)]


def stage_of(spec: ModelSpec, parallel: ParallelConfig, rank: int) -> Stage:
    """The stage of a rank."""
    return stages_of(spec, parallel)[rank // parallel.tp]


def stage_spec(spec: ModelSpec, stage: Stage) -> ModelSpec:
    """The layers of a stage as a model of its own; `spec` is that of the whole model."""
    if stage.count == 1:
        return spec
    part = slice(stage.first, stage.end)
    experts = spec.experts
    if experts is not None:
        dense = tuple(n - stage.first for n in experts.dense_layers if stage.first <= n < stage.end)
        experts = msgspec.structs.replace(
            experts, dense_layers=dense, limits=experts.limits[part], mlp_limits=experts.mlp_limits[part]
        )
    windows = spec.windows
    if windows is not None:
        windows = msgspec.structs.replace(windows, layers=windows.layers[part])
    return msgspec.structs.replace(
        spec,
        num_layers=stage.end - stage.first,
        first_layer=stage.first,
        rope_layers=spec.rope_layers[part],
        windows=windows,
        form=msgspec.structs.replace(spec.form, mlp_layers=spec.form.mlp_layers[part]),
        experts=experts,
        vision=spec.vision if stage.is_first else None,
        files=msgspec.structs.replace(spec.files, num_mtp_layers=0, num_parameters=None),
    )


def check_stages(spec: ModelSpec, parallel: ParallelConfig) -> None:
    """Check that the model can be divided into these stages.

    Raises:
        ConfigError: it cannot; the message says why.
    """
    pp, num_layers = parallel.pp, spec.num_layers
    if pp > num_layers:
        raise ConfigError(
            f"pp is {pp}, but the model has {num_layers} layers, and each stage needs one; lower --pp"
        )
    given = parse_pp_layers(parallel.pp_layers)
    if given is not None and sum(given) != num_layers:
        raise ConfigError(
            f"pp_layers is {parallel.pp_layers!r}, which is {sum(given)} layers, but the model has {num_layers}; give "
            "each layer to one stage, or omit --pp-layers"
        )
    reason = reason_against_stages(spec)
    if reason is not None:
        raise ConfigError(f"pp is {pp}, but {reason}; use --tp instead of --pp")


def reason_against_stages(spec: ModelSpec) -> str | None:
    """Reason why the model cannot be divided into stages; None: it can."""
    if spec.encoder is not None or spec.pooling is not None:
        return f"{spec.model_type} generates no text here, and stages are for models that do"
    if spec.state is not None:
        return f"{spec.model_type} has layers with a state, and states are not divided into stages"
    if spec.streams != ONE_STREAM:
        return f"the layers of {spec.model_type} may have inputs besides those of the layer before"
    return None


def balanced_lengths(spec: ModelSpec, count: int) -> tuple[int, ...]:
    """Layers of each stage, so that the stage with the most weights to multiply has as few as possible.

    The output head counts: it may be as large as several layers. The embedding does not, because only rows of it are
    read. Of equal divisions the one with more layers at the end is taken: the first stage's process also schedules.
    """
    sizes, head = _sizes(spec)
    before = list(accumulate(sizes, initial=0))
    num_layers = len(sizes)
    # cost[n]: of the best division of the last n layers into so many stages; the last stage has the head.
    cost = [head + before[-1] - before[num_layers - n] for n in range(num_layers + 1)]
    choices: list[list[int]] = []
    for stages in range(2, count + 1):
        best, chosen = [0] * (num_layers + 1), [0] * (num_layers + 1)
        for left in range(stages, num_layers + 1):
            start = num_layers - left
            best[left], chosen[left] = min(
                (max(before[start + own] - before[start], cost[left - own]), own)
                for own in range(1, left - stages + 2)
            )
        cost = best
        choices.append(chosen)
    lengths, left = [], num_layers
    for chosen in reversed(choices):
        lengths.append(chosen[left])
        left -= chosen[left]
    return (*lengths, left)


def least_bubble(spec: ModelSpec, stages: Sequence[Stage]) -> float:
    """Share of the time that stages wait on average, if times are as the weights that are multiplied."""
    if len(stages) == 1:
        return 0.0
    sizes, head = _sizes(spec)
    loads = [sum(sizes[stage.first : stage.end]) + head * stage.is_last for stage in stages]
    return 1 - sum(loads) / (len(loads) * max(loads))


def _sizes(spec: ModelSpec) -> tuple[list[int], int]:
    """Numbers in each layer, and in the output head."""
    sizes = [0] * spec.num_layers
    experts = 1 if spec.experts is None else spec.experts.num_experts
    for module in needed_modules(spec, one_expert=True):
        if module.name.startswith(_LAYER):
            layer = int(module.name.removeprefix(_LAYER).split(".", 1)[0])
            sizes[layer] += module.num_parameters * (experts if module.is_expert else 1)
    return sizes, spec.vocab_size * spec.hidden_size


def is_of_other_stages(spec: ModelSpec, stage: Stage) -> Callable[[str], bool]:
    """Whether a tensor of the whole model is one that this stage does not read; `spec` is that of the stage."""
    own: Sequence[str] = tuple(f"{spec.layer_name(layer)}." for layer in range(spec.num_layers))

    def is_other(name: str) -> bool:
        if name.startswith(_LAYER):
            return not name.startswith(tuple(own))
        if name.startswith(TOWER):
            return not stage.is_first
        if name.startswith(_EMBEDDING):
            return not (stage.is_first or (stage.is_last and spec.tie_word_embeddings))
        return not stage.is_last  # the final norm and the head

    return is_other


def stage_weight_bytes(
    spec: ModelSpec, stage: Stage, dtype_bytes: int, *, dequantized: bool, on_cpu: bool
) -> int:
    """Memory of the weights of a stage; `spec` is that of its layers, or of the whole model.

    Args:
        dtype_bytes: of weights that are not quantized.
        dequantized: quantized weights are kept in `dtype_bytes`, too.
        on_cpu: a tied head is packed for its kernel, so it is a copy of the table.
    """
    num_bytes = weight_bytes(spec, dtype_bytes, dequantized=dequantized, on_cpu=on_cpu)
    if stage.count == 1:
        return num_bytes + (tied_head_bytes(spec, dtype_bytes, dequantized=dequantized) if on_cpu else 0)
    counted, first, last = end_bytes(spec, dtype_bytes, dequantized=dequantized)
    return num_bytes - counted + first * stage.is_first + last * stage.is_last
