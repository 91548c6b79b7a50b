"""Tests of `scheduler/policy/`: each policy by the effect it exists for."""

from engine.scheduler.policy.base import MAX_OVERTAKEN
from engine.scheduler.policy.lpm import MAX_SORTED
from engine.scheduler.verdict import AddReqResult


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
        computed[policy] = report.prompt_tokens_total - report.cached_tokens_total

    assert computed == {"fcfs": 9 * 41, "lpm": 2 * 41 + 7 * 1}


def test_lpm_keeps_the_order_of_arrival_among_equals(make_scheduler):
    harness = make_scheduler(schedule_policy="lpm", max_running_requests=1)
    rids = [harness.submit(prompt_len=5, max_new_tokens=2) for _ in range(4)]

    assert order_of_first_tokens(harness) == rids


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
