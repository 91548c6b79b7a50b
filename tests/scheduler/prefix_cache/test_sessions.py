"""Tests of `scheduler/prefix_cache/sessions.py`: turns, what is forgotten, and what a session that ends leaves.

`test_prefix_cache_properties.py` has sessions of random prompts, `test_scheduler_properties.py` those of random
schedules.
"""

from __future__ import annotations

from typing import Any

import pytest

from engine.runtime.messages import HintAction, HintOutcome
from engine.scheduler.prefix_cache.sessions import MAX_CONVERSATIONS, MAX_SESSIONS, Sessions
from engine.scheduler.queries.calls import list_sessions
from tests.scheduler.prefix_cache.cached_pool import CachedPool, ids


def test_parallel_samples_are_one_turn():
    sessions = Sessions()
    turns = [sessions.begin_turn("s", "t", group, 1.0).num_turns for group in ("", "", "g", "g", "h", "")]
    assert turns == [1, 2, 3, 3, 4, 5]


def test_the_session_without_a_turn_for_the_longest_time_is_forgotten():
    sessions = Sessions()
    for number in range(MAX_SESSIONS):
        sessions.begin_turn(str(number), "t", "", 1.0)
    sessions.begin_turn("0", "t", "", 2.0)
    sessions.begin_turn("new", "t", "", 3.0)

    assert len(sessions) == MAX_SESSIONS
    assert sessions.begin_turn("0", "t", "", 4.0).num_turns == 3
    assert sessions.begin_turn("1", "t", "", 4.0).num_turns == 1


SYSTEM = [1, 2, 3, 4]


def turn(pool: CachedPool, key: str, prompt: list[int]) -> int:
    """A turn of a session; returns the pages that it found."""
    session = pool.cache.begin_turn(key, "tenant", "", 0.0)
    num_found, lease = pool.begin(prompt)
    pool.cache.release(lease, session=session)
    assert pool.cache.verify([]) == []
    return num_found


def end(pool: CachedPool, key: str, *, close: bool = True) -> int:
    session = pool.cache.session(key)
    assert session is not None
    num_pages = pool.cache.demote(session, close=close)
    assert pool.cache.verify([]) == []
    return num_pages


def test_a_closed_session_goes_before_what_was_not_used_for_longer():
    pool = CachedPool(16)
    turn(pool, "old", [*SYSTEM, 5, 6])
    turn(pool, "new", [*SYSTEM, 7, 8])
    turn(pool, "new", [*SYSTEM, 7, 8, 9])

    assert end(pool, "new") == 3
    pool.cache.evict(3)
    assert [pool.cached([*SYSTEM, *rest]) for rest in ([5, 6], [7, 8, 9])] == [6, 4]
    assert pool.cache.session("new") is None
    assert end(pool, "old") == 6


def test_a_session_of_several_agents_is_dead_with_their_common_prompt():
    pool = CachedPool(32)
    for rest in ([5, 6], [7, 8], [5, 6, 9]):
        turn(pool, "s", [*SYSTEM, *rest])
    session = pool.cache.session("s")
    assert session is not None and (session.num_turns, len(session.ends)) == (3, 2)
    assert end(pool, "s") == 9


def test_what_another_request_goes_on_with_is_covered():
    pool = CachedPool(32)
    turn(pool, "s", [*SYSTEM, 5, 6])
    pool.serve([*SYSTEM, 5, 6, 7])
    assert end(pool, "s") == 0

    turn(pool, "s", [*SYSTEM, 8])
    turn(pool, "t", [*SYSTEM, 8])
    assert end(pool, "s") == 0
    assert end(pool, "t") == 1


def test_the_upper_part_of_dead_pages_that_are_split_is_dead_as_well():
    """A store reads the beginning of a conversation, which splits it and is no use of it."""
    pool = CachedPool(16)
    pool.serve([11, 12, 13, 14])
    turn(pool, "s", [*SYSTEM, 5, 6])
    assert end(pool, "s") == 6
    lease = pool.cache.lock("", pool.cache.match("", ids(*SYSTEM), 4), is_use=False)
    pool.cache.release(lease)

    pool.cache.evict(6)
    assert pool.cached([11, 12, 13, 14]) == 4
    assert pool.cached(SYSTEM) == 0


def test_a_later_use_makes_dead_pages_ordinary_again():
    pool = CachedPool(12)
    turn(pool, "s", [*SYSTEM, 5, 6])
    assert end(pool, "s", close=False) == 6
    assert turn(pool, "s", [*SYSTEM, 5, 6]) == 6
    pool.serve([11, 12, 13, 14])
    pool.cache.evict(4)
    assert pool.cached([11, 12, 13, 14]) == 4
    assert pool.cached([*SYSTEM, 5, 6]) == 2


def test_promises_of_the_tenant_end_with_the_session_and_other_pins_do_not():
    pool = CachedPool(32, max_pinned_pages=16)
    turn(pool, "s", [*SYSTEM, 5, 6])
    session = pool.cache.session("s")
    assert session is not None
    assert pool.cache.promise(session, 5.0) == (6, 6)
    assert pool.cache.pin("", bytes([1, 0, 0, 0, 2, 0, 0, 0]), 5.0) == 2
    assert end(pool, "s") == 6
    assert pool.cache.pinned_pages == 2


