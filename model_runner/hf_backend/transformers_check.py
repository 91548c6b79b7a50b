"""`check_model`: does a model of transformers attend as our backends do? Asked once, when it is loaded.

Configurations do not say it reliably: position biases, sinks, capped scores, windows, latent and bidirectional
attention are spelt differently in every architecture, and what is overlooked makes a model that talks nonsense. So the
model is asked itself. Two short texts of random tokens run through it with its own eager attention, and in each layer
that is compared with the plain causal attention that our backends promise. Then both run through our backend: side by
side in one step, the end of the second in a step of its own. This shows that no layer mixes neighbours in other ways
and that the KV pool holds all that a later step needs. What a model is compared with knows nothing of our positions,
0, 1, 2 and so on: some count from elsewhere. At last the head: its logits are those of the untouched model.

Each layer is compared on its own because a whole model hides differences: with random weights attention adds little.
It costs six forward passes over a few tokens.
"""

# Shapes: T tokens, Hq query heads, H KV heads, D head dim.

from __future__ import annotations

import contextlib
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch
from torch import Tensor

from ...runtime.errors import ConfigError
from ..attention.backend import BatchLayout
from ..attention.torch_native import TorchNativeAttention
from ..memory.io_buffers import InputBuffers
from ..memory.kv_pool import KVPool

if TYPE_CHECKING:
    from ...runtime.model_files.model_spec import ModelSpec
    from ..attention.backend import StepAttention
    from .transformers_model import TransformersModel

_CHECK_NAME: Final = "engine_check"
_LENGTHS: Final = (24, 9)
_FIRST_PART: Final = 5  # tokens of the second text in the first step
_LAYER_TOLERANCE: Final = {torch.float32: 1e-3, torch.bfloat16: 5e-2}
"""Of the largest difference in a layer's attention, relative to its largest number. What is refused differs by more: a
single sink takes 1/25 of the last token's attention and one half of the first's."""
_MODEL_TOLERANCE: Final = {torch.float32: 1e-4, torch.bfloat16: 3e-2}
"""Of the difference in hidden states, relative to their length, for the median token: rounding lets single tokens of a
mixture of experts take another expert."""


@dataclass(frozen=True, slots=True)
class _Step:
    """See `AttentionStep`."""

    kv_pool: KVPool
    out_cache_loc: Tensor
    attention: StepAttention


class _Pool:
    """KV memory for the texts, a page for each, and steps over it."""

    def __init__(self, spec: ModelSpec, dtype: torch.dtype, device: torch.device) -> None:
        page_size = max(_LENGTHS)
        self._kv = KVPool(
            num_layers=spec.num_layers,
            num_pages=len(_LENGTHS),
            page_size=page_size,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            dtype=dtype,
            device=device,
        )
        pages = torch.arange(1, len(_LENGTHS) + 1, device=device).unsqueeze(1)
        self._table = (pages * page_size + torch.arange(page_size, device=device)).to(torch.int32)
        self._backend = TorchNativeAttention(spec, self._kv, self._table, InputBuffers(device))

    def step(self, spans: dict[int, tuple[int, int]]) -> _Step:
        """A step with the tokens start..stop of some texts."""
        starts, stops = np.asarray(list(spans.values())).T
        layout = BatchLayout(np.asarray(list(spans)), starts, stops - starts, len(spans))
        loc = torch.cat([self._table[text, start:stop].long() for text, (start, stop) in spans.items()])
        return _Step(self._kv, loc, self._backend.plan_step(layout))


