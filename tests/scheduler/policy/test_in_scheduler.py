"""Policies in the whole scheduler: their effect, and that every request is answered as it would be alone."""

from pathlib import Path
from typing import get_args

import pytest

from engine.runtime.config.engine_config import SchedulePolicyName
from engine.scheduler.journal.log_file import read_runs
from engine.scheduler.journal.replay import replay
from engine.scheduler.policy.base import MAX_SORTED
from engine.scheduler.records.verdict import AddReqResult, Reason
from engine.scheduler.requests.req import MAX_OVERTAKEN

from ..harness import Harness, Image
from ..journal.recorded import finish, record


@pytest.fixture
def make_scheduler():
    return Harness


def order_of_first_tokens(harness):
    """Rids in the order in which they were admitted."""
    seen = []
    while harness.scheduler.num_unfinished:
        harness.step()
        seen += [
            verdict.rid for verdict in harness.last_pass.verdicts if verdict.result is AddReqResult.CONTINUE
        ]
    return seen


def test_fcfs_admits_in_the_order_of_arrival(make_scheduler):
    harness = make_scheduler(schedule_policy="fcfs", max_running_requests=1)
    rids = [harness.submit(prompt_len=length, max_new_tokens=2) for length in (9, 3, 30, 12)]

    assert order_of_first_tokens(harness) == rids


def test_lpm_uses_a_cached_prefix_before_it_is_evicted(make_scheduler):
    """Two conversations take turns and the pool holds one: fcfs computes everything, lpm every other one."""
    prefixes = [[1 + k % 90 for k in range(start, start + 40)] for start in (0, 7)]
    computed = {}
    for policy in ("fcfs", "lpm"):
        harness = make_scheduler(schedule_policy=policy, max_running_requests=1, num_pages=11, page_size=4)
        harness.submit(prompt=[*prefixes[0], 50], max_new_tokens=2)
        harness.run_until_idle()
        for turn in range(8):
            harness.submit(prompt=[*prefixes[(turn + 1) % 2], 60 + turn], max_new_tokens=2)
        harness.run_until_idle()
        report = harness.scheduler.report(0.0)
        computed[policy] = report.totals.prompt_tokens - report.totals.cached_tokens

    assert computed == {"fcfs": 9 * 41, "lpm": 2 * 41 + 7 * 1}


def test_lpm_falls_back_to_fcfs_above_128_waiting(make_scheduler):
    harness = make_scheduler(schedule_policy="lpm", max_running_requests=1, num_pages=64)
    cached = list(range(1, 33))
    harness.submit(prompt=cached, max_new_tokens=1)
    harness.run_until_idle()
    first = harness.submit(prompt_len=5, max_new_tokens=1)
    for _ in range(MAX_SORTED - 1):
        harness.submit(prompt_len=5, max_new_tokens=1)
    hit = harness.submit(prompt=[*cached, 7], max_new_tokens=1)

    harness.step()  # 129 wait: by arrival
    assert harness.last_pass.verdicts[0].rid == first
    harness.step()  # 128 wait: by cached prefix
    assert harness.last_pass.verdicts[0].rid == hit
    harness.run_until_idle()


def test_lpm_lets_nobody_starve(make_scheduler):
    harness = make_scheduler(schedule_policy="lpm", max_running_requests=1, num_pages=64)
    cached = list(range(1, 33))
    harness.submit(prompt=cached, max_new_tokens=1)
    harness.run_until_idle()
    loser = harness.submit("loser", prompt_len=5, max_new_tokens=1)

    admitted_before = 0
    while not harness.answers[loser].rows:
        harness.submit(prompt=[*cached, 7], max_new_tokens=1)
        harness.submit(prompt=[*cached, 8], max_new_tokens=1)
        harness.step()
        admitted_before += harness.last_pass.verdicts[0].rid != loser
        assert admitted_before <= MAX_OVERTAKEN

    assert admitted_before == MAX_OVERTAKEN


