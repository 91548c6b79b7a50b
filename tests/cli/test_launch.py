"""`engine launch`: a recording agent, servers with fake engines, and what is missing."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from engine.cli import launch
from engine.cli import main as cli
from engine.launch.child.socket_dir import ServerRecord
from engine.runtime.config.environment import variable_of
from engine.runtime.feasibility import Capacity
from tests.tokenizer_manager.fake_engine import FakeEngine, ServerThread, make_services, say_all

NAME = "org/tiny"
RECORDER = """\
#!{python} -S
import json, os, sys
with open(os.environ["RECORD"], "w") as file:
    json.dump([sys.argv[1:], dict(os.environ)], file)
{ending}
"""


def make_server(**settings: Any) -> ServerThread:
    engine = FakeEngine(say_all("x"))
    return ServerThread(make_services(engine, **settings), engine)


@pytest.fixture(scope="module")
def server() -> Iterator[ServerThread]:
    """A server with tools and a context that is large enough."""
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    capacity = Capacity(
        max_model_len=40_000, num_pages=50_000, page_size=4, max_running_requests=8, vocab_size=258
    )
    thread = make_server(chat_template=template, capacity=capacity)
    yield thread
    thread.stop()
    thread.join()


@pytest.fixture
def running(monkeypatch):
    """Set the URLs of the servers that run, oldest first."""

    def run(*urls):
        records = [ServerRecord(i, "m", f"/models/{i}", url, float(i)) for i, url in enumerate(urls)]
        monkeypatch.setattr(launch, "running_servers", lambda: records)

    run()
    monkeypatch.setattr(launch, "server_url", lambda _: "http://127.0.0.1:30000")
    return run


@pytest.fixture
def agent(tmp_path, monkeypatch):
    """Put an agent on the PATH, which is empty otherwise; what it recorded is the answer of the call."""
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setenv("RECORD", str(tmp_path / "record"))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("ANTHROPIC_API_KEY", "of the user")

    def install(name, ending=""):
        (tmp_path / "bin").mkdir(exist_ok=True)
        (tmp_path / "bin" / name).write_text(RECORDER.format(python=sys.executable, ending=ending))
        (tmp_path / "bin" / name).chmod(0o755)
        return lambda: json.loads((tmp_path / "record").read_text())

    return install


@pytest.fixture
def short_tmp(monkeypatch):
    """A directory for temporary files with a path that is short enough for sockets."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        monkeypatch.setenv("TMPDIR", folder)
        monkeypatch.setattr(tempfile, "tempdir", None)
        yield Path(folder)


