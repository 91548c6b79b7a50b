"""`ServeArguments`: the options of `engine serve` that a fleet passes on, checked before anything starts."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from typer.main import get_command

from ...launch.resolve.host_facts import HostFacts, usable_threads
from ...launch.resolve.resolve import CPU_MEM_FRACTION
from ...runtime.config.config_fields import SECRETS, config_fields, flag_of
from ...runtime.config.config_sources import MergedConfig
from ...runtime.config.environment import variable_of
from ...runtime.errors import ConfigError
from ...supervisor.ray.cluster import absolute_model
from ..options import merge_options
from ..serve import app

_REFUSED: Final = {
    "port": "each server takes a free port; /replicas and --worker-list name it",
    "ssl_certfile": "routers ask the servers without TLS; end TLS before the router, and leave it out",
    "kv_events": "the servers would share its address; leave it out",
    "decision_log": "the servers would share its file; leave it out",
    "disaggregation_mode": "a fleet's servers answer whole requests; start prefill and decode servers by hand, and "
    "a router before them",
    "nnodes": "a replica has one machine; use --tp on it, or start servers and a router by hand",
    "executor": "the fleet places whole servers; leave it out",
}
"""Settings that one server can have and several cannot."""


@dataclass(frozen=True, slots=True)
class ServeArguments:
    """Arguments with which each server is started.

    Attributes:
        arguments: the model and the options, as they were given, without secrets.
        secrets: these, as environment variables; a command line is shown to all users of a machine.
        merged: as `engine serve` will read them.
        device: cpu or cuda.
        host: the facts of this machine.
    """

    arguments: tuple[str, ...]
    secrets: Mapping[str, str]
    merged: MergedConfig
    device: str
    host: HostFacts

    def command(self, number: int, share: int) -> list[str]:
        """The arguments of `engine` for a replica that takes the `share`-th part of its machine."""
        config = self.merged.config
        own = ["--port", "0", "--log-name", f"{config.log.log_name or 'server'}{number}"]
        if self.device == "cpu" and config.model.num_threads == "auto":
            own += ["--num-threads", str(self.threads(share))]
        if self.device == "cpu" and config.cache.mem_fraction == config.cache.max_total_tokens == "auto":
            own += ["--mem-fraction", f"{CPU_MEM_FRACTION / share:.4f}"]
        return ["serve", *self.arguments, *own]

    def threads(self, share: int) -> int:
        """CPU threads of a server, if `share` of them divide this machine."""
        asked = self.merged.config.model.num_threads
        return max(1, usable_threads(self.host) // share) if asked == "auto" else int(asked)

    def env(self) -> dict[str, str]:
        """The engine's settings of this environment, and the secrets; Ray assigns the GPUs."""
        settings = {name: value for name, value in os.environ.items() if name.startswith("ENGINE_")}
        return {**settings, **self.secrets}

    def needs(self, share: int) -> dict[str, float]:
        """Resources of a machine that one server takes, in Ray's units."""
        if self.device == "cuda":
            parallel = self.merged.config.parallel
            return {"CPU": 1.0, "GPU": float(parallel.tp * parallel.dp)}
        return {"CPU": float(self.threads(share))}


def parse_serve(model: str | None, options: Sequence[str], host: HostFacts) -> ServeArguments:
    """Read the options as `engine serve` does.

    Args:
        model: MODEL of the fleet.
        options: what comes after `--`.
        host: the facts of this machine.

    Raises:
        ConfigError: a setting that several servers cannot share, or a value that is none.
        typer.TyperException: an unknown option.
    """
    words = [*([] if model is None else [absolute_model(model)]), *options]
    context = get_command(app).make_context("engine serve", list(words))
    # An option that may be repeated and is not given: typer passes None to the command.
    values: dict[str, Any] = {
        name: None if value in ((), []) else value for name, value in context.params.items()
    }
    model_argument = values.pop("model_argument")
    config_file, print_config = values.pop("config_file"), values.pop("print_config")
    if print_config:
        raise ConfigError("--print-config starts no server; use `engine serve --print-config`")
    merged = merge_options(values, config_file=config_file, model=model_argument)
    for name, fix in _REFUSED.items():
        origin = merged.origins[name]
        if origin.startswith("--") or (name != "port" and _differs(merged, name)):
            raise ConfigError(f"{name} is set ({origin}), but {fix}")
    given = {name: values[name] if isinstance(values[name], list) else [values[name]] for name in SECRETS}
    secrets = {
        variable_of(name): found[0] for name, found in given.items() if found != [None] and len(found) == 1
    }
    return ServeArguments(
        tuple(_without(words, [flag_of(name) for name in SECRETS if variable_of(name) in secrets])),
        secrets,
        merged,
        _device(merged, host),
        host,
    )


def _without(words: Sequence[str], flags: Collection[str]) -> Iterator[str]:
    """The words without these options and their values."""
    each = iter(words)
    for word in each:
        if word in flags:
            next(each)
        elif word.partition("=")[0] not in flags:
            yield word


def _differs(merged: MergedConfig, name: str) -> bool:
    field = config_fields()[name]
    return bool(getattr(getattr(merged.config, field.group), name) != field.default)


def _device(merged: MergedConfig, host: HostFacts) -> str:
    asked = merged.config.model.device
    if asked != "auto":
        return str(asked)
    return "cuda" if host.gpus and host.torch_has_cuda else "cpu"
