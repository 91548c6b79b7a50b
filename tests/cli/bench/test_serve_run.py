"""Which server and endpoint `engine bench serve` measures, by our names and those of vLLM and SGLang."""

import json
import subprocess
import sys

import pytest

from engine import ConfigError
from engine.cli import main as cli
from engine.cli.bench.serve_run import BACKENDS, ENDPOINTS, ServerSettings


@pytest.mark.parametrize(
    ("settings", "url"),
    [
        ({}, "http://127.0.0.1:30000"),
        ({"url": "http://a:1/v1/"}, "http://a:1"),
        ({"port": 8000}, "http://127.0.0.1:8000"),
        ({"host": "a"}, "http://a:30000"),
        ({"host": "a", "port": 8000}, "http://a:8000"),
        ({"host": "http://a", "port": 8000}, "http://a:8000"),
        ({"host": "::1", "port": 8000}, "http://[::1]:8000"),
    ],
)
def test_the_address(settings, url):
    assert ServerSettings(**settings).base_url == url


@pytest.mark.parametrize("more", [{"host": "a"}, {"port": 1}])
def test_an_address_given_twice_is_refused(more):
    with pytest.raises(
        ConfigError, match="the server is given twice, by --url http://b:1 and --host or --port"
    ):
        _ = ServerSettings(url="http://b:1", **more).base_url


def test_the_endpoint():
    assert ServerSettings().api == "completions"
    for name, endpoint in ENDPOINTS.items():
        assert ServerSettings(endpoint=name).api == endpoint
    for name, endpoint in BACKENDS.items():
        assert ServerSettings(backend=name).api == endpoint
        assert ServerSettings(backend=name, endpoint=endpoint).api == endpoint
    with pytest.raises(
        ConfigError, match="--backend openai calls completions, and --endpoint is chat; drop one"
    ):
        _ = ServerSettings(backend="openai", endpoint="chat").api


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--backend", "tgi"], "--backend is 'tgi', but it must be one of openai, vllm, "),
        (["--endpoint", "/v2"], "--endpoint is '/v2', but it must be one of completions, chat, "),
        (["--url", "http://a:1", "--port", "2"], "the server is given twice"),
        (
            ["--endpoint", "chat", "--dataset", "embed"],
            "--endpoint chat does not go with --dataset-name embed",
        ),
        (["--endpoint", "embeddings"], "--endpoint embeddings does not go with --dataset-name random"),
        (["--dataset", "embed", "--structured", "x"], "--structured has no effect on --dataset-name embed"),
        (["--backend", "openai-chat"], "--endpoint chat needs text prompts"),
        (
            ["--dataset-name", "custom"],
            "--dataset-name custom needs --dataset-path FILE; nothing is downloaded",
        ),
        (["--custom-output-len", "0"], "--custom-output-len is 0, but it must be at least 1"),
    ],
)
def test_a_mistake_is_told_before_anything_is_loaded(capsys, arguments, message):
    assert cli.run(["bench", "serve", *arguments]) == 2
    assert capsys.readouterr().err.startswith(f"engine: {message}")


def test_in_a_pipe_a_comparison_is_plain_columns(tmp_path, capsys):
    path = tmp_path / "run.json"
    arguments = ["simulate", "--num-requests", "5", "--compare", "fcfs,lpm", "--json", str(path)]
    done = subprocess.run(
        [sys.executable, "-m", "engine", *arguments], capture_output=True, text=True, check=True, timeout=60
    )
    assert json.loads(path.read_text())
    assert "\x1b" not in done.stdout
    assert not set(done.stdout) & set("│┃─━┏┓└┘┡╇")
    (row,) = (line for line in done.stdout.splitlines() if line.startswith("fcfs"))
    assert len(row.split()) >= 10
