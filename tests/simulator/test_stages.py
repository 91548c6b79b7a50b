"""Pipeline stages: steps in flight, one behind the other in each stage."""

from __future__ import annotations

import math

import pytest

from engine.launch.resolve.resolve import CUDA_MEM_FRACTION
from engine.runtime.config.engine_config import EngineConfig
from engine.runtime.errors import ConfigError
from engine.simulator.cluster import simulate
from engine.simulator.cost_model import HOP_S, StageTimes
from engine.simulator.facts import DEVICES, MODELS
from engine.simulator.generated_workloads import Arrival, Batch, Lengths, given_lengths
from engine.simulator.setup import WORKSPACE_BYTES, replica_settings
from tests.simulator.linear_cost import LinearCost


def test_a_step_waits_for_the_one_before_it_in_each_stage():
    times = StageTimes(2, token_s=0.001)

    assert times.end_s(0.0, 4.0, 100) == pytest.approx(2 + HOP_S + 0.1 + 2)
    # It leaves the first stage at 3, and the long one is in the second until 4.1.
    assert times.end_s(0.0, 2.0, 0) == pytest.approx(4.1 + HOP_S + 1)
    assert times.end_s(10.0, 2.0, 0) == pytest.approx(12 + HOP_S)


def test_a_request_alone_gains_nothing_and_pays_for_the_messages(make_replica):
    cost = LinearCost(step_s=0.01)
    workload = list(given_lengths([16], [11], Arrival(num_requests=1, rate=math.inf)))
    one = simulate(iter(workload), make_replica(), cost)
    four = simulate(iter(workload), make_replica(num_stages=4), cost)

    assert one.e2e_ms.p50 == pytest.approx(110)
    assert four.e2e_ms.p50 == pytest.approx(110 + 11 * 3 * 1000 * HOP_S)


def test_many_requests_keep_all_stages_busy(make_replica):
    """A step costs the same for any number of rows: with four stages a quarter of the rows leaves every quarter."""
    cost = LinearCost(step_s=0.04)
    workload = list(given_lengths([16], [101], Arrival(num_requests=32, rate=math.inf)))
    one = simulate(iter(workload), make_replica(), cost)
    four = simulate(iter(workload), make_replica(num_stages=4), cost)

    assert one.busy_share == pytest.approx(1)
    assert four.busy_share > 0.95
    assert four.num_steps > 3.5 * one.num_steps
    assert four.duration_s < 1.1 * one.duration_s


def test_with_computation_that_grows_with_rows_stages_multiply_the_rate(make_replica):
    cost = LinearCost(decode_row_s=0.001, prefill_token_s=0.0001)
    workload = list(given_lengths([16], [101], Arrival(num_requests=32, rate=math.inf)))
    one = simulate(iter(workload), make_replica(), cost)
    four = simulate(iter(workload), make_replica(num_stages=4), cost)

    assert 3.2 < one.duration_s / four.duration_s < 4.0


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("policy", ["fcfs", "lpm"])
def test_every_answer_is_whole_though_memory_runs_out(make_replica, policy):
    batch = Batch(item=Lengths(100, 0.8, 10, 500), answer=Lengths(60, 0.9, 1, 400))
    asked = list(batch.requests(Arrival(num_requests=32, seed=1)))
    settings = make_replica(
        num_pages=170, max_running=32, admission_estimator="none", num_stages=3, schedule_policy=policy
    )
    report = simulate(iter(asked), settings, LinearCost(step_s=0.005, prefill_token_s=2e-5))

    assert report.retractions > 0
    assert report.num_requests == len(asked)
    assert report.output_tokens == sum(request.output_len for request in asked)


def test_stages_hold_what_one_device_does_not():
    model, device = MODELS["llama-3.1-70b"], DEVICES["h100"]
    with pytest.raises(ConfigError, match=r"does not fit on h100: .* raise --tp or --pp"):
        replica_settings(EngineConfig(), model, device)
    with pytest.raises(ConfigError, match=r"--pp is 81, but it must lie in \[1, 80\]"):
        replica_settings(EngineConfig(), model, device, 81)

    memory = 4 * (device.memory_bytes - WORKSPACE_BYTES) - model.weight_bytes
    tokens = int(memory * CUDA_MEM_FRACTION) // model.kv_token_bytes
    assert replica_settings(EngineConfig(), model, device, 4).capacity.max_total_tokens == tokens // 16 * 16
