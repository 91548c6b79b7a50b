"""What-if on a log that a simulated server wrote: its cost model is known, so the answers can be checked."""

from __future__ import annotations

import io
import math
from pathlib import Path
from typing import Any

import pytest

from engine.runtime.config import EngineConfig, LogConfig
from engine.runtime.errors import ConfigError
from engine.runtime.messages import SchedulerInput
from engine.runtime.step_plan import StepResult
from engine.scheduler.batch import ScheduleBatch
from engine.scheduler.log_file import LogFileError
from engine.scheduler.recorder import Recorder, make_recorder
from engine.simulator.arrivals import Lengths
from engine.simulator.cluster import Cluster, ClusterSettings
from engine.simulator.cost_model import LinearCost, StepWork
from engine.simulator.generated import Arrival, Chat, Rag, given_lengths
from engine.simulator.measurements import Measurements
from engine.simulator.recorded_run import read_recorded_run
from engine.simulator.report import Report, make_report
from engine.simulator.sim_request import Workload
from engine.simulator.simulated_engine import ReplicaSettings
from engine.simulator.what_if import fit_log, what_if

TRUTH = LinearCost(step_s=0.004, prefill_token_s=4e-5, decode_row_s=1e-4, kv_token_s=1e-7)
RAG = Rag(document=Lengths(600, 0.3, 200, 1500), answer=Lengths(30, 0.5, 4, 80), num_documents=8)


class RecordedCalls:
    """Stands where a scheduler stands, and tells a recorder of the calls that change it."""

    def __init__(self, scheduler: Any, recorder: Recorder) -> None:
        self._scheduler, self._recorder = scheduler, recorder
        self._now_s = 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._scheduler, name)

    def handle(self, message: SchedulerInput, now_s: float) -> None:
        self._recorder.received(message, now_s)
        self._scheduler.handle(message, now_s)

    def next_batch(self, now_s: float) -> ScheduleBatch | None:
        self._now_s = now_s
        self._recorder.planning(now_s)
        batch: ScheduleBatch | None = self._scheduler.next_batch(now_s)
        self._recorder.planned(batch)
        return batch

    def settle(self, batch: ScheduleBatch, result: StepResult, now_s: float) -> None:
        self._scheduler.settle(batch, result, now_s)
        self._recorder.settled()

    def on_idle(self) -> None:
        self._recorder.idle(self._now_s)
        self._scheduler.on_idle()


def serve(path: Path, workload: Workload, settings: ReplicaSettings) -> Report:
    """A server with known step times that writes a decision log."""
    measurements = Measurements()
    cluster = Cluster(ClusterSettings(), settings, TRUTH, measurements)
    (engine,) = cluster.replicas
    config = EngineConfig(
        scheduler=settings.scheduler, cache=settings.cache, log=LogConfig(decision_log=str(path))
    )
    recorder = make_recorder(
        config, settings.capacity, settings.eos_token_ids, engine.scheduler, wall_s=1e9, now_s=0.0
    )
    engine.scheduler = RecordedCalls(engine.scheduler, recorder)  # type: ignore[assignment]
    cluster.run(workload)
    recorder.close()
    return make_report(measurements, name="truth", num_replicas=1)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "decisions.log"


def test_the_recorded_run_is_read_back_as_it_was(path, make_replica):
    asked = list(Chat().requests(Arrival(num_requests=60, rate=6.0, seed=1)))
    truth = serve(path, iter(asked), make_replica(num_pages=8192))
    run = read_recorded_run(path)

    assert [each.rid for each in run.requests] == [each.rid for each in asked]
    assert [each.output_len for each in run.requests] == [each.output_len for each in asked]
    assert [each.input_ids for each in run.requests] == [each.input_ids for each in asked]
    outcome = make_report(run.outcome, name="truth", num_replicas=1)
    assert outcome.ttft_ms.p50 == pytest.approx(truth.ttft_ms.p50, rel=1e-3)
    assert outcome.tpot_ms.p99 == pytest.approx(truth.tpot_ms.p99, rel=1e-3)
    assert outcome.output_tokens == truth.output_tokens
    assert run.num_left_out == 0
    assert run.damage == ""


def test_the_cost_model_of_the_machine_is_found(path, make_replica):
    serve(path, RAG.requests(Arrival(num_requests=80, rate=12.0)), make_replica())
    fitted = fit_log(path)
    assert fitted.quality.p90_error < 0.01
    for work in (StepWork(500, 0.0, 0, 0, 1), StepWork(0, 0.0, 20, 8000, 20)):
        assert fitted.step_s(work) == pytest.approx(TRUTH.step_s(work), rel=0.02)


