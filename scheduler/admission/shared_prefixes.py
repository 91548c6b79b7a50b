"""Waiting requests whose prompt, or its beginning, another request computes: `ParallelSamples` and `PrefixDedup`."""

from __future__ import annotations

from typing import Final

from ...runtime.feasibility import pages_for
from ..arrays import TOKEN_ID_BYTES
from ..requests.req import Req
from ..requests.row_states import RowStates


class ParallelSamples:
    """Requests with the same prompt (n > 1): one computes it, the others start from its pages. A `RowObserver`.

    All whole pages of the prompt are shared through the prefix cache. The last page holds the end of the prompt and the
    beginning of one answer; each other request gets a copy of it when it starts (`KVMemory.restore`).
    """

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


MIN_SHARED_TOKENS: Final = 32
"""With fewer common tokens, computing them twice costs less than a step of waiting."""


class PrefixDedup:
    """Holds a request back while another one computes the prefix that both share. Made anew for each pass.

    SGLang does this for its cache-aware policies, with a simulated tree of the queue (in-batch prefix caching,
    thresholds 32 and 32). Here it is one set of keys per pass. The key of a prompt that is being computed is its
    namespace, the position of its next uncomputed token, and the run of tokens from there. If the cached prefix of a
    candidate ends at the same position and continues with the same run, the candidate would compute the same pages; it
    is held back until they are cached. Each pass tests it again, and it starts when its prompt differs from the other
    one.
    """

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self._run_bytes = pages_for(MIN_SHARED_TOKENS, page_size) * page_size * TOKEN_ID_BYTES
        self._keys: set[tuple[str, int, bytes]] = set()

    def computing(self, req: Req, num_computed: int) -> None:
        """The KV of this request's tokens from `num_computed` on does not exist yet and is being made."""
        start = num_computed // self._page_size * self._page_size
        run = self._run(req, start)
        if len(run) == self._run_bytes:
            self._keys.add((req.extra_key, start, run))

    def is_pending(self, req: Req, prefix_len: int) -> bool:
        """Whether a candidate should wait: the tokens after its cached `prefix_len` are being computed."""
        if not self._keys:
            return False
        return (req.extra_key, prefix_len, self._run(req, prefix_len)) in self._keys

    def _run(self, req: Req, start: int) -> bytes:
        first = start * TOKEN_ID_BYTES
        return req.fill_ids[first : first + self._run_bytes]
