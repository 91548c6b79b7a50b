"""The library's file: named by what it was made of, made once by whoever comes first, mended when damaged."""

from __future__ import annotations

import fcntl
import logging
import os
import select
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from engine.model_runner.kernels.cpu import build as module
from engine.model_runner.kernels.cpu import compiler as compiler_module
from engine.model_runner.kernels.cpu.build import build, is_whole
from engine.model_runner.kernels.cpu.compiler import Compiler, NoLibraryError, find_compilers


def calls(compiler: Path) -> list[str]:
    path = compiler.parent / "calls"
    return path.read_text().splitlines() if path.exists() else []


@pytest.fixture
def no_compiler(monkeypatch):
    """From here on."""

    def remove() -> None:
        monkeypatch.setenv("PATH", "/dev/null")
        find_compilers.cache_clear()

    yield remove
    find_compilers.cache_clear()


def test_it_is_compiled_once_and_linked_without_openmp(compiler, tmp_path):
    first = build("portable", tmp_path / "kernels")
    made = calls(compiler)
    sources = [line for line in made if " -c " in line]
    assert len(sources) == len(list(Path(module.__file__).parent.glob("*.cpp")))
    assert all("-fopenmp" in line for line in sources)
    assert "-shared" in made[-1] and "-fopenmp" not in made[-1]
    assert build("portable", tmp_path / "kernels") == first
    assert calls(compiler) == made
    assert [path.name for path in first.parent.iterdir() if path.suffix == ".so"] == [first.name]
    assert not list(first.parent.glob("partial-*"))


def test_another_level_compiler_or_option_is_another_file(compiler, tmp_path, monkeypatch):
    paths = {build("portable", tmp_path), build("avx2", tmp_path), build("avx2", tmp_path, options=("-g",))}
    newer = Compiler(str(compiler), "a newer one", openmp=True)
    monkeypatch.setattr(module, "find_compilers", lambda: (newer,))
    paths.add(build("avx2", tmp_path))
    assert len(paths) == 4


@pytest.mark.parametrize("damage", [b"", b"made", b"x" * 100])
def test_a_damaged_file_is_made_again(compiler, tmp_path, damage):
    path = build("avx2", tmp_path)
    whole = path.read_bytes()
    path.write_bytes(damage)
    assert not is_whole(path)
    assert build("avx2", tmp_path) == path
    assert path.read_bytes() == whole


def test_those_who_come_together_compile_once(compiler, tmp_path):
    paths: list[Path] = []
    threads = [threading.Thread(target=lambda: paths.append(build("avx2", tmp_path))) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(paths) == 6 and len(set(paths)) == 1
    assert sum("-shared" in line for line in calls(compiler)) == 1


def test_a_compiler_that_fails_is_quoted_and_leaves_nothing(compiler, tmp_path):
    (compiler.parent / "broken").touch()
    with pytest.raises(NoLibraryError, match="no such register"):
        build("avx2", tmp_path / "kernels")
    assert [path.name for path in (tmp_path / "kernels").iterdir()] == ["lock"]


def test_where_one_compiler_fails_the_next_one_is_tried(compiler, tmp_path, monkeypatch):
    broken = tmp_path / "broken" / "g++"
    broken.parent.mkdir()
    broken.write_text("#!/bin/sh\nexit 1\n")
    broken.chmod(0o755)
    monkeypatch.setattr(
        module,
        "find_compilers",
        lambda: (Compiler(str(broken), "old", openmp=True), Compiler(str(compiler), "new", openmp=True)),
    )
    assert is_whole(build("avx2", tmp_path / "kernels"))


def test_a_compiler_s_children_end_with_the_time_limit(compiler, tmp_path, monkeypatch):
    """The driver would wait for its child; both hold a pipe, whose end is read here when both are gone."""
    pipe = tmp_path / "alive"
    os.mkfifo(pipe)
    compiler.write_text(f"#!/bin/sh\nexec 3> {pipe}\necho started >&3\nsleep 600 &\nwait\n")
    alive = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)

    def time_is_up_once_it_runs() -> float:
        assert select.select([alive], [], [], 60)[0]
        return time.monotonic() + module._TIME_LIMIT_S

    monkeypatch.setattr(compiler_module, "time", SimpleNamespace(monotonic=time_is_up_once_it_runs))
    try:
        with pytest.raises(NoLibraryError, match="takes too long"):
            build("avx2", tmp_path / "kernels")
        assert os.read(alive, 1000).startswith(b"started")
        assert select.select([alive], [], [], 60)[0] and os.read(alive, 1000) == b""
    finally:
        os.close(alive)
    assert [path.name for path in (tmp_path / "kernels").iterdir()] == ["lock"]