def test_a_conversation_ends_where_it_is_evicted_to():
    pool = CachedPool(8)
    turn(pool, "s", [*SYSTEM, 5, 6])
    pool.cache.evict(2)
    session = pool.cache.session("s")
    assert session is not None and len(session.ends) == 1
    assert end(pool, "s", close=False) == 4
    pool.cache.evict(4)
    assert not session.ends
    assert pool.cache.verify([]) == []


def test_a_session_has_so_many_conversations_and_keeps_the_newest():
    pool = CachedPool(2 * MAX_CONVERSATIONS)
    for number in range(MAX_CONVERSATIONS + 5):
        turn(pool, "s", [1000 + number])
    session = pool.cache.session("s")
    assert session is not None and len(session.ends) == MAX_CONVERSATIONS
    assert end(pool, "s") == MAX_CONVERSATIONS


def test_a_forgotten_session_leaves_ordinary_pages():
    pool = CachedPool(8)
    turn(pool, "s", SYSTEM)
    for number in range(MAX_SESSIONS):
        pool.cache.begin_turn(str(number), "", "", 1.0)
    assert pool.cache.session("s") is None
    assert pool.cache.verify([]) == []


PROMPT = list(range(1, 41))


def test_hints_over_the_scheduler(make_scheduler):
    harness = make_scheduler(num_pages=32, page_size=4, cache={"pin_fraction": 0.25})
    assert harness.hint("s", HintAction.CLOSE).outcome is HintOutcome.MISSING
    assert harness.hint("s", HintAction.OPEN).outcome is HintOutcome.ACCEPTED
    assert harness.hint("s", HintAction.OPEN).outcome is HintOutcome.REJECTED
    harness.submit("r", prompt=PROMPT, message={"session": "s"}, max_new_tokens=2)
    assert harness.scheduler._parts.requests.by_id["r"].turn == 1
    harness.run_until_idle()

    kept = harness.hint("s", HintAction.RETAIN, 60.0)
    assert (kept.outcome, kept.detail) == (
        HintOutcome.CLIPPED,
        "32 of 40 tokens are kept for 60 s; the quota is --pin-fraction",
    )
    assert harness.scheduler.report(0.0).pinned_tokens == 32
    assert harness.hint("s", HintAction.DEMOTE).detail == "40 tokens are evicted first"
    assert harness.hint("s", HintAction.CLOSE).outcome is HintOutcome.ACCEPTED
    assert harness.hint("s", HintAction.CLOSE).outcome is HintOutcome.MISSING


@pytest.mark.parametrize("keep_s", [None, 60.0])
def test_a_session_that_is_closed_while_a_turn_runs_is_dead_when_it_ends(make_scheduler, keep_s):
    harness = make_scheduler(num_pages=32, page_size=4, cache={"pin_fraction": 0.5})
    harness.submit(prompt=[50] * 16, max_new_tokens=1)
    harness.submit(prompt=PROMPT, message={"session": "s", "keep_s": keep_s}, max_new_tokens=9)
    harness.step()
    done = harness.hint("s", HintAction.CLOSE)
    assert (done.outcome, done.detail) == (
        HintOutcome.DEFERRED,
        "0 tokens are evicted first; of 1 unfinished requests, when they end",
    )
    harness.run_until_idle()
    assert harness.scheduler.report(0.0).pinned_tokens == 0
    harness.submit(prompt=[60] * 100, max_new_tokens=1)
    harness.run_until_idle()
    older = harness.submit(prompt=[50] * 16, max_new_tokens=1)
    harness.run_until_idle()
    assert harness.answers[older].rows[-1].usage.cached_tokens == 12


def test_turns_are_counted_by_what_they_found_and_sessions_are_listed(make_scheduler):
    harness = make_scheduler(num_pages=32, page_size=4)

    def ask(prompt: list[int], session: str) -> None:
        harness.submit(prompt=prompt, message={"session": session}, max_new_tokens=1)
        harness.run_until_idle()
        harness.now_s += 1.0

    def outcomes() -> Any:
        return harness.scheduler.report(0.0).session_turns

    ask(PROMPT, "s")
    assert outcomes() == {}
    ask([*PROMPT, *range(50, 60)], "s")
    ask([*PROMPT, *range(50, 60), 9], "s")
    assert outcomes() == {"hit": 2}
    ask([*PROMPT[:20], *range(70, 80)], "s")
    assert outcomes() == {"hit": 2, "rewritten": 1}
    ask([5] * 8, "t")

    now_s = harness.now_s
    listed = list_sessions(harness.prefix_cache, 1, 4, now_s)
    assert (listed.total, [each.session for each in listed.sessions]) == (2, ["t"])
    [_, state] = list_sessions(harness.prefix_cache, 9, 4, now_s).sessions
    assert (state.turns, state.conversations, state.cached_tokens) == (4, 2, 56)
    assert state.idle_s == pytest.approx(2.0, abs=0.5)

    for number in range(20):
        harness.submit(prompt=[100 - number] * 40, max_new_tokens=1)
        harness.run_until_idle()
    ask([*PROMPT, *range(50, 60), 9, 9], "s")
    assert outcomes() == {"hit": 2, "rewritten": 1, "evicted": 1}
    assert harness.scheduler.report(0.0).num_sessions == 2
