"""`stand_in`: recognizes a file that is there in place of the one that a model needs.

A folder cloned without git-lfs has pointers instead of its large files, and a download through a browser or without a
token has a web page. Readers ask when a file is not what it must be.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

_LFS: Final = b"version https://git-lfs.github.com/spec/"
_PAGES: Final = (b"<!doctype html", b"<html")
_HEAD_BYTES: Final = 256


def stand_in(path: Path) -> str | None:
    """What `path` is, and what to do; None: it looks like neither, or cannot be read."""
    try:
        with open(path, "rb") as file:
            head = file.read(_HEAD_BYTES)
    except OSError:
        return None
    if head.startswith(_LFS):
        return (
            "a Git LFS pointer, not the file itself; run `git lfs pull` in its folder, or download the file"
        )
    if head.lstrip().lower().startswith(_PAGES):
        return "a web page, not a model file; download the file itself (private models need a token)"
    return None


def damage(path: Path, otherwise: str) -> str:
    """The message for a file that is not what it must be: `path: <what it is>; <what to do>`."""
    found = stand_in(path)
    return f"{path}: {otherwise}" if found is None else f"{path}: it is {found}"