def test_waiting_for_another_process_is_said_and_ends(compiler, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(module, "_TIME_LIMIT_S", 0.1)
    with (tmp_path / "lock").open("w") as lock, caplog.at_level(logging.INFO):
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(NoLibraryError, match="another process has had"):
            build("avx2", tmp_path)
    assert sum("waiting for another process" in record.message for record in caplog.records) == 1
    assert not calls(compiler)


def test_without_a_compiler_a_library_that_was_made_before_is_taken(compiler, tmp_path, no_compiler):
    path = build("avx2", tmp_path)
    no_compiler()
    assert build("avx2", tmp_path) == path
    with pytest.raises(NoLibraryError, match="no C\\+\\+ compiler"):
        build("portable", tmp_path)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(NoLibraryError, match="no C\\+\\+ compiler"):
        build("avx2", tmp_path)


def test_what_others_could_have_written_is_not_loaded(compiler, tmp_path, monkeypatch):
    path = build("avx2", tmp_path)
    for target, mode in ((path, 0o664), (path, 0o646), (tmp_path, 0o770), (tmp_path, 0o707)):
        before = target.stat().st_mode
        target.chmod(mode)
        with pytest.raises(NoLibraryError, match=f"others can write to {target}"):
            build("avx2", tmp_path)
        target.chmod(before)
    assert build("avx2", tmp_path) == path
    if os.geteuid() == 0:
        os.chown(path, 4711, -1)
        with pytest.raises(NoLibraryError, match="belongs to user 4711"):
            build("avx2", tmp_path)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: 4711)
        with pytest.raises(NoLibraryError, match="belongs to user"):
            build("avx2", tmp_path)


def test_a_wide_umask_and_a_planted_lock_do_no_harm(compiler, tmp_path):
    before = os.umask(0)
    try:
        path = build("avx2", tmp_path / "kernels")
    finally:
        os.umask(before)
    assert build("avx2", tmp_path / "kernels") == path
    victim = tmp_path / "victim"
    victim.write_text("precious")
    path.unlink()
    (path.parent / "lock").unlink()
    (path.parent / "lock").symlink_to(victim)
    with pytest.raises(NoLibraryError, match="cannot write CPU kernels"):
        build("avx2", tmp_path / "kernels")
    assert victim.read_text() == "precious"


def test_leftovers_and_files_that_nobody_uses_go_with_the_next_compilation(compiler, tmp_path):
    (tmp_path / "partial-1").mkdir()
    (tmp_path / "partial-1" / "linear.o").touch()
    old, fresh, used = build("avx2", tmp_path), build("avx512", tmp_path), build("portable", tmp_path)
    long_ago = time.time() - 61 * 86_400
    os.utime(old, (long_ago, long_ago))
    os.utime(used, (long_ago, long_ago))
    build("portable", tmp_path)  # now it has been used
    newest = build("avx2", tmp_path, options=("-g",))
    assert {path.name for path in tmp_path.glob("cpu-*")} == {fresh.name, used.name, newest.name}
    assert not list(tmp_path.glob("partial-*"))


def test_a_folder_that_cannot_be_written_is_named(compiler):
    with pytest.raises(NoLibraryError, match="/dev/null/kernels"):
        build("avx2", Path("/dev/null/kernels"))


def test_without_a_home_there_is_a_reason_and_no_error(compiler, monkeypatch):
    for name in ("ENGINE_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)

    def no_home() -> Path:
        raise RuntimeError

    monkeypatch.setattr(Path, "home", no_home)
    with pytest.raises(NoLibraryError, match="set ENGINE_CACHE_DIR"):
        build("avx2")
