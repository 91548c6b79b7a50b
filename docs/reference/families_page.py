"""The table of families in `docs/models.md`; the rest of the page is written by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from engine.models.families.family import Family
from engine.models.families.registry import FAMILIES

from .markdown import code

NAME: Final = "models.md"
_BEGIN: Final = "<!-- families: `make docs` writes this table -->"
_END: Final = "<!-- end of families -->"


def models_page(folder: Path) -> str:
    """The page in `folder` with the table as the families say."""
    text = (folder / NAME).read_text(encoding="utf-8")
    before, rest = text.split(_BEGIN)
    after = rest.split(_END)[1]
    return f"{before}{_BEGIN}\n{_table()}\n{_END}{after}"


def _table() -> str:
    columns = ("models", "folder: `model_type`", "GGUF: architecture")
    lines = [columns, ("---",) * len(columns), *map(_cells, FAMILIES.values())]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines if cells[0])


def _cells(family: Family) -> tuple[str, ...]:
    architectures = [family.stored_as] if family.stored_as else [*family.gguf]
    return family.published, code(family.model_type), ", ".join(map(code, architectures)) or "no"
