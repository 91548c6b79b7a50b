"""What a simulation promises: the same figures for the same seed, every request answered once, effects of settings."""

from __future__ import annotations

import math
from collections import Counter

import msgspec
import pytest

from engine.runtime.config.device_config import DispatchPolicyName
from engine.runtime.errors import ConfigError
from engine.simulator.cluster import Cluster, ClusterSettings, simulate
from engine.simulator.cost_model import Roofline
from engine.simulator.facts import DEVICES, MODELS
from engine.simulator.generated_workloads import GENERATED, Arrival, Batch, Chat, Lengths, Rag, given_lengths
from engine.simulator.report import Measurements
from engine.simulator.sim_request import SimRequest
from tests.simulator.linear_cost import LinearCost

COST = LinearCost(step_s=0.005, prefill_token_s=2e-5, decode_row_s=5e-5, kv_token_s=1e-8)
CHAT = Chat(question=Lengths(30, 0.8, 4, 300), answer=Lengths(40, 0.7, 1, 200), system_len=64)
RAG = Rag(document=Lengths(600, 0.4, 200, 2000), answer=Lengths(20, 0.5, 1, 60), num_documents=40)
BATCH = Batch(item=Lengths(100, 0.8, 10, 500), answer=Lengths(60, 0.9, 1, 400))
WORKLOADS: dict[str, Chat | Rag | Batch] = {"chat": CHAT, "rag": RAG, "batch": BATCH}


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("name", sorted(WORKLOADS))
@pytest.mark.parametrize("cluster", [ClusterSettings(), ClusterSettings(3), ClusterSettings(3, 1)])
def test_every_request_is_answered_once_with_all_its_tokens(make_replica, name, cluster):
    arrival = Arrival(num_requests=120, rate=50.0, seed=3)
    asked = list(WORKLOADS[name].requests(arrival))
    report = simulate(iter(asked), make_replica(max_running=16), COST, cluster)

    assert report.num_requests == 120
    assert not report.failures
    assert report.output_tokens == sum(request.output_len for request in asked)
    assert report.prompt_tokens == sum(request.prompt_len for request in asked)


@pytest.mark.slow
def test_memory_that_runs_out_costs_time_and_no_tokens(make_replica):
    asked = list(BATCH.requests(Arrival(num_requests=60, seed=1)))
    memory = {"num_pages": 170, "max_running": 32, "admission_estimator": "none"}
    tight = make_replica(preemption_mode="recompute", **memory)
    swapping = make_replica(num_host_pages=500, preemption_mode="swap", **memory)
    reports = [simulate(iter(asked), settings, COST) for settings in (make_replica(), tight, swapping)]

    assert [report.output_tokens for report in reports] == [sum(r.output_len for r in asked)] * 3
    roomy, recomputing, swapped = reports
    assert roomy.retractions == 0 < recomputing.retractions
    assert swapped.retractions > 0
    assert recomputing.duration_s > roomy.duration_s
    assert recomputing.peak_kv_use > 0.8


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("dispatch", ["round-robin", "shortest-queue", "least-tokens", "prefix-affinity"])
def test_equal_seeds_give_equal_reports(make_replica, dispatch):
    def run(seed: int) -> bytes:
        workload = CHAT.requests(Arrival(num_requests=24, rate=40.0, burstiness=0.5, seed=seed))
        cluster = ClusterSettings(3, dispatch=dispatch)
        return msgspec.json.encode(simulate(workload, make_replica(), COST, cluster))

    report = run(7)
    assert report == run(7)
    assert report != run(8)


def test_continuous_batching_beats_static_batching(make_replica):
    """50 requests at once, rows for 8: static batches wait for their slowest, continuous ones fill the place."""

    def run(**settings):
        return simulate(
            BATCH.requests(Arrival(num_requests=50, seed=0)), make_replica(max_running=8, **settings), COST
        )

    static, continuous = run(schedule_policy="static", static_batch_size=8), run()

    assert continuous.output_tok_s > 1.5 * static.output_tok_s
    assert static.padding_share > 0.3
    assert continuous.padding_share == 0.0
    assert continuous.e2e_ms.p50 < static.e2e_ms.p50


