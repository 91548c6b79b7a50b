from __future__ import annotations

import re
import stat
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from engine.launch.child import stack_sampler
from engine.launch.child.stack_sampler import MAX_DEPTH, OTHER_STACKS, StackSampler

DEADLINE_S = 60.0
LINE = re.compile(r"scheduler(;[\x21-\x3a\x3c-\x7e]+)+ [1-9]\d*")


class Work:
    """Something a thread holds while it is looked at."""


def waits_here(begun: threading.Event, end: threading.Event) -> None:
    begun.set()
    end.wait(DEADLINE_S)


def goes_down(depth: int, begun: threading.Event, end: threading.Event) -> None:
    if depth:
        goes_down(depth - 1, begun, end)
    else:
        waits_here(begun, end)


@contextmanager
def thread_in(function: Callable[..., None], *arguments: object, name: str = "worker") -> Iterator[None]:
    """While a thread waits within `function`."""
    begun, end = threading.Event(), threading.Event()
    thread = threading.Thread(target=function, args=(*arguments, begun, end), name=name)
    thread.start()
    assert begun.wait(DEADLINE_S)
    try:
        yield
    finally:
        end.set()
        thread.join(DEADLINE_S)


class CountingClock:
    """Time goes on by a look whenever somebody asks, so that a profile takes no time."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        self.now_s += 0.01
        return self.now_s


def profile(path: Path, duration_s: float = 10.0) -> dict[str, int]:
    """The stacks that were seen, and how often."""
    sampler = StackSampler(path, "scheduler", rate_hz=1e6, duration_s=duration_s, clock=CountingClock())
    sampler.wait(DEADLINE_S)
    lines = path.read_text().splitlines()
    assert all(LINE.fullmatch(line) for line in lines), lines
    return {stack: int(count) for stack, _, count in (line.rpartition(" ") for line in lines)}


def test_a_thread_is_seen_where_it_is(tmp_path):
    path = tmp_path / "new" / "scheduler.folded"
    with thread_in(waits_here):
        stacks = profile(path)
    worker = {stack: count for stack, count in stacks.items() if stack.startswith("scheduler;worker;")}
    assert all(f"{__name__}:waits_here" in stack for stack in worker)
    assert any(f";{__name__}:waits_here;threading:Event.wait" in stack for stack in worker)
    main = sum(count for stack, count in stacks.items() if stack.startswith("scheduler;MainThread;"))
    assert sum(worker.values()) == main > 100  # each look sees every thread
    assert not any(";stack_sampler;" in stack for stack in stacks)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert [each.name for each in path.parent.iterdir()] == [path.name]


def test_it_ends_when_it_is_told_to_and_writes(tmp_path):
    path = tmp_path / "scheduler.folded"
    sampler = StackSampler(path, "scheduler", rate_hz=1000.0, duration_s=3600.0)
    assert not path.exists()
    sampler.stop()
    sampler.wait(DEADLINE_S)
    assert path.exists()


def test_names_that_would_break_the_format_do_not(tmp_path):
    with thread_in(waits_here, name="a;b c\nd 5\u00e9"):
        stacks = profile(tmp_path / "scheduler.folded")
    assert any(stack.startswith("scheduler;a_b_c_d_5_;") for stack in stacks)


def test_of_a_deep_stack_the_innermost_frames_are_kept(tmp_path):
    with thread_in(goes_down, 300):
        stacks = profile(tmp_path / "scheduler.folded")
    deep = [stack.split(";")[2:] for stack in stacks if "goes_down" in stack]
    assert {len(frames) for frames in deep} == {MAX_DEPTH}
    assert all(f"{__name__}:waits_here" in frames for frames in deep)


def test_stacks_beyond_a_number_are_counted_together(tmp_path, monkeypatch):
    monkeypatch.setattr(stack_sampler, "MAX_STACKS", 1)
    with thread_in(waits_here), thread_in(waits_here, name="another"):
        stacks = profile(tmp_path / "scheduler.folded")
    assert len(stacks) == 2
    assert stacks[f"scheduler;{OTHER_STACKS}"] > 100


def test_nothing_of_what_threads_work_with_is_held_or_written(tmp_path):
    references = []

    def works(begun: threading.Event, end: threading.Event) -> None:
        work, prompt = Work(), "a secret prompt"
        references.append(weakref.ref(work))
        waits_here(begun, end)
        assert (work, prompt) is not None

    path = tmp_path / "scheduler.folded"
    sampler = StackSampler(path, "scheduler", rate_hz=1000.0, duration_s=3600.0)
    with thread_in(works):
        assert references[0]() is not None
    deadline_s = time.monotonic() + DEADLINE_S
    while references[0]() is not None:  # a look may go on; the profile does in any case
        assert time.monotonic() < deadline_s
    sampler.stop()
    sampler.wait(DEADLINE_S)
    assert "secret" not in path.read_text()


@pytest.mark.parametrize("before", ["file", "same"])
def test_what_cannot_be_written_is_said_and_no_more(tmp_path, caplog, before):
    path = tmp_path / "folder" / "scheduler.folded"
    if before == "file":
        path.parent.touch()
    else:
        path.parent.mkdir()
        path.with_name("scheduler.folded.part").symlink_to(tmp_path / "elsewhere")
    sampler = StackSampler(path, "scheduler", rate_hz=1000.0, duration_s=0.001)
    sampler.wait(DEADLINE_S)
    assert "no profile in" in caplog.text
    assert not path.exists() and not (tmp_path / "elsewhere").exists()
