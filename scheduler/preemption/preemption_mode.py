"""`PreemptionMode`: whether the KV of a retracted request is swapped to the host or computed again."""

from __future__ import annotations

from typing import Final, Protocol

from ...runtime.config.engine_config import PreemptionModeName

ASSUMED_BYTES_PER_S: Final = 10e9
"""Between device and host, until a swap has been measured; PCIe 4 x16 reaches twice this rate, shared links less."""
_EWMA_WEIGHT: Final = 0.2


class PreemptionMode(Protocol):
    """Chooses swap or recompute for one victim."""

    def swaps(self, num_tokens: int, num_pages: int) -> bool:
        """Whether to swap rather than to compute again.

        Args:
            num_tokens: tokens computed so far.
            num_pages: pages that they fill.
        """
        ...

    def measured_prefill(self, num_tokens: int, seconds: float) -> None:
        """A step computed `num_tokens` of prompts and nothing else."""
        ...

    def measured_swap(self, num_pages: int, seconds: float) -> None:
        """`num_pages` were copied, in one direction."""
        ...


class Always:
    """The configuration has chosen: always swap, or always recompute."""

    def __init__(self, *, swaps: bool) -> None:
        self._swaps = swaps

    def swaps(self, num_tokens: int, num_pages: int) -> bool:
        return self._swaps

    def measured_prefill(self, num_tokens: int, seconds: float) -> None:
        pass

    def measured_swap(self, num_pages: int, seconds: float) -> None:
        pass


class ByCost:
    """Chooses what takes less time: copying the pages out and back, or computing the tokens again.

    Both rates are moving averages, measured while the engine runs: of steps that only compute prompts, and of swaps.
    Before the first prefill step the cost of computing is unknown, and recompute is chosen.

    Attributes:
        prefill_s_per_token: None before the first measurement.
        swap_s_per_page: from `ASSUMED_BYTES_PER_S` before the first measurement.
    """

    def __init__(self, page_bytes: int) -> None:
        self.prefill_s_per_token: float | None = None
        self.swap_s_per_page = page_bytes / ASSUMED_BYTES_PER_S

    def swaps(self, num_tokens: int, num_pages: int) -> bool:
        if self.prefill_s_per_token is None or not self.swap_s_per_page:  # one of the two costs is unknown
            return False
        return 2 * num_pages * self.swap_s_per_page < num_tokens * self.prefill_s_per_token

    def measured_prefill(self, num_tokens: int, seconds: float) -> None:
        if num_tokens and seconds > 0:
            sample = seconds / num_tokens
            last = self.prefill_s_per_token
            self.prefill_s_per_token = sample if last is None else last + _EWMA_WEIGHT * (sample - last)

    def measured_swap(self, num_pages: int, seconds: float) -> None:
        if num_pages and seconds > 0:
            self.swap_s_per_page += _EWMA_WEIGHT * (seconds / num_pages - self.swap_s_per_page)


def make_preemption_mode(name: PreemptionModeName, page_bytes: int) -> PreemptionMode:
    """From the setting to the object."""
    return ByCost(page_bytes) if name == "cost" else Always(swaps=name == "swap")
