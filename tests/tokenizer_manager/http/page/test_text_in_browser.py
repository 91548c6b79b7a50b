"""Answers in a real browser: the server renders their Markdown, code and math, and the page shows what it made."""

from __future__ import annotations

import re

import pytest

from engine.tokenizer_manager.rendering import worker
from tests.browser import Tab
from tests.tokenizer_manager.fake_engine import STOP, row, say_all

from .chat_page import ANSWERED, ask, choose

pytestmark = pytest.mark.slow

MARKDOWN = r"""# Title

One *em*, **strong**, ~~gone~~, `co*de`, snake_case_name, 2 * 3 * 4 and https://example.org/a_b.
A second line.[^1]

1. one
2. two
   - inner

   more
3. three

- [x] done
- [ ] open

> quoted
> on

| a | b |
|--:|:-:|
| 1 | `x` |

```python
def f(x):
    return x * 2
```

Text before \( a^2 \) and $b$, which cost $5 and $6:
\[
\int_0^1 x
+ c
\]

---
Last [link](https://example.org/x_(y) "title")

[^1]: The note.
"""


def texts(tab: Tab, selector: str) -> list[str]:
    found: list[str] = tab.run(
        f"[...document.querySelectorAll('.assistant .text {selector}')].map((each) => each.textContent)"
    )
    return found


def test_markdown_becomes_elements(open_page):
    tab, _ = open_page(say_all(MARKDOWN))
    ask(tab, "Hi")
    tab.wait(ANSWERED)

    assert texts(tab, "h3") == ["Title"]
    assert [texts(tab, tag) for tag in ("em", "strong", "s")] == [["em"], ["strong"], ["gone"]]
    assert texts(tab, "p code") == ["co*de"]
    assert "snake_case_name, 2 * 3 * 4" in texts(tab, "p")[0]
    assert texts(tab, "a") == ["https://example.org/a_b", "link"]
    assert [re.findall("one|two|three", text)[0] for text in texts(tab, "ol:not([class]) > li")] == [
        *("one", "two", "three"),
    ]
    assert texts(tab, "ol ul li") == ["inner"]
    assert texts(tab, "blockquote p") == ["quotedon"]
    assert (texts(tab, "th"), texts(tab, "td")) == (["a", "b"], ["1", "x"])
    assert texts(tab, "pre code") == ["def f(x):\n    return x * 2"]
    assert len(texts(tab, "hr")) == 1
    assert len(texts(tab, "br")) == 2  # single newlines are kept
    assert (texts(tab, "sup"), texts(tab, ".footnotes li")) == (["1"], ["The note."])
    assert tab.run("[...document.querySelectorAll('.task input')].map((each) => each.checked)") == [
        True,
        False,
    ]
    aligned = "[...document.querySelectorAll('td')].map((each) => getComputedStyle(each).textAlign)"
    assert tab.run(aligned) == ["right", "center"]
    plain = "getComputedStyle(document.querySelector('.code code')).color"
    assert tab.run(f"getComputedStyle(document.querySelector('.code .k')).color !== {plain}")


def test_math_in_all_four_forms_becomes_mathml(open_page):
    tab, _ = open_page(say_all(MARKDOWN + "\n$$\\sqrt{2}$$\n\n$\\frac{$ is no math."))
    ask(tab, "Hi")
    tab.wait(ANSWERED)
    assert texts(tab, "math[display=inline]") == ["a2", "b"]
    assert texts(tab, "math[display=block]") == ["∫01x+c", "2"]
    assert tab.run("document.querySelector('math msqrt').getBoundingClientRect().height") > 5
    assert "which cost $5 and $6:" in tab.text(".assistant .text")
    assert texts(tab, "p code")[-1] == "$\\frac{$"  # as it came


def test_an_answer_in_pieces_becomes_the_same_as_in_one(open_page):
    pieces = [MARKDOWN[i : i + 7] for i in range(0, len(MARKDOWN), 7)]
    tab, served = open_page()
    ask(tab, "Hi")
    request = served.engine.next_request()
    for number, piece in enumerate(pieces, 1):
        served.engine.say(row(request, piece, total=number, finish=STOP if number == len(pieces) else None))
    tab.wait(ANSWERED)
    in_pieces = tab.run("document.querySelector('.assistant .text').innerHTML")
    served.engine.script = say_all(MARKDOWN)
    tab.click(".assistant [aria-label='Regenerate the answer']")
    served.engine.next_request()
    tab.wait(ANSWERED)
    assert tab.run("document.querySelector('.assistant .text').innerHTML") == in_pieces


