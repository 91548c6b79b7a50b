"""`RayCluster`: the Ray cluster that this machine belongs to, or else one that is started on this machine.

Ray is an optional dependency. It is imported only here, only if it is used, and only in the process of `broker.py`.
"""

from __future__ import annotations

import importlib
import logging
import os
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple

from ...runtime.errors import ConfigError

logger = logging.getLogger(__name__)

_ADDRESS_VARIABLE: Final = "RAY_ADDRESS"  # Ray's own; "local" asks for a new one
_CLIENT_SCHEME: Final = "ray://"
_OBJECT_STORE_BYTES: Final = 100 << 20  # the engine does not use it; Ray's default is a third of the memory
_ADVICE: Final = " Some common causes include"
_DEFAULT_MODEL: Final = "default"  # a name, even if a folder of that name exists
_SHOWN_RESOURCES: Final = ("CPU", "GPU")


class RayCluster:
    """A connection to Ray.

    Attributes:
        ray: the `ray` package.
        is_own: Ray was started for this engine, and ends with it.
        address: of this machine, in Ray's notation.
    """

    def __init__(self, ray: Any, *, is_own: bool) -> None:
        self.ray = ray
        self.is_own = is_own
        self.address = self.addresses()[ray.get_runtime_context().get_node_id()]

    def addresses(self) -> dict[str, str]:
        """Ray's node id -> address, for the machines that are alive."""
        return {node["NodeID"]: node["NodeManagerAddress"] for node in self._living()}

    def describe(self) -> str:
        """The machines with their resources, and the free resources."""
        machines = (
            f"{node['NodeManagerAddress']} ({_amounts(node['Resources'])})" for node in self._living()
        )
        return f"{', '.join(machines)}; free in all: {_amounts(self.ray.available_resources())}"

    def _living(self) -> list[dict[str, Any]]:
        return [node for node in self.ray.nodes() if node["Alive"]]


class RayUse(NamedTuple):
    """Reason for using Ray, for messages: the setting with its value, how to do without, and what is not on Ray."""

    setting: str = "executor is ray"
    instead: str = "--executor local"
    here: str = "rank 0"


_EXECUTOR: Final = RayUse()


@contextmanager
def ray_cluster(folder: str, use: RayUse = _EXECUTOR) -> Iterator[RayCluster]:
    """Connect, or start Ray on this machine; at the end disconnect, and stop a Ray that was started here.

    Changes the environment of this process for the Ray that it starts.

    Args:
        folder: for all files of a Ray that is started here; the caller removes it.
        use: what asked for it.

    Raises:
        ConfigError: Ray is not installed, does not start, or does not answer at the address in RAY_ADDRESS.
    """
    ray = _import_ray(use)
    try:
        is_own = not _join(ray, use)
        if is_own:
            logger.info("no Ray cluster found, starting Ray on this machine for this engine")
            _start(ray, folder)
        cluster = RayCluster(ray, is_own=is_own)
        logger.info(
            "ray version=%s address=%s machines: %s", ray.__version__, cluster.address, cluster.describe()
        )
        yield cluster
    finally:
        ray.shutdown()


def why_it_died(error: Exception) -> str:
    """The cause in one of Ray's messages: its last line, without the list of possible causes."""
    last_line = next(iter(reversed(str(error).splitlines())), type(error).__name__)
    return last_line.partition(_ADVICE)[0]


def absolute_model(model: str) -> str:
    """A path that is valid in another working directory; a hub name stays as it is."""
    path = Path(model).expanduser().absolute()
    return str(path) if path.exists() and model != _DEFAULT_MODEL else model


def _import_ray(use: RayUse) -> Any:
    try:
        return importlib.import_module("ray")
    except ImportError as error:
        raise ConfigError(
            f"{use.setting}, but Ray cannot be imported ({error}); pip install ray, or use {use.instead}"
        ) from None


def _join(ray: Any, use: RayUse) -> bool:
    """Connect to the cluster that this machine belongs to; False: there is none, or RAY_ADDRESS asks for a new one."""
    address = os.environ.get(_ADDRESS_VARIABLE, "")
    if address == "local":
        return False
    if address.startswith(_CLIENT_SCHEME):
        raise ConfigError(
            f"{_ADDRESS_VARIABLE} is {address}, but {use.here} runs on this machine, so it must belong to the cluster: "
            "`ray start --address=HOST:PORT` here, and unset the variable"
        )
    try:
        ray.init(address="auto", logging_level=logging.WARNING)  # also reads the variable
    except (OSError, RuntimeError, ValueError) as error:
        if not address and isinstance(error, ConnectionError):
            return False
        where = f"at {_ADDRESS_VARIABLE}={address}" if address else "that this machine belongs to"
        raise ConfigError(f"cannot join the Ray cluster {where}: {_first_line(error)}") from error
    return True


def _start(ray: Any, folder: str) -> None:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # an engine sends no usage statistics
    # Otherwise Ray creates a token and leaves it in the user's home.
    os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
    os.environ["TMPDIR"] = folder  # files of a killed actor are removed with the folder
    try:
        ray.init(
            address="local",
            include_dashboard=False,
            object_store_memory=_OBJECT_STORE_BYTES,
            logging_level=logging.WARNING,
            _temp_dir=folder,
        )
    except (OSError, RuntimeError, ValueError) as error:
        raise ConfigError(
            f"Ray does not start on this machine: {_first_line(error)}; `ray start --head` shows more"
        ) from error


def _amounts(resources: Mapping[str, float]) -> str:
    return " ".join(f"{name} {resources.get(name, 0):g}" for name in _SHOWN_RESOURCES)


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)
