"""What clients see of a lost scheduler or detokenizer: a pause."""

from __future__ import annotations

import asyncio

import pytest

from engine.runtime.errors import EngineDeadError, QueueFullError, RequestError
from engine.runtime.messages import (
    BatchTextOutput,
    CallDone,
    Delivered,
    Finish,
    FinishKind,
    GenerateRequest,
    PauseDone,
    PauseMode,
    TextOutput,
    Usage,
)
from engine.runtime.sampling_params import SamplingParams
from engine.runtime.scheduler_report import SchedulerReport
from engine.tokenizer_manager.engine_state import combined
from engine.tokenizer_manager.generation import Generation, GenerationRequest
from engine.tokenizer_manager.scheduling_options import Scheduling

from .fake_engine import CAPACITY, LENGTH, TOKENIZER, ids_of, row, say_all
from .test_manager import Setup, run, texts

WHY = "scheduler was killed by SIGKILL"


def test_a_stream_goes_on_behind_what_was_delivered():
    async def test(setup: Setup) -> None:
        generation = await setup.start("hi", max_new_tokens=9, seed=5, prompt_logprobs=1)
        first = setup.engine.next_request()
        setup.manager.on_message(BatchTextOutput([row(first, "ab", total=2, cached=1)]))
        setup.manager.peers_lost(WHY)
        assert setup.engine.generate.empty()
        setup.manager.on_message(BatchTextOutput([row(first, "c", total=3, cached=1)]))  # was still under way
        setup.manager.peers_back(CAPACITY)
        again = setup.engine.next_request()

        assert setup.engine.aborts.get_nowait().rid == first.rid
        assert again.rid != first.rid
        assert (ids_of(again), again.arrival_s) == (ids_of(first), first.arrival_s)
        assert again.sampling.seed == 5
        assert again.sampling.prompt_logprobs is None  # the client has them
        usage = Usage(2, 3, cached_tokens=1, queue_s=0.25)
        assert again.delivered == Delivered(row(first, "abc").token_ids, usage)

        setup.manager.on_message(
            BatchTextOutput([row(first, "X", finish=LENGTH)])
        )  # nobody knows it any more
        setup.manager.on_message(BatchTextOutput([row(again, "d", finish=LENGTH)]))
        assert await texts(generation) == ["abcd"]
        assert len(setup.manager.request_log) == 0
        assert 'engine:resumed_reqs_total{model_name="org/tiny"} 1' in setup.services.metrics.render(None)

    run(test)


def test_a_scheduler_that_restarts_in_a_pause_is_paused_before_it_has_requests():
    async def test(setup: Setup) -> None:
        await setup.start("hi", max_new_tokens=9)
        setup.engine.next_request()
        await setup.manager.control.pause(PauseMode.RETRACT)
        setup.manager.peers_lost(WHY)
        setup.manager.peers_back(CAPACITY)
        assert setup.engine.pauses == [PauseMode.RETRACT, PauseMode.RETRACT]
        setup.engine.next_request()
        await setup.manager.control.resume()
        setup.manager.peers_lost(WHY)
        setup.manager.peers_back(CAPACITY)
        assert setup.engine.pauses[2:] == [None]

    run(test)


def test_a_manager_that_restarts_learns_of_a_pause_from_the_report():
    async def test(setup: Setup) -> None:
        setup.manager.on_message(SchedulerReport(sent_s=1.0, paused="keep"))
        assert setup.manager.engine.pause is PauseMode.KEEP
        await setup.manager.control.resume()
        setup.manager.on_message(SchedulerReport(sent_s=1.1, paused="keep"))  # was still under way
        assert setup.manager.engine.pause is None

    run(test)
    both = combined([SchedulerReport(sent_s=1.0), SchedulerReport(sent_s=1.0, paused="keep")], 1.0)
    assert both.paused == "keep", "one of two schedulers is"


def test_a_pause_that_waits_for_requests_has_more_time_than_other_calls():
    async def test(setup: Setup) -> None:
        calls = setup.manager.control._calls
        calls._timeout_s, calls._send = 0.0, lambda _message: None
        with pytest.raises(EngineDeadError, match="did not answer within 0 s"):
            await setup.manager.control.pause(PauseMode.KEEP)
        waiting = asyncio.create_task(setup.manager.control.pause(PauseMode.WAIT))
        for _ in range(3):
            await asyncio.sleep(0)
        setup.manager.on_message(CallDone(2, PauseDone(paused=True)))
        await waiting

    run(test)


