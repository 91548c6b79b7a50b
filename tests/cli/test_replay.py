"""`engine replay`: what it prints and its exit codes; `--set` and its mistakes."""

from __future__ import annotations

import sys
import types
from pathlib import Path

import pytest

from engine.cli import main as cli
from engine.cli.console import OnProgress
from engine.cli.replay import parse_changes
from engine.runtime.config.engine_config import CacheConfig, EngineConfig, SchedulerConfig
from engine.runtime.config.server_config import LogConfig
from engine.runtime.errors import ConfigError
from engine.runtime.feasibility import Capacity
from engine.runtime.messages import GenerateRequest
from engine.runtime.sampling_params import SamplingParams
from engine.runtime.step_plan import StepResult
from engine.scheduler.journal.log_file import read_runs
from engine.scheduler.journal.log_writer import LogWriter
from engine.scheduler.journal.recorder import make_recorder
from engine.scheduler.records.decision_log import PassRecord
from engine.scheduler.scheduler import Scheduler


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """A run of one request with three tokens."""
    path = tmp_path / "decisions.log"
    config = EngineConfig(
        scheduler=SchedulerConfig(chunked_prefill_size=8), log=LogConfig(decision_log=str(path))
    )
    capacity, eos = Capacity(128, 16, 16, 4, 97), frozenset({0})
    scheduler = Scheduler(config.scheduler, CacheConfig(), capacity, eos)
    recorder = make_recorder(config, capacity, eos, scheduler, wall_s=1e9, now_s=1.0)
    sampling = SamplingParams(max_new_tokens=3, seed=1, ignore_eos=True)
    request = GenerateRequest("r1", bytes(4 * 20), sampling)
    recorder.received(request, 1.0)
    scheduler.handle(request, 1.0)
    now_s = 2.0
    while True:
        recorder.planning(now_s)
        batch = scheduler.next_batch(now_s)
        recorder.planned(batch)
        if batch is None:
            break
        scheduler.settle(batch, StepResult(batch.plan.step_id, b"\5\0\0\0" * len(batch.sampled)), now_s + 0.1)
        recorder.settled()
        now_s += 1.0
    recorder.close()
    return path


def change_pass(path: Path, step_id: int) -> None:
    ((header, records),) = [(run.header, list(run.records)) for run in read_runs(path)]
    path.unlink()
    writer = LogWriter(path, header)
    for record in records:
        if isinstance(record, PassRecord) and record.step_id == step_id:
            record.num_running += 1
        writer.add(record)
    writer.close()


def test_a_run_that_is_made_again(log, capsys):
    assert cli.run(["replay", str(log)]) == 0

    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("run 1, ")
    assert "16 pages of 16, policy fcfs, chunks of 8, mixed steps" in first
    assert second.startswith("  4 passes, 4 equal (100 %), digest ")
    assert "; 1 request, 4 steps in " in second


def test_a_run_that_differs(log, capsys):
    change_pass(log, step_id=3)

    assert cli.run(["replay", str(log)]) == 1

    out = capsys.readouterr().out
    assert "4 passes, 2 equal (50.00 %)" in out
    assert (
        "first difference after 2 equal passes, at 4.000000 s: the pass of step 3 differs in num_running"
        in out
    )
    assert "num_running" in out and "logged" in out and "replayed" in out


def test_a_damaged_run_says_so(log, capsys):
    log.write_bytes(log.read_bytes()[:-2])

    assert cli.run(["replay", str(log)]) == 4

    out = capsys.readouterr().out
    assert "equal (100 % of what could be read)" in out
    assert "note: " in out and "the rest of the run is lost" in out


def test_a_run_that_is_lost_as_a_whole_says_so(log, capsys):
    whole = log.read_bytes()
    log.write_bytes(whole[:40] + whole)

    assert cli.run(["replay", str(log)]) == 4

    out = capsys.readouterr().out
    assert "equal (100 %)" in out
    assert "a run is lost: damaged at byte 0" in out


def test_a_difference_weighs_more_than_damage(log, capsys):
    change_pass(log, step_id=3)
    log.write_bytes(log.read_bytes()[:-2])

    assert cli.run(["replay", str(log)]) == 1


def test_a_run_of_an_engine_with_fewer_settings_is_replayed(log, capsys):
    ((header, records),) = [(run.header, list(run.records)) for run in read_runs(log)]
    log.unlink()
    del header.scheduler["phases"]
    writer = LogWriter(log, header)
    for record in records:
        writer.add(record)
    writer.close()

    assert cli.run(["replay", str(log)]) == 0
    assert "mixed steps" in capsys.readouterr().out


def test_a_run_of_another_engine_says_so(log, capsys):
    ((header, records),) = [(run.header, list(run.records)) for run in read_runs(log)]
    log.unlink()
    header.engine_version = "0.0.1"
    writer = LogWriter(log, header)
    for record in records:
        writer.add(record)
    writer.close()

    assert cli.run(["replay", str(log)]) == 0
    assert "note: this is engine" in capsys.readouterr().out


