"""`engine launch`: starts a coding agent that uses a server of this user on this machine, or a server of its own.

An agent gets environment variables and arguments for this one run; none of its files is written. A server that is
started for it ends with it.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Final, NamedTuple, NoReturn

import httpx
import typer

from ..launch.child.socket_dir import running_servers
from ..runtime.errors import ConfigError, EngineError, ServerError
from ..runtime.text import variable
from .options import CONTEXT_SETTINGS, GroupedCommand
from .serve import address_to_open
from .server_client import QUICK_TIMEOUT_S, ServerConnection, server_url

LEAST_CONTEXT: Final = 32_768
"""Agents send up to 20,000 tokens of instructions and tools before the first word of the user."""
_NO_KEY: Final = "none"
"""Stands for the key of a server without one: the agents demand that there is some key."""
_SERVE: Final = ("--served-model-name", "*")
_READY: Final = "Ready after "
_SIGNALED: Final = 128

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)


class Target(NamedTuple):
    """A server as an agent needs it.

    Attributes:
        url: without a path.
        model: its name there.
        key: bearer token.
        context: tokens of prompt and answer; None: not known.
    """

    url: str
    model: str
    key: str
    context: int | None = None


class Agent(NamedTuple):
    """A coding agent.

    Attributes:
        package: in the npm registry.
        variables: of its environment.
        arguments: before those of the user.
    """

    package: str
    variables: Callable[[Target], dict[str, str]]
    arguments: Callable[[Target], list[str]] = lambda _target: []


def _claude_variables(target: Target) -> dict[str, str]:
    return {
        "ANTHROPIC_BASE_URL": target.url,
        "ANTHROPIC_AUTH_TOKEN": target.key,
        "ANTHROPIC_API_KEY": "",  # one of the user's would be sent to this server, or asked about
        "ANTHROPIC_MODEL": target.model,
        "ANTHROPIC_DEFAULT_OPUS_MODEL": target.model,
        "ANTHROPIC_DEFAULT_SONNET_MODEL": target.model,
        "ANTHROPIC_DEFAULT_HAIKU_MODEL": target.model,
    }


def _codex_arguments(target: Target) -> list[str]:
    provider = {
        "name": "engine",
        "base_url": f"{target.url}/v1",
        "wire_api": "responses",
        "env_key": "ENGINE_API_KEY",
    }
    settings: dict[str, str | int] = {"model": target.model, "model_provider": "engine"}
    settings |= {f"model_providers.engine.{name}": value for name, value in provider.items()}
    if target.context is not None:
        settings["model_context_window"] = target.context
    # A string of JSON is one of TOML.
    return [word for name, value in settings.items() for word in ("-c", f"{name}={json.dumps(value)}")]


def _opencode_variables(target: Target) -> dict[str, str]:
    model: dict[str, Any] = {"name": target.model}
    if target.context is not None:
        model["limit"] = {"context": target.context, "output": target.context // 4}
    options = {"baseURL": f"{target.url}/v1", "apiKey": "{env:ENGINE_API_KEY}"}
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "engine",
        "options": options,
        "models": {target.model: model},
    }
    config = {"provider": {"engine": provider}, "model": f"engine/{target.model}"}
    return {"ENGINE_API_KEY": target.key, "OPENCODE_CONFIG_CONTENT": json.dumps(config)}


AGENTS: Final = {
    "claude": Agent("@anthropic-ai/claude-code", _claude_variables),
    "codex": Agent("@openai/codex", lambda target: {"ENGINE_API_KEY": target.key}, _codex_arguments),
    "opencode": Agent("opencode-ai", _opencode_variables),
}


@app.command(cls=GroupedCommand, context_settings=CONTEXT_SETTINGS)
def launch(
    agent: Annotated[str, typer.Argument(metavar="AGENT", help="claude, codex or opencode.")],
    arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="ARGS", help="Arguments of the agent, after `--`.", show_default=False),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL", help="Use the server of this model, or start one  [default: the newest server]"
        ),
    ] = None,
    api_key: Annotated[
        str | None, typer.Option(metavar="TEXT", help="API key of the server (or set ENGINE_API_KEY).")
    ] = None,
    prints: Annotated[
        bool, typer.Option("--print", help="Print the command with its variables; start nothing.")
    ] = False,
) -> int:
    """Start a coding agent that uses a model on this machine.

    The newest server of this user that generates text is used. If none runs, one is started, with its settings from
    variables as for `engine serve`; it ends with the agent. The files of the agent are not changed.

    Example: engine launch claude -- -p "Explain this folder"
    """
    if agent not in AGENTS:
        raise ConfigError(f"the agent is {agent!r}, but it must be one of {', '.join(AGENTS)}")
    program = shutil.which(agent)
    if program is None and not prints:
        raise ConfigError(f"{agent} is not installed; run: npm install -g {AGENTS[agent].package}")
    key = api_key or variable("ENGINE_API_KEY") or _NO_KEY
    target = running_target(model, key)
    if prints:
        if target is None:
            _note(
                f"no server runs for it; start one first: {shlex.join(['engine', 'serve', *_serve_options(model)])}"
            )
            target = Target(server_url(None), model or "default", key)
        typer.echo(shell_command(agent, target, arguments or []))
        return 0
    with contextlib.ExitStack() as stack:
        stack.enter_context(ended_by_signals())
        if target is None:
            target = stack.enter_context(own_server(model, key))
        about = AGENTS[agent]
        _note(f"{agent} uses {target.model} at {target.url}")
        words = [str(program), *about.arguments(target), *(arguments or [])]
        return run_agent(words, about.variables(target))


def running_target(model: str | None, key: str) -> Target | None:
    """The newest server of this user that generates text, of this model if one is named; None if there is none.

    `model`: its name in the API, or the path of its files.
    """
    for record in reversed([record for record in running_servers() if record.url]):
        is_path = model is not None and Path(model).expanduser().resolve() == Path(record.path).resolve()
        try:
            return _target(address_to_open(record.url), None if is_path else model, key)
        except EngineError as error:
            _note(f"the server at {record.url} is not used: {error}")
    return None


def _target(url: str, model: str | None, key: str) -> Target:
    """The facts of a server; warns where an agent will not work well with it.

    Raises:
        EngineError: it does not answer, lacks the model, or does not generate text.
    """
    sent = None if key == _NO_KEY else key
    server = ServerConnection(url, api_key=sent, model=model, how_to_start="has it just ended?")
    with contextlib.closing(server.client):
        if server.entry.get("task", "generate") != "generate":
            raise ServerError(f"{server.model} generates no text")
        try:
            shown = server.client.post(
                f"{server.base}/api/show", json={"model": server.model}, timeout=QUICK_TIMEOUT_S
            ).json()
        except httpx.HTTPError as error:
            raise server.failure(error) from None
    context = int(server.entry["max_model_len"])
    if "tools" not in shown.get("capabilities", ()):
        _note(
            f"warning: {server.model} has no parser for tool calls or no chat template, so the agent cannot act; see "
            "--tool-call-parser and --chat-template of engine serve"
        )
    if context < LEAST_CONTEXT:
        _note(
            f"warning: the context is {context} tokens, and agents need at least {LEAST_CONTEXT}; take a model with "
            "a longer one, or raise --max-model-len if it is set"
        )
    return Target(server.base, server.model, key, context)


def _serve_options(model: str | None) -> list[str]:
    return [*_SERVE, *(["--model", model] if model is not None else [])]


@contextlib.contextmanager
def own_server(model: str | None, key: str) -> Iterator[Target]:
    """A server on a free port, with the longest context that fits.

    Raises:
        ServerError: it does not start; names the log, which is kept.
    """
    environment = os.environ if key == _NO_KEY else os.environ | {"ENGINE_API_KEY": key}
    with started_server(
        [*_serve_options(model), "--port", "0"],
        environment,
        note=lambda line: _note(f"no server runs for it: {line}"),
    ) as url:
        yield _target(url, None, key)


@contextlib.contextmanager
def started_server(
    arguments: Sequence[str], environment: Mapping[str, str], *, note: Callable[[str], None]
) -> Iterator[str]:
    """A server that ends with the context: its URL; its log is in a file while it runs.

    Args:
        arguments: of `engine serve`.
        environment: of its process.
        note: called with a line about the log.

    Raises:
        ServerError: it does not start; names the log, which is kept.
    """
    with tempfile.NamedTemporaryFile(prefix="engine-serve-", suffix=".log", delete=False) as log:
        note(f"starting a server; its log is {log.name}")
        package, python = __name__.partition(".")[0], sys.executable
        ends_with_this = [python, "-m", f"{package}.supervisor.fleet.server", str(os.getpid())]
        server = subprocess.Popen(
            [*ends_with_this, python, "-m", package, "serve", *arguments],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            process_group=0,  # Ctrl-C is for the agent
        )
    with server:
        try:
            assert server.stdout is not None
            ready = next((line for line in server.stdout if line.startswith(_READY)), None)
            if ready is None:
                text = Path(log.name).read_text(encoding="utf-8", errors="replace").strip()
                why = text.rpartition("\n")[2].removeprefix("engine: ")
                raise ServerError(f"the server did not start: {why} (log: {log.name})")
            try:
                yield ready.strip().rpartition(" at ")[2]
            finally:
                os.unlink(log.name)
        finally:
            server.terminate()


def run_agent(words: Sequence[str], variables: dict[str, str]) -> int:
    """Run a program in this terminal with further variables; returns its exit code, 128 + n after signal n."""
    with subprocess.Popen(words, env=os.environ | variables) as process:
        before = signal.signal(signal.SIGINT, lambda *_: None)  # the agent decides what Ctrl-C does
        try:
            code = process.wait()
        finally:
            signal.signal(signal.SIGINT, before)
            process.terminate()  # without effect on one that has ended
    return code if code >= 0 else _SIGNALED - code


@contextlib.contextmanager
def ended_by_signals() -> Iterator[None]:
    """SIGTERM and SIGHUP end what was started, too."""

    def end(signum: int, _frame: object) -> NoReturn:
        sys.exit(_SIGNALED + signum)

    before = {signum: signal.signal(signum, end) for signum in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


def shell_command(name: str, target: Target, arguments: Sequence[str]) -> str:
    """The command for a shell, a variable on each line; a key is that of the shell's own variable."""
    about = AGENTS[name]
    safe = target if target.key == _NO_KEY else target._replace(key="$ENGINE_API_KEY")
    lines = [
        f'{variable}="{value}"' if value == "$ENGINE_API_KEY" else f"{variable}={shlex.quote(value)}"
        for variable, value in about.variables(safe).items()
    ]
    return " \\\n".join([*lines, shlex.join([name, *about.arguments(safe), *arguments])])


def _note(line: str) -> None:
    typer.echo(f"engine: {line}", err=True)
