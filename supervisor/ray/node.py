"""`RayNode`: a Ray actor that is one of the engine's machines: it runs `NodeSupervisor`, as `engine serve` does.

Ranks on Ray are the same processes with the same connections, heartbeats and causes as on machines where a user starts
the command; Ray finds the place and starts the actor. This module does not import Ray.
"""

from __future__ import annotations

import dataclasses
import os

import msgspec

from ...launch.resolve.model_resolution import find_model, read_model
from ...runtime.config.engine_config import EngineConfig
from ...runtime.errors import ConfigError
from ...runtime.logs import configure_logging
from ...runtime.transport.cluster_key import key_in_memory
from ..node_supervisor import NodeSupervisor


class RayNode:
    """One machine; its method runs in the main thread of the actor's process, which `NodeSupervisor` needs."""

    def run(self, config: bytes, key: bytes) -> tuple[int, str]:
        """Run this machine's ranks until the engine ends.

        Args:
            config: an encoded `EngineConfig`, resolved, with this machine's `node_rank`.
            key: the text of the secret that the machines share.

        Returns:
            Exit code and cause, as from `NodeSupervisor`.
        """
        own = msgspec.msgpack.decode(config, type=EngineConfig)
        configure_logging(own.log, "supervisor")
        try:
            source = find_model(own.model)
            spec = read_model(own.model, source).spec
            with key_in_memory(key) as key_file:
                parallel = dataclasses.replace(own.parallel, cluster_key_file=key_file)
                outcome = NodeSupervisor(dataclasses.replace(own, parallel=parallel), source, spec).run()
        except ConfigError as error:
            return 2, str(error)
        return outcome.exit_code, outcome.message


def visible_devices() -> str | None:
    """The GPUs that Ray has assigned to the current task, in CUDA's notation."""
    return os.environ.get("CUDA_VISIBLE_DEVICES")