def test_a_block_that_grows_is_text_and_finished_ones_are_rendered(open_page):
    tab, served = open_page()
    ask(tab, "Hi")
    request = served.engine.next_request()
    served.engine.say(row(request, "A **word**.\n\nThe next **wo", total=1))
    tab.wait("document.querySelector('.arriving .blocks strong')")
    assert tab.text(".arriving .text > .plain") == "The next **wo"
    served.engine.say(row(request, "rd**.\n\n", total=2), row(request, "End", total=3))
    tab.wait("document.querySelectorAll('.arriving .blocks strong').length === 2")
    assert tab.text(".arriving .text > .plain") == "End"


def test_blocks_that_arrive_after_the_whole_text_are_dropped(open_page):
    tab, served = open_page()
    tab.run(
        "(() => { const real = fetch; window.fetch = (url, options) => { "
        "if (!String(url).endsWith('page/render') || window.release) return real(url, options); "
        "return new Promise((answer) => { window.release = async () => { "
        "const body = await (await real(url, options)).json(); answer({ ok: true, json: async () => body }); "
        "await new Promise(requestAnimationFrame); return body.blocks.length; }; }); }; })()"
    )
    ask(tab, "Hi")
    request = served.engine.next_request()
    served.engine.say(row(request, "One.\n\nTwo", total=1))
    tab.wait("window.release !== undefined")
    served.engine.say(row(request, ".", total=2, finish=STOP))
    tab.wait(ANSWERED)
    assert tab.run("window.release()") == 1
    assert tab.text(".assistant .text").split() == ["One.", "Two."]


def test_a_json_answer_is_not_rendered_anew_with_each_piece(open_page):
    tab, served = open_page()
    choose(tab, "form", "json")
    ask(tab, "Hi")
    request = served.engine.next_request()
    pieces = ['{"a": [0', *(f", {number}" for number in range(1, 9)), "]}"]
    for number, piece in enumerate(pieces, 1):
        served.engine.say(row(request, piece, total=number, finish=STOP if piece == "]}" else None))
        tab.wait(f"document.querySelector('.assistant .text')?.innerText.includes({piece!r})")
    tab.wait(ANSWERED)
    assert tab.text(".assistant .text pre") == "".join(pieces)
    assert 1 <= sum(url.endswith("/page/render") for url in tab.urls) <= 3


def test_a_text_beyond_the_limit_of_the_renderer_stays_text(open_page, monkeypatch):
    monkeypatch.setattr(worker, "CPU_LIMIT_S", 0.2)
    hard = "\\[" * 60_000  # the parser would take minutes
    tab, _ = open_page(say_all(hard + " x"))
    ask(tab, "Hi")
    tab.wait(ANSWERED)
    assert tab.text(".assistant .text").endswith("\\[ x")


def test_a_wide_table_scrolls_on_a_narrow_screen_and_its_words_stay_whole(open_page):
    head, line = "|" + "Name of it|" * 8, "|" + "---|" * 8
    tab, _ = open_page(say_all(f"{head}\n{line}\n|" + "Value|" * 8), size=(400, 760))
    ask(tab, "Hi")
    tab.wait(ANSWERED)
    assert tab.run(
        "(() => { const box = document.querySelector('.text .wide'); return box.scrollWidth > box.clientWidth; })()"
    )
    assert tab.run("document.querySelector('td').offsetHeight") < 40


@pytest.mark.parametrize(
    "evil",
    [
        "<script>document.documentElement.dataset.owned=1</script>",
        "<img src=x onerror=document.documentElement.dataset.owned=1>",
        "[x](javascript:document.documentElement.dataset.owned=1)",
        "![x](http://evil.example/x.png) ![y](data:image/png;base64,AAAA)",
        "`<b onclick=1>`\n\n```html\n<iframe src=//evil.example></iframe>\n```",
        "| <svg onload=1> | b |\n|---|---|\n| <style>*{}</style> | c |",
        "<a href='javascript:1'>x</a> <https://evil.example/\"onmouseover=1>",
        r"$\href{javascript:alert(1)}{x}$ $<script>$ $\text{<img src=x>}$ \( \style{color:red}{y} \)",
        "[^1]\n\n[^1]: <script>1</script>",
        "**" * 3000 + "_" * 3000 + "[" * 3000 + "> " * 3000 + "`" * 3001,
    ],
)
def test_hostile_text_stays_text(open_page, evil):
    tab, _ = open_page(say_all(evil))
    ask(tab, "Hi")
    tab.wait(ANSWERED)
    assert tab.run("document.documentElement.dataset.owned") is None
    made = tab.run("[...document.querySelectorAll('.text *')].map((each) => each.localName)")
    assert not {"script", "img", "iframe", "style", "b", "maction"} & set(made)
    assert made.count("svg") == made.count("button")  # icons of buttons alone
    assert tab.run("[...document.querySelectorAll('.text a')].every((each) => /^https?:/.test(each.href))")
    assert not tab.run(
        "[...document.querySelectorAll('.text *')].some((e) => [...e.attributes].some("
        "(a) => /^(on|style$|src|xlink)/.test(a.name) || (a.name === 'href' && e.localName !== 'a')))"
    )
