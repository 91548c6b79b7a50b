from __future__ import annotations

import asyncio
import contextlib
from array import array
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import msgspec
import pytest

from engine.runtime.errors import EngineDeadError, QueueFullError, RequestError
from engine.runtime.messages import AbortRequest, BatchTextOutput, Finish, FinishKind
from engine.runtime.sampling_params import MAX_SEED, SamplingParams
from engine.runtime.scheduler_report import SchedulerReport
from engine.runtime.transport.kv_transfer import TransferFigures
from engine.tokenizer_manager.generation import Generation, GenerationRequest, Prompt
from engine.tokenizer_manager.http.services import Services
from engine.tokenizer_manager.prompt_encoder import PromptEncoder
from engine.tokenizer_manager.scheduling_options import Scheduling

from .fake_engine import (
    CAPACITY,
    LENGTH,
    TOKENIZER,
    WAIT_S,
    FakeClock,
    FakeEngine,
    ids_of,
    make_services,
    row,
    say_all,
)


class Setup:
    """A manager on a fake engine, driven from one event loop."""

    def __init__(self, **settings: object) -> None:
        self.engine = FakeEngine()
        self.clock = FakeClock()
        self.services: Services = make_services(self.engine, clock=self.clock, **settings)  # type: ignore[arg-type]
        self.manager = self.services.manager

    async def start(self, prompt: str | list[int] = "hi", *, n: int = 1, **sampling: object) -> Generation:
        params = SamplingParams(**sampling)  # type: ignore[arg-type]
        return await self.manager.start(GenerationRequest(prompts=[prompt], sampling=params, n=n))


def run(test: Callable[[Setup], Awaitable[None]], **settings: object) -> None:
    """Runs an async test on a fresh setup."""

    async def main() -> None:
        async with asyncio.timeout(WAIT_S):
            await test(Setup(**settings))

    asyncio.run(main())


async def texts(generation: Generation) -> list[str]:
    """The whole text of each choice."""
    parts = [""] * len(generation.choices)
    async for rows in generation:
        for choice, output in rows:
            choice.read(output)
            parts[choice.index] += output.text
    return parts


def test_a_text_becomes_a_scheduler_request():
    async def test(setup: Setup) -> None:
        await setup.start("hi", max_new_tokens=5, temperature=0.5, stop=("x",))
        request = setup.engine.next_request()

        assert ids_of(request) == [71, 72]
        assert request.sampling == SamplingParams(max_new_tokens=5, temperature=0.5, stop=("x",), seed=7)
        assert request.arrival_s == setup.clock.now_s

    run(test)


def test_without_max_tokens_the_context_is_the_limit():
    async def test(setup: Setup) -> None:
        await setup.start([1] * 200)

        assert setup.engine.next_request().sampling.max_new_tokens == 56

    run(test)


def test_each_of_n_choices_has_an_id_and_a_seed_of_its_own():
    async def test(setup: Setup) -> None:
        generation = await setup.start("hi", n=3, seed=40)
        requests = [setup.engine.next_request() for _ in range(3)]

        assert [request.sampling.seed for request in requests] == [40, 41, 42]
        assert len({request.rid for request in requests}) == 3
        assert [choice.rid for choice in generation.choices] == [request.rid for request in requests]

    run(test)


def test_seeds_wrap_at_the_largest():
    async def test(setup: Setup) -> None:
        await setup.start("hi", n=2, seed=MAX_SEED)

        assert [setup.engine.next_request().sampling.seed for _ in range(2)] == [MAX_SEED, 0]

    run(test)


def test_rows_reach_their_choice_and_the_stream_ends_after_the_last():
    async def test(setup: Setup) -> None:
        generation = await setup.start("hi", n=2)
        first, second = setup.engine.next_request(), setup.engine.next_request()
        reading = asyncio.create_task(texts(generation))
        await asyncio.sleep(0)  # the reader waits
        setup.manager.on_message(BatchTextOutput([row(first, "a"), row(second, "x")]))
        await asyncio.sleep(0)
        setup.manager.on_message(BatchTextOutput([row(second, "y", finish=LENGTH)]))
        setup.manager.on_message(BatchTextOutput([row(first, "b", finish=LENGTH)]))

        assert await reading == ["ab", "xy"]
        assert setup.engine.aborts.empty()
        assert len(setup.manager.request_log) == 0
        await setup.manager.wait_idle()

    run(test)


