from __future__ import annotations

import pytest

from engine.runtime.errors import RequestError
from engine.runtime.messages import BatchTextOutput, SchedulerReport
from engine.tokenizer_manager import aborter
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
