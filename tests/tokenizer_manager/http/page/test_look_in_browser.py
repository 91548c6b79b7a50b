"""`/` and `/docs` in a real browser: keyboard, landmarks, widths, contrast, motion, live figures."""

from __future__ import annotations

import re

import pytest

from engine.runtime.messages import LiveRequest, RequestList
from engine.runtime.scheduler_report import SchedulerReport
from tests.browser import Tab
from tests.tokenizer_manager.fake_engine import row, say_all

from .chat_page import ANSWERED

pytestmark = pytest.mark.slow

DARK = {"prefers-color-scheme": "dark"}
CHAT = "A line of text that is long enough to be broken.\n\n```\n" + "x" * 300 + "\n```\n\n" + "y" * 200
LONG_TABLE = "\n\n| a | b |\n|---|---|\n| " + "word " * 40 + "| " + "z" * 90 + " |\n"
CONTRAST = """
(() => {
  const parse = (text) => { const [r, g, b, a = 1] = text.match(/[\\d.]+/g).map(Number); return { r, g, b, a }; };
  const part = (value) => { const v = value / 255; return v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4; };
  const light = ({ r, g, b }) => 0.2126 * part(r) + 0.7152 * part(g) + 0.0722 * part(b);
  const behind = (node) => {
    for (let each = node; each; each = each.parentElement) {
      const color = parse(getComputedStyle(each).backgroundColor);
      if (color.a > 0) return color;
    }
    return parse("rgb(255, 255, 255)");
  };
  const low = [];
  const nodes = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  let checked = 0;
  while (nodes.nextNode()) {
    const node = nodes.currentNode.parentElement;
    if (!nodes.currentNode.data.trim() || !node.checkVisibility({ visibilityProperty: true })) continue;
    if (["SCRIPT", "STYLE", "NOSCRIPT", "OPTION"].includes(node.tagName)) continue;
    const [a, b] = [light(parse(getComputedStyle(node).color)), light(behind(node))].sort((x, y) => y - x);
    checked++;
    const about = `${node.tagName}.${node.className}: ${nodes.currentNode.data.slice(0, 30)}`;
    if ((a + 0.05) / (b + 0.05) < 4.5) low.push(about);
  }
  return { checked, low };
})()
"""


def overflow(tab: Tab) -> list[str]:
    """The elements that make the page wider than its window."""
    found: list[str] = tab.run(
        "document.documentElement.scrollWidth <= innerWidth ? [] : [...document.querySelectorAll('body *')]"
        ".filter((each) => each.getBoundingClientRect().right > innerWidth + 1)"
        ".map((each) => each.tagName + '.' + each.className)"
    )
    return found


def answer(tab: Tab) -> None:
    tab.click("#question")
    tab.type("Hi")
    tab.press("Enter")
    tab.wait(ANSWERED)


# ---------------------------------------------------------------- the chat


def focused(tab: Tab) -> str:
    return str(
        tab.run(
            "document.activeElement.id || document.activeElement.innerText || document.activeElement.ariaLabel "
            "|| document.activeElement.tagName"
        )
    )


BUTTONS = {
    *(
        "open-history",
        "theme",
        "open-settings",
        "open-live",
        "API",
        "new",
        "search",
        "Hi",
        "import",
        "export",
    ),
    *("Copy your message", "Edit your message", "Copy the answer", "Regenerate the answer", "attach", "send"),
}


def test_everything_can_be_done_with_the_keyboard_alone(open_page):
    tab, served = open_page(say_all("Hello."))
    assert focused(tab) == "question"
    tab.type("Hi")
    tab.press("Enter", shift=True)
    tab.type("there")
    assert tab.run("document.activeElement.value") == "Hi\nthere"
    tab.press("Enter")
    tab.wait("document.querySelector('.assistant .figures')")
    assert focused(tab) == "question"
    served.engine.next_request()

    reached = []
    for _ in range(30):
        tab.press("Tab")
        reached.append(focused(tab))
    assert set(reached) >= BUTTONS

    while focused(tab) != "open-settings":
        tab.press("Tab")
    tab.press("Enter")
    assert tab.run("document.activeElement.getAttribute('aria-expanded')") == "true"
    assert not tab.run("document.querySelector('#settings').hidden")
    tab.press("Escape")
    assert tab.run("document.querySelector('#settings').hidden")
    assert focused(tab) == "open-settings"

    while focused(tab) != "Regenerate the answer":
        tab.press("Tab")
    tab.press(" ")
    assert served.engine.next_request()


