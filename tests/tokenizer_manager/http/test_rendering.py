"""Chats, `/tokenize` and cache pins render off the event loop, in one way."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import threading
from typing import Any

import pytest

from engine.tokenizer_manager.conversation import template_renderer
from engine.tokenizer_manager.conversation.planner import Planner
from engine.tokenizer_manager.conversation.template_renderer import TemplateRenderer
from engine.tokenizer_manager.conversation.template_sandbox import RenderBudget
from engine.tokenizer_manager.http.app import App
from engine.tokenizer_manager.http.services import Services

from ..conversation.test_template_renderer import SlowTemplate, until
from ..fake_engine import WAIT_S, FakeClock, FakeEngine, make_services, say_all
from .calling import Reply, call

CHAT = {"messages": [{"role": "user", "content": "hi"}]}
SLOW = {"messages": [{"role": "user", "content": "slow"}]}
ENDLESS = "{% for i in range(99999) %}{% endfor %}"
USERS = [("/v1/chat/completions", {}), ("/tokenize", {}), ("/v1/cache/pins", {"ttl": 1})]

every_user = pytest.mark.parametrize(("path", "more"), USERS)


def with_template(template: Any, **settings: Any) -> Services:
    """Services that render with something else than a chat template."""
    services = make_services(FakeEngine(say_all("x")), chat_template=None, **settings)
    return dataclasses.replace(services, renderer=TemplateRenderer(template))


def answer(services: Services, path: str, body: dict[str, Any]) -> Reply:
    async def main() -> Reply:
        async with asyncio.timeout(WAIT_S):
            return await call(App(services), path, body)

    try:
        return asyncio.run(main())
    finally:
        services.close()


@every_user
def test_every_user_of_the_template_renders_on_a_thread(path, more):
    template = SlowTemplate()
    reply = answer(with_template(template), path, CHAT | more)

    assert reply.status == 200
    assert template.threads == {"render-small_0"}
    assert threading.current_thread().name not in template.threads


class WatchedPlanner:
    """A planner that notes the threads of its steps."""

    def __init__(self, planner: Planner) -> None:
        self.threads: list[str] = []
        self._planner = planner

    def __getattr__(self, name: str) -> Any:
        self.threads.append(threading.current_thread().name)
        return getattr(self._planner, name)


@pytest.mark.parametrize(("num_tools", "lane"), [(2, "render-small_0"), (100, "render-large_0")])
@every_user
def test_chats_with_tools_are_planned_on_a_thread(path, more, num_tools, lane):
    tools = [{"type": "function", "function": {"name": f"t{i}"}} for i in range(num_tools)]
    services = make_services(FakeEngine(say_all("x")), chat_template="{{ 'prompt' if messages }}")
    planner = WatchedPlanner(services.planner)
    reply = answer(dataclasses.replace(services, planner=planner), path, CHAT | more | {"tools": tools})  # type: ignore[arg-type]

    assert reply.status == 200, reply.body
    assert planner.threads == [lane, lane]


@every_user
def test_a_template_that_burns_cpu_time_is_refused_with_the_cause(monkeypatch, path, more):
    clocks = {name: itertools.count(0.0, 0.5).__next__ for name in ("cpu_clock", "wall_clock")}
    monkeypatch.setattr(template_renderer, "RenderBudget", lambda: RenderBudget(**clocks))
    reply = answer(make_services(FakeEngine(), chat_template=ENDLESS), path, CHAT | more)

    assert reply.status == 400
    assert reply.error["param"] == "messages"
    assert reply.error["code"] == "chat_template_error"
    assert reply.error["message"].startswith(
        "the model's chat template took more than 2 s of CPU time for 1 message; send fewer"
    )


@every_user
def test_a_client_that_leaves_ends_its_rendering(path, more):
    template = SlowTemplate()
    services = with_template(template)

    async def main() -> None:
        app, gone = App(services), asyncio.Event()
        left = asyncio.create_task(call(app, path, SLOW | more, gone=gone))
        await until(template.begun)
        gone.set()
        assert (await left).status == 0
        template.go_on.set()
        await until(template.unwanted)
        assert (await call(app, path, CHAT | more)).status == 200

    try:
        asyncio.run(main())
    finally:
        template.go_on.set()
        services.close()


@pytest.mark.parametrize(
    ("field", "server"),
    [
        ({"queue_timeout": 0.01}, {}),
        ({"timeout": 0.01}, {}),
        ({}, {"queue_timeout": 0.01}),
        ({"timeout": 60}, {"request_timeout": 0.01}),
    ],
)
def test_a_request_whose_time_is_over_gives_its_place_up(field, server):
    template = SlowTemplate()
    services = with_template(template, scheduler=server)

    async def main() -> None:
        reply = await call(App(services), "/v1/chat/completions", SLOW | field)
        assert reply.status == 503
        assert reply.error["code"] == "queue_timeout"
        assert "was not rendered by the chat template within 0.01 s" in reply.error["message"]
        template.go_on.set()
        await until(template.unwanted)

    try:
        asyncio.run(main())
    finally:
        template.go_on.set()
        services.close()


def test_a_chat_arrives_before_it_is_rendered():
    """Time limits and latencies count from then."""
    clock, engine = FakeClock(), FakeEngine(say_all("x"))
    arrived_s = clock.now_s

    class Rendering(SlowTemplate):
        def render(self, *args: Any, **options: Any) -> str:
            clock.now_s += 7.0
            return super().render(*args, **options)

    services = make_services(engine, chat_template=None, clock=clock)
    answer(
        dataclasses.replace(services, renderer=TemplateRenderer(Rendering())),  # type: ignore[arg-type]
        "/v1/chat/completions",
        CHAT,
    )

    assert engine.next_request().arrival_s == arrived_s
