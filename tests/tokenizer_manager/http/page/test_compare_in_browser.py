"""The page at `/` of a model that makes vectors or scores: it compares texts, and does not offer a chat."""

from __future__ import annotations

import pytest

from engine.models.spec.encoder_spec import PoolingSpec
from engine.runtime.messages import GenerateRequest
from tests.tokenizer_manager.fake_engine import ids_of, say_vectors

EMBEDDER = PoolingSpec(task="embed", pooling="last", size=2, normalize=True)
RERANKER = PoolingSpec(task="score", pooling="cls", size=1)
FIRST = "document.querySelector('#first-text').value = 'abc'; document.querySelector('#other-texts').value = "


def direction(request: GenerateRequest) -> list[float]:
    """Texts of an odd length point one way, others the other way."""
    return [1.0, 0.0] if len(ids_of(request)) % 2 else [0.6, 0.8]


def test_texts_are_compared_by_their_vectors(open_page):
    tab, _ = open_page(say_vectors(direction), pooling=EMBEDDER)
    assert tab.text("#facts").startswith("vectors of 2 numbers")
    assert tab.run("document.querySelector('#composer')") is None
    assert tab.run("document.querySelector('#open-settings').hidden") is True
    tab.run(FIRST + "'ab\\n\\nabc'")

    tab.click("#compare")

    tab.wait("document.querySelector('#compare-result table')")
    rows = tab.run(
        "[...document.querySelectorAll('#compare-result tbody tr')].map((row) => row.innerText.split('\\t'))"
    )
    assert [[row[0], row[-1]] for row in rows] == [["1.000", "abc"], ["0.600", "ab"]]
    assert "3 texts in" in tab.text("#compare-status")


@pytest.mark.slow
def test_the_live_panel_counts_texts_and_no_output(open_page):
    tab, _ = open_page(say_vectors(direction), pooling=EMBEDDER)
    tab.click("#open-live")
    tab.wait("document.querySelector('#live').innerText.includes('texts')")
    assert "output" not in tab.text("#live .figures-list")


@pytest.mark.slow
def test_documents_are_scored(open_page):
    tab, _ = open_page(say_vectors(lambda request: [float(len(ids_of(request)))]), pooling=RERANKER)
    assert "relevant" in tab.text(".compare .note")
    tab.run(FIRST + "'a\\nabcdef'")

    tab.click("#compare")

    tab.wait("document.querySelector('#compare-result table')")
    cells = (
        "[...document.querySelectorAll('#compare-result tbody td:last-child')].map((cell) => cell.innerText)"
    )
    assert tab.run(cells) == ["abcdef", "a"]


def test_an_error_of_the_server_is_shown(open_page):
    tab, _ = open_page(say_vectors(direction), pooling=EMBEDDER)
    tab.run(FIRST + "'x'.repeat(100000)")

    tab.click("#compare")

    tab.wait("document.querySelector('#compare-result .error')")
    assert "input[1]" in tab.text("#compare-result .error")


@pytest.mark.slow
@pytest.mark.parametrize("other", ["", "  "])
def test_both_fields_need_a_text(open_page, other):
    tab, _ = open_page(say_vectors(direction), pooling=EMBEDDER)
    tab.run(FIRST + f"'{other}'")
    tab.run("document.querySelector('.compare').noValidate = true")

    tab.click("#compare")

    assert "need a text" in tab.text("#compare-status")
