"""Numbers with their nouns."""

from __future__ import annotations

import pytest

from engine.runtime.text import counted


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((0, "request"), "0 requests"),
        ((1, "request"), "1 request"),
        ((2, "request"), "2 requests"),
        ((1, "pass", "passes"), "1 pass"),
        ((3, "pass", "passes"), "3 passes"),
        (("auto", "thread"), "auto threads"),
    ],
)
def test_the_noun_has_the_form_of_its_number(arguments, text):
    assert counted(*arguments) == text


def test_thousands():
    assert counted(1024, "page", commas=True) == "1,024 pages"
    assert counted(1, "page", commas=True) == "1 page"
