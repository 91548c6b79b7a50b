"""The chat at `/` in a real browser answers a question; `test_chat_in_browser.py` has all else that it does."""

from __future__ import annotations

from tests.tokenizer_manager.fake_engine import STOP, row

from .chat_page import ANSWERED, ask, kept, prompt_of


def test_an_answer_is_shown_while_it_arrives_and_ends_with_its_figures(open_page):
    tab, served = open_page()
    ask(tab, "How are you?")
    request = served.engine.next_request()
    assert "user\nHow are you?" in prompt_of(request)

    served.engine.say(row(request, "Very **we", total=2, cached=16))
    tab.wait("document.querySelector('.assistant .text')?.innerText.includes('Very')")
    assert tab.run("document.querySelector('#messages').getAttribute('aria-busy')") == "true"
    assert tab.text("#status") == "The model answers…"
    assert tab.run("!document.querySelector('#stop').hidden && document.querySelector('#send').hidden")
    shown_ms = tab.run("performance.now()")
    tab.wait(f"performance.now() > {shown_ms} + 25")  # an answer of less than 20 ms has no rate
    served.engine.say(row(request, "ll**.", total=4, cached=16, finish=STOP))
    tab.wait(ANSWERED)

    assert tab.text(".assistant .text") == "Very well."
    assert tab.run("document.querySelector('.assistant strong').textContent") == "well"
    figures = tab.text(".assistant .figures").split(" · ")
    assert [figures[0][:12], figures[1][-5:], *figures[2:]] == [
        *("first token ", "tok/s", "31 in (16 cached)", "4 out", "context 35/8,192"),
    ]
    assert tab.run("document.querySelector('#messages').getAttribute('aria-busy')") == "false"
    assert tab.text("#status") == "The answer is complete."
    assert kept(tab)[1]["content"] == "Very **well**."
