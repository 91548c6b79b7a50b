"""Where the files are, and the command lines of `engine serve` in them."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any, Final

import yaml

DEPLOY: Final = Path(__file__).parents[2] / "deploy"
DOCKERFILES: Final = ("docker/cpu.Dockerfile", "docker/cuda.Dockerfile")


def documents(name: str) -> list[Any]:
    """The documents of a YAML file."""
    return list(yaml.safe_load_all((DEPLOY / name).read_text()))


def instructions(name: str) -> list[tuple[str, str]]:
    """The instructions of a Dockerfile with their arguments, continued lines joined."""
    lines = (line for line in (DEPLOY / name).read_text().splitlines() if not line.startswith("#"))
    text = "\n".join(lines).replace("\\\n", "")
    found = [line.partition(" ") for line in text.splitlines() if line.strip()]
    return [(word, rest.strip()) for word, _, rest in found]


def unit() -> dict[str, list[str]]:
    """The options of the systemd unit, each with all its values."""
    options: dict[str, list[str]] = {}
    for line in (DEPLOY / "systemd/engine.service").read_text().splitlines():
        if line and not line.startswith(("#", "[")):
            name, _, value = line.partition("=")
            options.setdefault(name, []).append(value)
    return options


def container() -> dict[str, Any]:
    """The container of the StatefulSet."""
    [found] = documents("kubernetes/statefulset.yaml")
    [only] = found["spec"]["template"]["spec"]["containers"]
    assert isinstance(only, dict)
    return only


def compose_engine() -> dict[str, Any]:
    """The engine's service of the compose file."""
    [found] = documents("docker/compose.yaml")
    service = found["services"]["engine"]
    assert isinstance(service, dict)
    return service


def command_lines() -> dict[str, list[str]]:
    """The arguments of `engine` by the file that has them."""
    lines = {name: json.loads(dict(instructions(name))["CMD"]) for name in DOCKERFILES}
    [start] = unit()["ExecStart"]
    lines["systemd/engine.service"] = shlex.split(start)[1:]
    lines["docker/compose.yaml"] = compose_engine()["command"]
    lines["kubernetes/statefulset.yaml"] = container()["args"]
    return lines


def drain_timeout_s(arguments: list[str], default: float) -> float:
    """Of a command line."""
    given = [text.partition("=")[2] for text in arguments if text.startswith("--drain-timeout=")]
    return float(given[0]) if given else default
