"""`ModelCheck`: tests at load whether a transformers model's attention is the one that our backends compute.

Configurations do not say this reliably: every architecture names position biases, sinks, capped scores, windows, latent
and bidirectional attention differently, and an overlooked feature makes the output wrong. So the model itself is run:

1. Two short texts of random tokens, with its own eager attention. In each layer the result is compared with that of our
   backend, because with random weights attention changes the output of a whole model little.
2. Both texts through our backend: together in one step, with the end of the second in a step of its own. This shows
   that no layer mixes tokens in other ways, and that the KV pool holds all that a later step needs.
3. The logits of the head alone are compared with those of the unmodified model.
"""

# Shapes: T tokens, Hq query heads, H KV heads, D head dim.

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch
from torch import Tensor

from ...runtime.errors import ConfigError
from ..attention.backend import BatchLayout
from ..attention.torch_native import TorchNativeAttention
from ..forward_batch import ForwardBatch
from ..memory.io_buffers import InputBuffers
from ..memory.kv_pool import KVPool
from .transformers_model import TransformersModel, attend

if TYPE_CHECKING:
    from ...models.spec.model_spec import ModelSpec

_CHECK_NAME: Final = "engine_check"
_LENGTHS: Final = (24, 9)
_FIRST_PART: Final = 5  # tokens of the second text in the first step
_LAYER_TOLERANCE: Final = {torch.float32: 1e-3, torch.bfloat16: 5e-2}
"""Largest difference in a layer's attention, relative to its largest value. A single sink takes 1/25 of the last
token's attention and one half of the first token's."""
_MODEL_TOLERANCE: Final = {torch.float32: 1e-4, torch.bfloat16: 3e-2}
"""Difference in hidden states, relative to their norm, of the median token: in a mixture of experts rounding can send
single tokens to another expert."""
_NO_ARGUMENTS: Final = "its code does not pass arguments on to attention ({})"
_OTHER_ATTENTION: Final = (
    "does not compute plain causal attention: values differ by {:.1%} of the largest (as with position biases, sinks "
    "and attention in both directions)"
)
_OTHER_STATES: Final = (
    "a text computed with another one and in two steps gives other hidden states (by {:.1%}): its layers use tokens "
    "before the current one in other ways than attention, or ignore positions"
)
_OTHER_LOGITS: Final = (
    "its head needs more than the last hidden states: alone it gives other logits (by {:.1%})"
)


class ModelCheck:
    """Results of an unmodified model with its own attention.

    Attributes:
        worst: the largest relative difference so far.
    """

    @torch.inference_mode()
    def __init__(self, causal_lm: Any, spec: ModelSpec, path: str) -> None:
        """Compare the attention of every layer; call before `TransformersModel` modifies the model.

        Raises:
            ConfigError: the architecture does not support external attention, or has another kind of attention.
        """
        self._refusal = _refusal_of(causal_lm, spec, path)
        self._spec, self._dtype, self.worst = spec, causal_lm.dtype, 0.0
        decoder = _checked_decoder(causal_lm, self._refusal)
        self._device = next(causal_lm.parameters()).device
        generator = torch.Generator().manual_seed(0)
        texts = [torch.randint(spec.vocab_size, (length,), generator=generator) for length in _LENGTHS]
        self._texts = [text.to(self._device) for text in texts]
        for text in self._texts:
            layers = _Layers(spec, self._refusal, self._steps([text]).step({0: (0, len(text))}))
            self._hidden = self._run(decoder, text, layers)
            layers.require_all()
            self.worst = max(self.worst, layers.worst)
        # The passes above have the model's own positions: some models count from another number.
        positions = torch.arange(len(text), device=self._device).unsqueeze(0)
        placed = self._run(decoder, text, _Layers(spec, self._refusal), position_ids=positions)
        counting = "it does not count positions 0, 1, 2 and so on: hidden states differ by {:.1%}"
        self._compare(placed, self._hidden, counting)
        decoder.set_attn_implementation("eager")
        self._logits = causal_lm(input_ids=text.unsqueeze(0), use_cache=False).logits[0]

    @torch.inference_mode()
    def compare(self, model: TransformersModel) -> None:
        """Run both texts through our backend.

        Raises:
            ConfigError: the hidden states or the logits differ from those of the unmodified model.
        """
        first, second = map(len, self._texts)
        steps = self._steps(self._texts)
        try:
            begun = model.forward(steps.step({0: (0, first), 1: (0, _FIRST_PART)}))[first:]
            rest = model.forward(steps.step({1: (_FIRST_PART, second)}))
        except ValueError as error:
            raise self._refusal(f"it brings {error}") from error
        self._compare(torch.cat([begun, rest]), self._hidden, _OTHER_STATES)
        try:  # the reference hidden states, so only the head is compared
            logits = model.logits(self._hidden)
        except (AttributeError, TypeError, LookupError, RuntimeError, ValueError) as error:
            raise self._refusal(f"its head does not run without its decoder ({error})") from error
        if (found := logits.shape[-1]) != self._spec.vocab_size:
            raise self._refusal(f"it has {found} logits, but vocab_size is {self._spec.vocab_size}")
        self._compare(logits, self._logits, _OTHER_LOGITS)

    def _steps(self, texts: list[Tensor]) -> _Steps:
        return _Steps(self._spec, self._dtype, self._device, texts)

    def _run(self, decoder: Any, text: Tensor, layers: _Layers, **positions: Tensor) -> Tensor:
        """Hidden states of a text; `positions`: `position_ids`, or nothing for the model's own positions."""
        try:
            out = decoder(input_ids=text.unsqueeze(0), use_cache=False, engine_check=layers, **positions)
        except TypeError as error:
            raise self._refusal(_NO_ARGUMENTS.format(error)) from error
        except RuntimeError as error:
            raise self._refusal(f"it cannot run at all ({error})") from error
        hidden: Tensor = out.last_hidden_state[0]
        return hidden

    def _compare(self, found: Tensor, expected: Tensor, reason: str) -> None:
        """Refuse the model if rows [T, n] differ by more than rounding, relative to the norm of the expected row."""
        expected = expected.float()
        differences = (found.float() - expected).norm(dim=-1) / expected.norm(dim=-1).clamp_min(1e-30)
        median = float(differences.median())
        if not median <= _MODEL_TOLERANCE[self._dtype]:
            raise self._refusal(reason.format(median))
        self.worst = max(self.worst, median)


