"""`Layers`: compares the attention of each layer of a transformers model with what our backends compute.

`transformers_check` runs a loaded model with it. `check_forms` runs a model without weights, for `engine doctor`.
"""

# Shapes: T tokens, Hq query heads, H KV heads, D head dim.

from __future__ import annotations

import contextlib
import sys
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor

from ...runtime.errors import ConfigError

if TYPE_CHECKING:
    from ...models.spec.model_spec import ModelSpec

_CHECK_NAME: Final = "engine_check"
_LENGTH: Final = 24
"""Tokens of the text that `check_forms` runs."""
NO_ARGUMENTS: Final = "its code does not pass arguments on to attention"
_LAYER_TOLERANCE: Final = {torch.float32: 1e-3, torch.bfloat16: 5e-2}
"""Largest difference in a layer's attention, relative to its largest value. Unsupported attention differs by more: a
single sink takes 1/25 of the last token's attention and one half of the first token's."""


class DifferentError(Exception):
    """Raised inside a forward pass that cannot continue."""


class Layers:
    """The results of the comparison of each layer's attention."""

    def __init__(self, spec: ModelSpec) -> None:
        self.spec = spec
        self.reasons: list[str] = []
        self.seen: list[int] = []
        self.worst = 0.0

    def all_reasons(self) -> list[str]:
        """Why the layers seen, and those not seen, cannot be computed by our backends; after a whole forward pass."""
        missing = sorted(set(range(self.spec.num_layers)) - set(self.seen))
        if not missing:
            return self.reasons
        count = f"{len(missing)} of {self.spec.num_layers} layers do not"
        return [*self.reasons, f"layer {missing[0]} does not call the attention interface ({count})"]

    def look(
        self,
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        options: dict[str, Any],
    ) -> tuple[Tensor, Tensor | None]:
        """Compute a layer's attention with transformers' own function and compare it with ours."""
        layer_id = getattr(module, "layer_idx", None)
        if not isinstance(layer_id, int) or not 0 <= layer_id < self.spec.num_layers:
            raise DifferentError(
                f"an attention layer has the number {layer_id}, of {self.spec.num_layers} layers"
            )
        if layer_id in self.seen:
            raise DifferentError(
                f"layer {layer_id} attends twice, but the KV pool holds its keys and values once"
            )
        self.seen.append(layer_id)
        eager = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
        if eager is None:
            raise DifferentError(
                f"the module of {type(module).__name__} has no eager attention to compare with"
            )
        theirs, weights = eager(module, query, key, value, mask, **options)
        if reason := self._reason(query, key, value, theirs, options):
            self.reasons.append(f"layer {layer_id} {reason}")
        return theirs, weights

    def _reason(
        self, query: Tensor, key: Tensor, value: Tensor, theirs: Tensor, options: dict[str, Any]
    ) -> str | None:
        """Why our backends cannot replace this attention; compares values if shapes and options give no reason.

        Tensors on the meta device have no values to compare.
        """
        spec = self.spec
        layer_id = self.seen[-1]
        expected = (spec.num_heads, spec.num_kv_heads, spec.head_dim)
        if value.shape[-1] != key.shape[-1]:
            return f"has values of size {value.shape[-1]} and keys of size {key.shape[-1]} (as in latent attention)"
        if (query.shape[1], key.shape[1], key.shape[-1]) != expected:
            found = f"{query.shape[1]} heads, {key.shape[1]} KV heads, head dim {key.shape[-1]}"
            return f"has {found}; config.json says {expected[0]}, {expected[1]}, {expected[2]}"
        cap = options.get("softcap")
        if cap != spec.attention.score_cap:
            return f"caps its scores at {cap} in transformers, at {spec.attention.score_cap} by config.json"
        window, ours = options.get("sliding_window"), spec.window_of(layer_id)
        if window != ours:
            return f"attends to {window or 'all'} tokens in transformers, {ours or 'all'} by config.json"
        if query.is_meta:
            return None
        scaling = options.get("scaling")
        scores = (scaling or spec.score_scale, cap, options.get("s_aux"))
        plain = _plain_attention(query, key, value, ours, *scores)
        difference = float((theirs.float() - plain).abs().max() / theirs.float().abs().max().clamp_min(1e-30))
        self.worst = max(self.worst, difference)
        if difference > _LAYER_TOLERANCE[query.dtype]:
            return (
                f"does not compute plain causal attention: values differ by {difference:.1%} of the largest (as with "
                "position biases, sinks and attention in both directions)"
            )
        return None


