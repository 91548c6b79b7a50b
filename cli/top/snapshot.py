"""`Snapshot`: the state that a server reports, validated; `Rates`: the rates between two snapshots."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Self

import msgspec

from ...runtime.errors import ServerError
from ...runtime.scheduler_report import SchedulerReport


class Request(msgspec.Struct, frozen=True):
    """A live request, as `GET /v1/requests` reports it."""

    id: str
    phase: str
    prompt_tokens: int
    completion_tokens: int
    max_tokens: int
    age_s: float
    cached_tokens: int = 0
    ttft_s: float | None = None
    num_retractions: int = 0
    priority: int = 0
    reason: str = ""
    why: str = ""
    need: int = 0
    have: int = 0

    @property
    def waits(self) -> bool:
        """Whether it has no row in the batch."""
        return self.phase not in ("prefill", "decode")


class Replica(msgspec.Struct, frozen=True):
    """A replica of the model, with `--dp`; `reason`: why it is not healthy, "" if it is."""

    number: int
    reason: str
    report: SchedulerReport


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """See the module.

    Attributes:
        url: the server that was asked.
        model, version: what is served, by which engine.
        max_running_requests: the most that may run at once, on all replicas.
        task: "generate", "embed" or "score".
        report: the scheduler's figures; those of all replicas as one.
        requests: the live ones, running ones first.
        total: how many there are, including those not listed.
        last_pass: the budgets of the scheduler's last pass.
        replicas: if there are several.
    """

    url: str
    model: str
    version: str
    max_running_requests: int
    task: str
    report: SchedulerReport
    requests: tuple[Request, ...]
    total: int
    last_pass: dict[str, int]
    replicas: tuple[Replica, ...] = ()

    @classmethod
    def from_answers(cls, url: str, info: dict[str, Any], listed: dict[str, Any]) -> Self:
        """Read the answers of `/server_info` and `/v1/requests`. Unknown fields of a newer server are ignored.

        Raises:
            ServerError: they do not come from an engine.
        """
        try:
            return cls(
                url=url,
                model=printable(str(info["model"])),
                version=printable(str(info["version"])),
                max_running_requests=int(info["capacity"]["max_running_requests"])
                * int(info.get("dp_size", 1)),
                task=printable(
                    str(((info.get("model_spec") or {}).get("pooling") or {}).get("task", "generate"))
                ),
                report=_report_of(info["scheduler"]),
                requests=tuple(map(_printable, msgspec.convert(listed["data"], list[Request]))),
                total=int(listed["total"]),
                last_pass=msgspec.convert(listed.get("last_pass", {}), dict[str, int]),
                replicas=tuple(
                    Replica(
                        int(each["replica"]), printable(each["reason"] or ""), _report_of(each["scheduler"])
                    )
                    for each in info.get("replicas", ())
                ),
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ServerError(
                f"{url} gave an answer that is not an engine's of this version ({error}); check the URL"
            ) from None

    @property
    def free_tokens(self) -> int:
        """Free KV slots."""
        return max(0, self.report.kv.total_tokens - self.report.kv.used_tokens - self.report.kv.cached_tokens)

    def as_dict(self, rates: Rates | None) -> dict[str, Any]:
        """For `--json`."""
        return {
            "url": self.url,
            "model": self.model,
            "version": self.version,
            "task": self.task,
            "scheduler": self.report.flat(),
            "replicas": [
                {
                    "replica": each.number,
                    "reason": each.reason or None,
                    "scheduler": each.report.flat(),
                }
                for each in self.replicas
            ],
            "kv_free_tokens": self.free_tokens,
            "last_pass": self.last_pass,
            "rates": None if rates is None else asdict(rates),
            "num_requests": self.total,
            "requests": [msgspec.structs.asdict(request) for request in self.requests],
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Per second, between two snapshots; `busy` and `cached` are shares in [0, 1]."""

    seconds: float
    output_tokens: float
    prompt_tokens: float
    cached: float
    steps: float
    busy: float
    evicted_tokens: float
    retractions: int
    masks: float = 0.0
    overruled_tokens: float = 0.0

    @classmethod
    def between(cls, before: Snapshot, after: Snapshot) -> Rates | None:
        """None if there is no rate: no time has passed for the server, or it was restarted between."""
        old, new = before.report, after.report
        seconds = new.sent_s - old.sent_s
        if seconds <= 0 or new.totals.num_steps < old.totals.num_steps:
            return None
        prompt = new.totals.prompt_tokens - old.totals.prompt_tokens
        return cls(
            seconds=seconds,
            output_tokens=(new.totals.generation_tokens - old.totals.generation_tokens) / seconds,
            prompt_tokens=prompt / seconds,
            cached=(new.totals.cached_tokens - old.totals.cached_tokens) / prompt if prompt > 0 else 0.0,
            steps=(new.totals.num_steps - old.totals.num_steps) / seconds,
            busy=min(1.0, (new.totals.step_s - old.totals.step_s) / seconds / max(1, len(after.replicas))),
            evicted_tokens=(new.totals.evicted_tokens - old.totals.evicted_tokens) / seconds,
            retractions=new.totals.retracted_reqs - old.totals.retracted_reqs,
            masks=(new.grammar.masks - old.grammar.masks) / seconds,
            overruled_tokens=(new.totals.overruled_tokens - old.totals.overruled_tokens) / seconds,
        )


def printable(text: str) -> str:
    """Text of a server without terminal control characters."""
    return "".join(char if char.isprintable() else "?" for char in text)


def _printable(request: Request) -> Request:
    texts = {name: printable(getattr(request, name)) for name in ("id", "phase", "reason", "why")}
    return msgspec.structs.replace(request, **texts)


def _report_of(values: dict[str, Any] | None) -> SchedulerReport:
    """A report from the fields of `/server_info`; a field that an older server lacks has its default."""
    if values is None:  # it has just started
        return SchedulerReport(sent_s=0.0)
    report = SchedulerReport.from_flat(values)
    return msgspec.structs.replace(
        report,
        policy=printable(report.policy),
        stalled=printable(report.stalled),
        waiting_by_reason={printable(name): count for name, count in report.waiting_by_reason.items()},
    )