def test_the_prefix_cache_pays_where_prompts_share_documents(make_replica):
    def run(**settings):
        workload = RAG.requests(Arrival(num_requests=120, rate=30.0, seed=2))
        return simulate(workload, make_replica(**settings), COST)

    cached, uncached = run(), run(radix_cache=False)

    assert cached.cache_hit_share > 0.4
    assert uncached.cache_hit_share == 0.0
    assert cached.ttft_ms.p50 < 0.75 * uncached.ttft_ms.p50


def test_lpm_finds_more_in_a_small_cache_than_fcfs(make_replica):
    """Twelve documents of 1,000 tokens in random order, room for two of them in the cache, all requests at once."""
    documents = Rag(
        document=Lengths(1000, 0.01, 900, 1100),
        answer=Lengths(4, 0.1, 2, 8),
        num_documents=12,
        instructions_len=16,
        exponent=0.01,
    )

    def run(policy: str):
        workload = documents.requests(Arrival(num_requests=60, rate=math.inf, seed=0))
        settings = make_replica(
            num_pages=220, max_running=1, schedule_policy=policy, in_batch_prefix_caching=False
        )
        return simulate(workload, settings, COST)

    fcfs, lpm = run("fcfs"), run("lpm")

    assert lpm.cache_hit_share > 0.7 > 0.5 > fcfs.cache_hit_share
    assert not fcfs.failures
    assert lpm.duration_s < 0.75 * fcfs.duration_s


@pytest.mark.slow
def test_affinity_finds_more_in_the_caches_than_turns(make_replica):
    def run(dispatch: DispatchPolicyName):
        workload = RAG.requests(Arrival(num_requests=300, rate=60.0, seed=2))
        return simulate(workload, make_replica(), COST, ClusterSettings(8, dispatch=dispatch))

    assert run("prefix-affinity").cache_hit_share > 1.3 * run("round-robin").cache_hit_share


@pytest.mark.slow
def test_more_replicas_answer_sooner(make_replica):
    def run(count: int):
        workload = BATCH.requests(Arrival(num_requests=120))
        return simulate(workload, make_replica(max_running=8), COST, ClusterSettings(count))

    one, four = run(1), run(4)
    assert 2.5 < one.duration_s / four.duration_s < 4.2  # the longest answer is not divided


# ---------------------------------------------------------------- prefill and decode apart


def one_request(make_replica, cluster: ClusterSettings, cost: LinearCost):
    arrival = Arrival(num_requests=1, rate=math.inf)
    return simulate(given_lengths([100], [11], arrival), make_replica(), cost, cluster)


def test_a_split_costs_the_transfer_and_nothing_else(make_replica):
    """100 prompt tokens at 1 ms, 11 output tokens: 100 ms for the first, then 10 decodes of 5 ms."""
    cost = LinearCost(prefill_token_s=0.001, decode_row_s=0.005)
    whole = one_request(make_replica, ClusterSettings(2), cost)
    assert whole.ttft_ms.p50 == pytest.approx(100)
    assert whole.e2e_ms.p50 == pytest.approx(150)

    # The decode replica pays for one token of the prompt, the one it feeds: 1 ms instead of 5.
    split = one_request(make_replica, ClusterSettings(2, 1, transfer_token_s=0.0004), cost)
    assert split.ttft_ms.p50 == pytest.approx(100)
    assert split.e2e_ms.p50 == pytest.approx(100 + 100 * 0.4 + 1 + 9 * 5)
    assert split.itl_ms.p99 == pytest.approx(41, rel=0.02)  # the transfer is the second token's gap


@pytest.mark.slow
def test_a_split_keeps_decodes_free_of_prompts(make_replica):
    """Long prompts in the way of decodes: apart, no token waits for somebody else's prompt."""
    workload = Rag(document=Lengths(2000, 0.2, 1000, 4000), answer=Lengths(60, 0.3, 20, 120))
    cost = LinearCost(step_s=0.004, prefill_token_s=1e-4)

    def run(cluster: ClusterSettings):
        settings = make_replica(num_pages=16_384, radix_cache=False)
        return simulate(workload.requests(Arrival(num_requests=80, rate=12.0)), settings, cost, cluster)

    mixed, split = run(ClusterSettings(4)), run(ClusterSettings(4, 3))

    assert split.itl_ms.p99 < 0.1 * mixed.itl_ms.p99
    assert split.num_requests == mixed.num_requests == 80


