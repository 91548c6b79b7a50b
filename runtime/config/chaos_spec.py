"""`ChaosSpec`: faults on purpose, as `--chaos` asks for them."""

from __future__ import annotations

import re
from typing import Final, NamedTuple

from ..errors import ConfigError


class ChaosSpec(NamedTuple):
    """Faults on purpose.

    Attributes:
        retract_probability: that a pass retracts a random running request.
        max_retractions: how often at most.
        oom_probability: that a step is treated as one for which the device had no memory.
        max_ooms: how often at most.
        min_step_s: that a step takes.
        kill_token: a step that begins a request with this token kills its process.
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
    """What `--chaos` asks for; None for nothing.

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
    """Its name and numbers; None for those that have the form of a number and are none, such as 1.2.3."""
    name = match["fault"] or ("slow" if match["seconds"] else "kill")
    try:
        return name, (
            float(match["share"] or match["seconds"] or 0),
            int(match["count"] or match["token"] or 0),
        )
    except ValueError:
        return name, None
