"""A pause: no step is planned, requests wait, and the answers are those of a life without one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from engine.runtime.errors import ConfigError
from engine.runtime.messages import Call, FinishKind, PauseMode, Resume
from engine.scheduler.journal.log_file import read_runs
from engine.scheduler.journal.replay import replay
from engine.scheduler.records.verdict import Reason
from engine.simulator.recorded_run import read_recorded_run

from .harness import Harness
from .journal.recorded import finish, record

MakeScheduler = Callable[..., Harness]


@pytest.mark.parametrize("overlap", [0, 1])
@pytest.mark.parametrize("mode", PauseMode)
def test_answers_across_a_pause(make_scheduler: MakeScheduler, mode: PauseMode, overlap: int) -> None:
    harness = make_scheduler(overlap=overlap, chunked_prefill_size=8, page_size=4)
    first = harness.submit(prompt_len=20, max_new_tokens=9)
    second = harness.submit(prompt_len=30, max_new_tokens=9)
    for _ in range(4):
        harness.step()
    num_steps = harness.pause(mode)

    later = harness.submit(prompt_len=5, max_new_tokens=2)
    report = harness.scheduler.report(harness.now_s)
    assert report.paused == mode
    expected = {PauseMode.KEEP: (2, 1), PauseMode.RETRACT: (0, 3), PauseMode.WAIT: (0, 1)}
    assert (report.num_running_reqs, report.num_queue_reqs) == expected[mode]
    assert (harness.answers[first].finish is not None) == (mode is PauseMode.WAIT)
    assert num_steps == 0 or mode is PauseMode.WAIT
    if mode is not PauseMode.KEEP:
        assert harness.pages().held == 0
    assert harness.step() is None
    assert harness.last_pass.rest_reason is Reason.PAUSED and not harness.answers[later].rows
    harness.scheduler.on_idle()  # no stall, however long it lasts
    assert harness.scheduler.wake_s() is None

    harness.resume()
    harness.run_until_idle()  # checks every token
    for rid in (first, second, later):
        finish = harness.answers[rid].finish
        assert finish is not None and finish.kind is FinishKind.LENGTH
    assert not harness.scheduler.report(harness.now_s).paused


def test_a_retracted_request_computes_its_kv_again(make_scheduler: MakeScheduler) -> None:
    harness = make_scheduler(page_size=4, num_host_pages=64, preemption_mode="swap")
    rid = harness.submit(prompt_len=20, max_new_tokens=9)
    for _ in range(3):
        harness.step()
    harness.pause(PauseMode.RETRACT)
    (retraction,) = [each for record in harness.scheduler.decisions.passes for each in record.retractions]
    assert (retraction.rid, retraction.mode, retraction.cause) == (rid, "recompute", "pause")
    assert harness.flush().kept_tokens == 0  # as an update of the weights needs it
    harness.resume()
    harness.run_until_idle()
    assert harness.answers[rid].rows[-1].usage.num_retractions == 1


def test_requests_end_in_a_pause(make_scheduler: MakeScheduler) -> None:
    harness = make_scheduler(request_timeout=1.0)
    slow, aborted = (harness.submit(prompt_len=5, max_new_tokens=50) for _ in range(2))
    harness.step()
    harness.pause(PauseMode.KEEP)
    harness.abort(aborted)
    finish = harness.answers[aborted].finish
    assert finish is not None and finish.kind is FinishKind.ABORT
    wake_s = harness.scheduler.wake_s()
    assert wake_s is not None
    harness.now_s = wake_s
    harness.step()
    assert harness.answers[slow].finish is not None
    harness.resume()
    harness.run_until_idle()


@pytest.mark.parametrize("mode", PauseMode)
def test_a_policy_that_waits_for_a_batch_does_not_wake_a_paused_scheduler(
    make_scheduler: MakeScheduler, mode: PauseMode
) -> None:
    harness = make_scheduler(schedule_policy="static")
    harness.pause(mode)
    rid = harness.submit(prompt_len=5, max_new_tokens=2)
    harness.step()
    harness.now_s += 60.0
    harness.step()
    assert harness.scheduler.wake_s() is None  # a time in the past would be a busy loop
    harness.resume()
    harness.run_until_idle()
    assert harness.answers[rid].finish is not None


def test_a_request_that_is_retracted_while_others_end_waits_for_the_end_of_the_pause(
    make_scheduler: MakeScheduler,
) -> None:
    harness = make_scheduler(overlap=0)
    rid = harness.submit(prompt_len=5, max_new_tokens=5)
    harness.step()
    harness.runner.no_memory = lambda _plan: True
    harness.pause(PauseMode.WAIT)

    harness.runner.no_memory = lambda _plan: False
    assert harness.pages().held == 0 and harness.answers[rid].finish is None
    harness.resume()
    harness.run_until_idle()
    assert harness.answers[rid].rows[-1].usage.num_retractions == 1


def test_resume_answers_a_pause_that_waits(make_scheduler: MakeScheduler) -> None:
    harness = make_scheduler()
    harness.submit(prompt_len=5, max_new_tokens=5)
    harness.step()
    harness.scheduler.handle(Call(7, Resume()), harness.now_s)  # no effect
    harness.collect()
    assert [done.paused for done in harness.pauses] == [False]
    harness.pauses.clear()
    harness.begin_pause(PauseMode.WAIT)
    harness.step()
    assert not harness.pauses
    harness.scheduler.handle(Call(8, Resume()), harness.now_s)
    harness.collect()
    assert [done.paused for done in harness.pauses] == [False, False]
    harness.run_until_idle()


@pytest.mark.parametrize("overlap", [0, 1])
@pytest.mark.parametrize("mode", PauseMode)
def test_a_replay_pauses_at_the_same_place(tmp_path: Path, mode: PauseMode, overlap: int) -> None:
    harness = record(tmp_path / "decisions.log", overlap=overlap, chunked_prefill_size=8, page_size=4)
    for length in (20, 30):
        harness.submit(prompt_len=length, max_new_tokens=9)
    for _ in range(4):
        harness.step()
    harness.pause(mode)
    harness.submit(prompt_len=5, max_new_tokens=2)
    harness.step()
    harness.resume()
    harness.run_until_idle()
    finish(harness)
    (result,) = [replay(run) for run in read_runs(tmp_path / "decisions.log")]
    assert result.is_equal and result.num_requests == 3
    assert result.num_passes == harness.scheduler.decisions.num_passes
    with pytest.raises(ConfigError, match="an admin paused the server in this run"):
        read_recorded_run(tmp_path / "decisions.log")
