"""`MachineFacts`: facts about the machine that need no torch; gathered here, checked in `machine`.

`engine serve` gathers them at every start, without the port and the packages; that takes milliseconds.
"""

from __future__ import annotations

import os
import re
import resource
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Final, NamedTuple

from ...launch.child.socket_dir import abandoned_dirs
from ...launch.resolve.host_facts import HostFacts, read_host_facts
from ...runtime.config.server_config import ServerConfig
from ...runtime.errors import ConfigError
from ...runtime.installation import cache_dir
from ..preflight import check_port

_PACKAGE: Final = __package__.split(".", 1)[0]
_TITLE: Final = re.compile(rf"{_PACKAGE}: (?:scheduler|detokenizer|tokenizer_manager|model_runner)")
_REQUIREMENT: Final = re.compile(r"([A-Za-z0-9._-]+)\s*\(?(?:>=([0-9.]+))?")
_NVIDIA_VENDOR: Final = "0x10de"
_DISPLAY_CLASSES: Final = ("0x0300", "0x0302")  # VGA and 3D controllers
_LISTENS: Final = "0A"
_TITLE_BYTES: Final = 200


class Process(NamedTuple):
    """A process, by its title or command line."""

    pid: int
    title: str


class Unmet(NamedTuple):
    """A distribution that the engine requires: `installed` is "" if it is not there at all."""

    name: str
    needed: str
    installed: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineFacts:
    """See the module.

    Attributes:
        python: version.
        is_64_bit, system: of the interpreter; `system` is "linux" and the like.
        unmet: requirements that are not installed, or too old.
        host: CPUs, memory, GPUs.
        has_nvidia_card: a GPU is in the machine, with or without a driver.
        has_nvidia_device: a driver is loaded, and its device is visible to this process.
        shm_free_bytes: of /dev/shm; None: there is none.
        open_files: soft and hard limit.
        port_error: why the server cannot listen at the address; "" if it can.
        server_error: why the server's keys or its certificate cannot be used; "" if they can.
        port_holder: the process that listens there; "" if none is visible.
        orphans: processes of an engine that has died.
        socket_dirs: directories of engines that were killed.
        cache_error: why nothing can be stored in the cache folder; "" if it can.
    """

    python: tuple[int, int, int]
    is_64_bit: bool
    system: str
    unmet: tuple[Unmet, ...]
    host: HostFacts
    has_nvidia_card: bool
    has_nvidia_device: bool
    shm_free_bytes: int | None
    open_files: tuple[int, int]
    port_error: str
    port_holder: str
    server_error: str
    orphans: tuple[Process, ...]
    socket_dirs: tuple[Path, ...]
    cache_error: str

    @property
    def held_by_engine(self) -> bool:
        """Whether an engine listens at the port, by the titles of the processes that this user may inspect."""
        return self.port_holder.partition(", ")[2].startswith(f"{_PACKAGE}: ")


def gather_machine(server: ServerConfig, *, at_start: bool = False, root: Path = Path("/")) -> MachineFacts:
    """Gather the facts.

    Args:
        server: where the server would listen.
        at_start: leave out what a start checks by itself: the port and the installed packages.
        root: of /proc, /sys and /dev.
    """
    error = "" if at_start else port_error(server)
    return MachineFacts(
        python=sys.version_info[:3],
        is_64_bit=sys.maxsize > 2**32,
        system=sys.platform,
        unmet=() if at_start else tuple(_unmet()),
        host=read_host_facts(root),
        has_nvidia_card=_has_nvidia_card(root),
        has_nvidia_device=(root / "dev/nvidiactl").exists(),
        shm_free_bytes=_free_bytes(root / "dev/shm"),
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE),
        port_error=error,
        port_holder=_port_holder(root, server.port) if error else "",
        server_error="" if at_start else server_error(server),
        orphans=tuple(find_orphans(root)),
        socket_dirs=tuple(abandoned_dirs(Path(tempfile.gettempdir()))),
        cache_error=_cache_error(),
    )


# ---------------------------------------------------------------- requirements


def _unmet() -> Iterator[Unmet]:
    """Unmet requirements of the installed engine; none for a checkout that was never installed."""
    try:
        requirements = metadata.requires(_PACKAGE) or []
    except metadata.PackageNotFoundError:
        return
    for requirement in requirements:
        match = _REQUIREMENT.match(requirement)
        if match is None or ";" in requirement:  # extras, other platforms
            continue
        name, needed = match[1], match[2] or ""
        try:
            installed = metadata.version(name)
        except metadata.PackageNotFoundError:
            yield Unmet(name, needed, "")
            continue
        if needed and _numbers(installed) < _numbers(needed):
            yield Unmet(name, needed, installed)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version.partition("+")[0]))


