from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from engine.runtime.installation import source_commit

COMMIT = "0123456789abcdef0123456789abcdef01234567"
ROOT = Path(__file__).parents[2]


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


@pytest.mark.parametrize(
    "files",
    [
        {"runtime/COMMIT": f"{COMMIT}\n"},
        {".git/HEAD": f"{COMMIT}\n"},
        {".git/HEAD": "ref: refs/heads/main\n", ".git/refs/heads/main": f"{COMMIT}\n"},
        {
            ".git/HEAD": "ref: refs/heads/main\n",
            ".git/packed-refs": f"# pack-refs with: peeled\n{'f' * 40} refs/heads/x\n{COMMIT} refs/heads/main\n",
        },
        {
            ".git": "gitdir: ../main/.git/worktrees/x\n",
            "../main/.git/worktrees/x/HEAD": "ref: refs/heads/x\n",
            "../main/.git/worktrees/x/commondir": "../..\n",
            "../main/.git/refs/heads/x": f"{COMMIT}\n",
        },
    ],
    ids=["image", "detached", "branch", "packed", "worktree"],
)
def test_the_commit_of_each_kind_of_source(tmp_path, files):
    assert source_commit(write(tmp_path / "engine", files)) == COMMIT


@pytest.mark.parametrize(
    "files",
    [
        {},
        {"runtime/COMMIT": "unknown\n"},
        {".git/HEAD": "ref: refs/heads/unborn\n"},
        {".git": "gitdir: /nowhere\n"},
        {".git/HEAD": "\xff\xfe"},
    ],
    ids=["nothing", "no commit", "unborn", "lost worktree", "garbage"],
)
def test_an_unknown_commit_is_empty(tmp_path, files):
    assert source_commit(write(tmp_path / "engine", files)) == ""


def test_it_says_what_git_says():
    asked = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
    ).stdout.strip()
    if (ROOT / ".git").exists() and asked:
        assert source_commit() == asked
