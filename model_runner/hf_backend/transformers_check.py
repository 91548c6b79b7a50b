"""`ModelCheck`: tests whether a transformers model's attention is the one that our backends compute.

Configurations name position biases, sinks, windows, latent and bidirectional attention in many ways, and an overlooked
feature makes the output wrong. So the model itself is run on two short texts of random tokens: with its own attention,
of which each layer's result is compared with our backend's, because with random weights attention changes the output
of a whole model little; and with our backend, where layers that mix tokens in other ways give other hidden states.
"""

# Shapes: T tokens, Hq query heads, H KV heads, D head dim.

from __future__ import annotations

import contextlib
import sys
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
_NO_ARGUMENTS: Final = "its code does not pass arguments on to attention ({})"
_LENGTHS: Final = (24, 9)
_FIRST_PART: Final = 5  # tokens of the second text in the first step
_LAYER_TOLERANCE: Final = {torch.float32: 1e-3, torch.bfloat16: 5e-2}
"""Largest difference in a layer's attention, relative to its largest value. A single sink takes 1/25 of the last
token's attention and one half of the first token's."""
_MODEL_TOLERANCE: Final = {torch.float32: 1e-4, torch.bfloat16: 3e-2}
"""Difference in hidden states, relative to their norm, of the median token: in a mixture of experts rounding can send
single tokens to another expert."""