def test_a_link_sends_one_after_the_other(make_replica):
    """Four prompts of 100 tokens are done at once; their KV takes 1 s each."""
    cost = LinearCost(step_s=0.001)
    workload = given_lengths([100], [2], Arrival(num_requests=4, rate=math.inf))
    report = simulate(workload, make_replica(), cost, ClusterSettings(2, 1, transfer_token_s=0.01))
    assert report.duration_s == pytest.approx(4.0, abs=0.01)


# ---------------------------------------------------------------- the edges


def test_what_cannot_run_is_refused_and_counted(make_replica):
    too_long = [SimRequest(f"long-{size}", 0.0, bytes(4 * size), 5, 5) for size in (9000, 9500)]
    fine = SimRequest("fine", 0.5, bytes(4 * 10), 5, 5)
    report = simulate(iter([*too_long, fine]), make_replica(), COST)
    assert report.num_requests == 1
    ((reason, count),) = report.failures.items()
    assert count == 2
    assert "the prompt has 9000 tokens and the context holds" in reason


def test_a_deadline_in_the_queue_is_a_failure(make_replica):
    workload = given_lengths([10], [100], Arrival(num_requests=3, rate=math.inf))
    settings = make_replica(max_running=1, queue_timeout=0.2)
    report = simulate(workload, settings, LinearCost(step_s=0.01))
    assert report.num_requests == 1
    assert sum(report.failures.values()) == 2


def test_arrivals_wait_at_the_door_when_all_queues_are_full(make_replica):
    settings = make_replica(max_running=2, max_queued_requests=3)
    measurements = Measurements()
    cluster = Cluster(ClusterSettings(2), settings, COST, measurements)
    most = Counter[str]()

    def watched():
        for request in given_lengths([10], [5], Arrival(num_requests=60, rate=math.inf)):
            most["outstanding"] = max(most["outstanding"], *(r.num_outstanding for r in cluster.replicas))
            yield request

    cluster.run(watched())
    assert measurements.num_answered == 60
    assert most["outstanding"] == 5


def test_objectives_decide_what_counts_as_goodput(make_replica):
    def run(slo_ms):
        workload = given_lengths([10], [10], Arrival(num_requests=10, rate=math.inf))
        return simulate(workload, make_replica(max_running=1), LinearCost(step_s=0.01), slo_ms=slo_ms)

    # One after the other, 0.1 s each: the k-th has its first token at 0.1 k + 0.01 s.
    report = run({"ttft": 500.0})
    assert report.slo_share == pytest.approx(0.5)
    assert report.goodput == pytest.approx(5 / 1.0)
    assert run({"tpot": 9.0}).goodput == 0.0
    assert run(None).goodput == pytest.approx(10.0)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (ClusterSettings(0), "--replicas is 0, but it must be at least 1"),
        (ClusterSettings(2, 2), r"--prefill-replicas is 2, but it must lie in \[1, 1\]"),
    ],
)
def test_bad_clusters_are_refused(make_replica, settings, message):
    with pytest.raises(ConfigError, match=message):
        simulate(iter([]), make_replica(), COST, settings)


@pytest.mark.slow
def test_chat_on_a_gpu_is_in_the_known_range():
    """Llama 8B on one H200: a token every few ms when few talk, thousands per second when many do."""
    from engine.runtime.config.engine_config import EngineConfig
    from engine.simulator.setup import replica_settings

    model, device = MODELS["llama-3.1-8b"], DEVICES["h200"]
    settings = replica_settings(EngineConfig(), model, device)
    assert 700_000 < settings.capacity.max_total_tokens < 900_000  # (141 - 16) GB · 0.88 / 131 kB
    quiet = simulate(
        GENERATED["chat"].requests(Arrival(num_requests=20, rate=0.5)), settings, Roofline(model, device)
    )
    busy = simulate(
        GENERATED["chat"].requests(Arrival(num_requests=400, rate=400)), settings, Roofline(model, device)
    )
    assert 4.0 < quiet.tpot_ms.p50 < 8.0
    assert busy.output_tok_s > 4000
