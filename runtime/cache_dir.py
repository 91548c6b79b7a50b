"""The folder for what the engine downloads and builds: one per user, safe to delete."""

from __future__ import annotations

import os
from pathlib import Path

from .errors import ConfigError


def cache_dir() -> Path:
    """$ENGINE_CACHE_DIR, else $XDG_CACHE_HOME/engine, else ~/.cache/engine; it need not exist.

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