class ModelCheck:
    """A check of one model, before `TransformersModel` modifies it.

    Attributes:
        worst: the largest relative difference so far.
    """

    def __init__(self, causal_lm: Any, spec: ModelSpec, path: str) -> None:
        """Register a pass's `attend` as the attention of the model's layers.

        Raises:
            ConfigError: the architecture does not support external attention, or the decoder has the head inside.
        """
        from transformers import AttentionInterface, AttentionMaskInterface
        from transformers.masking_utils import eager_mask

        self._causal_lm, self._decoder, self._dtype = causal_lm, causal_lm.base_model, causal_lm.dtype
        self._name = f"{path}: {spec.model_type} ({type(causal_lm).__name__})"
        self._spec, self._seen = spec, set[int]()
        self._step: ForwardBatch | None = None
        self.worst = 0.0
        if self._decoder is causal_lm:
            raise self._refusal("its decoder and its head cannot be separated")
        AttentionInterface.register(_CHECK_NAME, _attend_checked)
        AttentionMaskInterface.register(_CHECK_NAME, eager_mask)
        with contextlib.suppress(ValueError, KeyError, NotImplementedError):
            self._decoder.set_attn_implementation(_CHECK_NAME)
        if self._decoder.config._attn_implementation != _CHECK_NAME:
            raise self._refusal(
                "its code does not support external attention (transformers' AttentionInterface)"
            )

    def check_forms(self) -> None:
        """Check what the shapes of tensors show, for `engine doctor`: run a model on the meta device, without weights.

        A model whose code reads values, as routers of experts do, is checked up to that place.

        Raises:
            ConfigError: a layer's attention is not what our backends compute.
        """
        length = _LENGTHS[0]
        text = torch.zeros(length, dtype=torch.long, device="meta")
        # A mask of all heads keeps most models from reading values to find one; a few do not take it.
        for mask in (torch.zeros((1, 1, length, length), dtype=self._dtype, device="meta"), None):
            try:
                self._run(text, attention_mask=mask)
            except (RuntimeError, ValueError, LookupError, AttributeError, TypeError) as error:
                if isinstance(error, TypeError) and _CHECK_NAME in str(error):
                    raise self._refusal(_NO_ARGUMENTS.format(error)) from error
            else:  # else the rest needs values
                self._require_all()
            if self._seen:
                return

    @torch.inference_mode()
    def check_layers(self) -> None:
        """Compare the attention of every layer.

        Raises:
            ConfigError: a layer has another kind of attention than ours.
        """
        spec, device = self._spec, next(self._causal_lm.parameters()).device
        shape = len(_LENGTHS), max(_LENGTHS)
        texts = torch.randint(spec.vocab_size, shape, generator=torch.Generator().manual_seed(0)).to(device)
        self._texts = [text[:length] for text, length in zip(texts, _LENGTHS, strict=True)]
        self._kv = KVPool(
            num_layers=spec.num_layers,
            num_pages=shape[0],
            page_size=shape[1],
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            dtype=self._dtype,
            device=device,
        )
        # A page for each text, after the dummy page.
        self._slots = torch.arange(texts.numel(), device=device).view(shape) + shape[1]
        self._backend = TorchNativeAttention(spec, self._kv, self._slots.int(), InputBuffers(device))
        try:
            for number, text in enumerate(self._texts):
                self._hidden = self._run(text, self._make_step((number, 0, len(text))))
                self._require_all()
            # The passes above have the model's own positions: some models count from another number.
            placed = self._run(text, position_ids=torch.arange(len(text), device=device).unsqueeze(0))
        except TypeError as error:
            raise self._refusal(_NO_ARGUMENTS.format(error)) from error
        except RuntimeError as error:
            raise self._refusal(f"it cannot run at all ({error})") from error
        counting = "it does not count positions 0, 1, 2 and so on: hidden states differ by {:.1%}"
        self._compare(placed, self._hidden, counting)
        self._decoder.set_attn_implementation("eager")
        self._logits = self._causal_lm(input_ids=text.unsqueeze(0), use_cache=False).logits[0]

    @torch.inference_mode()
    def compare(self, model: TransformersModel) -> None:
        """Run the texts of `check_layers` through our backend.

        Raises:
            ConfigError: the hidden states or the logits differ from those of the unmodified model.
        """
        first, second = _LENGTHS
        try:
            begun = model.forward(self._make_step((0, 0, first), (1, 0, _FIRST_PART)))[first:]
            rest = model.forward(self._make_step((1, _FIRST_PART, second)))
        except ValueError as error:
            raise self._refusal(f"it brings {error}") from error
        mixing = (
            "a text computed with another one and in two steps gives other hidden states (by {:.1%}): its layers use "
            "tokens before the current one in other ways than attention, or ignore positions"
        )
        self._compare(torch.cat([begun, rest]), self._hidden, mixing)
        try:  # the reference hidden states, so only the head is compared
            logits = model.logits(self._hidden)
        except (AttributeError, TypeError, LookupError, RuntimeError, ValueError) as error:
            raise self._refusal(f"its head does not run without its decoder ({error})") from error
        if (found := logits.shape[-1]) != self._spec.vocab_size:
            raise self._refusal(f"it has {found} logits, but vocab_size is {self._spec.vocab_size}")
        head = "its head needs more than the last hidden states: alone it gives other logits (by {:.1%})"
        self._compare(logits, self._logits, head)

    def _make_step(self, *spans: tuple[int, int, int]) -> ForwardBatch:
        """A step with tokens of some texts; spans: (text, start, stop)."""
        rows, starts, stops = np.asarray(spans).T
        return ForwardBatch(
            input_ids=torch.cat([self._texts[text][start:stop] for text, start, stop in spans]),
            positions=torch.cat([torch.arange(*span, device=self._slots.device) for _, *span in spans]),
            kv_pool=self._kv,
            out_cache_loc=torch.cat([self._slots[text, start:stop] for text, start, stop in spans]),
            attention=self._backend.plan_step(BatchLayout(rows, starts, stops - starts, len(spans))),
        )

    @torch.inference_mode()
    def _run(self, text: Tensor, step: ForwardBatch | None = None, **inputs: Tensor | None) -> Tensor:
        """Hidden states of a text, [T] -> [T, n], with `attend` in each layer. `inputs`: of the decoder."""
        self._step = step
        self._seen.clear()
        out = self._decoder(input_ids=text.unsqueeze(0), use_cache=False, engine_check=self, **inputs)
        hidden: Tensor = out.last_hidden_state[0]
        return hidden

    def attend(
        self, module: Any, q: Tensor, k: Tensor, v: Tensor, attention_mask: Tensor | None, **options: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Compute a layer's attention with transformers' own function; compare its form, and in a step its result."""
        layer_id, num_layers = getattr(module, "layer_idx", None), self._spec.num_layers
        if not isinstance(layer_id, int) or not 0 <= layer_id < num_layers:
            raise self._refusal(f"an attention layer has the number {layer_id}, of {num_layers} layers")
        layer = f"layer {layer_id}"
        if layer_id in self._seen:
            raise self._refusal(f"{layer} attends twice, but the KV pool holds its keys and values once")
        self._seen.add(layer_id)
        eager = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
        if eager is None:
            name = type(module).__name__
            raise self._refusal(f"the module of {name} has no eager attention to compare with")
        theirs, weights = eager(module, q, k, v, attention_mask, **options)
        if reason := self._reason_of_form(layer_id, q, k, v, options):
            raise self._refusal(f"{layer} {reason}")
        if self._step is not None:
            ours, _ = attend(module, q, k, v, None, engine_step=self._step, **options)
            difference = float((theirs - ours).abs().max() / theirs.abs().max().clamp_min(1e-30))
            self.worst = max(self.worst, difference)
            if difference > _LAYER_TOLERANCE[q.dtype]:
                raise self._refusal(
                    f"{layer} does not compute plain causal attention: values differ by {difference:.1%} of "
                    "the largest (as with position biases, sinks and attention in both directions)"
                )
        return theirs, weights

    def _reason_of_form(
        self, layer_id: int, q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]
    ) -> str | None:
        spec, size = self._spec, k.shape[-1]
        if size != v.shape[-1]:
            return f"has values of size {v.shape[-1]} and keys of size {size} (as in latent attention)"
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

    def _require_all(self) -> None:
        """Refuse a model whose pass did not reach the attention of all layers."""
        num_layers = self._spec.num_layers
        if missing := sorted({*range(num_layers)} - self._seen):
            count = f"{len(missing)} of {num_layers} layers do not"
            raise self._refusal(f"layer {missing[0]} does not call the attention interface ({count})")

    def _compare(self, found: Tensor, expected: Tensor, reason: str) -> None:
        """Refuse the model if rows [T, n] differ by more than rounding, relative to the norm of the expected row."""
        expected = expected.float()
        differences = (found.float() - expected).norm(dim=-1) / expected.norm(dim=-1).clamp_min(1e-30)
        median = float(differences.median())
        if not median <= _MODEL_TOLERANCE[self._dtype]:
            raise self._refusal(reason.format(median))
        self.worst = max(self.worst, median)

    def _refusal(self, reason: str) -> ConfigError:
        return ConfigError(f"{self._name} cannot be served with model_impl transformers: {reason}")


def _attend_checked(
    module: Any, *args: Any, engine_check: ModelCheck | None = None, **options: Any
) -> tuple[Tensor, Tensor | None]:
    if engine_check is None:
        raise TypeError(f"{type(module).__name__} does not get the step's arguments, {_CHECK_NAME}")
    return engine_check.attend(module, *args, **options)
