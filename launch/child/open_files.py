"""The limit on open files of this process; each client connection is one."""

from __future__ import annotations

import logging
import resource
from typing import Final

logger = logging.getLogger(__name__)

OWN_FILES: Final = 128
"""Files besides connections: sockets between the processes, libraries, logs; about 40 are in use."""


def make_room_for(num_connections: int) -> None:
    """Raise the soft limit to what `num_connections` need, within the hard limit.

    The soft limit is 1024 on most systems for programs that use `select`; the engine does not use it.
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
    logger.debug("open_files=%d, raised from %d", wanted, soft)