def test_each_control_has_a_name_and_a_visible_focus(open_page):
    tab, _ = open_page(say_all("Hello.\n\n```\ncode\n```"))
    answer(tab)
    for opener in ("#open-settings", "#open-live"):
        tab.click(opener)
        nameless = tab.run(
            "[...document.querySelectorAll('button, a, input, select, textarea')]"
            ".filter((each) => each.checkVisibility())"
            ".filter((each) => !(each.innerText || each.getAttribute('aria-label') || each.labels?.length))"
            ".map((each) => each.outerHTML)"
        )
        assert nameless == []
    tab.press("Tab")
    assert tab.run("getComputedStyle(document.activeElement).outlineStyle") == "solid"


def test_landmarks_and_live_regions_are_there(open_page):
    tab, _ = open_page()
    for selector in (
        "header",
        "main",
        "nav[aria-label]",
        "h1",
        "[role=log][aria-live=polite]",
        "[role=status]",
    ):
        assert tab.run(f"document.querySelectorAll('{selector}').length") >= 1, selector
    assert tab.run("document.documentElement.lang") == "en"
    tab.click("#open-live")
    assert tab.run("document.querySelector('aside:not([hidden])').getAttribute('aria-label')")


@pytest.mark.parametrize("width", [320, 400, 700, 1280])
@pytest.mark.parametrize("panel", [None, "#open-settings", "#open-live"])
def test_no_width_scrolls_sideways(open_page, width, panel):
    tab, _ = open_page(say_all(CHAT + LONG_TABLE), size=(width, 760))
    answer(tab)
    assert overflow(tab) == []
    if panel is not None:
        tab.click(panel)
        tab.wait("document.querySelector('aside:not([hidden]) h2')")
        assert overflow(tab) == []
        assert tab.run("document.querySelector('aside:not([hidden])').getBoundingClientRect().width") <= width


@pytest.mark.parametrize("features", [{}, DARK])
@pytest.mark.parametrize("panel", ["#open-settings", "#open-live"])
def test_text_has_enough_contrast(open_page, features, panel):
    tab, _ = open_page(say_all("Hello [there](https://example.org) `code`.\n\n> quoted"), features=features)
    answer(tab)
    tab.click(panel)
    tab.wait("document.querySelector('aside:not([hidden]) h2')")
    found = tab.run(CONTRAST)
    assert found["checked"] > 20
    assert found["low"] == []
    dark = tab.run("getComputedStyle(document.body).backgroundColor") == "rgb(20, 22, 24)"
    assert dark is bool(features)


def test_errors_have_enough_contrast(open_page):
    tab, _ = open_page(features=DARK, api_key=("k",))
    tab.wait("document.querySelector('#keys').open")
    assert tab.run(CONTRAST)["low"] == []


def test_nothing_moves_for_who_asks_for_less_motion(open_page):
    for wanted, moves in (("reduce", False), ("no-preference", True)):
        tab, served = open_page(features={"prefers-reduced-motion": wanted})
        tab.click("#question")
        tab.type("Hi")
        tab.press("Enter")
        served.engine.say(row(served.engine.next_request(), "x", total=1))
        tab.wait("document.querySelector('.arriving .text').innerText")
        names = tab.run(
            "getComputedStyle(document.querySelector('.arriving .text > .plain'), '::after').animationName"
        )
        assert (names != "none") is moves


# ---------------------------------------------------------------- live requests and memory

LIVE = LiveRequest(
    rid="chatcmpl-0123456789abcdef0123-0",
    phase="decode",
    prompt_len=12,
    cached_tokens=0,
    output_len=4,
    max_new_tokens=100,
    age_s=1.5,
)


