"""`merged`: the answers of several schedulers to one call, as one answer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import assert_never

from msgspec.structs import replace

from ...runtime.messages import AdapterDone, Explanation, FlushCacheDone, PinDone, RequestList

Answer = FlushCacheDone | PinDone | Explanation | RequestList | AdapterDone


def merged(answers: Sequence[Answer]) -> Answer:
    """One answer from those of the schedulers, at least one, all of one kind.

    Flushed tokens and requests are those of all. A prefix is pinned wherever it is cached, and the longest one counts:
    the requests that use it go there. A request is explained by the scheduler that knows it; an adapter is loaded if
    all have loaded it.
    """
    first, *others = answers
    if not others:
        return first
    match first:
        case FlushCacheDone():
            counts = [each for each in answers if isinstance(each, FlushCacheDone)]
            flushed, kept = (
                sum(each.flushed_tokens for each in counts),
                sum(each.kept_tokens for each in counts),
            )
            return replace(first, flushed_tokens=flushed, kept_tokens=kept)
        case PinDone():
            pins = [each for each in answers if isinstance(each, PinDone)]
            return max(pins, key=lambda each: each.pinned_tokens)
        case Explanation():
            return next((each for each in answers if isinstance(each, Explanation) and each.found), first)
        case RequestList():
            lists = [each for each in answers if isinstance(each, RequestList)]
            figures: Counter[str] = Counter()
            for each in lists:
                figures.update(each.last_pass)
            requests = [request for each in lists for request in each.requests]
            total = sum(each.total for each in lists)
            return replace(first, requests=requests, total=total, last_pass=dict(figures))
        case AdapterDone():
            return next((each for each in answers if isinstance(each, AdapterDone) and each.error), first)
        case _:
            assert_never(first)