class _Layers:
    """What was seen of each layer's attention."""

    def __init__(self, spec: ModelSpec) -> None:
        self.spec = spec
        self.reasons: list[str] = []
        self.seen: list[int] = []
        self.worst = 0.0

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
            raise _Different(
                f"an attention layer has the number {layer_id}, of {self.spec.num_layers} layers"
            )
        if layer_id in self.seen:
            raise _Different(
                f"layer {layer_id} attends twice, and there is room for its keys and values once"
            )
        self.seen.append(layer_id)
        eager = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
        if eager is None:
            raise _Different(f"there is no eager attention beside {type(module).__name__} to compare with")
        theirs, weights = eager(module, query, key, value, mask, **options)
        if reason := self._reason(query, key, value, theirs, options):
            self.reasons.append(f"layer {layer_id} {reason}")
        return theirs, weights

    def _reason(
        self, query: Tensor, key: Tensor, value: Tensor, theirs: Tensor, options: dict[str, Any]
    ) -> str | None:
        """Why our backends cannot stand in here; compares the numbers if nothing simpler is to be said."""
        spec = self.spec
        layer_id = self.seen[-1]
        expected = (spec.num_heads, spec.num_kv_heads, spec.head_dim)
        if value.shape[-1] != key.shape[-1]:
            return f"has values of {value.shape[-1]} numbers behind keys of {key.shape[-1]} (as latent attention has)"
        if (query.shape[1], key.shape[1], key.shape[-1]) != expected:
            found = f"{query.shape[1]} heads, {key.shape[1]} KV heads, head dim {key.shape[-1]}"
            return f"has {found}; config.json says {expected[0]}, {expected[1]}, {expected[2]}"
        for name, what in (("softcap", "caps its scores"), ("s_aux", "has attention sinks")):
            if options.get(name) is not None:
                return f"{what} ({name}), which our attention does not"
        window, ours = options.get("sliding_window"), spec.window_of(layer_id)
        if window != ours:
            return f"sees {window or 'all'} tokens in transformers, {ours or 'all'} by config.json"
        scaling = options.get("scaling")
        plain = _plain_attention(query, key, value, scaling or spec.head_dim**-0.5, ours)
        difference = float((theirs.float() - plain).abs().max() / theirs.float().abs().max().clamp_min(1e-30))
        self.worst = max(self.worst, difference)
        if difference > _LAYER_TOLERANCE[query.dtype]:
            return (
                f"does not compute plain causal attention: numbers differ by {difference:.1%} of the largest (position "
                "biases, sinks and attention in both directions do that)"
            )
        return None


class _Different(Exception):
    """Raised inside of a forward pass that cannot go on."""


class ModelCheck:
    """The answers of a model with its own attention, to compare with."""

    def __init__(
        self,
        name: str,
        spec: ModelSpec,
        texts: list[Tensor],
        hidden: list[Tensor],
        logits: Tensor,
        worst: float,
    ) -> None:
        """`hidden`: of each text; `logits`: of the second, by the whole model before it was taken apart."""
        self._name = name
        self._spec = spec
        self._texts = texts
        self._hidden = hidden
        self._logits = logits
        self._worst = worst

    @torch.inference_mode()
    def compare(self, model: TransformersModel) -> float:
        """Run both texts through our backend; returns the largest relative difference that any comparison found.

        Raises:
            ConfigError: the hidden states or the logits are not those of the model alone.
        """
        device, dtype = self._hidden[0].device, self._hidden[0].dtype
        first, second = self._texts
        try:
            found = self._in_two_steps(model, first, second, _Pool(self._spec, dtype, device))
        except ValueError as error:
            raise self._error(f"it brings {error}") from error
        difference = _median_difference(found, self._hidden[1])
        if not difference <= _MODEL_TOLERANCE[dtype]:
            raise self._error(
                f"a text beside another and in two steps gives other hidden states (by {difference:.1%}): its layers "
                "use tokens before the current one in other ways than attention, or ignore positions"
            )
        try:
            logits = model.logits(self._hidden[1])  # the same hidden states: nothing but the head is compared
        except (AttributeError, TypeError, LookupError, RuntimeError, ValueError) as error:
            raise self._error(f"its head does not run without its decoder ({error})") from error
        if logits.shape[-1] != self._spec.vocab_size:
            raise self._error(f"it has {logits.shape[-1]} logits, but vocab_size is {self._spec.vocab_size}")
        of_head = _median_difference(logits, self._logits)
        if not of_head <= _MODEL_TOLERANCE[dtype]:
            raise self._error(
                f"its head needs more than the last hidden states: alone it gives other logits (by {of_head:.1%})"
            )
        return max(self._worst, difference, of_head)

    @staticmethod
    def _in_two_steps(model: TransformersModel, first: Tensor, second: Tensor, pool: _Pool) -> Tensor:
        """Hidden states of the second text: its beginning beside the first one, the rest in a step of its own."""
        split, device = _FIRST_PART, first.device
        hidden = model.hidden_states(
            torch.cat([first, second[:split]]),
            torch.cat([torch.arange(len(first)), torch.arange(split)]).to(device),
            pool.step({0: (0, len(first)), 1: (0, split)}),
        )
        later = model.hidden_states(
            second[split:],
            torch.arange(split, len(second), device=device),
            pool.step({1: (split, len(second))}),
        )
        return torch.cat([hidden[len(first) :], later])

    def _error(self, reason: str) -> ConfigError:
        return _error(self._name, [reason])


