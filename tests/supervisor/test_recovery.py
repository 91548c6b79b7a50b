"""Restarts of lost processes: the budget, and the supervisor with children of `fake_room`."""

from __future__ import annotations

import os
import signal

import pytest

from engine.supervisor.recovery import WINDOW_S, RestartBudget

WATCHDOG_S = 6.0  # a busy machine must not make anybody look hung

# ---------------------------------------------------------------- the budget


def test_so_many_restarts_and_no_more():
    budget = RestartBudget(2)

    assert budget.take(10.0, "first") is None
    assert budget.take(20.0, "second") is None
    end = budget.take(30.0, "third")

    assert end is not None
    assert end.startswith("first; that was the first of 3 crashes within 5 minutes, and --max-restarts is 2")
    assert end.endswith("third")


def test_old_restarts_are_forgotten():
    budget = RestartBudget(1)

    assert budget.take(9.0, "first") is None
    budget.succeeded(10.0)
    assert budget.take(10.0 + WINDOW_S, "too soon") is not None
    assert budget.take(10.1 + WINDOW_S, "second") is None
    end = budget.take(10.2 + WINDOW_S, "third")

    assert end is not None
    assert end.startswith("second")


def test_restarts_that_come_to_no_end_are_not_forgotten_however_long_they_take():
    budget = RestartBudget(2)

    assert budget.take(0.0, "lost") is None
    assert budget.take(2 * WINDOW_S, "not ready") is None
    end = budget.take(4 * WINDOW_S, "not ready")

    assert end is not None
    assert end.startswith("lost; that was the first of 3 crashes")


def test_without_restarts_the_cause_is_all_there_is_to_say():
    assert RestartBudget(0).take(10.0, "the cause") == "the cause"


# ---------------------------------------------------------------- real processes


def lose(engine, role, signum=signal.SIGKILL):
    """Send a signal to a process; the ids that all had before."""
    pids = engine.pids
    os.kill(pids[role], signum)
    return pids


def restarted(engine, before):
    """Which roles have another process now."""
    return {role for role, pid in engine.pids.items() if pid != before[role]}


def stop(engine):
    engine.process.send_signal(signal.SIGTERM)
    assert engine.end() == (0, "stopped")
    assert (engine.tmp / "drained").exists()


@pytest.mark.real_process
def test_a_scheduler_that_stands_by_replaces_a_lost_one(start_engine):
    engine = start_engine(max_restarts=2, standby_scheduler=True)
    engine.read()
    for _ in range(2):
        before = engine.pids
        standby = engine.wait_for_standby()

        lose(engine, "scheduler")

        assert engine.wait_for_note("peers-back") == "8"
        (engine.tmp / "peers-back").unlink()
        assert engine.pids["scheduler"] == standby
        assert restarted(engine, before) == {"scheduler", "detokenizer"}
    spare = engine.wait_for_standby()
    stop(engine)
    assert engine.wait_for_end(spare, 0)


@pytest.mark.fast_cases(1)
@pytest.mark.real_process
@pytest.mark.parametrize(
    ("lost", "again"),
    [("scheduler", {"scheduler", "detokenizer"}), ("detokenizer", {"detokenizer"})],
)
def test_a_lost_process_is_replaced_and_the_tokenizer_manager_told(start_engine, lost, again):
    engine = start_engine(max_restarts=1)
    engine.read()
    before = lose(engine, lost)

    assert engine.wait_for_note("peers-lost").startswith(f"{lost} was killed by SIGKILL")
    assert engine.wait_for_note("peers-back") == "8"
    assert restarted(engine, before) == again
    assert "restarting processes=" in engine.log
    assert engine.log.count("recovered restart=1") <= 1  # written a moment after the tokenizer manager knows
    stop(engine)


@pytest.mark.slow
@pytest.mark.real_process
def test_a_lost_rank_takes_its_group_along(start_engine):
    engine = start_engine(max_restarts=1, tp=3)
    engine.read()
    before = lose(engine, "model_runner_2")

    engine.wait_for_note("peers-back")

    assert restarted(engine, before) == {*before} - {"tokenizer_manager"}
    stop(engine)


@pytest.mark.slow
@pytest.mark.real_process
def test_a_lost_tokenizer_manager_is_replaced_alone(start_engine):
    engine = start_engine(max_restarts=1)
    engine.read()
    before = lose(engine, "tokenizer_manager")

    engine.wait_for_note("life-1")

    assert restarted(engine, before) == {"tokenizer_manager"}
    stop(engine)


@pytest.mark.slow
@pytest.mark.real_process
def test_one_that_hangs_shows_where_and_is_replaced(start_engine):
    engine = start_engine("detokenizer=hangs_at_first", max_restarts=1, watchdog_timeout=WATCHDOG_S)
    engine.read()
    (engine.tmp / "hang").touch()

    assert engine.wait_for_note("peers-lost").startswith("detokenizer hangs: no heartbeat for")
    engine.wait_for_note("peers-back")

    assert "in hangs_when_told" in engine.log
    stop(engine)


@pytest.mark.real_process
def test_a_process_that_is_lost_again_and_again_ends_the_engine_with_the_first_cause(start_engine):
    engine = start_engine("scheduler=crashes_when_told", max_restarts=2)
    engine.read()
    (engine.tmp / "crash").touch()

    code, message = engine.end()

    assert code == 1
    assert message.startswith("scheduler was killed by SIGSEGV; that was the first of 3 crashes")
    assert (engine.tmp / "clients-were-told").read_text() == message


@pytest.mark.slow
@pytest.mark.real_process
def test_what_the_user_must_mend_is_not_tried_again(start_engine):
    engine = start_engine("detokenizer=breaks_its_configuration", max_restarts=3)
    engine.read()
    lose(engine, "detokenizer")

    assert engine.end() == (2, "model.gguf is gone; download it again")


@pytest.mark.real_process
def test_all_that_are_lost_at_once_are_replaced(start_engine):
    engine = start_engine(max_restarts=3)
    engine.read()
    before = engine.pids
    for pid in before.values():
        os.kill(pid, signal.SIGKILL)
    while restarted(engine, before) != set(before) or "recovered restart=" not in engine.log:
        assert not engine.wait_for_end(engine.process.pid, 0.01), engine.log

    stop(engine)


@pytest.mark.slow
@pytest.mark.real_process
def test_a_loss_during_a_recovery_is_another_one(start_engine):
    engine = start_engine("scheduler=hangs_at_its_second_start", max_restarts=3)
    engine.read()
    lose(engine, "scheduler")
    engine.wait_for_note("hangs")
    (engine.tmp / "hangs").unlink()
    lose(engine, "detokenizer")
    lose(engine, "scheduler")

    engine.wait_for_note("hangs")

    assert not (engine.tmp / "peers-back").exists()
    stop(engine)


@pytest.mark.real_process
def test_a_stop_during_a_recovery_leaves_nothing(start_engine):
    engine = start_engine("scheduler=hangs_at_its_second_start", max_restarts=1)
    engine.read()
    lose(engine, "scheduler")
    engine.wait_for_note("hangs")

    stop(engine)
