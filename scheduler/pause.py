"""`Pauses`: whether the scheduler generates, for trainers that change weights between two steps.

A pause is a state of the scheduler between two messages, `Pause` and `Resume`, so a replay has it at the same place.
While it lasts requests arrive, are refused, aborted and time out as always. Nothing is computed, but for the running
requests of the mode WAIT.
"""

from __future__ import annotations

from ..runtime.messages import PauseMode
from .pass_state import PassState
from .preemption.preemption import Preemption
from .requests.requests import Requests


class Pauses:
    """See the module.

    Attributes:
        mode: of the pause; None: the scheduler generates.
    """

    def __init__(self, requests: Requests, preemption: Preemption) -> None:
        self._requests = requests
        self._preemption = preemption
        self._unanswered: list[int] = []
        self.mode: PauseMode | None = None

    @property
    def stops_all(self) -> bool:
        """Whether no step is planned."""
        return self.mode is not None and not self.lets_run

    @property
    def lets_run(self) -> bool:
        """Whether the running requests go on, and no other one starts."""
        return self.mode is PauseMode.WAIT

    def begin(self, call_id: int, mode: PauseMode) -> None:
        """Pause, or change the mode of a pause."""
        self._unanswered.append(call_id)
        self.mode = mode

    def end(self) -> list[int]:
        """Go on; returns the ids of the calls that still wait."""
        self.mode = None
        return self._take_unanswered()

    def retract(self, state: PassState) -> None:
        """With RETRACT, take the rows and pages of all running requests, and queue them."""
        if self.mode is PauseMode.RETRACT and self._requests.num_with_row:
            for req in self._requests.with_row:
                state.add_retraction(self._preemption.retract(req, "pause"))
            self._preemption.requeue(state.now_s)

    def on_idle(self) -> list[int]:
        """No step is in flight, and none was planned: the ids of the calls that are done."""
        if self.mode is None or (self.lets_run and self._requests.num_with_row):
            return []
        return self._take_unanswered()

    def _take_unanswered(self) -> list[int]:
        unanswered, self._unanswered = self._unanswered, []
        return unanswered
