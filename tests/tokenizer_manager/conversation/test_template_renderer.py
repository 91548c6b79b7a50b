from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import pytest

from engine.runtime.errors import QueueFullError
from engine.tokenizer_manager.conversation import template_renderer
from engine.tokenizer_manager.conversation.template_renderer import TemplateRenderer
from engine.tokenizer_manager.conversation.template_sandbox import RenderBudget

from ..fake_engine import WAIT_S

Messages = Sequence[Mapping[str, Any]]


class SlowTemplate:
    """Renders the first message's content, and waits for the test before that if it is "slow"."""

    def __init__(self) -> None:
        self.begun = threading.Semaphore(0)
        self.go_on = threading.Event()
        self.rendered: list[str] = []
        self.threads: set[str] = set()
        self.unwanted = threading.Semaphore(0)

    def render(
        self,
        messages: Messages,
        *,
        add_generation_prompt: bool,
        variables: Mapping[str, Any],
        budget: RenderBudget,
        **_: object,
    ) -> str:
        content: str = messages[0]["content"]
        self.rendered.append(content)
        self.threads.add(threading.current_thread().name)
        if content == "slow":
            self.begun.release()
            assert self.go_on.wait(WAIT_S)
            if not budget.wanted:
                self.unwanted.release()
            budget.check()
        return content


def chat(content: str, num_messages: int = 1) -> list[dict[str, str]]:
    return [{"role": "user", "content": content}] * num_messages


async def render(
    renderer: TemplateRenderer, messages: Messages, variables: Mapping[str, Any] | None = None
) -> str:
    return await renderer.render(messages, add_generation_prompt=True, variables=variables or {})


async def until(semaphore: threading.Semaphore) -> None:
    """Wait for a thread; the event loop goes on."""
    async with asyncio.timeout(WAIT_S):
        while not semaphore.acquire(blocking=False):
            await asyncio.sleep(0)


def run(test: Callable[[TemplateRenderer, SlowTemplate], Awaitable[None]]) -> SlowTemplate:
    """Run a test on an event loop."""
    template = SlowTemplate()
    renderer = TemplateRenderer(template)  # type: ignore[arg-type]

    async def main() -> None:
        await test(renderer, template)

    try:
        asyncio.run(main())
    finally:
        template.go_on.set()
        renderer.close()
    return template


def test_the_event_loop_goes_on_while_a_chat_is_rendered():
    async def test(renderer: TemplateRenderer, template: SlowTemplate) -> None:
        rendering = asyncio.create_task(render(renderer, chat("slow")))
        await until(template.begun)
        assert not rendering.done()
        template.go_on.set()
        assert await rendering == "slow"

    template = run(test)
    assert template.threads == {"render-small_0"}


@pytest.mark.parametrize(
    ("messages", "variables"),
    [
        (chat("slow", 65), {}),
        ([*chat("slow"), {"content": "x" * 65_536}], {}),
        (chat("slow"), {"title": "x" * 65_536}),
        (chat("slow"), {"documents_of_mine": [1, 2, 3]}),
    ],
)
def test_small_chats_do_not_wait_for_large_ones(messages, variables):
    async def test(renderer: TemplateRenderer, template: SlowTemplate) -> None:
        large = asyncio.create_task(render(renderer, messages, variables))
        await until(template.begun)
        assert await render(renderer, chat("hi", 64), {"enable_thinking": False}) == "hi"
        template.go_on.set()
        assert await large == "slow"

    assert run(test).threads == {"render-small_0", "render-large_0"}


def test_a_cancelled_chat_leaves_the_queue_and_the_thread():
    async def test(renderer: TemplateRenderer, template: SlowTemplate) -> None:
        running = asyncio.create_task(render(renderer, chat("slow")))
        await until(template.begun)
        queued = asyncio.create_task(render(renderer, chat("queued")))
        await asyncio.sleep(0)
        for rendering in (running, queued):
            rendering.cancel()
        await asyncio.gather(running, queued, return_exceptions=True)
        template.go_on.set()
        await until(template.unwanted)
        assert await render(renderer, chat("later")) == "later"

    assert run(test).rendered == ["slow", "later"]


def test_too_much_that_waits_is_refused_for_now(monkeypatch):
    monkeypatch.setattr(template_renderer, "_MAX_WAITING_COST", 100)

    async def test(renderer: TemplateRenderer, template: SlowTemplate) -> None:
        alone = asyncio.create_task(render(renderer, chat("slow", 2000)))  # alone, any size is taken
        await until(template.begun)
        with pytest.raises(
            QueueFullError, match=r"about 2,015 messages wait .* the limit is 100; retry"
        ) as caught:
            await render(renderer, chat("large", 65))
        assert (caught.value.status, caught.value.retry_after_s) == (429, 5)
        assert await render(renderer, chat("small")) == "small"
        alone.cancel()
        await asyncio.gather(alone, return_exceptions=True)
        template.go_on.set()
        assert await render(renderer, chat("large", 65)) == "large"  # the place is free again

    assert run(test).rendered == ["slow", "small", "large"]