def test_live_requests_and_memory_are_shown(open_page):
    tab, served = open_page()
    report = {
        "sent_s": 1001.0,
        "num_running_reqs": 1,
        "kv_total_tokens": 1000,
        "kv_used_tokens": 250,
        "kv_cached_tokens": 250,
    }
    served.engine.tell(SchedulerReport.from_flat(report))
    served.engine.live = RequestList([LIVE], 1)
    tab.click("#open-live")
    tab.wait("document.querySelector('#live tbody tr')")
    text = tab.text("#live")
    assert "requests 25 %" in text
    assert "prefix cache 25 %" in text
    assert "free 50 %" in text
    assert re.search(r"running\s+1 of 8", text)
    assert "chatcmp…123-0" in text
    assert "4/100" in text
    assert tab.run("document.querySelector('.bar').getAttribute('aria-label')").startswith(
        "KV memory: requests 25 %"
    )
    width = tab.run(
        "document.querySelector('.bar .used').offsetWidth / document.querySelector('.bar').clientWidth"
    )
    assert width == pytest.approx(0.25, abs=0.02)

    report |= {"sent_s": 1003.0, "generation_tokens_total": 84, "num_steps_total": 10}
    served.engine.tell(SchedulerReport.from_flat(report))
    tab.wait("/42 tok\\/s/.test(document.querySelector('#live').innerText)")


def test_the_admin_key_is_asked_for_where_one_is_set(open_page):
    tab, served = open_page(admin_api_key="sk-admin")
    served.engine.live = RequestList([LIVE], 1)
    tab.click("#open-live")
    tab.wait("document.querySelector('#live .note')")
    assert "the admin key" in tab.text("#live .note")
    assert "running" in tab.text("#live")  # what needs no key is shown
    tab.click("#live div > button:not(.quiet)")
    tab.wait("document.querySelector('#keys').open")
    assert tab.text("#keys-title") == "Admin key"
    tab.type("sk-admin")
    tab.press("Enter")
    tab.wait("document.querySelector('#live tbody tr')")
    assert tab.run("sessionStorage.getItem('engine.admin-key')") == "sk-admin"
    assert tab.run("localStorage.length") == 0


def test_nothing_is_asked_while_the_panel_is_closed(open_page):
    tab, _ = open_page()
    assert not [url for url in tab.urls if "server_info" in url or "v1/requests" in url]


# ---------------------------------------------------------------- the reference


@pytest.mark.parametrize("features", [{}, DARK])
def test_the_reference_is_readable(open_page, features):
    tab, served = open_page(path="/docs", features=features)
    found = tab.run(CONTRAST)
    assert found["checked"] > 500
    assert found["low"] == []
    assert (
        tab.run("getComputedStyle(document.querySelector('nav')).position") == "sticky"
    )  # its style is applied
    assert f"curl -N {served.url}/v1/chat/completions" in tab.text("main")
    assert tab.run("document.scripts.length") == 0


@pytest.mark.parametrize("width", [320, 400, 1280])
def test_the_reference_does_not_scroll_sideways(open_page, width):
    tab, _ = open_page(path="/docs", size=(width, 760))
    assert overflow(tab) == []


def test_the_contents_lead_to_each_endpoint_with_the_keyboard(open_page):
    tab, _ = open_page(path="/docs")
    broken = tab.run(
        "[...document.querySelectorAll('nav li a')].map((each) => each.getAttribute('href'))"
        ".filter((target) => !document.querySelector(target))"
    )
    assert broken == []
    tab.run("document.querySelector('nav a[href=\"#post-generate\"]').focus()")
    tab.press("Enter")
    tab.wait("Math.abs(document.querySelector('#post-generate').getBoundingClientRect().top) < 200")


def test_the_page_and_the_reference_lead_to_each_other(open_page):
    tab, served = open_page()
    tab.click("header nav a")
    tab.wait("location.pathname === '/docs' && document.querySelector('nav p a')")
    tab.click("nav p a")
    tab.wait("location.pathname === '/' && document.documentElement.dataset.ready")
    assert served.engine.generate.empty()