def test_the_request_log_has_the_prompt_and_what_was_delivered():
    async def test(setup: Setup) -> None:
        await setup.start("hi")
        request = setup.engine.next_request()
        setup.manager.on_message(BatchTextOutput([row(request, "ab")]))
        setup.manager.on_message(BatchTextOutput([row(request, "c")]))
        [logged] = setup.manager.request_log

        assert logged.message == request
        assert memoryview(bytes(logged.delivered_ids)).cast("i").tolist() == [64, 65, 66]

    run(test)


def test_a_stop_string_is_told_to_the_scheduler_and_late_rows_are_dropped():
    async def test(setup: Setup) -> None:
        generation = await setup.start("hi", stop=("END",))
        request = setup.engine.next_request()
        stop = Finish(FinishKind.STOP, matched="END")
        setup.manager.on_message(BatchTextOutput([row(request, "ab", finish=stop)]))
        setup.manager.on_message(BatchTextOutput([row(request, "late")]))
        setup.manager.on_message(BatchTextOutput([row(request, "", finish=Finish(FinishKind.ABORT))]))

        assert await texts(generation) == ["ab"]
        abort = setup.engine.next_abort()
        assert (abort.rid, abort.reason) == (request.rid, "stop string")
        generation.close()
        assert setup.engine.aborts.empty()

    run(test)


@pytest.mark.parametrize("by_detokenizer", [True, False])
def test_an_error_is_told_to_the_scheduler_if_the_detokenizer_made_it(by_detokenizer):
    async def test(setup: Setup) -> None:
        generation = await setup.start("hi")
        request = setup.engine.next_request()
        error = Finish(FinishKind.ERROR, message="no text")
        setup.manager.on_message(
            BatchTextOutput([row(request, "", finish=error, ended_by_detokenizer=by_detokenizer)])
        )

        with pytest.raises(RequestError, match="no text"):
            await texts(generation)
        if by_detokenizer:
            assert setup.engine.next_abort() == AbortRequest(request.rid, "failed in the detokenizer")
        assert setup.engine.aborts.empty()

    run(test)


def test_a_stop_token_needs_no_abort():
    async def test(setup: Setup) -> None:
        setup.engine.script = say_all("a", "b")
        generation = await setup.start("hi")

        assert await texts(generation) == ["ab"]
        assert setup.engine.aborts.empty()

    run(test)


def test_leaving_the_stream_aborts_what_has_not_finished_and_only_that():
    async def test(setup: Setup) -> None:
        with await setup.start("hi", n=3) as generation:
            requests = [setup.engine.next_request() for _ in range(3)]
            setup.manager.on_message(BatchTextOutput([row(requests[1], "done", finish=LENGTH)]))
        generation.close()

        aborts = [setup.engine.next_abort() for _ in range(2)]
        assert [abort.rid for abort in aborts] == [requests[0].rid, requests[2].rid]
        assert {abort.reason for abort in aborts} == {"client disconnected"}
        assert setup.engine.aborts.empty()
        assert len(setup.manager.request_log) == 0

    run(test)


def test_a_failed_choice_fails_the_request_and_aborts_its_siblings():
    async def test(setup: Setup) -> None:
        generation = await setup.start("hi", n=2)
        first, second = setup.engine.next_request(), setup.engine.next_request()
        error = Finish(FinishKind.ERROR, message="bad logits", status=500)
        setup.manager.on_message(BatchTextOutput([row(second, "some"), row(first, "", finish=error)]))

        with pytest.raises(RequestError, match="bad logits") as caught:
            await texts(generation)
        assert caught.value.status == 500
        assert setup.engine.next_abort().rid == second.rid
        assert setup.engine.aborts.empty()
        await setup.manager.wait_idle()

    run(test)


def test_a_failure_does_not_overtake_rows_that_came_before():
    async def test(setup: Setup) -> None:
        generation = await setup.start("hi")
        setup.manager.on_message(BatchTextOutput([row(setup.engine.next_request(), "seen")]))
        setup.manager.engine_died("the scheduler died")

        [(_, output)] = await anext(generation)
        assert output.text == "seen"
        with pytest.raises(EngineDeadError, match="the scheduler died"):
            await anext(generation)

    run(test)


