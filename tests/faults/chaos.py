"""Chaos: kills, crashes and freezes random processes of a server under load, and checks every answer.

    make chaos                                   # ten minutes, the default model, 200 streams at a time
    python -m tests.faults.chaos --minutes 1 --clients 8 --model FOLDER --seed 7

Clients send requests whose answers are known from an undisturbed run of the same server. At the end nothing may have
hung, been wrong or been lost; what a lost tokenizer manager breaks is told apart, and sent again. It prints what was
done and how long things took, and exits with 1 if anything went wrong.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import random
import re
import signal
import statistics
import sys
import threading
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Final

import httpx

from tests.e2e.serving import EngineServe

from .load import KINDS, Answer

HUNG_S: Final = 600.0  # a stream that is silent for longer, or an answer that is not there by then, hangs
PROGRESS_TOKENS: Final = 20
"""So many tokens of every answer come between two faults, if it does not end before: with fewer than 16 it is
rightly suspected of having caused both, see `PoisonDetector`."""
NUM_CLIENTS: Final = 200
_STREAM_LENGTHS: Final = (60, 120)  # through several faults, and not too long to be computed again after each
_WHOLE_LENGTHS: Final = (20, 40)  # all of it comes between two faults: nothing shows how it gets on
_WATCHDOG_S: Final = 6.0
_SIGNALS: Final = (signal.SIGKILL, signal.SIGSEGV, signal.SIGSTOP)
_ROLES: Final = ("scheduler", "scheduler", "detokenizer", "detokenizer", "tokenizer_manager")
_RESTARTING: Final = re.compile(r"^(\S+Z) .*restarting processes=", re.MULTILINE)
_RECOVERED: Final = re.compile(r"recovered restart=(\d+) recovery_s=([\d.]+)")


class Client:
    """Sends requests one after the other.

    Attributes:
        outcomes: right, wrong, lost, hung; by the loss of the tokenizer manager: broken, not connected.
        longest_pause_s: between two events of a stream.
        num_tokens: so far, of each choice; the end of an answer counts like many.
    """

    def __init__(
        self, engine: EngineServe, bodies: Sequence[dict[str, Any]], known: Sequence[Answer]
    ) -> None:
        self.outcomes: Counter[str] = Counter()
        self.longest_pause_s = 0.0
        self.num_tokens = 0.0
        self.problems: list[str] = []
        self._bodies = bodies
        self._known = known
        # A connection for each request: one that is kept may be that of a tokenizer manager that is gone.
        limits = httpx.Limits(max_keepalive_connections=0)
        self._http = httpx.Client(base_url=engine.url, timeout=HUNG_S, limits=limits, verify=False)

    def run(self, choose: random.Random, stop: threading.Event) -> None:
        """Until told to stop; what runs then is finished."""
        while not stop.is_set():
            idx = choose.randrange(len(self._bodies))
            outcome = self._ask(self._bodies[idx], self._known[idx])
            self.outcomes[outcome.partition(":")[0]] += 1
            if outcome.partition(":")[0] in ("wrong", "lost", "hung"):
                self.problems.append(outcome)
            if outcome != "not connected":
                self.num_tokens += PROGRESS_TOKENS

    def _ask(self, body: dict[str, Any], known: Answer) -> str:
        try:
            answer = self._answer(body)
        except httpx.TimeoutException:
            return "hung: no answer in time"
        except httpx.ConnectError:
            time.sleep(0.5)  # nobody listens until the next tokenizer manager does
            return "not connected"
        except httpx.TransportError:
            return "broken"
        if answer.error is not None or not answer.complete:
            return f"lost: {answer.error}"
        try:
            answer.assert_equals(known)
        except AssertionError as error:
            return f"wrong: {error}"
        return "right"

    def _answer(self, body: dict[str, Any]) -> Answer:
        answer = Answer()
        if not body.get("stream"):
            response = self._http.post("/v1/completions", json=body)
            answer.add(response.json())
            answer.complete = response.status_code == 200
            return answer
        last_s = time.monotonic()
        body = body | {"stream_options": {"include_usage": True}}
        with self._http.stream("POST", "/v1/completions", json=body) as response:
            for line in response.iter_lines():
                if line == "data: [DONE]":
                    answer.complete = True
                elif line.startswith("data: "):
                    answer.add(json.loads(line.removeprefix("data: ")))
                    self.num_tokens += 1 / body.get("n", 1)
                    now_s = time.monotonic()
                    self.longest_pause_s = max(self.longest_pause_s, now_s - last_s)
                    last_s = now_s
        return answer


class Faults:
    """Injects faults, and measures how long it takes to notice them and to recover."""

    def __init__(self, engine: EngineServe, clients: Sequence[Client], choose: random.Random) -> None:
        self.counts: Counter[str] = Counter()
        self.detection_s: dict[str, list[float]] = {}
        self.recovery_s: dict[str, list[float]] = {}
        self.num_live: list[int] = []
        self._engine = engine
        self._clients = clients
        self._choose = choose

    def inject(self) -> None:
        """One fault; returns when the server has recovered and every client has got on."""
        role, signum = self._choose.choice(_ROLES), self._choose.choice(_SIGNALS)
        info = httpx.get(f"{self._engine.url}/server_info", timeout=HUNG_S).json()
        self.num_live.append(info["num_live_requests"])
        num_before = len(_RECOVERED.findall(self._engine.log))
        began_s = time.time()
        os.kill(self._engine.pids[role], signum)
        self._wait(lambda: len(_RECOVERED.findall(self._engine.log)) > num_before, f"{role} {signum.name}")
        log = self._engine.log
        noticed = datetime.datetime.fromisoformat(_RESTARTING.findall(log)[-1])
        kind = "freeze" if signum == signal.SIGSTOP else "death"
        self.counts[f"{role} {signum.name}"] += 1
        self.detection_s.setdefault(kind, []).append(noticed.timestamp() - began_s)
        self.recovery_s.setdefault(role, []).append(float(_RECOVERED.findall(log)[-1][1]))
        goals = [client.num_tokens + PROGRESS_TOKENS for client in self._clients]
        self._wait(
            lambda: all(client.num_tokens >= goal for client, goal in zip(self._clients, goals, strict=True)),
            "clients get on",
        )

    def _wait(self, condition: Any, what: str) -> None:
        deadline_s = time.monotonic() + 2 * HUNG_S
        while not condition():
            assert self._engine.process.poll() is None, f"the server has ended:\n{self._engine.log[-3000:]}"
            assert time.monotonic() < deadline_s, f"never: {what}\n{self._engine.log[-3000:]}"
            time.sleep(0.05)


def run_chaos(seconds: float, seed: int, num_clients: int, arguments: Sequence[str]) -> list[str]:
    """Serve, disturb, compare; what went wrong, in words."""
    choose = random.Random(seed)
    bodies = [
        body | {"max_tokens": length}
        for body in KINDS.values()
        for length in (_STREAM_LENGTHS if body.get("stream") else _WHOLE_LENGTHS)
    ]
    for body in bodies:
        body.pop("min_tokens", None)
    flags = (
        *("--max-restarts", "1000000", "--watchdog-timeout", str(_WATCHDOG_S)),
        # All of them run at the same time.
        *("--max-running-requests", str(3 * num_clients)),
    )
    with EngineServe(*arguments, *flags) as engine:
        engine.wait_until_ready()
        probe = Client(engine, bodies, ())
        with ThreadPoolExecutor(len(bodies)) as threads:
            known = list(threads.map(probe._answer, bodies))
        assert all(answer.complete for answer in known), known
        clients = [Client(engine, bodies, known) for _ in range(num_clients)]
        faults, stop = Faults(engine, clients, choose), threading.Event()
        runs: list[Future[None]] = []
        with ThreadPoolExecutor(num_clients) as threads:
            try:
                runs += [
                    threads.submit(client.run, random.Random(choose.random()), stop) for client in clients
                ]
                end_s = time.monotonic() + seconds
                while time.monotonic() < end_s:
                    faults.inject()
            finally:
                stop.set()
        for run in runs:
            run.result()
        problems = [problem for client in clients for problem in client.problems]
        engine.idle_metrics()  # nothing runs, waits or is held
        if (code := engine.stop()) != 0:
            problems.append(f"exit code {code}")
        problems += engine.leftovers()
        _report(clients, faults, problems)
        return problems


def _report(clients: Sequence[Client], faults: Faults, problems: Sequence[str]) -> None:
    outcomes = sum((client.outcomes for client in clients), Counter[str]())
    lines = [f"faults: {sum(faults.counts.values())}: {dict(sorted(faults.counts.items()))}"]
    lines.append(
        f"requests that lived when a fault came: {statistics.median(faults.num_live):.0f} in the median, "
        f"{min(faults.num_live)} to {max(faults.num_live)}"
    )
    lines += [_line(f"noticed a {kind}", values) for kind, values in sorted(faults.detection_s.items())]
    lines += [_line(f"recovered a {role}", values) for role, values in sorted(faults.recovery_s.items())]
    lines.append(f"longest pause of a stream: {max(client.longest_pause_s for client in clients):.2f} s")
    lines.append(
        f"answers: {dict(outcomes)}; hung {outcomes['hung']}, wrong {outcomes['wrong']}, lost {outcomes['lost']}"
    )
    lines += [f"problem: {problem}" for problem in problems]
    sys.stdout.write("\n".join(lines) + "\n")


def _line(what: str, values: Sequence[float]) -> str:
    return (
        f"{what} after {statistics.median(values):.2f} s, at most {max(values):.2f} s ({len(values)} times)"
    )


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--clients", type=int, default=NUM_CLIENTS, help="each has one request at a time")
    parser.add_argument("--model", default=None, help="the default model unless given")
    args = parser.parse_args()
    # The same bits whatever else is in a batch; else an answer may differ where rounding decides.
    arguments = [*([args.model] if args.model else []), "--deterministic"]
    sys.exit(1 if run_chaos(60 * args.minutes, args.seed, args.clients, arguments) else 0)


if __name__ == "__main__":
    main()
