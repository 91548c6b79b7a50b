"""How many files this process may open; each connection of a client is one."""

from __future__ import annotations

import logging
import resource
from typing import Final

logger = logging.getLogger(__name__)

OWN_FILES: Final = 128
"""Beside connections: sockets between the processes, libraries, logs; some 40 in use."""


def make_room_for(num_connections: int) -> None:
    """Raise the soft limit as far as so many connections need, and the hard limit allows.

    The soft limit is 1024 on most systems, for the sake of programs that use `select`; nothing here does.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = num_connections + OWN_FILES
    if hard != resource.RLIM_INFINITY:
        wanted = min(wanted, hard)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    except (OSError, ValueError) as error:
        logger.warning("open_files=%d of wanted=%d: %s", soft, wanted, error)
        return
    logger.info("open_files=%d, raised from %d", wanted, soft)
