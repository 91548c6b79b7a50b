"""`/tokenize`: the warnings of what the tokens do not hold."""

from __future__ import annotations

import pytest

from tests.tokenizer_manager.conftest import Serve


def test_characters_that_the_vocabulary_lacks_are_named(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = serve()
    prompt = {"prompt": "a\u0001b"}
    assert "warnings" not in served.client.post("/tokenize", json=prompt).json()

    tokenizer = served.services.encoder.tokenizer
    monkeypatch.setattr(tokenizer._token_bytes, "without_token", b"\x01")
    monkeypatch.setattr(tokenizer, "token_bytes", lambda token_id: b"")

    for text in ("a\u0001b", "\u0001" * 5000):
        body = served.client.post("/tokenize", json={"prompt": text}).json()
        assert body["warnings"] == [
            "the model's vocabulary has no token for these characters, they are left out: "
            f"U+0001 ({text.count(chr(1))} times)"
        ]
