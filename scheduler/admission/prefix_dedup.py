"""`PrefixDedup`: holds a request back while another one computes the prefix that both share.

SGLang does this for its cache-aware policies, with a simulated tree of the queue (in-batch prefix caching, thresholds
32 and 32). Here it is one set of keys per pass. The key of a prompt that is being computed is its namespace, the
position of its next uncomputed token, and the run of tokens from there. If the cached prefix of a candidate ends at the
same position and continues with the same run, the candidate would compute the same pages; it is held back until they
are cached. Each pass tests it again, and it starts when its prompt differs from the other one.
"""

from __future__ import annotations

from typing import Final, Protocol

from ...runtime.feasibility import pages_for
from ..arrays import TOKEN_ID_BYTES
from ..requests.req import Req

MIN_SHARED_TOKENS: Final = 32
"""With fewer common tokens, computing them twice costs less than a step of waiting."""


class PrefixDedup(Protocol):
    """Made anew for each pass."""

    def computing(self, req: Req, num_computed: int) -> None:
        """The KV of this request's tokens from `num_computed` on does not exist yet and is being made."""
        ...

    def is_pending(self, req: Req, prefix_len: int) -> bool:
        """Whether a candidate should wait: the tokens after its cached `prefix_len` are being computed."""
        ...


class InBatchPrefixDedup:
    """See the module."""

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self._run_bytes = pages_for(MIN_SHARED_TOKENS, page_size) * page_size * TOKEN_ID_BYTES
        self._keys: set[tuple[str, int, bytes]] = set()

    def computing(self, req: Req, num_computed: int) -> None:
        start = num_computed // self._page_size * self._page_size
        run = self._run(req, start)
        if len(run) == self._run_bytes:
            self._keys.add((req.extra_key, start, run))

    def is_pending(self, req: Req, prefix_len: int) -> bool:
        if not self._keys:
            return False
        return (req.extra_key, prefix_len, self._run(req, prefix_len)) in self._keys

    def _run(self, req: Req, start: int) -> bytes:
        first = start * TOKEN_ID_BYTES
        return req.fill_ids[first : first + self._run_bytes]


class NoPrefixDedup:
    """Each request computes its missing tokens, even if another one is computing the same ones."""

    __slots__ = ()

    def computing(self, req: Req, num_computed: int) -> None:
        pass

    def is_pending(self, req: Req, prefix_len: int) -> bool:
        return False
