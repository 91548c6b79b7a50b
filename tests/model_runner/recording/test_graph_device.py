"""What is asked of `torch.cuda` to record a step in pieces; without a GPU, by stand-ins that note the calls."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from engine.model_runner.recording.graph_device import CudaGraphDevice


class Stream:
    def __init__(self, name: str, notes: list[str]) -> None:
        self.name, self.notes = name, notes

    def wait_stream(self, other: Stream) -> None:
        self.notes.append(f"{self.name} waits for {other.name}")


@pytest.fixture
def notes(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The calls, in order."""
    found: list[str] = []
    side, current = Stream("side", found), Stream("current", found)
    graphs: list[Any] = []

    class Graph:
        def __init__(self) -> None:
            self.number = len(graphs)
            graphs.append(self)

        def replay(self) -> None:
            found.append(f"replay {self.number}")

    @contextmanager
    def capture(graph: Graph, *, pool: str, stream: Stream, capture_error_mode: str) -> Iterator[None]:
        assert (pool, stream, capture_error_mode) == ("the pool", side, "thread_local")
        found.append(f"begin {graph.number}")
        try:
            yield
        finally:
            found.append(f"end {graph.number}")

    @contextmanager
    def on(stream: Stream) -> Iterator[None]:
        found.append(f"on {stream.name}")
        yield
        found.append(f"off {stream.name}")

    for name, stand_in in {
        "graph_pool_handle": lambda: "the pool",
        "Stream": lambda _device: side,
        "current_stream": lambda _device: current,
        "stream": on,
        "CUDAGraph": Graph,
        "graph": capture,
    }.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    return found


WARM_UP = [
    "side waits for current",
    "on side",
    *("a", "b") * 2,
    "off side",
    "current waits for side",
]


def test_each_piece_is_a_graph_of_one_pool_and_stream(notes):
    def run(cut: Callable[[], None]) -> None:
        notes.append("a")
        cut()
        notes.append("b")

    replays = CudaGraphDevice(torch.device("cuda")).capture_pieces(run)

    assert notes[:-2] == [*WARM_UP, "begin 0", "a", "end 0", "begin 1", "b", "end 1"]
    assert notes[-2:] == ["replay 0", "replay 1"], "the first replay takes memory and time"
    notes.clear()
    for replay in replays:
        replay()
    assert notes == ["replay 0", "replay 1"]


def test_a_whole_step_is_one_piece(notes):
    def run() -> None:
        notes.extend(("a", "b"))

    replay = CudaGraphDevice(torch.device("cuda")).capture(run)

    assert notes == [*WARM_UP, "begin 0", "a", "b", "end 0", "replay 0"]
    replay()
    assert notes[-2:] == ["replay 0"] * 2


def test_a_capture_that_fails_is_ended(notes):
    def run(cut: Callable[[], None]) -> None:
        cut()
        if "begin 1" in notes:
            raise ValueError("a kernel needs the host")

    with pytest.raises(ValueError, match="a kernel needs the host"):
        CudaGraphDevice(torch.device("cuda")).capture_pieces(run)
    assert notes[-2:] == ["begin 1", "end 1"]
