"""`Runner`: makes the measurements of a plan, stores each at once, and continues after a failure."""

from __future__ import annotations

import contextlib
import datetime
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from benchmarks.ceilings import Ceiling
from benchmarks.peers.limits import ServedModel
from benchmarks.peers.machine import Memory, Snapshot
from benchmarks.peers.plan import Job, Plan
from benchmarks.peers.results import Failure, Measurement, Resident, Results, Start
from benchmarks.peers.server import Server, ServerError, running, start
from benchmarks.peers.sides import MODEL_NAME, Side
from benchmarks.peers.workloads import Workload
from engine.cli.bench.records import BenchRequest
from engine.cli.bench.result_file import RequestRow
from engine.cli.bench.result_file import read_results as read_bench
from engine.cli.bench.workloads.workload import WorkloadTokenizer
from engine.launch.resolve.host_facts import read_host_facts
from engine.launch.resolve.memory_budget import size_text

START_LIMIT_S: Final = 600.0
PATIENCE: Final = 6.0
"""A measurement fails if it takes more than this multiple of the expected time."""
LEAST_LIMIT_S: Final = 180.0
FILL_PROMPT_LEN: Final = 1900
SHORT_MEMORY_BYTES: Final = 1 << 30
"""With less free memory, Linux evicts the servers' code and reads it again, which slows them a hundredfold."""
SCRIPTS: Final = Path(__file__).resolve().parent.parent


class RunError(Exception):
    """One measurement failed; the others can continue."""


