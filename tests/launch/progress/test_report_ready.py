from __future__ import annotations

import logging
import socket
import tempfile
from pathlib import Path

import pytest

from engine.launch.startup_display import report_ready


@pytest.fixture
def manager():
    """A service manager's socket, in a folder with a short path."""
    with (
        tempfile.TemporaryDirectory(prefix="sd-") as folder,
        socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener,
    ):
        yield listener, str(Path(folder) / "notify")


@pytest.mark.parametrize("kind", ["path", "abstract"])
def test_the_service_manager_is_told(manager, monkeypatch, kind):
    listener, path = manager
    listener.bind(path if kind == "path" else f"\0{path}")
    monkeypatch.setenv("NOTIFY_SOCKET", path if kind == "path" else f"@{path}")

    report_ready("m at http://127.0.0.1:1")

    assert listener.recv(1000) == b"READY=1\nSTATUS=m at http://127.0.0.1:1\n"


def test_without_a_service_manager_nothing_happens(monkeypatch):
    monkeypatch.delenv("NOTIFY_SOCKET", raising=False)
    report_ready("x")


def test_a_service_manager_that_is_gone_is_a_warning(monkeypatch, caplog):
    monkeypatch.setenv("NOTIFY_SOCKET", "/nowhere/notify")
    with caplog.at_level(logging.WARNING):
        report_ready("x")
    assert "service manager" in caplog.text
