"""`ChaosSpec`: injected faults, parsed from `--chaos`."""

from __future__ import annotations

import re
from typing import Final, NamedTuple

from ..errors import ConfigError


class ChaosSpec(NamedTuple):
    """Injected faults.

    Attributes:
        retract_probability: probability that a pass retracts a random running request.
        max_retractions: most such retractions.
        oom_probability: probability that a step is treated as out of device memory.
        max_ooms: most such steps.
        min_step_s: least duration of a step.
        kill_token: a step that starts a request with this token in its prompt kills its process.
    """

    retract_probability: float = 0.0
    max_retractions: int = 0
    oom_probability: float = 0.0
    max_ooms: int = 0
    min_step_s: float = 0.0
    kill_token: int | None = None


_CHAOS: Final = re.compile(
    r"(?P<fault>retract|oom)=(?P<share>[0-9.]+):(?P<count>[0-9]+)|slow=(?P<seconds>[0-9.]+)|kill=(?P<token>[0-9]{1,9})"
)


def parse_chaos(text: str | None) -> ChaosSpec | None:
    """Parse `--chaos`; None if it is not set.

    Raises:
        ConfigError: it is not `retract=PROBABILITY:COUNT`, `oom=PROBABILITY:COUNT`, `slow=SECONDS`, `kill=TOKEN_ID`, or
            several of them with commas.
    """
    if text is None:
        return None
    faults: dict[str, tuple[float, int]] = {}
    for part in text.split(","):
        match = _CHAOS.fullmatch(part.strip())
        name, fault = _fault(match) if match else ("", None)
        if fault is None or not 0.0 <= fault[0] <= 1.0 or name in faults:
            raise ConfigError(
                f"chaos is {text!r}, but it must be retract=PROBABILITY:COUNT, such as retract=0.5:500, "
                "oom=PROBABILITY:COUNT, slow=SECONDS with at most 1 second, kill=TOKEN_ID, or several of them with "
                "commas"
            )
        faults[name] = fault
    none = (0.0, 0)
    kill_token = faults["kill"][1] if "kill" in faults else None
    return ChaosSpec(
        *faults.get("retract", none), *faults.get("oom", none), faults.get("slow", none)[0], kill_token
    )


def _fault(match: re.Match[str]) -> tuple[str, tuple[float, int] | None]:
    """The fault's name and numbers; None for text that is no number, such as 1.2.3."""
    name = match["fault"] or ("slow" if match["seconds"] else "kill")
    try:
        return name, (
            float(match["share"] or match["seconds"] or 0),
            int(match["count"] or match["token"] or 0),
        )
    except ValueError:
        return name, None