@pytest.fixture
def runs(log: Path) -> Path:
    """Three runs: one that differs, one as it was, one without requests."""
    whole = log.read_bytes()
    ((header, _),) = [(run.header, list(run.records)) for run in read_runs(log)]
    change_pass(log, step_id=3)
    log.write_bytes(log.read_bytes() + whole)
    LogWriter(log, header).close()
    return log


def test_one_of_several_runs(runs, capsys):
    assert cli.run(["replay", str(runs)]) == 1
    assert [line[:6] for line in capsys.readouterr().out.splitlines() if line.startswith("run")] == [
        "run 1,",
        "run 2,",
        "run 3,",
    ]

    assert cli.run(["replay", str(runs), "--run", "2"]) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("run 2, ") and "4 passes, 4 equal (100 %)" in second

    for number, message in [
        ("4", f"--run is 4, but {runs} has 3 (the last is --run 3)"),
        ("0", "--run is 0, but runs are counted from 1"),
    ]:
        for more in ([], ["--set", "schedule_policy=lpm"]):
            assert cli.run(["replay", str(runs), "--run", number, *more]) == 2
            assert capsys.readouterr().err == f"engine: {message}\n"


def test_a_chosen_run_is_not_damaged_by_the_others(log, capsys):
    whole = log.read_bytes()
    log.write_bytes(whole + whole[:-2])
    assert cli.run(["replay", str(log)]) == 4
    assert cli.run(["replay", str(log), "--run", "1"]) == 0
    assert "note:" not in capsys.readouterr().out.partition("run 1")[2].partition("run 1")[2]


def test_what_if_takes_the_run_that_is_chosen_else_the_last_with_steps(runs, capsys, monkeypatch):
    asked = []
    module = types.ModuleType("engine.simulator.what_if")

    def what_if(path: Path, changes: dict[str, str], *, number: int, on_progress: OnProgress) -> str:
        asked.append(number)
        return "better"

    vars(module)["what_if"] = what_if
    monkeypatch.setitem(sys.modules, "engine.simulator.what_if", module)

    assert cli.run(["replay", str(runs), "--set", "schedule_policy=lpm"]) == 0
    assert capsys.readouterr().out == "better\nof run 2 of 3 (--run N chooses)\n"
    assert asked == [2]

    assert cli.run(["replay", str(runs), "--set", "schedule_policy=lpm", "--run", "1"]) == 1
    assert "run 1 differs after 2 of 4 passes" in (err := capsys.readouterr().err)
    assert err.endswith("; --run N chooses another\n")


def test_a_file_that_is_no_log(tmp_path, capsys):
    assert cli.run(["replay", str(tmp_path / "none")]) == 2
    assert "cannot be read: No such file or directory" in capsys.readouterr().err


def test_changes_are_read_as_settings():
    assert parse_changes(["schedule-policy=lpm", "chunked_prefill_size = 4096", "radix_cache=no"]) == {
        "schedule_policy": "lpm",
        "chunked_prefill_size": "4096",
        "radix_cache": "False",
    }


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("schedule_policy", "--set is 'schedule_policy', but it must look like schedule_policy=lpm"),
        ("schedule_polcy=lpm", "unknown setting 'schedule_polcy'; did you mean 'schedule_policy'?"),
        ("schedule_policy=lpn", "schedule_policy is 'lpn', but it must be one of"),
        ("chunked_prefill_size=many", "chunked_prefill_size is 'many', but it must be a whole number"),
        ("chunked_prefill_size=auto", "'auto' depends on the machine; name a value"),
        ("port=80", "--set port: the scheduler does not use it"),
    ],
)
def test_mistakes_in_changes_are_one_line(log, capsys, change, message):
    with pytest.raises(ConfigError) as caught:
        parse_changes([change])
    assert message in str(caught.value)

    assert cli.run(["replay", str(log), "--set", change]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_what_if_is_asked_with_the_changes(log, capsys, monkeypatch):
    asked = []
    module = types.ModuleType("engine.simulator.what_if")

    def what_if(path: Path, changes: dict[str, str], *, number: int, on_progress: OnProgress) -> str:
        asked.append((path, changes, number))
        return "TTFT 12 % lower, " * 10

    vars(module)["what_if"] = what_if
    monkeypatch.setitem(sys.modules, "engine.simulator.what_if", module)

    code = cli.run(["replay", str(log), "--set", "schedule_policy=lpm", "--set", "look_ahead=2"])

    assert code == 0
    assert asked == [(log, {"schedule_policy": "lpm", "look_ahead": "2"}, 1)]
    (line,) = capsys.readouterr().out.splitlines()  # whatever the width: nobody cuts lines of a pipe
    assert line == "TTFT 12 % lower, " * 10


def test_what_if_needs_a_log_that_can_be_replayed(log, capsys):
    change_pass(log, step_id=3)

    assert cli.run(["replay", str(log), "--set", "schedule_policy=lpm"]) == 1

    err = capsys.readouterr().err
    assert "run 1 differs after 2 of 4 passes" in err
    assert err.count("\n") == 1
