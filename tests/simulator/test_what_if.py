"""What-if on a log that a simulated server wrote: its cost model is known, so the answers can be checked."""

from __future__ import annotations

import io
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from engine.runtime.config.engine_config import CacheConfig, EngineConfig, SchedulerConfig
from engine.runtime.config.server_config import LogConfig
from engine.runtime.errors import ConfigError
from engine.runtime.feasibility import Capacity
from engine.runtime.messages import GenerateRequest, SchedulerInput
from engine.runtime.sampling_params import SamplingParams
from engine.runtime.step_plan import StepResult
from engine.scheduler.batch import ScheduleBatch, StepWork
from engine.scheduler.journal import replay
from engine.scheduler.journal.log_file import LogFileError
from engine.scheduler.journal.recorder import Recorder, make_recorder
from engine.scheduler.journal.replay import new_scheduler
from engine.scheduler.scheduler import Scheduler
from engine.simulator.agent_workload import Agents
from engine.simulator.cluster import Cluster, ClusterSettings
from engine.simulator.generated_workloads import Arrival, Chat, Lengths, Rag, given_lengths
from engine.simulator.recorded_run import _Life, _next_turns, read_recorded_run
from engine.simulator.report import Measurements, Report, make_report
from engine.simulator.sim_request import VOCAB_SIZE, SimRequest, Workload
from engine.simulator.simulated_engine import ReplicaSettings
from engine.simulator.what_if import fit_log, what_if
from tests.scheduler.journal.recorded import finish, record
from tests.simulator.linear_cost import LinearCost

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


def serve_overlapped(path: Path) -> dict[str, int]:
    """A server that plans each step while the one before runs, and takes places at random; tokens by rid."""
    scheduler_config = SchedulerConfig(
        max_running_requests=4, chunked_prefill_size=16, chaos="retract=0.4:30", preemption_mode="recompute"
    )
    cache = CacheConfig(page_size=4, max_total_tokens=512)
    capacity = Capacity(256, 128, 4, 4, VOCAB_SIZE)
    scheduler = Scheduler(scheduler_config, cache, capacity, frozenset())
    config = EngineConfig(scheduler=scheduler_config, cache=cache, log=LogConfig(decision_log=str(path)))
    recorder = make_recorder(config, capacity, frozenset(), scheduler, wall_s=1e9, now_s=0.0)
    calls = RecordedCalls(scheduler, recorder)
    asked = {f"r{number}": 10 + number for number in range(6)}
    for number, (rid, length) in enumerate(asked.items()):
        prompt = np.full(20, 5 + number, dtype=np.int32).tobytes()
        calls.handle(GenerateRequest(rid, prompt, SamplingParams(max_new_tokens=length, seed=1)), 0.0)
    now_s = 1.0
    in_flight: ScheduleBatch | None = None
    while scheduler.num_unfinished or in_flight is not None:
        batch = calls.next_batch(now_s)
        if in_flight is not None:
            tokens = np.full(len(in_flight.sampled), 7, dtype=np.int32).tobytes()
            now_s += 0.01
            calls.settle(in_flight, StepResult(in_flight.plan.step_id, tokens, forward_s=0.01), now_s)
        in_flight = batch
    recorder.close()
    return asked


def message_of(request: SimRequest, timeout_s: float) -> GenerateRequest:
    """A request whose client waits so long."""
    sampling = SamplingParams(max_new_tokens=request.max_new_tokens, seed=1)
    return GenerateRequest(request.rid, request.input_ids, sampling, request.arrival_s, timeout_s=timeout_s)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "decisions.log"


def test_the_recorded_run_is_read_back_as_it_was(path, make_replica):
    asked = list(Chat().requests(Arrival(num_requests=12, rate=6.0, seed=1)))
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


