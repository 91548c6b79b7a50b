"""`Srtf`: shortest remaining time first: as `Sjf`, but what a request has behind it does not count."""

from __future__ import annotations

from ..requests.req import Req
from .sjf import Sjf


class Srtf(Sjf):
    """By the tokens that are still to come, less `ageing` tokens for each second of waiting.

    For a request that has generated nothing these are its prompt and its expected output, as for `Sjf`; for one that
    has lost its place, the rest of its output only. That its KV may have to be computed again is not counted: much of
    it is usually still cached, and thousands of such tokens share a step where each token of output takes one. So a
    request that is nearly done comes back first, and gives its memory back soonest. Running requests are not
    interrupted for shorter ones: their memory would be paid for twice.
    """

    name = "srtf"

    def length(self, req: Req) -> int:
        to_generate = self._estimate.output_len(req) - req.output_len
        return to_generate if req.output_len else req.prompt_len + to_generate
