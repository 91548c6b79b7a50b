"""`AvoidedKernels`: the components that `--avoid-kernels` turns off, each one alone, where one of them is wrong."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Final

from ...runtime.errors import ConfigError

logger = logging.getLogger(__name__)

AVOIDED: Final = "avoided (--avoid-kernels)"
"""The reason in the log."""


_CPU_PACKAGES: Final = ("native", "onednn")  # all others are for GPUs


class AvoidedKernels:
    """Names of components: a package (`triton`), one of its operations (`triton:rms_norm`), or a part of the runner.

    The functions that select a component ask here before they ask the component whether it can run.
    """

    def __init__(self, names: Iterable[str] = ()) -> None:
        """Take the names; `check` refuses unknown ones."""
        self._names = tuple(dict.fromkeys(names))
        self._applied: set[str] = set()

    def check(self, known: Mapping[str, Iterable[str]]) -> None:
        """Check the names.

        Args:
            known: all names, in groups.

        Raises:
            ConfigError: a name is unknown; the message lists all.
        """
        all_names = {name for names in known.values() for name in names}
        unknown = [name for name in self._names if name not in all_names]
        if unknown:
            groups = "; ".join(f"{group}: {', '.join(names)}" for group, names in known.items())
            raise ConfigError(
                f"avoid_kernels has {', '.join(map(repr, unknown))}, but the names are: {groups}. Overlap has "
                "--no-overlap, all recordings --no-record-steps"
            )

    def reasons(self, *names: str) -> list[str]:
        """The reason against a component that has these names, if one of them is avoided; else empty."""
        found = [name for name in self._names if name in names]
        self._applied.update(found)
        return [AVOIDED] if found else []

    def log_unused(self, device_type: str) -> None:
        """Log the names that change nothing: for another device, or no candidates in any selection."""
        unused = [
            name
            for name in self._names
            if name not in self._applied
            or (name.partition(":")[0] in _CPU_PACKAGES) != (device_type == "cpu")
        ]
        if unused:
            logger.info("avoid_kernels: not in use here anyway: %s", ", ".join(unused))


NOTHING_AVOIDED: Final = AvoidedKernels()
