"""Environment settings of transfer libraries, where an engine needs another value than their own default."""

from __future__ import annotations

import os


def use_loopback_for_ucx() -> None:
    """NIXL (UCX) shall listen on this machine only; its own choice includes the address of the machine."""
    os.environ.setdefault("UCX_NET_DEVICES", "lo")


def limit_mooncake() -> None:
    """A write of Mooncake to a frozen engine shall fail after ten seconds, instead of thirty."""
    os.environ.setdefault("MC_TCP_PROGRESS_TIMEOUT_SEC", "10")
    os.environ.setdefault("MC_TCP_STATUS_TIMEOUT_SEC", "10")


def mooncake_protocol() -> str:
    """The value `tcp` or `rdma`."""
    return os.environ.get("MOONCAKE_PROTOCOL", "tcp")
