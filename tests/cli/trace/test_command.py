"""`engine trace` as a user meets it."""

from __future__ import annotations

import json

import pytest

from engine.cli import main as cli
from engine.scheduler.records.decision_log import Arrived


@pytest.fixture
def log(write_log, sample_engine):
    return write_log(sample_engine(num_requests=20).records())


def page_data(path):
    text = path.read_text(encoding="utf-8")
    return json.loads(text.split('id="data">')[1].split("</script>")[0])


def fails(capsys, *arguments):
    code = cli.run(["trace", *map(str, arguments)])
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    return code, captured.err.strip()


def test_it_writes_a_page_beside_the_log_and_says_where(log, capsys):
    assert cli.run(["trace", str(log)]) == 0

    page = log.with_name("decisions.log.html")
    data = page_data(page)
    assert len(data["requests"]["rid"]) == 20
    assert data["source"] == "decisions.log · started 2026-09-21 14:13:20 UTC · tiny · cpu"
    assert data["pageSize"] == 16
    passes = len(data["passes"]["start"])
    assert capsys.readouterr().out == f"{page}: 20 requests, {passes} passes\n"


def test_it_writes_a_trace_for_perfetto(log, tmp_path, capsys):
    out = tmp_path / "out.json"
    assert cli.run(["trace", str(log), "--format", "perfetto", "-o", str(out)]) == 0
    assert len(json.loads(out.read_text())["traceEvents"]) > 100
    assert cli.run(["trace", str(log), "--format", "perfetto"]) == 0
    assert log.with_name("decisions.log.perfetto.json").read_text() == out.read_text()


def test_a_dash_is_stdout_and_nothing_else_is_written_there(log, capsysbinary):
    assert cli.run(["trace", str(log), "--format", "perfetto", "-o", "-"]) == 0
    assert json.loads(capsysbinary.readouterr().out)["traceEvents"]


def test_a_part_of_the_time_and_some_requests(log, tmp_path):
    out = tmp_path / "part.html"
    whole = tmp_path / "whole.html"
    assert cli.run(["trace", str(log), "-o", str(whole)]) == 0
    rid = page_data(whole)["requests"]["rid"][2]

    assert cli.run(["trace", str(log), "-o", str(out), "--request", rid]) == 0
    assert page_data(out)["requests"]["rid"] == [rid]
    assert len(page_data(out)["passes"]["start"]) == len(page_data(whole)["passes"]["start"])

    assert cli.run(["trace", str(log), "-o", str(out), "--from", "0.5", "--to", "0.8"]) == 0
    begin = page_data(out)["passes"]["start"]
    assert 0.5e6 <= begin[0] <= sum(begin) <= 0.8e6


def test_the_last_of_several_runs_or_the_one_asked_for(write_log, sample_engine, tmp_path, capsys):
    runs = [sample_engine(num_requests=size, seed=size).records() for size in (3, 5, 7)]
    log, out = write_log(*runs), tmp_path / "page.html"
    for arguments, size, source in [([], 7, "run 3 of 3"), (["--run", "2"], 5, "run 2 of 3")]:
        assert cli.run(["trace", str(log), "-o", str(out), *arguments]) == 0
        assert len(page_data(out)["requests"]["rid"]) == size
        assert source in page_data(out)["source"]
        assert capsys.readouterr().out.endswith(f", of {source} (--run N chooses)\n")


def test_a_log_that_a_crash_cut_is_shown_as_far_as_it_goes(log, tmp_path):
    log.write_bytes(log.read_bytes()[:-7])
    out = tmp_path / "page.html"
    assert cli.run(["trace", str(log), "-o", str(out)]) == 0
    assert "the file ends inside a record" in page_data(out)["leftOut"]


def test_mistakes_are_one_line(log, tmp_path, write_log, sample_engine, capsys):
    assert fails(capsys, tmp_path / "none.log")[1].endswith("cannot be read: No such file or directory")

    text = tmp_path / "text.log"
    text.write_text("hello, this is no log\n")
    assert "is not a decision log" in fails(capsys, text)[1]

    code, message = fails(capsys, log, "--run", "2")
    assert (code, message) == (2, f"engine: --run is 2, but {log} has 1 (the last is --run 1)")
    assert fails(capsys, log, "--run", "0")[1] == "engine: --run is 0, but runs are counted from 1"

    code, message = fails(capsys, log, "--request", "nobody")
    assert (code, message) == (2, "engine: there is no request 'nobody' among the 20 of this log")

    code, message = fails(capsys, log, "--from", "5000")
    assert code == 2
    assert message.startswith("engine: there is no pass from 5000 s to the end; the run has passes from 0.")

    code, message = fails(capsys, log, "-o", tmp_path / "no" / "page.html")
    assert (code, "cannot be written: No such file or directory" in message) == (2, True)


def test_a_run_without_a_pass_says_so(write_log, sample_engine, capsys):
    empty = write_log([Arrived(1.0, "a", 1, 1)], name="empty.log")
    assert fails(capsys, empty) == (
        2,
        f"engine: {empty} has no scheduling pass: its server had nothing to do",
    )
    two = write_log(sample_engine(num_requests=2).records(), [], name="two.log")
    assert fails(capsys, two)[1] == (
        f"engine: run 2 of {two} has no scheduling pass: its server had nothing to do; choose another with --run"
    )
