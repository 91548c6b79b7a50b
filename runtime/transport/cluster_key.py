"""`ClusterKey`: the secret that the machines of one engine share, and the pair of CURVE keys derived from it.

Both sides use the same pair: a peer with the file can prove that it has it, and no other peer can listen, connect or
impersonate the server (CurveZMQ, rfc.zeromq.org/spec/26). The file may hold any text that cannot be guessed; keys are
derived from it, so one shell command can create it.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Final

import zmq
from zmq.utils import z85

from ..errors import ConfigError

HOW_TO_MAKE_ONE: Final = "(umask 077; openssl rand -hex 32 > cluster.key)"
_MIN_CHARS: Final = 32
_MAX_BYTES: Final = 4096
_PURPOSE: Final = b"engine-cluster"


@dataclass(frozen=True, slots=True)
class ClusterKey:
    """A pair of CURVE keys in Z85, as ZMQ takes them."""

    public: bytes
    secret: bytes = field(repr=False)


def load_cluster_key(path: str | None) -> ClusterKey:
    """Read the file.

    Raises:
        ConfigError: none is named, it cannot be read, others may read it, or it is too short for a secret.
    """
    if path is None:
        raise ConfigError(
            "machines that share a model need a secret that others do not have: make one with "
            f"{HOW_TO_MAKE_ONE}, copy it to each machine, and name it with --cluster-key-file"
        )
    try:
        with Path(path).open("rb") as file:
            mode = stat.S_IMODE(Path(path).stat().st_mode)
            text = file.read(_MAX_BYTES).strip()
    except OSError as error:
        raise ConfigError(
            f"cluster_key_file {path} cannot be read: {error.strerror}; make one with {HOW_TO_MAKE_ONE}"
        ) from None
    if mode & 0o077:
        raise ConfigError(f"cluster_key_file {path} may be read by others (mode {mode:o}); chmod 600 {path}")
    if len(text) < _MIN_CHARS:
        raise ConfigError(
            f"cluster_key_file {path} holds {len(text)} characters, but at least {_MIN_CHARS} random ones make a "
            f"secret; make one with {HOW_TO_MAKE_ONE}"
        )
    return derive_key(text)


@contextmanager
def key_in_memory(text: bytes) -> Iterator[str]:
    """The path of a key file in memory, for this process and its children; it disappears with this process."""
    descriptor = os.memfd_create("engine-cluster-key")
    try:
        os.fchmod(descriptor, 0o600)
        os.write(descriptor, text)
        yield f"/proc/{os.getpid()}/fd/{descriptor}"
    finally:
        os.close(descriptor)


def derive_key(text: bytes) -> ClusterKey:
    """The pair derived from a secret text."""
    secret = z85.encode(blake2b(text, digest_size=32, person=_PURPOSE).digest())
    return ClusterKey(public=zmq.curve_public(secret), secret=secret)
