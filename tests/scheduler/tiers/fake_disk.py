"""`FakeDisk`: the disk of a scheduler's tier, which answers when and how a test says; `DiskHarness`: a harness with it.

It keeps what the FakeRunner's pages and checkpoints hold, by namespace and tokens, so that the runner notices every
wrong page and every state of another moment.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from engine.runtime.transport.kv_tiers import (
    CancelLoad,
    Forget,
    Forgotten,
    Found,
    Loaded,
    LoadPages,
    LookUp,
    Stored,
    StorePages,
    TierNews,
)
from engine.scheduler.batch import ScheduleBatch
from engine.scheduler.records.decision_log import Handover
from engine.scheduler.scheduler import Scheduler

from ..fake_runner import GARBAGE, FakeRunner
from ..harness import Harness

Ask = LookUp | LoadPages | StorePages | Forget
PAGE_BYTES = 1024
STATE_BYTES = 5000


def ints(data: bytes) -> np.ndarray:
    return np.frombuffer(data, dtype=np.int32)


class FakeDisk:
    """See the module.

    Attributes:
        open: commands without an answer, oldest first.
        orders: all commands, in order.
        answers_itself: whether all commands are answered before each step.
        forgets_itself: whether it forgets at once.
        estimate_s: of each `Found`.
    """

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self.pages: dict[tuple[str, bytes], np.ndarray] = {}
        self.states: dict[tuple[str, bytes], int] = {}
        self.has_states = False
        self.open: list[Ask] = []
        self.orders: list[Ask | CancelLoad] = []
        self.cancelled: set[int] = set()
        self.answered: list[TierNews] = []
        self.answers_itself = True
        self.forgets_itself = True
        self.estimate_s = 0.0

    def collect(self, scheduler: Scheduler, runner: FakeRunner) -> None:
        """Take the scheduler's commands."""
        for command in scheduler.take_transfer_commands():
            assert isinstance(command, Ask | CancelLoad), command
            self.orders.append(command)
            match command:
                case LookUp() | LoadPages() | StorePages() | Forget():
                    self.open.append(command)
                    if isinstance(command, StorePages):
                        self.check_source(command, runner)
                case CancelLoad(job=job):
                    assert any(isinstance(each, LoadPages) and each.job == job for each in self.open)
                    self.cancelled.add(job)

    def answer(
        self,
        scheduler: Scheduler,
        runner: FakeRunner,
        now_s: float,
        *,
        index: int = 0,
        most: int | None = None,
        error: str = "",
    ) -> None:
        """Execute one of the open commands, for its first `most` pages, and send the news."""
        command = self.open.pop(index % len(self.open))
        news: TierNews
        match command:
            case LookUp():
                count = self.num_found(command)
                count = count if most is None else min(count, most)
                while count and self.has_states and self.key(command, count - 1) not in self.states:
                    count -= 1
                state_bytes = STATE_BYTES if self.has_states and count else 0
                news = Found(command.job, count, count * PAGE_BYTES, self.estimate_s, state_bytes)
            case LoadPages():
                count = self.load(command, runner, most)
                news = Loaded(command.job, count, error, 0.001, count * PAGE_BYTES)
            case StorePages():
                self.check_source(command, runner)
                count = self.store(command, runner, most)
                news = Stored(command.job, count, error, 0.001, count * PAGE_BYTES)
            case Forget():
                self.pages.clear()
                self.states.clear()
                news = Forgotten(command.job, error)
        self.send(news, scheduler, now_s)

    def send(self, news: TierNews, scheduler: Scheduler, now_s: float) -> None:
        self.answered.append(news)
        scheduler.handle(news, now_s)
        scheduler.audit()

    def num_found(self, command: LookUp) -> int:
        assert command.token_ids and len(command.token_ids) % (4 * self.page_size) == 0
        count = 0
        while count * self.page_size * 4 < len(command.token_ids) and (
            self.key(command, count) in self.pages
        ):
            count += 1
        return count

    def key(self, command: LookUp | LoadPages | StorePages, index: int) -> tuple[str, bytes]:
        return command.namespace, command.token_ids[: (index + 1) * self.page_size * 4]

    def load(self, command: LoadPages, runner: FakeRunner, most: int | None) -> int:
        targets = ints(command.pages)
        assert len(command.token_ids) == (command.first_page + len(targets)) * self.page_size * 4
        pages = runner.kv.reshape(-1, self.page_size)
        count = 0
        for index, page in enumerate(targets, command.first_page):
            found = self.pages.get(self.key(command, index))
            if found is None or (most is not None and count >= most):
                break
            pages[page] = found
            count += 1
        if self.has_states:
            assert command.checkpoint, "a load without a slot for its state"
            state = self.states.get((command.namespace, command.token_ids))
            if state is None or count < len(targets):
                return min(count, len(targets) - 1)  # what a disk must not say; it is as much as nothing
            runner.checkpoints[command.checkpoint] = state
        return count

    def store(self, command: StorePages, runner: FakeRunner, most: int | None) -> int:
        sources = ints(command.pages)
        assert len(command.token_ids) == (command.first_page + len(sources)) * self.page_size * 4
        pages = runner.kv.reshape(-1, self.page_size)
        count = len(sources) if most is None else min(most, len(sources))
        for index, page in enumerate(sources[:count], command.first_page):
            self.pages[self.key(command, index)] = pages[page].copy()
        if self.has_states and count == len(sources):
            self.states[command.namespace, command.token_ids] = runner.checkpoints[command.checkpoint]
        return count

    def check_source(self, command: StorePages, runner: FakeRunner) -> None:
        """The pages to store hold the KV of the tokens, from the order to the answer."""
        page_size = self.page_size
        pages = runner.kv.reshape(-1, page_size)
        for index, page in enumerate(ints(command.pages), command.first_page):
            known = self.pages.get(self.key(command, index))
            assert (pages[page] != GARBAGE).all() and (pages[page] != -1).all()
            assert known is None or np.array_equal(known, pages[page])
        assert bool(command.checkpoint) == self.has_states
        if self.has_states:
            assert runner.checkpoints[command.checkpoint] == pages[ints(command.pages)[-1]][-1], (
                "the state of another moment"
            )

    def scribble(self, runner: FakeRunner) -> None:
        """Write into the pages and slots of all loads that have no answer: nothing else may use them."""
        pages = runner.kv.reshape(-1, self.page_size)
        for command in self.open:
            if isinstance(command, LoadPages):
                pages[ints(command.pages)] = GARBAGE
                runner.checkpoints[command.checkpoint] = GARBAGE