def test_a_second_loss_starts_from_what_was_delivered_by_then():
    async def test(setup: Setup) -> None:
        await setup.start("hi")
        request = setup.engine.next_request()
        for text in ("a" * 20, "b" * 20):
            setup.manager.on_message(BatchTextOutput([row(request, text)]))
            setup.manager.peers_lost(WHY)
            setup.manager.peers_back(CAPACITY)
            request = setup.engine.next_request()

        assert request.delivered is not None
        assert (
            TOKENIZER.decode(memoryview(request.delivered.output_ids).cast("i").tolist())
            == "a" * 20 + "b" * 20
        )

    run(test)


def test_new_requests_wait_and_the_server_says_why():
    async def test(setup: Setup) -> None:
        setup.manager.peers_lost(WHY)
        waiting = await setup.start("hi")

        assert setup.engine.generate.empty()
        assert setup.manager.engine.unhealthy_reason() == WHY
        setup.manager.peers_back(CAPACITY)
        assert setup.manager.engine.unhealthy_reason() is None
        request = setup.engine.next_request()
        assert request.delivered is None
        assert setup.engine.aborts.empty()
        setup.manager.on_message(BatchTextOutput([row(request, "x", finish=LENGTH)]))
        assert await texts(waiting) == ["x"]

    run(test)


def test_the_queue_of_those_who_wait_has_its_limit():
    async def test(setup: Setup) -> None:
        setup.manager.peers_lost(WHY)
        for _ in range(4 + CAPACITY.max_running_requests):
            await setup.start("hi")
        with pytest.raises(QueueFullError):
            await setup.start("hi")

    run(test, max_queued_requests=4)


def test_counters_do_not_fall_to_nothing_until_the_next_report():
    """A scheduler that outlived the detokenizer goes on counting: to Prometheus all of it would be new."""

    async def test(setup: Setup) -> None:
        now_s = setup.clock.now_s
        setup.manager.on_message(
            SchedulerReport.from_flat({"sent_s": now_s, "generation_tokens_total": 1000, "stalled": "full"})
        )
        setup.clock.now_s += 300.0
        setup.manager.peers_lost(WHY)
        setup.manager.peers_back(CAPACITY)
        page = setup.services.metrics.render(setup.manager.engine.report)

        assert 'engine:generation_tokens_total{model_name="org/tiny"} 1000\n' in page
        assert 'engine:restarts_total{model_name="org/tiny"} 1\n' in page
        assert setup.manager.engine.unhealthy_reason() is None
        setup.manager.on_message(SchedulerReport(sent_s=now_s + 1.0, stalled="full"))  # was under way
        assert setup.manager.engine.unhealthy_reason() is None

    run(test)


def test_questions_are_answered_with_the_reason():
    async def test(setup: Setup) -> None:
        setup.engine.answers = False
        asked = asyncio.create_task(setup.manager.control.flush_cache())
        await asyncio.sleep(0)
        setup.manager.peers_lost(WHY)
        with pytest.raises(EngineDeadError, match=WHY):
            await asked
        with pytest.raises(EngineDeadError, match=WHY):
            await setup.manager.control.explain("cmpl-1")

    run(test)


def test_a_client_that_leaves_meanwhile_is_forgotten():
    async def test(setup: Setup) -> None:
        generation = await setup.start("hi")
        request = setup.engine.next_request()
        setup.manager.peers_lost(WHY)
        generation.close()
        setup.manager.peers_back(CAPACITY)

        assert setup.engine.generate.empty()
        assert setup.engine.aborts.get_nowait().rid == request.rid
        await setup.manager.wait_idle()

    run(test)


@pytest.mark.parametrize("sent", [True, False])
def test_an_abort_meanwhile_is_answered_at_once(sent):
    async def test(setup: Setup) -> None:
        generation = None
        if sent:
            generation = await setup.start("hi")
            setup.manager.on_message(BatchTextOutput([row(setup.engine.next_request(), "ab")]))
        setup.manager.peers_lost(WHY)
        generation = generation or await setup.start("hi")
        assert setup.manager.abort(generation.id, "aborted by request") == 1

        assert await texts(generation) == ["ab" if sent else ""]
        assert generation.choices[0].finish == Finish(FinishKind.ABORT, message="aborted by request")
        assert len(setup.manager.request_log) == 0
        setup.manager.peers_back(CAPACITY)
        assert setup.engine.generate.empty()

    run(test)


