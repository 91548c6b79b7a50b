"""Finds the settings with which this GPU computes what it should, and names what is wrong with the others.

    python3 benchmarks/gpu/path.py benchmarks.gpu.triage [--out build/gpu-triage]

One to four minutes. Tiny models (`golden.py`) are compared with their answers on the CPU; each attempt is a child
process with a limit, so an illegal access or a hang ends only that attempt. In this order:

1. the facts of the machine;
2. everything on: if that passes, the triage is over;
3. everything off (torch alone): if that fails, so do weights, memory or driver, and the triage is over;
4. a bisection over the switches, again with what was found switched off, until the rest passes;
5. an eager run in which each operator is compared with torch (`first_difference.py`);
6. after a crash or a hang, the same with blocking launches, and once without Triton's cache;
7. the flags with which everything passed, and what to send home: the folder.

Results are printed and written to triage.json at once. `check.py` and `bench.py` take them with `--triage triage.json`.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import faulthandler
import importlib
import json
import logging
import os
import re
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

from benchmarks.gpu.bisection import bisect
from benchmarks.gpu.path import BUNDLE, ROOT
from benchmarks.gpu.sections import MARK, flags_of, run_child

if TYPE_CHECKING:
    from benchmarks.gpu.first_difference import Difference

BUDGET_S: Final = 240.0
MODELS: Final = ("llama", "qwen3_moe")
SWITCHES: Final = {
    "cuda": (
        *("overlap", "prompt_graphs", "decode_graphs", "sampler_graphs", "pdl", "sgl-kernel", "fa3"),
        *(
            "triton:attention",
            "triton:sample",
            "triton:rotate_and_store",
            "triton:pack_experts",
            "triton:route",
        ),
        *("triton:rms_norm", "triton:add_rms_norm", "triton:silu_and_mul", "triton"),
    ),
    "cpu": (
        *("overlap", "native:attention", "native:sample", "native:rotate_and_store", "native:pack_experts"),
        *("native:route", "native:rms_norm", "native:add_rms_norm", "native:silu_and_mul", "native"),
    ),
}
"""By device: `overlap`, and names for `--avoid-kernels`; 16 are bisected with four attempts."""
_LIMITS_S: Final = {"facts": 45.0, "golden": 120.0, "all on": 100.0, "all off": 40.0}
_LIMIT_S: Final = 25.0  # of other attempts; their kernels are compiled already
_LEAST_S: Final = 8.0  # with less an attempt is not begun

_CURRENT: Final = "current_op"  # where `Comparer` writes each operator before it runs

Status = Literal["pass", "wrong", "error", "crash", "hang"]


@dataclass(slots=True)
class Attempt:
    """A run of some models with some components switched off, and its result.

    Attributes:
        models: those to run; `passed` those that gave the golden answers.
        reason: why it did not pass.
        differences: `Difference`s, of a run that compares operators.
    """

    name: str
    off: list[str]
    models: list[str]
    status: Status = "error"
    reason: str = ""
    seconds: float = 0.0
    passed: list[str] = field(default_factory=list)
    differences: list[dict[str, Any]] = field(default_factory=list)
    log: str = ""

    @property
    def failing(self) -> list[str]:
        """The models that did not pass."""
        return [model for model in self.models if model not in self.passed]


def settings_of(off: Collection[str]) -> dict[str, Any]:
    """The engine's settings with these switches off."""
    avoided = [name for name in off if name != "overlap"]
    return ({"avoid_kernels": avoided} if avoided else {}) | ({"overlap": False} if "overlap" in off else {})


class Options(NamedTuple):
    """The command line."""

    device: str
    out: Path
    golden: Path
    models: tuple[str, ...]
    budget_s: float
    patience: float
    plant: str


