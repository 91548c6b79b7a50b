"""`make_writer` and `make_target`: one rank's side of `--transfer-backend`.

They are None for `local`: there the pages travel through the connection of the two rank 0s.
"""

from __future__ import annotations

from .base import PageTarget, PageWriter, PoolMemory


def make_writer(backend: str, memory: PoolMemory, host: str) -> PageWriter | None:
    """Make the backend of a prefill engine.

    Raises:
        ConfigError: the backend's library is missing or unusable.
    """
    match backend:
        case "nixl":
            from .nixl import NixlWriter

            return NixlWriter(memory, host)
        case "mooncake":
            from .mooncake import MooncakeWriter

            return MooncakeWriter(memory, host)
        case _:
            return None


def make_target(backend: str, memory: PoolMemory, host: str) -> PageTarget | None:
    """Make the backend of a decode engine.

    Raises:
        ConfigError: as `make_writer`.
    """
    match backend:
        case "nixl":
            from .nixl import NixlTarget

            return NixlTarget(memory, host)
        case "mooncake":
            from .mooncake import MooncakeTarget

            return MooncakeTarget(memory, host)
        case _:
            return None
