"""`TransformersModel`: any decoder of transformers with our KV pool and attention, for `--model-impl transformers`.

The fallback for architectures without a structure of ours: transformers' code computes everything except attention,
which is replaced through its `AttentionInterface` by `attend`. A step is one sequence of all its tokens with their
positions, so chunks, prefixes and mixed steps work as with our own models. On CPUs linear layers, embeddings and norms
are our kernels (`swap`). Steps are not recorded.
"""

# Shapes: T new tokens in the batch, Hq query heads, H KV heads, D head dim, n rows that need logits.

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor, nn

from ..kernels.plain import store_kv

if TYPE_CHECKING:
    from ..adapter_runs import AdapterRuns
    from ..forward_batch import ForwardBatch

ATTENTION_NAME: Final = "engine"  # the name of `attend` in transformers


class TransformersModel:
    """The `CausalLM` around a model of transformers, of which it splits decoder and head."""

    def __init__(self, causal_lm: Any) -> None:
        self._causal_lm = causal_lm
        self._decoder = causal_lm.base_model
        # The head with all that the architecture does around it (scaling, caps): the model's forward runs with a
        # decoder that returns its input.
        setattr(causal_lm, causal_lm.base_model_prefix, _GivenHidden())
        self._decoder.set_attn_implementation(ATTENTION_NAME)
        # It reads the tokens of each step, to warn of padding that there is never.
        self._decoder.warn_if_padding_and_no_attention_mask = lambda *_: None

    def forward(self, batch: ForwardBatch) -> Tensor:
        """The decoder, with the final norm."""
        out = self._decoder(
            input_ids=batch.input_ids.unsqueeze(0),
            position_ids=batch.positions.unsqueeze(0),
            use_cache=False,
            engine_step=batch,
        )
        hidden: Tensor = out.last_hidden_state[0]
        return hidden if batch.logits_indices is None else hidden.index_select(0, batch.logits_indices)

    def final_states(self, hidden: Tensor) -> Tensor:
        return hidden  # after the final norm

    def logits(self, hidden: Tensor, adapters: AdapterRuns | None = None) -> Tensor:
        assert adapters is None, "`load_model_runner` makes no slots for this model"
        logits: Tensor = self._causal_lm(inputs_embeds=hidden.unsqueeze(0), use_cache=False).logits[0]
        return logits.float()

    def write_logits(self, hidden: Tensor, adapters: AdapterRuns | None, out: Tensor) -> None:
        out.copy_(self.logits(hidden, adapters))

    @property
    def logits_dtype(self) -> torch.dtype:
        return torch.float32


class _GivenHidden(nn.Module):
    """Replaces the decoder, and the one in it that models such as OPT call: returns its input as hidden states."""

    def forward(self, *_: object, inputs_embeds: Tensor, **__: object) -> _DecoderOutput:
        return _DecoderOutput((inputs_embeds,))

    @property
    def decoder(self) -> _GivenHidden:
        return self


class _DecoderOutput(tuple[Tensor]):
    """A decoder's output with hidden states only; all other attributes are None."""

    @property
    def last_hidden_state(self) -> Tensor:
        return self[0]

    def __getattr__(self, name: str) -> None:
        return None


def attend(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    engine_step: ForwardBatch | None = None,
    s_aux: Tensor | None = None,
    **_: object,
) -> tuple[Tensor, None]:
    """Store the new keys and values, [1, H, T, D], and call the step's backend.

    Args:
        query: [1, Hq, T, D], rotated as the keys are.
        s_aux: [Hq], the sinks.

    Returns:
        [1, T, Hq, D], and no weights.

    Raises:
        ValueError: the model passes a mask; our masks follow from positions. `ModelCheck` finds this at start.
    """
    if attention_mask is not None:
        raise ValueError("a mask of its own for attention")
    assert engine_step is not None  # `ModelCheck` has verified that every layer passes it on
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    store_kv(engine_step.kv_pool.layer(module.layer_idx), k, v, engine_step.out_cache_loc)
    root = q.shape[-1] ** 0.5
    if scaling is not None and abs(scaling * root - 1.0) > 1e-6:  # the backend divides by sqrt(D)
        q = q * (scaling * root)
    sinks = None if s_aux is None else s_aux.float()
    out = engine_step.attention.forward(module.layer_idx, q.contiguous(), sinks)
    return out.view(1, q.shape[0], q.shape[1], -1), None
