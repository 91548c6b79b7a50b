"""The table of families in `docs/models.md`; the rest of the page is written by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from engine.models.gguf.families.registry import GGUF_FAMILIES

from .families import FAMILIES, WEIGHT_KINDS, FamilyRow
from .markdown import code

NAME: Final = "models.md"
_BEGIN: Final = "<!-- families: `make docs` writes this table -->"
_END: Final = "<!-- end of families -->"


def models_page(folder: Path) -> str:
    """The page in `folder` with the table as the code says."""
    text = (folder / NAME).read_text(encoding="utf-8")
    before, rest = text.split(_BEGIN)
    after = rest.split(_END)[1]
    return f"{before}{_BEGIN}\n{_table()}\n{_END}{after}"


def _table() -> str:
    columns = ("models", "folder: `model_type`", "GGUF: architecture", *WEIGHT_KINDS)
    lines = [columns, ("---",) * len(columns), *map(_cells, FAMILIES)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _cells(row: FamilyRow) -> tuple[str, ...]:
    of_files = [name for name, family in GGUF_FAMILIES.items() if family.model_type == row.model_type]
    architectures = ", ".join(map(code, [row.gguf] if row.gguf else of_files))
    kinds = ("no" if kind in row.missing else "yes" for kind in WEIGHT_KINDS)
    return row.names, code(row.model_type), architectures or "no", *kinds