# ---------------------------------------------------------------- devices and limits


def _has_nvidia_card(root: Path) -> bool:
    for device in (root / "sys/bus/pci/devices").glob("*"):
        if _read(device / "vendor") == _NVIDIA_VENDOR and _read(device / "class").startswith(
            _DISPLAY_CLASSES
        ):
            return True
    return False


def _free_bytes(folder: Path) -> int | None:
    try:
        status = os.statvfs(folder)
    except OSError:
        return None
    return status.f_bavail * status.f_frsize


def _cache_error() -> str:
    """Reason why the cache folder, or the next one above it that exists, cannot be written."""
    try:
        folder = cache_dir()
    except ConfigError as error:
        return str(error)
    while not os.path.exists(folder) and folder != folder.parent:  # False, too, where this user may not look
        folder = folder.parent
    if folder.is_dir() and os.access(folder, os.W_OK | os.X_OK):
        return ""
    return f"{folder} cannot be written; set ENGINE_CACHE_DIR to a folder that can"


# ---------------------------------------------------------------- ports


def port_error(server: ServerConfig) -> str:
    """Reason why the server cannot listen there, with the fix; "" if it can."""
    try:
        check_port(server)
    except ConfigError as error:
        return str(error)
    return ""


def server_error(server: ServerConfig) -> str:
    """Reason why the keys or the certificate cannot be used, with the fix; "" if they can, or there are none."""
    from ...tokenizer_manager.http.guards.auth import read_keys
    from ...tokenizer_manager.http.port import tls_context

    try:
        read_keys(server)
        tls_context(server)
    except ConfigError as error:
        return str(error)
    return ""


def _port_holder(root: Path, port: int) -> str:
    """The process on the port, such as `pid 12, engine: tokenizer_manager`; "" if there is none."""
    inodes = set(_listening_inodes(root, port))
    if not inodes:
        return ""
    for process in _processes(root):
        try:
            fds = os.listdir(root / f"proc/{process.pid}/fd")
        except OSError:
            continue
        for fd in fds:
            try:
                target = os.readlink(root / f"proc/{process.pid}/fd/{fd}")
            except OSError:
                continue
            if target.startswith("socket:[") and target[8:-1] in inodes:
                # Of other programs only the name: their arguments may contain keys, and reports are shared.
                is_ours = process.title.startswith(f"{_PACKAGE}: ")
                return f"pid {process.pid}, {process.title if is_ours else process.title.split()[0]}"
    return "a process of another user"


def _listening_inodes(root: Path, port: int) -> Iterator[str]:
    for table in ("tcp", "tcp6"):
        for line in _read(root / f"proc/net/{table}").splitlines()[1:]:
            fields = line.split()
            if len(fields) > 9 and fields[3] == _LISTENS and int(fields[1].rpartition(":")[2], 16) == port:
                yield fields[9]


# ---------------------------------------------------------------- processes


def find_orphans(root: Path = Path("/")) -> Iterator[Process]:
    """Processes of an engine without an engine as parent.

    Engine processes end with their parent. One that remains is stuck in the kernel (a driver that does not answer), or
    its engine is older than this rule.
    """
    by_pid = {process.pid: process for process in _processes(root)}
    for process in by_pid.values():
        if not _TITLE.match(process.title):
            continue
        parent = by_pid.get(_parent_of(root, process.pid))
        if parent is None or not re.search(rf"{_PACKAGE}|python|pytest|ray", parent.title):
            yield process


def _processes(root: Path) -> Iterator[Process]:
    proc = os.fspath(root / "proc")
    try:
        names = os.listdir(proc)  # paths as text: with pathlib a scan of 100 processes takes twice as long
    except OSError:  # no Linux
        return
    for name in names:
        if not name.isdecimal():
            continue
        try:
            with open(f"{proc}/{name}/cmdline", "rb") as file:
                title = file.read(_TITLE_BYTES).decode(errors="replace").replace("\0", " ").strip()
        except OSError:  # it has just ended
            continue
        if title:
            yield Process(int(name), title)


def _parent_of(root: Path, pid: int) -> int:
    fields = _read(root / f"proc/{pid}/stat").rpartition(")")[2].split()
    return int(fields[1]) if len(fields) > 1 else 0


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""
