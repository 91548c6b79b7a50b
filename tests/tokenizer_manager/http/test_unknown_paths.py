"""A path that does not exist: the error says which one was meant."""

from __future__ import annotations

import pytest

from ..conftest import Serve
from .test_bad_input import check_error

DOCS = "/docs lists what there is"


@pytest.mark.parametrize(
    ("path", "hint"),
    [
        ("/chat/completions", "use /v1/chat/completions (a base URL of OpenAI clients ends in /v1)"),
        ("/completions", "use /v1/completions (a base URL of OpenAI clients ends in /v1)"),
        ("/models", "use /v1/models (a base URL of OpenAI clients ends in /v1)"),
        ("/v1/v1/chat/completions", f"did you mean /v1/chat/completions? {DOCS}"),
        ("/v1/chat/completions/", f"did you mean /v1/chat/completions? {DOCS}"),
        ("/v1/chat/completion", f"did you mean /v1/chat/completions? {DOCS}"),
        ("/v1/completion", f"did you mean /v1/completions? {DOCS}"),
        ("/embeddings", "use /v1/embeddings (a base URL of OpenAI clients ends in /v1)"),
        ("/frobnicate", DOCS),
        (
            "/load_lora_adapter_from_tensors",
            "adapters are read from folders: use /v1/load_lora_adapter with lora_path",
        ),
        ("/sleep", "a running server keeps its memory: pause it with /pause_generation, or stop it"),
    ],
)
def test_the_error_names_the_path_that_was_meant(serve: Serve, path: str, hint: str) -> None:
    check_error(serve().client.post(path, json={}), 404, None, f"there is no {path} here; {hint}")