def test_a_dead_engine_ends_every_stream_and_refuses_new_requests():
    async def test(setup: Setup) -> None:
        generations = [await setup.start("hi") for _ in range(2)]
        flush = asyncio.create_task(setup.manager.control.flush_cache())
        await asyncio.sleep(0)
        setup.manager.engine_died("the scheduler died")

        for generation in generations:
            with pytest.raises(EngineDeadError, match="the scheduler died"):
                await texts(generation)
        with pytest.raises(EngineDeadError):
            await flush
        with pytest.raises(EngineDeadError):
            await setup.start("hi")
        assert setup.manager.engine.unhealthy_reason() == "the scheduler died"
        assert len(setup.manager.request_log) == 0

    run(test)


def test_abort_matches_ids_exactly():
    async def test(setup: Setup) -> None:
        one = await setup.start("hi", n=2)
        other = await setup.start("hi")

        assert setup.manager.abort(one.id[:-1], "test") == 0
        assert setup.manager.abort("", "test") == 0
        assert setup.manager.abort(one.id, "test") == 2
        assert setup.manager.abort(other.choices[0].rid, "test") == 1
        assert setup.manager.abort(None, "test") == 3

    run(test)


def test_an_aborted_request_is_answered_by_the_scheduler():
    async def test(setup: Setup) -> None:
        generation = await setup.start("hi")
        request = setup.engine.next_request()
        setup.manager.abort(generation.id, "aborted by request")
        setup.manager.on_message(BatchTextOutput([row(request, "part", finish=Finish(FinishKind.ABORT))]))

        assert await texts(generation) == ["part"]
        assert generation.choices[0].finish == Finish(FinishKind.ABORT)

    run(test)


def test_an_abort_that_nobody_asked_for_is_a_failure():
    async def test(setup: Setup) -> None:
        generation = await setup.start("hi")
        timeout = Finish(FinishKind.ABORT, message="waited longer than 5 s", status=503)
        setup.manager.on_message(BatchTextOutput([row(setup.engine.next_request(), "", finish=timeout)]))

        with pytest.raises(RequestError, match="waited longer than 5 s") as caught:
            await texts(generation)
        assert caught.value.status == 503

    run(test)


def test_draining_refuses_new_requests_and_lets_running_ones_finish():
    async def test(setup: Setup) -> None:
        generation = await setup.start("hi")
        request = setup.engine.next_request()
        setup.manager.drain()
        idle = asyncio.create_task(setup.manager.wait_idle())

        with pytest.raises(RequestError) as caught:
            await setup.start("hi")
        assert caught.value.status == 503
        assert not idle.done()
        setup.manager.on_message(BatchTextOutput([row(request, "end", finish=LENGTH)]))
        assert await texts(generation) == ["end"]
        await idle

    run(test)


@pytest.mark.parametrize("rooms", [TransferFigures(open=1), TransferFigures(waiting=1)])
def test_draining_waits_for_prompts_that_go_to_another_engine(rooms):
    async def test(setup: Setup) -> None:
        def report(figures: TransferFigures) -> None:
            setup.manager.on_message(SchedulerReport(sent_s=1.0, transfer=figures))

        report(rooms)
        setup.manager.drain()
        idle = asyncio.create_task(setup.manager.wait_idle())
        done, _ = await asyncio.wait({idle}, timeout=0.3)
        assert not done
        report(TransferFigures())
        await idle

    run(test)


def test_the_end_of_draining_is_an_error_and_never_a_clean_end():
    async def test(setup: Setup) -> None:
        generation = await setup.start("hi")
        request = setup.engine.next_request()
        setup.manager.abort_all("the server stopped")

        with pytest.raises(RequestError, match="the server stopped"):
            await texts(generation)
        assert setup.engine.next_abort().rid == request.rid
        await setup.manager.wait_idle()

    run(test)


