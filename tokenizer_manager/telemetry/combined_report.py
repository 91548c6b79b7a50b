"""`combined`: the reports of several schedulers as one, for everything that speaks of the whole server."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from ...runtime.messages import SchedulerReport
from ...runtime.transport.kv_transfer import TransferFigures


def only_totals(report: SchedulerReport) -> SchedulerReport:
    """Of a scheduler that is lost: what it did still counts, what it held does not."""
    totals = {
        field.name: getattr(report, field.name)
        for field in msgspec.structs.fields(SchedulerReport)
        if field.name.endswith("_total")
    }
    return SchedulerReport(sent_s=report.sent_s, replica=report.replica, **totals)


def combined(reports: Sequence[SchedulerReport], sent_s: float) -> SchedulerReport:
    """Sums of all counts, the largest estimate of memory, and the reasons of all.

    Args:
        reports: at least one; a single one stays as it is, but for its time.
        sent_s: time of the result.
    """
    if len(reports) == 1:
        return msgspec.structs.replace(reports[0], sent_s=sent_s)
    waiting: Counter[str] = Counter()
    for report in reports:
        waiting.update(report.waiting_by_reason)
    others: dict[str, Any] = {
        "sent_s": sent_s,
        "new_token_ratio": max(report.new_token_ratio for report in reports),
        "policy": ", ".join(dict.fromkeys(report.policy for report in reports if report.policy)),
        "waiting_by_reason": dict(waiting),
        "stalled": next((report.stalled for report in reports if report.stalled), ""),
        "num_adapters": max(report.num_adapters for report in reports),
        "replica": 0,
        "transfer": _both(report.transfer for report in reports),
    }
    sums = {
        field.name: sum(getattr(report, field.name) for report in reports)
        for field in msgspec.structs.fields(SchedulerReport)
        if field.name not in others
    }
    return SchedulerReport(**others, **sums)


def _both(figures: Iterable[TransferFigures | None]) -> TransferFigures | None:
    """Of a prefill and a decode replica: what is sent by one is received by the other one, and its rooms are those."""
    found = [each for each in figures if each is not None]
    if not found:
        return None
    sent = max(found, key=lambda each: each.sent_pages)
    received = max(found, key=lambda each: each.received_pages)
    return msgspec.structs.replace(
        received,
        sent_pages=sent.sent_pages,
        held_pages=sum(each.held_pages for each in found),
    )
