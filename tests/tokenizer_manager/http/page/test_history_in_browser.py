"""The conversations of the page in a real browser: list, search, rename, undo, branches, tabs, storage."""

from __future__ import annotations

import json

import pytest

from tests.browser import Tab
from tests.tokenizer_manager.fake_engine import row, say_all

from .chat_page import ANSWERED, ask, database, kept, prompt_of, titles

pytestmark = pytest.mark.slow


def begin(tab: Tab, question: str) -> None:
    """A new conversation with one answer."""
    tab.click("#new")
    tab.wait("!document.querySelector('.message')")
    ask(tab, question)
    tab.wait(ANSWERED)


def test_conversations_are_listed_opened_and_found(open_page):
    tab, _ = open_page(say_all("Hello."))
    begin(tab, "About bread")
    begin(tab, "About trains\nand more")
    tab.wait("document.querySelectorAll('#conversations li').length === 2")
    assert titles(tab) == ["About trains", "About bread"]
    assert tab.text("#conversations [aria-current]") == "About trains"

    tab.click("#conversations li:last-child .title")
    tab.wait("document.querySelector('.user .plain').textContent === 'About bread'")
    tab.wait("document.querySelector('#conversations [aria-current]').textContent === 'About bread'")

    tab.click("#search")
    tab.type("AND MORE")
    tab.wait("document.querySelectorAll('#conversations li').length === 1")
    assert titles(tab) == ["About trains"]
    tab.type(" nothing")
    tab.wait("!document.querySelector('#conversations li')")
    assert "No conversation has this text" in tab.text("#history")


def test_a_title_is_changed_and_kept(open_page):
    tab, served = open_page(say_all("Hello."))
    begin(tab, "Old title")
    tab.click("#conversations [aria-label='Rename Old title']")
    tab.type("New title")
    tab.press("Enter")
    tab.wait("document.querySelector('#conversations .title')?.textContent === 'New title'")
    ask(tab, "Go on")
    tab.wait(f"document.querySelectorAll('.assistant').length === 2 && {ANSWERED}")
    tab.go(served.url + "/")
    tab.wait("document.querySelector('#conversations .title')?.textContent === 'New title'")


def test_a_deleted_conversation_comes_back_with_undo(open_page):
    tab, _ = open_page(say_all("Hello."))
    begin(tab, "About bread")
    begin(tab, "About trains")
    before = database(tab)
    tab.click("#conversations [aria-label='Delete About trains']")
    tab.wait(
        "!document.querySelector('#toast').hidden && document.querySelectorAll('#conversations li').length === 1"
    )
    assert "“About trains” was deleted." in tab.text("#toast")
    assert tab.run("document.querySelector('.message')") is None
    assert len(database(tab)["messages"]) == 2
    tab.press("Enter")  # the button Undo has the focus
    tab.wait("document.querySelector('.user .plain')?.textContent === 'About trains'")
    assert sorted(database(tab)["messages"], key=str) == sorted(before["messages"], key=str)


def test_a_new_conversation_during_an_answer_keeps_what_has_arrived(open_page):
    tab, served = open_page()
    ask(tab, "Count")
    request = served.engine.next_request()
    served.engine.say(row(request, "1, 2", total=4))
    tab.wait("document.querySelector('.assistant .text')?.innerText.includes('1, 2')")
    tab.click("#new")
    assert served.engine.next_abort().rid == request.rid
    tab.wait("document.querySelector('#stop').hidden && !document.querySelector('.message')")
    assert [message["content"] for message in kept(tab)] == ["Count", "1, 2"]