def test_nothing_of_a_request_is_sent_when_a_part_of_it_is_refused():
    async def test(setup: Setup) -> None:
        prompts: list[str | list[int]] = ["fine", [0] * 256]
        with pytest.raises(RequestError):
            await setup.manager.start(GenerationRequest(prompts=prompts, sampling=SamplingParams()))
        with pytest.raises(RequestError, match="temperature"):
            await setup.start("hi", temperature=-1.0)
        with pytest.raises(RequestError, match="token id 258 at position 1"):
            await setup.start([1, 258])

        assert setup.engine.generate.empty()
        assert len(setup.manager.request_log) == 0

    run(test)


def test_a_full_queue_refuses_with_429_until_requests_finish():
    async def test(setup: Setup) -> None:
        running = [await setup.start("hi") for _ in range(CAPACITY.max_running_requests + 2)]
        with pytest.raises(RequestError) as caught:
            await setup.start("hi")
        assert caught.value.status == 429
        for generation in running:
            generation.close()
        await setup.start("hi")

    run(test, max_queued_requests=2)


def test_health_follows_the_age_of_the_heartbeat():
    async def test(setup: Setup) -> None:
        assert setup.manager.engine.unhealthy_reason() is None
        setup.clock.now_s += 61.0
        assert (
            setup.manager.engine.unhealthy_reason()
            == "the scheduler's last heartbeat is 61.0 s old, the limit is 60 s"
        )
        setup.manager.on_message(SchedulerReport(sent_s=setup.clock.now_s))
        assert setup.manager.engine.unhealthy_reason() is None
        setup.manager.drain()
        assert setup.manager.engine.unhealthy_reason() == "the server is shutting down"

    run(test)


def test_before_the_first_report_the_start_counts_as_a_heartbeat():
    async def test(setup: Setup) -> None:
        setup.manager.engine.report = None
        assert setup.manager.engine.unhealthy_reason() is None
        setup.clock.now_s += 61.0
        assert setup.manager.engine.unhealthy_reason() is not None

    run(test)


def test_flushing_waits_for_the_schedulers_answer():
    async def test(setup: Setup) -> None:
        done = await setup.manager.control.flush_cache()

        assert (done.flushed_tokens, done.kept_tokens) == (32, 8)

    run(test)


def test_latencies_are_measured_from_arrival_and_between_rows():
    async def test(setup: Setup) -> None:
        await setup.start("hi")
        request = setup.engine.next_request()
        setup.clock.now_s += 0.75
        setup.manager.on_message(BatchTextOutput([row(request, "a", total=1)]))
        setup.clock.now_s += 0.25
        setup.manager.on_message(BatchTextOutput([row(request, "bc", total=3, finish=LENGTH)]))
        page = setup.services.metrics.render(None)

        assert 'engine:time_to_first_token_seconds_sum{model_name="org/tiny"} 0.75\n' in page
        assert 'engine:inter_token_latency_seconds_sum{model_name="org/tiny"} 0.25\n' in page
        assert 'engine:inter_token_latency_seconds_count{model_name="org/tiny"} 2\n' in page
        assert 'engine:e2e_request_latency_seconds_sum{model_name="org/tiny"} 1.0\n' in page
        assert 'engine:queue_time_seconds_sum{model_name="org/tiny"} 0.25\n' in page
        assert 'engine:finished_reqs_total{model_name="org/tiny",reason="length"} 1\n' in page

    run(test)


def test_a_reader_that_is_cancelled_while_it_waits_leaves_nothing_behind():
    async def test(setup: Setup) -> None:
        async def read() -> None:
            with await setup.start("hi") as generation:
                await texts(generation)

        reader = asyncio.create_task(read())
        while setup.engine.generate.empty():
            await asyncio.sleep(0)
        reader.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await reader

        assert setup.engine.next_abort().reason == "client disconnected"
        assert len(setup.manager.request_log) == 0
        await setup.manager.wait_idle()

    run(test)


class Tokenized(PromptEncoder):
    """Counts what it is asked to do."""

    num_prompts = 0

    async def encode(self, prompts: Sequence[Prompt], **options: Any) -> list[array[int]]:
        self.num_prompts += len(prompts)
        return await super().encode(prompts, **options)


