"""`Snapshot`: the state that a server reports; `Rates`: between two snapshots; `Client`: asks the server for them."""

from __future__ import annotations

import ssl
from dataclasses import asdict, dataclass
from types import TracebackType
from typing import Any, Final, Self

import httpx
import msgspec

from ...runtime.errors import RequestError, ServerError
from ...runtime.scheduler_report import SchedulerReport
from ..server_client import base_url, connection_problem, error_of


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
    service_tier: str = "default"

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
    texts = {
        name: printable(getattr(request, name)) for name in ("id", "phase", "reason", "why", "service_tier")
    }
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


_TIMEOUT_S: Final = 10.0


class Unreachable(ServerError):
    """No server answers now; a live view tries again."""


class Client:
    """One server. A context manager."""

    def __init__(
        self, url: str, api_key: str | None, timeout_s: float = _TIMEOUT_S, cacert: str | None = None
    ) -> None:
        """Prepare the client; it connects with the first request.

        Args:
            cacert: a file of certificates (PEM) to trust; None for those that the system trusts.

        Raises:
            RequestError: not a URL, or such a file cannot be used.
        """
        self.base = base_url(url)
        headers = {b"Authorization": f"Bearer {api_key}".encode()} if api_key else {}
        self._client = httpx.Client(headers=headers, timeout=timeout_s, verify=_trust(cacert))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._client.close()

    def poll(self) -> Snapshot:
        """Fetch the current state.

        Raises:
            Unreachable: no server answers, or it is shutting down.
            RequestError: a server refuses.
            ServerError: it is not an engine.
        """
        info = self._get("/server_info")
        return Snapshot.from_answers(self.base, info, self._get("/v1/requests"))

    def _get(self, path: str) -> dict[str, Any]:
        try:
            response = self._client.get(f"{self.base}{path}")
        except httpx.HTTPError as error:
            hint = "start one with `engine serve`, or give the URL of one"
            raise Unreachable(connection_problem(self.base, error, hint)) from None
        if response.status_code == httpx.codes.NOT_FOUND:
            raise ServerError(f"{self.base} has no {path}; is it an engine of this version? Check the URL")
        if response.status_code == httpx.codes.SERVICE_UNAVAILABLE:
            raise Unreachable(str(error_of(response)))
        if response.status_code != httpx.codes.OK:
            raise error_of(response)
        try:
            answer = response.json()
        except ValueError:
            answer = None
        if not isinstance(answer, dict):
            raise ServerError(f"{self.base}{path} is no JSON object; is it an engine? Check the URL")
        return answer


def _trust(cacert: str | None) -> ssl.SSLContext | bool:
    """Verification of certificates; True is httpx's default, which honors SSL_CERT_FILE."""
    if cacert is None:
        return True
    try:
        return ssl.create_default_context(cafile=cacert)
    except (OSError, ValueError) as error:  # SSLError is an OSError
        reason = getattr(error, "strerror", None) or error
        raise RequestError(
            f"--cacert {cacert} cannot be used: {reason}; give a file of certificates in PEM form"
        ) from None