@pytest.mark.fast_cases(6)
@pytest.mark.parametrize("overlap", [0, 1])
@pytest.mark.parametrize("name", get_args(SchedulePolicyName))
def test_every_policy_answers_everybody_while_memory_is_short(make_scheduler, name, overlap):
    """30 requests of three tenants come in two waves; retractions on purpose; the harness checks each pass."""
    harness = make_scheduler(
        schedule_policy=name,
        num_pages=24,
        max_running_requests=4,
        overlap=overlap,
        chaos="retract=0.1:20",
        static_batch_wait=0.05,
        static_batch_size=3,
        tenant_quantum=16,
        length_estimate="tenant-average",
    )
    for wave in range(2):
        for number in range(15):
            harness.submit(
                prompt_len=1 + 7 * number % 40,
                max_new_tokens=1 + 5 * number % 12,
                message={"tenant": f"tenant {number % 3}", "priority": number % 4},
            )
        for _ in range(10 * (1 - wave)):
            harness.step()
    for _ in range(2000):
        if not harness.scheduler.num_unfinished:
            break
        harness.step()  # and not `run_until_idle`: a batch that forms is no stall
    harness.run_until_idle()


def test_fifo_serial_runs_one_at_a_time(make_scheduler):
    harness = make_scheduler(schedule_policy="fifo-serial")
    rids = [harness.submit(prompt_len=8, max_new_tokens=3) for _ in range(4)]
    order = []
    while harness.scheduler.num_unfinished:
        harness.step()
        assert harness.scheduler.report(harness.now_s).num_running_reqs <= 1
        order += [each.rid for each in harness.last_pass.verdicts if each.result is AddReqResult.CONTINUE]
        assert harness.last_pass.rest_reason in (None, Reason.ONE_AT_A_TIME)
    assert order == rids


def test_static_waits_for_the_slowest(make_scheduler):
    harness = make_scheduler(schedule_policy="static", static_batch_size=2, static_batch_wait=0.5)
    slow = harness.submit(prompt_len=8, max_new_tokens=20)
    fast = harness.submit(prompt_len=8, max_new_tokens=2)
    late = harness.submit(prompt_len=8, max_new_tokens=2)

    harness.step()
    reasons = [harness.last_pass.rest_reason]
    while not harness.answers[fast].finish:
        harness.step()
    while not harness.answers[slow].finish:
        assert not harness.answers[late].rows
        harness.step()
    harness.step()
    reasons.append(harness.last_pass.rest_reason)
    assert reasons == [Reason.BATCH_RUNNING, Reason.BATCH_FORMING]  # one of two, for half a second
    wake_s = harness.scheduler.wake_s()
    assert wake_s == pytest.approx(100.5)
    while harness.now_s < wake_s:
        assert not harness.answers[late].rows
        harness.step()
    harness.run_until_idle()


@pytest.mark.parametrize("name", ["fair", "round-robin"])
def test_a_small_tenant_is_not_kept_waiting_by_a_flood(make_scheduler, name):
    """Forty requests of a flood wait before one of another tenant: at most the rest of a turn comes before it."""
    admitted_before = {}
    for policy in ("fcfs", name):
        harness = make_scheduler(schedule_policy=policy, max_running_requests=2, tenant_quantum=32)
        for _ in range(40):
            harness.submit(prompt_len=16, max_new_tokens=4, message={"tenant": "flood"})
        harness.step()
        quiet = harness.submit(prompt_len=16, max_new_tokens=4, message={"tenant": "quiet"})
        order = []
        while quiet not in order:
            harness.step()
            order += [each.rid for each in harness.last_pass.verdicts if each.result is AddReqResult.CONTINUE]
        admitted_before[policy] = order.index(quiet)

    assert admitted_before["fcfs"] == 38
    assert admitted_before[name] <= 2


def test_nobody_overtakes_who_lacks_memory_under_fair(make_scheduler):
    """A large request of the tenant that was served least: fcfs looks past it, fair keeps the place for it."""
    admitted = {}
    for policy in ("fcfs", "fair"):
        harness = make_scheduler(schedule_policy=policy, num_pages=16, admission_estimator="full")
        harness.submit(prompt_len=16, max_new_tokens=20, message={"tenant": "a"})
        harness.step()
        large = harness.submit(prompt_len=40, max_new_tokens=8, message={"tenant": "b"})
        small = harness.submit(prompt_len=4, max_new_tokens=2, message={"tenant": "a"})
        harness.step()
        admitted[policy] = bool(harness.answers[small].rows)
        assert not harness.answers[large].rows
        harness.run_until_idle()

    assert admitted == {"fcfs": True, "fair": False}