class _Steps:
    """Makes steps for texts, over a KV pool with a page for each."""

    def __init__(
        self, spec: ModelSpec, dtype: torch.dtype, device: torch.device, texts: list[Tensor]
    ) -> None:
        self._texts, page_size = texts, max(_LENGTHS)
        self._kv = KVPool(
            num_layers=spec.num_layers,
            num_pages=len(texts),
            page_size=page_size,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            dtype=dtype,
            device=device,
        )
        first = torch.arange(1, len(texts) + 1, device=device).unsqueeze(1) * page_size
        self._table = (first + torch.arange(page_size, device=device)).to(torch.int32)
        self._backend = TorchNativeAttention(spec, self._kv, self._table, InputBuffers(device))

    def step(self, spans: dict[int, tuple[int, int]]) -> ForwardBatch:
        """A step with the tokens start..stop-1 of some texts."""
        starts, stops = np.asarray(list(spans.values())).T
        layout = BatchLayout(np.asarray(list(spans)), starts, stops - starts, len(spans))
        parts = [(number, slice(*span)) for number, span in spans.items()]
        positions = [torch.arange(*span, device=self._table.device) for span in spans.values()]
        return ForwardBatch(
            input_ids=torch.cat([self._texts[number][part] for number, part in parts]),
            positions=torch.cat(positions),
            kv_pool=self._kv,
            out_cache_loc=torch.cat([self._table[number, part].long() for number, part in parts]),
            attention=self._backend.plan_step(layout),
        )


