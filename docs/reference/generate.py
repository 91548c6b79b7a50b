"""`python -m docs.reference.generate`: write the pages of `docs/` that are made from the code.

`make docs` runs it. `tests/docs/test_reference.py` fails while a page differs from what the code says.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from .cli_page import NAME as CLI
from .cli_page import cli_page
from .configuration_page import NAME as CONFIGURATION
from .configuration_page import configuration_page
from .families_page import NAME as MODELS
from .families_page import models_page
from .migration_page import NAME as MIGRATION
from .migration_page import migration_page

FOLDER: Final = Path(__file__).parent.parent


def pages() -> dict[Path, str]:
    """The file of each page and its text."""
    return {
        FOLDER / CLI: cli_page(),
        FOLDER / CONFIGURATION: configuration_page(),
        FOLDER / MIGRATION: migration_page(),
        FOLDER / MODELS: models_page(FOLDER),
    }


def main() -> None:
    """Write the pages."""
    for path, text in pages().items():
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