def test_an_answer_under_way_is_kept_when_the_page_is_closed(open_page):
    tab, served = open_page()
    ask(tab, "Count")
    request = served.engine.next_request()
    served.engine.say(row(request, "1, 2", total=4))
    tab.wait("document.querySelector('.assistant .text')?.innerText.includes('1, 2')")
    served.engine.say(row(request, ", 3", total=5))  # less than a second after the last write
    tab.wait("document.querySelector('.assistant .text').innerText.includes('3')")
    tab.run("dispatchEvent(new PageTransitionEvent('pagehide'))")
    assert kept(tab)[1]["content"] == "1, 2, 3"
    tab.go(served.url + "/")
    tab.wait("document.querySelector('.assistant .note')")
    assert "Interrupted" in tab.text(".assistant .note")
    assert kept(tab)[1]["content"] == "1, 2, 3"


def test_an_edit_and_a_new_answer_are_branches(open_page):
    tab, served = open_page(say_all("First."))
    ask(tab, "Old question")
    tab.wait(ANSWERED)
    served.engine.next_request()

    served.engine.script = say_all("Second.")
    tab.click(".assistant [aria-label='Regenerate the answer']")
    tab.wait("document.querySelector('.assistant .text')?.innerText === 'Second.'")
    assert prompt_of(served.engine.next_request()).count("<|im_start|>user") == 1
    tab.wait(ANSWERED)
    assert tab.text(".assistant .branches") == "2/2"
    tab.click(".assistant [aria-label='Previous answer']")
    tab.wait("document.querySelector('.assistant .text').innerText === 'First.'")
    assert tab.text(".assistant .branches") == "1/2"

    tab.click(".user [aria-label='Edit your message']")
    assert tab.run("document.activeElement.value") == "Old question"
    tab.run("document.activeElement.select()")
    tab.type("New question")
    tab.click(".edit [type=submit]")
    tab.wait(f"document.querySelectorAll('.message').length === 2 && {ANSWERED}")
    prompt = prompt_of(served.engine.next_request())
    assert "New question" in prompt
    assert "Old question" not in prompt
    assert [message["content"] for message in kept(tab)] == ["New question", "Second."]
    assert tab.text(".user .branches") == "2/2"

    tab.click(".user [aria-label='Previous version']")
    tab.wait("document.querySelector('.user .plain').textContent === 'Old question'")
    assert tab.run("document.querySelectorAll('.assistant .branches').length") == 1
    tab.go(served.url + "/")
    tab.wait("document.querySelector('.user .plain')?.textContent === 'Old question'")


def test_two_tabs_do_not_overwrite_each_other(open_page, browser):
    tab, served = open_page(say_all("Hello."))
    begin(tab, "From the first")
    other = browser.open(served.url + "/", beside=tab)
    other.wait("document.querySelector('#conversations .title')")
    ask(other, "From the second")
    other.wait(ANSWERED)
    tab.wait("document.querySelectorAll('#conversations li').length === 2")
    ask(tab, "More")
    tab.wait(f"document.querySelectorAll('.assistant').length === 2 && {ANSWERED}")
    assert sorted(titles(tab)) == ["From the first", "From the second"]
    contents = sorted(each["content"] for each in database(tab)["messages"] if each["role"] == "user")
    assert contents == ["From the first", "From the second", "More"]

    # both go on with one conversation: two branches
    other.click("#conversations li:first-child .title")
    other.wait("document.querySelectorAll('.assistant').length === 2")
    ask(tab, "Left")
    tab.wait(f"document.querySelectorAll('.assistant').length === 3 && {ANSWERED}")
    ask(other, "Right")
    other.wait(f"document.querySelectorAll('.assistant').length === 3 && {ANSWERED}")
    tab.wait("document.querySelector('.user:nth-child(5) .branches')?.textContent === '1/2'")
    other.close()


