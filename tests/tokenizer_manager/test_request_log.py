from __future__ import annotations

import asyncio
from array import array

from engine.runtime.messages import GenerateRequest
from engine.runtime.sampling_params import SamplingParams
from engine.tokenizer_manager.generation import Choice, Generation
from engine.tokenizer_manager.request_log import LoggedRequest, RequestLog

PROMPT = array("i", [1, 2, 3])


def make_generation(name: str, n: int) -> tuple[Generation, list[LoggedRequest]]:
    choices = [Choice(f"{name}-{i}", i, PROMPT, 1) for i in range(n)]
    generation = Generation(name, choices, n, 0.0, lambda _: None)
    messages = [GenerateRequest(choice.rid, PROMPT.tobytes(), SamplingParams()) for choice in choices]
    return generation, [
        LoggedRequest(message, generation, choice) for message, choice in zip(messages, choices, strict=True)
    ]


def test_the_end_of_a_request_is_announced_once_it_has_left_the_log():
    events: list[tuple[str, float, bool]] = []
    log = RequestLog(lambda logged, now_s: events.append((logged.rid, now_s, logged.rid in log)))
    _, [logged] = make_generation("gen", 1)

    log.opened(logged)
    assert logged.rid in log
    assert events == []
    log.ended(logged, 2.0)

    assert events == [("gen-0", 2.0, False)]


def test_a_generation_is_live_until_its_last_request_has_ended():
    log = RequestLog()
    generation, [first, second] = make_generation("gen", 2)
    log.opened(first)
    log.opened(second)

    log.ended(first, 1.0)
    assert list(log.generations) == [generation]
    log.ended(second, 2.0)
    assert list(log.generations) == []


def test_choices_are_found_by_the_clients_ids_after_a_resubmission_too():
    log = RequestLog()
    generation, requests = make_generation("gen", 2)
    for logged in requests:
        log.opened(logged)
        logged.send()
    log.resubmit(requests)

    assert [logged.rid for logged in log] != ["gen-0", "gen-1"]
    assert log.choices_of("gen") == generation.choices
    assert log.choices_of("gen-1") == [generation.choices[1]]
    assert log.choices_of("gen-2") == log.choices_of("other") == log.choices_of("ge") == []


def test_wait_empty_returns_once_no_request_is_live():
    async def main() -> None:
        log = RequestLog()
        await log.wait_empty()
        _, [first, second] = make_generation("gen", 2)
        log.opened(first)
        log.opened(second)
        waiting = asyncio.create_task(log.wait_empty())
        log.ended(first, 1.0)
        await asyncio.sleep(0)
        assert not waiting.done()
        log.ended(second, 1.0)
        await waiting

    asyncio.run(main())