class _Layers:
    """Compares each layer's attention in one forward pass with ours, of `step`; None: only shapes and options."""

    def __init__(
        self, spec: ModelSpec, refusal: Callable[[str], ConfigError], step: ForwardBatch | None = None
    ) -> None:
        self._spec, self._refusal, self._step = spec, refusal, step
        self.seen: list[int] = []
        self.worst = 0.0

    def require_all(self) -> None:
        """Refuse a model whose pass did not reach the attention of all layers."""
        num_layers = self._spec.num_layers
        if missing := sorted(set(range(num_layers)) - set(self.seen)):
            count = f"{len(missing)} of {num_layers} layers do not"
            raise self._refusal(f"layer {missing[0]} does not call the attention interface ({count})")

    def attend(
        self, module: Any, q: Tensor, k: Tensor, v: Tensor, attention_mask: Tensor | None, **options: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Compute a layer's attention with transformers' own function and compare it with ours."""
        layer_id, num_layers = getattr(module, "layer_idx", None), self._spec.num_layers
        if not isinstance(layer_id, int) or not 0 <= layer_id < num_layers:
            raise self._refusal(f"an attention layer has the number {layer_id}, of {num_layers} layers")
        if layer_id in self.seen:
            twice = "attends twice, but the KV pool holds its keys and values once"
            raise self._refusal(f"layer {layer_id} {twice}")
        self.seen.append(layer_id)
        eager = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
        if eager is None:
            name = type(module).__name__
            raise self._refusal(f"the module of {name} has no eager attention to compare with")
        theirs, weights = eager(module, q, k, v, attention_mask, **options)
        reason = self._reason_of_form(layer_id, q, k, v, options)
        if reason is None and self._step is not None:
            ours, _ = attend(module, q, k, v, None, engine_step=self._step, **options)
            difference = float((theirs - ours).abs().max() / theirs.abs().max().clamp_min(1e-30))
            self.worst = max(self.worst, difference)
            if difference > _LAYER_TOLERANCE[q.dtype]:
                reason = _OTHER_ATTENTION.format(difference)
        if reason is not None:
            raise self._refusal(f"layer {layer_id} {reason}")
        return theirs, weights

    def _reason_of_form(
        self, layer_id: int, q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]
    ) -> str | None:
        spec, size, of_values = self._spec, k.shape[-1], v.shape[-1]
        if size != of_values:
            return f"has values of size {of_values} and keys of size {size} (as in latent attention)"
        found, expected = (q.shape[1], k.shape[1], size), (spec.num_heads, spec.num_kv_heads, spec.head_dim)
        if found != expected:
            text = "{} heads, {} KV heads, head dim {}".format(*found)
            return f"has {text}; config.json says {', '.join(map(str, expected))}"
        if (cap := options.get("softcap")) != spec.attention.score_cap:
            return f"caps its scores at {cap} in transformers, at {spec.attention.score_cap} by config.json"
        window, ours = options.get("sliding_window"), spec.window_of(layer_id)
        if window != ours:
            return f"attends to {window or 'all'} tokens in transformers, {ours or 'all'} by config.json"
        return None


def check_forms(causal_lm: Any, spec: ModelSpec, path: str) -> None:
    """Check what the shapes of tensors show, for `engine doctor`: run a model on the meta device, without weights.

    `ModelCheck` finds these faults, and others, when the model is loaded. A model whose code reads values, as routers
    of experts do, is checked up to that place.

    Raises:
        ConfigError: a layer's attention is not what our backends compute.
    """
    refusal, length = _refusal_of(causal_lm, spec, path), _LENGTHS[0]
    decoder = _checked_decoder(causal_lm, refusal)
    text = torch.zeros((1, length), dtype=torch.long, device="meta")
    # A mask of all heads keeps most models from reading values to find one; a few do not take it.
    for mask in (torch.zeros((1, 1, length, length), dtype=causal_lm.dtype, device="meta"), None):
        layers = _Layers(spec, refusal)
        try:
            with torch.inference_mode():
                decoder(input_ids=text, attention_mask=mask, use_cache=False, engine_check=layers)
        except (RuntimeError, ValueError, LookupError, AttributeError, TypeError) as error:
            if isinstance(error, TypeError) and _CHECK_NAME in str(error):
                raise refusal(_NO_ARGUMENTS.format(error)) from error
        else:  # else the rest needs values
            layers.require_all()
        if layers.seen:
            return


def _checked_decoder(causal_lm: Any, refusal: Callable[[str], ConfigError]) -> Any:
    """The decoder, whose attention layers call `_Layers.attend` of the pass's argument `engine_check`.

    Raises:
        ConfigError: the architecture does not support external attention, or the decoder has the head inside.
    """
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import eager_mask

    decoder = causal_lm.base_model
    if decoder is causal_lm:
        raise refusal("its decoder and its head cannot be separated")

    def attend_checked(
        module: Any, *tensors: Any, engine_check: _Layers | None = None, **options: Any
    ) -> tuple[Tensor, Tensor | None]:
        if engine_check is None:
            raise refusal(f"{type(module).__name__} does not get the step's arguments for attention")
        return engine_check.attend(module, *tensors, **options)

    AttentionInterface.register(_CHECK_NAME, attend_checked)
    AttentionMaskInterface.register(_CHECK_NAME, eager_mask)
    with contextlib.suppress(ValueError, KeyError, NotImplementedError):
        decoder.set_attn_implementation(_CHECK_NAME)
    if decoder.config._attn_implementation != _CHECK_NAME:
        raise refusal("its code does not support external attention (transformers' AttentionInterface)")
    return decoder


def _refusal_of(causal_lm: Any, spec: ModelSpec, path: str) -> Callable[[str], ConfigError]:
    """Makes the error for this model from a reason."""
    name = f"{path}: {spec.model_type} ({type(causal_lm).__name__})"
    return lambda reason: ConfigError(f"{name} cannot be served with model_impl transformers: {reason}")
