"""`check_model`: tests when a transformers model is loaded whether its attention is the one that our backends compute.

Configurations do not say this reliably: every architecture names position biases, sinks, capped scores, windows, latent
and bidirectional attention differently, and an overlooked feature makes the output wrong. So the model itself is run:

1. Two short texts of random tokens run through it with its own eager attention. In each layer the result is compared
   with the plain causal attention that our backends promise.
2. Both texts run through our backend: together in one step, with the end of the second in a step of its own. This
   shows that no layer mixes tokens in other ways than attention, and that the KV pool holds all that a later step
   needs. The reference run does not get our positions 0, 1, 2 and so on, because some models count from another number.
3. The logits of the head alone are compared with those of the unmodified model.

Each layer is compared separately, because with random weights attention changes the output of a whole model little.
The check costs six forward passes over a few tokens.
"""

# Shapes: T tokens, Hq query heads, H KV heads, D head dim.

from __future__ import annotations

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
from .layer_check import NO_ARGUMENTS, DifferentError, Layers, checked_decoder, model_name, refusal

if TYPE_CHECKING:
    from ...models.spec.model_spec import ModelSpec
    from ..attention.backend import StepAttention
    from .transformers_model import TransformersModel

_LENGTHS: Final = (24, 9)
_FIRST_PART: Final = 5  # tokens of the second text in the first step
_MODEL_TOLERANCE: Final = {torch.float32: 1e-4, torch.bfloat16: 3e-2}
"""Difference in hidden states, relative to their norm, of the median token: in a mixture of experts rounding can send
single tokens to another expert."""


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
        """A step with the tokens start..stop-1 of some texts."""
        starts, stops = np.asarray(list(spans.values())).T
        layout = BatchLayout(np.asarray(list(spans)), starts, stops - starts, len(spans))
        loc = torch.cat([self._table[text, start:stop].long() for text, (start, stop) in spans.items()])
        return _Step(self._kv, loc, self._backend.plan_step(layout))


class ModelCheck:
    """The reference results of a model with its own attention."""

    def __init__(
        self,
        name: str,
        spec: ModelSpec,
        texts: list[Tensor],
        hidden: list[Tensor],
        logits: Tensor,
        worst: float,
    ) -> None:
        """Take the results of the whole, unmodified model: `hidden` of each text, `logits` of the second text."""
        self._name = name
        self._spec = spec
        self._texts = texts
        self._hidden = hidden
        self._logits = logits
        self._worst = worst

    @torch.inference_mode()
    def compare(self, model: TransformersModel) -> float:
        """Run both texts through our backend; returns the largest relative difference of all comparisons.

        Raises:
            ConfigError: the hidden states or the logits differ from those of the unmodified model.
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
                f"a text computed with another one and in two steps gives other hidden states (by {difference:.1%}): "
                "its layers use tokens before the current one in other ways than attention, or ignore positions"
            )
        try:
            logits = model.logits(
                self._hidden[1]
            )  # the reference hidden states, so only the head is compared
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
        """Hidden states of the second text: its beginning in a step with the first text, the rest in another step."""
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
        return refusal(self._name, [reason])


@torch.inference_mode()
def check_model(causal_lm: Any, spec: ModelSpec, path: str) -> ModelCheck:
    """Compare the attention of every layer; call before `TransformersModel` modifies the model.

    Raises:
        ConfigError: the architecture does not support external attention, or has another kind of attention.
    """
    name = model_name(causal_lm, spec, path)
    decoder = checked_decoder(causal_lm, name)
    device = next(causal_lm.parameters()).device
    generator = torch.Generator().manual_seed(0)
    texts = [torch.randint(spec.vocab_size, (length,), generator=generator).to(device) for length in _LENGTHS]
    hidden, worst = [], 0.0
    for text in texts:
        layers = Layers(spec)
        hidden.append(_hidden_states(decoder, text, layers, name))
        if reasons := layers.all_reasons():
            raise refusal(name, reasons)
        worst = max(worst, layers.worst)
    positions = torch.arange(len(texts[1]), device=device)
    placed = _hidden_states(decoder, texts[1], Layers(spec), name, position_ids=positions.unsqueeze(0))
    if not (difference := _median_difference(placed, hidden[1])) <= _MODEL_TOLERANCE[placed.dtype]:
        raise refusal(
            name, [f"it does not count positions 0, 1, 2 and so on: hidden states differ by {difference:.1%}"]
        )
    decoder.set_attn_implementation("eager")
    logits = causal_lm(input_ids=texts[1].unsqueeze(0), use_cache=False).logits[0]
    return ModelCheck(name, spec, texts, hidden, logits, worst)


def _median_difference(found: Tensor, expected: Tensor) -> float:
    """Median difference between rows [T, n], relative to the norm of the expected row."""
    expected = expected.float()
    differences = (found.float() - expected).norm(dim=-1) / expected.norm(dim=-1).clamp_min(1e-30)
    return float(differences.median())


def _hidden_states(decoder: Any, text: Tensor, layers: Layers, name: str, **positions: Tensor) -> Tensor:
    """Hidden states of a text; `positions`: `position_ids`, or nothing for the model's own positions."""
    try:
        out = decoder(input_ids=text.unsqueeze(0), use_cache=False, engine_check=layers, **positions)
    except DifferentError as error:
        raise refusal(name, [str(error)]) from error
    except TypeError as error:
        raise refusal(name, [f"{NO_ARGUMENTS} ({error})"]) from error
    except RuntimeError as error:
        raise refusal(name, [f"it cannot run at all ({error})"]) from error
    hidden: Tensor = out.last_hidden_state[0]
    return hidden
