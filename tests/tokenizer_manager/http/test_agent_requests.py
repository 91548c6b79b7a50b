"""The requests that Codex and Claude Code have sent, to the HTTP side of a fake engine."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from msgspec.structs import replace

from tests.e2e.clients.test_agent_requests import CLAUDE, CODEX, check_claude, check_codex

from ..conftest import Serve
from ..fake_engine import CAPACITY, say_all


@pytest.mark.parametrize(
    ("check", "name"),
    [(check_codex, name) for name in CODEX] + [(check_claude, name) for name in CLAUDE],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_every_request_is_answered_as_the_agent_reads_it(serve: Serve, check: Callable[..., None], name: str):
    script = say_all('{"files": ["a ', 'note"]}')  # matches the schema that one of them has
    capacity = replace(CAPACITY, max_model_len=65536, num_pages=16384)
    served = serve(script, capacity=capacity, model={"served_model_name": "*"})

    check(served, name)
