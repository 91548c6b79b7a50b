"""`render_page`: a `Timeline` as one self-contained HTML file: no network, no server, no other file.

Ids, tenants and messages come from clients. The page contains them only as JSON without markup, and the
script inserts them as text. The content security policy of the page allows only that script.
"""

from __future__ import annotations

import base64
import datetime
import hashlib
import html
import importlib.resources
import re
from collections.abc import Iterable, Iterator
from typing import Any, Final, NamedTuple

import msgspec

from ...runtime.messages import FinishKind
from ...runtime.step_plan import ForwardMode
from ...scheduler.records.verdict import MissKind, Reason
from .story import PassTable, Timeline, TracedRequest

MAX_PASSES: Final = 120_000
MAX_REQUESTS: Final = 20_000
MAX_SPANS: Final = 250_000
MAX_MARKS: Final = 30_000
"""A page that reaches all four has about 14 MB, which a browser opens in a second or two."""

MAX_TEXT_LEN: Final = 300
_INT32_MAX: Final = 2**31 - 1

SCRIPTS: Final = ("model.js", "draw.js", "page.js")
"""One script, in this order."""

PASS_COLUMNS: Final = {
    "stepId": "step_ids",
    "waiting": "num_waiting",
    "running": "num_running",
    "decodes": "num_decodes",
    "prefill": "prefill_tokens",
    "evicted": "evicted_pages",
    "free": "free_pages",
    "evictable": "evictable_pages",
    "locked": "locked_pages",
    "held": "held_pages",
    "kvBefore": "kv_before",
    "kvAfter": "kv_after",
    "stepBefore": "step_before",
    "stepAfter": "step_after",
    "rest": "num_rest",
}
"""Names of the page's data -> columns of `PassTable`."""

WAIT_GROUPS: Final = {
    "memory": (Reason.NO_KV, Reason.RETRACTING, Reason.MEDIA_LIMIT),
    "compute": (
        Reason.CHUNK_BUDGET,
        Reason.STEP_TIME,
        Reason.INPUT_BUDGET,
        Reason.PARTIAL_LIMIT,
        Reason.LONG_PARTIAL_LIMIT,
        Reason.DECODES_FIRST,
        Reason.ENCODE_TIME,
    ),
    "shared": (
        Reason.PREFIX_COMING,
        Reason.SIBLING_PREFILLS,
        Reason.LORA_LIMIT,
        Reason.GRAMMAR_PENDING,
    ),
}
"""Color of a wait; every other reason is "queue": a request before it in the order, or no free row."""


class Origin(NamedTuple):
    """Source of a timeline, for the head of the page.

    Attributes:
        name: of the file.
        run, num_runs: which run of it, from 1.
        started_s: seconds since 1970; 0 if not known.
        model, device: may be "".
        page_size: tokens of a KV page; 0 if not known.
        damage: what could not be read; "" if nothing.
    """

    name: str
    run: int = 1
    num_runs: int = 1
    started_s: float = 0.0
    model: str = ""
    device: str = ""
    page_size: int = 0
    damage: str = ""


def render_page(timeline: Timeline, origin: Origin) -> str:
    """The file's text. A log too large for a browser is cut or drawn at a lower resolution; the page says so."""
    style, script = _resource("page.css"), "\n".join(map(_resource, SCRIPTS))
    csp = (
        f"default-src 'none'; script-src {_csp_hash(script)}; style-src {_csp_hash(style)}; base-uri 'none'; "
        "form-action 'none'"
    )
    parts = {
        "csp": csp,
        "title": html.escape(f"Scheduler trace · {origin.name}"),
        "style": style,
        "script": script,
        "data": encode_json(page_data(timeline, origin)),
    }
    # In one pass, because an inserted value may look like another placeholder.
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], _resource("page.html"))


def encode_json(value: object) -> str:
    """JSON that is safe in a script element: no `<`, so neither `</script>` nor a comment can begin in it."""
    text = msgspec.json.encode(value).decode()
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def page_data(timeline: Timeline, origin: Origin) -> dict[str, Any]:
    """The data that the script of the page reads; `data.js` decodes it."""
    timeline, left_out = _fitted(timeline)
    reasons = list(Reason)
    return {
        "source": _source(origin),
        "pageSize": origin.page_size,
        "leftOut": " ".join(filter(None, [timeline.left_out, *left_out, origin.damage])),
        "reasons": [[reason.name, reason.text, wait_group(reason)] for reason in reasons],
        "misses": [kind.text for kind in MissKind],
        "finishes": [kind.value for kind in FinishKind],
        "modes": [mode.name for mode in ForwardMode],
        "passes": _pass_data(timeline.passes, timeline.origin_s),
        "requests": _request_data(timeline.requests, timeline.origin_s),
    }


def wait_group(reason: Reason) -> str:
    """The color of a wait for this reason."""
    return next((group for group, members in WAIT_GROUPS.items() if reason in members), "queue")


def _fitted(timeline: Timeline) -> tuple[Timeline, list[str]]:
    """The timeline cut to the limits of a page, with `left_out` in words."""
    left_out = []
    num_passes, num_requests = len(timeline.passes), len(timeline.requests)
    if num_passes > MAX_PASSES:
        timeline = timeline.part(num_passes - MAX_PASSES, num_passes)
        left_out.append(
            f"Only the last {MAX_PASSES:,} of {num_passes:,} passes are here; --from and --to choose others."
        )
    if len(timeline.requests) > MAX_REQUESTS:
        timeline = timeline._replace(requests=timeline.requests[-MAX_REQUESTS:])
        left_out.append(
            f"Only the last {MAX_REQUESTS:,} of {num_requests:,} requests are here; --from and --to choose others."
        )
    timeline = timeline.coarsened(MAX_SPANS)
    if timeline.resolution > 1:
        left_out.append(
            f"Neighboring waits of fewer than {timeline.resolution:,} passes are drawn as one, in the color of the "
            "longest; --from and --to, or --request, show each."
        )
    num_marks = sum(len(story.marks) for story in timeline.requests)
    if num_marks > MAX_MARKS:
        left_out.append(f"Only {MAX_MARKS:,} of {num_marks:,} retractions and swaps are marked.")
    return timeline, left_out