def test_the_same_settings_change_nothing(path, make_replica):
    truth = serve(path, RAG.requests(Arrival(num_requests=60, rate=12.0)), make_replica())
    result = what_if(path, {"schedule_policy": "fcfs"})

    assert result.difference is None
    assert result.baseline.e2e_ms == result.changed.e2e_ms
    assert result.baseline.e2e_ms.p50 == pytest.approx(truth.e2e_ms.p50, rel=0.05)
    assert result.recorded.e2e_ms.p50 == pytest.approx(truth.e2e_ms.p50, rel=1e-3)
    assert "no pass decided differently" in result.lines()


def test_other_settings_have_the_effect_that_they_really_have(path, tmp_path, make_replica):
    """The answer of the what-if is what happens when the settings are really changed."""
    asked = list(RAG.requests(Arrival(num_requests=80, rate=20.0, seed=4)))
    before = serve(path, iter(asked), make_replica())
    after = serve(tmp_path / "other.log", iter(asked), make_replica(radix_cache=False))
    result = what_if(path, {"radix-cache": "false"})

    real = after.ttft_ms.p50 / before.ttft_ms.p50
    assert real > 1.3
    told = result.changed.ttft_ms.p50 / result.baseline.ttft_ms.p50
    assert told == pytest.approx(real, rel=0.1)
    assert result.changed.cache_hit_share == 0.0 < result.baseline.cache_hit_share
    rows = {row.figure: row for row in result.rows}
    assert rows["TTFT P50, ms"].change == pytest.approx(told - 1)
    assert result.difference is not None
    assert "computes" in result.difference.changed


def test_answers_end_where_they_ended(path, make_replica):
    """Under other settings each request generates as many tokens as it did, wherever its end came from."""
    serve(path, RAG.requests(Arrival(num_requests=40, rate=30.0)), make_replica())
    result = what_if(path, {"max_running_requests": 2, "chunked_prefill_size": "64"})
    assert result.changed.output_tokens == result.recorded.output_tokens
    assert result.changed.num_requests == 40
    assert result.changed.queue_ms.p99 > 2 * result.baseline.queue_ms.p99


def test_the_first_pass_that_decides_differently_is_named(path, make_replica):
    serve(path, given_lengths([100], [30], Arrival(num_requests=4, rate=math.inf)), make_replica())
    result = what_if(path, {"max_running_requests": "2"})
    assert result.difference is not None
    assert result.difference.number == 0
    assert result.difference.at_s == 0.0
    assert result.difference.baseline.count("computes 100 tokens") == 4
    assert result.difference.changed.count("computes 100 tokens") == 2


def test_a_larger_page_keeps_the_memory_as_large(path, make_replica):
    serve(path, RAG.requests(Arrival(num_requests=40, rate=12.0)), make_replica())
    result = what_if(path, {"page_size": 64, "max_total_tokens": 8192})
    assert result.changed.num_requests == 40
    assert result.changed.peak_kv_use > 4 * result.baseline.peak_kv_use


def test_it_prints_as_a_table(path, make_replica):
    from rich.console import Console

    serve(path, RAG.requests(Arrival(num_requests=40, rate=12.0)), make_replica())
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(what_if(path, {"schedule_policy": "lpm"}))
    text = console.export_text()
    assert "what if schedule_policy=lpm" in text
    assert "TPOT P99, ms" in text
    assert "fitted to" in text
    assert "off the recorded median E2E" in text


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"port": 80}, "port is a setting of the group server"),
        ({"schedule_polic": "lpm"}, "did you mean 'schedule_policy'"),
        ({"schedule_policy": "best"}, "must be one of fcfs"),
    ],
)
def test_settings_that_a_log_has_no_answer_for(path, make_replica, overrides, message):
    serve(path, given_lengths([100], [30], Arrival(num_requests=4, rate=2.0)), make_replica())
    with pytest.raises(ConfigError, match=message):
        what_if(path, overrides)


def test_a_log_without_traffic_says_so(path, make_replica):
    serve(path, iter([]), make_replica())
    with pytest.raises(ConfigError, match="has no request that got a token; record a run with traffic"):
        what_if(path, {"schedule_policy": "lpm"})
    with pytest.raises(LogFileError, match="No such file"):
        what_if(path.with_name("nowhere"), {"schedule_policy": "lpm"})
