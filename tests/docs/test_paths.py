"""Every path of the repository that a document names in backticks or in a link exists."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from .conftest import DOCS

ROOT = DOCS.parent
PAGES = sorted([*DOCS.glob("*.md"), *ROOT.glob("*.md"), *(ROOT / "deploy").rglob("README.md")])
HISTORY = {"CHANGELOG.md"}  # names what was removed
# Paths of other projects, of the user's machine, and of what make creates.
FOREIGN = re.compile(
    r"^(?:~|\.venv|build|run|tmp|etc|var|proc|usr|dev|opt|home|python/|vllm|sglang|llama\.cpp)\b|://|[<>$*{}]|\.\.\."
)
FOLDERS = {path.name for path in ROOT.iterdir() if path.is_dir() and not path.name.startswith((".", "__"))}


def named_paths(text: str) -> Iterator[str]:
    """What stands in backticks and looks like a path: a folder of the root first, or a slash and an ending."""
    prose = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    for name in re.findall(r"`([\w./-]+)`", prose):
        if "/" not in name or name.startswith("/") or FOREIGN.search(name):
            continue
        if name.split("/")[0] in FOLDERS or re.search(r"\.(?:py|cpp|h|md|js|html)$", name):
            yield name
    for target in re.findall(r"\]\(([^)#\s]+)(?:#[\w-]*)?\)", prose):
        if "://" not in target and not target.startswith("mailto:"):
            yield target


def exists(name: str, page: Path) -> bool:
    """Whether the path exists from the root, or beside the page; a page of a subject may leave its folder out."""
    return any((base / name).exists() for base in (ROOT, page.parent)) or any(
        (ROOT / folder / name).exists() for folder in FOLDERS
    )


@pytest.mark.parametrize(
    "page", [page for page in PAGES if page.name not in HISTORY], ids=lambda page: page.name
)
def test_named_paths_exist(page):
    missing = sorted({name for name in named_paths(page.read_text()) if not exists(name, page)})

    assert missing == [], f"{page.relative_to(ROOT)} names what does not exist"


def test_a_dead_path_is_found():
    text = "`scheduler/no_such.py`, `scheduler/scheduler.py`, [page](docs/nothing.md), `--dp`, `org/repo`"

    found = list(named_paths(text))

    assert found == ["scheduler/no_such.py", "scheduler/scheduler.py", "docs/nothing.md"]
    assert [name for name in found if not exists(name, DOCS / "architecture.md")] == [
        "scheduler/no_such.py",
        "docs/nothing.md",
    ]
