"""Tests of `scheduler/prefix_cache/sessions.py`: turns, and what is forgotten."""

from __future__ import annotations

from engine.scheduler.prefix_cache.sessions import MAX_SESSIONS, Sessions


def test_parallel_samples_are_one_turn():
    sessions = Sessions()
    turns = [sessions.begin_turn("s", group, 1.0).num_turns for group in ("", "", "g", "g", "h", "")]
    assert turns == [1, 2, 3, 3, 4, 5]


def test_the_session_without_a_turn_for_the_longest_time_is_forgotten():
    sessions = Sessions()
    for number in range(MAX_SESSIONS):
        sessions.begin_turn(str(number), "", 1.0)
    sessions.begin_turn("0", "", 2.0)
    sessions.begin_turn("new", "", 3.0)

    assert len(sessions) == MAX_SESSIONS
    assert sessions.begin_turn("0", "", 4.0).num_turns == 3
    assert sessions.begin_turn("1", "", 4.0).num_turns == 1
