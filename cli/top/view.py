"""`render`: a snapshot as a screen of text: figures above, one line per request below. Pure: no terminal, no clock."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Final, NamedTuple

from .snapshot import Rates, Request, Snapshot

if TYPE_CHECKING:
    from rich.console import Group
    from rich.text import Text

_LABEL_COLUMNS: Final = 8
_BAR_COLUMNS: Final = 24
_MEDIUM: Final = 100
_WIDE: Final = 120
"""From this width on ids are shown in full, as `engine why` needs them."""
_SHORT_ID: Final = 15
_PHASE_STYLES: Final = {"prefill": "cyan", "decode": "green", "retracted": "red", "swapped": "red"}
_BUDGETS: Final = (
    ("rem_total_tokens", "memory reserved"),
    ("rem_input_tokens", "prompts of a step"),
    ("rem_chunk_tokens", "chunk"),
)


def render(snapshot: Snapshot, rates: Rates | None, *, width: int, height: int, note: str = "") -> Group:
    """The screen.

    Args:
        rates: since the snapshot before; None for the first.
        width, height: columns and lines of the screen.
        note: a notice to the user, such as a lost connection.
    """
    from rich.console import Group
    from rich.text import Text

    head = [
        *_head(snapshot),
        *_memory(snapshot, rates),
        *_replicas(snapshot),
        *_grammars(snapshot, rates),
        *_queue(snapshot),
        *_budgets(snapshot),
    ]
    if note:
        head.append(Text(note, style="bold red"))
    lines = [*(row for line in head for row in _wrapped(line, width)), Text()]
    room = max(1, height - len(lines) - 2)  # the table's head, and the line below it
    lines += _requests(snapshot, width, room)
    for line in lines:
        line.truncate(width, overflow="ellipsis")
        line.no_wrap = True
    return Group(*lines[:height])


def _wrapped(line: Text, width: int) -> Iterator[Text]:
    """A line of the head in rows that fit, the later ones below its figures."""
    from rich.console import Console
    from rich.text import Text

    if line.cell_len <= width:
        yield line
        return
    label, figures = line[:_LABEL_COLUMNS], line[_LABEL_COLUMNS:]
    for number, row in enumerate(figures.wrap(Console(width=width), width - _LABEL_COLUMNS)):
        row.rstrip()
        yield Text.assemble(label if number == 0 else " " * _LABEL_COLUMNS, row)


def _line(label: str, *parts: str | tuple[str, str]) -> Text:
    from rich.text import Text

    return Text.assemble((f"{label:<{_LABEL_COLUMNS}}", "bold"), *parts)


def _head(snapshot: Snapshot) -> Iterator[Text]:
    report = snapshot.report
    policy = f" · {report.policy}" if report.policy else ""
    yield _line("engine", (snapshot.model, "bold"), f" at {snapshot.url} · {snapshot.version}{policy}")
    yield _line(
        "reqs",
        (f"{report.num_running_reqs}", "green"),
        f" of {snapshot.max_running_requests} running · ",
        (f"{report.num_queue_reqs}", "yellow" if report.num_queue_reqs else ""),
        f" waiting · {report.num_swapped_reqs} swapped · {report.totals.retracted_reqs} retracted, "
        f"{report.totals.timed_out_reqs} timed out so far",
    )
    if report.stalled:
        yield _line("STALLED", (report.stalled, "bold red"))


def _memory(snapshot: Snapshot, rates: Rates | None) -> Iterator[Text]:
    report = snapshot.report
    total = report.kv.total_tokens
    pinned = f" · pinned {_share(report.pinned_tokens, total)}" if report.pinned_tokens else ""
    yield _line(
        "KV",
        *_bar(report.kv.used_tokens, report.kv.cached_tokens, total),
        f" requests {_share(report.kv.used_tokens, total)} · tree {_share(report.kv.cached_tokens, total)} · free "
        f"{_share(snapshot.free_tokens, total)} of {total:,}{pinned}",
    )
    if report.host.total_tokens:
        yield _line(
            "host",
            *_bar(report.host.used_tokens, 0, report.host.total_tokens),
            f" swapped {_share(report.host.used_tokens, report.host.total_tokens)} of {report.host.total_tokens:,}",
        )
    if rates is None:
        yield _line("rates", "...")
        return
    steps = f"{rates.steps:,.1f} steps/s · busy {rates.busy:.0%} · evicted {rates.evicted_tokens:,.0f}/s"
    if snapshot.task != "generate":
        yield _line(
            "rates",
            (f"{rates.prompt_tokens:,.0f}", "green"),
            f" tok/s of texts, {rates.cached:.0%} cached · {steps}",
        )
        return
    yield _line(
        "rates",
        (f"{rates.output_tokens:,.0f}", "green"),
        f" tok/s out · {rates.prompt_tokens:,.0f} tok/s prompts, {rates.cached:.0%} cached · {steps}",
    )


def _replicas(snapshot: Snapshot) -> Iterator[Text]:
    """A line for each replica, with `--dp`."""
    for replica in snapshot.replicas:
        label, report = f"dp {replica.number}", replica.report
        if replica.reason:
            yield _line(label, (replica.reason, "bold red"))
            continue
        cached = (
            report.totals.cached_tokens / report.totals.prompt_tokens if report.totals.prompt_tokens else 0.0
        )
        yield _line(
            label,
            (f"{report.num_running_reqs}", "green"),
            " running · ",
            (f"{report.num_queue_reqs}", "yellow" if report.num_queue_reqs else ""),
            f" waiting · requests {_share(report.kv.used_tokens, report.kv.total_tokens)} · tree "
            f"{_share(report.kv.cached_tokens, report.kv.total_tokens)} · {cached:.0%} of all prompts cached",
        )


def _grammars(snapshot: Snapshot, rates: Rates | None) -> Iterator[Text]:
    """Once a grammar was used: how much work grammars are, and how often they overrule the model."""
    report = snapshot.report
    if not report.grammar.builds and not report.grammar.masks:
        return
    now = (
        ""
        if rates is None
        else f"{rates.masks:,.0f} masks/s · {rates.overruled_tokens:,.1f} overruled tok/s · "
    )
    share = report.grammar.mask_s / report.totals.step_s if report.totals.step_s > 0 else 0.0
    build_ms = report.grammar.build_s * 1e3 / max(1, report.grammar.builds)
    yield _line(
        "guided",
        f"{now}{report.totals.overruled_tokens:,} overruled so far · {share:.1%} of the time of all steps · "
        f"{report.grammar.builds:,} compiled, {build_ms:,.1f} ms each · {report.num_grammar_reqs} waiting",
    )


def _bar(used: int, cached: int, total: int) -> list[tuple[str, str]]:
    """`####::::....`: pages of requests, of the tree, free ones; a share above 0 gets at least one character."""
    if total <= 0:
        return [("." * _BAR_COLUMNS, "dim")]
    num_used = min(_BAR_COLUMNS, -(-used * _BAR_COLUMNS // total))
    num_cached = min(_BAR_COLUMNS - num_used, -(-cached * _BAR_COLUMNS // total))
    return [
        ("#" * num_used, "green"),
        (":" * num_cached, "cyan"),
        ("." * (_BAR_COLUMNS - num_used - num_cached), "dim"),
    ]


def _share(tokens: int, total: int) -> str:
    return f"{tokens / total:.0%}" if total > 0 else "-"


def _queue(snapshot: Snapshot) -> Iterator[Text]:
    reasons = sorted(snapshot.report.waiting_by_reason.items(), key=lambda item: (-item[1], item[0]))
    if reasons:
        yield _line("why", " · ".join(f"{name} {count}" for name, count in reasons))


def _budgets(snapshot: Snapshot) -> Iterator[Text]:
    figures = snapshot.last_pass
    words = [
        f"{words} {figures[f'{name}_before']:,} -> {figures[f'{name}_after']:,}"
        for name, words in _BUDGETS
        if f"{name}_before" in figures and f"{name}_after" in figures
    ]
    if words:
        yield _line("budget", " · ".join(words))


# ---------------------------------------------------------------- requests


def _requests(snapshot: Snapshot, width: int, room: int) -> Iterator[Text]:
    from rich.text import Text

    columns = _Columns(
        _id_columns(snapshot, width), narrow=width < _MEDIUM, generates=snapshot.task == "generate"
    )
    yield Text(columns.head(), style="reverse")
    shown = snapshot.requests[:room]
    for request in shown:
        yield columns.line(request)
    left_out = snapshot.total - len(shown)
    if left_out > 0:
        yield Text(f"and {left_out:,} more", style="dim")
    elif not snapshot.total:
        yield Text("no requests", style="dim")


def _id_columns(snapshot: Snapshot, width: int) -> int:
    if width < _WIDE:
        return _SHORT_ID
    return max((len(request.id) for request in snapshot.requests), default=_SHORT_ID)


class _Columns(NamedTuple):
    """The columns that fit; a narrow screen shows the code of a reason instead of its text, and no cached tokens.

    `generates`: requests have answers, of which tokens are counted.
    """

    id_columns: int
    narrow: bool
    generates: bool = True

    def head(self) -> str:
        cached = "" if self.narrow else f" {'CACHED':>6}"
        left = f"{'ID':<{self.id_columns}} {'PHASE':<9} {'AGE':>6} {'TTFT':>6} {'PROMPT':>7}"
        out = f" {'OUT':>11}" if self.generates else ""
        return f"{left}{cached}{out} WHY"

    def line(self, request: Request) -> Text:
        from rich.text import Text

        cached = "" if self.narrow else f" {request.cached_tokens:>6}"
        counts = f"{request.completion_tokens}/{request.max_tokens}"
        out = f"{counts:>11} " if self.generates else ""
        return Text.assemble(
            f"{short_id(request.id, self.id_columns):<{self.id_columns}} ",
            (f"{request.phase[:9]:<9}", _PHASE_STYLES.get(request.phase, "yellow")),
            f" {seconds_text(request.age_s):>6} {seconds_text(request.ttft_s):>6} {request.prompt_tokens:>7}{cached} "
            f"{out}{self.why(request)}",
        )

    def why(self, request: Request) -> str:
        words = request.reason if self.narrow else request.why
        if words and (request.need or request.have):
            words += f" (need {request.need:,}, have {request.have:,})"
        parts = [
            "" if request.service_tier == "default" else request.service_tier,
            f"retracted {request.num_retractions}x" if request.num_retractions else "",
            words,
        ]
        return "; ".join(filter(None, parts))


def short_id(rid: str, columns: int) -> str:
    """An id in at most so many columns, cut in the middle because both ends identify it: `chatcmpl-3f…a2-0`."""
    if len(rid) <= columns:
        return rid
    tail = min(5, columns // 2)
    return f"{rid[: columns - tail - 1]}…{rid[-tail:]}"


def seconds_text(seconds: float | None) -> str:
    """Seconds in at most six columns: `41ms`, `2.31s`, `4m05s`, `2h03m`; `-` for None."""
    if seconds is None:
        return "-"
    if seconds < 1:
        return f"{seconds * 1e3:.0f}ms"
    if seconds < 100:
        return f"{seconds:.2f}s" if seconds < 10 else f"{seconds:.1f}s"
    minutes, rest = divmod(int(seconds), 60)
    if minutes < 60:
        return f"{minutes}m{rest:02d}s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02d}m" if hours < 100 else f"{hours // 24}d"