def test_adaptives_switches_are_in_the_decision_log(make_scheduler):
    harness = make_scheduler(schedule_policy="adaptive", max_running_requests=4)
    for _ in range(12):
        harness.submit(prompt_len=8, max_new_tokens=40)
    harness.run_until_idle()

    notes = [note for each in harness.scheduler.decisions.passes for note in each.notes]
    assert notes[0] == "fcfs -> lpm at load 1.00"
    policies = [each.policy for each in harness.scheduler.decisions.passes]
    assert (policies[0], policies[-1]) == ("adaptive:fcfs", "adaptive:lpm")
    assert harness.scheduler.report(harness.now_s).policy == "adaptive:lpm"


@pytest.mark.parametrize(("load", "loser"), [(0.1, "young"), (0.5, "low")])
def test_adaptive_takes_the_place_of_the_least_urgent_while_it_goes_by_priority(make_scheduler, load, loser):
    """Memory runs out: under fcfs the one that loses least work is retracted, under priority the least urgent."""
    harness = make_scheduler(
        schedule_policy="adaptive",
        num_pages=12,
        page_size=4,
        priority_preemption=False,
        admission_estimator="none",
    )
    policy = harness.scheduler._policy
    policy._active = policy._for_load(load)
    policy.by_priority = policy._active.by_priority
    policy._num_steps = -1000  # stays
    harness.submit("low", prompt_len=8, max_new_tokens=40, message={"priority": 0})
    for _ in range(3):
        harness.step()
    harness.submit("young", prompt_len=8, max_new_tokens=40, message={"priority": 5})
    for _ in range(60):
        harness.step()
        if harness.last_pass.retractions:
            break

    assert [each.rid for each in harness.last_pass.retractions] == [loser]
    harness.run_until_idle()


def image_share(policy: str, tmp_path: Path) -> float:
    """The share of the device's time of a tenant that sends images, beside one that sends text; a replay agrees.

    Costs: a token 1 ms, an image 0.1 s. A text has 40 tokens, a prompt with an image 10. There is one row.
    """
    harness = record(
        tmp_path / policy,
        schedule_policy=policy,
        num_pages=64,
        max_running_requests=1,
        tenant_quantum=100,
        radix_cache=False,
        num_encoder_rows=8,
        encoder_tile_rows=8,
        encoder_tile_parts=5,
    )
    harness.runner.tile_s = 0.1
    harness.runner.step_s = lambda plan: 0.001 * plan.total_num_scheduled_tokens
    for number in range(60):
        harness.submit(prompt_len=40, max_new_tokens=1, message={"tenant": "text"})
        images = [Image(f"image {number}", 1, 1)]
        harness.submit(prompt_len=2, images=images, max_new_tokens=1, message={"tenant": "images"})
    seconds = {"text": 0.0, "images": 0.0}
    while sum(seconds.values()) < 2.0:
        batch = harness.step()
        if batch is not None and batch.reqs:
            took_s = harness.runner.step_s(batch.plan) + 0.1 * len(batch.plan.encodes)
            seconds[batch.reqs[0].tenant] += took_s
    assert harness.scheduler._requests.waiting, "both have had requests all the time"
    finish(harness)
    (result,) = [replay(run) for run in read_runs(tmp_path / policy)]
    assert result.is_equal
    return seconds["images"] / sum(seconds.values())


def test_tenants_have_equal_shares_of_time_where_one_sends_images(tmp_path):
    """By tokens alone the images' 110 ms would count as 10 tokens, and take 0.92 of the time."""
    assert image_share("fair", tmp_path) == pytest.approx(0.5, abs=0.06)
    assert image_share("round-robin", tmp_path) == pytest.approx(0.5, abs=0.08)
