"""`engine serve`: early checks, the block that says ready, and a whole life as a real process."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pty
import re
import shlex
import signal
import socket
import subprocess
import sys
import urllib.request

import pytest

from engine.cli import main as cli
from engine.cli.preflight import check_port
from engine.cli.serve import preset_line, ready_text
from engine.models.spec.encoder_spec import PoolingSpec
from engine.runtime.config.config_sources import from_arguments, merge
from engine.runtime.config.engine_config import EngineConfig
from engine.runtime.config.server_config import ServerConfig
from engine.runtime.errors import ConfigError


@pytest.fixture
def taken_port():
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        yield server.getsockname()[1]


def ready_config() -> EngineConfig:
    settings = {"served_model_name": "it's", "dtype": "float32", "device": "cpu", "num_threads": 2}
    return merge(from_arguments(settings)).config


def test_a_taken_port_is_found_before_anything_is_loaded(capsys, taken_port):
    assert cli.run(["serve", "/no/such/model", "--port", str(taken_port)]) == 2
    assert capsys.readouterr().err == (
        f"engine: 127.0.0.1:{taken_port} is in use, maybe by another engine; stop it, or use --port {taken_port + 1} "
        f"(--port 0 takes a free one)\n"
    )


def test_a_preset_says_the_flags_it_stands_for_and_not_those_of_the_user(capsys):
    merged = merge(from_arguments({"preset": "latency", "max_num_seqs": 4, "max_queued_requests": 9}))
    assert preset_line(merged) == (
        "preset latency: --schedule-policy priority --phases decode-first --chunked-prefill-size 256 "
        "--max-num-partial-prefills 4 --schedule-conservativeness 1.4"
    )
    assert preset_line(merge()) == ""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    assert cli.run(["serve", "/no/such/model", "--port", str(port), "--preset", "chat"]) == 2
    assert capsys.readouterr().err.startswith("preset chat: --schedule-policy fcfs --phases mixed ")


def test_a_free_port_stays_free():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    check_port(ServerConfig(port=port))
    check_port(ServerConfig(port=port))
    check_port(ServerConfig(port=0))
    with socket.socket() as server:
        server.bind(("127.0.0.1", port))
        assert server.getsockname()[1] == port


def test_an_address_that_is_not_ours_is_said():
    with pytest.raises(ConfigError, match="cannot listen on 192.0.2.1:30000: .*; see --host and --port"):
        check_port(ServerConfig(host="192.0.2.1"))


def test_a_host_without_an_address_is_said(monkeypatch):
    def unknown(*_args, **_kwargs):
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    with pytest.raises(ConfigError, match="host 'nowhere' has no address .* use --host 127.0.0.1"):
        check_port(ServerConfig(host="nowhere"))


def test_the_curl_line_can_be_pasted():
    text = ready_text(ready_config(), "http://127.0.0.1:1")
    (line,) = (line for line in text.splitlines() if line.strip().startswith("curl "))
    command = shlex.split(line)
    assert command[1] == "http://127.0.0.1:1/v1/chat/completions"
    assert json.loads(command[command.index("-d") + 1])["model"] == "it's"
    assert "Authorization" not in text


def test_the_page_is_named_if_there_is_one():
    line = "In a browser, http://127.0.0.1:1/ is a chat, with settings and live requests."
    assert line in ready_text(ready_config(), "http://127.0.0.1:1")
    config = ready_config()
    without = dataclasses.replace(config, server=dataclasses.replace(config.server, page=False))
    assert "browser" not in ready_text(without, "http://127.0.0.1:1")


def test_figures_are_those_of_each_replica():
    config = ready_config()
    assert "replica" not in ready_text(config, "http://127.0.0.1:1")
    two = dataclasses.replace(config, parallel=dataclasses.replace(config.parallel, dp=2))
    assert "  2 replicas, each: float32 on cpu, 2 threads; " in ready_text(two, "http://127.0.0.1:1")


EMBEDDER = PoolingSpec(task="embed", pooling="mean", size=384, normalize=True)


@pytest.mark.parametrize(
    ("pooling", "path", "fields", "line", "page"),
    [
        (
            EMBEDDER,
            "/v1/embeddings",
            {"input"},
            "It makes vectors of 384 numbers (mean pooling, of length 1).",
            "compares",
        ),
        (
            PoolingSpec(task="score", pooling="cls", size=1),
            "/v1/rerank",
            {"query", "documents"},
            "It scores how relevant a document is to a query.",
            "compares",
        ),
        (
            PoolingSpec(task="score", pooling="cls", size=3),
            "/v1/score",
            {"text_1", "text_2"},
            "It gives texts 3 scores.",
            "shows",
        ),
    ],
)
def test_the_ready_message_of_a_model_without_text_has_an_example_for_it(pooling, path, fields, line, page):
    text = ready_text(ready_config(), "http://127.0.0.1:1", pooling)
    assert line in text
    assert f"/ {page} " in text and "chat" not in text
    (curl,) = (line for line in text.splitlines() if line.strip().startswith("curl "))
    command = shlex.split(curl)
    assert command[1] == f"http://127.0.0.1:1{path}"
    assert json.loads(command[command.index("-d") + 1]).keys() == {"model", *fields}


def test_with_an_api_key_the_curl_line_names_the_variable_and_not_the_key():
    config = merge(from_arguments({"api_key": "s3cret", "served_model_name": "m"})).config
    text = ready_text(config, "http://127.0.0.1:1")
    assert '-H "Authorization: Bearer $ENGINE_API_KEY"' in text
    assert "s3cret" not in text


def test_print_config_resolves_for_the_model_and_starts_nothing(capsys, tiny_model, tmp_path):
    path = tmp_path / "engine.yaml"
    path.write_text("page_size: 8\n")
    arguments = [
        "serve",
        str(tiny_model),
        "--config",
        str(path),
        "--max-total-tokens",
        "300",
        "--print-config",
    ]
    assert cli.run(arguments) == 0
    captured = capsys.readouterr()
    lines = {line.split(":")[0].strip(): line for line in captured.out.splitlines()}
    assert captured.err == ""
    assert re.search(r"page_size: 8 +# .*engine\.yaml:1$", lines["page_size"])
    assert re.search(
        r"max_total_tokens: 296 +# --max-total-tokens, 300 in whole pages of 8$", lines["max_total_tokens"]
    )
    assert re.search(r"max_model_len: 296 +# auto: bounded by --max-total-tokens", lines["max_model_len"])
    found_at_start = {"tool_call_parser", "reasoning_parser"}  # from the chat template
    values = {
        line.split("#")[0].split(":")[-1].strip()
        for name, line in lines.items()
        if name not in found_at_start
    }
    assert "auto" not in values


def test_a_broken_model_is_one_line(capsys, tmp_path):
    (tmp_path / "config.json").write_text("{")
    assert cli.run(["serve", str(tmp_path), "--port", "0", "--print-config"]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"engine: {tmp_path}")
    assert error.count("\n") == 1


def start_serve(*arguments):
    return subprocess.Popen(
        [sys.executable, "-m", "engine.cli.main", "serve", "--port", "0", "--num-threads", "1", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.real_process
def test_serve_says_ready_answers_and_on_ctrl_c_lets_a_stream_come_to_its_end(tiny_model):
    process = start_serve(str(tiny_model), "--max-total-tokens", "512", "--chaos", "slow=0.02")
    try:
        assert process.stdout is not None
        ready = ""
        while "Stop with Ctrl-C" not in ready:
            line = process.stdout.readline()
            assert line, process.communicate(timeout=30)[1]
            ready += line
        match = re.search(
            r"^Ready after [\d.]+ s: tiny-llama at (http://127\.0\.0\.1:\d+)$", ready, re.MULTILINE
        )
        assert match
        (curl,) = (line for line in ready.splitlines() if line.strip().startswith("curl "))
        body = json.loads(shlex.split(curl)[-1]) | {"max_tokens": 4}
        request = urllib.request.Request(
            f"{match[1]}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=60) as response:
            assert json.load(response)["usage"]["completion_tokens"] <= 4
        body = {"prompt": "x", "max_tokens": 100, "min_tokens": 100, "stream": True}
        body["stream_options"] = {"include_usage": True}
        request = urllib.request.Request(
            f"{match[1]}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=60) as response:
            response.readline()
            process.send_signal(signal.SIGINT)
            *_, usage, done = filter(None, response.read().decode().split("\n"))
        assert done == "data: [DONE]"
        assert json.loads(usage.removeprefix("data: "))["usage"]["completion_tokens"] == 100
        out, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 0, err
    assert out == ""
    assert "Traceback" not in err


@pytest.mark.slow
@pytest.mark.real_process
def test_on_a_terminal_a_start_is_a_dozen_short_lines_and_the_end_is_told(tiny_model):
    ours, theirs = pty.openpty()
    command = [
        sys.executable,
        "-m",
        "engine.cli.main",
        "serve",
        str(tiny_model),
        "--port",
        "0",
        "--log-requests",
    ]
    process = subprocess.Popen(
        [*command, "--num-threads", "1", "--max-total-tokens", "512"],
        stdout=subprocess.PIPE,
        stderr=theirs,
        text=True,
    )
    os.close(theirs)
    seen = b""
    try:
        assert process.stdout is not None
        while "Stop with Ctrl-C" not in process.stdout.readline():
            assert process.poll() is None
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(OSError):  # the end of a terminal
            while part := os.read(ours, 65536):
                seen += part
        process.wait(timeout=60)
    finally:
        process.kill()
        os.close(ours)
    lines = re.findall(r"^\d\d:\d\d:\d\d \w+: .*$", seen.decode().replace("\r\n", "\n"), re.MULTILINE)
    ready = next(number for number, line in enumerate(lines) if " supervisor: ready url=" in line)
    assert ready <= 14, lines
    assert all(len(line) < 160 for line in lines)
    assert re.search(r" supervisor: stopped exit_code=0 after_s=[\d.]+$", lines[-1])


@pytest.mark.parametrize(
    ("bound", "opened"),
    [
        ("http://0.0.0.0:80", "http://127.0.0.1:80"),
        ("https://[::]:443", "https://[::1]:443"),
        ("http://10.0.0.0:80", "http://10.0.0.0:80"),
        ("http://127.0.0.1:1", "http://127.0.0.1:1"),
    ],
)
def test_the_ready_message_has_an_address_that_can_be_opened(bound, opened):
    config = dataclasses.replace(
        ready_config(), model=dataclasses.replace(ready_config().model, num_threads=1)
    )
    text = ready_text(config, bound)
    assert re.search(rf"^Ready after [\d.]+ s: it's at {re.escape(opened)}$", text, re.MULTILINE)
    assert f"curl {opened}/v1/chat/completions" in text
    assert (f"Listens on every address of this machine ({bound})." in text) == (bound != opened)
    assert "1 thread;" in text


@pytest.mark.real_process
def test_serve_ends_with_one_root_cause_line_when_the_weights_are_broken(tiny_model, tmp_path):
    for file in tiny_model.iterdir():
        data = file.read_bytes()
        (tmp_path / file.name).write_bytes(data[:100] if file.suffix == ".safetensors" else data)
    process = start_serve(str(tmp_path))
    out, err = process.communicate(timeout=100)
    assert process.returncode == 2
    assert out == ""
    causes = [line for line in err.splitlines() if line.startswith("engine: ")]
    assert len(causes) == 1
    assert "model.safetensors" in causes[0]
    assert "Traceback" not in err