@pytest.mark.parametrize("num_rounds", [1, 4])
def test_each_round_of_a_burst_is_a_step(path, num_rounds):
    """One request of 20 + 13 tokens; a round takes 10 ms, and what lies between two steps 2 ms."""
    config = SchedulerConfig(multi_step_ms=10.0 * num_rounds, chunked_prefill_size=16)
    cache, capacity = CacheConfig(page_size=4, max_total_tokens=512), Capacity(256, 128, 4, 4, VOCAB_SIZE)
    scheduler = Scheduler(config, cache, capacity, frozenset())
    settings = EngineConfig(scheduler=config, cache=cache, log=LogConfig(decision_log=str(path)))
    recorder = make_recorder(settings, capacity, frozenset(), scheduler, wall_s=1e9, now_s=0.0)
    calls, now_s = RecordedCalls(scheduler, recorder), 1.0
    prompt = np.full(20, 5, dtype=np.int32).tobytes()
    calls.handle(GenerateRequest("r", prompt, SamplingParams(max_new_tokens=14, seed=1)), 0.0)
    while (batch := calls.next_batch(now_s)) is not None:
        rounds = batch.plan.num_rounds
        tokens = np.full(len(batch.sampled) * rounds, 7, dtype=np.int32).tobytes()
        counts = np.full(len(batch.sampled), rounds, dtype=np.int32).tobytes() if rounds > 1 else b""
        step_s = 0.01 * rounds if batch.plan.total_num_scheduled_tokens else 0.0
        now_s += step_s
        calls.settle(
            batch, StepResult(batch.plan.step_id, tokens, forward_s=step_s, num_next_tokens=counts), now_s
        )
        now_s += 0.002
    recorder.close()

    run = read_recorded_run(path)

    decodes = [step for step in run.steps if not step.work.prefill_tokens]
    assert [step.work.kv_tokens for step in decodes] == list(range(21, 34))
    assert [step.step_s for step in run.steps] == pytest.approx([0.01] * 15)
    assert run.outcome.num_steps == 15
    assert run.outcome.busy_s == pytest.approx(0.15)
    assert run.overhead_s == pytest.approx(0.002 / num_rounds)


@pytest.mark.parametrize("changes", [{"chunked_prefill_size": 64}, {"schedule_policy": "lof"}])
def test_a_log_of_an_engine_that_decides_otherwise_is_refused(path, make_replica, monkeypatch, changes):
    """Also where its steps are as many, with as many tokens, of other requests."""
    serve(path, RAG.requests(Arrival(num_requests=20, rate=100.0)), make_replica())
    monkeypatch.setattr(replay, "new_scheduler", lambda *args: new_scheduler(*args, **changes))
    with pytest.raises(ConfigError, match=r"is not one that this engine plans; `engine replay` shows where"):
        read_recorded_run(path)


def test_the_cost_model_of_the_machine_is_found(path, make_replica):
    serve(path, RAG.requests(Arrival(num_requests=50, rate=12.0)), make_replica())
    fitted = fit_log(path)
    assert fitted.quality.p90_error < 0.01
    for work in (StepWork(500, 0.0, 0, 0, 1), StepWork(0, 0.0, 20, 8000, 20)):
        assert fitted.step_s(work) == pytest.approx(TRUTH.step_s(work), rel=0.02)


def test_a_run_of_the_log_is_chosen(path, make_replica):
    for num_requests in (50, 30):
        serve(path, RAG.requests(Arrival(num_requests=num_requests, rate=12.0)), make_replica())

    assert len(read_recorded_run(path).requests) == 30
    assert len(read_recorded_run(path, number=1).requests) == 50
    assert fit_log(path, number=1).quality.num_steps > fit_log(path, number=2).quality.num_steps
    result = what_if(path, {"schedule_policy": "lof"}, number=1)
    assert (result.recorded.num_requests, result.changed.num_requests) == (50, 50)
    with pytest.raises(ConfigError, match=r"--run is 3, but .* has 2 \(the last is --run 2\)"):
        fit_log(path, number=3)


@pytest.mark.slow
def test_the_same_settings_change_nothing(path, make_replica):
    truth = serve(path, RAG.requests(Arrival(num_requests=60, rate=12.0)), make_replica())
    result = what_if(path, {"schedule_policy": "fcfs"})

    assert result.difference is None
    assert result.baseline.e2e_ms == result.changed.e2e_ms
    assert result.baseline.e2e_ms.p50 == pytest.approx(truth.e2e_ms.p50, rel=0.05)
    assert result.recorded.e2e_ms.p50 == pytest.approx(truth.e2e_ms.p50, rel=1e-3)
    assert "both simulations decide alike in every pass" in result.lines()


