"""`LinearCost`: a cost model with round figures, so that results can be checked by hand."""

from __future__ import annotations

from engine.scheduler.batch import StepWork


class LinearCost:
    """A constant, and so much per unit of work. A `CostModel`."""

    __slots__ = ("_decode_row_s", "_kv_token_s", "_pair_s", "_prefill_token_s", "_step_s", "_swapped_token_s")

    def __init__(
        self,
        *,
        step_s: float = 0.0,
        prefill_token_s: float = 0.0,
        decode_row_s: float = 0.0,
        kv_token_s: float = 0.0,
        pair_s: float = 0.0,
        swapped_token_s: float = 0.0,
    ) -> None:
        self._step_s = step_s
        self._prefill_token_s = prefill_token_s
        self._decode_row_s = decode_row_s
        self._kv_token_s = kv_token_s
        self._pair_s = pair_s
        self._swapped_token_s = swapped_token_s

    def step_s(self, work: StepWork) -> float:
        return (
            self._step_s
            + self._prefill_token_s * work.prefill_tokens
            + self._decode_row_s * work.decode_rows
            + self._kv_token_s * work.kv_tokens
            + self._pair_s * work.prefill_pairs
            + self._swapped_token_s * work.swapped_tokens
        )
