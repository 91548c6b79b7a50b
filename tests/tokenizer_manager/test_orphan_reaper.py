from __future__ import annotations

from engine.runtime.messages import BatchTextOutput
from engine.tokenizer_manager import aborter as orphan_reaper
from tests.tokenizer_manager.fake_engine import LENGTH, row
from tests.tokenizer_manager.test_manager import Setup, run


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
        assert setup.manager._reaper.num_orphans == 0

    run(test)


def test_orphans_are_bounded_in_number(monkeypatch):
    monkeypatch.setattr(orphan_reaper, "_MAX_ORPHANS", 10)

    async def test(setup: Setup) -> None:
        for _ in range(50):
            with await setup.start("hi"):
                request = setup.engine.next_request()
            setup.manager.on_message(BatchTextOutput([row(request, "x")]))
            assert setup.manager._reaper.num_orphans <= 10

    run(test)