class Runner:
    """Makes the measurements of a plan and stores each."""

    def __init__(
        self,
        path: Path,
        results: Results,
        plan: Plan,
        model: ServedModel,
        gguf: Path,
        max_minutes: float,
        alone: bool,
    ) -> None:
        self._path = path
        self._results = results
        self._plan = plan
        self._model = model
        self._alone = alone
        self._gguf = gguf
        self._tokenizer = WorkloadTokenizer.load(str(gguf))
        self._deadline_s = time.monotonic() + max_minutes * 60
        self._logs = path.with_name(path.stem + "-logs")

    def run(self) -> None:
        """Make all missing measurements, within the time limit."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._logs.mkdir(exist_ok=True)
        self._print_plan()
        self._results.write(self._path)
        if not self._results.ceilings:
            self._measure_ceilings()
        if self._alone:
            for side in self._plan.sides:
                self._measure_alone(side)
        if self._measure_rounds():
            self._measure_ceilings()  # again: the better figure counts
        self._results.write(self._path)

    def _print_plan(self) -> None:
        num_jobs = len(list(self._plan.jobs(self._results)))
        alone_s = self._plan.alone_s(self._results) if self._alone else 0.0
        rounds_s = self._plan.rounds_s(self._results)
        sides = ", ".join(side.name for side in self._plan.sides)
        print(
            f"Plan: {sides}; starts and memory about {alone_s / 60:.0f} min, {num_jobs} measurements about "
            f"{rounds_s / 60:.0f} min; at most {self._left_s() / 60:.0f} min in all. "
            f"{len(self._results.measurements)} measurements are in {self._path} already.",
            flush=True,
        )

    def _left_s(self) -> float:
        return max(0.0, self._deadline_s - time.monotonic())

    def _measure_ceilings(self) -> None:
        """Measure the ceilings in a separate process, so that no torch threads remain in this one."""
        if not self._left_s():
            return
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "ceilings.json"
            threads = str(self._num_threads())
            command = [sys.executable, str(SCRIPTS / "ceilings.py"), "--threads", threads, "--json", str(out)]
            command += ["--megabytes", *map(str, self._model.footprints)]
            before = Snapshot.take(None)
            try:
                subprocess.run(command, check=True, capture_output=True, text=True, timeout=300)
            except subprocess.SubprocessError as error:
                self._note_failure("machine", "ceilings", str(error))
                return
            self._results.ceilings_disturbed.append(before.until(Snapshot.take(None)).others)
            found = msgspec.json.decode(out.read_bytes(), type=list[Ceiling])
        self._results.ceilings += found
        self._results.write(self._path)
        print("\n".join(map(str, found)), flush=True)

    def _num_threads(self) -> int:
        return len(self._results.settings["cores"])

    def _measure_alone(self, side: Side) -> None:
        """Measure the starts, and the memory at the end of the last one."""
        while self._left_s():
            missing = self._plan.missing_starts(side, self._results)
            needs_memory = self._plan.needs_memory(side, self._results)
            if not missing and not needs_memory:
                return
            before = Snapshot.take(None)
            try:
                with running(side, self._log_of(side), min(START_LIMIT_S, self._left_s())) as server:
                    share = before.until(Snapshot.take(server.pid))
                    self._results.starts.append(Start(side.name, server.first_completion_s, share))
                    print(f"start of {side.name}: {server.first_completion_s:.2f} s", flush=True)
                    if missing <= 1 and needs_memory:
                        self._measure_memory(server)
            except (ServerError, RunError) as error:
                self._note_failure(side.name, "start and memory", str(error))
                return
            self._results.write(self._path)

    def _measure_memory(self, server: Server) -> None:
        kv_tokens = int(self._results.settings["kv_tokens"])
        if server.side.fills_kv:
            num_prompts = 1 if self._plan.quick else -(-kv_tokens // FILL_PROMPT_LEN)
            settings = {"num_prompts": num_prompts, "random_input_len": str(FILL_PROMPT_LEN)}
            settings |= {"random_output_len": "1", "max_concurrency": 1}
            fill = Workload("fill", "", settings, ())
            self._ask(server, fill, seed=99, limit_s=self._limit_s(server.side.expected_s.get("fill", 60.0)))
        memory = Memory.of_tree(server.pid)
        self._results.residents.append(Resident(server.side.name, kv_tokens, memory))
        gigabytes = memory.proportional_bytes / 1e9
        print(f"memory of {server.side.name} with {kv_tokens:,} tokens: {gigabytes:.2f} GB", flush=True)

    def _measure_rounds(self) -> bool:
        """Run every missing job; returns whether there was one."""
        jobs = list(self._plan.jobs(self._results))
        with contextlib.ExitStack() as stack:
            servers = self._start_all({job.side.name: job.side for job in jobs}, stack)
            restarted: set[str] = set()
            for done, job in enumerate(jobs):
                if self._left_s() < self._plan.expected_s(job, self._results):
                    self._note_failure("all", f"{len(jobs) - done} measurements", "--max-minutes is over")
                    break
                if (free := read_host_facts().mem_usable_bytes) < SHORT_MEMORY_BYTES:
                    reason = (
                        f"only {size_text(free)} of memory are free with all servers up: lower --kv-tokens"
                    )
                    self._note_failure(
                        "all", f"{len(jobs) - done} measurements", f"{reason}, or name fewer --sides"
                    )
                    break
                self._measure_job(job, servers, restarted, stack)
                self._results.write(self._path)
        return bool(jobs)

    def _start_all(self, sides: Mapping[str, Side], stack: contextlib.ExitStack) -> dict[str, Server]:
        servers = {}
        for name, side in sides.items():
            try:
                servers[name] = start(side, self._log_of(side), min(START_LIMIT_S, self._left_s()))
                stack.callback(servers[name].stop)
            except ServerError as error:
                self._note_failure(name, "all rounds", str(error))
        return servers

    def _measure_job(
        self, job: Job, servers: dict[str, Server], restarted: set[str], stack: contextlib.ExitStack
    ) -> None:
        name = job.side.name
        if name not in servers:
            return  # its failure is recorded already
        limit_s = self._limit_s(self._plan.expected_s(job, self._results))
        try:
            measurement = self._measure(servers[name], job, limit_s)
        except RunError as error:
            self._note_failure(name, f"{job.workload.name} in round {job.round + 1}", str(error))
            # Its remaining work would disturb the others, and a dead server does not answer: start each server
            # again, once.
            servers.pop(name).stop()
            if name not in restarted:
                restarted.add(name)
                servers.update(self._start_all({name: job.side}, stack))
            return
        self._results.measurements.append(measurement)
        figures = ", ".join(
            f"{figure.name} {measurement.figures[figure.name]:,.2f} {figure.unit}"
            for figure in job.workload.figures
        )
        others = measurement.share.others
        print(
            f"round {job.round + 1} {job.workload.name} {name}: {figures} (others {others:.2f} cores)",
            flush=True,
        )

    def _measure(self, server: Server, job: Job, limit_s: float) -> Measurement:
        before = Snapshot.take(server.pid)
        summary = self._ask(server, job.workload, seed=1000 * job.round + 7, limit_s=limit_s)
        after = Snapshot.take(server.pid)
        try:
            figures = {figure.name: figure.of(summary) for figure in job.workload.figures}
        except ValueError as error:
            raise RunError(str(error)) from error
        return Measurement(
            side=job.side.name,
            workload=job.workload.name,
            round=job.round,
            at=_now(),
            wall_s=after.at_s - before.at_s,
            figures=figures,
            share=before.until(after),
            summary=summary,
        )

    def _ask(self, server: Server, workload: Workload, seed: int, limit_s: float) -> dict[str, Any]:
        """One run of the client; returns its summary.

        Raises:
            RunError: it failed, took too long, or the server generated another number of tokens than asked for.
        """
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "run.json"
            # -P: without the current folder, which would allow `import runtime`.
            command = [sys.executable, "-P", "-m", "engine", "bench", "serve", "--url", server.side.url]
            command += ["--model", MODEL_NAME, "--tokenizer", str(self._gguf), "--seed", str(seed)]
            command += ["--output-file", str(out), *workload.flags()]
            try:
                done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=limit_s)
            except subprocess.TimeoutExpired:
                raise RunError(f"not done after {limit_s:.0f} s") from None
            if done.returncode != 0:
                raise RunError(f"{(done.stdout + done.stderr).strip()[-1000:]}")
            result = read_bench(out).runs[0]
        check_counts(workload.requests(self._tokenizer, seed), result.requests)
        summary: dict[str, Any] = msgspec.to_builtins(result.summary)
        summary.pop("steady")  # long, and nothing here needs it
        return summary

    def _limit_s(self, expected_s: float) -> float:
        return min(max(LEAST_LIMIT_S, PATIENCE * expected_s), max(self._left_s(), 1.0))

    def _log_of(self, side: Side) -> Path:
        return self._logs / f"{side.name}.log"

    def _note_failure(self, side: str, what: str, reason: str) -> None:
        print(f"FAILED: {what} of {side}: {reason}", flush=True)
        self._results.failures.append(Failure(side, what, _now(), reason))
        self._results.write(self._path)


def check_counts(requests: Sequence[BenchRequest], rows: Sequence[RequestRow]) -> None:
    """Check that every request had exactly its tokens.

    Raises:
        RunError: a request had other counts.
    """
    if len(requests) != len(rows):
        raise RunError(f"{len(rows)} answers to {len(requests)} requests")
    for idx, (request, row) in enumerate(zip(requests, rows, strict=True)):
        wanted = (request.prompt_len, request.output_len)
        if (row.prompt_tokens, row.output_tokens) != wanted:
            raise RunError(
                f"request {idx} was {wanted[0]} tokens in, {wanted[1]} out, but the server counted "
                f"{row.prompt_tokens} in, {row.output_tokens} out"
            )


def _now() -> str:
    return datetime.datetime.now().astimezone().isoformat(timespec="seconds")
