"""`Worker`: a server behind the router; what it says about itself, and whether it belongs to the others."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Final, Literal, NamedTuple

import httpx

from ...runtime.errors import ConfigError, ServerError
from ..unreachable import why_unreachable

Role = Literal["worker", "prefill", "decode"]

_TIMEOUT_S: Final = 5.0
_POLL_S: Final = 0.5
_NO_PORT: Final = "none"
_MAX_PORT: Final = 65_535
_MODES: Final[dict[Role, str]] = {"worker": "null", "prefill": "prefill", "decode": "decode"}
"""`disaggregation_mode` of `/server_info` that the role needs."""


class Worker(NamedTuple):
    """A server as the command line names it.

    Attributes:
        url: without a path.
        bootstrap_port: where a prefill worker tells decode workers about itself; None: it has none.
    """

    url: str
    role: Role = "worker"
    bootstrap_port: int | None = None

    @property
    def option(self) -> str:
        """The option that names it."""
        return f"--{self.role}"


class WorkerFacts(NamedTuple):
    """What a worker says about itself.

    Attributes:
        model: the name in requests.
        max_model_len: tokens of prompt and answer; None: unknown.
        tokenizer_path: a folder on its machine; "" if it has none.
        mode: null, prefill or decode; "" if it does not say.
    """

    model: str
    max_model_len: int | None
    tokenizer_path: str
    mode: str


# ---------------------------------------------------------------- the command line


def parse_workers(workers: Sequence[str], prefills: Sequence[str], decodes: Sequence[str]) -> list[Worker]:
    """The workers of a command line: replicas, or prefill and decode workers.

    Raises:
        ConfigError: a URL or a port is none, a URL is there twice, or the kinds do not go together.
    """
    found = [Worker(_origin(text, "--worker")) for text in workers]
    for text in prefills:
        url, _, port = text.strip().partition(" ")
        found.append(Worker(_origin(url, "--prefill"), "prefill", _port(port.strip(), url)))
    found += [Worker(_origin(text, "--decode"), "decode") for text in decodes]
    if not found:
        raise ConfigError(
            "there is no worker; name each server: --worker http://127.0.0.1:30001 --worker ..., or --prefill URL PORT "
            "and --decode URL"
        )
    if workers and (prefills or decodes):
        raise ConfigError(
            f"--worker {found[0].url} is named beside --prefill or --decode, but a router has replicas or "
            "prefill and decode workers; drop one kind"
        )
    for option, there, missing in (("--prefill", prefills, "--decode"), ("--decode", decodes, "--prefill")):
        if there and not (decodes if option == "--prefill" else prefills):
            raise ConfigError(f"{option} {there[0]} needs a worker of the other kind; add {missing} URL")
    seen: set[str] = set()
    for worker in found:
        if worker.url in seen:
            raise ConfigError(f"{worker.url} is named twice; name each worker once")
        seen.add(worker.url)
    return found


def _origin(text: str, option: str) -> str:
    """`scheme://host:port` of a worker's URL, which may lack the scheme and end in `/v1`."""
    shown = "a URL with a password" if "@" in text else repr(text)
    rule = f"{option} is {shown}, but it must look like http://127.0.0.1:30001"
    try:
        url = httpx.URL(text if "://" in text else f"http://{text}")
    except httpx.InvalidURL as error:
        raise ConfigError(f"{rule} ({error})") from None
    if url.scheme not in ("http", "https") or not url.host or " " in text:
        raise ConfigError(rule)
    if url.userinfo or url.query or url.fragment or url.path.rstrip("/") not in ("", "/v1"):
        raise ConfigError(f"{rule}, without a path, a query or a password")
    port = "" if url.port is None else f":{url.port}"
    return f"{url.scheme}://{url.netloc.decode().removesuffix(port)}{port}"


def _port(text: str, url: str) -> int | None:
    if text in ("", _NO_PORT):
        return None
    if not (text.isascii() and text.isdigit() and 0 < int(text) <= _MAX_PORT):
        raise ConfigError(
            f"the bootstrap port of --prefill {url} is {text!r}, but it must lie in [1, {_MAX_PORT}]; use the "
            "--disaggregation-bootstrap-port of that server, or none"
        )
    return int(text)


# ---------------------------------------------------------------- the servers


