"""`Message` and `Record`: bases of all that crosses a process border; the records `Logprobs`, `ProcessIdentity`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

import msgspec


class Message(msgspec.Struct, tag=True, array_like=True, frozen=True, gc=False):
    """Base of all messages between processes; the tag is the class name. New fields go last, with a default."""


class Record(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Base of what travels nested inside a message, so it needs no tag."""


_ELEMENT_BYTES: Final = 4  # of int32 and float32


class Logprobs(Record, frozen=True):
    """Log-probabilities of n consecutive tokens, natural logarithm, before temperature (the model's own).

    Attributes:
        token_logprobs: [n] float32, each token's own.
        top_ids: [n, k] int32, the k likeliest tokens, descending; empty for k = 0.
        top_logprobs: [n, k] float32.
        top_k: k.
        ranks: [n] int32, of the tokens of a prompt: 1 for the likeliest; empty for an answer's.
        chosen_ids: [m] int32, the tokens of `SamplingParams.logprob_token_ids`.
        chosen: [n, m] float32, theirs.
    """

    token_logprobs: bytes
    top_ids: bytes = b""
    top_logprobs: bytes = b""
    top_k: int = 0
    ranks: bytes = b""
    chosen_ids: bytes = b""
    chosen: bytes = b""

    @property
    def num_tokens(self) -> int:
        """n."""
        return len(self.token_logprobs) // _ELEMENT_BYTES

    def first(self, num_tokens: int) -> Logprobs:
        """The entries of the first tokens."""
        token_bytes = num_tokens * _ELEMENT_BYTES
        top_bytes = token_bytes * self.top_k
        return Logprobs(
            self.token_logprobs[:token_bytes],
            self.top_ids[:top_bytes],
            self.top_logprobs[:top_bytes],
            self.top_k,
            self.ranks[:token_bytes],
            self.chosen_ids,
            self.chosen[: num_tokens * len(self.chosen_ids)],
        )


class ProcessIdentity(Record, frozen=True):
    """A process on this machine, so that another one here can see whether it still exists.

    A dead process writes nothing. For a process of another machine, or in another container, that cannot be seen.

    Attributes:
        place: the machine since its start, and the namespace of its process ids.
        pid: in that namespace.
        start: when it was started, in the kernel's ticks: another process may get its pid later.
    """

    place: str
    pid: int
    start: str

    def is_dead(self) -> bool:
        """Whether it is certain that the process has ended."""
        return self.place == _place() and _start_of(self.pid) != self.start


def own_identity() -> ProcessIdentity:
    """The identity of this process."""
    pid = os.getpid()
    return ProcessIdentity(_place(), pid, _start_of(pid))


def _place() -> str:
    boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot_id} {Path('/proc/self/ns/pid').readlink()}"


def _start_of(pid: int) -> str:
    """Field 22 of `/proc/PID/stat`; "" for a process that has ended, also if its parent has not noticed."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return ""
    return "" if fields[0] in "ZX" else fields[19]
