"""`report_ready`: notifies systemd (`Type=notify`) that clients can connect."""

from __future__ import annotations

import logging
import os
import socket

logger = logging.getLogger(__name__)


def report_ready(status: str) -> None:
    """Send READY to the service manager, if one waits for it; a manager that does not read is only logged.

    Args:
        status: one line, for `systemctl status`.
    """
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address.startswith(("/", "@")):
        return
    if address.startswith("@"):  # in the abstract namespace
        address = "\0" + address[1:]
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as manager:
            manager.connect(address)
            manager.send(f"READY=1\nSTATUS={status}\n".encode())
    except OSError as error:
        logger.warning("the service manager does not take the news of the start: %s", error)
