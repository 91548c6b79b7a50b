"""The supervisor with real processes, whose children are those of `fake_room`."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import stat
from pathlib import Path

import pytest

pytestmark = pytest.mark.real_process

WATCHDOG_S = 6.0  # longer than a busy machine keeps a healthy process from a heartbeat


# ---------------------------------------------------------------- a good life


def test_starts_under_telling_titles_hands_on_the_capacity_and_stops_after_a_drain(start_engine):
    engine = start_engine()

    assert engine.read() == {"url": "http://localhost/8", "num_pages": 8, "details": {"port": "none"}}
    (socket_dir,) = engine.tmp.glob("engine-*")
    assert stat.S_IMODE(socket_dir.stat().st_mode) == 0o700
    titles = {role: Path(f"/proc/{pid}/cmdline").read_text().strip("\0") for role, pid in engine.pids.items()}
    assert titles == {role: f"engine: {role}" for role in ("scheduler", "detokenizer", "tokenizer_manager")}
    engine.process.send_signal(signal.SIGTERM)

    assert engine.end() == (0, "stopped")
    assert (engine.tmp / "drained").exists()
    assert list(engine.tmp.glob("*-stopped-before-the-drain")) == []


def test_the_listening_socket_is_the_tokenizer_managers_alone(start_engine):
    """Another process that held it would keep the port from the tokenizer manager that replaces a lost one."""
    engine = start_engine()
    engine.read()

    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    listening = {f"socket:[{row[9]}]" for row in rows if row[3] == "0A"}
    pids = {**engine.pids, "supervisor": engine.process.pid}
    assert {name for name, pid in pids.items() if listening & open_files(pid)} == {"tokenizer_manager"}


def open_files(pid: int) -> set[str]:
    found = set()
    for each in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            found.add(os.readlink(each))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGHUP])
def test_other_polite_signals_drain_too(start_engine, signum):
    engine = start_engine()
    engine.read()

    engine.process.send_signal(signum)

    assert engine.end() == (0, "stopped")
    assert (engine.tmp / "drained").exists()


def test_children_leave_it_to_the_supervisor_when_everybody_gets_the_signal(start_engine):
    engine = start_engine()
    engine.read()

    for pid in engine.pids.values():
        os.kill(pid, signal.SIGINT)
        os.kill(pid, signal.SIGTERM)
        os.kill(pid, signal.SIGHUP)
    engine.process.send_signal(signal.SIGTERM)

    assert engine.end() == (0, "stopped")
    assert (engine.tmp / "drained").exists()


def test_a_second_signal_ends_the_drain_at_once(start_engine):
    engine = start_engine("tokenizer_manager=never_drains", drain_timeout=1000.0)
    engine.read()

    engine.process.send_signal(signal.SIGINT)
    engine.wait_for_note("draining")
    engine.process.send_signal(signal.SIGINT)

    assert engine.end() == (128 + signal.SIGINT, "stopped at once by SIGINT")
    assert not (engine.tmp / "drained").exists()


@pytest.mark.slow
def test_a_drain_has_an_end(start_engine):
    engine = start_engine("tokenizer_manager=never_drains", drain_timeout=0.1)
    engine.read()

    engine.process.send_signal(signal.SIGTERM)

    assert engine.end() == (0, "stopped")


@pytest.mark.slow
def test_a_tokenizer_manager_that_hangs_in_the_drain_is_a_failure_with_its_name(start_engine):
    engine = start_engine("tokenizer_manager=hangs_in_the_drain", drain_timeout=0.1)
    engine.read()

    engine.process.send_signal(signal.SIGTERM)
    code, message = engine.end()

    assert code == 1
    assert message.startswith("tokenizer_manager hung while it stopped and was killed")
    assert "killing children=tokenizer_manager" in engine.log


@pytest.mark.slow
def test_a_signal_while_starting_stops_at_once(start_engine):
    engine = start_engine("scheduler=hangs_at_start")
    engine.wait_for_note("hangs")

    engine.process.send_signal(signal.SIGTERM)

    assert engine.end() == (128 + signal.SIGTERM, "stopped at once by SIGTERM")


@pytest.mark.slow
def test_a_child_that_does_not_listen_is_killed(start_engine):
    engine = start_engine("scheduler=keeps_going")
    engine.read()

    engine.process.send_signal(signal.SIGTERM)

    assert engine.end() == (0, "stopped")
    assert "killing children=scheduler" in engine.log


# ---------------------------------------------------------------- failures at start


@pytest.mark.slow
def test_what_the_user_can_mend_is_said_in_its_own_words(start_engine):
    engine = start_engine("scheduler=refuses_the_configuration")

    assert engine.end() == (2, "model.gguf is truncated; download it again")
    assert "Traceback" not in engine.log


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("role", ["scheduler", "detokenizer", "tokenizer_manager"])
def test_a_child_that_fails_at_start_ends_the_engine_with_its_error(start_engine, role):
    engine = start_engine(f"{role}=raises_at_start")

    code, message = engine.end()

    assert code == 1
    assert re.fullmatch(
        rf"{role} failed: RuntimeError: the weights are odd "
        r"\(fake_room/process\.py:\d+ in raises_at_start\)",
        message,
    )
    assert engine.log.count("Traceback") == 1


@pytest.mark.slow
def test_a_child_that_vanishes_at_start_ends_the_engine(start_engine):
    engine = start_engine("detokenizer=exits_at_start")

    code, message = engine.end()

    assert (code, message.partition(" without")[0]) == (1, "detokenizer exited with code 3")


@pytest.mark.slow
def test_a_room_that_cannot_be_imported_is_reported(start_engine):
    engine = start_engine("scheduler=no_such_behavior")

    code, message = engine.end()

    assert code == 1
    assert message.startswith("scheduler failed: KeyError: 'no_such_behavior'")


def test_a_child_that_hangs_at_start_is_named_and_shows_where(start_engine):
    engine = start_engine(
        "scheduler=hangs_at_start", startup_timeout=600.0, an_hour_after=("hangs", "detokenizer")
    )

    code, message = engine.end()

    assert code == 1
    assert message.startswith("scheduler not ready 600 s after the start")
    assert "in hangs_at_start" in engine.log  # faulthandler's traceback


# ---------------------------------------------------------------- failures later


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("role", ["scheduler", "detokenizer", "tokenizer_manager"])
def test_a_killed_child_stops_everything_with_its_name(start_engine, role):
    engine = start_engine()
    engine.read()

    os.kill(engine.pids[role], signal.SIGKILL)
    code, message = engine.end()

    assert code == 1
    assert message.startswith(f"{role} was killed by SIGKILL")
    if role != "tokenizer_manager":
        assert (engine.tmp / "clients-were-told").read_text() == message


@pytest.mark.slow
def test_a_crash_in_native_code_is_named_and_shows_where(start_engine):
    engine = start_engine("scheduler=crashes")

    code, message = engine.end()

    assert (code, message) == (1, "scheduler was killed by SIGSEGV")
    assert "in crashes" in engine.log


@pytest.mark.slow
def test_an_error_later_is_the_root_cause_on_one_line(start_engine):
    engine = start_engine("scheduler=raises_later")

    code, message = engine.end()

    assert code == 1
    assert message.startswith("scheduler failed: RuntimeError: the books do not balance")
    assert "\n" not in message


@pytest.mark.slow
def test_a_child_that_just_leaves_is_no_success(start_engine):
    engine = start_engine("scheduler=exits_later")

    code, message = engine.end()

    assert (code, message.partition(" without")[0]) == (1, "scheduler exited with code 0")


def test_a_child_that_hangs_up_and_lives_ends_the_engine(start_engine):
    engine = start_engine("detokenizer=hangs_up")

    code, message = engine.end()

    assert (code, message) == (1, "detokenizer closed its control channel and lives on; it is killed")


@pytest.mark.slow
def test_a_child_that_hangs_is_found_by_its_silence(start_engine):
    engine = start_engine("detokenizer=hangs_when_told", watchdog_timeout=WATCHDOG_S)

    assert engine.read()["url"]
    (engine.tmp / "hang").touch()
    code, message = engine.end()

    assert code == 1
    assert message.startswith("detokenizer hangs: no heartbeat for 6 s")
    assert "in hangs_when_told" in engine.log
    assert (engine.tmp / "clients-were-told").read_text() == message


@pytest.mark.slow
def test_a_stopped_child_is_killed(start_engine):
    engine = start_engine(watchdog_timeout=WATCHDOG_S)
    engine.read()

    os.kill(engine.pids["scheduler"], signal.SIGSTOP)
    code, message = engine.end()

    assert code == 1
    assert message.startswith("scheduler hangs: no heartbeat for")
    assert message.endswith("; it was stopped by a signal (SIGSTOP or SIGTSTP) and has not been continued")


def test_what_a_child_has_started_ends_with_it(start_engine):
    engine = start_engine("scheduler=starts_a_grandchild")
    engine.read()
    grandchild = int(engine.wait_for_note("grandchild"))
    assert not engine.wait_for_end(grandchild, 0)

    os.kill(engine.pids["scheduler"], signal.SIGKILL)
    engine.end()

    assert engine.wait_for_end(grandchild)


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("state", ["ready", "starting"])
def test_children_are_gone_within_two_seconds_of_a_killed_supervisor(start_engine, state):
    engine = start_engine("scheduler=hangs_at_start" if state == "starting" else "")
    if state == "ready":
        engine.read()
    else:
        engine.wait_for_note("hangs")
    pids = list(engine.pids.values())
    assert len(pids) == 3

    engine.process.kill()

    # Two seconds in which this process was awake: nobody dies on a machine that stands still.
    alive = pids
    for _ in range(200):
        engine.wait_for_end(alive[0], 0.01)
        alive = [pid for pid in alive if not engine.wait_for_end(pid, 0.0)]
        if not alive:
            break
    assert alive == []


# ---------------------------------------------------------------- ranks of a group


@pytest.mark.slow
def test_ranks_are_started_and_stopped_like_the_others(start_engine):
    engine = start_engine(tp=3)
    engine.read()
    assert set(engine.pids) == {
        "scheduler",
        "detokenizer",
        "tokenizer_manager",
        "model_runner_1",
        "model_runner_2",
    }
    title = Path(f"/proc/{engine.pids['model_runner_2']}/cmdline").read_text().strip("\0")
    assert title == "engine: model_runner_2"

    engine.process.send_signal(signal.SIGTERM)

    assert engine.end() == (0, "stopped")


def test_who_lost_the_others_is_not_the_cause_if_another_dies(start_engine):
    engine = start_engine("scheduler=loses_the_others model_runner=dies_a_little_later", tp=2)

    code, message = engine.end()

    assert (code, message.partition(" without")[0]) == (1, "model_runner of rank 1 exited with code 3")
    assert "Traceback" not in engine.log


@pytest.mark.slow
def test_whom_the_others_wait_for_is_the_cause_if_nobody_dies(start_engine):
    engine = start_engine("scheduler=loses_the_others model_runner=keeps_going", tp=2)

    code, message = engine.end()

    assert code == 1
    assert message.startswith(
        "model_runner of rank 1 did not take part in a step any more: rank 0 of 2 lost the others in all_reduce"
    )
    assert "in keeps_going" in engine.log


@pytest.mark.slow
def test_ranks_that_all_lost_each_other_say_so(start_engine):
    engine = start_engine("scheduler=loses_the_others model_runner=loses_the_others", tp=2)

    code, message = engine.end()

    assert code == 1
    assert message.startswith("the ranks lost each other: rank 0 of 2 lost")
    assert "; rank 1 of 2 lost" in message


@pytest.mark.slow
def test_who_waits_for_a_silent_rank_is_heard_and_the_silent_one_is_named(start_engine):
    engine = start_engine(
        "scheduler=waits_for_others model_runner=hangs_later", tp=2, watchdog_timeout=WATCHDOG_S
    )

    code, message = engine.end()

    assert code == 1
    assert message.startswith("model_runner of rank 1 hangs: no heartbeat for 6 s")
