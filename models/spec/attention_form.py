"""`AttentionForm`: how scores become weights, where families differ from plain softmax attention.

Beside it: `LayerHeads`, and `TemperatureTuning` of the queries.
"""

from __future__ import annotations

from typing import Final

import msgspec


class AttentionForm(msgspec.Struct, frozen=True, kw_only=True):
    """What attention does with its scores; the default is a plain softmax of scaled products.

    Attributes:
        score_cap: scaled scores become cap * tanh(score / cap); None: they are not capped.
        sinks: each query head has a learned score of its own, the sink, without a value: it only joins the denominator
            of the softmax. Sinks are neither scaled nor capped.
        chunked: windows are chunks: positions are divided into chunks of a window's size, and a token of a windowed
            layer attends to itself and to those before it in its chunk.
        output_gate: what heads have attended to is multiplied by sigmoid(gate(x)) before the output projection; the
            gate's rows are in the matrix of queries, those of each head after its query.
    """

    score_cap: float | None = None
    sinks: bool = False
    chunked: bool = False
    output_gate: bool = False


class LayerHeads(msgspec.Struct, frozen=True, kw_only=True):
    """The heads of one layer: the size of all heads, and the number of those of keys and values."""

    head_dim: int
    num_kv_heads: int


class TemperatureTuning(msgspec.Struct, frozen=True, kw_only=True):
    """Factors of the rotated queries by position, which keep the scores of long contexts sharp (Nakanishi 2025).

    A query is multiplied by 1 + scale * log(1 + floor((position + offset) / length)).

    Attributes:
        unrotated_only: only in layers that do not rotate.
    """

    scale: float
    length: float
    offset: int = 0
    unrotated_only: bool = False


PLAIN_ATTENTION: Final = AttentionForm()
