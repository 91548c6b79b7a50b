"""A manager with several replicas: who gets what, and what clients see when one is lost."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from msgspec.structs import replace

from engine.launch.child.control import Endpoints, Role, Settings
from engine.runtime.config.device_config import ParallelConfig
from engine.runtime.config.engine_config import EngineConfig
from engine.runtime.errors import EngineDeadError, QueueFullError, RequestError
from engine.runtime.messages import BatchTextOutput, Call, Explain, Explanation, LiveRequest, RequestList
from engine.runtime.sampling_params import SamplingParams
from engine.runtime.scheduler_report import SchedulerReport
from engine.tokenizer_manager.all_processes import AllProcesses
from engine.tokenizer_manager.dispatch.policies import BLOCK, PrefixAffinity
from engine.tokenizer_manager.generation import GenerationRequest
from engine.tokenizer_manager.http.endpoints.worker import all_loads
from engine.tokenizer_manager.scheduling_options import Scheduling

from ..fake_engine import CAPACITY, LENGTH, SOURCE, SPEC, WAIT_S, FakeEngine, row
from ..test_manager import Setup, texts

WHY = "scheduler of replica 1 was killed by SIGKILL"


def run(test: Callable[[Setup, FakeEngine], Awaitable[None]], **settings: object) -> None:
    """Run a test on two replicas, whose requests are dispatched in turn if no policy is given."""

    async def main() -> None:
        other = FakeEngine()
        async with asyncio.timeout(WAIT_S):
            await test(Setup(others=[other], **{"dispatch_policy": "round-robin"} | settings), other)

    asyncio.run(main())


def test_requests_are_spread_and_answered_each_by_its_replica():
    async def test(setup: Setup, other: FakeEngine) -> None:
        streams = [await setup.start("hi") for _ in range(2)]
        asked = [setup.engine.next_request(), other.next_request()]
        assert [request.rid for request in asked] == [stream.choices[0].rid for stream in streams]
        for request, text in zip(asked, "ab", strict=True):
            setup.manager.on_message(BatchTextOutput([row(request, text, finish=LENGTH)]))
        assert [await texts(stream) for stream in streams] == [["a"], ["b"]]

    run(test)


def test_samples_of_a_prompt_stay_together():
    async def test(setup: Setup, other: FakeEngine) -> None:
        for _ in range(2):
            await setup.start("hi", n=3)
        for engine in (setup.engine, other):
            assert len({engine.next_request().group for _ in range(3)}) == 1
            assert engine.generate.empty()

    run(test)


def test_a_client_chooses_and_a_wrong_number_is_refused():
    async def test(setup: Setup, other: FakeEngine) -> None:
        def wish(number: int) -> GenerationRequest:
            params, chosen = SamplingParams(), Scheduling(replica=number)
            return GenerationRequest(prompts=["hi"], sampling=params, scheduling=chosen)

        for _ in range(3):
            await setup.manager.start(wish(1))
            assert other.next_request().data_parallel_rank == 1
        for number in (2, -1):
            wrong = f"data_parallel_rank is {number}, but the server has 2 replicas"
            with pytest.raises(RequestError, match=wrong) as error:
                await setup.manager.start(wish(number))
            assert error.value.param == "data_parallel_rank"

    run(test)


def test_streams_of_a_lost_replica_go_on_with_the_other_at_once():
    async def test(setup: Setup, other: FakeEngine) -> None:
        first, second = await setup.start("hi"), await setup.start("ho")
        kept, moved = setup.engine.next_request(), other.next_request()
        for request in (kept, moved):
            setup.manager.on_message(BatchTextOutput([row(request, "ab")]))
        setup.manager.peers_lost(WHY, None, 1, 3)

        again = setup.engine.next_request()
        assert again.delivered is not None
        assert again.delivered.output_ids == row(moved, "ab").token_ids
        assert again.rid != moved.rid
        assert setup.engine.aborts.get_nowait().rid == other.aborts.get_nowait().rid == moved.rid
        assert setup.engine.generate.empty()  # the other stream was not touched
        assert [load.num_requests for load in setup.manager._dispatcher.loads] == [2, 0]
        assert setup.manager.engine.unhealthy_reason() is None
        setup.manager.on_message(BatchTextOutput([row(moved, "X")]))  # was still under way
        for request, text in ((kept, "c"), (again, "d")):
            setup.manager.on_message(BatchTextOutput([row(request, text, finish=LENGTH)]))
        assert [await texts(stream) for stream in (first, second)] == [["abc"], ["abd"]]

        await setup.start("more")
        setup.engine.next_request()
        setup.manager.peers_back(CAPACITY, 3, 1)
        for _ in range(2):
            await setup.start("more")
        assert other.next_request().rid != setup.engine.next_request().rid

    run(test)


def test_when_all_are_lost_requests_wait_for_the_first_that_is_back():
    async def test(setup: Setup, other: FakeEngine) -> None:
        await setup.start("hi")
        setup.engine.next_request()
        setup.manager.peers_lost("scheduler of replica 0 hangs", None, 0, 3)
        moved = other.next_request()
        assert setup.manager.engine.unhealthy_reason() is None
        setup.manager.on_message(BatchTextOutput([row(moved, "a" * 20)]))  # progress: it is no suspect
        setup.manager.peers_lost(WHY, None, 1, 2)
        await setup.start("ho")
        assert setup.engine.generate.empty() and other.generate.empty()
        assert setup.manager.engine.unhealthy_reason() == "scheduler of replica 0 hangs"
        setup.manager.peers_back(CAPACITY, 2, 1)
        assert [other.next_request().delivered is None for _ in range(2)] == [False, True]
        setup.manager.peers_back(CAPACITY, 2, 0)
        assert setup.engine.generate.empty()

    run(test)


def test_a_request_that_kills_one_replica_after_the_other_is_not_tried_a_third_time():
    async def test(setup: Setup, other: FakeEngine) -> None:
        poison = await setup.start("die")
        setup.engine.next_request()
        setup.manager.peers_lost("scheduler of replica 0 was killed", None, 0, 3)
        other.next_request()
        bystander = await setup.start("hi")
        harmless = other.next_request()
        setup.manager.on_message(BatchTextOutput([row(harmless, "a" * 20)]))
        setup.manager.peers_lost(WHY, None, 1, 2)
        setup.manager.peers_back(CAPACITY, 2, 0)
        assert setup.engine.next_request().delivered is not None
        assert setup.engine.generate.empty()
        with pytest.raises(RequestError) as error:
            await texts(poison)
        assert error.value.code == "poison_request"
        assert len(setup.manager.request_log) == 1
        bystander.close()

    run(test)


def test_the_queue_is_that_of_all_replicas():
    async def test(setup: Setup, other: FakeEngine) -> None:
        for _ in range(2 * CAPACITY.max_running_requests + 3):
            await setup.start("hi")
        with pytest.raises(QueueFullError):
            await setup.start("hi")

    run(test, max_queued_requests=3)


def test_loads_and_metrics_name_each_replica():
    async def test(setup: Setup, other: FakeEngine) -> None:
        now_s = setup.clock.now_s
        for replica, running in enumerate((3, 5)):
            report = SchedulerReport.from_flat(
                {
                    "sent_s": now_s,
                    "num_running_reqs": running,
                    "kv_used_tokens": 32,
                    "prompt_tokens_total": 10,
                    "policy": "fcfs",
                    "replica": replica,
                }
            )
            setup.manager.on_message(report)
        assert [(load.dp_rank, load.num_running_reqs) for load in all_loads(setup.services)] == [
            (0, 3),
            (1, 5),
        ]
        setup.manager.peers_lost(WHY, None, 1, 3)
        engine = setup.manager.engine
        replicas = [(each, engine.reason_against(n) is None) for n, each in enumerate(engine.reports)]
        page = setup.services.metrics.render(engine.report, replicas=replicas)
        assert 'engine:num_running_reqs{model_name="org/tiny"} 8\n' in page
        assert 'engine:replica_num_running_reqs{model_name="org/tiny",replica="1"} 5\n' in page
        assert 'engine:replica_healthy{model_name="org/tiny",replica="0"} 1\n' in page
        assert 'engine:replica_healthy{model_name="org/tiny",replica="1"} 0\n' in page
        assert 'policy="fcfs"} 1\n' in page
        # What the lost scheduler held is no longer held; what it did still counts.
        setup.manager.on_message(
            SchedulerReport.from_flat({"sent_s": now_s + 1, "num_running_reqs": 4, "prompt_tokens_total": 12})
        )
        assert engine.report is not None
        assert (engine.report.num_running_reqs, engine.report.totals.prompt_tokens) == (4, 22)
        assert engine.report.sent_s == now_s + 1

    run(test)


def test_calls_are_answered_by_all():
    async def test(setup: Setup, other: FakeEngine) -> None:
        control = setup.manager.control
        assert (await control.flush_cache()).flushed_tokens == 64
        known = Explanation(found=True, sentence="it waited")
        other.explanations["gen-1"] = known
        assert (await control.explain("gen-1")).sentence == "it waited"
        live = [LiveRequest(rid, "decode", 1, 1, 1, 0, 0.5) for rid in "ab"]
        setup.engine.live = RequestList(live[:1], 1, {"decodes": 1})
        other.live = RequestList(live[1:], 4, {"decodes": 3})
        listed = await control.list_requests(10)
        assert (listed.requests, listed.total, listed.last_pass) == (live, 5, {"decodes": 4})
        assert (await control.list_requests(1)).requests == live[:1]

        other.answers = False
        waiting = asyncio.create_task(control.flush_cache())
        while other.explains.qsize() < 2:  # until both have the call before this one
            await asyncio.sleep(0)
            setup.manager._dispatcher.send(Call(0, Explain("x")))
        setup.manager.peers_lost(WHY, None, 1, 3)
        with pytest.raises(EngineDeadError, match="replica 1"):
            await waiting
        assert (await control.flush_cache()).flushed_tokens == 32  # of the one that runs

    run(test)


def test_an_abort_reaches_the_replica_that_has_the_request():
    async def test(setup: Setup, other: FakeEngine) -> None:
        await setup.start("hi")
        second = await setup.start("ho")
        rid = other.next_request().rid
        second.close()
        assert other.aborts.get_nowait().rid == rid
        loads = setup.manager._dispatcher.loads
        assert [(load.num_requests, load.num_tokens > 0) for load in loads] == [(1, True), (0, False)]

    run(test)


def test_a_profile_waits_for_every_process_under_the_name_that_it_has_itself():
    config = EngineConfig(parallel=ParallelConfig(dp=2, tp=2))
    of_replica = [(Role.SCHEDULER, 0), (Role.DETOKENIZER, 0), (Role.MODEL_RUNNER, 1)]
    processes = [(role, rank, replica) for replica in (0, 1) for role, rank in of_replica]
    settings = [
        Settings(role, config, SOURCE, SPEC, Endpoints("a", "b", "c"), rank, replica=replica)
        for role, rank, replica in [(Role.TOKENIZER_MANAGER, 0, 0), *processes]
    ]
    labels = [each.label for each in settings]

    assert labels[:3] == ["tokenizer_manager", "scheduler_of_replica_0", "detokenizer_of_replica_0"]
    assert len(set(labels)) == 7
    assert AllProcesses(lambda order: True, config)._labels == labels


def test_what_fits_is_what_fits_into_every_replica():
    async def test(setup: Setup, other: FakeEngine) -> None:
        assert setup.manager.capacity == CAPACITY
        smaller = replace(CAPACITY, num_pages=CAPACITY.num_pages // 2)
        setup.manager.peers_lost(WHY, None, 1, 3)
        setup.manager.peers_back(smaller, 3, 1)
        assert setup.manager.capacity == smaller

    run(test)


def test_a_cache_that_lacks_what_was_expected_is_known_to_lack_it():
    prompt = [1] * 4 * BLOCK + [2]

    async def test(setup: Setup, other: FakeEngine) -> None:
        policy = setup.manager._dispatcher._policy
        assert isinstance(policy, PrefixAffinity)
        for cached, known in ((0, 4), (4 * BLOCK, 4), (0, 1)):
            await setup.start(prompt)
            request = setup.engine.next_request()
            names = policy._names_of(request)
            assert policy._maps[0].match(names) == 4
            setup.manager.on_message(BatchTextOutput([row(request, "x", cached=cached, finish=LENGTH)]))
            assert (policy._maps[0].match(names), policy._expected) == (known, {})

    run(test, dispatch_policy="prefix-affinity")
