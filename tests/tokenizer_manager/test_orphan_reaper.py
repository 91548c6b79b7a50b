from __future__ import annotations

import pytest

from engine.runtime.errors import RequestError
from engine.runtime.messages import BatchTextOutput, SchedulerReport
from engine.tokenizer_manager import orphan_reaper as sweep
from tests.tokenizer_manager.fake_engine import LENGTH, row
from tests.tokenizer_manager.test_manager import Setup, run


def report(setup: Setup) -> None:
    setup.manager.on_message(SchedulerReport(sent_s=setup.clock.now_s))


def test_a_request_whose_abort_was_lost_is_aborted_again_until_it_ends():
    async def test(setup: Setup) -> None:
        generation = await setup.start("hi")
        request = setup.engine.next_request()
        generation.close()
        assert setup.engine.next_abort().rid == request.rid  # and the scheduler never sees it

        def another_row(seconds: float, **fields: object) -> None:
            setup.clock.now_s += seconds
            setup.manager.on_message(BatchTextOutput([row(request, "x", **fields)]))  # type: ignore[arg-type]

        another_row(0.0)
        another_row(1.0)
        assert setup.engine.aborts.empty()  # rows that were under way
        for _ in range(3):
            another_row(3.0)
            assert setup.engine.next_abort().rid == request.rid
        another_row(3.0, finish=LENGTH)
        assert setup.engine.aborts.empty()
        assert not setup.manager._sweep._since_s

    run(test)


def test_strays_are_bounded_in_number(monkeypatch):
    monkeypatch.setattr(sweep, "_MAX_STRAYS", 10)

    async def test(setup: Setup) -> None:
        for _ in range(50):
            with await setup.start("hi"):
                request = setup.engine.next_request()
            setup.manager.on_message(BatchTextOutput([row(request, "x")]))
            assert len(setup.manager._sweep._since_s) <= 10

    run(test)


def test_a_stream_that_is_not_read_ends_with_what_it_has_and_the_reason(monkeypatch):
    monkeypatch.setattr(sweep, "MAX_WAITING_ROWS", 5)

    async def test(setup: Setup) -> None:
        slow, reading = await setup.start("hi"), await setup.start("hi")
        requests = [setup.engine.next_request() for _ in range(2)]
        for _ in range(6):
            setup.manager.on_message(BatchTextOutput([row(request, "x") for request in requests]))
            await anext(reading)
        report(setup)

        assert setup.engine.next_abort().rid == requests[0].rid
        assert setup.engine.aborts.empty()
        assert len(await anext(slow)) == 6
        with pytest.raises(RequestError, match=r"6 events waited for the client .* the limit is 5") as caught:
            await anext(slow)
        assert caught.value.code == "client_too_slow"
        assert not reading.finished

    run(test)
