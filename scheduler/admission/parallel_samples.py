"""`ParallelSamples`: requests with the same prompt (n > 1): one computes it, the others start from its pages.

All whole pages of the prompt are shared through the prefix cache. The last page holds the end of the prompt and the
beginning of one answer; each other request gets a copy of it when it starts (`KVMemory.restore`).
"""

from __future__ import annotations

from ..requests.req import Req
from ..requests.row_states import RowStates


class ParallelSamples:
    """Which members of each group have a row. A `RowObserver`."""

    def __init__(self, states: RowStates) -> None:
        self._states = states
        self._members: dict[str, list[Req]] = {}

    def started(self, req: Req) -> None:
        if req.group:
            self._members.setdefault(req.group, []).append(req)

    def stopped(self, req: Req) -> None:
        if req.group:
            members = self._members[req.group]
            members.remove(req)
            if not members:
                del self._members[req.group]

    def source(self, req: Req) -> Req | None:
        """A sibling with a computed prompt, which `req` can share completely; None if there is none."""
        for member in self._members.get(req.group, ()):
            if self._has_prompt(member):
                return member
        return None

    def prompt_is_pending(self, req: Req) -> bool:
        """Whether a sibling is computing the prompt and none has finished it: waiting saves computing it again."""
        members = self._members.get(req.group, ())
        return bool(members) and not any(self._has_prompt(member) for member in members)

    def _has_prompt(self, req: Req) -> bool:
        # no row: the request was retracted in this pass and is about to leave the group
        return req.row >= 0 and int(self._states.num_settled[req.row]) >= req.prompt_len
