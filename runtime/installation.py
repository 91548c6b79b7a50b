"""The installed engine: its version, the git commit of its code, and the folder for what it downloads and builds."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Final

from .errors import ConfigError

__version__ = "0.2.0"


_PACKAGE: Final = Path(__file__).parent.parent
_COMMIT: Final = re.compile(r"[0-9a-f]{40}(?:[0-9a-f]{24})?")


def source_commit(root: Path = _PACKAGE) -> str:
    """The git commit of the running code, as 40 hexadecimal digits, found without git; "" if it is not known.

    Args:
        root: folder of the package. A checkout has `.git`, a container image the file `runtime/COMMIT`, and for a
            package that pip installed from a git URL its metadata has the commit (PEP 610).
    """
    for find in (_of_image, _of_checkout, _of_installation):
        if _COMMIT.fullmatch(commit := find(root)):
            return commit
    return ""


def _of_image(root: Path) -> str:
    return _read(root / "runtime" / "COMMIT")


def _of_checkout(root: Path) -> str:
    git = root / ".git"
    if git.is_file():  # a worktree: its HEAD is elsewhere
        git = root / _read(git).removeprefix("gitdir: ")
    head = _read(git / "HEAD")
    if not head.startswith("ref: "):
        return head
    name = head.removeprefix("ref: ")
    common = git / (_read(git / "commondir") or ".")
    if commit := _read(common / name):
        return commit
    lines = (line.split(" ") for line in _read(common / "packed-refs").splitlines())
    return next((line[0] for line in lines if line[1:] == [name]), "")


def _of_installation(root: Path) -> str:
    if root != _PACKAGE:
        return ""
    from importlib import metadata  # imported here: it takes 10 ms, and every command reads the version

    try:
        text = metadata.distribution(root.name).read_text("direct_url.json") or "{}"
        return str(json.loads(text).get("vcs_info", {}).get("commit_id", ""))
    except (metadata.PackageNotFoundError, ValueError):
        return ""


def _read(path: Path) -> str:
    """The text of a file without surrounding space; "" if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return ""


def cache_dir() -> Path:
    """The cache of this user: $ENGINE_CACHE_DIR, else $XDG_CACHE_HOME/engine, else ~/.cache/engine; it need not exist.

    It is safe to delete.

    Raises:
        ConfigError: there is no home folder, and neither variable is set.
    """
    if own := os.environ.get("ENGINE_CACHE_DIR"):
        return Path(own).expanduser().absolute()
    xdg = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(xdg):  # the XDG specification says to ignore relative paths
        return Path(xdg) / "engine"
    try:
        return Path.home() / ".cache" / "engine"
    except RuntimeError:
        raise ConfigError("there is no home folder for the cache; set ENGINE_CACHE_DIR to a folder") from None
