"""How differently two tenants are served while both wait."""

from __future__ import annotations

from .model import Model


def waits(model: Model, tenant: str) -> bool:
    """Whether it has a request in the queue."""
    return any(req.tenant == tenant for req in model.waiting)


class Widest:
    """The largest difference of service of two tenants over any stretch of time in which both always waited."""

    def __init__(self) -> None:
        self.value = 0
        self._low: int | None = None
        self._high: int | None = None

    def look(self, model: Model, first: str, second: str) -> None:
        if not (waits(model, first) and waits(model, second)):
            self._low = self._high = None
            return
        ahead = model.served.get(first, 0) - model.served.get(second, 0)
        self._low = ahead if self._low is None else min(self._low, ahead)
        self._high = ahead if self._high is None else max(self._high, ahead)
        self.value = max(self.value, self._high - self._low)
