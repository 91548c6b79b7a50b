"""Tests of `scheduler/admission/shared_prefixes.py`: what one request is computing, others wait for."""

from __future__ import annotations

from engine.scheduler.records.verdict import AddReqResult, Reason
from tests.scheduler.harness import extend_lens

PREFIX = [1 + k % 90 for k in range(64)]


def prompt_tokens_computed(harness):
    report = harness.scheduler.report(0.0)
    return report.totals.prompt_tokens - report.totals.cached_tokens


def test_a_shared_prefix_is_computed_once(make_scheduler):
    """Eight requests share 64 tokens: held back 64 + 8 * 4 tokens are computed, else 8 * 68."""
    computed = {}
    for holds in (True, False):
        harness = make_scheduler(
            page_size=4, num_pages=256, chunked_prefill_size=1024, in_batch_prefix_caching=holds
        )
        for idx in range(8):
            harness.submit(prompt=[*PREFIX, 50 + idx, 2, 3, 4], max_new_tokens=2)
        harness.run_until_idle()
        computed[holds] = prompt_tokens_computed(harness)

    assert computed == {True: 64 + 8 * 4, False: 8 * 68}


def test_those_behind_go_first_meanwhile(make_scheduler):
    harness = make_scheduler(page_size=4, num_pages=256, chunked_prefill_size=1024)
    harness.submit("computes", prompt=[*PREFIX, 50])
    harness.submit("waits", prompt=[*PREFIX, 51])
    harness.submit("other", prompt_len=8)

    batch = harness.step()

    assert [req.rid for req in batch.reqs] == ["computes", "other"]
    held = harness.last_pass.verdicts[1]
    assert (held.rid, held.result, held.reason) == ("waits", AddReqResult.SKIP, Reason.PREFIX_COMING)
    assert extend_lens(harness.step()) == [1]  # of "waits"
    harness.run_until_idle()


def test_a_request_goes_as_soon_as_its_prompt_parts_from_the_other(make_scheduler):
    """The other prompt takes eight steps; this one shares its first 32 tokens and waits for two of them."""
    harness = make_scheduler(
        page_size=4,
        num_pages=256,
        chunked_prefill_size=16,
        max_num_partial_prefills=2,
        max_long_partial_prefills=2,
    )
    long = [1 + k % 90 for k in range(128)]
    harness.submit("long", prompt=long, max_new_tokens=1)
    harness.submit("short", prompt=[*long[:40], 95, 96], max_new_tokens=1)

    waited = 0
    while not harness.answers["short"].rows:
        harness.step()
        waited += any(verdict.reason is Reason.PREFIX_COMING for verdict in harness.last_pass.verdicts)
        assert waited <= 3

    assert waited >= 1
    assert not harness.answers["long"].rows
    harness.run_until_idle()


def test_namespaces_do_not_wait_for_each_other(make_scheduler):
    harness = make_scheduler(page_size=4, num_pages=256, chunked_prefill_size=1024)
    harness.submit(prompt=[*PREFIX, 50], extra_key="a")
    harness.submit(prompt=[*PREFIX, 51], extra_key="b")

    assert extend_lens(harness.step()) == [65, 65]
    harness.run_until_idle()


def test_short_common_beginnings_are_computed_twice_instead_of_waiting(make_scheduler):
    harness = make_scheduler(page_size=4, num_pages=256, chunked_prefill_size=1024)
    for idx in range(2):
        harness.submit(prompt=[*PREFIX[:31], 50 + idx])

    assert extend_lens(harness.step()) == [32, 32]
    harness.run_until_idle()
