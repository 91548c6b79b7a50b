"""A hub on loopback, used by this process, with caches of the test's own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants

from tests.fake_hub import FakeHub


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    """huggingface_hub reads its variables when it is imported; here its constants are set."""
    with FakeHub() as fake:
        home = tmp_path / "hf"
        monkeypatch.setattr(constants, "ENDPOINT", fake.url)
        template = f"{fake.url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(home / "hub"))
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(home / "token"))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setenv("ENGINE_CACHE_DIR", str(tmp_path / "cache"))
        for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
            monkeypatch.delenv(name, raising=False)
        yield fake


@pytest.fixture
def hub_folder(tmp_path: Path) -> Path:
    """The folder of all models of `hub`."""
    return tmp_path / "hf" / "hub"
