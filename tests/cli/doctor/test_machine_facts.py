"""Facts are read from the machine: a real port and real directories, and a /proc as Linux writes it."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from engine.cli.doctor.machine_facts import Process, find_orphans, gather_machine, server_error
from engine.launch.child.socket_dir import SocketDir
from engine.runtime.config.server_config import ServerConfig


@pytest.fixture
def listening():
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        yield server.getsockname()[1]


def test_a_port_that_is_taken_names_its_holder(listening):
    facts = gather_machine(ServerConfig(port=listening))
    assert f"127.0.0.1:{listening} is in use" in facts.port_error
    assert facts.port_holder.startswith(f"pid {os.getpid()}, ")


def test_the_holders_arguments_are_not_shown_as_they_may_have_keys():
    listen = "import socket; s = socket.create_server(('127.0.0.1', 0)); print(s.getsockname()[1], flush=True); input()"
    command = [sys.executable, "-c", listen, "--key=secret"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        port = int(other.stdout.readline())
        holder = gather_machine(ServerConfig(port=port)).port_holder
        other.communicate("\n")
    assert holder == f"pid {other.pid}, {sys.executable.split()[0]}"


def test_keys_and_a_certificate_that_cannot_be_read_are_found(tmp_path):
    (tmp_path / "keys").write_text("# none\n")
    assert "there is no API key in it" in server_error(ServerConfig(api_key_file=str(tmp_path / "keys")))
    assert "cannot be used" in server_error(ServerConfig(ssl_certfile=str(tmp_path / "no.pem")))
    assert server_error(ServerConfig(api_key=("k",))) == ""


def test_a_start_does_not_look_twice(listening):
    facts = gather_machine(ServerConfig(port=listening), at_start=True)
    assert (facts.port_error, facts.unmet) == ("", ())


def test_directories_of_killed_engines_are_found_and_left_alone(monkeypatch):
    # Not `tmp_path`: the paths of sockets must be short.
    with tempfile.TemporaryDirectory(dir="/tmp") as folder, monkeypatch.context() as patch:
        patch.setattr("tempfile.tempdir", folder)
        check_killed_engines()


def check_killed_engines():
    with SocketDir() as living:
        killed = SocketDir()
        os.close(killed._lock_fd)  # as the kernel does when its process dies
        for _look in range(2):
            assert gather_machine(ServerConfig(port=0)).socket_dirs == (killed.path,)
        assert living.path.is_dir()
    assert killed.path.is_dir()


def test_a_cache_folder_that_cannot_be_written_is_found(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("ENGINE_CACHE_DIR", str(tmp_path / "file" / "cache"))
    assert gather_machine(ServerConfig(port=0)).cache_error.startswith(
        f"{tmp_path}/file cannot be written; set"
    )
    monkeypatch.setenv("ENGINE_CACHE_DIR", str(tmp_path / "new" / "cache"))
    assert gather_machine(ServerConfig(port=0)).cache_error == ""


def test_a_cache_folder_of_another_user_is_found(monkeypatch, tmp_path):
    real = os.stat

    def stat(path, *args, **options):
        if os.fspath(path).startswith(str(tmp_path / "hers" / "cache")):
            raise PermissionError(13, "Permission denied", os.fspath(path))
        return real(path, *args, **options)

    (tmp_path / "hers").mkdir()
    monkeypatch.setattr(os, "stat", stat)
    monkeypatch.setattr(os, "access", lambda path, _: path != tmp_path / "hers")
    monkeypatch.setenv("ENGINE_CACHE_DIR", str(tmp_path / "hers" / "cache"))
    error = gather_machine(ServerConfig(port=0), at_start=True).cache_error
    assert error.startswith(f"{tmp_path}/hers cannot be written; set ENGINE_CACHE_DIR")


def process(root: Path, pid: int, parent: int, *command: str) -> None:
    folder = root / "proc" / str(pid)
    folder.mkdir(parents=True)
    (folder / "cmdline").write_bytes("\0".join(command).encode() + b"\0" * bool(command))
    (folder / "stat").write_text(f"{pid} (a) b)) S {parent} {pid} 0")


def test_orphans_are_our_processes_without_an_engine_above_them(tmp_path):
    process(tmp_path, 1, 0, "/sbin/init")
    process(tmp_path, 2, 0)  # a thread of the kernel
    process(tmp_path, 10, 1, "engine: supervisor http://127.0.0.1:30000")
    process(tmp_path, 11, 10, "engine: scheduler")
    process(tmp_path, 20, 1, "engine: scheduler")
    process(tmp_path, 21, 99, "engine: model_runner_1")
    process(tmp_path, 30, 1, "/usr/bin/python", "-c", "LLM()")
    process(tmp_path, 31, 30, "engine: detokenizer")
    process(tmp_path, 40, 1, "vi", "engine: scheduler.txt")
    (tmp_path / "proc" / "self").mkdir()
    found = sorted(find_orphans(tmp_path))
    assert found == [Process(20, "engine: scheduler"), Process(21, "engine: model_runner_1")]


def test_a_system_without_proc_has_no_orphans(tmp_path):
    assert list(find_orphans(tmp_path)) == []


def test_in_a_container_the_engine_may_be_process_1(tmp_path):
    process(tmp_path, 1, 0, "engine: supervisor http://0.0.0.0:30000")
    process(tmp_path, 11, 1, "engine: scheduler")
    assert list(find_orphans(tmp_path)) == []


def test_a_card_without_a_driver_is_seen(tmp_path):
    (tmp_path / "proc").mkdir()
    for name, vendor, kind in (("0", "0x8086", "0x030000"), ("1", "0x10de", "0x030200")):
        device = tmp_path / "sys/bus/pci/devices" / name
        device.mkdir(parents=True)
        (device / "vendor").write_text(f"{vendor}\n")
        (device / "class").write_text(f"{kind}\n")
    facts = gather_machine(ServerConfig(port=0), root=tmp_path)
    assert (facts.has_nvidia_card, facts.has_nvidia_device, facts.shm_free_bytes) == (True, False, None)
