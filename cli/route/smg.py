"""The router smg: where it is installed, and its command line with our defaults."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

from ...runtime.errors import ConfigError
from .workers import Worker

VERSION: Final = "1.13.0"
"""The one that was tested; the extra `route` of pyproject.toml has it, too."""
INSTALL: Final = f"pip install smg=={VERSION} (or, in the repository, pip install '.[route]')"
_NAME: Final = "smg"
_VERSION_TIMEOUT_S: Final = 60.0
_TOKENIZER_FILE: Final = "tokenizer.json"
_DEFAULTS: Final = (
    # smg looks at a worker that starts every 30 s, and at one that runs every 60 s; a drained worker answers 503.
    *("--worker-startup-check-interval", "1"),
    *("--health-check-interval-secs", "1"),
    *("--health-failure-threshold", "2"),
    *("--health-success-threshold", "1"),
    *("--load-monitor-interval", "2"),
    *("--log-level", "warn"),  # otherwise four lines for each request
)


class RouterAddress(NamedTuple):
    """Where the router listens."""

    host: str
    port: int
    metrics_port: int


def find_smg(starter: str = "`engine route`") -> str:
    """The executable: beside this interpreter, or in PATH.

    Args:
        starter: the command that starts it, for messages.

    Raises:
        ConfigError: there is none, or it is another program of this name.
    """
    path = shutil.which(_NAME, path=str(Path(sys.executable).parent)) or shutil.which(_NAME)
    if path is None:
        raise ConfigError(f"smg is not installed, and {starter} starts it as the router; {INSTALL}")
    try:
        answer = subprocess.run(
            [path, "--version"], capture_output=True, text=True, timeout=_VERSION_TIMEOUT_S, check=False
        )
        said = answer.stdout.strip()
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"{path} --version fails ({error}); install smg again: {INSTALL}") from None
    name, _, version = said.partition(" ")
    if name != _NAME or not version:
        raise ConfigError(
            f"{path} is not smg {VERSION} or newer; sglang-router installs a command of the same name: remove it, or "
            f"use an environment of its own, and {INSTALL}"
        )
    return path


def smg_command(
    path: str,
    workers: Sequence[Worker] | Path,
    address: RouterAddress,
    *,
    policy: str,
    tokenizer_path: str,
    api_key: str | None,
    more: Sequence[str],
) -> list[str]:
    """The command line of the router.

    Args:
        path: of smg.
        workers: all of them, or the file that lists them at each moment.
        address: of the router.
        policy: how it chooses a worker.
        tokenizer_path: a folder on the machine of the first worker; it is used if it is here, too.
        api_key: what clients must send; smg asks the workers with it.
        more: arguments that come last, and so replace ours.
    """
    command = [path, "launch", "--host", address.host, "--port", str(address.port), "--policy", policy]
    command += ["--prometheus-host", address.host, "--prometheus-port", str(address.metrics_port), *_DEFAULTS]
    if (Path(tokenizer_path) / _TOKENIZER_FILE).is_file() and tokenizer_path:
        command += ["--tokenizer-path", tokenizer_path]
    else:
        command += ["--disable-tokenizer-autoload"]
    if api_key:
        command += ["--api-key", api_key]
    if isinstance(workers, Path):
        command += ["--discovery-provider", "file", "--discovery-file", str(workers)]
        return [*command, "--discovery-check-interval-secs", "1", *more]
    replicas = [worker.url for worker in workers if worker.role == "worker"]
    if replicas:
        command += ["--worker-urls", *replicas]
    else:
        command += ["--pd-disaggregation"]
    for worker in workers:
        if worker.role == "prefill":
            port = "none" if worker.bootstrap_port is None else str(worker.bootstrap_port)
            command += ["--prefill", worker.url, port]
        elif worker.role == "decode":
            command += ["--decode", worker.url]
    return [*command, *more]