class DiskHarness(Harness):
    """A harness with a disk tier."""

    def __init__(self, *, disk: FakeDisk | None = None, **settings: Any) -> None:
        self.disk = disk if disk is not None else FakeDisk(settings.get("page_size", 4))
        self.disk.has_states = settings.get("checkpoint_pages", 0) > 0
        super().__init__(cache={"kv_disk": "folder", **settings.pop("cache", {})}, **settings)

    def collect(self) -> None:
        super().collect()
        self.disk.collect(self.scheduler, self.runner)
        forgets = [index for index, command in enumerate(self.disk.open) if isinstance(command, Forget)]
        if forgets and self.disk.forgets_itself:
            self.answer(index=forgets[0])

    def step(self) -> ScheduleBatch | None:
        self.deliver()
        return super().step()

    def deliver(self) -> bool:
        if not self.disk.answers_itself or not self.disk.open:
            return False
        while self.disk.open:
            self.answer()
        return True

    def answer(self, **how: Any) -> None:
        """Let the disk answer one of its commands; see `FakeDisk.answer`."""
        self.disk.answer(self.scheduler, self.runner, self.now_s, **how)
        self.collect()

    def tell(self, news: TierNews) -> None:
        self.disk.send(news, self.scheduler, self.now_s)
        self.collect()

    def status(self, rid: str) -> str:
        return self.scheduler._parts.requests.by_id[rid].status.value

    def events(self, rid: str) -> list[str]:
        """What the decision log says of the disk's part in a request."""
        return [
            each.event for each in self.scheduler.decisions if isinstance(each, Handover) and each.rid == rid
        ]
