"""Behaviors of fake children. Which child shows which is written in `served_model_name`: "scheduler=dies ...".

They leave notes in $TMPDIR, where the tests look for them.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import select
import signal
import subprocess
import sys
import threading
from pathlib import Path

from engine.launch.child.child import Child
from engine.launch.child.control import PeerDied, PeersLost, PeersReady, Role, Stop
from engine.runtime.errors import ConfigError, RankLostError
from engine.runtime.feasibility import Capacity
from engine.runtime.messages import HEARTBEAT_INTERVAL_S

NOTES = Path(os.environ["TMPDIR"])
CAPACITY = Capacity(max_model_len=64, num_pages=8, page_size=16, max_running_requests=4, vocab_size=100)


(NOTES / f"imported-{os.getpid()}").touch()


def leave_note(name: str, text: str) -> None:
    """A note that is whole as soon as it is seen."""
    (NOTES / f"{name}.new").write_text(text)
    (NOTES / f"{name}.new").rename(NOTES / name)


def main(child: Child) -> None:
    names = dict(pair.split("=") for pair in (child.settings.config.model.served_model_name or "").split())
    behavior = globals()[names.get(child.role, "works")]
    behavior(child)


def works(child: Child) -> None:
    """Do all that is asked."""
    if child.role is Role.TOKENIZER_MANAGER:
        capacity = child.wait_for_peers()
        asyncio.run(_manage(child, capacity, finishes=True))
        return
    child.ready(capacity=CAPACITY if child.role is Role.SCHEDULER else None)
    _loop(child)
    if not (NOTES / "drained").exists():
        (NOTES / f"{child.role}-stopped-before-the-drain").touch()


def never_drains(child: Child) -> None:
    """A tokenizer manager that takes for ever to finish what runs."""
    asyncio.run(_manage(child, child.wait_for_peers(), finishes=False))


def hangs_in_the_drain(child: Child) -> None:
    """A tokenizer manager that does not come back from what it was told last."""
    asyncio.run(_manage(child, child.wait_for_peers(), finishes=False, hangs=True))


def refuses_the_configuration(child: Child) -> None:
    raise ConfigError("model.gguf is truncated; download it again")


def raises_at_start(child: Child) -> None:
    raise RuntimeError("the weights are odd")


def raises_later(child: Child) -> None:
    child.ready(capacity=CAPACITY)
    raise RuntimeError("the books do not balance\nby two pages")


def exits_at_start(child: Child) -> None:
    os._exit(3)


def exits_later(child: Child) -> None:
    child.ready(capacity=CAPACITY)
    os._exit(0)


def crashes(child: Child) -> None:
    child.ready(capacity=CAPACITY)
    ctypes.string_at(0)


def breaks_its_configuration(child: Child) -> None:
    """What starts first works; what takes its place finds something that the user must mend."""
    if child.settings.life:
        raise ConfigError("model.gguf is gone; download it again")
    works(child)


def crashes_when_told(child: Child) -> None:
    """Crashes as soon as there is a note that says so."""
    child.ready(capacity=CAPACITY)
    while not (NOTES / "crash").exists():
        child.heartbeat()
        select.select([], [], [], 0.01)
    ctypes.string_at(0)


def hangs_up(child: Child) -> None:
    """Closes its control channel, and lives."""
    child.ready(capacity=CAPACITY)
    os.close(child.fileno())
    threading.Event().wait()


def hangs_at_start(child: Child) -> None:
    (NOTES / "hangs").touch()
    threading.Event().wait()


def hangs_later(child: Child) -> None:
    child.ready(capacity=CAPACITY)
    threading.Event().wait()


def hangs_at_first(child: Child) -> None:
    """Hangs when told to, and what takes its place does not."""
    if child.settings.life:
        works(child)
    else:
        hangs_when_told(child)


def hangs_at_its_second_start(child: Child) -> None:
    """Works, and what takes its place never gets ready."""
    if child.settings.life:
        hangs_at_start(child)
    else:
        works(child)


def hangs_when_told(child: Child) -> None:
    """Works until the test leaves a note."""
    child.ready(capacity=CAPACITY)
    while not (NOTES / "hang").exists():
        child.heartbeat()
        select.select([child], [], [], 0.01)
    threading.Event().wait()


def loses_the_others(child: Child) -> None:
    """A rank whose group fails in the middle of a step, in which all ranks are."""
    child.ready(capacity=CAPACITY)
    _meet(child)
    raise RankLostError(f"rank {child.settings.rank} of 2 lost the others in all_reduce: it is quiet")


def dies_a_little_later(child: Child) -> None:
    """A rank that ends after the others have complained."""
    child.ready(capacity=CAPACITY)
    _meet(child)
    select.select([], [], [], 0.5)
    os._exit(3)


def waits_for_others(child: Child) -> None:
    """A rank whose loop is stuck for ever, in an operation of its group."""
    child.beat_while(lambda: True)
    child.ready(capacity=CAPACITY)
    threading.Event().wait()


def starts_a_grandchild(child: Child) -> None:
    code = "import signal; signal.pause()"
    process = subprocess.Popen([sys.executable, "-c", code])
    leave_note("grandchild", str(process.pid))
    child.ready(capacity=CAPACITY)
    _loop(child)


def keeps_going(child: Child) -> None:
    """Never reads what the supervisor says, and lives."""
    child.ready(capacity=CAPACITY)
    (NOTES / f"met-{child.role}").touch()
    while True:
        child.heartbeat()
        select.select([], [], [], HEARTBEAT_INTERVAL_S)


def _meet(child: Child) -> None:
    """Wait for the other rank of two: one may start seconds after the other on a busy machine."""
    (NOTES / f"met-{child.role}").touch()
    others = {Role.SCHEDULER, Role.MODEL_RUNNER} - {child.role}
    while not all((NOTES / f"met-{role}").exists() for role in others):
        child.heartbeat()
        select.select([], [], [], 0.01)


def _loop(child: Child) -> None:
    while not child.stop_requested():
        child.heartbeat()
        select.select([child], [], [], HEARTBEAT_INTERVAL_S)


async def _manage(child: Child, capacity: Capacity, *, finishes: bool, hangs: bool = False) -> None:
    beating = asyncio.create_task(child.keep_beating())
    (NOTES / f"life-{child.settings.life}").touch()
    child.ready(url=f"http://localhost/{capacity.num_pages}", port="none")
    while True:
        match await child.next_order():
            case PeersLost(message=message):
                leave_note("peers-lost", message)
            case PeersReady(capacity=capacity):
                leave_note("peers-back", str(capacity.num_pages))
            case PeerDied(message=message):
                leave_note("clients-were-told", message)
                break
            case Stop(drain=drain):
                (NOTES / "draining").touch()
                if hangs:
                    threading.Event().wait()
                if finishes or not drain:
                    (NOTES / "drained").touch()
                    break
    beating.cancel()


assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