def check_forms(causal_lm: Any, spec: ModelSpec, path: str) -> None:
    """Check what the shapes of tensors show: run a model on the meta device, without weights and without memory.

    `transformers_check` finds these faults, and others, when the model is loaded. A model whose code reads values, as
    routers of experts do, is looked at up to that place.

    Raises:
        ConfigError: a layer's attention is not what our backends compute.
    """
    name = model_name(causal_lm, spec, path)
    decoder = checked_decoder(causal_lm, name)
    reasons: list[str] = []
    # A mask of all heads keeps most models from reading values to find one; a few do not take it.
    for mask in (torch.zeros((1, 1, _LENGTH, _LENGTH), dtype=causal_lm.dtype, device="meta"), None):
        layers = Layers(spec)
        reasons = _reasons_of_forms(decoder, layers, mask)
        if reasons or layers.seen:
            break
    if reasons:
        raise refusal(name, reasons)


def _reasons_of_forms(decoder: Any, layers: Layers, mask: Tensor | None) -> list[str]:
    text = torch.zeros((1, _LENGTH), dtype=torch.long, device="meta")
    try:
        with torch.inference_mode():
            decoder(input_ids=text, attention_mask=mask, use_cache=False, engine_check=layers)
    except DifferentError as error:
        return [str(error)]
    except (RuntimeError, ValueError, LookupError, AttributeError, TypeError) as error:
        if isinstance(error, TypeError) and "engine_check" in str(error):
            return [f"{NO_ARGUMENTS} ({error})"]
        return layers.reasons  # the rest needs values
    return layers.all_reasons()


def checked_decoder(causal_lm: Any, name: str) -> Any:
    """The decoder of a model, of which every attention layer calls `Layers.look` of the pass's argument `engine_check`.

    Raises:
        ConfigError: the architecture does not support external attention, or the decoder has the head inside.
    """
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import eager_mask

    decoder = causal_lm.base_model
    if decoder is causal_lm:
        raise refusal(name, ["its decoder and its head cannot be separated"])
    AttentionInterface.register(_CHECK_NAME, _look)
    AttentionMaskInterface.register(_CHECK_NAME, eager_mask)
    with contextlib.suppress(ValueError, KeyError, NotImplementedError):
        decoder.set_attn_implementation(_CHECK_NAME)
    if decoder.config._attn_implementation != _CHECK_NAME:
        raise refusal(
            name, ["its code does not support external attention (transformers' AttentionInterface)"]
        )
    return decoder


def model_name(causal_lm: Any, spec: ModelSpec, path: str) -> str:
    """The name of a model in errors."""
    return f"{path}: {spec.model_type} ({type(causal_lm).__name__})"


def _look(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    engine_check: Layers | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """The attention function of transformers while a model is checked."""
    if engine_check is None:
        raise DifferentError(f"{type(module).__name__} does not get the step's arguments for attention")
    return engine_check.look(module, query, key, value, attention_mask, options)


def _plain_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    window: int | None,
    scaling: float,
    cap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """The attention that a backend promises, in float32.

    q [1, Hq, T, D], k and v [1, H, T, D], sinks [Hq] -> [1, T, Hq, D].
    """
    group, length = q.shape[1] // k.shape[1], q.shape[2]
    k, v = (x.float().repeat_interleave(group, dim=1) for x in (k, v))
    position = torch.arange(length, device=q.device)
    behind = position[:, None] - position
    hidden = (behind < 0) if window is None else (behind < 0) | (behind >= window)
    scores = q.float() @ k.transpose(2, 3) * scaling
    if cap is not None:
        scores = cap * torch.tanh(scores / cap)
    scores = scores.masked_fill(hidden, -torch.inf)
    if sinks is not None:
        column = sinks.float().reshape(1, -1, 1, 1).expand(-1, -1, length, -1)
        scores = torch.cat((scores, column), dim=-1)
    return (scores.softmax(dim=-1)[..., :length] @ v).transpose(1, 2)


def refusal(name: str, reasons: list[str]) -> ConfigError:
    """The error for a model, `name`, with the first of the reasons."""
    more = f" (and {len(reasons) - 1} more)" if len(reasons) > 1 else ""
    return ConfigError(f"{name} cannot be served with model_impl transformers: {reasons[0]}{more}")