def test_other_settings_have_the_effect_that_they_really_have(path, tmp_path, make_replica):
    """The answer of the what-if is what happens when the settings are really changed."""
    asked = list(RAG.requests(Arrival(num_requests=50, rate=20.0, seed=4)))
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
    serve(path, RAG.requests(Arrival(num_requests=24, rate=30.0)), make_replica())
    result = what_if(path, {"max_running_requests": 2, "chunked_prefill_size": "64"})
    assert result.changed.output_tokens == result.recorded.output_tokens
    assert result.changed.num_requests == 24
    assert result.changed.queue_ms.p99 > 2 * result.baseline.queue_ms.p99


def test_the_first_pass_that_decides_differently_is_named(path, make_replica):
    serve(path, given_lengths([100], [30], Arrival(num_requests=4, rate=math.inf)), make_replica())
    result = what_if(path, {"max_running_requests": "2"})
    assert result.difference is not None
    assert result.difference.number == 0
    assert result.difference.num_passes > 4  # of the simulation, not of the log
    assert any(f"simulated pass 1 of {result.difference.num_passes} on" in line for line in result.lines())
    assert result.difference.at_s == 0.0
    assert result.difference.baseline.count("computes 100 tokens") == 4
    assert result.difference.changed.count("computes 100 tokens") == 2


def test_a_larger_page_keeps_the_memory_as_large(path, make_replica):
    serve(path, RAG.requests(Arrival(num_requests=24, rate=12.0)), make_replica())
    result = what_if(path, {"page_size": 64, "max_total_tokens": 8192})
    assert result.changed.num_requests == 24
    assert result.changed.peak_kv_use > 4 * result.baseline.peak_kv_use


def test_memory_of_the_host_keeps_what_the_pool_evicts(path, make_replica):
    serve(path, RAG.requests(Arrival(num_requests=24, rate=12.0)), make_replica(num_pages=200))
    result = what_if(path, {"kv_host_size": "0.1"})
    assert result.changed.cache_hit_share > result.baseline.cache_hit_share + 0.03
    assert result.changed.num_requests == 24


def test_tokens_of_a_step_whose_request_lost_its_place_meanwhile_are_not_counted(path):
    """With overlapped steps a request may be retracted while its step runs; that token is sampled again later."""
    asked = serve_overlapped(path)
    run = read_recorded_run(path)
    assert run.outcome.retractions > 0
    assert {each.rid: each.output_len for each in run.requests} == asked
    result = what_if(path, {"schedule_policy": "lof"})
    assert result.changed.num_requests == result.recorded.num_requests == len(asked)
    assert result.changed.output_tokens == result.recorded.output_tokens == sum(asked.values())


def test_steps_with_drafts_are_read_and_their_answers_kept(path):
    """A simulation has no drafts: nobody knows what would have been guessed under other settings."""
    harness = record(path, memory=2, speculative="ngram", num_pages=200, eos=(5,))
    for idx in range(6):
        harness.submit(prompt_len=6 + idx, max_new_tokens=60, ignore_eos=False)
    harness.run_until_idle()
    finish(harness)
    report = harness.scheduler.report(0.0)
    assert report.totals.accepted_draft_tokens > 50

    run = read_recorded_run(path)
    answers = {rid: answer.tokens for rid, answer in harness.answers.items()}
    assert {
        each.rid: np.frombuffer(each.output_ids, dtype=np.int32).tolist() for each in run.requests
    } == answers
    num_wrong = report.totals.draft_tokens - report.totals.accepted_draft_tokens
    num_answered = sum(map(len, answers.values()))
    assert sum(step.work.num_sampled for step in run.steps) >= num_answered + num_wrong
    result = what_if(path, {"schedule_policy": "lof"})
    assert result.changed.output_tokens == result.recorded.output_tokens == num_answered


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("whose", ["the client's", "the server's"])
def test_answers_that_a_deadline_cut_short_are_the_same_in_all_runs(path, make_replica, whose):
    settings = make_replica(request_timeout=0.5 if whose == "the server's" else None)
    requests = list(given_lengths([50], [20, 200], Arrival(num_requests=20, rate=20.0)))
    if whose == "the client's":
        requests = [each._replace(template=message_of(each, timeout_s=0.5)) for each in requests]
    truth = serve(path, iter(requests), settings)
    assert sum(truth.failures.values()) == 10

    result = what_if(path, {"schedule_policy": "lof"})
    runs = (result.recorded, result.baseline, result.changed)
    assert [run.num_requests for run in runs] == [20, 20, 20]
    assert len({run.output_tokens for run in runs}) == 1
    assert "10 requests ended early" in "\n".join(result.lines())
    assert "not answered" not in [row.figure for row in result.rows]

    hurried = what_if(path, {"request_timeout": 0.2})
    rows = {row.figure: row for row in hurried.rows}
    assert (rows["not answered"].baseline, rows["not answered"].changed) == (0, 10)