def codex_settings(words):
    """The settings of `-c NAME=VALUE`, as Codex reads them."""
    assert words[::2] == ["-c"] * (len(words) // 2)
    return tomllib.loads("\n".join(words[1::2]))


def test_claude_code_gets_the_newest_server_and_no_key_of_another_one(
    running, server, agent, capfd, tmp_path
):
    recorded = agent("claude", "print('done')")
    running("http://127.0.0.1:9", server.url)

    assert cli.run(["launch", "claude", "--", "-p", "two words", "--print"]) == 0

    words, environment = recorded()
    assert words == ["-p", "two words", "--print"]
    found = {name: value for name, value in environment.items() if name.startswith("ANTHROPIC_")}
    assert found == {
        "ANTHROPIC_BASE_URL": server.url,
        "ANTHROPIC_AUTH_TOKEN": "none",
        "ANTHROPIC_API_KEY": "",
        "ANTHROPIC_MODEL": NAME,
        "ANTHROPIC_DEFAULT_OPUS_MODEL": NAME,
        "ANTHROPIC_DEFAULT_SONNET_MODEL": NAME,
        "ANTHROPIC_DEFAULT_HAIKU_MODEL": NAME,
    }
    out, err = capfd.readouterr()
    assert out == "done\n"
    assert err == f"engine: claude uses {NAME} at {server.url}\n"
    assert sorted(os.listdir(tmp_path)) == ["bin", "record"]


def test_codex_gets_a_provider_by_arguments(running, server, agent, monkeypatch):
    recorded = agent("codex")
    running(server.url)
    monkeypatch.setenv("ENGINE_API_KEY", "of this server")

    assert cli.run(["launch", "codex", "--model", NAME, "--", "exec", "hi"]) == 0

    words, environment = recorded()
    assert words[-2:] == ["exec", "hi"]
    assert codex_settings(words[:-2]) == {
        "model": NAME,
        "model_provider": "engine",
        "model_context_window": 40_000,
        "model_providers": {
            "engine": {
                "name": "engine",
                "base_url": f"{server.url}/v1",
                "wire_api": "responses",
                "env_key": "ENGINE_API_KEY",
            }
        },
    }
    assert environment["ENGINE_API_KEY"] == "of this server"


def test_opencode_gets_its_configuration_in_a_variable(running, server, agent):
    recorded = agent("opencode")
    running(server.url)

    assert cli.run(["launch", "opencode", "--api-key", "k"]) == 0

    words, environment = recorded()
    config = json.loads(environment["OPENCODE_CONFIG_CONTENT"])
    provider = config["provider"]["engine"]
    assert words == []
    assert environment["ENGINE_API_KEY"] == "k"
    assert config["model"] == f"engine/{NAME}"
    assert provider["options"] == {"baseURL": f"{server.url}/v1", "apiKey": "{env:ENGINE_API_KEY}"}
    assert provider["models"] == {NAME: {"name": NAME, "limit": {"context": 40_000, "output": 10_000}}}


@pytest.mark.parametrize(
    ("ending", "code"), [("sys.exit(7)", 7), ("os.kill(os.getpid(), 9)", 137)], ids=["exit", "killed"]
)
def test_the_exit_code_is_that_of_the_agent(running, server, agent, ending, code):
    agent("claude", ending)
    running(server.url)
    assert cli.run(["launch", "claude"]) == code


@pytest.mark.parametrize(("name", "package"), [(name, each.package) for name, each in launch.AGENTS.items()])
def test_an_agent_that_is_missing_is_named_with_its_install_line(running, agent, capsys, name, package):
    assert cli.run(["launch", name]) == 2
    assert capsys.readouterr().err == f"engine: {name} is not installed; run: npm install -g {package}\n"


def test_an_unknown_agent_is_refused(capsys):
    assert cli.run(["launch", "vim"]) == 2
    assert capsys.readouterr().err == (
        "engine: the agent is 'vim', but it must be one of claude, codex, opencode\n"
    )


def test_print_shows_a_command_for_a_shell_without_the_key(running, server, agent, capsys, tmp_path):
    running(server.url)

    assert cli.run(["launch", "opencode", "--print", "--api-key", "s3cret", "--", "run", "it's"]) == 0

    out, err = capsys.readouterr()
    assert err == ""
    assert "s3cret" not in out
    recorded = agent("opencode")
    subprocess.run(["/bin/sh", "-c", out], env=os.environ | {"ENGINE_API_KEY": "s3cret"}, check=True)
    words, environment = recorded()
    assert words == ["run", "it's"]
    assert environment["ENGINE_API_KEY"] == "s3cret"
    assert json.loads(environment["OPENCODE_CONFIG_CONTENT"])["model"] == f"engine/{NAME}"


def test_print_names_the_server_to_start_where_none_serves_the_model(running, server, agent, capsys):
    running(server.url)

    assert cli.run(["launch", "codex", "--print", "--model", "other"]) == 0

    out, err = capsys.readouterr()
    assert err.splitlines() == [
        f"engine: the server at {server.url} is not used: {server.url} has no model 'other'; it serves {NAME}",
        "engine: no server runs for it; start one first: engine serve --served-model-name '*' --model other",
    ]
    name, *words = shlex.split(out.replace("\\\n", ""))[1:]
    assert name == "codex"
    assert codex_settings(words)["model"] == "other"
    assert "model_context_window" not in codex_settings(words)


def test_a_server_is_found_by_the_path_of_its_model(running, server, capsys):
    running(server.url)
    assert cli.run(["launch", "claude", "--print", "--model", "/models/../models/0"]) == 0
    out, err = capsys.readouterr()
    assert f"ANTHROPIC_MODEL={NAME} " in out
    assert err == ""


def test_no_tools_and_a_small_context_are_warnings(running, capsys):
    capacity = Capacity(
        max_model_len=32_767, num_pages=50_000, page_size=4, max_running_requests=8, vocab_size=258
    )
    thread = make_server(chat_template=None, capacity=capacity)
    running(thread.url)
    try:
        assert cli.run(["launch", "claude", "--print"]) == 0
    finally:
        thread.stop()
        thread.join()
    tools, context = capsys.readouterr().err.splitlines()
    assert tools.startswith(f"engine: warning: {NAME} has no parser for tool calls or no chat template")
    assert context.startswith("engine: warning: the context is 32767 tokens, and agents need at least 32768")


@pytest.mark.slow
@pytest.mark.real_process
def test_a_server_of_its_own_ends_with_the_agent(running, agent, tiny_model, short_tmp, monkeypatch, capfd):
    recorded = agent(
        "claude",
        "import urllib.request\n"
        "url = os.environ['ANTHROPIC_BASE_URL'] + '/v1/models'\n"
        "print(json.load(urllib.request.urlopen(url))['data'][0]['id'])",
    )
    monkeypatch.setenv(variable_of("dtype"), "float32")

    assert cli.run(["launch", "claude", "--model", str(tiny_model)]) == 0

    out, err = capfd.readouterr()
    assert out.strip() == recorded()[1]["ANTHROPIC_MODEL"]
    assert "no server runs for it: starting a server" in err
    assert not list(short_tmp.glob("engine-*")), "the log and the sockets are removed"


@pytest.mark.slow
@pytest.mark.real_process
def test_a_server_that_does_not_start_is_explained(running, agent, short_tmp, tmp_path, capfd):
    agent("claude")

    assert cli.run(["launch", "claude", "--model", str(tmp_path / "missing.gguf")]) == 3

    [log] = short_tmp.glob("engine-serve-*.log")
    last = capfd.readouterr().err.splitlines()[-1]
    assert last.startswith("engine: the server did not start: ")
    assert "missing.gguf" in last
    assert last.endswith(f"(log: {log})")
    assert not (tmp_path / "record").exists()
