"""Pages of a server whose engine the test scripts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest

from tests.browser import Browser, Tab
from tests.tokenizer_manager.conftest import Serve, Served
from tests.tokenizer_manager.fake_engine import Script
from tests.tokenizer_manager.http.serving import ROOMY


class Opened(NamedTuple):
    """A page and its server."""

    tab: Tab
    served: Served


@pytest.fixture
def open_page(serve: Serve, browser: Browser) -> Iterator[Callable[..., Opened]]:
    """Opens `/`; at the end nothing may have been asked elsewhere, and no script may have failed."""
    opened: list[Opened] = []

    def start(
        script: Script | None = None,
        *,
        size: tuple[int, int] = (1280, 800),
        features: dict[str, str] | None = None,
        path: str = "/",
        **settings: Any,
    ) -> Opened:
        served = serve(script, **{"capacity": ROOMY, **settings})
        tab = browser.open(served.url + path, size=size, features=features)
        if path == "/" and not settings.get("api_key"):
            tab.wait("document.documentElement.dataset.ready")
        opened.append(Opened(tab, served))
        return opened[-1]

    yield start
    for tab, _ in opened:
        tab.run("0")  # events that came meanwhile
        tab.close()  # else it would ask its server for the live requests until the last test
    for tab, served in opened:
        elsewhere = [url for url in tab.urls if not url.startswith((f"{served.url}/", "about:", "blob:"))]
        assert elsewhere == []
        # Answers of 4xx and 5xx are logged by the browser itself; tests look at what the page makes of them.
        assert [problem for problem in tab.problems if not problem.startswith("network:")] == []
