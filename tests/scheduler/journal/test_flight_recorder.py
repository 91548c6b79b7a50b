"""The last decisions, as the process that reads a crash finds them."""

from __future__ import annotations

import os

import pytest

from engine.launch.child.crash_report import DECISION_NAMES
from engine.runtime.messages import AbortRequest, FinishKind, GenerateRequest
from engine.runtime.sampling_params import SamplingParams
from engine.scheduler.journal.flight_recorder import (
    FlightRecorder,
    decision_lines,
    read_decisions,
    started_requests,
)
from engine.scheduler.journal.recorder import Recorder
from engine.scheduler.records.decision_log import Arrived, DecisionLog, Finished, PassRecord, Settled
from engine.scheduler.records.verdict import AddReqResult, Reason, Verdict


@pytest.fixture
def decisions() -> DecisionLog:
    return DecisionLog()


def request(rid: str) -> GenerateRequest:
    return GenerateRequest(rid, b"\1\0\0\0", SamplingParams(), 0.0)


def test_what_was_decided_can_be_read_while_the_recorder_lives(decisions, tmp_path):
    recorder = FlightRecorder(Recorder(), decisions, tmp_path)
    decisions.append(Arrived(1.0, "r1", 20, 5))
    recorder.planning(1.5)
    decisions.append(PassRecord(2.0, step_id=7, num_decodes=1))
    recorder.planned(None)
    decisions.append(Settled(2.5, 7, 0.25, [Finished("r1", FinishKind.ERROR, 3, "odd")], b"\1\2\3\4"))
    recorder.settled()

    assert [type(record) for record in read_decisions(tmp_path)] == [Arrived, PassRecord, Settled]
    assert decision_lines(tmp_path) == [
        "   -1.500 s  arrived rid=r1 prompt_len=20 max_new_tokens=5 priority=0",
        "   -0.500 s  step=7 mode=IDLE decodes=1 waiting=0 evicted_pages=0 retracted=-",
        "   +0.000 s  settled step=7 forward_ms=250.0",
        "   +0.000 s  left rid=r1 error output_len=3 odd",
    ]


def test_no_tokens_are_kept(decisions, tmp_path):
    recorder = FlightRecorder(Recorder(), decisions, tmp_path)
    decisions.append(Settled(2.5, 7, next_token_ids=b"secret"))
    recorder.settled()

    assert all(b"secret" not in (tmp_path / name).read_bytes() for name in DECISION_NAMES)
    assert [record.next_token_ids for record in decisions if isinstance(record, Settled)] == [b"secret"]


def test_the_newest_are_kept_and_the_files_stay_small(decisions, tmp_path):
    recorder = FlightRecorder(Recorder(), decisions, tmp_path, half_bytes=1000)
    for step in range(1, 501):
        decisions.append(PassRecord(float(step), step_id=step))
        recorder.planned(None)

        kept = [record.step_id for record in read_decisions(tmp_path)]  # type: ignore[union-attr]
        assert kept == list(range(step - len(kept) + 1, step + 1))
        assert len(kept) == step or len(kept) > 10
    assert all((tmp_path / name).stat().st_size <= 1000 for name in DECISION_NAMES)


def test_a_record_that_was_cut_off_costs_itself_alone(decisions, tmp_path):
    recorder = FlightRecorder(Recorder(), decisions, tmp_path)
    for step in (1, 2):
        decisions.append(PassRecord(float(step), step_id=step))
        recorder.planned(None)
    path = tmp_path / DECISION_NAMES[0]
    whole = path.read_bytes()
    for size in range(len(whole)):
        path.write_bytes(whole[:size])
        assert len(read_decisions(tmp_path)) == (1 if size >= len(whole) // 2 else 0)
    path.write_bytes(b"\0" * 64)
    assert read_decisions(tmp_path) == []


def test_without_a_folder_nothing_is_kept_and_nothing_fails(decisions, tmp_path):
    num_open = len(os.listdir("/proc/self/fd"))
    recorder = FlightRecorder(Recorder(), decisions, tmp_path / "none")
    decisions.append(PassRecord(1.0))
    recorder.planned(None)
    recorder.close()

    assert decision_lines(tmp_path / "none") == []
    assert len(os.listdir("/proc/self/fd")) == num_open


def test_the_recorder_inside_hears_of_everything(decisions, tmp_path):
    heard = []

    class Inner(Recorder):
        def __getattribute__(self, name):
            return lambda *args: heard.append((name, *args))

    recorder = FlightRecorder(Inner(), decisions, tmp_path)
    recorder.received("message", 1.0)  # type: ignore[arg-type]
    recorder.planning(2.0)
    recorder.planned(None)
    recorder.settled()
    recorder.idle(3.0)
    recorder.close()
    names = ["received", "planning", "planned", "settled", "idle", "close"]
    assert [name for name, *_ in heard] == names


def test_whose_prompts_were_begun_can_be_read_and_not_who_waited(decisions, tmp_path):
    recorder = FlightRecorder(Recorder(), decisions, tmp_path)
    assert started_requests(tmp_path) is None
    begun = Verdict("begun", AddReqResult.CONTINUE, Reason.CHUNKED)
    waited = Verdict("waited", AddReqResult.NO_TOKEN, Reason.NO_KV)
    further = Verdict("further", AddReqResult.CONTINUE, Reason.CHUNK_CONTINUED)
    decisions.append(Arrived(1.0, "arrived", 20, 5))
    decisions.append(PassRecord(2.0, step_id=7, verdicts=[begun, waited], continued=[further]))
    recorder.planned(None)

    assert started_requests(tmp_path) == {"begun", "further"}
    (tmp_path / DECISION_NAMES[0]).write_bytes(b"\0" * 64)
    assert started_requests(tmp_path) is None


def test_who_came_behind_the_last_pass_may_have_been_the_end_of_it(decisions, tmp_path):
    recorder = FlightRecorder(Recorder(), decisions, tmp_path)
    recorder.received(request("survived"), 1.0)
    decisions.append(Arrived(1.0, "survived", 20, 5))
    recorder.planning(2.0)
    begun = Verdict("begun", AddReqResult.CONTINUE, Reason.CHUNKED)
    decisions.append(PassRecord(2.0, step_id=7, verdicts=[begun]))
    recorder.planned(None)
    recorder.received(AbortRequest("begun", "a message about a request is none"), 2.5)
    recorder.received(request("deadly"), 3.0)

    assert started_requests(tmp_path) == {"begun", "deadly"}
    assert decision_lines(tmp_path)[-1] == "   +0.000 s  received rid=deadly"
