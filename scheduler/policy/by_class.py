"""`ByClass`: gives the events of a request to the policy of its class.

Requests are interactive, or of the background: batches, and what clients send with `service_tier: "flex"`. The
configured policy orders the interactive ones and does not see the others, which are in fair order between their
tenants. A background request runs on what interactive requests leave:

- it is admitted only while none of them waits for a row or for memory (`Admission.plan_background`);
- it loses its row and its pages when one of them needs these, and before any of them is retracted (`Preemption`);
- a step has time for it as `BackgroundShare` says.
"""

from __future__ import annotations

from collections.abc import Sequence

from ...runtime.messages import FinishKind
from ..requests.req import Chunk, Req
from .base import SchedulePolicy
from .fair import Fair


class ByClass:
    """See the module. A `QueueObserver`.

    Attributes:
        interactive: the configured policy.
        background: the order of the other requests.
    """

    def __init__(self, interactive: SchedulePolicy, page_size: int) -> None:
        self.interactive = interactive
        self.background = Fair(page_size)

    def _of(self, req: Req) -> SchedulePolicy:
        return self.background if req.background else self.interactive

    def enqueued(self, req: Req) -> None:
        self._of(req).enqueued(req)

    def dequeued(self, req: Req) -> None:
        self._of(req).dequeued(req)

    def finished(self, req: Req, kind: FinishKind) -> None:
        self._of(req).finished(req, kind)

    def gained(self, req: Req, num_tokens: int) -> None:
        """As `SchedulePolicy.gained`."""
        self._of(req).gained(req, num_tokens)

    def encoded(self, req: Req, num_tokens: int) -> None:
        """As `SchedulePolicy.encoded`."""
        self._of(req).encoded(req, num_tokens)

    def planned(self, chunks: Sequence[Chunk], decodes: Sequence[Req], *, has_background: bool) -> None:
        """As `SchedulePolicy.planned`; `has_background`: there are requests of both classes, or of the background."""
        if not has_background:
            self.interactive.planned(chunks, decodes)
            return
        for policy, is_background in ((self.interactive, False), (self.background, True)):
            policy.planned(
                [chunk for chunk in chunks if chunk.req.background == is_background],
                [req for req in decodes if req.background == is_background],
            )
