from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from engine.runtime.errors import ConfigError
from engine.runtime.transport.cluster_ipc import HOW_TO_MAKE_ONE, derive_key, key_in_memory, load_cluster_key

SECRET = "0123456789abcdef" * 4


def write(path: Path, text: str, mode: int = 0o600) -> str:
    path.write_text(text)
    path.chmod(mode)
    return str(path)


def test_the_same_text_gives_the_same_pair_and_another_text_another(tmp_path):
    key = load_cluster_key(write(tmp_path / "a", SECRET))

    assert key == load_cluster_key(write(tmp_path / "b", f"{SECRET}\n"))
    assert key != load_cluster_key(write(tmp_path / "c", SECRET[:-1] + "0"))
    assert (len(key.public), len(key.secret)) == (40, 40)
    assert SECRET not in repr(key) and key.secret.decode() not in repr(key)


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o644])
def test_a_file_that_others_may_read_is_refused(tmp_path, mode):
    with pytest.raises(ConfigError, match=rf"may be read by others \(mode {mode:o}\); chmod 600 "):
        load_cluster_key(write(tmp_path / "key", SECRET, mode))


def test_what_is_no_secret_is_refused_with_the_line_that_makes_one(tmp_path):
    how = re.escape(HOW_TO_MAKE_ONE)
    with pytest.raises(ConfigError, match=rf"holds 7 characters, .*{how}"):
        load_cluster_key(write(tmp_path / "short", " secrets\n"))
    with pytest.raises(ConfigError, match=rf"cannot be read: No such file or directory; .*{how}"):
        load_cluster_key(str(tmp_path / "absent"))
    with pytest.raises(ConfigError, match=rf"make one with {how}, copy it to each machine"):
        load_cluster_key(None)


def test_the_derived_key_does_not_change_between_releases():
    assert derive_key(b"x" * 32).public == b".MEP5v95llA.oR}X{2nR@mNR/}>uGu:0(!J+p2X("


def test_a_key_in_memory_is_read_like_a_file_by_children_too_and_then_gone():
    with key_in_memory(SECRET.encode()) as path:
        assert load_cluster_key(path) == derive_key(SECRET.encode())
        assert load_cluster_key(path) == derive_key(SECRET.encode())  # from its beginning again
        child = subprocess.run(["cat", path], check=True, capture_output=True, text=True)
        assert child.stdout == SECRET
    assert not Path(path).exists()
