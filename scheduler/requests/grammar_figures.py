"""`GrammarFigures`: what the grammar of one request has cost, and how often it changed the answer."""

from __future__ import annotations

from dataclasses import dataclass

from ...runtime.messages import GrammarUsage, Overruled


@dataclass(slots=True)
class GrammarFigures:
    """Figures of one request, from its earlier attempts on. See `GrammarUsage` for the attributes.

    Attributes:
        num_forced: of the earlier attempts; the matcher counts those of this one.
    """

    compile_s: float = 0.0
    mask_s: float = 0.0
    num_forced: int = 0
    num_overruled: int = 0
    first_overruled: Overruled | None = None
    cut_at: int | None = None

    @classmethod
    def going_on(cls, usage: GrammarUsage) -> GrammarFigures:
        """The figures of a request that was lost, as of its last delivered token."""
        return cls(
            usage.compile_s,
            usage.mask_s,
            usage.forced_tokens,
            usage.overruled_tokens,
            usage.first_overruled,
            usage.cut_at,
        )

    def overruled(self, position: int, wanted_id: int, got_id: int) -> None:
        """Count a token of the output that replaces a refused one."""
        self.num_overruled += 1
        if self.first_overruled is None:
            self.first_overruled = Overruled(position, wanted_id, got_id)

    def usage(self, num_forced: int) -> GrammarUsage:
        """The figures for the client; `num_forced`: of the matcher."""
        return GrammarUsage(
            self.compile_s,
            self.mask_s,
            self.num_forced + num_forced,
            self.num_overruled,
            self.first_overruled,
            self.cut_at,
        )