def test_goodput_needs_objectives(path, make_replica):
    serve(path, RAG.requests(Arrival(num_requests=10, rate=12.0)), make_replica())
    without = what_if(path, {"schedule_policy": "lpm"})
    assert [row.figure for row in without.rows if "goodput" in row.figure] == []
    told = what_if(path, {"schedule_policy": "lpm"}, slo_ms={"ttft": 1.0})
    (row,) = [row for row in told.rows if "goodput" in row.figure]
    assert row.changed == 0


def test_a_cost_model_that_explains_nothing_is_told_first(path, make_replica):
    serve(path, RAG.requests(Arrival(num_requests=16, rate=12.0)), make_replica())
    good = what_if(path, {"schedule_policy": "lpm"})
    assert not any("WARNING" in line for line in good.lines())
    for r_squared in (-2.0, 0.1, math.nan):
        useless = replace(good, quality=good.quality._replace(r_squared=r_squared))
        assert useless.lines()[0].startswith("WARNING: the step times are not explained")


def test_it_prints_as_a_table(path, make_replica):
    from rich.console import Console

    serve(path, RAG.requests(Arrival(num_requests=16, rate=12.0)), make_replica())
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
    with pytest.raises(
        ConfigError, match="has no request that got a token or a vector; record a run with traffic"
    ):
        what_if(path, {"schedule_policy": "lpm"})
    with pytest.raises(LogFileError, match="No such file"):
        what_if(path.with_name("nowhere"), {"schedule_policy": "lpm"})


def test_a_turn_follows_the_one_that_its_prompt_continues() -> None:
    """Two agents of a session take turns; one has begun before the other one's answer ended."""
    lives = []
    for rid, prompt, arrival_s, last_s in (
        ("a", "aa", 0.0, 1.0),
        ("b", "b", 0.0, 2.0),
        ("aa", "aaa", 3.0, 5.0),
        ("bb", "bb", 4.0, 6.0),
        ("c", "c", 4.5, 7.0),
    ):
        message = GenerateRequest(rid, prompt.encode(), SamplingParams(), arrival_s, session="s")
        lives.append(_Life(message, arrival_s))
        lives[-1].last_s = last_s

    assert _next_turns(lives) == {"a": ("aa", 2.0), "b": ("bb", 2.0)}


def in_session(request: SimRequest) -> SimRequest:
    """A turn of an agent, with the session of all of the agent's turns; so are those that follow."""
    agent, later = request.rid.partition("-")[0], request.next_turn
    message = msgspec.structs.replace(message_of(request, 1000.0), session=agent)

    def next_turn(answered_s: float) -> SimRequest | None:
        turn = later and later(answered_s)
        return turn and in_session(turn)

    return request._replace(template=message, next_turn=next_turn)


def agents() -> Workload:
    """Agents with prompts of more than 2,048 tokens."""
    workload = Agents(num_agents=8, scale=1 / 64, tool_s=0.5).requests(Arrival(num_requests=160, seed=2))
    return map(in_session, workload)


def test_sessions_under_another_eviction_go_on_after_their_own_answers(path, tmp_path, make_replica):
    """A turn waits for the simulated answer before it, so fewer hits make all later turns late, as on a server."""
    settings = make_replica(num_pages=128)
    other = settings._replace(cache=replace(settings.cache, eviction_policy="lfu"))
    before, after = serve(path, agents(), settings), serve(tmp_path / "other.log", agents(), other)
    run = read_recorded_run(path)
    assert len(run.next_turns) == 152 and len(list(run.workload())) == 8

    result = what_if(path, {"eviction_policy": "lfu"})

    assert result.changed.num_requests == 160
    assert result.baseline.cache_hit_share == pytest.approx(before.cache_hit_share, abs=0.02)
    assert abs(after.cache_hit_share - before.cache_hit_share) > 0.05
    assert result.changed.cache_hit_share == pytest.approx(after.cache_hit_share, abs=0.03)
    assert result.changed.duration_s == pytest.approx(after.duration_s, rel=0.05)