def test_a_change_of_one_conversation_does_not_reach_the_next(open_page):
    tab, _ = open_page(say_all("Hello."))
    begin(tab, "About bread")
    tab.run(
        "(() => { const { getAll } = IDBIndex.prototype; IDBIndex.prototype.getAll = function (id) { "
        "const real = getAll.call(this, id), late = {}; IDBIndex.prototype.getAll = getAll; "
        "real.onsuccess = () => { window.release = () => { late.result = real.result; late.onsuccess(); }; }; "
        "return late; }; new BroadcastChannel('engine').postMessage(''); })()"
    )
    tab.wait("window.release !== undefined")  # the page reads what another tab has changed
    tab.click("#new")
    tab.wait("!document.querySelector('.message')")
    tab.run("window.release()")
    ask(tab, "About trains")
    tab.wait(ANSWERED)
    tab.wait("document.querySelectorAll('#conversations li').length === 2")
    assert titles(tab) == ["About trains", "About bread"]
    assert tab.run("document.querySelector('.branches')") is None


def test_a_full_storage_is_said(open_page):
    tab, _ = open_page(say_all("Hello."))
    begin(tab, "Short")
    tab.run(
        "(() => { const { put } = IDBObjectStore.prototype; "
        "window.mend = () => { IDBObjectStore.prototype.put = put; }; "
        "IDBObjectStore.prototype.put = () => { throw new DOMException('full', 'QuotaExceededError'); }; })()"
    )
    ask(tab, "More")
    tab.wait("!document.querySelector('#problem').hidden")
    assert "storage of this browser is full" in tab.text("#problem")
    tab.wait(f"document.querySelectorAll('.assistant').length === 2 && {ANSWERED}")
    assert len(database(tab)["messages"]) == 2
    tab.run("window.mend()")
    ask(tab, "Again")
    tab.wait("document.querySelector('#problem').hidden")
    tab.wait(f"document.querySelectorAll('.assistant').length === 3 && {ANSWERED}")
    assert len(kept(tab)) == 6  # with what could not be kept before


def test_the_conversation_of_an_earlier_version_is_taken_over(open_page):
    tab, served = open_page(say_all("Hello."))
    old = [{"role": "user", "content": "Before"}, {"role": "assistant", "content": "Yes."}]
    tab.run(f"localStorage.setItem('engine.conversation', {json.dumps(json.dumps(old))})")
    tab.go(served.url + "/")
    tab.wait("document.querySelector('.assistant .text')?.innerText === 'Yes.'")
    assert [message["content"] for message in kept(tab)] == ["Before", "Yes."]
    assert tab.run("localStorage.getItem('engine.conversation')") is None


def test_a_new_answer_that_fails_leaves_the_old_one(open_page):
    tab, served = open_page(say_all("First."))
    ask(tab, "Question")
    tab.wait(ANSWERED)
    tab.run("window.real = fetch; window.fetch = () => Promise.reject(new TypeError('gone'))")
    tab.click(".assistant [aria-label='Regenerate the answer']")
    tab.wait("document.querySelector('#messages .error')")
    tab.wait("document.querySelector('.assistant .text')?.innerText === 'First.'")
    tab.run("window.fetch = window.real")
    served.engine.script = say_all("Second.")
    tab.click("#messages .error button")
    tab.wait("document.querySelector('.assistant .text')?.innerText === 'Second.'")
    tab.wait(ANSWERED)
    assert tab.text(".assistant .branches") == "2/2"


def test_without_any_storage_the_page_chats_and_says_that_nothing_is_kept(open_page):
    tab, served = open_page(say_all("Hello."))
    refuse = "{ get() { throw new DOMException('blocked', 'SecurityError'); } }"
    names = ("localStorage", "sessionStorage", "indexedDB")
    script = "".join(f"Object.defineProperty(window, '{name}', {refuse});" for name in names)
    tab.call("Page.addScriptToEvaluateOnNewDocument", source=script + "window.BroadcastChannel = undefined;")
    tab.go(served.url + "/")
    tab.wait("document.documentElement.dataset.ready")
    assert "does not keep conversations" in tab.text("#problem")
    ask(tab, "Hi")
    tab.wait(ANSWERED)
    assert tab.text(".assistant .text") == "Hello."
    tab.click("#theme")
    tab.click("#new")
    tab.wait("!document.querySelector('.message')")
