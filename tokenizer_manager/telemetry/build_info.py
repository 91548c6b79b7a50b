"""`BuildInfo`: the version that runs and what it computes with; `/version` and `engine:build_info` show it."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from ...runtime.source_commit import source_commit
from ...runtime.version import __version__


class BuildInfo(msgspec.Struct, frozen=True):
    """The version that runs.

    Attributes:
        version: of the engine.
        commit: of its source; "" if it is not known.
        torch: version of torch, with its local part.
        device: cpu or cuda.
        backend: the attention backend.
        instruction_set: that the kernels are compiled for: avx2, amx, sm_90, ...
    """

    version: str
    commit: str = ""
    torch: str = ""
    device: str = ""
    backend: str = ""
    instruction_set: str = ""

    def labels(self) -> dict[str, str]:
        """Its fields as labels of a metric."""
        return {name: str(value) for name, value in msgspec.structs.asdict(self).items()}


def read_build_info(facts: Mapping[str, str]) -> BuildInfo:
    """The build of this installation.

    Args:
        facts: of the scheduler's process; see `model_runner.build_facts`. Further ones are ignored.
    """
    names = {"torch", "device", "backend", "instruction_set"} & facts.keys()
    return BuildInfo(__version__, source_commit(), **{name: facts[name] for name in names})
