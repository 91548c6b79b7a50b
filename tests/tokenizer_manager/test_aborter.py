from __future__ import annotations

import pytest

from engine.runtime.errors import RequestError
from engine.runtime.messages import BatchTextOutput
from engine.runtime.sampling_params import SamplingParams
from engine.runtime.scheduler_report import SchedulerReport
from engine.tokenizer_manager import aborter
from engine.tokenizer_manager.generation import GenerationRequest
from engine.tokenizer_manager.request_log import LoggedRequest
from engine.tokenizer_manager.scheduling_options import Scheduling
from tests.tokenizer_manager.fake_engine import row
from tests.tokenizer_manager.test_manager import Setup, run


def test_a_stream_that_is_not_read_ends_with_what_it_has_and_the_reason(monkeypatch):
    monkeypatch.setattr(aborter, "MAX_WAITING_ROWS", 5)

    async def test(setup: Setup) -> None:
        slow, reading = await setup.start("hi"), await setup.start("hi")
        requests = [setup.engine.next_request() for _ in range(2)]
        for _ in range(6):
            setup.manager.on_message(BatchTextOutput([row(request, "x") for request in requests]))
            await anext(reading)
        setup.manager.on_message(SchedulerReport(sent_s=setup.clock.now_s))

        assert setup.engine.next_abort().rid == requests[0].rid
        assert setup.engine.aborts.empty()
        assert len(await anext(slow)) == 6
        with pytest.raises(RequestError, match=r"6 events waited for the client .* the limit is 5") as caught:
            await anext(slow)
        assert caught.value.code == "client_too_slow"
        assert not reading.finished

    run(test)


def test_a_time_limit_ends_a_request_once_for_all_of_its_choices():
    async def test(setup: Setup) -> None:
        request = GenerationRequest(
            prompts=["hi"], sampling=SamplingParams(), n=3, scheduling=Scheduling(timeout_s=10.0)
        )
        generation = await setup.manager.start(request)
        requests = [setup.engine.next_request() for _ in range(3)]
        setup.clock.now_s += 16.0  # the limit, and the time in which the scheduler answers itself
        setup.manager.check_time()

        aborts = [setup.engine.next_abort() for _ in range(3)]
        assert [abort.rid for abort in aborts] == [request.rid for request in requests]
        assert setup.engine.aborts.empty()
        with pytest.raises(RequestError, match="the request took 16"):
            await anext(generation)

    run(test)


def test_a_request_that_is_renamed_while_another_times_out_is_answered_too(monkeypatch):
    async def test(setup: Setup) -> None:
        request = GenerationRequest(
            prompts=["hi"], sampling=SamplingParams(), scheduling=Scheduling(timeout_s=10.0)
        )
        generations = [await setup.manager.start(request) for _ in range(3)]
        log = setup.manager.request_log
        ended, renamed = log.ended, list[str]()

        def end_and_rename_the_others(logged: LoggedRequest, now_s: float) -> None:
            """As the end of a quarantine does."""
            ended(logged, now_s)
            if not renamed:
                renamed.append(logged.rid)
                log.resubmit(list(log))

        monkeypatch.setattr(log, "ended", end_and_rename_the_others)
        setup.clock.now_s += 16.0
        setup.manager.check_time()

        for generation in generations:
            with pytest.raises(RequestError, match="the request took 16"):
                await anext(generation)
        assert renamed
        assert len(log) == 0

    run(test)