@torch.inference_mode()
def check_model(causal_lm: Any, spec: ModelSpec, path: str) -> ModelCheck:
    """Compare the attention of every layer; call before the model is taken apart.

    Raises:
        ConfigError: the architecture does not let others attend, or attends otherwise.
    """
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import eager_mask

    name = f"{path}: {spec.model_type} ({type(causal_lm).__name__})"
    decoder = causal_lm.base_model
    if decoder is causal_lm:
        raise _error(name, ["its decoder and its head cannot be told apart"])
    AttentionInterface.register(_CHECK_NAME, _look)
    AttentionMaskInterface.register(_CHECK_NAME, eager_mask)
    with contextlib.suppress(ValueError, KeyError, NotImplementedError):
        decoder.set_attn_implementation(_CHECK_NAME)
    if decoder.config._attn_implementation != _CHECK_NAME:
        raise _error(
            name, ["its code does not let others compute attention (transformers' AttentionInterface)"]
        )
    device = next(causal_lm.parameters()).device
    generator = torch.Generator().manual_seed(0)
    texts = [torch.randint(spec.vocab_size, (length,), generator=generator).to(device) for length in _LENGTHS]
    hidden, worst = [], 0.0
    for text in texts:
        layers = _Layers(spec)
        hidden.append(_hidden_states(decoder, text, layers, name))
        if missing := sorted(set(range(spec.num_layers)) - set(layers.seen)):
            layers.reasons.append(
                f"layer {missing[0]} has no attention that others can compute ({len(missing)} of {spec.num_layers} "
                "layers have none)"
            )
        if layers.reasons:
            raise _error(name, layers.reasons)
        worst = max(worst, layers.worst)
    positions = torch.arange(len(texts[1]), device=device)
    placed = _hidden_states(decoder, texts[1], _Layers(spec), name, position_ids=positions.unsqueeze(0))
    if not (difference := _median_difference(placed, hidden[1])) <= _MODEL_TOLERANCE[placed.dtype]:
        raise _error(
            name, [f"it does not count positions 0, 1, 2 and so on: hidden states differ by {difference:.1%}"]
        )
    decoder.set_attn_implementation("eager")
    logits = causal_lm(input_ids=texts[1].unsqueeze(0), use_cache=False).logits[0]
    return ModelCheck(name, spec, texts, hidden, logits, worst)


def _median_difference(found: Tensor, expected: Tensor) -> float:
    """Between rows [T, n], relative to the expected row's length."""
    expected = expected.float()
    differences = (found.float() - expected).norm(dim=-1) / expected.norm(dim=-1).clamp_min(1e-30)
    return float(differences.median())


def _hidden_states(decoder: Any, text: Tensor, layers: _Layers, name: str, **positions: Tensor) -> Tensor:
    """`positions`: `position_ids`, or nothing for the model's own."""
    try:
        out = decoder(input_ids=text.unsqueeze(0), use_cache=False, engine_check=layers, **positions)
    except _Different as error:
        raise _error(name, [str(error)]) from error
    except TypeError as error:
        raise _error(name, [f"its code does not hand arguments on to attention ({error})"]) from error
    except RuntimeError as error:
        raise _error(name, [f"it cannot run at all ({error})"]) from error
    hidden: Tensor = out.last_hidden_state[0]
    return hidden


def _look(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    engine_check: _Layers | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """Transformers' attention function while a model is looked at."""
    if engine_check is None:
        raise _Different(f"{type(module).__name__} is not handed what the step brings for attention")
    return engine_check.look(module, query, key, value, attention_mask, options)


def _plain_attention(q: Tensor, k: Tensor, v: Tensor, scaling: float, window: int | None) -> Tensor:
    """What a backend promises, in float32, for one text: q [1, Hq, T, D], k and v [1, H, T, D] -> [1, T, Hq, D]."""
    group, length = q.shape[1] // k.shape[1], q.shape[2]
    k, v = (x.float().repeat_interleave(group, dim=1) for x in (k, v))
    position = torch.arange(length, device=q.device)
    behind = position[:, None] - position
    hidden = (behind < 0) if window is None else (behind < 0) | (behind >= window)
    scores = (q.float() @ k.transpose(2, 3) * scaling).masked_fill(hidden, -torch.inf)
    return (scores.softmax(dim=-1) @ v).transpose(1, 2)


def _error(name: str, reasons: list[str]) -> ConfigError:
    more = f" (and {len(reasons) - 1} more)" if len(reasons) > 1 else ""
    return ConfigError(f"{name} cannot be served with model_impl transformers: {reasons[0]}{more}")