def test_an_abort_that_the_lost_scheduler_had_to_answer_is_answered_when_it_is_lost():
    async def test(setup: Setup) -> None:
        generation = await setup.start("hi")
        setup.engine.next_request()
        setup.manager.abort(generation.id, "aborted by request")
        assert not generation.finished
        setup.manager.peers_lost(WHY)

        assert await texts(generation) == [""]
        setup.manager.peers_back(CAPACITY)
        assert setup.engine.generate.empty()

    run(test)


@pytest.mark.parametrize("leaves", ["aborted", "disconnected"])
def test_who_leaves_meanwhile_makes_room_at_once(leaves):
    async def test(setup: Setup) -> None:
        live = [await setup.start("hi") for _ in range(8 + 2)]
        setup.manager.on_message(
            SchedulerReport(sent_s=setup.clock.now_s + 1.0, num_running_reqs=8, num_queue_reqs=2)
        )
        setup.manager.peers_lost(WHY)
        with pytest.raises(QueueFullError):
            await setup.start("hi")
        if leaves == "aborted":
            setup.manager.abort(live[-1].id, "aborted by request")
        else:
            live[-1].close()
        await setup.start("hi")
        with pytest.raises(QueueFullError):
            await setup.start("hi")

    run(test, max_queued_requests=2)


def expired(setup: Setup, after_s: float) -> None:
    setup.clock.now_s += after_s
    setup.manager.check_time()


LIMITS = [
    ({"queue_timeout_s": 5.0}, {}, 503, "queue_timeout"),
    ({"timeout_s": 5.0}, {}, 504, "request_timeout"),
    ({}, {"queue_timeout": 5.0}, 503, "queue_timeout"),
    ({"timeout_s": 9.0}, {"request_timeout": 5.0}, 504, "request_timeout"),
]


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize(("own", "server", "status", "code"), LIMITS)
def test_whose_time_is_over_while_nobody_works_is_told_then(own, server, status, code, before):
    async def test(setup: Setup) -> None:
        async def start() -> Generation:
            wishes = Scheduling(**own)
            return await setup.manager.start(
                GenerationRequest(prompts=["hi"], sampling=SamplingParams(), n=2, scheduling=wishes)
            )

        generation = await start() if before else None
        setup.manager.peers_lost(WHY)
        generation = generation or await start()
        expired(setup, 4.9)
        assert not generation.finished
        expired(setup, 0.2)

        with pytest.raises(RequestError, match="while a process of the server was") as failure:
            await texts(generation)
        assert (failure.value.status, failure.value.code) == (status, code)
        assert len(setup.manager.request_log) == 0
        while not setup.engine.generate.empty():
            setup.engine.next_request()
        setup.manager.peers_back(CAPACITY)
        assert setup.engine.generate.empty()

    run(test, scheduler=server)


def test_a_queue_timeout_does_not_concern_who_has_a_token():
    async def test(setup: Setup) -> None:
        generation = await setup.start("hi")
        setup.manager.on_message(BatchTextOutput([row(setup.engine.next_request(), "a")]))
        setup.manager.peers_lost(WHY)
        expired(setup, 6.0)
        assert not generation.finished

    run(test, scheduler={"queue_timeout": 5.0})


def test_whose_time_is_over_while_it_waits_for_its_trial_is_told_then():
    async def test(setup: Setup) -> None:
        tried, waiting = [await setup.start("hi") for _ in range(2)]
        for _ in range(2):
            setup.manager.peers_lost(WHY)
            setup.manager.peers_back(CAPACITY)
        expired(setup, 5.1)

        with pytest.raises(RequestError, match="to be started"):
            await texts(waiting)
        assert not tried.finished  # a scheduler has it, and knows whether it has begun

    run(test, scheduler={"queue_timeout": 5.0})


def test_a_scheduler_that_lives_answers_itself_unless_it_hangs():
    async def test(setup: Setup) -> None:
        generation = await setup.start("hi")
        expired(setup, 9.5)
        assert not generation.finished
        expired(setup, 1.0)

        with pytest.raises(RequestError, match="the request took 10.5 s, and had generated 0 of"):
            await texts(generation)
        assert setup.engine.next_abort().reason == "time limit"

    run(test, scheduler={"request_timeout": 5.0, "queue_timeout": 4.0})


def test_limits_of_requests_that_have_ended_are_forgotten():
    async def test(setup: Setup) -> None:
        setup.engine.script = say_all("x")
        for _ in range(200):
            assert await texts(await setup.start("hi")) == ["x"]
        assert len(setup.manager._aborter._time_limits._heap) <= 64 + 1

    run(test, scheduler={"request_timeout": 5.0})


