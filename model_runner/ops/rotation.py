"""Queries and keys between their projection and attention: normalized, rotated, and stored in the KV pool."""

# Shapes: T tokens, Hq query heads, H KV heads (both of this rank), D head dim, R rotated dimensions of a head, K latent

from __future__ import annotations

from typing import NamedTuple, Protocol

from torch import Tensor


class HeadNorms(NamedTuple):
    """Norms of q and of k, applied before rotary: weights as in `RMSNormOp`, one eps.

    The weights are [D] each, of every head alone; or [Hq * D] and [H * D], of all heads of a token together.

    Attributes:
        values: each head of v is divided by its root mean square, too, without a weight.
    """

    q_weight: Tensor
    k_weight: Tensor
    eps: float
    values: bool = False


class LayerKV(NamedTuple):
    """One layer's part of the KV pool: [slots, H, D] each, in the pool's dtype.

    Attributes:
        k_scale, v_scale: [slots, H] float32, for int8 pools only: a value is the stored integer times the scale of its
            token and head.
    """

    k: Tensor
    v: Tensor
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None


class RotaryStore(NamedTuple):
    """Rotation of the tokens of a step in one layer, and the slots for their keys and values.

    Rotation is as in Su et al. 2021, with halves paired as in Hugging Face's Llama. It is computed in float32 or in the
    dtype of cos and sin, and rounded to the model's dtype at the end. With R = 0 nothing is rotated, for models or
    layers that know positions by other means.

    Stored values are converted to the pool's dtype and clamped to its range. The scale of an int8 pool is the largest
    magnitude / 127, NaN if a value is not finite.

    Attributes:
        cos: [T, R], with equal halves; the first R dimensions of each head are rotated, the others are unchanged.
        sin: [T, R], the first half negated, so that x * cos + swapped(x) * sin is the rotation.
        kv: None: the layer attends to the keys and values of another one.
        out_cache_loc: [T] int64, no slot twice except slots of the dummy page, which are not read.
        interleaved: neighboring elements are paired, (0, 1), (2, 3), ..., and not the halves; cos and sin are the same.
        query_factors: [T] float32, contiguous: factors of the rotated q; None: 1. Not for latents.
        keys_are_values: values are the keys before norm and rotary. Not for latents.
    """

    cos: Tensor
    sin: Tensor
    kv: LayerKV | None
    out_cache_loc: Tensor
    interleaved: bool = False
    query_factors: Tensor | None = None
    keys_are_values: bool = False


class RotateAndStore(Protocol):
    """The work between the projections and attention: head norms, rotary, and the store into the KV pool."""

    def __call__(self, qkv: Tensor, norms: HeadNorms | None, store: RotaryStore) -> Tensor:
        """Normalize the heads of q and k if there are norms, rotate them by position, store k and v; returns q.

        Args:
            qkv: [T, Hq + 2H, D], the heads of q, then of k, then of v, or [T, Hq + H, D] if keys are values, or only q
                if the layer stores nothing; may be overwritten.

        Returns:
            [T, Hq, D], contiguous or a view into `qkv`.
        """
        ...


class StoreLatent(Protocol):
    """The work before latent attention, besides matmuls: the latent's norm, rotary, and the store into the KV pool."""

    def __call__(
        self, q: Tensor, q_out: Tensor, row: Tensor, norm: tuple[Tensor, float], store: RotaryStore
    ) -> None:
        """Normalize the latents, rotate the queries and the ends of the rows, and store the rows.

        Args:
            q: [T, Hq, R], the parts of the queries that rotate; may be parts of wider heads.
            q_out: [T, Hq, R], the same parts of the absorbed queries, filled by the call.
            row: [T, K + R], a latent and the key part that rotates; may be overwritten.
            norm: weight [K] as in `RMSNormOp`, and eps.
            store: its keys, [slots, 1, K + R], get the rows; its values are the same memory.
        """
        ...