class Triage:
    """The main program: starts attempts and decides what to try next."""

    def __init__(self, options: Options, clock: Callable[[], float] = time.monotonic) -> None:
        self._options = options
        self._clock = clock
        self._deadline_s = clock() + options.budget_s
        self._switches = SWITCHES[options.device]
        self._report: dict[str, Any] = {"attempts": []}
        self._passed: dict[frozenset[str], bool] = {}
        self._logs = options.out / "logs"

    def run(self) -> bool:
        """Do all; whether settings were found with which everything passes."""
        shutil.rmtree(self._options.out, ignore_errors=True)
        self._logs.mkdir(parents=True)
        self._gather_facts()
        if not (self._options.golden / self._options.models[-1] / "answers.json").exists():
            print("the bundle has no golden answers; they are made here, on the CPU", flush=True)
            self._child("golden", {"folder": str(self._options.golden)})
        all_on = self.attempt("all on", [])
        if all_on.status == "pass":
            return self._end([])
        all_off = self.attempt("all off", self._switches)
        if all_off.status != "pass":
            return self._end(None)
        off = self._find(all_on)
        differences = self._compare(all_on)
        off = self._narrow(off, differences)
        self._look_at_crash(all_on, off)
        self._copy_triton_cache(off, differences)
        return self._end(off)

    # ------------------------------------------------------------ the steps

    def _gather_facts(self) -> None:
        facts = self._child("facts", {})
        self._report["facts"] = facts.differences[0] if facts.differences else facts.reason
        self._write()

    def _find(self, all_on: Attempt) -> list[str]:
        """The switches that must be off so that all models pass; if time runs out, more than necessary."""
        off: list[str] = []
        failing = all_on.failing
        while failing:
            model = failing[:1]
            left = [name for name in self._switches if name not in off]
            found = bisect(left, partial(self._passes, tuple(off), model))
            off += found.guilty
            if not found.complete:
                return [name for name in self._switches if name in {*off, *found.safe}]
            confirmed = self.attempt("confirm", off)
            failing = confirmed.failing
            if not confirmed.log or model[0] in failing:
                return list(self._switches)  # no time left, or it passes only sometimes
        return off

    def _passes(self, off: Sequence[str], model: Sequence[str], more: Collection[str]) -> bool | None:
        key = frozenset([*off, *more, *model])
        if key not in self._passed:
            attempt = self.attempt("bisect", [*off, *more], model)
            if not attempt.log:
                return None
            self._passed[key] = attempt.status == "pass"
        return self._passed[key]

    def _compare(self, all_on: Attempt) -> list[dict[str, Any]]:
        """The first difference of each operator that is wrong."""
        compared = self.attempt("compare", [], all_on.failing, {"compare": True})
        for each in compared.differences:
            self._say(f"{each['op']} of {each['provider']} differs, {each['where']}: {each['reason']}")
        if compared.log and compared.status not in ("pass", "wrong"):
            current = self._options.out / _CURRENT
            where = current.read_text() if current.exists() else "before the first operator"
            self._say(f"the operators compared one by one: {compared.status} in {where}")
            self._report["ended_in"] = where
        elif not compared.differences:
            self._say(
                "each operator agrees with torch: what is wrong is how steps are recorded or overlapped"
            )
        return compared.differences

    def _narrow(self, off: list[str], differences: list[dict[str, Any]]) -> list[str]:
        """A single operator in place of a whole package, if that suffices."""
        narrow: list[str] = []
        for name in off:
            wrong = [f"{name}:{each['op']}" for each in differences if each["provider"] == name]
            narrow += wrong or [name]
        if narrow == off or self.attempt("narrow", narrow).status != "pass":
            return off
        return narrow

    def _look_at_crash(self, all_on: Attempt, off: list[str]) -> None:
        """Where it crashes or hangs, and whether Triton's cache is to blame."""
        failing = all_on.failing[:1]
        if all_on.status != "wrong":  # an illegal access may be an error, too
            self.attempt("blocking", [], failing, environment={"CUDA_LAUNCH_BLOCKING": "1"})
        if any(name.startswith("triton") for name in off):
            with tempfile.TemporaryDirectory() as cache:
                fresh = {"TRITON_CACHE_DIR": cache}
                attempt = self.attempt("without Triton's cache", [], failing, environment=fresh)
            if attempt.status == "pass":
                self._say(f"Triton's cache is to blame: delete {_triton_cache()}, then no flags are needed")

    def _copy_triton_cache(self, off: list[str], differences: list[dict[str, Any]]) -> None:
        """Copy the compiled kernels of operators that are wrong."""
        ops = {name.partition(":")[2] for name in off} | {each["op"] for each in differences}
        names = {kernel for op in ops for kernel in _kernels_of(op)}
        for entry in _triton_cache().glob("*/*.cubin"):
            if entry.stem in names:
                shutil.copytree(
                    entry.parent, self._options.out / "triton-cache" / entry.parent.name, dirs_exist_ok=True
                )

    def _end(self, off: list[str] | None) -> bool:
        if off is None:
            self._say(
                "with everything off it fails, too: weights, memory or driver; see the log of `all off`"
            )
        else:
            self._report["settings"] = settings_of(off)
            flags = " ".join(flags_of(settings_of(off)))
            self._report["flags"] = flags
            self._say(f"everything passed with: engine serve MODEL {flags}".rstrip())
        self._write()
        files = [path for path in self._options.out.rglob("*") if path.is_file()]
        size = sum(path.stat().st_size for path in files) / (1 << 20)
        print(f"send home: {self._options.out}, {len(files)} files, {size:.1f} MiB", flush=True)
        return off is not None

    # ------------------------------------------------------------ attempts

    def attempt(
        self,
        name: str,
        off: Sequence[str],
        models: Sequence[str] = (),
        options: Mapping[str, Any] | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> Attempt:
        """Run these models, or all, with these switches off."""
        order = [each for each in self._switches if each in off] + [
            each for each in off if each not in self._switches
        ]
        told = {"off": order, "models": list(models or self._options.models), **(options or {})}
        return self._child(name, told, environment)

    def _child(
        self, name: str, told: dict[str, Any], environment: Mapping[str, str] | None = None
    ) -> Attempt:
        done = Attempt(name, told.get("off", []), told.get("models", []))
        limit_s = min(
            self._options.patience * _LIMITS_S.get(name, _LIMIT_S), self._deadline_s - self._clock()
        )
        if limit_s < _LEAST_S:
            done.reason = "no time left"
            return done
        kind = name if name in ("facts", "golden") else "models"
        told |= {"kind": kind, "device": self._options.device, "plant": self._options.plant}
        told |= {"out": str(self._options.out), "golden": str(self._options.golden), "limit_s": limit_s}
        log = self._logs / f"{len(list(self._logs.iterdir())):02d}-{name.replace(' ', '-')}.log"
        done.log = log.name
        command = [sys.executable, "-P", "-m", "benchmarks.gpu.triage", "--child", json.dumps(told)]
        started_s = self._clock()
        with open(log, "w") as file:

            def take_line(line: str) -> None:
                if not line.startswith(MARK):
                    print(line, file=file, flush=True)
                    return
                message = json.loads(line.removeprefix(MARK))
                done.differences += message.get("differences", [])
                if message.get("passed"):
                    done.passed.append(message["passed"])
                done.reason = done.reason or message.get("reason", "")

            code = run_child(command, limit_s, take_line, environment)
        done.seconds = round(self._clock() - started_s, 1)
        done.status = _status(code, done)
        if done.status in ("crash", "hang"):
            done.reason = _last_place(log.read_text())
            done.reason = f"{f'signal {-code}' if code else f'after {limit_s:.0f} s'}: {done.reason}"
        self._report["attempts"].append(asdict(done))
        self._write()
        what = f"off: {', '.join(done.off) or 'nothing'}" if done.models else ""
        print(f"{done.status:6} {done.seconds:5.1f} s  {name:9} {what}", flush=True)
        if done.reason:
            print(f"       {done.reason}", flush=True)
        return done

    def _say(self, text: str) -> None:
        self._report.setdefault("conclusions", []).append(text)
        print(text, flush=True)

    def _write(self) -> None:
        (self._options.out / "triage.json").write_text(json.dumps(self._report, indent=1))


def _status(code: int | None, done: Attempt) -> Status:
    if code is None:
        return "hang"
    if code < 0:
        return "crash"
    if code == 0 and not done.failing:
        return "pass"
    return "wrong" if code == 0 else "error"


def _last_place(log: str) -> str:
    """The innermost frame of this repository in the last trace of `faulthandler`, or the last line."""
    frames = re.findall(r'File "([^"]+)", line (\d+) in (\w+)', log[log.rfind("most recent call first") :])
    for path, line, function in frames:
        if "model_runner" in path or "scheduler" in path:
            return f"{'/'.join(Path(path).parts[-3:])}:{line} in {function}"
    lines = [line for line in log.splitlines() if line.strip()]
    return lines[-1][:200] if lines else "no output"


_MODULES: Final = {
    "attention": "attention",
    "sample": "sampl",
    "rotate_and_store": "rotary_store",
    "pack_experts": "experts",
    "route": "route",
    "rms_norm": "norm",
    "add_rms_norm": "norm",
    "silu_and_mul": "activation",
}
"""Part of the names of the modules with the Triton kernels of an operator."""


def _triton_cache() -> Path:
    return Path(os.environ.get("TRITON_CACHE_DIR") or Path.home() / ".triton/cache")


def _kernels_of(op: str) -> list[str]:
    """The names of the Triton kernels in the module of an operator."""
    if op not in _MODULES:
        return []
    sources = (ROOT / "model_runner/kernels/triton").glob(f"*{_MODULES[op]}*.py")
    return [
        name for path in sources for name in re.findall(r"@triton\.jit[^\n]*\ndef (\w+)", path.read_text())
    ]


# ---------------------------------------------------------------- a child process


def _run_child(told: dict[str, Any]) -> None:
    """One attempt; its results are lines for the parent."""
    faulthandler.enable()
    faulthandler.dump_traceback_later(max(2.0, min(30.0, told["limit_s"] - 5.0)), repeat=True)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    logging.getLogger("engine.model_runner").setLevel(logging.DEBUG)
    if told["kind"] == "facts":
        _tell(differences=[_facts()])
    elif told["kind"] == "golden":
        from benchmarks.gpu import golden

        golden.make(Path(told["folder"]))
    else:
        with _planted(told["plant"], told):
            _run_models(told)


def _run_models(told: dict[str, Any]) -> None:
    from benchmarks.gpu import golden
    from benchmarks.gpu.first_difference import Comparer

    settings = settings_of(told["off"])
    compares = told.get("compare", False)
    if compares:
        settings |= {"overlap": False}
    if compares or told["device"] == "cpu":  # programs of the CPU do not call its operators one by one
        settings |= {"record_steps": False}
    for model in told["models"]:
        home = Path(told["golden"]) / model
        expected = golden.load(Path(told["golden"]), model)
        try:
            with (
                Comparer(Path(told["out"]), _tell_difference)
                if compares
                else contextlib.nullcontext() as comparer
            ):
                engine = golden.engine_of(home, told["device"], **settings)
                verdict = golden.compare(expected, golden.answer(engine, expected))
        except Exception as error:
            traceback.print_exc()
            _tell(reason=f"{model}: {type(error).__name__}: {str(error)[:300]}")
            sys.exit(1)
        print(f"{model}: {verdict}", flush=True)
        if comparer is not None:
            print(f"{comparer.num_calls} calls compared", flush=True)
        _tell(**({"reason": f"{model}: {verdict.reason}"} if verdict.reason else {"passed": model}))


def _facts() -> dict[str, Any]:
    import torch

    from engine.model_runner.kernels.probe import gather_facts, judge, log_lines

    facts = gather_facts()
    found = dataclasses.asdict(facts) | {
        "problems": log_lines(judge(facts)),
        "python": sys.version.split()[0],
    }
    cache = _triton_cache()
    found |= {"module_loading": os.environ.get("CUDA_MODULE_LOADING", ""), "bundle": BUNDLE.exists()}
    found |= {"triton_cache": str(cache), "triton_cache_entries": len(list(cache.glob("*")))}
    if facts.driver_works:
        free, total = torch.cuda.mem_get_info()
        found |= {"gpu": torch.cuda.get_device_name(), "free_mib": free >> 20, "total_mib": total >> 20}
    print(json.dumps(found, indent=1), flush=True)
    return found


@contextlib.contextmanager
def _planted(name: str, told: dict[str, Any]) -> Iterator[None]:
    """The fault of a test, MODULE:FUNCTION: a context manager that gets the attempt's options."""
    if not name:
        yield
        return
    module, _, function = name.partition(":")
    with getattr(importlib.import_module(module), function)(told):
        yield


def _tell_difference(difference: Difference) -> None:
    _tell(differences=[difference._asdict()])


def _tell(**message: Any) -> None:
    print(MARK + json.dumps(message), flush=True)


def main() -> None:
    """Parse the command line; exit with 0 if settings were found with which everything passes."""
    parser = argparse.ArgumentParser(
        description="Finds the settings with which this GPU computes what it should"
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--out", type=Path, default=ROOT / "build/gpu-triage")
    parser.add_argument("--golden", type=Path, default=BUNDLE / "golden")
    parser.add_argument("--budget", type=float, default=BUDGET_S, help="seconds for all")
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--patience", type=float, default=1.0, help="factor of the limits of attempts")
    parser.add_argument("--plant", default="", help=argparse.SUPPRESS)
    parser.add_argument("--child", default="", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        _run_child(json.loads(args.child))
        return
    models = tuple(args.models.split(","))
    options = Options(args.device, args.out, args.golden, models, args.budget, args.patience, args.plant)
    found = Triage(options).run()
    sys.exit(0 if found else 1)


if __name__ == "__main__":
    main()