def test_who_only_waited_in_the_queue_of_a_lost_scheduler_is_not_tried():
    async def test(setup: Setup) -> None:
        running, *queued = [await setup.start("hi") for _ in range(6)]
        for _ in range(2):
            requests = [setup.engine.next_request() for _ in range(6)]
            began = {request.rid for request in requests if request.rid.startswith(running.id)}
            setup.manager.peers_lost(WHY, began)
            setup.manager.peers_back(CAPACITY, restarts_left=1)

        with pytest.raises(RequestError, match="not tried again"):
            await texts(running)
        assert setup.engine.generate.qsize() == len(queued)

    run(test)


@pytest.mark.parametrize("choice", ["", "-1"])
def test_clients_keep_the_ids_that_they_know(choice):
    async def test(setup: Setup) -> None:
        generation = await setup.start("hi", n=2)
        rids = [setup.engine.next_request().rid for _ in range(2)]
        setup.manager.peers_lost(WHY)
        setup.manager.peers_back(CAPACITY)
        new = [setup.engine.next_request().rid for _ in range(2)]
        while not setup.engine.aborts.empty():
            setup.engine.aborts.get_nowait()

        known = f"{generation.id}{choice}"
        assert setup.manager.abort(known, "aborted by request") == (1 if choice else 2)
        assert setup.engine.aborts.get_nowait().rid == (new[1] if choice else new[0])
        assert set(rids).isdisjoint(new)

    run(test)


def test_a_request_that_was_lost_twice_and_got_nowhere_ends_with_an_error():
    async def test(setup: Setup) -> None:
        generation = await setup.start("hi", n=2)
        for _ in range(2):
            setup.manager.peers_lost(WHY)
            setup.manager.peers_back(CAPACITY)
        assert setup.engine.generate.qsize() == 4
        with pytest.raises(RequestError, match="not tried again") as failure:
            await texts(generation)

        assert (failure.value.status, failure.value.code) == (500, "poison_request")
        assert len(setup.manager.request_log) == 0

        setup.engine.script = say_all("x")
        assert await texts(await setup.start("other")) == ["x"]

    run(test)


def test_suspects_are_tried_one_after_the_other():
    async def test(setup: Setup) -> None:
        generations = [await setup.start("hi") for _ in range(3)]
        for _ in range(2):
            while not setup.engine.generate.empty():
                setup.engine.next_request()
            setup.manager.peers_lost(WHY)
            setup.manager.peers_back(CAPACITY)
        for generation in generations:
            assert setup.engine.generate.qsize() == 1
            request = setup.engine.next_request()
            assert request.rid.startswith(generation.id)
            setup.manager.on_message(BatchTextOutput([row(request, "x", finish=LENGTH)]))
            assert await texts(generation) == ["x"]

    run(test)


def test_who_waits_for_its_trial_does_not_run_in_a_scheduler_that_has_outlived_the_detokenizer():
    async def test(setup: Setup) -> None:
        first, second = [await setup.start("hi") for _ in range(2)]
        sent: list[GenerateRequest] = []
        for _ in range(2):
            sent = [setup.engine.next_request() for _ in range(2)]
            while not setup.engine.aborts.empty():
                setup.engine.next_abort()
            setup.manager.peers_lost(WHY)
            setup.manager.peers_back(CAPACITY)
        aborted = {setup.engine.next_abort().rid for _ in range(2)}

        assert aborted == {request.rid for request in sent}
        ended = TextOutput(sent[1].rid, "", b"", Usage(2, 0), Finish(FinishKind.ABORT, message="trial"))
        setup.manager.on_message(BatchTextOutput([ended]))  # of the id that nobody has any more
        for generation in (first, second):
            request = setup.engine.next_request()
            setup.manager.on_message(BatchTextOutput([row(request, "x", finish=LENGTH)]))
            assert await texts(generation) == ["x"]

    run(test)


def test_an_abort_of_one_that_waits_for_its_trial_is_answered_at_once():
    async def test(setup: Setup) -> None:
        tried, waiting = [await setup.start("hi") for _ in range(2)]
        for _ in range(2):
            setup.manager.peers_lost(WHY)
            setup.manager.peers_back(CAPACITY)

        assert setup.manager.abort(waiting.id, "aborted by request") == 1
        assert waiting.finished
        assert await texts(waiting) == [""]
        assert not tried.finished
        assert len(setup.manager.request_log) == 1

    run(test)