@pytest.mark.parametrize(
    ("prompts", "n", "message"),
    [(["hi"] * 50, 2, "100 answers"), (["hi", "x" * 10_000], 1, r"prompt\[1\] has 10000 characters")],
)
def test_nothing_is_tokenized_of_a_request_that_cannot_run(prompts, n, message):
    async def test(setup: Setup) -> None:
        encoder = Tokenized(TOKENIZER, CAPACITY.vocab_size)
        setup.manager._preparation._encoder = encoder
        with pytest.raises(RequestError, match=message):
            await setup.manager.start(GenerationRequest(prompts=prompts, sampling=SamplingParams(), n=n))
        assert encoder.num_prompts == 0

    run(test)


def test_requests_being_tokenized_have_a_bound_and_give_their_places_back():
    async def test(setup: Setup) -> None:
        first = asyncio.create_task(setup.start("x" * 4500, n=9))  # on a thread
        await asyncio.sleep(0)
        with pytest.raises(QueueFullError, match="9 requests wait"):
            await setup.start(n=1)
        first.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await first
        await setup.start(n=9)

    run(
        test,
        max_queued_requests=1,
        capacity=msgspec.structs.replace(CAPACITY, max_model_len=5000, num_pages=2000),
    )


def test_a_probe_is_let_in_when_the_queue_is_full():
    async def test(setup: Setup) -> None:
        await setup.start(n=9)
        with pytest.raises(QueueFullError):
            await setup.start()
        await setup.manager.start(GenerationRequest(prompts=[[0]], sampling=SamplingParams(), probe=True))

    run(test, max_queued_requests=1)


def test_siblings_share_a_group_and_others_have_none():
    async def test(setup: Setup) -> None:
        await setup.manager.start(
            GenerationRequest(prompts=["hi", "ho"], sampling=SamplingParams(max_new_tokens=1), n=2)
        )
        first, second, third, fourth = [setup.engine.next_request().group for _ in range(4)]
        assert first == second != third == fourth
        assert "" not in (first, third)

        await setup.start("hi")
        assert setup.engine.next_request().group == ""

    run(test)


def test_wishes_reach_the_scheduler_with_every_choice():
    async def test(setup: Setup) -> None:
        wishes = Scheduling(priority=3, tenant="t", extra_key="s", queue_timeout_s=1.5, timeout_s=2.5)
        await setup.manager.start(
            GenerationRequest(prompts=["hi"], sampling=SamplingParams(), n=2, scheduling=wishes)
        )
        for _ in range(2):
            request = setup.engine.next_request()
            assert (request.priority, request.tenant, request.extra_key) == (3, "t", "s")
            assert (request.queue_timeout_s, request.timeout_s) == (1.5, 2.5)

    run(test)


@pytest.mark.parametrize(
    ("status", "code"), [(503, "queue_timeout"), (504, "request_timeout"), (500, "generation_failed")]
)
def test_a_request_that_ran_out_of_time_says_which_time(status, code):
    async def test(setup: Setup) -> None:
        generation = await setup.start("hi")
        request = setup.engine.next_request()
        finish = Finish(FinishKind.ERROR, message="too slow", status=status)
        setup.manager.on_message(BatchTextOutput([row(request, "", finish=finish)]))
        with pytest.raises(RequestError, match="^too slow$") as caught:
            await texts(generation)
        assert (caught.value.status, caught.value.code) == (status, code)

    run(test)


def test_a_stalled_scheduler_is_not_healthy_until_it_moves_again():
    async def test(setup: Setup) -> None:
        assert setup.manager.engine.unhealthy_reason() is None
        setup.manager.on_message(
            SchedulerReport(sent_s=setup.clock.now_s, stalled="7 passes, NO_KV need 9 have 4")
        )
        assert setup.manager.engine.unhealthy_reason() == (
            "requests wait and nothing moves: 7 passes, NO_KV need 9 have 4"
        )
        setup.manager.on_message(SchedulerReport(sent_s=setup.clock.now_s))
        assert setup.manager.engine.unhealthy_reason() is None

    run(test)


def test_questions_to_a_dead_engine_raise_at_once():
    async def test(setup: Setup) -> None:
        setup.manager.engine_died("the scheduler fell over")
        questions = [
            setup.manager.control.flush_cache(),
            setup.manager.control.explain("gen-1"),
            setup.manager.control.pin("hi", ttl_s=1.0, extra_key="", add_special_tokens=True, param="prompt"),
        ]
        for question in questions:
            with pytest.raises(EngineDeadError, match="fell over"):
                await question

    run(test)