def _source(origin: Origin) -> str:
    parts = [origin.name]
    if origin.num_runs > 1:
        parts.append(f"run {origin.run} of {origin.num_runs}")
    if origin.started_s:
        started = datetime.datetime.fromtimestamp(origin.started_s, datetime.UTC)
        parts.append(f"started {started:%Y-%m-%d %H:%M:%S} UTC")
    parts += [text for text in (origin.model, origin.device) if text]
    return " · ".join(part[:MAX_TEXT_LEN] for part in parts)


# ---------------------------------------------------------------- columns


def _pass_data(passes: PassTable, origin_s: float) -> dict[str, Any]:
    """Columns of integers, encoded as differences, which are short, or as runs if values seldom change."""
    policies = sorted(set(passes.policies))
    indices = {reason: idx for idx, reason in enumerate(Reason)}
    modes = list(ForwardMode)

    def lengths(ends_s: list[float]) -> list[int]:
        return [
            max(_micros(end_s - start_s), 0) for start_s, end_s in zip(passes.start_s, ends_s, strict=True)
        ]

    return {
        "start": _deltas(_micros(start_s - origin_s) for start_s in passes.start_s),
        "length": lengths(passes.end_s),
        "live": lengths(passes.live_until_s),
        "stepTime": [_micros(step_s) for step_s in passes.step_s],
        **{name: _deltas(_int32(getattr(passes, column))) for name, column in PASS_COLUMNS.items()},
        "restReason": _runs(-1 if reason is None else indices[reason] for reason in passes.rest_reasons),
        "mode": _runs(modes.index(mode) for mode in passes.modes),
        "policy": _runs(policies.index(name) for name in passes.policies),
        "policies": policies,
        "notes": [[idx, [_text(note) for note in notes]] for idx, notes in passes.notes.items()],
    }


def _request_data(stories: list[TracedRequest], origin_s: float) -> dict[str, Any]:
    finishes, misses = list(FinishKind), list(MissKind)
    reasons = {reason: idx for idx, reason in enumerate(Reason)}

    def texts(name: str) -> dict[int, str]:
        return {idx: _text(text) for idx, story in enumerate(stories) if (text := getattr(story, name))}

    def times(name: str) -> list[int | None]:
        found = (getattr(story, name) for story in stories)
        return [None if time_s is None else _micros(time_s - origin_s) for time_s in found]

    def members(name: str) -> Iterator[tuple[int, Any]]:
        return ((idx, member) for idx, story in enumerate(stories) for member in getattr(story, name))

    return {
        "rid": [_text(story.rid) for story in stories],
        "prompt": [story.prompt_len for story in stories],
        "maxNew": [story.max_new_tokens for story in stories],
        "priority": [story.priority for story in stories],
        **{name: texts(name) for name in ("tenant", "group", "message")},
        "arrived": times("arrived_s"),
        "finished": times("finished_s"),
        "finish": [-1 if story.finish is None else finishes.index(story.finish) for story in stories],
        "output": [story.output_len for story in stories],
        "numSpans": [len(story.spans) for story in stories],
        "spans": list(_span_numbers(stories, reasons)),
        "marks": [[idx, mark.kind, mark.pass_idx, mark.text] for idx, mark in members("marks")][:MAX_MARKS],
        "looks": [
            [idx, look.prompt_len, look.prefix_len, misses.index(look.kind), look.differs_at]
            for idx, look in members("cache_looks")
        ],
    }


def _span_numbers(stories: list[TracedRequest], reasons: dict[Reason, int]) -> Iterator[int]:
    """Spans one after the other: kind | host << 2 | verdict << 3, passes since the last, passes - 1, and a verdict."""
    for story in stories:
        position = 0
        for span in story.spans:
            has_verdict = span.num_verdicts > 0
            yield span.kind | span.on_host << 2 | has_verdict << 3
            yield span.first - position
            yield span.last - span.first
            position = span.last + 1
            if has_verdict:
                yield -1 if span.reason is None else reasons[span.reason]
                yield span.num_verdicts
                yield span.num_reasons
                lens = (span.prefix_len, span.extend_len, span.output_len)
                yield from _int32((*lens, span.need, span.have, span.first_have))


def _micros(seconds: float) -> int:
    return round(seconds * 1e6)


def _int32(values: Iterable[int]) -> list[int]:
    """Clamp to the range of the page's arrays; unlimited budgets are larger."""
    return [min(max(value, -_INT32_MAX), _INT32_MAX) for value in values]


def _deltas(values: Iterable[int]) -> list[int]:
    result, previous = [], 0
    for value in values:
        result.append(value - previous)
        previous = value
    return result


def _runs(values: Iterable[int]) -> list[int]:
    """Value, count, value, count, ..."""
    result: list[int] = []
    for value in values:
        if result and result[-2] == value:
            result[-1] += 1
        else:
            result += (value, 1)
    return result


def _text(text: str) -> str:
    return text if len(text) <= MAX_TEXT_LEN else f"{text[: MAX_TEXT_LEN - 1]}…"


# ---------------------------------------------------------------- resources


def _resource(name: str) -> str:
    return (importlib.resources.files(__package__) / name).read_text(encoding="utf-8")


def _csp_hash(source: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(source.encode()).digest()).decode()}'"
