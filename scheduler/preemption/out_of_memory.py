"""`OutOfMemory`: settles a step that found no device memory; its requests are computed again in smaller steps.

The KV pool is not the problem here: the device's allocator had no memory for the step's other tensors. The step
computed nothing. All requests of the step are retracted and computed again, because the KV of the step does not exist.
The KV of earlier steps stays in the prefix cache, so few tokens are computed twice.

If the step cannot be made smaller, the scheduler makes no step for a while: another user of the memory may free it.
A request gets `MAX_TRIES` tries alone at the same token. Each wait is twice as long as the one before, and after the
last try, 12.7 s after the first, the request is answered with an error. So a shortage of some seconds loses no answer.

With overlap the next step was launched before the failure was known. Its results for the same requests depend on KV
that does not exist. Their rows have new epochs when its result comes, so those results are dropped, as for a finished
request. Its other requests are not affected: no prefix, page copy or swap depends on a step that is not settled.
"""

from __future__ import annotations

import logging
from typing import Final

import numpy as np

from ...runtime.messages import Finish, FinishKind, TokenOutput
from ...runtime.step_plan import StepResult
from ..arrays import BoolArray
from ..batch import ScheduleBatch
from ..pass_state import PassState
from ..records.decision_log import Retraction
from ..requests.req import Req
from ..requests.requests import Requests
from ..step_size.step_limits import StepCaps
from .preemption import Preemption

logger = logging.getLogger(__name__)

MAX_TRIES: Final = 8
FIRST_HOLD_S: Final = 0.1
_WARN_EVERY_S: Final = 10.0


class OutOfMemory:
    """Settles steps that failed, reports them to the next pass, and holds steps for a time.

    Attributes:
        hold_until_s: no step is made before this time; None: steps may be made.
    """

    def __init__(self, requests: Requests, preemption: Preemption, caps: StepCaps) -> None:
        self._requests = requests
        self._preemption = preemption
        self._caps = caps
        self._notes: list[str] = []  # since the last pass
        self._retractions: list[Retraction] = []  # since the last pass
        self._warn_at_s = 0.0
        self._num_unsaid = 0  # warnings that were suppressed because another one was recent
        self.hold_until_s: float | None = None

    def settle(
        self, batch: ScheduleBatch, result: StepResult, here: BoolArray, now_s: float
    ) -> list[TokenOutput]:
        """Retract the requests of a failed step and lower the caps; answer a request that has used all its tries.

        Args:
            here: [B] which of them still have their row. If none has, this step was launched after another one that
                failed, and contains no new information.
        """
        if not here.any():
            return []
        lengths = np.frombuffer(batch.plan.num_scheduled_tokens, dtype=np.int32)
        num_tokens, num_prompt_tokens = int(lengths.sum()), int(lengths[: batch.num_extends].sum())
        lowered = self._caps.failed(len(batch), num_prompt_tokens, num_tokens)
        size = f"{num_tokens} tokens of {len(batch)} requests, {num_prompt_tokens} of prompts"
        note = f"step {batch.plan.step_id} ran out of device memory ({size})"
        if not lowered:
            (req,) = batch.reqs
            num_tries = _count_try(req, int(batch.end[0]))
            if num_tries >= MAX_TRIES:
                return [self._answer(req, f"{size}; {num_tries} tries", result.out_of_memory, now_s)]
            hold_s = FIRST_HOLD_S * 2 ** (num_tries - 1)
            self.hold_until_s = now_s + hold_s
            note += f"; no smaller one is left, so none is made for {hold_s:.1f} s"
            self._warn(f"{note}; lower --mem-fraction to avoid it: {result.out_of_memory}", now_s)
        else:
            note += f"; now {self._caps.text()}"
            way_out = f"lower {lowered} or --mem-fraction to avoid it"
            self._warn(f"{note}; {way_out}: {result.out_of_memory}", now_s)
        self._notes.append(note)
        for idx in np.flatnonzero(here).tolist():
            self._retractions.append(self._preemption.retract(batch.reqs[idx], "device memory"))
        self._preemption.requeue(now_s)
        return []

    def holds(self, now_s: float) -> bool:
        """Whether no step may be made yet."""
        if self.hold_until_s is not None and now_s >= self.hold_until_s:
            self.hold_until_s = None
        return self.hold_until_s is not None

    def report(self, state: PassState) -> None:
        """Add the retractions since the last pass, and their causes, to a pass that begins."""
        if self._notes:
            for retraction in self._retractions:
                state.add_retraction(retraction)
            state.notes += self._notes
            self._notes, self._retractions = [], []

    def _answer(self, req: Req, size: str, reason: str, now_s: float) -> TokenOutput:
        message = (
            f"the device has too little memory for the smallest step of this request ({size}): {reason}; lower "
            "--mem-fraction or --max-model-len"
        )
        logger.warning("failed rid=%s: %s", req.rid, message)
        return self._requests.finish(req, Finish(FinishKind.ERROR, message=message), now_s, keep=False)

    def _warn(self, text: str, now_s: float) -> None:
        """Log at most one warning per `_WARN_EVERY_S`; the decision log contains all of them."""
        if now_s < self._warn_at_s:
            self._num_unsaid += 1
            return
        more = f" (and {self._num_unsaid} times since the last warning)" if self._num_unsaid else ""
        logger.warning("%s%s", text, more)
        self._warn_at_s, self._num_unsaid = now_s + _WARN_EVERY_S, 0


def _count_try(req: Req, end: int) -> int:
    """Number of times that the request has failed alone without progress.

    Args:
        end: tokens that would have KV after the step.
    """
    failed_end, num_tries = req.failed_alone
    req.failed_alone = (max(end, failed_end), num_tries + 1 if end <= failed_end else 1)
    return req.failed_alone[1]
