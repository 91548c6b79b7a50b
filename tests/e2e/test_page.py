"""The page at `/` against a server's real processes: an answer with its figures, and the live panel."""

from __future__ import annotations

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.real_process]


def test_a_question_is_answered_and_the_memory_shown(browser, serve):
    tab = browser.open(serve.url + "/")
    tab.wait("document.documentElement.dataset.ready")
    assert tab.run("document.querySelector('#model').title") == serve.model
    tab.click("#open-settings")
    tab.click("#set-max_tokens")
    tab.type("5")
    tab.click("#question")
    tab.type("x")
    tab.press("Enter")
    tab.wait("document.querySelector('.assistant .figures')")
    assert "5 out" in tab.text(".assistant .figures")
    assert "Longest answer" in tab.text(".assistant .note")
    tab.click("#open-live")
    tab.wait("/free \\d+ %/.test(document.querySelector('#live').innerText)")
    tab.wait("document.querySelector('#live').innerText.includes('No request is live')")
    assert tab.problems == []
    tab.close()
