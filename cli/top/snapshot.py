"""`Snapshot`: the state that a server reports, validated; `Rates`: the rates between two snapshots."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Self

import msgspec

from ...runtime.errors import ServerError
from ...runtime.messages import SchedulerReport


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
        return max(0, self.report.kv_total_tokens - self.report.kv_used_tokens - self.report.kv_cached_tokens)

    def as_dict(self, rates: Rates | None) -> dict[str, Any]:
        """For `--json`."""
        return {
            "url": self.url,
            "model": self.model,
            "version": self.version,
            "task": self.task,
            "scheduler": msgspec.structs.asdict(self.report),
            "replicas": [
                {
                    "replica": each.number,
                    "reason": each.reason or None,
                    "scheduler": msgspec.structs.asdict(each.report),
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
        if seconds <= 0 or new.num_steps_total < old.num_steps_total:
            return None
        prompt = new.prompt_tokens_total - old.prompt_tokens_total
        return cls(
            seconds=seconds,
            output_tokens=(new.generation_tokens_total - old.generation_tokens_total) / seconds,
            prompt_tokens=prompt / seconds,
            cached=(new.cached_tokens_total - old.cached_tokens_total) / prompt if prompt > 0 else 0.0,
            steps=(new.num_steps_total - old.num_steps_total) / seconds,
            busy=min(1.0, (new.step_s_total - old.step_s_total) / seconds / max(1, len(after.replicas))),
            evicted_tokens=(new.evicted_tokens_total - old.evicted_tokens_total) / seconds,
            retractions=new.retracted_reqs_total - old.retracted_reqs_total,
            masks=(new.grammar_masks_total - old.grammar_masks_total) / seconds,
            overruled_tokens=(new.overruled_tokens_total - old.overruled_tokens_total) / seconds,
        )


def printable(text: str) -> str:
    """Text of a server without terminal control characters."""
    return "".join(char if char.isprintable() else "?" for char in text)


def _printable(request: Request) -> Request:
    texts = {name: printable(getattr(request, name)) for name in ("id", "phase", "reason", "why")}
    return msgspec.structs.replace(request, **texts)


def _report_of(values: dict[str, Any] | None) -> SchedulerReport:
    """A report from its fields by name, as in JSON; a field that an older server lacks has its default."""
    if values is None:  # it has just started
        return SchedulerReport(sent_s=0.0)
    row: list[Any] = [
        SchedulerReport.__name__
    ]  # the wire form between the processes: a tag, then the fields in order
    for field in msgspec.structs.fields(SchedulerReport):
        if field.name in values:
            row.append(values[field.name])
        elif field.default_factory is not msgspec.NODEFAULT:
            row.append(field.default_factory())
        elif field.default is not msgspec.NODEFAULT:
            row.append(field.default)
        else:
            raise KeyError(field.name)
    report = msgspec.convert(row, SchedulerReport)
    return msgspec.structs.replace(
        report,
        policy=printable(report.policy),
        stalled=printable(report.stalled),
        waiting_by_reason={printable(name): count for name, count in report.waiting_by_reason.items()},
    )
