"""`triage.py` that ends an attempt when the stack of a planted hang is in its log, not when its limit has passed.

A limit that is short enough for a test is exceeded by attempts that do not hang, on a busy machine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from unittest import mock

from benchmarks.gpu import sections, triage


class _HangsError(Exception):
    """The attempt hangs."""


def run_child(
    command: Sequence[str],
    limit_s: float,
    take_line: Callable[[str], None],
    environment: Mapping[str, str] | None = None,
) -> int | None:
    """As `sections.run_child`; a planted hang counts as a limit that has passed."""
    dumps = False

    def take(line: str) -> None:
        nonlocal dumps
        take_line(line)
        dumps = dumps or line.startswith("Timeout (")  # of faulthandler
        if dumps and "planted_faults.py" in line:
            raise _HangsError

    try:
        return sections.run_child(command, limit_s, take, environment)
    except _HangsError:
        return None


if __name__ == "__main__":
    with mock.patch.object(triage, "run_child", run_child):
        triage.main()