class WorkerProbe:
    """Asks workers; a context manager."""

    def __init__(
        self, api_key: str | None, *, timeout_s: float, say: Callable[[str], None], poll_s: float = _POLL_S
    ) -> None:
        """Make a client.

        Args:
            api_key: of the workers.
            timeout_s: how long workers may take until they are ready, all of them together.
            say: shows a line.
            poll_s: between two looks.
        """
        headers = {b"Authorization": f"Bearer {api_key}".encode()} if api_key else {}
        self._client = httpx.Client(headers=headers, timeout=_TIMEOUT_S)
        self._timeout_s = timeout_s
        self._deadline_s = time.monotonic() + timeout_s
        self._say = say
        self._poll_s = poll_s

    def __enter__(self) -> WorkerProbe:
        return self

    def __exit__(self, *_exc_info: object) -> None:
        self._client.close()

    def wait(self, worker: Worker) -> WorkerFacts:
        """Wait until a worker is ready, and ask it about itself.

        Raises:
            ServerError: it is not ready in time, or is no server of this kind.
            ConfigError: it wants a key, or another one.
        """
        said = ""
        while (reason := self._why_not_ready(worker)) is not None:
            if time.monotonic() >= self._deadline_s:
                raise ServerError(
                    f"the worker {worker.url} is not ready after {self._timeout_s:g} s: {reason}; start it, leave out "
                    f"{worker.option} {worker.url}, or raise --timeout"
                )
            if reason != said:
                self._say(f"waiting for {worker.url}: {reason}")
                said = reason
            time.sleep(self._poll_s)
        facts = self._facts(worker)
        self._say(f"{worker.url} is ready and serves {facts.model}")
        return facts

    def _why_not_ready(self, worker: Worker) -> str | None:
        try:
            response = self._client.get(f"{worker.url}/health")
        except httpx.HTTPError as error:
            connected = not isinstance(error, httpx.ConnectError | httpx.ConnectTimeout)
            return why_unreachable(worker.url, error, connected=connected, hint="").removesuffix("; ")
        if response.status_code == httpx.codes.OK:
            return None
        body = _json(response).get("error")
        message = body.get("message") if isinstance(body, dict) else None
        return f"/health answers {response.status_code}{f' ({message})' if message else ''}"

    def _facts(self, worker: Worker) -> WorkerFacts:
        models = self._ask(worker, "/v1/models").get("data")
        entry = models[0] if isinstance(models, list) and models else None
        if not isinstance(entry, dict) or "id" not in entry:
            raise ServerError(
                f"{worker.url}/v1/models lists no model; is it a server with an OpenAI API? Check {worker.option}"
            )
        length = entry.get("max_model_len")
        info = self._ask(worker, "/model_info", optional=True)
        server = self._ask(worker, "/server_info", optional=True)
        return WorkerFacts(
            str(entry["id"]),
            length if isinstance(length, int) else None,
            str(info.get("tokenizer_path") or ""),
            str(server.get("disaggregation_mode") or ""),
        )

    def _ask(self, worker: Worker, path: str, *, optional: bool = False) -> dict[str, Any]:
        """A JSON object; {} if it is optional and not there: servers other than ours may lack it."""
        try:
            response = self._client.get(f"{worker.url}{path}")
        except httpx.HTTPError as error:
            raise ServerError(why_unreachable(worker.url, error, connected=True, hint="")) from None
        if response.status_code in (httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN):
            raise _key_error(worker, response)
        if response.status_code != httpx.codes.OK and not optional:
            raise ServerError(f"{worker.url}{path} answers {response.status_code}; check {worker.option}")
        return _json(response)


def _key_error(worker: Worker, response: httpx.Response) -> ConfigError:
    sent = "authorization" in response.request.headers
    problem = "does not know this API key" if sent else "wants an API key"
    return ConfigError(f"the worker {worker.url} {problem}; pass the key of the workers by --api-key")


def _json(response: httpx.Response) -> dict[str, Any]:
    try:
        body = response.json()
    except ValueError:
        return {}
    return body if isinstance(body, dict) else {}


def check_together(workers: Sequence[Worker], facts: Sequence[WorkerFacts]) -> list[str]:
    """Check that all workers serve one model, each in its role.

    Returns:
        Sentences about differences that are allowed.

    Raises:
        ConfigError: they do not.
    """
    first, model = workers[0], facts[0].model
    notes: list[str] = []
    for worker, own in zip(workers, facts, strict=True):
        if own.model != model:
            raise ConfigError(
                f"{first.url} serves {model} and {worker.url} serves {own.model}, but a router has workers of one "
                f"model; drop one, or give both the same --served-model-name if it is the same model"
            )
        wanted = _MODES[worker.role]
        if own.mode not in ("", wanted):
            role = {mode: role for role, mode in _MODES.items()}.get(own.mode, "worker")
            raise ConfigError(
                f"{worker.url} has disaggregation_mode {own.mode}, but {worker.option} needs {wanted}; name it by "
                f"--{role}, or start it with another --disaggregation-mode"
            )
        if own.max_model_len != facts[0].max_model_len:
            notes.append(
                f"note: {first.url} takes {facts[0].max_model_len} tokens and {worker.url} {own.max_model_len}; the "
                "router does not know that, so give both the same --max-model-len"
            )
    return notes
