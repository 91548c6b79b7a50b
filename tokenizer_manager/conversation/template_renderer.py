"""`TemplateRenderer`: renders chat templates and plans answers off the event loop; for chats, `/tokenize`, cache pins.

A template that reads all earlier messages for each message is quadratic, and some public templates are: 2,000 short
messages take seconds. On the event loop, all other requests would wait for that.

Renderings run on threads instead of in a process. A thread needs no second interpreter in memory, no encoding of
messages, and no supervision. The sandbox counts its CPU time and can end it at any check. A rendering thread holds the
GIL, though, and releases it after one switch interval. The event loop waits for that each time it wakes up: 5 ms by
default, for each token of each stream. `share_the_gil` sets the interval to `SWITCH_INTERVAL_S` in the tokenizer
manager's process. One step of C code (`tojson` of a long list, sorting) is not interrupted, and the event loop waits
for it; `--max-body-mb` bounds its input.

Two lanes of one thread each let at most two renderings share the GIL with the event loop. Chats of up to
`_MAX_SMALL_COST` do not wait for longer ones. A lane is first in, first out, and the cost of its queue is bounded. The
rendering of a canceled request (the client disconnected, or a time limit expired) leaves the queue, or ends at its next
check.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, TypeVar

from ...runtime.errors import QueueFullError
from .chat_template import ChatTemplate
from .conversation import Conversation
from .template_sandbox import RenderBudget

SWITCH_INTERVAL_S: Final = 0.0005
_CHARS_PER_MESSAGE: Final = 1024  # this many characters cost as much as one message
_MAX_SMALL_COST: Final = 64
_MAX_WAITING_COST: Final = 64 << 10
_RETRY_AFTER_S: Final = 5

T = TypeVar("T")


def share_the_gil() -> None:
    """Make busy threads of this process release the GIL to the event loop sooner than by default."""
    sys.setswitchinterval(SWITCH_INTERVAL_S)


class TemplateRenderer:
    """Renders with one template.

    Attributes:
        template: the chat template.
    """

    def __init__(self, template: ChatTemplate) -> None:
        self.template = template
        self._small = _Lane("render-small")
        self._large = _Lane("render-large")

    async def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool,
        variables: Mapping[str, Any],
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        continue_final_message: bool = False,
    ) -> str:
        """As `ChatTemplate.render`; a canceled task ends its rendering as well.

        Raises:
            RequestError: the template refuses these messages, fails, or goes beyond a limit.
            QueueFullError: too many renderings wait.
        """
        cost = _cost_of(messages, variables, [*(tools or ()), *(documents or ())])
        lane = self._small if cost <= _MAX_SMALL_COST else self._large
        budget = RenderBudget()

        def render() -> str:
            return self.template.render(
                messages,
                add_generation_prompt=add_generation_prompt,
                variables=variables,
                tools=tools,
                documents=documents,
                continue_final_message=continue_final_message,
                budget=budget,
            )

        with lane.place(cost):
            try:
                return await asyncio.get_running_loop().run_in_executor(lane.thread, render)
            finally:
                # The cancellation itself removes a rendering that has not started from the queue of the thread.
                budget.wanted = False

    async def plan(self, conversation: Conversation, job: Callable[[], T]) -> T:
        """Run `job`, a step of planning; on a thread if the conversation has tools, in place otherwise.

        The schemas of a request's tools have up to `--max-schema-kb`, which takes some hundred milliseconds to check.

        Raises:
            QueueFullError: too many renderings wait.
        """
        if not conversation.tools:
            return job()
        cost = len(conversation.tools) + _tool_chars(conversation) // _CHARS_PER_MESSAGE
        lane = self._small if cost <= _MAX_SMALL_COST else self._large
        with lane.place(cost):
            return await asyncio.get_running_loop().run_in_executor(lane.thread, job)

    def close(self) -> None:
        """End the threads; the cancellation of its request ends a rendering in progress."""
        for lane in (self._small, self._large):
            lane.thread.shutdown(wait=False, cancel_futures=True)


class _Lane:
    """One thread and its queue."""

    def __init__(self, name: str) -> None:
        self.thread = ThreadPoolExecutor(1, thread_name_prefix=name)
        self._waiting_cost = 0

    @contextlib.contextmanager
    def place(self, cost: int) -> Iterator[None]:
        """Reserve capacity in the queue and on the thread. An empty lane takes a chat of any size.

        Raises:
            QueueFullError: the lane has no capacity left.
        """
        if self._waiting_cost and self._waiting_cost + cost > _MAX_WAITING_COST:
            raise QueueFullError(
                f"chats of about {self._waiting_cost:,} messages wait to be rendered by the chat template, the limit "
                f"is {_MAX_WAITING_COST:,}; retry later, or send fewer messages at once",
                _RETRY_AFTER_S,
            )
        self._waiting_cost += cost
        try:
            yield
        finally:
            self._waiting_cost -= cost


def _tool_chars(conversation: Conversation) -> int:
    """Characters in the schemas of tools; a schema that is no JSON is refused by the planner."""
    try:
        return len(json.dumps([tool.parameters for tool in conversation.tools]))
    except (RecursionError, ValueError):
        return 0


def _cost_of(
    messages: Sequence[Mapping[str, Any]],
    variables: Mapping[str, Any],
    objects: Sequence[Mapping[str, Any]],
) -> int:
    """Estimated cost of a rendering, in short messages. `objects`: tools and documents."""
    values = [value for message in messages for key, value in message.items() if key != "tool_calls"]
    values += variables.values()
    num_chars = sum(len(value) for value in values if isinstance(value, str))
    objects = [*objects, *(call for message in messages for call in message.get("tool_calls") or ())]
    if objects:
        num_chars += len(json.dumps(objects))
    cost = len(messages) + len(objects) + num_chars // _CHARS_PER_MESSAGE
    if any(isinstance(value, list | dict) for value in values):  # a template may loop over them
        return max(cost, _MAX_SMALL_COST + 1)
    return cost
