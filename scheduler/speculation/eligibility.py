"""`may_speculate`: which requests can have drafts."""

from __future__ import annotations

from ...runtime.sampling_params import SamplingParams
from ..requests.req import Req


def may_speculate(req: Req) -> bool:
    """Whether sampling at a position depends on the earlier tokens only through the model and the masks."""
    return not (_has_penalties(req.sampling) or req.sampling.logprobs is not None)


def _has_penalties(sampling: SamplingParams) -> bool:
    return bool(sampling.repetition_penalty != 1.0 or sampling.frequency_penalty or sampling.presence_penalty)
