"""`engine fleet`: what it makes of its options, and the one line for those that cannot be."""

from __future__ import annotations

import os
import socket

import pytest

from engine.cli import main as cli
from engine.cli.exit_codes import ExitCode
from engine.cli.fleet import run as run_module
from engine.cli.fleet.run import FleetPlan, ready_text
from engine.cli.fleet.serve_arguments import ServeArguments, parse_serve
from engine.launch.resolve.host_facts import HostFacts
from engine.launch.resolve.nvidia_gpus import GpuFacts
from engine.runtime.config.environment import variable_of
from engine.runtime.errors import ConfigError


def host(num_gpus: int = 0) -> HostFacts:
    gpus = tuple(GpuFacts(name="H100", total_bytes=80 << 30, free_bytes=79 << 30) for _ in range(num_gpus))
    return HostFacts(
        num_cpus=8,
        num_cores=8,
        cpu_quota=None,
        cpu_flags=frozenset(),
        mem_available_bytes=32 << 30,
        cgroup_free_bytes=None,
        gpus=gpus,
        torch_version="2.13.0+cu130" if num_gpus else "2.13.0+cpu",
    )


def serve(*options: str, num_gpus: int = 0) -> ServeArguments:
    return parse_serve("default", options, host(num_gpus))


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    """As it was, afterwards."""
    monkeypatch.setattr(os, "environ", os.environ.copy())
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def test_servers_share_the_cores_and_the_memory():
    found = serve("--max-model-len", "64")
    assert found.command(1, 4) == [
        *("serve", "default", "--max-model-len", "64", "--port", "0", "--log-name", "server1"),
        *("--num-threads", "2", "--mem-fraction", "0.1000"),
    ]
    assert found.needs(4) == {"CPU": 2.0}
    assert found.threads(100) == 1


def test_what_is_given_is_not_divided():
    found = serve("--num-threads", "3", "--max-total-tokens", "4096")
    arguments = ("--num-threads", "3", "--max-total-tokens", "4096")
    own = ("--port", "0", "--log-name", "server2")
    assert found.command(2, 4) == ["serve", "default", *arguments, *own]
    assert found.needs(4) == {"CPU": 3.0}


def test_ray_gives_each_server_its_gpus():
    found = serve("--tp", "2", "--dp", "2", num_gpus=5)
    assert (found.device, found.needs(2)) == ("cuda", {"CPU": 1.0, "GPU": 4.0})
    assert found.command(0, 2) == [
        *("serve", "default", "--tp", "2", "--dp", "2"),
        *("--port", "0", "--log-name", "server0"),
    ]


@pytest.mark.parametrize(
    ("options", "fix"),
    [
        (["--port", "1"], "each server takes a free port"),
        (["--ssl-certfile", "x.pem"], "end TLS before the router"),
        (["--kv-events", "tcp://127.0.0.1:5557"], "share its address"),
        (["--decision-log", "x"], "share its file"),
        (["--executor", "ray", "--tp", "2"], "places whole servers"),
        (["--disaggregation-mode", "decode"], "answer whole requests"),
    ],
)
def test_what_several_servers_cannot_share_is_refused(options, fix):
    with pytest.raises(ConfigError, match=fix):
        serve(*options)


def test_a_port_that_is_written_elsewhere_is_replaced(tmp_path):
    path = tmp_path / "engine.yaml"
    path.write_text("port: 4000\nlog_name: west\n")
    assert serve("--config", str(path)).command(3, 1)[-8:-4] == ["--port", "0", "--log-name", "west3"]


@pytest.mark.parametrize("form", [("--kv-store", "URL"), ("--kv-store=URL",)])
def test_a_password_is_on_no_command_line(form):
    url = "redis://:s3cret@127.0.0.1:6379/0"
    options = [word.replace("URL", url) for word in form]
    found = serve("--strict", *options, "--api-key", "k3y", "--tp", "1")

    assert found.command(0, 1)[:5] == ["serve", "default", "--strict", "--tp", "1"]
    assert "s3cret" not in str(found.command(0, 1)) and "k3y" not in str(found.command(0, 1))
    names = [variable_of(name) for name in ("kv_store", "api_key")]
    assert [found.env()[name] for name in names] == [url, "k3y"]
    assert found.merged.config.cache.kv_store == url


@pytest.fixture
def run(monkeypatch):
    """Runs `engine fleet` up to the start."""

    def fleet(*arguments: str) -> FleetPlan | int:
        plans: list[FleetPlan] = []
        monkeypatch.setattr(run_module, "run_fleet", plans.append)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        code = cli.run(["fleet", "--port", str(port), *arguments])
        return plans[0] if plans else code

    return fleet


def test_the_command_line(run):
    plan = run("default", "--replicas", "3", "--max-restarts", "7", "--", "--drain-timeout", "5")
    assert isinstance(plan, FleetPlan)
    assert (plan.settings.replicas, plan.settings.max_restarts, plan.settings.drain_s) == (3, 7, 5.0)
    assert plan.serve.arguments == ("default", "--drain-timeout", "5")
    assert plan.worker_list is None

    unnamed = run("--on", "ray", "--", "--strict")
    assert isinstance(unnamed, FleetPlan)
    assert unnamed.serve.arguments == ("--strict",)


def test_a_key_is_passed_on_by_the_environment_and_seen_by_nobody(run):
    plan = run("default", "--api-key", "sk")
    assert isinstance(plan, FleetPlan)
    assert plan.serve.merged.config.server.api_key == ("sk",)
    assert "sk" not in plan.serve.command(0, 1)
    assert plan.serve.env()["ENGINE_API_KEY"] == "sk"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--replicas", "0"], "--replicas is 0, but it must lie in [1, 512]"),
        (["--port", "-1"], "--port is -1, but it must lie in [0, 65535]"),
        (["--replicas", "513"], "--replicas is 513, but it must lie in [1, 512]"),
        (["--on", "local"], "servers of a fleet run on Ray; for one machine use `engine serve --dp 2`"),
        (["m", "other"], "the argument 'other' is no option; name one MODEL"),
        (["--max-restarts", "-1"], "max_restarts is -1, but it must be at least 0"),
        (["--", "--nonsense"], "No such option: --nonsense"),
        (["--", "--print-config"], "use `engine serve --print-config`"),
        (["--", "--gpu-memory-utilisation", "1"], "No such option"),
    ],
)
def test_what_cannot_be_is_one_line(run, capsys, arguments, message):
    assert run(*arguments) == ExitCode.USER
    [line] = capsys.readouterr().err.splitlines()
    assert message in line


def test_the_ready_text_names_the_addresses():
    text = ready_text("tiny", 2, "http://127.0.0.1:30090")
    assert "Ready: 2 servers of tiny" in text
    assert "curl http://127.0.0.1:30090/scale -d '{\"replicas\": 3}'" in text
