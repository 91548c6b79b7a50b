"""What `engine trace` makes of a decision log agrees with what the clients got."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine.cli import main as cli
from engine.cli.trace.command import read_log
from engine.cli.trace.story import MarkKind, SpanKind, Timeline
from tests.scheduler.harness import VOCAB_SIZE, Harness
from tests.scheduler.journal.recorded import finish, record


def play(path: Path, **settings: Any) -> tuple[Harness, Timeline]:
    """Requests that come and go for a while, some with a common beginning, one aborted."""
    harness = record(path, num_pages=64, max_running_requests=6, chunked_prefill_size=32, **settings)
    rng = np.random.default_rng(5)
    common = rng.integers(1, VOCAB_SIZE, 40).tolist()
    for step in range(160):
        if step < 120 and rng.random() < 0.3:
            tail = rng.integers(1, VOCAB_SIZE, int(rng.integers(4, 70))).tolist()
            beginning = common[: int(rng.integers(4, 40))] if rng.random() < 0.5 else []
            harness.submit(prompt=beginning + tail, max_new_tokens=int(rng.integers(2, 50)))
        if step == 110:
            harness.abort(f"r{len(harness.answers) - 1}")
        harness.step()
    harness.run_until_idle()
    finish(harness)
    return harness, read_log(path, None)[0]


@pytest.fixture(scope="module")
def plain_log(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Harness, Timeline]:
    """The log of a scheduler with usual settings; nothing changes it."""
    path = tmp_path_factory.mktemp("plain") / "run.log"
    return path, *play(path)


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"overlap": 1},
        {"phases": "prefill-first"},
        {"max_num_partial_prefills": 3},
        {"chaos": "retract=0.3:40", "preemption_mode": "recompute", "overlap": 1},
        {"chaos": "retract=0.3:40", "preemption_mode": "swap", "num_host_pages": 64},
    ],
    ids=str,
)
def test_every_request_has_its_story(plain_log, tmp_path, settings):
    harness, timeline = play(tmp_path / "run.log", **settings) if settings else plain_log[1:]

    assert [story.rid for story in timeline.requests] == list(harness.answers)
    for story in timeline.requests:
        answer = harness.answers[story.rid]
        assert answer.finish is not None
        assert (story.finish, story.output_len) == (answer.finish.kind, len(answer.tokens))
        assert story.prompt_len == len(answer.prompt)
        assert all(before.last < after.first for before, after in itertools.pairwise(story.spans))
        if not answer.tokens:
            continue
        computed = sum(span.extend_len for span in story.spans if span.kind is SpanKind.PREFILL)
        lost = sum(mark.kind is not MarkKind.SWAPPED_IN for mark in story.marks)
        if not lost:
            assert computed == story.prompt_len - story.cached_len
            decodes = sum(
                timeline.passes.num_decodes[idx] > 0
                for span in story.spans
                if span.kind is SpanKind.DECODE
                for idx in range(span.first, span.last + 1)
            )
            # the last chunk gives the first token; without mixed steps a decode may have to stand still
            assert decodes == len(answer.tokens) - 1
    marks = [mark.kind for story in timeline.requests for mark in story.marks]
    retracted = harness.scheduler.report(harness.now_s).totals.retracted_reqs
    assert marks.count(MarkKind.RETRACTED) + marks.count(MarkKind.SWAPPED_OUT) == retracted
    assert (retracted > 5) == ("chaos" in settings)
    assert (MarkKind.SWAPPED_IN in marks) == (settings.get("preemption_mode") == "swap")


def test_the_figures_are_those_of_the_log(plain_log):
    _, harness, timeline = plain_log
    passes = timeline.passes
    pools = zip(
        passes.free_pages, passes.evictable_pages, passes.locked_pages, passes.held_pages, strict=True
    )
    assert {sum(pool) for pool in pools} == {64}
    report = harness.scheduler.report(harness.now_s)
    assert sum(passes.evicted_pages) * 4 == report.totals.evicted_tokens
    assert max(passes.num_running) <= 6
    assert max(passes.num_waiting) > 0


def test_the_command_reads_it(plain_log, tmp_path):
    out = tmp_path / "out.json"
    assert cli.run(["trace", str(plain_log[0]), "--format", "perfetto", "-o", str(out)]) == 0
    assert len(json.loads(out.read_text(encoding="utf-8"))["traceEvents"]) > 500
