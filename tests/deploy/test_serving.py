"""What `deploy/` says to `engine serve` and expects of it: options, settings, times, paths, keys."""

from __future__ import annotations

import re

import pytest
from typer.main import get_command

from engine.cli.serve import app
from engine.runtime.config.config_fields import find_setting
from engine.runtime.config.server_config import ServerConfig
from engine.supervisor.child_watch import STOP_GRACE_S
from engine.tokenizer_manager.http.guards.auth import OPEN_PATHS
from engine.tokenizer_manager.http.routes import ROUTES

from .places import DEPLOY, command_lines, compose_engine, container, documents, drain_timeout_s, unit

ENDING_S = 2 * STOP_GRACE_S
"""From the end of the drain to the end of the command: of the manager, then of the other processes."""
DRAIN_S = ServerConfig().drain_timeout


def seconds(text: str) -> float:
    match = re.fullmatch(r"(\d+)(s|min|m|)", text)
    assert match, text
    return int(match[1]) * (60 if match[2] in ("min", "m") else 1)


@pytest.mark.parametrize("name", command_lines())
def test_every_option_exists_and_has_a_valid_value(name):
    program, *arguments = command_lines()[name]
    command = get_command(app)
    flags = {flag for each in command.params for flag in (*each.opts, *each.secondary_opts)}
    assert program == "serve"
    given = [text.partition("=")[0] for text in arguments if text.startswith("--")]
    assert set(given) <= flags
    command.make_context("serve", list(arguments))  # raises for a value that is not one


def test_every_setting_of_the_file_exists_and_takes_its_value():
    [settings] = documents("systemd/engine.yaml")
    for name, value in settings.items():
        assert find_setting(name).check(value) == value


def test_all_wait_longer_than_the_engine_takes_to_stop():
    compose, pod = compose_engine(), documents("kubernetes/statefulset.yaml")[0]["spec"]["template"]["spec"]
    [stop] = unit()["TimeoutStopSec"]
    [settings] = documents("systemd/engine.yaml")
    pre_stop = container()["lifecycle"]["preStop"]["exec"]["command"]
    assert pre_stop[0] == "sleep"
    grace = {
        "compose": (seconds(compose["stop_grace_period"]), drain_timeout_s(compose["command"], DRAIN_S)),
        "systemd": (seconds(stop), settings["drain_timeout"]),
        "kubernetes": (
            pod["terminationGracePeriodSeconds"] - int(pre_stop[1]),
            drain_timeout_s(container()["args"], DRAIN_S),
        ),
    }
    assert all(given >= needed + ENDING_S for given, needed in grace.values()), grace


def test_all_wait_longer_than_the_engine_may_take_to_start():
    probe = container()["startupProbe"]
    [unit_start] = unit()["TimeoutStartSec"]
    needed = ServerConfig().startup_timeout
    assert probe["periodSeconds"] * probe["failureThreshold"] > needed
    assert seconds(unit_start) > needed


def test_the_engine_may_restart_its_processes_before_the_pod_is_restarted():
    probe = container()["livenessProbe"]
    assert probe["periodSeconds"] * probe["failureThreshold"] >= 300  # the window of --max-restarts


def test_probes_ask_for_paths_that_need_no_key():
    known = {route.path for route in ROUTES if route.method == "GET"}
    paths = {
        container()[name]["httpGet"]["path"] for name in ("startupProbe", "readinessProbe", "livenessProbe")
    }
    assert paths <= OPEN_PATHS & known


def test_prometheus_asks_for_the_metrics_with_a_key():
    [config] = documents("prometheus/prometheus.yaml")
    [job] = config["scrape_configs"]
    [monitor] = documents("kubernetes/servicemonitor.yaml")
    [endpoint] = monitor["spec"]["endpoints"]
    assert job["job_name"] == "engine"
    assert {job["metrics_path"], endpoint["path"]} == {"/metrics"} <= {route.path for route in ROUTES}
    secrets = compose_engine()["secrets"]
    assert job["authorization"]["credentials_file"] == f"/run/secrets/{secrets[0]}"
    assert f"--api-key-file=/run/secrets/{secrets[0]}" in compose_engine()["command"]
    keys = {each["name"]: each["valueFrom"]["secretKeyRef"] for each in container()["env"]}
    assert endpoint["authorization"]["credentials"] == keys["ENGINE_API_KEY"]


def test_a_mistake_in_the_settings_is_not_tried_again():
    assert unit()["RestartPreventExitStatus"] == ["2"]
    assert (unit()["Type"], unit()["KillMode"]) == (["notify"], ["mixed"])
    assert "MemoryDenyWriteExecute" not in unit()  # oneDNN writes code


def test_the_commands_of_the_readme_name_files_that_are_there():
    text = (DEPLOY / "README.md").read_text()
    names = re.findall(r"deploy/[\w./-]+\w", text)
    assert names
    assert all((DEPLOY.parent / name).exists() for name in names)
